#include "norm.h"

#include <algorithm>

#include "../norm_math.h"
#include "blocks.h"

namespace shardgrad::cpu {
namespace {

// A tile is summed in lanes, each in its order, and the lanes are joined by halves. Compilers
// vectorise loops over lanes for any width without changing that order, so every clone gives the
// same bits.
constexpr int64_t kLanes = 16;

template <Norm kNorm, class T>
SHARDGRAD_INLINE double accumulate(const T* __restrict data, int64_t count, double norm_type) {
  double lanes[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) lanes[l] = nothing_yet(kNorm);
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      lanes[l] = add_element(kNorm, norm_type, lanes[l], static_cast<double>(data[j + l]));
    }
  }
  for (int64_t l = 0; j < count; ++j, ++l) {
    lanes[l] = add_element(kNorm, norm_type, lanes[l], static_cast<double>(data[j]));
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] = join(kNorm, lanes[l], lanes[l + half]);
  }
  return lanes[0];
}

template <class T>
SHARDGRAD_INLINE double count_not_finite(const T* data, int64_t count) {
  int64_t total = 0;
  for (int64_t j = 0; j < count; ++j) {
    total += is_not_finite(static_cast<double>(data[j])) != 0 ? 1 : 0;
  }
  return static_cast<double>(total);
}

struct Found {
  double value;
  double not_finite;
};

template <class T>
SHARDGRAD_INLINE Found measure(Norm norm, const T* data, int64_t count, double norm_type) {
  Found found{0, 0};
  switch (norm) {
    case Norm::kSquares:
      found.value = accumulate<Norm::kSquares>(data, count, norm_type);
      break;
    case Norm::kSizes:
      found.value = accumulate<Norm::kSizes>(data, count, norm_type);
      break;
    case Norm::kCount:
      found.value = accumulate<Norm::kCount>(data, count, norm_type);
      break;
    case Norm::kMaximum:
      found.value = accumulate<Norm::kMaximum>(data, count, norm_type);
      break;
    case Norm::kMinimum:
      found.value = accumulate<Norm::kMinimum>(data, count, norm_type);
      break;
    default:
      found.value = accumulate<Norm::kPowers>(data, count, norm_type);
  }
  // An element that is not finite shows in these three, so that finding none costs nothing.
  const bool shows = norm == Norm::kSquares || norm == Norm::kSizes || norm == Norm::kMaximum;
  if (!shows || is_not_finite(found.value) != 0) found.not_finite = count_not_finite(data, count);
  return found;
}

// Half-width types become float first, in a pass that vectorises better than the sum would with
// them.
SHARDGRAD_INLINE Found
measure_tile(const NormArguments& args, Norm norm, int64_t at, int64_t count) {
  if (args.flat.dtype == DType::kFloat64) {
    return measure(norm, static_cast<const double*>(args.flat.data) + at, count, args.norm_type);
  }
  if (args.flat.dtype == DType::kFloat32) {
    return measure(norm, static_cast<const float*>(args.flat.data) + at, count, args.norm_type);
  }
  float block[kTileNumel];
  load(block, args.flat.data, args.flat.dtype, at, count);
  return measure(norm, static_cast<const float*>(block), count, args.norm_type);
}

// Tiles in order, so that a thread reads what lies together: all of its workers' first tiles, then
// their second ones.
SHARDGRAD_INLINE void accumulate_workers(const NormArguments& args, int64_t begin, int64_t end) {
  const Norm norm = norm_of(args.norm_type);
  const Segment& segment = args.segment;
  for (int64_t worker = begin; worker < end; ++worker) {
    args.scratch[worker] = nothing_yet(norm);
    args.scratch[kNormWorkers + worker] = 0;
  }
  for (int64_t round = 0; round + begin < segment.tiles; round += kNormWorkers) {
    int64_t i = find_row(segment, round + begin);
    for (int64_t tile = round + begin; tile < std::min(round + end, segment.tiles); ++tile) {
      while (i + 1 < segment.row_count && segment.rows[i + 1].first_tile <= tile) ++i;
      const SegmentRow& row = segment.rows[i];
      if (!is_live(segment, row)) continue;
      const int64_t start = (tile - row.first_tile) * kTileNumel;
      const int64_t count = std::min(kTileNumel, row.numel - start);
      const Found found = measure_tile(args, norm, row.grad_offset + start, count);
      args.scratch[tile - round] = join(norm, args.scratch[tile - round], found.value);
      args.scratch[kNormWorkers + tile - round] += found.not_finite;
    }
  }
}

}  // namespace

SHARDGRAD_CLONES void accumulate_norm(const NormArguments& args, int64_t begin, int64_t end) {
  accumulate_workers(args, begin, end);
}

void finish_norm(const NormArguments& args) {
  const Norm norm = norm_of(args.norm_type);
  double value = nothing_yet(norm);
  double not_finite = 0;
  for (int64_t worker = 0; worker < std::min(kNormWorkers, args.segment.tiles); ++worker) {
    value = join(norm, value, args.scratch[worker]);
    not_finite += args.scratch[kNormWorkers + worker];
  }
  args.out[0] = join(norm, args.out[0], value);
  args.out[1] += not_finite;
}

}  // namespace shardgrad::cpu
