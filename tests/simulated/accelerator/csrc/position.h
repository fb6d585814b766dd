// Where the calling thread's work goes, and how torch's side of the simulator reports mistakes.
#pragma once

#include <string>
#include <utility>

#include "places.h"
#include "simulator.h"

namespace simulated {

int current_device();
void set_current_device(int device);  // checks the range
int64_t current_stream(int device);

// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device()) { set_current_device(device); }
  ~OnDevice() { set_current_device(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_;
};

// Returns the name of the autograd node this thread is running, or "".
std::string running_autograd_node();

inline Site site_of(const std::string& op) { return {intern(op), current_place()}; }

// Runs `body`; what it refuses becomes a Python error, after its locks are gone.
template <typename Body>
auto told(Body&& body) -> decltype(body()) {
  std::string sentence;
  Error error;
  try {
    return body();
  } catch (const Refusal& refusal) {
    error = refusal.error;
    sentence = refusal.what();
  }
  fail(error, sentence);
}

}  // namespace simulated
