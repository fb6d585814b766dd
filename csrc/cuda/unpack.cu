#include "combine.cuh"
#include "launch.h"

namespace shardgrad::cuda {
namespace {

struct UnpackEntry {
  int64_t numel;
  int64_t shard_numel;
  int64_t shard_offset;
  int64_t unsharded_offset;
  int64_t first_tile;
};

// Every parameter in the batch, from the chunks of all ranks.
struct UnpackBatch {
  UnpackEntry entries[kBatch];
  const void* gathered;
  void* unsharded;
  int64_t chunk_numel;
  int64_t ranks;
  int64_t tiles;  // of one rank
  int count;

  void append(const Row& row) {
    entries[count++] = {row.numel, row.shard_numel, row.shard_offset, row.unsharded_offset, tiles};
    tiles += tiles_in(row.shard_numel);
  }
};
static_assert(
    sizeof(UnpackBatch) <= 4096, "must fit the kernel parameters of every supported toolkit");

// A tile is a range of one parameter's piece in a chunk. Rows of blocks share out the ranks, so
// that one launch serves any number of them.
template <class Chunk, class Unsharded>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ UnpackBatch batch) {
  for (int64_t rank = blockIdx.y; rank < batch.ranks; rank += gridDim.y) {
    const Chunk* chunk = static_cast<const Chunk*>(batch.gathered) + rank * batch.chunk_numel;
    for (int64_t tile = blockIdx.x; tile < batch.tiles; tile += gridDim.x) {
      const UnpackEntry& entry = find_entry(batch.entries, batch.count, tile);
      const int64_t begin = (tile - entry.first_tile) * kTile;
      const int64_t first = rank * entry.shard_numel;
      const int64_t end = min(min(begin + kTile, entry.shard_numel), entry.numel - first);
      if (begin >= end) continue;

      Unsharded* out = static_cast<Unsharded*>(batch.unsharded) + entry.unsharded_offset + first;
      convert(chunk + entry.shard_offset, out, begin, end, /*divisor=*/1, /*accumulate=*/false);
    }
  }
}

cudaError_t launch(
    const UnpackBatch& batch, const UnpackArguments& arguments, cudaStream_t stream) {
  if (batch.tiles == 0) return cudaSuccess;
  const dim3 blocks = blocks_for(batch.tiles, std::min(batch.ranks, kMaxBlocks));
  visit(arguments.gathered_dtype, [&](auto chunk) {
    visit(arguments.unsharded_dtype, [&](auto unsharded) {
      unpack_kernel<typename decltype(chunk)::type, typename decltype(unsharded)::type>
          <<<blocks, kThreads, 0, stream>>>(batch);
    });
  });
  return cudaGetLastError();
}

}  // namespace
}  // namespace shardgrad::cuda

extern "C" int shardgrad_cuda_unpack(const shardgrad::UnpackArguments* arguments, void* stream) {
  using shardgrad::cuda::kBatch;
  shardgrad::cuda::UnpackBatch batch{};
  batch.gathered = arguments->gathered;
  batch.unsharded = arguments->unsharded;
  batch.chunk_numel = arguments->chunk_numel;
  batch.ranks = arguments->world_size;
  for (int64_t i = 0; i < arguments->row_count; ++i) {
    if (arguments->rows[i].numel == 0) continue;
    batch.append(arguments->rows[i]);
    if (batch.count == kBatch) {
      const cudaError_t status =
          shardgrad::cuda::launch(batch, *arguments, static_cast<cudaStream_t>(stream));
      if (status != cudaSuccess) return status;
      batch.count = 0;
      batch.tiles = 0;
    }
  }
  return shardgrad::cuda::launch(batch, *arguments, static_cast<cudaStream_t>(stream));
}
