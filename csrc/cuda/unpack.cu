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

// Every parameter in the batch, from `ranks` consecutive ranks beginning with `first_rank`.
struct UnpackBatch {
  UnpackEntry entries[kBatch];
  const void* chunks[kBatch];
  void* unsharded;
  int64_t first_rank;
  int64_t tiles;  // of one rank
  int ranks;
  int count;

  void append(const Row& row) {
    entries[count++] = {row.numel, row.shard_numel, row.shard_offset, row.unsharded_offset, tiles};
    tiles += tiles_in(row.shard_numel);
  }
};
static_assert(sizeof(UnpackBatch) <= 4096, "must fit the kernel parameters of every supported toolkit");

// A tile is a range of one parameter's piece in the chunk of the rank whose row of blocks this is.
template <class Chunk, class Unsharded>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const __grid_constant__ UnpackBatch batch) {
  const void* chunk = batch.chunks[blockIdx.y];
  const int64_t rank = batch.first_rank + blockIdx.y;
  for (int64_t tile = blockIdx.x; tile < batch.tiles; tile += gridDim.x) {
    const UnpackEntry& entry = find_entry(batch.entries, batch.count, tile);
    const int64_t begin = (tile - entry.first_tile) * kTile;
    const int64_t first = rank * entry.shard_numel;
    const int64_t end = min(min(begin + kTile, entry.shard_numel), entry.numel - first);
    if (begin >= end) continue;

    const Chunk* source = static_cast<const Chunk*>(chunk) + entry.shard_offset;
    Unsharded* out = static_cast<Unsharded*>(batch.unsharded) + entry.unsharded_offset + first;
    convert(source, out, begin, end, /*divisor=*/1, /*accumulate=*/false);
  }
}

cudaError_t launch(const UnpackBatch& batch, const UnpackArguments& arguments, cudaStream_t stream) {
  if (batch.tiles == 0) return cudaSuccess;
  visit(arguments.chunk_dtype, [&](auto chunk) {
    visit(arguments.unsharded_dtype, [&](auto unsharded) {
      unpack_kernel<typename decltype(chunk)::type, typename decltype(unsharded)::type>
          <<<blocks_for(batch.tiles, batch.ranks), kThreads, 0, stream>>>(batch);
    });
  });
  return cudaGetLastError();
}

// Unpacks what the ranks [first_rank, first_rank + kBatch) hold.
cudaError_t unpack_ranks(const UnpackArguments& arguments, int64_t first_rank, cudaStream_t stream) {
  UnpackBatch batch{};
  batch.unsharded = arguments.unsharded;
  batch.first_rank = first_rank;
  const int64_t world_size = static_cast<int64_t>(arguments.chunks.size());
  batch.ranks = static_cast<int>(std::min<int64_t>(kBatch, world_size - first_rank));
  std::copy_n(arguments.chunks.begin() + first_rank, batch.ranks, batch.chunks);
  for (int64_t i = 0; i < arguments.row_count; ++i) {
    if (arguments.rows[i].numel == 0) continue;
    batch.append(arguments.rows[i]);
    if (batch.count == kBatch) {
      const cudaError_t status = launch(batch, arguments, stream);
      if (status != cudaSuccess) return status;
      batch.count = 0;
      batch.tiles = 0;
    }
  }
  return launch(batch, arguments, stream);
}

}  // namespace
}  // namespace shardgrad::cuda

extern "C" int shardgrad_cuda_unpack(const shardgrad::UnpackArguments* arguments, void* stream) {
  const int64_t world_size = static_cast<int64_t>(arguments->chunks.size());
  for (int64_t rank = 0; rank < world_size; rank += shardgrad::cuda::kBatch) {
    const cudaError_t status =
        shardgrad::cuda::unpack_ranks(*arguments, rank, static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}
