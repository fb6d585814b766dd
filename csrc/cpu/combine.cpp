#include "combine.h"

#include <algorithm>

#include "../arguments.h"
#include "blocks.h"

namespace shardgrad::cpu {
namespace {

template <class Compute>
SHARDGRAD_INLINE void add(
    Compute* block, const void* source, DType dtype, int64_t begin, int64_t count) {
  visit(dtype, [=](auto tag) __attribute__((always_inline)) {
    const auto* from = static_cast<const typename decltype(tag)::type*>(source) + begin;
    for (int64_t j = 0; j < count; ++j) block[j] += static_cast<Compute>(to_float(from[j]));
  });
}

template <class Compute>
SHARDGRAD_INLINE void combine_in(
    const void* const* sources, int64_t source_count, DType source_dtype, void* out,
    DType out_dtype, int64_t begin, int64_t end, Compute divisor, bool accumulate) {
  Compute block[kBlock];
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t count = std::min(kBlock, end - start);
    load(block, sources[0], source_dtype, start, count);
    for (int64_t k = 1; k < source_count; ++k) add(block, sources[k], source_dtype, start, count);
    if (divisor != 1) {
      for (int64_t j = 0; j < count; ++j) block[j] /= divisor;
    }
    if (accumulate) add(block, out, out_dtype, start, count);
    store(block, out, out_dtype, start, count);
  }
}

}  // namespace

SHARDGRAD_CLONES void combine(
    const void* const* sources, int64_t source_count, DType source_dtype, void* out,
    DType out_dtype, int64_t begin, int64_t end, double divisor, bool accumulate) {
  if (source_count == 1 && source_dtype == out_dtype && divisor == 1 && !accumulate) {
    const void* from = advance(sources[0], source_dtype, begin);
    void* to = advance(out, out_dtype, begin);
    if (from != to) std::memcpy(to, from, static_cast<size_t>((end - begin) * size_of(out_dtype)));
  } else if (source_dtype == DType::kFloat64 || out_dtype == DType::kFloat64) {
    combine_in<double>(
        sources, source_count, source_dtype, out, out_dtype, begin, end, divisor, accumulate);
  } else {
    combine_in<float>(
        sources, source_count, source_dtype, out, out_dtype, begin, end,
        static_cast<float>(divisor), accumulate);
  }
}

}  // namespace shardgrad::cpu
