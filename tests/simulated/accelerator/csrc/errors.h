// Typed errors: classes of tests/simulated/accelerator/errors.py, thrown through torch into Python.
#pragma once

#include <string>

namespace simulated {

enum class Error {
  OtherDevice,
  UnrecordedEvent,
  MixedDevices,
  NestedCapture,
  HostSyncInCapture,
  ForeignEvent,
  UnjoinedStream,
  OutsideCapture,
  DefaultStreamCapture,
  Capture,
  Collective,
};

// Throws; `sentence` says what was expected and what came.
[[noreturn]] void fail(Error error, const std::string& sentence);

}  // namespace simulated
