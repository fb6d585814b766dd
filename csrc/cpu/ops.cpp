// The CPU kernels. Schemas are declared in shardgrad/ops/movement.py.
#include <torch/csrc/stable/library.h>

#include "../checks.h"
#include "combine.h"
#include "parallel.h"

namespace shardgrad::cpu {
namespace {

using torch::stable::Tensor;

// Threads share out positions within a chunk. Each takes its range in the chunk of every rank, so
// the work is even however unequal the parameters are.
struct Range {
  int64_t begin;
  int64_t end;

  // The part of a row's reservation inside this range, relative to the start of that reservation.
  Range within(const Row& row) const {
    return {
        std::max(begin - row.shard_offset, int64_t{0}), std::min(end - row.shard_offset, row.span)};
  }
};

void pack_row(const PackArguments& args, const Row& row, const Gradient& gradient, Range range) {
  for (int64_t rank = 0; rank < args.world_size; ++rank) {
    void* piece = advance(args.slot, args.slot_dtype, rank * args.chunk_numel + row.shard_offset);
    const int64_t filled = gradient.data == nullptr
        ? range.begin
        : std::clamp(row.valid(rank), range.begin, range.end);
    if (filled > range.begin) {
      const void* source = advance(gradient.data, gradient.dtype, rank * row.shard_numel);
      combine(
          &source, 1, gradient.dtype, piece, args.slot_dtype, range.begin, filled, args.divisor,
          args.accumulate);
    }
    if (!args.accumulate) {
      std::memset(
          advance(piece, args.slot_dtype, filled), 0,
          static_cast<size_t>((range.end - filled) * size_of(args.slot_dtype)));
    }
  }
}

void pack(
    const Tensors& grads, const Tensor& slot, const Tensor& table, int64_t chunk_numel,
    double divisor, bool accumulate) {
  const PackArguments args = check_pack(grads, slot, table, chunk_numel, divisor, accumulate);
  parallel(chunk_numel, chunk_numel * args.world_size, [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < args.gradients.size(); ++i) {
      const Range range = Range{begin, end}.within(args.rows[i]);
      if (range.begin < range.end) pack_row(args, args.rows[i], args.gradients[i], range);
    }
  });
}

void unpack_row(const UnpackArguments& args, const Row& row, Range range) {
  for (int64_t rank = 0; rank < args.world_size; ++rank) {
    const int64_t end = std::min(range.end, row.valid(rank));
    if (range.begin >= end) return;  // later ranks hold no more than this one
    const void* piece =
        advance(args.gathered, args.gathered_dtype, rank * args.chunk_numel + row.shard_offset);
    void* out = advance(
        args.unsharded, args.unsharded_dtype, row.unsharded_offset + rank * row.shard_numel);
    combine(
        &piece, 1, args.gathered_dtype, out, args.unsharded_dtype, range.begin, end, /*divisor=*/1,
        /*accumulate=*/false);
  }
}

void unpack(
    const Tensor& gathered, const Tensor& unsharded, const Tensor& table, int64_t chunk_numel) {
  const UnpackArguments args = check_unpack(gathered, unsharded, table, chunk_numel);
  parallel(chunk_numel, chunk_numel * args.world_size, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < args.row_count; ++i) {
      const Range range = Range{begin, end}.within(args.rows[i]);
      if (range.begin < range.end) unpack_row(args, args.rows[i], range);
    }
  });
}

void sum_chunks(const Tensors& chunks, const Tensor& out, double divisor, bool accumulate) {
  const SumArguments args = check_sum_chunks(chunks, out, divisor, accumulate);
  const int64_t count = static_cast<int64_t>(args.chunks.size());
  parallel(args.numel, args.numel * count, [&](int64_t begin, int64_t end) {
    combine(
        args.chunks.data(), count, args.chunk_dtype, args.out, args.out_dtype, begin, end,
        args.divisor, args.accumulate);
  });
}

}  // namespace
}  // namespace shardgrad::cpu

STABLE_TORCH_LIBRARY_IMPL(shardgrad, CPU, library) {
  library.impl("pack", TORCH_BOX(&shardgrad::cpu::pack));
  library.impl("unpack", TORCH_BOX(&shardgrad::cpu::unpack));
  library.impl("sum_chunks", TORCH_BOX(&shardgrad::cpu::sum_chunks));
}
