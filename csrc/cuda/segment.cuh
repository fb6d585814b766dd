// What the kernels on segments share: finding rows, and moving elements of any dtype to and from registers.
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
__device__ __forceinline__ bool is_aligned(const void* data, int64_t element_nbytes, int64_t offset) {
  const int64_t nbytes = element_nbytes * kQuad < 16 ? element_nbytes * kQuad : 16;
  return (reinterpret_cast<uintptr_t>(data) + offset * element_nbytes) % nbytes == 0;
}

// `count` elements from `at` on become lanes, as they are stored; the lanes behind them stay as they were.
// `whole`: all of kQuad, and aligned.
template <class T>
__device__ __forceinline__ void load_bits(T (&lanes)[kQuad], const void* data, int64_t at, int count, bool whole) {
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
__device__ __forceinline__ void store_bits(const T (&lanes)[kQuad], void* data, int64_t at, int count, bool whole) {
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

template <class T, class C>
__device__ __forceinline__ void load_as(C (&lanes)[kQuad], const void* data, int64_t at, int count, bool whole) {
  T stored[kQuad] = {};
  load_bits(stored, data, at, count, whole);
#pragma unroll
  for (int lane = 0; lane < kQuad; ++lane) lanes[lane] = static_cast<C>(to_float(stored[lane]));
}

template <class T, class C>
__device__ __forceinline__ void store_as(const C (&lanes)[kQuad], void* data, int64_t at, int count, bool whole) {
  T stored[kQuad];
#pragma unroll
  for (int lane = 0; lane < kQuad; ++lane) stored[lane] = from_float<T>(lanes[lane]);
  store_bits(stored, data, at, count, whole);
}

// The dtype is the same for a whole launch, so the branch costs little; a kernel for each mix of dtypes would
// cost hundreds of kernels.
template <class C>
__device__ __forceinline__ void load(
    C (&lanes)[kQuad], const void* data, DType dtype, int64_t at, int count, bool whole) {
  switch (dtype) {
    case DType::kBFloat16:
      return load_as<BFloat16>(lanes, data, at, count, whole);
    case DType::kFloat16:
      return load_as<Float16>(lanes, data, at, count, whole);
    case DType::kFloat64:
      return load_as<double>(lanes, data, at, count, whole);
    default:
      return load_as<float>(lanes, data, at, count, whole);
  }
}

template <class C>
__device__ __forceinline__ void store(
    const C (&lanes)[kQuad], void* data, DType dtype, int64_t at, int count, bool whole) {
  switch (dtype) {
    case DType::kBFloat16:
      return store_as<BFloat16>(lanes, data, at, count, whole);
    case DType::kFloat16:
      return store_as<Float16>(lanes, data, at, count, whole);
    case DType::kFloat64:
      return store_as<double>(lanes, data, at, count, whole);
    default:
      return store_as<float>(lanes, data, at, count, whole);
  }
}

// Index of the row whose tiles hold `tile`, given that of an earlier tile: most often the same one.
__device__ __forceinline__ int64_t find_row_from(const Segment& segment, int64_t row, int64_t tile) {
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

// True in every thread of the block that comes here last. What the others wrote before is then visible to it,
// and nothing it writes now can be seen by their earlier reads. The ticket is zero again afterwards.
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
