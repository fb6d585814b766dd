#include "../norm_math.h"
#include "launch.h"
#include "segment.cuh"

namespace shardgrad::cuda {
namespace {

struct Found {
  double value;
  double not_finite;
};

// Joins what the threads of a block found, by halves, so always in the same order. For thread 0.
template <Norm kNorm>
__device__ Found join_block(Found mine) {
  __shared__ Found found[kThreads];
  found[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      const Found other = found[threadIdx.x + half];
      found[threadIdx.x].value = join(kNorm, found[threadIdx.x].value, other.value);
      found[threadIdx.x].not_finite += other.not_finite;
    }
    __syncthreads();
  }
  return found[0];
}

// `add_element`, with one operation in double where two would round the same: the square of a float
// is exact.
template <Norm kNorm, class F>
__device__ __forceinline__ double add(double norm_type, double so_far, F value) {
  const double wide = static_cast<double>(value);
  if constexpr (kNorm == Norm::kSquares && sizeof(F) < sizeof(double))
    return fma(wide, wide, so_far);
  return add_element(kNorm, norm_type, so_far, wide);
}

// A thread has the same elements of a tile whatever the alignment, so that alignment does not
// change the sum. It loads all of them before it adds the first.
template <Norm kNorm, class T>
__device__ __forceinline__ void add_tile(
    const NormArguments& args, const SegmentRow& row, int64_t tile, double& value,
    int& not_finite) {
  constexpr int kQuads = kTileQuads / kThreads;
  const int64_t begin = (tile - row.first_tile) * kTileNumel;
  const int numel = static_cast<int>(min(kTileNumel, row.numel - begin));
  const bool aligned = is_aligned(args.flat.data, sizeof(T), row.grad_offset);
  T stored[kQuads][kQuad];
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const int at = (static_cast<int>(threadIdx.x) + k * kThreads) * kQuad;
    const int count = min(kQuad, numel - at);
    load_bits(
        stored[k], args.flat.data, row.grad_offset + begin + at, count, aligned && count == kQuad);
  }
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const int at = (static_cast<int>(threadIdx.x) + k * kThreads) * kQuad;
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) {
      if (at + lane >= numel) break;
      const auto element = to_float(stored[k][lane]);
      value = add<kNorm>(args.norm_type, value, element);
      not_finite += element - element != 0;
    }
  }
}

// What the tiles of this block's worker hold. A thread has too few elements for an int to overflow.
template <Norm kNorm, class T>
__device__ __forceinline__ Found add_tiles(const NormArguments& args) {
  const Segment& segment = args.segment;
  double value = nothing_yet(kNorm);
  int not_finite = 0;
  int64_t i = 0;
  for (int64_t tile = blockIdx.x; tile < segment.tiles; tile += kNormWorkers) {
    i = find_row_from(segment, i, tile);
    const SegmentRow row = segment.rows[i];
    if (is_live(segment, row)) add_tile<kNorm, T>(args, row, tile, value, not_finite);
  }
  return {value, static_cast<double>(not_finite)};
}

// One block for each worker. The last one to finish joins what they all found.
template <Norm kNorm, class T>
__global__ void __launch_bounds__(kThreads)
    norm_kernel(const __grid_constant__ NormArguments args) {
  Found found = join_block<kNorm>(add_tiles<kNorm, T>(args));
  if (threadIdx.x == 0) {
    args.scratch[blockIdx.x] = found.value;
    args.scratch[kNormWorkers + blockIdx.x] = found.not_finite;
  }
  if (!is_last_block(reinterpret_cast<unsigned int*>(args.scratch + 2 * kNormWorkers))) return;
  Found mine{nothing_yet(kNorm), 0};
  for (unsigned worker = threadIdx.x; worker < gridDim.x; worker += kThreads) {
    // Past L1, which may hold what another call left there.
    mine.value = join(kNorm, mine.value, __ldcg(args.scratch + worker));
    mine.not_finite += __ldcg(args.scratch + kNormWorkers + worker);
  }
  found = join_block<kNorm>(mine);
  if (threadIdx.x == 0) {
    args.out[0] = join(kNorm, args.out[0], found.value);
    args.out[1] += found.not_finite;
  }
}

template <Norm kNorm>
int launch(const NormArguments& args, cudaStream_t stream) {
  // Without rows there is nothing to find, but the result has to be written.
  const auto blocks =
      static_cast<unsigned>(std::clamp<int64_t>(args.segment.tiles, 1, kNormWorkers));
  visit(args.flat.dtype, [&](auto flat) {
    norm_kernel<kNorm, typename decltype(flat)::type><<<blocks, kThreads, 0, stream>>>(args);
  });
  return cudaGetLastError();
}

}  // namespace
}  // namespace shardgrad::cuda

extern "C" int shardgrad_cuda_norm(
    const shardgrad::NormArguments* arguments, void* stream_of_call) {
  using shardgrad::Norm;
  using namespace shardgrad::cuda;
  auto* stream = static_cast<cudaStream_t>(stream_of_call);
  switch (shardgrad::norm_of(arguments->norm_type)) {
    case Norm::kSquares:
      return launch<Norm::kSquares>(*arguments, stream);
    case Norm::kSizes:
      return launch<Norm::kSizes>(*arguments, stream);
    case Norm::kCount:
      return launch<Norm::kCount>(*arguments, stream);
    case Norm::kMaximum:
      return launch<Norm::kMaximum>(*arguments, stream);
    case Norm::kMinimum:
      return launch<Norm::kMinimum>(*arguments, stream);
    default:
      return launch<Norm::kPowers>(*arguments, stream);
  }
}
