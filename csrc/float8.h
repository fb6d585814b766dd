// Float32 in blocks of float8 with a scale: [Note: Float8 blocks] in shardgrad/ops/float8.py. CPU and CUDA
// kernels both include this file, so that they give the same bits.
#pragma once

#include <vector>

#include "element.h"

namespace shardgrad {

constexpr int64_t kFloat8Block = 128;

// All offsets and lengths count blocks, except `row_nbytes`.
struct QuantizeArguments {
  const float* values;
  uint8_t* kept;  // a code for each value, then an exponent for each block
  uint8_t* message;
  int64_t blocks;
  int64_t row_blocks;
  int64_t row_nbytes;
  int64_t period;
  int64_t tail;
};

struct SumQuantizedArguments {
  std::vector<const uint8_t*> messages;
  float* out;
  int64_t blocks;
  int64_t row_blocks;
  int64_t row_nbytes;
};

constexpr int kUnitExponent = 127;  // of a scale of 1
constexpr int kLeastExponent = 9;   // by which a loss has a normal float as its scale
constexpr int kLossShift = 4;       // powers of two by which the scale of a loss is smaller
constexpr float kLargestCode = 448;
constexpr uint32_t kInfinityBits = 0x7f800000u;

// The scale of an exponent; 0 for that of a block of zeros.
SHARDGRAD_INLINE float scale_of(int exponent) {
  return exponent <= 0 ? 0.0f : bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
}

// What values are multiplied by, since a power of two has an exact inverse.
SHARDGRAD_INLINE float inverse_scale_of(int exponent) { return scale_of(2 * kUnitExponent - exponent); }

// The smallest exponent with which a block fits, given the bits of its largest finite magnitude: 448 is 1.75
// times a power of two.
SHARDGRAD_INLINE int exponent_for(uint32_t largest) {
  const int exponent = static_cast<int>(largest >> 23) - 8 + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0);
  return exponent < kLeastExponent ? kLeastExponent : exponent;
}

// The nearest code of a value of at most 448 in magnitude, ties to even, and NaN of one that is not finite.
// Normal codes round as a bfloat16 does. For subnormal ones the FPU rounds: 2^14 has the unit of the smallest
// code (2^-9) in its last place, so adding it leaves the answer in the low bits.
SHARDGRAD_INLINE uint8_t float8_code(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  const uint32_t subnormal =
      bit_cast<uint32_t>(bit_cast<float>(magnitude) + 16384.0f) - bit_cast<uint32_t>(16384.0f);
  const uint32_t finite = ((bits >> 24) & 0x80u) | (magnitude < (121u << 23) ? subnormal : normal);
  return static_cast<uint8_t>(magnitude < kInfinityBits ? finite : 0x7fu);
}

SHARDGRAD_INLINE float float8_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t subnormal = bit_cast<uint32_t>(static_cast<float>(static_cast<int>(magnitude)) * 0x1p-9f);
  const uint32_t finite = magnitude < 8u ? subnormal : normal;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  return bit_cast<float>(sign | (magnitude == 0x7fu ? 0x7fc00000u : finite));
}

SHARDGRAD_INLINE bool is_finite(float value) {
  return (bit_cast<uint32_t>(value) & 0x7fffffffu) < kInfinityBits;
}

// What is left of a total, of which a code has been made, as a code of the smaller scale.
SHARDGRAD_INLINE uint8_t loss_code(float total, uint8_t code, float scale, float inverse_of_loss) {
  const float lost = total - float8_value(code) * scale;
  return float8_code(is_finite(lost) ? lost * inverse_of_loss : 0.0f);
}

}  // namespace shardgrad
