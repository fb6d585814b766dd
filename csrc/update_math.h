// What one element goes through in an optimizer update, for CPU and CUDA alike.
// shardgrad/ops/update.py and weights.py say the same in torch ops, bit for bit; the sources of the
// formulas are named there.
#pragma once

#include <cmath>

#include "element.h"

namespace shardgrad {

SHARDGRAD_INLINE float square_root(float value) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}
SHARDGRAD_INLINE double square_root(double value) { return sqrt(value); }

// Adam's numbers that are the same for all elements of a row. Computed in double, then rounded
// once.
template <class C>
struct AdamRule {
  static constexpr int kHyperNumel = 5;
  static constexpr int kStates = 2;

  C gain;  // what a gradient is multiplied by; negative if the objective is maximized
  C decay;
  C weight_decay;
  C rate1;
  C beta2;
  C rate2;
  C step_size;
  C root_bias2;
  C eps;
  bool couples;  // weight decay is a part of the gradient

  // hyper: lr, beta1, beta2, eps, weight_decay. t: this update's number, from 1 on.
  SHARDGRAD_INLINE static AdamRule of(const double* hyper, C gain, double t, bool decoupled) {
    AdamRule rule;
    const double bias1 = 1 - pow(hyper[1], t);
    const double bias2 = 1 - pow(hyper[2], t);
    rule.gain = gain;
    rule.decay = decoupled ? static_cast<C>(1 - hyper[0] * hyper[4]) : C{1};
    rule.weight_decay = static_cast<C>(hyper[4]);
    rule.rate1 = static_cast<C>(1 - hyper[1]);
    rule.beta2 = static_cast<C>(hyper[2]);
    rule.rate2 = static_cast<C>(1 - hyper[2]);
    rule.step_size = static_cast<C>(hyper[0] / bias1);
    rule.root_bias2 = static_cast<C>(sqrt(bias2));
    rule.eps = static_cast<C>(hyper[3]);
    // Zero decay must not meet the parameter: zero times infinity is no zero.
    rule.couples = !decoupled && hyper[4] != 0;
    return rule;
  }

  SHARDGRAD_INLINE static void update(
      const AdamRule& rule, bool couples, C& weight, C grad, C& m, C& v) {
    C g = grad * rule.gain;
    const C w = weight * rule.decay;
    if (couples) g += w * rule.weight_decay;
    m += (g - m) * rule.rate1;
    v = v * rule.beta2 + g * rule.rate2 * g;
    weight = w - m * rule.step_size / (square_root(v) / rule.root_bias2 + rule.eps);
  }
};

enum class Momentum : int32_t { kNone, kFirst, kRunning };

template <class C>
struct SgdRule {
  static constexpr int kHyperNumel = 4;
  static constexpr int kStates = 1;

  C gain;
  C decay;
  C weight_decay;
  C momentum;
  C rate;
  C lr;
  bool couples;
  bool first;  // the momentum buffer holds nothing yet

  // hyper: lr, momentum, dampening, weight_decay.
  SHARDGRAD_INLINE static SgdRule of(const double* hyper, C gain, double t, bool decoupled) {
    SgdRule rule;
    rule.gain = gain;
    rule.decay = decoupled ? static_cast<C>(1 - hyper[0] * hyper[3]) : C{1};
    rule.weight_decay = static_cast<C>(hyper[3]);
    rule.momentum = static_cast<C>(hyper[1]);
    rule.rate = static_cast<C>(1 - hyper[2]);
    rule.lr = static_cast<C>(hyper[0]);
    rule.couples = !decoupled && hyper[3] != 0;
    rule.first = t == 1;
    return rule;
  }

  SHARDGRAD_INLINE static void update(
      const SgdRule& rule, bool couples, Momentum momentum, bool nesterov, C& weight, C grad,
      C& buffer) {
    C g = grad * rule.gain;
    const C w = weight * rule.decay;
    if (couples) g += w * rule.weight_decay;
    if (momentum != Momentum::kNone) {
      buffer = momentum == Momentum::kFirst ? g : buffer * rule.momentum + g * rule.rate;
      g = nesterov ? g + buffer * rule.momentum : buffer;
    }
    weight = w - g * rule.lr;
  }
};

// [Note: Exact weights] is in weights.py.

// The float32 value of a parameter with a float32 master; foreign bits win.
template <class Half>
SHARDGRAD_INLINE float exact_weight(Half param, float master) {
  return param.bits == from_float<Half>(master).bits ? master : to_float(param);
}

SHARDGRAD_INLINE float join_remainder(BFloat16 param, int16_t remainder) {
  return bit_cast<float>(
      (static_cast<uint32_t>(param.bits) << 16) + static_cast<uint32_t>(remainder));
}

// A NaN becomes the plain one: rounding up the upper half of another could carry into the sign.
SHARDGRAD_INLINE uint32_t bits_with_plain_nan(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

SHARDGRAD_INLINE BFloat16 upper_half(float value) {
  return {static_cast<uint16_t>((bits_with_plain_nan(value) + 0x8000u) >> 16)};
}

SHARDGRAD_INLINE int16_t remainder_of(float value) {
  return static_cast<int16_t>(static_cast<uint16_t>(bits_with_plain_nan(value)));
}

SHARDGRAD_INLINE uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

SHARDGRAD_INLINE uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;

SHARDGRAD_INLINE uint64_t dither_key(uint64_t seed, double t) {
  return mix64(mix64(seed + kGolden) + static_cast<uint64_t>(t) * kGolden);
}

// Noise in [0, 65536) for the element of the flat parameter tensor at `index`.
SHARDGRAD_INLINE uint32_t dither(uint64_t key, int64_t index) {
  const uint32_t low = static_cast<uint32_t>(index);
  const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(index) >> 32);
  const uint32_t mixed = mix32(low ^ static_cast<uint32_t>(key));
  return mix32(
             mixed +
             ((high * static_cast<uint32_t>(kGolden >> 32)) ^ static_cast<uint32_t>(key >> 32))) >>
      16;
}

SHARDGRAD_INLINE BFloat16 round_stochastically(float value, uint32_t noise) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0u : (bits + noise) >> 16)};
}

}  // namespace shardgrad
