#include "combine.cuh"
#include "launch.h"

namespace shardgrad::cuda {
namespace {

struct PackEntry {
  Row row;
  const void* gradient;  // null: zeros
  int64_t first_tile;
};

struct PackBatch {
  PackEntry entries[kBatch];
  void* slot;
  int64_t chunk_numel;
  int64_t tiles;  // of one rank
  double divisor;
  int count;
  bool accumulate;

  void append(const Row& row, const void* gradient) {
    entries[count++] = {row, gradient, tiles};
    tiles += tiles_in(row.span);
  }
};
static_assert(
    sizeof(PackBatch) <= 4096, "must fit the kernel parameters of every supported toolkit");

// A tile is a range of one parameter's reservation in the chunk of the rank whose row of blocks
// this is: gradient first, zeros behind it.
template <class Gradient, class Slot>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackBatch batch) {
  const int64_t rank = blockIdx.y;
  for (int64_t tile = blockIdx.x; tile < batch.tiles; tile += gridDim.x) {
    const PackEntry& entry = find_entry(batch.entries, batch.count, tile);
    const Row& row = entry.row;
    const int64_t begin = (tile - entry.first_tile) * kTile;
    const int64_t end = min(begin + kTile, row.span);
    const int64_t valid = entry.gradient == nullptr ? 0 : row.valid(rank);
    const int64_t filled = max(begin, min(end, valid));

    Slot* piece = static_cast<Slot*>(batch.slot) + rank * batch.chunk_numel + row.shard_offset;
    const Gradient* source = static_cast<const Gradient*>(entry.gradient) + rank * row.shard_numel;
    if (filled > begin) convert(source, piece, begin, filled, batch.divisor, batch.accumulate);
    if (!batch.accumulate) {
      for (int64_t j = filled + threadIdx.x; j < end; j += kThreads) piece[j] = Slot{};
    }
  }
}

cudaError_t launch(
    const PackBatch& batch, const PackArguments& arguments, DType dtype, cudaStream_t stream) {
  if (batch.tiles == 0) return cudaSuccess;
  visit(dtype, [&](auto gradient) {
    visit(arguments.slot_dtype, [&](auto slot) {
      pack_kernel<typename decltype(gradient)::type, typename decltype(slot)::type>
          <<<blocks_for(batch.tiles, arguments.world_size), kThreads, 0, stream>>>(batch);
    });
  });
  return cudaGetLastError();
}

// Launches for the gradients of one dtype. A missing one has none, and goes along with the first
// that is there.
cudaError_t pack_dtype(
    const PackArguments& arguments, DType dtype, DType dtype_of_missing, cudaStream_t stream) {
  PackBatch batch{};
  batch.slot = arguments.slot;
  batch.chunk_numel = arguments.chunk_numel;
  batch.divisor = arguments.divisor;
  batch.accumulate = arguments.accumulate;
  for (size_t i = 0; i < arguments.gradients.size(); ++i) {
    const Gradient& gradient = arguments.gradients[i];
    const bool missing = gradient.data == nullptr;
    if ((missing ? dtype_of_missing : gradient.dtype) != dtype) continue;
    if (missing && arguments.accumulate) continue;
    if (arguments.rows[i].span == 0) continue;
    batch.append(arguments.rows[i], gradient.data);
    if (batch.count == kBatch) {
      const cudaError_t status = launch(batch, arguments, dtype, stream);
      if (status != cudaSuccess) return status;
      batch.count = 0;
      batch.tiles = 0;
    }
  }
  return launch(batch, arguments, dtype, stream);
}

}  // namespace
}  // namespace shardgrad::cuda

extern "C" int shardgrad_cuda_pack(const shardgrad::PackArguments* arguments, void* stream) {
  using shardgrad::DType;
  const auto& gradients = arguments->gradients;
  const auto there = std::find_if(gradients.begin(), gradients.end(), [](const auto& gradient) {
    return gradient.data != nullptr;
  });
  const DType dtype_of_missing = there == gradients.end() ? arguments->slot_dtype : there->dtype;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    const cudaError_t status = shardgrad::cuda::pack_dtype(
        *arguments, dtype, dtype_of_missing, static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}
