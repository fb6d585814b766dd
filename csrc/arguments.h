// The checked arguments of each op as plain data, so that kernels need to know nothing about torch.
#pragma once

#include <cstdint>
#include <vector>

#include "element.h"

namespace shardgrad {

// One row of the table that `ShardLayout.table` builds: int64 [parameters, 5], row-major, in host
// memory. All values count elements.
struct Row {
  int64_t numel;             // elements of the whole parameter
  int64_t shard_numel;       // elements of a full piece
  int64_t span;              // elements a chunk reserves for the piece, at least shard_numel
  int64_t shard_offset;      // first element inside a chunk
  int64_t unsharded_offset;  // first element inside the flat unsharded buffer

  // Elements of the piece that `rank` really holds; trailing ranks may hold few or none.
  SHARDGRAD_INLINE int64_t valid(int64_t rank) const {
    const int64_t rest = numel - rank * shard_numel;
    return rest < 0 ? 0 : rest < shard_numel ? rest : shard_numel;
  }
};
static_assert(sizeof(Row) == 5 * sizeof(int64_t), "a Row must match a row of the table");

struct Gradient {
  const void* data;  // null: no gradient this time
  DType dtype;
};

struct PackArguments {
  std::vector<Gradient> gradients;
  const Row* rows;
  void* slot;
  DType slot_dtype;
  int64_t world_size;
  int64_t chunk_numel;
  double divisor;
  bool accumulate;
};

struct UnpackArguments {
  const void* gathered;  // the chunks of all ranks, side by side
  DType gathered_dtype;
  int64_t world_size;
  int64_t chunk_numel;
  const Row* rows;
  int64_t row_count;
  void* unsharded;
  DType unsharded_dtype;
};

struct SumArguments {
  std::vector<const void*> chunks;
  DType chunk_dtype;
  void* out;
  DType out_dtype;
  int64_t numel;
  double divisor;
  bool accumulate;
};

inline const void* advance(const void* data, DType dtype, int64_t elements) {
  return static_cast<const char*>(data) + elements * size_of(dtype);
}

inline void* advance(void* data, DType dtype, int64_t elements) {
  return static_cast<char*>(data) + elements * size_of(dtype);
}

}  // namespace shardgrad
