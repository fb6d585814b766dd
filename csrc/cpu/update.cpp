#include "update.h"

#include <algorithm>

#include "../arguments.h"
#include "../update_math.h"
#include "blocks.h"

namespace shardgrad::cpu {
namespace {

// An operand that has the type of arithmetic is worked on where it lies; any other passes through
// its block.
template <class C>
struct Blocks {
  alignas(64) C weight[kBlock];
  alignas(64) C grad[kBlock];
  alignas(64) C states[2][kBlock];
};

template <class C>
constexpr DType kDTypeOf = std::is_same_v<C, double> ? DType::kFloat64 : DType::kFloat32;

template <class C>
SHARDGRAD_INLINE C* fetch(C* block, void* data, DType dtype, int64_t begin, int64_t count) {
  if (dtype == kDTypeOf<C>) return static_cast<C*>(data) + begin;
  load(block, data, dtype, begin, count);
  return block;
}

template <class C>
SHARDGRAD_INLINE void put_back(
    const C* at, const C* block, void* data, DType dtype, int64_t begin, int64_t count) {
  if (at == block) store(block, data, dtype, begin, count);
}

// [Note: Exact weights] in weights.py. With a float32 master, the master is where the weight is
// worked on.
template <class Half>
SHARDGRAD_INLINE void settle_master(const Half* param, float* master, int64_t count) {
  for (int64_t j = 0; j < count; ++j) master[j] = exact_weight(param[j], master[j]);
}

template <class C>
SHARDGRAD_INLINE C* fetch_weight(
    const UpdateArguments& args, const SegmentRow& row, C* block, int64_t start, int64_t count) {
  const int64_t at = row.param_offset + start;
  if constexpr (std::is_same_v<C, float>) {
    const int64_t state_at = row.state_offset + start;
    if (args.master_kind == Master::kFloat32) {
      float* master = static_cast<float*>(args.master) + state_at;
      if (args.param.dtype == DType::kBFloat16) {
        settle_master(static_cast<const BFloat16*>(args.param.data) + at, master, count);
      } else {
        settle_master(static_cast<const Float16*>(args.param.data) + at, master, count);
      }
      return master;
    }
    if (args.master_kind == Master::kRemainder) {
      const auto* param = static_cast<const BFloat16*>(args.param.data) + at;
      const auto* remainder = static_cast<const int16_t*>(args.master) + state_at;
      for (int64_t j = 0; j < count; ++j) block[j] = join_remainder(param[j], remainder[j]);
      return block;
    }
  }
  return fetch(block, args.param.data, args.param.dtype, at, count);
}

template <class C>
SHARDGRAD_INLINE void put_weight_back(
    const UpdateArguments& args, const SegmentRow& row, const C* weight, const C* block,
    uint64_t key, int64_t start, int64_t count) {
  const int64_t at = row.param_offset + start;
  if constexpr (std::is_same_v<C, float>) {
    auto* halves = static_cast<BFloat16*>(args.param.data) + at;
    if (args.master_kind == Master::kRemainder) {
      auto* remainder = static_cast<int16_t*>(args.master) + row.state_offset + start;
      for (int64_t j = 0; j < count; ++j) remainder[j] = remainder_of(weight[j]);
      for (int64_t j = 0; j < count; ++j) halves[j] = upper_half(weight[j]);
      return;
    }
    if (args.stochastic) {
      for (int64_t j = 0; j < count; ++j)
        halves[j] = round_stochastically(weight[j], dither(key, at + j));
      return;
    }
    if (args.master_kind == Master::kFloat32) {
      store(weight, args.param.data, args.param.dtype, at, count);
      return;
    }
  }
  put_back(weight, block, args.param.data, args.param.dtype, at, count);
}

template <bool kCouples, class C>
SHARDGRAD_INLINE void adam_loop(
    const AdamRule<C> rule, C* __restrict weight, const C* __restrict grad, C* __restrict m,
    C* __restrict v, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    AdamRule<C>::update(rule, kCouples, weight[j], grad[j], m[j], v[j]);
  }
}

template <class C>
SHARDGRAD_INLINE void run(
    const UpdateArguments&, const AdamRule<C>& rule, C* weight, const C* grad, C* const* states,
    int64_t count) {
  if (rule.couples) {
    adam_loop<true>(rule, weight, grad, states[0], states[1], count);
  } else {
    adam_loop<false>(rule, weight, grad, states[0], states[1], count);
  }
}

template <bool kCouples, Momentum kMomentum, bool kNesterov, class C>
SHARDGRAD_INLINE void sgd_loop(
    const SgdRule<C> rule, C* __restrict weight, const C* __restrict grad, C* __restrict buffer,
    int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    C unused = 0;
    SgdRule<C>::update(
        rule, kCouples, kMomentum, kNesterov, weight[j], grad[j],
        kMomentum == Momentum::kNone ? unused : buffer[j]);
  }
}

template <bool kCouples, class C>
SHARDGRAD_INLINE void run_sgd(
    const UpdateArguments& args, const SgdRule<C>& rule, C* weight, const C* grad, C* buffer,
    int64_t count) {
  if (args.state_count == 0) {
    sgd_loop<kCouples, Momentum::kNone, false>(rule, weight, grad, buffer, count);
  } else if (rule.first && args.nesterov) {
    sgd_loop<kCouples, Momentum::kFirst, true>(rule, weight, grad, buffer, count);
  } else if (rule.first) {
    sgd_loop<kCouples, Momentum::kFirst, false>(rule, weight, grad, buffer, count);
  } else if (args.nesterov) {
    sgd_loop<kCouples, Momentum::kRunning, true>(rule, weight, grad, buffer, count);
  } else {
    sgd_loop<kCouples, Momentum::kRunning, false>(rule, weight, grad, buffer, count);
  }
}

template <class C>
SHARDGRAD_INLINE void run(
    const UpdateArguments& args, const SgdRule<C>& rule, C* weight, const C* grad, C* const* states,
    int64_t count) {
  if (rule.couples) {
    run_sgd<true>(args, rule, weight, grad, states[0], count);
  } else {
    run_sgd<false>(args, rule, weight, grad, states[0], count);
  }
}

template <class Rule, class C>
SHARDGRAD_INLINE void update_block(
    const UpdateArguments& args, const SegmentRow& row, const Rule& rule, uint64_t key,
    Blocks<C>& blocks, int64_t start, int64_t count) {
  C* weight = fetch_weight(args, row, blocks.weight, start, count);
  // The gradient is only read: the cast lets it share `fetch` with what is written.
  const C* grad = fetch(
      blocks.grad, const_cast<void*>(args.grad.data), args.grad.dtype, row.grad_offset + start,
      count);
  C* states[2] = {nullptr, nullptr};
  const int64_t at = row.state_offset + start;
  for (int k = 0; k < args.state_count; ++k) {
    states[k] = fetch(blocks.states[k], args.states[k].data, args.states[k].dtype, at, count);
  }
  run(args, rule, weight, grad, states, count);
  put_weight_back(args, row, weight, blocks.weight, key, start, count);
  for (int k = 0; k < args.state_count; ++k) {
    put_back(states[k], blocks.states[k], args.states[k].data, args.states[k].dtype, at, count);
  }
}

template <class Rule, class C>
SHARDGRAD_INLINE void update_tiles(
    const UpdateArguments& args, int64_t begin_tile, int64_t end_tile) {
  Blocks<C> blocks;
  Rule rule;
  uint64_t key = 0;
  // what `rule` and `key` were made for; most rows of a segment have taken as many steps
  double rule_t = 0;
  const C gain = static_cast<C>(args.scale.read()) * static_cast<C>(args.maximize ? -1 : 1);
  const Segment& segment = args.segment;
  for (int64_t i = find_row(segment, begin_tile); i < segment.row_count; ++i) {
    const SegmentRow& row = segment.rows[i];
    if (row.first_tile >= end_tile) break;
    if (row.numel == 0 || !is_live(segment, row)) continue;
    const double t = static_cast<double>(args.steps[row.step_index]) + 1;
    if (t != rule_t) {
      rule = Rule::of(args.hyper, gain, t, args.decoupled);
      key = dither_key(args.seed, t);
      rule_t = t;
    }
    const int64_t begin = std::max<int64_t>(begin_tile - row.first_tile, 0) * kTileNumel;
    const int64_t end = std::min((end_tile - row.first_tile) * kTileNumel, row.numel);
    for (int64_t start = begin; start < end; start += kBlock) {
      update_block(args, row, rule, key, blocks, start, std::min(kBlock, end - start));
    }
  }
}

}  // namespace

SHARDGRAD_CLONES void update_by_adam(const UpdateArguments& args, int64_t begin, int64_t end) {
  if (args.param.dtype == DType::kFloat64) {
    update_tiles<AdamRule<double>, double>(args, begin, end);
  } else {
    update_tiles<AdamRule<float>, float>(args, begin, end);
  }
}

SHARDGRAD_CLONES void update_by_sgd(const UpdateArguments& args, int64_t begin, int64_t end) {
  if (args.param.dtype == DType::kFloat64) {
    update_tiles<SgdRule<double>, double>(args, begin, end);
  } else {
    update_tiles<SgdRule<float>, float>(args, begin, end);
  }
}

}  // namespace shardgrad::cpu
