// Settings, errors, and the lock.
#include "state.h"

#include <execinfo.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hostcuda {

namespace {
constexpr size_t GIB = size_t(1) << 30;

const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}
}  // namespace

State::State() {
  const std::string how = setting("HOSTCUDA_ORDER", "host");
  if (how == "late") order = Order::late;
  else if (how != "host") order = Order::random, random.seed(strtoull(how.c_str(), nullptr, 10));
  has_values = std::string(setting("HOSTCUDA_VALUES", "1")) != "0";
  only_host_time = !has_values && std::string(setting("HOSTCUDA_TIMING", "0")) != "0";
  questions = atoi(setting("HOSTCUDA_QUESTIONS", order == Order::host ? "1" : "3"));
  backtraces = getenv("HOSTCUDA_BACKTRACE") != nullptr;
  const std::string log_to = setting("HOSTCUDA_LOG", "");
  if (!log_to.empty()) out = log_to == "stderr" ? stderr : fopen(log_to.c_str(), "a");
  devices.resize(atoi(setting("HOSTCUDA_DEVICES", "1")));
  for (size_t i = 0; i < devices.size(); ++i) {
    devices[i].total = size_t(atoi(setting("HOSTCUDA_MEMORY_GIB", "140"))) * GIB;
    devices[i].span = 256 * GIB;
  }
}

State& state() {
  static State* made = [] {  // never destroyed: torch's libraries unregister at exit
    auto* made = new State;
    return made;
  }();
  return *made;
}

Thread& self() {
  static thread_local Thread thread;
  return thread;
}

Call::Call(const char* api) : api(api) {
  state().mutex.lock();
  ++self().depth;
  ++state().calls[api];
}

Call::~Call() {
  Thread& me = self();
  const bool outermost = --me.depth == 0;
  const bool runs = outermost && me.launches && state().order == Order::host;
  if (outermost) me.launches = false;
  state().mutex.unlock();
  if (runs) run_ready();
}

void print(const char* format, ...) {
  if (!state().out) return;
  va_list args;
  va_start(args, format);
  fprintf(state().out, "[hostcuda %d] ", getpid());
  vfprintf(state().out, format, args);
  fputc('\n', state().out);
  fflush(state().out);
  va_end(args);
}

void finding(const std::string& text) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  auto& all = state().findings;
  if (all.size() < 10000 && (all.empty() || all.back() != text)) all.push_back(text);
  print("finding: %s", text.c_str());
}

cudaError_t fail(const char* api, cudaError_t error, const char* why) {
  self().last = error;
  if (state().out && error != cudaErrorNotReady) {
    print("%s -> %d %s %s", api, error, cudaGetErrorName(error), why);
    if (state().backtraces) {
      void* frames[40];
      backtrace_symbols_fd(frames, backtrace(frames, 40), fileno(state().out));
    }
  }
  return error;
}

void unsupported(const char* api) {
  Call call("unsupported");
  if (!state().calls[api]++) print("stub: %s", api);
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += (unsigned char)c < 32 ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace hostcuda

#define ERRORS(X)                                                                                 \
  X(cudaSuccess, "no error")                                                                      \
  X(cudaErrorInvalidValue, "invalid argument")                                                    \
  X(cudaErrorMemoryAllocation, "out of memory")                                                   \
  X(cudaErrorInvalidConfiguration, "invalid configuration argument")                              \
  X(cudaErrorInvalidDeviceFunction, "invalid device function")                                    \
  X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                      \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                                             \
  X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                    \
  X(cudaErrorIllegalState, "the operation cannot be performed in the present state")              \
  X(cudaErrorNotReady, "device not ready")                                                        \
  X(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")                          \
  X(cudaErrorNotSupported, "operation not supported")                                             \
  X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")        \
  X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture") \
  X(cudaErrorStreamCaptureMerge,                                                                  \
    "operation would result in a merge of separate capture sequences")                            \
  X(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")      \
  X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                         \
  X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")   \
  X(cudaErrorStreamCaptureImplicit,                                                               \
    "operation would make the legacy stream depend on a capturing blocking stream")               \
  X(cudaErrorCapturedEvent,                                                                       \
    "operation not permitted on an event last recorded in a capturing stream")                    \
  X(cudaErrorStreamCaptureWrongThread,                                                            \
    "attempt to terminate a thread-local capture sequence from another thread")

API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define X(code, text) \
  case code:          \
    return #code;
    ERRORS(X)
#undef X
    default:
      return "cudaErrorWithoutANameHere";
  }
}
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
#define X(code, text) \
  case code:          \
    return text;
    ERRORS(X)
#undef X
    default:
      return "an error that the runtime on the host has no text for";
  }
}
API cudaError_t cudaGetLastError() {
  const cudaError_t last = hostcuda::self().last;
  hostcuda::self().last = cudaSuccess;
  return last;
}
API cudaError_t cudaPeekAtLastError() { return hostcuda::self().last; }
