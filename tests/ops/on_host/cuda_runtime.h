// What csrc/cuda needs of CUDA, on the host. Everything runs in one thread: blocks follow each other, and so do the
// threads of a block, between two barriers. tests/ops/on_host/__init__.py has the rest.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

using std::fma;
using std::max;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
// Three blocks at once, fewer than most segments of the tests have tiles.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 3, cudaSuccess; }
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}

namespace on_host {

inline dim3 thread, block, grid;

// A thread of a block that synchronises is a fiber: it runs up to the next barrier, then the one after it does.
// A fiber begins as a context, and is left and resumed by jumps, which ask the system for nothing.
struct Fiber {
  ucontext_t begin;
  jmp_buf resume;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool has_begun = false, is_done = true;
};

inline std::vector<Fiber> fibers;
inline jmp_buf scheduler;
inline std::function<void()> body;

[[gnu::noinline]] inline void leave(Fiber& own) {
  if (_setjmp(own.resume) == 0) _longjmp(scheduler, 1);
}

inline void run_fiber() {
  body();
  fibers[thread.x].is_done = true;
  leave(fibers[thread.x]);
}

[[gnu::noinline]] inline void enter(Fiber& next) {
  if (_setjmp(scheduler) != 0) return;
  if (next.has_begun) _longjmp(next.resume, 1);
  next.has_begun = true;
  setcontext(&next.begin);
}

inline void run_block(unsigned threads, bool synchronises) {
  if (!synchronises) {
    for (thread.x = 0; thread.x < threads; ++thread.x) body();
    return;
  }
  if (fibers.empty()) fibers = std::vector<Fiber>(threads);
  for (Fiber& each : fibers) {
    getcontext(&each.begin);
    each.begin.uc_stack.ss_sp = each.stack.data();
    each.begin.uc_stack.ss_size = each.stack.size();
    each.begin.uc_link = nullptr;
    makecontext(&each.begin, run_fiber, 0);
    each.has_begun = each.is_done = false;
  }
  for (bool is_done = false; !is_done;) {
    is_done = true;
    for (thread.x = 0; thread.x < threads; ++thread.x) {
      if (!fibers[thread.x].is_done) enter(fibers[thread.x]);
      is_done = is_done && fibers[thread.x].is_done;
    }
  }
}

template <class Kernel>
void launch(dim3 of_grid, unsigned threads, bool synchronises, const Kernel& kernel) {
  grid = of_grid;
  body = kernel;
  for (block.y = 0; block.y < grid.y; ++block.y) {
    for (block.x = 0; block.x < grid.x; ++block.x) run_block(threads, synchronises);
  }
}

}  // namespace on_host

#define threadIdx on_host::thread
#define blockIdx on_host::block
#define gridDim on_host::grid

inline void __syncthreads() { on_host::leave(on_host::fibers[on_host::thread.x]); }
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* value, unsigned more) {
  const unsigned before = *value;
  *value += more;
  return before;
}
template <class T>
T __ldcg(const T* value) {
  return *value;
}
