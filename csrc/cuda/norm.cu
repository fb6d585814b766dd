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

// A thread has the same elements of a tile whatever the alignment, so that alignment does not change the sum.
template <Norm kNorm>
__device__ __forceinline__ void add_tile(
    const NormArguments& args, const SegmentRow& row, int64_t tile, Found& mine) {
  const int64_t begin = (tile - row.first_tile) * kTileNumel;
  const bool aligned = is_aligned(args.flat.data, size_of(args.flat.dtype), row.grad_offset);
#pragma unroll
  for (int64_t quad = threadIdx.x; quad < kTileQuads; quad += kThreads) {
    const int64_t at = begin + quad * kQuad;
    if (at >= row.numel) break;
    const int count = static_cast<int>(min(static_cast<int64_t>(kQuad), row.numel - at));
    double lanes[kQuad] = {};
    load(lanes, args.flat.data, args.flat.dtype, row.grad_offset + at, count, aligned && count == kQuad);
#pragma unroll
    for (int lane = 0; lane < kQuad; ++lane) {
      if (lane >= count) break;
      mine.value = add_element(kNorm, args.norm_type, mine.value, lanes[lane]);
      mine.not_finite += is_not_finite(lanes[lane]);
    }
  }
}

// One block for each worker. The last one to finish joins what they all found.
template <Norm kNorm>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ NormArguments args) {
  const Segment& segment = args.segment;
  Found mine{nothing_yet(kNorm), 0};
  int64_t i = 0;
  for (int64_t tile = blockIdx.x; tile < segment.tiles; tile += kNormWorkers) {
    i = find_row_from(segment, i, tile);
    const SegmentRow row = segment.rows[i];
    if (is_live(segment, row)) add_tile<kNorm>(args, row, tile, mine);
  }
  Found found = join_block<kNorm>(mine);
  if (threadIdx.x == 0) {
    args.scratch[blockIdx.x] = found.value;
    args.scratch[kNormWorkers + blockIdx.x] = found.not_finite;
  }
  if (!is_last_block(reinterpret_cast<unsigned int*>(args.scratch + 2 * kNormWorkers))) return;
  mine = {nothing_yet(kNorm), 0};
  for (unsigned worker = threadIdx.x; worker < gridDim.x; worker += kThreads) {
    // Past L1, which may hold what another call left there.
    mine.value = join(kNorm, mine.value, __ldcg(args.scratch + worker));
    mine.not_finite += __ldcg(args.scratch + kNormWorkers + worker);
  }
  found = join_block<kNorm>(mine);
  if (threadIdx.x == 0) {
    args.out[0] = apply_scale(kNorm, args.norm_type, found.value, args.scale.read());
    args.out[1] = found.not_finite;
  }
}

template <Norm kNorm>
int launch(const NormArguments& args, cudaStream_t stream) {
  // Without rows there is nothing to find, but the result has to be written.
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(args.segment.tiles, 1, kNormWorkers));
  norm_kernel<kNorm><<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace
}  // namespace shardgrad::cuda

extern "C" int shardgrad_cuda_norm(const shardgrad::NormArguments* arguments, void* stream_of_call) {
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
