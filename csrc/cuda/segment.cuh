// What the kernels on segments share: finding rows, and moving elements of any dtype to and from
// registers.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../segment.h"

namespace shardgrad::cuda {

constexpr int kThreads = 256;
// Consecutive elements of a thread: 128 bits of float, the widest type that is common.
constexpr int kQuad = 4;
constexpr int64_t kTileQuads = kTileNumel / kQuad;
static_assert(kTileQuads % kThreads == 0, "every thread has as many quads of a full tile");

template <class T>
struct alignas(sizeof(T) * kQuad < 16 ? sizeof(T) * kQuad : 16) Quad {
  T lanes[kQuad];
};

// Whether the quads of a row can be read and written whole, in this array.
__device__ __forceinline__ bool is_aligned(
    const void* data, int64_t element_nbytes, int64_t offset) {
  const int64_t nbytes = element_nbytes * kQuad < 16 ? element_nbytes * kQuad : 16;
  return (reinterpret_cast<uintptr_t>(data) + offset * element_nbytes) % nbytes == 0;
}

// `count` elements from `at` on become lanes, as they are stored; the lanes behind them stay as
// they were. `whole`: all of kQuad, and aligned.
template <class T>
__device__ __forceinline__ void load_bits(
    T (&lanes)[kQuad], const void* data, int64_t at, int count, bool whole) {
  const T* from = static_cast<const T*>(data) + at;
  if (whole) {
    const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(from);
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) lanes[lane] = quad.lanes[lane];
  } else {
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) {
      if (lane < count) lanes[lane] = from[lane];
    }
  }
}

template <class T>
__device__ __forceinline__ void store_bits(
    const T (&lanes)[kQuad], void* data, int64_t at, int count, bool whole) {
  T* to = static_cast<T*>(data) + at;
  if (whole) {
    Quad<T> quad;
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) quad.lanes[lane] = lanes[lane];
    *reinterpret_cast<Quad<T>*>(to) = quad;
  } else {
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) {
      if (lane < count) to[lane] = lanes[lane];
    }
  }
}

// Index of the row whose tiles hold `tile`, given that of an earlier tile: most often the same one.
__device__ __forceinline__ int64_t
find_row_from(const Segment& segment, int64_t row, int64_t tile) {
  int64_t high = segment.row_count;
  if (row + 1 == high || segment.rows[row + 1].first_tile > tile) return row;
  for (++row; high - row > 1;) {
    const int64_t middle = row + (high - row) / 2;
    if (segment.rows[middle].first_tile <= tile) {
      row = middle;
    } else {
      high = middle;
    }
  }
  return row;
}

// True in every thread of the block that comes here last. What the others wrote before is then
// visible to it, and nothing it writes now can be seen by their earlier reads. The ticket is zero
// again afterwards.
__device__ __forceinline__ bool is_last_block(unsigned int* ticket) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    __threadfence();
    if (is_last) *ticket = 0;
  }
  __syncthreads();
  return is_last;
}

}  // namespace shardgrad::cuda
