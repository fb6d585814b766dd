// Blocks: runs of elements in one arithmetic type that stay in L1 between passes, so each pass is a
// plain loop over arrays that cannot overlap, which compilers vectorise whatever mix of dtypes
// there is.
#pragma once

#include "../element.h"

// One binary runs on every x86-64 and uses AVX2 where there is some: the loader picks the clone.
// Everything the clones call is force-inlined, so it is compiled once for each. Elsewhere the
// baseline is enough (AArch64 always has SIMD), and clang lacks the attribute in versions still in
// use.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define SHARDGRAD_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define SHARDGRAD_CLONES
#endif

namespace shardgrad::cpu {

constexpr int64_t kBlock = 1024;

template <class Compute>
SHARDGRAD_INLINE void load(
    Compute* block, const void* source, DType dtype, int64_t begin, int64_t count) {
  visit(dtype, [=](auto tag) __attribute__((always_inline)) {
    const auto* from = static_cast<const typename decltype(tag)::type*>(source) + begin;
    for (int64_t j = 0; j < count; ++j) block[j] = static_cast<Compute>(to_float(from[j]));
  });
}

template <class Compute>
SHARDGRAD_INLINE void store(
    const Compute* block, void* out, DType dtype, int64_t begin, int64_t count) {
  visit(dtype, [=](auto tag) __attribute__((always_inline)) {
    using Out = typename decltype(tag)::type;
    auto* to = static_cast<Out*>(out) + begin;
    for (int64_t j = 0; j < count; ++j) to[j] = from_float<Out>(block[j]);
  });
}

}  // namespace shardgrad::cpu
