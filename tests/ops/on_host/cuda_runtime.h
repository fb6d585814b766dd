// What csrc/cuda needs of CUDA, on the host, in one thread. A few blocks are resident at once and
// take turns; both their order and that of the threads of a block are drawn, again for each launch.
// `__init__.py` has the rest.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <typeinfo>
#include <utility>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

using std::fma;
using std::max;
using std::min;

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace on_host {

// Fewer than most segments of the tests have tiles.
inline int processors = 3;

// -- the threads of a block
// -----------------------------------------------------------------------------------

inline dim3 thread, block, grid;  // of the thread that runs

enum class At { kNothing, kBarrier, kEnd };

// A thread of a block that synchronizes is a fiber: it runs up to a barrier, where it waits for the
// others, or to an operation that other blocks may see, before which they may run. It begins as a
// context, once, and is left and resumed by jumps, which ask the system for nothing.
struct Fiber {
  ucontext_t begin;
  jmp_buf resume;
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool has_begun = false;
  At at = At::kNothing;
  int barrier = 0;  // its line
  static constexpr size_t kStack = 1 << 16;
};

struct Block {
  dim3 index;
  std::vector<Fiber> fibers;
  std::vector<unsigned> order;
  std::map<const void*, std::unique_ptr<char[]>> shared;
};

inline std::vector<Block> resident;
inline Block* running = nullptr;  // of a kernel that synchronizes
inline jmp_buf scheduler;
inline std::function<void()> body;
inline std::mt19937_64 drawn(
    getenv("ON_HOST_SEED") ? strtoull(getenv("ON_HOST_SEED"), nullptr, 10) : 0);

// Shared memory holds nothing at first. Of its own allocation, so that a sanitizer knows where it
// ends.
template <class T>
T& shared(const void* variable) {
  auto& memory = running->shared[variable];
  if (!memory) memory.reset(static_cast<char*>(memset(new char[sizeof(T)], 0xff, sizeof(T))));
  return *reinterpret_cast<T*>(memory.get());
}

[[gnu::noinline]] inline void leave(At at) {
  Fiber& own = running->fibers[thread.x];
  own.at = at;
  if (_setjmp(own.resume) == 0) _longjmp(scheduler, 1);
}

inline void run_fiber() {
  while (true) {  // of one block after the other
    body();
    leave(At::kEnd);
  }
}

[[gnu::noinline]] inline void enter(Fiber& next) {
  if (_setjmp(scheduler) != 0) return;
  if (next.has_begun) _longjmp(next.resume, 1);
  next.has_begun = true;
  getcontext(&next.begin);
  next.begin.uc_stack.ss_sp = next.stack.get();
  next.begin.uc_stack.ss_size = Fiber::kStack;
  next.begin.uc_link = nullptr;
  makecontext(&next.begin, run_fiber, 0);
  setcontext(&next.begin);
}

inline void barrier(int line) {
  running->fibers[thread.x].barrier = line;
  leave(At::kBarrier);
}

// Other blocks may run here.
inline void pause() {
  if (running) leave(At::kNothing);
}

inline void begin(Block& of, dim3 index, unsigned threads) {
  of.index = index;
  of.shared.clear();
  of.fibers.resize(threads);
  of.order.resize(threads);
  std::iota(of.order.begin(), of.order.end(), 0u);
  std::shuffle(of.order.begin(), of.order.end(), drawn);
  for (Fiber& each : of.fibers) each.at = At::kNothing;
}

// Each thread goes on for a while. Returns whether all have ended.
inline bool advance(Block& of) {
  running = &of;
  block = of.index;
  for (unsigned t : of.order) {
    if (of.fibers[t].at == At::kNothing) thread.x = t, enter(of.fibers[t]);
  }
  running = nullptr;
  const Fiber& first = of.fibers[0];
  for (const Fiber& each : of.fibers) {
    if (each.at == At::kNothing) return false;
  }
  for (const Fiber& each : of.fibers) {
    if (each.at == first.at && (each.at == At::kEnd || each.barrier == first.barrier)) continue;
    resident.clear();
    throw std::runtime_error(
        "threads of a block wait at different barriers, or some of them have ended");
  }
  if (first.at == At::kEnd) return true;
  for (Fiber& each : of.fibers) each.at = At::kNothing;
  return false;
}

// -- the blocks of a grid
// -------------------------------------------------------------------------------------

// If there are any, only these run, of each row of blocks: tests of sizes that no host gets
// through.
inline std::vector<unsigned> only;

inline std::vector<dim3> blocks_in_order() {
  std::vector<dim3> order;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      if (only.empty() || std::count(only.begin(), only.end(), x) != 0) order.emplace_back(x, y);
    }
  }
  std::shuffle(order.begin(), order.end(), drawn);
  return order;
}

inline void run(dim3 of_grid, unsigned threads, bool synchronizes, std::function<void()> kernel) {
  constexpr size_t kResident = 3;
  grid = of_grid;
  body = std::move(kernel);
  std::vector<dim3> waiting = blocks_in_order();
  if (!synchronizes) {
    std::vector<unsigned> order(threads);
    std::iota(order.begin(), order.end(), 0u);
    for (const dim3& each : waiting) {
      block = each;
      std::shuffle(order.begin(), order.end(), drawn);
      for (unsigned t : order) thread.x = t, body();
    }
    return;
  }
  resident.resize(kResident);
  std::vector<Block*> at_once;
  for (Block& each : resident) {
    if (waiting.empty()) break;
    begin(each, waiting.back(), threads);
    waiting.pop_back();
    at_once.push_back(&each);
  }
  while (!at_once.empty()) {
    std::swap(at_once[drawn() % at_once.size()], at_once.back());
    if (!advance(*at_once.back())) continue;
    if (waiting.empty()) {
      at_once.pop_back();
    } else {
      begin(*at_once.back(), waiting.back(), threads);
      waiting.pop_back();
    }
  }
}

// -- kernels
// -------------------------------------------------------------------------------------------------

// A kernel as `cudaLaunchKernel` has it: with pointers to its arguments.
using Run = void(void* const* arguments, unsigned grid_x, unsigned grid_y, unsigned threads);
struct Launchable {
  Run* run;
  std::vector<size_t> sizes;  // of the arguments
};

// All kernels of the library, by the name of the type that stands for them.
inline std::map<const char*, Launchable>& kernels() {
  static std::map<const char*, Launchable> all;
  return all;
}

template <auto kernel, bool synchronizes>
struct Kernel;

template <class... P, void (*kernel)(P...), bool synchronizes>
struct Kernel<kernel, synchronizes> {
  static_assert((std::is_trivially_copyable_v<P> && ...), "a launch copies bytes");

  static void run(void* const* arguments, unsigned grid_x, unsigned grid_y, unsigned threads) {
    on_host::run({grid_x, grid_y}, threads, synchronizes, [=] {
      call(arguments, std::index_sequence_for<P...>{});
    });
  }

  template <size_t... i>
  static void call(void* const* arguments, std::index_sequence<i...>) {
    kernel(*static_cast<P*>(arguments[i])...);
  }

  static inline const bool is_known =
      kernels().emplace(typeid(Kernel).name(), Launchable{run, {sizeof(P)...}}).second;
};

template <auto kernel, bool synchronizes, class... P>
void launch(dim3 grid, unsigned threads, P... arguments) {
  (void)Kernel<kernel, synchronizes>::is_known;
  void* const pointers[] = {&arguments...};
  Kernel<kernel, synchronizes>::run(pointers, grid.x, grid.y, threads);
}

}  // namespace on_host

#define threadIdx on_host::thread
#define blockIdx on_host::block
#define gridDim on_host::grid
#define __syncthreads() on_host::barrier(__LINE__)

inline void __threadfence() { on_host::pause(); }
inline unsigned atomicAdd(unsigned* value, unsigned more) {
  on_host::pause();
  return std::exchange(*value, *value + more);
}
template <class T>
T __ldcg(const T* value) {
  return *value;
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = on_host::processors, cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
