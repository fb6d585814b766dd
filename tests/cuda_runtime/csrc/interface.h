// What the other libraries (cuBLAS, NCCL, operators' values) ask of the runtime.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define HOSTCUDA __attribute__((visibility("default")))

namespace hostcuda {

// Memory that work reads or writes.
struct Range {
  const void* ptr;
  size_t size;
  bool write;
};

// Does the work; false if it cannot yet (other ranks have not come): it is called again then.
using Body = std::function<bool()>;

// A piece of work of a stream: a kernel, a copy, a collective.
struct Work {
  std::string kind, name, config;
  std::vector<Range> ranges;
  std::function<Body()>
      start;  // called when the host launches the work, at each replay again; may be empty
  const void* in_line = nullptr;  // work with the same one runs in the order of its launches
  uint64_t label = 0;             // the operator that launched it, if one did
  int stream = 0;
  bool computes = false;  // what it starts has its values, also inside of an operator
};

// A start for work that only has to be done.
inline std::function<Body()> doing(std::function<void()> action) {
  return [action = std::move(action)]() -> Body { return [action] { return action(), true; }; };
}

// Gives a stream work: to be run, or recorded as a node if the stream is capturing.
HOSTCUDA cudaError_t give(Work work, cudaStream_t stream);

// Blocks until everything that was given to all streams is done, or for so many milliseconds.
HOSTCUDA void finish_all(int limit_ms);

// Runs what can run without waiting of the first work of a line (`Work::in_line`) and of what is
// before it.
HOSTCUDA void advance(const void* line);

// The address at which the host may read and write device memory; other addresses as they are.
HOSTCUDA void* on_host(const void* pointer);
HOSTCUDA bool is_pinned(const void* pointer);

// Addresses of a device, and the memory behind them, which comes and goes.
HOSTCUDA void* reserve_addresses(size_t size, int device);
HOSTCUDA void free_addresses(void* pointer, size_t size, int device);
// `fd`: of a file that is the memory, which other processes may map too; -1 for the device's own.
HOSTCUDA cudaError_t map_memory(void* pointer, size_t size, int device, int fd = -1);
HOSTCUDA cudaError_t unmap_memory(void* pointer, size_t size);

// Of torch's caching allocator, which calls no function of CUDA's: memory was freed, memory was
// lent, memory went back to CUDA. What is lent was another's before, as far as its stream has come,
// and so is what was freed for the same stream: where the stream is then, neither holds values any
// more. Other streams that use it need an order with this one.
HOSTCUDA void freed(const void* pointer, size_t size, cudaStream_t stream);
HOSTCUDA void allocated(const void* pointer, size_t size, cudaStream_t stream);
HOSTCUDA void returned(const void* pointer, size_t size);

// An API that does nothing was called: counted, and logged.
HOSTCUDA void unsupported(const char* api);
HOSTCUDA void finding(const std::string& text);

// An operator, from the launch of its CUDA kernels to the CPU's kernel that stands for them.
struct Launched {
  uint64_t eager = 0, captured = 0;  // pieces of work
  uint64_t graph = 0;                // of the captured ones
  bool waited = false;               // the host has waited for some of them already
  bool computes = false;             // they have their values themselves
};
HOSTCUDA void begin_operator(uint64_t label);
// Gives what was launched since `begin_operator` its values: `start` is that of the last piece of
// work.
HOSTCUDA Launched launched();
HOSTCUDA void end_operator(
    const char* name, std::vector<Range> ranges, std::function<Body()> start);
HOSTCUDA bool wants_ranges();
// Blocks until the stream is done that this thread's last operator has given work.
HOSTCUDA void finish_launched();

}  // namespace hostcuda
