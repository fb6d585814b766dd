// Which Python class stands for which `Error`.
#pragma once

#include <Python.h>

#include "errors.h"

namespace simulated {

void set_error_class(Error error, PyObject* type);

}  // namespace simulated
