#include "errors.h"

#include <torch/csrc/Exceptions.h>

#include <map>

#include "python_errors.h"

namespace simulated {

namespace {
std::map<Error, PyObject*>& classes() {
  static auto* made = new std::map<Error, PyObject*>();
  return *made;
}
}  // namespace

void set_error_class(Error error, PyObject* type) {
  Py_INCREF(type);
  classes()[error] = type;
}

void fail(Error error, const std::string& sentence) {
  pybind11::gil_scoped_acquire gil;
  auto found = classes().find(error);
  PyErr_SetString(found == classes().end() ? PyExc_RuntimeError : found->second, sentence.c_str());
  python_error python;
  python.persist();
  throw python;
}

}  // namespace simulated
