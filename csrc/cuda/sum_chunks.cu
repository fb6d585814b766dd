#include "combine.cuh"
#include "launch.h"

namespace shardgrad::cuda {
namespace {

// The sum runs from left to right in registers, so all addresses must arrive in one launch. Beyond
// 4 KiB of kernel parameters needs CUDA 12.1, older than any toolkit that torch 2.11 is built with.
struct SumBatch {
  const void* chunks[shardgrad_cuda_max_summands];
  void* out;
  int64_t numel;
  double divisor;
  int count;
  bool accumulate;
  bool aligned;  // every chunk and `out`, to 16 bytes
};

// Adds up the vectors `first`, `first + stride` and so on, as many as are in flight at once.
template <class Chunk, class Out, int N>
__device__ void sum_vectors(const SumBatch& batch, int64_t first, int64_t stride, int64_t vectors) {
  using Compute = ComputeType<Chunk, Out>;
  Compute sums[kInFlight][N];
  for (int k = 0; k < batch.count; ++k) {
    const auto* from = static_cast<const Vector<Chunk, N>*>(batch.chunks[k]);
    Vector<Chunk, N> next[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * stride < vectors) next[i] = from[first + i * stride];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
      for (int lane = 0; lane < N; ++lane) {
        const Compute value = static_cast<Compute>(to_float(next[i].lanes[lane]));
        sums[i][lane] = k == 0 ? value : sums[i][lane] + value;
      }
    }
  }
  const Compute by = static_cast<Compute>(batch.divisor);
  auto* to = static_cast<Vector<Out, N>*>(batch.out);
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const int64_t v = first + i * stride;
    if (v >= vectors) break;
    Vector<Out, N> result = {};
    if (batch.accumulate) result = to[v];
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      result.lanes[lane] = finish(sums[i][lane], by, result.lanes[lane], batch.accumulate);
    }
    to[v] = result;
  }
}

template <class Chunk, class Out>
__device__ void sum_one(const SumBatch& batch, int64_t at) {
  using Compute = ComputeType<Chunk, Out>;
  Compute sum = static_cast<Compute>(to_float(static_cast<const Chunk*>(batch.chunks[0])[at]));
  for (int k = 1; k < batch.count; ++k) {
    sum += static_cast<Compute>(to_float(static_cast<const Chunk*>(batch.chunks[k])[at]));
  }
  Out* to = static_cast<Out*>(batch.out) + at;
  const Out old = batch.accumulate ? *to : Out{};
  *to = finish(sum, static_cast<Compute>(batch.divisor), old, batch.accumulate);
}

template <class Chunk, class Out>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumBatch batch) {
  constexpr int N = kVector<Chunk, Out>;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t vectors = batch.aligned ? batch.numel / N : 0;
  for (int64_t v = thread; v < vectors; v += kInFlight * stride) {
    sum_vectors<Chunk, Out, N>(batch, v, stride, vectors);
  }
  for (int64_t j = vectors * N + thread; j < batch.numel; j += stride)
    sum_one<Chunk, Out>(batch, j);
}

bool is_aligned_to_16(const void* address) {
  return (reinterpret_cast<uintptr_t>(address) & 15) == 0;
}

cudaError_t sum_chunks(const SumArguments& arguments, cudaStream_t stream) {
  if (arguments.numel == 0) return cudaSuccess;
  if (arguments.chunks.size() > shardgrad_cuda_max_summands) return cudaErrorInvalidValue;
  SumBatch batch{};
  std::copy(arguments.chunks.begin(), arguments.chunks.end(), batch.chunks);
  batch.out = arguments.out;
  batch.numel = arguments.numel;
  batch.divisor = arguments.divisor;
  batch.count = static_cast<int>(arguments.chunks.size());
  batch.accumulate = arguments.accumulate;
  batch.aligned = is_aligned_to_16(arguments.out) &&
      std::all_of(arguments.chunks.begin(), arguments.chunks.end(), is_aligned_to_16);
  visit(arguments.chunk_dtype, [&](auto chunk) {
    visit(arguments.out_dtype, [&](auto out) {
      sum_kernel<typename decltype(chunk)::type, typename decltype(out)::type>
          <<<blocks_for(tiles_in(batch.numel)), kThreads, 0, stream>>>(batch);
    });
  });
  return cudaGetLastError();
}

}  // namespace
}  // namespace shardgrad::cuda

extern "C" int shardgrad_cuda_sum_chunks(const shardgrad::SumArguments* arguments, void* stream) {
  return shardgrad::cuda::sum_chunks(*arguments, static_cast<cudaStream_t>(stream));
}

extern "C" const char* shardgrad_cuda_error(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}
