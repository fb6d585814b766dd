// The one CPU primitive under all three ops.
#pragma once

#include <cstdint>

#include "../element.h"

namespace shardgrad::cpu {

// out[j] = (accumulate ? out[j] : 0) + (sources[0][j] + sources[1][j] + ...) / divisor for j in
// [begin, end).
//
// Sums from left to right in float (double if either dtype is double), divides truly, rounds once.
// `out` may be one of the sources, at the same address. Runs on the calling thread.
void combine(
    const void* const* sources, int64_t source_count, DType source_dtype, void* out,
    DType out_dtype, int64_t begin, int64_t end, double divisor, bool accumulate);

}  // namespace shardgrad::cpu
