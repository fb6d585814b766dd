// What csrc/cuda needs of CUDA, on the host: the threads of a block are run one after the other, or, in kernels that
// synchronise, as threads of the host; blocks always follow each other. tests/ops/on_host/__init__.py has the rest.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <thread>
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

inline thread_local dim3 thread, block;
inline dim3 grid;
inline pthread_barrier_t barrier;

template <class Kernel>
void run_blocks(bool synchronises, const Kernel& kernel) {
  for (block.y = 0; block.y < grid.y; ++block.y) {
    for (block.x = 0; block.x < grid.x; ++block.x) {
      kernel();
      if (synchronises) pthread_barrier_wait(&barrier);  // the next block has the same shared memory
    }
  }
}

template <class Kernel>
void launch(dim3 of_grid, unsigned threads, bool synchronises, const Kernel& kernel) {
  grid = of_grid;
  if (!synchronises) {
    for (unsigned x = 0; x < threads; ++x) thread.x = x, run_blocks(false, kernel);
    return;
  }
  pthread_barrier_init(&barrier, nullptr, threads);
  std::vector<std::thread> all;
  for (unsigned x = 0; x < threads; ++x) {
    all.emplace_back([=, &kernel] {
      thread.x = x;
      run_blocks(true, kernel);
    });
  }
  for (std::thread& each : all) each.join();
  pthread_barrier_destroy(&barrier);
}

}  // namespace on_host

#define threadIdx on_host::thread
#define blockIdx on_host::block
#define gridDim on_host::grid

inline void __syncthreads() { pthread_barrier_wait(&on_host::barrier); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline unsigned atomicAdd(unsigned* value, unsigned more) {
  return __atomic_fetch_add(value, more, __ATOMIC_SEQ_CST);
}
template <class T>
T __ldcg(const T* value) {
  return *value;
}
