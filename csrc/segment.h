// Segments, the parameters that one launch updates, as plain data. shardgrad/ops/segments.py has
// the meanings.
#pragma once

#include "element.h"

namespace shardgrad {

// Elements of a tile, the unit of work; `first_tile` in the table counts in them, so segments.py
// has it too.
constexpr int64_t kTileNumel = 2048;

// One row of the table that `segment_rows` builds: int64 [parameters, 7], row-major, on the device.
struct SegmentRow {
  int64_t param_offset;
  int64_t grad_offset;
  int64_t state_offset;
  int64_t numel;
  int64_t step_index;
  int64_t flag_index;
  int64_t first_tile;
};
static_assert(
    sizeof(SegmentRow) == 7 * sizeof(int64_t), "a SegmentRow must match a row of the table");

struct Array {
  void* data;
  DType dtype;
  int64_t numel;
};

struct ConstArray {
  const void* data;
  DType dtype;
  int64_t numel;
};

struct Segment {
  const SegmentRow* rows;
  int64_t row_count;
  int64_t tiles;
  ConstArray touched;
};

// A number in device memory, float or double; null is 1.
struct Scale {
  const void* data;
  bool is_double;

  SHARDGRAD_INLINE double read() const {
    if (data == nullptr) return 1;
    return is_double ? *static_cast<const double*>(data) : *static_cast<const float*>(data);
  }
};

enum class Master : int32_t { kNone, kFloat32, kRemainder };

// Everything an optimizer update reads and writes; small enough to be the parameter of a kernel.
struct UpdateArguments {
  Segment segment;
  Array param;
  ConstArray grad;
  Array states[2];
  int32_t state_count;
  int64_t state_numel;  // of each state and of the master; -1 without any
  Master master_kind;
  void* master;
  float* steps;
  int64_t steps_numel;
  int32_t* ticket;
  const double* hyper;
  Scale scale;
  const float* found_inf;  // null: 0
  uint64_t seed;
  bool decoupled;
  bool maximize;
  bool stochastic;  // only where the parameter is bfloat16 and there is no master
  bool nesterov;

  bool can_round_stochastically() const {
    return param.dtype == DType::kBFloat16 && master_kind == Master::kNone;
  }
};

constexpr int64_t kNormWorkers = 1024;
constexpr int64_t kNormScratchNumel = 2 * kNormWorkers + 1;  // norm.py has it too

struct NormArguments {
  Segment segment;
  ConstArray flat;
  double* out;
  double* scratch;  // a value for each worker, a count for each worker, and the ticket
  double norm_type;
};

// Index of the row whose tiles hold `tile`: the last one that begins at or before it. Empty rows
// have the `first_tile` of their successor, so they are never found.
SHARDGRAD_INLINE int64_t find_row(const Segment& segment, int64_t tile) {
  int64_t low = 0;
  for (int64_t high = segment.row_count; high - low > 1;) {
    const int64_t middle = low + (high - low) / 2;
    if (segment.rows[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

SHARDGRAD_INLINE double read_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(static_cast<const BFloat16*>(data)[index]);
    case DType::kFloat16:
      return to_float(static_cast<const Float16*>(data)[index]);
    case DType::kFloat64:
      return static_cast<const double*>(data)[index];
    default:
      return static_cast<const float*>(data)[index];
  }
}

SHARDGRAD_INLINE bool is_live(const Segment& segment, const SegmentRow& row) {
  return read_element(segment.touched.data, segment.touched.dtype, row.flag_index) > 0;
}

// Whether an update advances the step count of row `i`, which rows of one parameter share with the
// one before.
SHARDGRAD_INLINE bool counts_step(const Segment& segment, int64_t i) {
  const SegmentRow& row = segment.rows[i];
  return is_live(segment, row) && (i == 0 || segment.rows[i - 1].step_index != row.step_index);
}

}  // namespace shardgrad
