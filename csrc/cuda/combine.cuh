// Device-side counterpart of cpu/combine.h, and what the three kernels share around it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../element.h"

namespace shardgrad::cuda {

constexpr int kThreads = 256;
// Elements a block handles at a time: eight per thread, enough 128-bit loads in flight to cover latency.
constexpr int64_t kTile = 8 * kThreads;
// More blocks than any current device holds at once; the kernels stride over the rest.
constexpr int64_t kMaxBlocks = 2048;
// Parameters (and, in unpack, ranks) per launch, so that their descriptions fit in 4 KiB of kernel parameters.
constexpr int kBatch = 64;

inline unsigned blocks_for(int64_t tiles) { return static_cast<unsigned>(std::min(tiles, kMaxBlocks)); }

SHARDGRAD_INLINE int64_t tiles_in(int64_t numel) { return (numel + kTile - 1) / kTile; }

// As many elements as the narrower type has in 128 bits; the wider type then takes several such accesses.
template <class Source, class Out>
constexpr int kVector = 16 / (sizeof(Source) < sizeof(Out) ? sizeof(Source) : sizeof(Out));

template <class T, int N>
struct alignas(16) Vector {
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

// One block converts source[begin, end) into out[begin, end), scaled and perhaps accumulated. `begin` is a
// multiple of kTile, so the alignment of the two base addresses decides for the whole range.
template <class Source, class Out>
__device__ void convert(
    const Source* source, Out* out, int64_t begin, int64_t end, double divisor, bool accumulate) {
  using Compute = ComputeType<Source, Out>;
  const Compute by = static_cast<Compute>(divisor);
  int64_t scalar_begin = begin;
  if (is_aligned(source, out)) {
    constexpr int N = kVector<Source, Out>;
    const int64_t vectors = (end - begin) / N;
    for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
      const int64_t at = begin + v * N;
      const auto in = *reinterpret_cast<const Vector<Source, N>*>(source + at);
      auto* to = reinterpret_cast<Vector<Out, N>*>(out + at);
      Vector<Out, N> result = {};
      if (accumulate) result = *to;
#pragma unroll
      for (int lane = 0; lane < N; ++lane) {
        result.lanes[lane] =
            finish(static_cast<Compute>(to_float(in.lanes[lane])), by, result.lanes[lane], accumulate);
      }
      *to = result;
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
