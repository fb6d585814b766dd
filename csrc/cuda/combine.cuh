// Device-side counterpart of cpu/combine.h, and what the three kernels share around it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../element.h"

namespace shardgrad::cuda {

constexpr int kThreads = 256;
// Accesses that a thread starts before it needs the first one's data.
constexpr int kInFlight = 4;
// Elements a block handles at a time: of four-byte types, all that a thread loads is in flight at
// once.
constexpr int64_t kTile = kInFlight * 4 * kThreads;
// More blocks than any current device holds at once; the kernels stride over the rest.
constexpr int64_t kMaxBlocks = 2048;
// Parameters per launch, so that their descriptions fit in 4 KiB of kernel parameters.
constexpr int kBatch = 64;

inline unsigned blocks_for(int64_t tiles) {
  return static_cast<unsigned>(std::min(tiles, kMaxBlocks));
}

// A row of blocks for each rank, which stride over the tiles of its chunk: no block has to divide
// to find out whose tile it has.
inline dim3 blocks_for(int64_t tiles_of_rank, int64_t ranks) {
  const int64_t most = std::max(kMaxBlocks / ranks, int64_t{1});
  return {static_cast<unsigned>(std::min(tiles_of_rank, most)), static_cast<unsigned>(ranks), 1};
}

SHARDGRAD_INLINE int64_t tiles_in(int64_t numel) { return (numel + kTile - 1) / kTile; }

// As many elements as the wider type has in 128 bits, so that neighbors' accesses to either lie
// side by side. With as many as the narrower one has, each store of the wider would fill half of
// what the memory takes at once: packing bfloat16 into float32 took half as long again on an H200.
template <class Source, class Out>
constexpr int kVector = 16 / (sizeof(Source) > sizeof(Out) ? sizeof(Source) : sizeof(Out));

template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T lanes[N];
};

template <class Source, class Out>
__device__ bool is_aligned(const Source* source, const Out* out) {
  return ((reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(out)) & 15) == 0;
}

// out[j] = (accumulate ? out[j] : 0) + sum / divisor, in the type of `sum`, rounded once.
template <class Compute, class Out>
__device__ Out finish(Compute sum, Compute divisor, Out old, bool accumulate) {
  if (divisor != 1) sum /= divisor;
  if (accumulate) sum = static_cast<Compute>(to_float(old)) + sum;
  return from_float<Out>(sum);
}

// One block converts source[begin, end) into out[begin, end), scaled and perhaps accumulated.
// `begin` is a multiple of kTile and the range no longer, so the alignment of the two base
// addresses decides for all of it.
template <class Source, class Out>
__device__ void convert(
    const Source* source, Out* out, int64_t begin, int64_t end, double divisor, bool accumulate) {
  using Compute = ComputeType<Source, Out>;
  const Compute by = static_cast<Compute>(divisor);
  int64_t scalar_begin = begin;
  if (is_aligned(source, out)) {
    constexpr int N = kVector<Source, Out>;
    const int vectors = static_cast<int>(end - begin) / N;
    const auto* from = reinterpret_cast<const Vector<Source, N>*>(source + begin);
    auto* to = reinterpret_cast<Vector<Out, N>*>(out + begin);
    for (int first = threadIdx.x; first < vectors; first += kInFlight * kThreads) {
      Vector<Source, N> in[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (first + k * kThreads < vectors) in[k] = from[first + k * kThreads];
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int v = first + k * kThreads;
        if (v >= vectors) break;
        Vector<Out, N> result = {};
        if (accumulate) result = to[v];
#pragma unroll
        for (int lane = 0; lane < N; ++lane) {
          result.lanes[lane] = finish(
              static_cast<Compute>(to_float(in[k].lanes[lane])), by, result.lanes[lane],
              accumulate);
        }
        to[v] = result;
      }
    }
    scalar_begin += vectors * N;
  }
  for (int64_t j = scalar_begin + threadIdx.x; j < end; j += kThreads) {
    const Out old = accumulate ? out[j] : Out{};
    out[j] = finish(static_cast<Compute>(to_float(source[j])), by, old, accumulate);
  }
}

// The entry whose range of tiles holds `tile`: the last one that begins at or before it.
template <class Entry>
__device__ const Entry& find_entry(const Entry* entries, int count, int64_t tile) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = (low + high) / 2;
    (entries[middle].first_tile <= tile ? low : high) = middle;
  }
  return entries[low];
}

}  // namespace shardgrad::cuda
