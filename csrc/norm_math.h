// What a norm is made of, for CPU and CUDA alike: how one size joins an accumulated value, and two
// values join.
#pragma once

#include <cmath>

#include "element.h"

namespace shardgrad {

enum class Norm : int32_t { kSquares, kSizes, kCount, kMaximum, kMinimum, kPowers };

SHARDGRAD_INLINE Norm norm_of(double norm_type) {
  if (norm_type == 2) return Norm::kSquares;
  if (norm_type == 1) return Norm::kSizes;
  if (norm_type == 0) return Norm::kCount;
  if (norm_type == HUGE_VAL) return Norm::kMaximum;
  if (norm_type == -HUGE_VAL) return Norm::kMinimum;
  return Norm::kPowers;
}

SHARDGRAD_INLINE double nothing_yet(Norm norm) { return norm == Norm::kMinimum ? HUGE_VAL : 0; }

// Two accumulated values; a NaN stays one.
SHARDGRAD_INLINE double join(Norm norm, double a, double b) {
  if (norm == Norm::kMaximum) return b > a || b != b ? b : a;
  if (norm == Norm::kMinimum) return b < a || b != b ? b : a;
  return a + b;
}

SHARDGRAD_INLINE double add_element(Norm norm, double norm_type, double so_far, double value) {
  const double size = fabs(value);
  switch (norm) {
    case Norm::kSquares:
      return so_far + value * value;
    case Norm::kCount:
      return so_far + (value != 0 ? 1 : 0);
    case Norm::kPowers:
      return so_far + pow(size, norm_type);
    default:
      return join(norm, so_far, size);
  }
}

// 1 for infinities and NaNs, which differ from themselves by something other than 0.
SHARDGRAD_INLINE double is_not_finite(double value) { return value - value != 0 ? 1 : 0; }

}  // namespace shardgrad
