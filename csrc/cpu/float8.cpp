#include "float8.h"

#include <cstring>

#include "blocks.h"

namespace shardgrad::cpu {
namespace {

// Loops of a fixed length over arrays that cannot overlap, which compilers vectorise.

SHARDGRAD_INLINE void quantize_tail(const float* __restrict values, uint8_t* __restrict codes) {
  for (int64_t j = 0; j < kFloat8Block; ++j) {
    codes[j] = float8_code(values[j] > kLargestCode ? kLargestCode : values[j]);
  }
}

// Returns the exponent.
SHARDGRAD_INLINE int quantize_block(
    const float* __restrict values, uint8_t* __restrict kept, int kept_exponent, uint8_t* __restrict codes) {
  float total[kFloat8Block];
  uint32_t largest = 0;
  const float owed = scale_of(kept_exponent - kLossShift);
  for (int64_t j = 0; j < kFloat8Block; ++j) {
    total[j] = values[j] + float8_value(kept[j]) * owed;
    const uint32_t magnitude = bit_cast<uint32_t>(total[j]) & 0x7fffffffu;
    const uint32_t finite = magnitude < kInfinityBits ? magnitude : 0u;
    largest = finite > largest ? finite : largest;
  }
  const int exponent = exponent_for(largest);
  const float scale = scale_of(exponent), inverse = inverse_scale_of(exponent);
  const float inverse_of_loss = inverse_scale_of(exponent - kLossShift);
  for (int64_t j = 0; j < kFloat8Block; ++j) codes[j] = float8_code(total[j] * inverse);
  for (int64_t j = 0; j < kFloat8Block; ++j) kept[j] = loss_code(total[j], codes[j], scale, inverse_of_loss);
  return exponent;
}

SHARDGRAD_INLINE bool is_empty(const float* values) {
  uint32_t any = 0;
  for (int64_t j = 0; j < kFloat8Block; ++j) any |= bit_cast<uint32_t>(values[j]) & 0x7fffffffu;
  return any == 0;
}

SHARDGRAD_INLINE void quantize_in(const QuantizeArguments& args, int64_t begin, int64_t end) {
  uint8_t* const kept_exponents = args.kept + args.blocks * kFloat8Block;
  for (int64_t b = begin; b < end; ++b) {
    uint8_t* const row = args.message + b / args.row_blocks * args.row_nbytes;
    uint8_t* const codes = row + b % args.row_blocks * kFloat8Block;
    uint8_t& exponent = row[args.row_blocks * kFloat8Block + b % args.row_blocks];
    const float* const values = args.values + b * kFloat8Block;
    if (b % args.period >= args.tail) {
      quantize_tail(values, codes);
      exponent = kUnitExponent;
    } else if (is_empty(values)) {
      std::memset(codes, 0, kFloat8Block);
      exponent = 0;
    } else {
      exponent = static_cast<uint8_t>(
          quantize_block(values, args.kept + b * kFloat8Block, kept_exponents[b], codes));
      kept_exponents[b] = exponent;
    }
  }
}

SHARDGRAD_INLINE void sum_in(const SumQuantizedArguments& args, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    float sum[kFloat8Block];
    for (size_t k = 0; k < args.messages.size(); ++k) {
      const uint8_t* const row = args.messages[k] + b / args.row_blocks * args.row_nbytes;
      const uint8_t* const codes = row + b % args.row_blocks * kFloat8Block;
      const float scale = scale_of(row[args.row_blocks * kFloat8Block + b % args.row_blocks]);
      if (k == 0) {
        for (int64_t j = 0; j < kFloat8Block; ++j) sum[j] = float8_value(codes[j]) * scale;
      } else {
        for (int64_t j = 0; j < kFloat8Block; ++j) sum[j] += float8_value(codes[j]) * scale;
      }
    }
    std::memcpy(args.out + b * kFloat8Block, sum, sizeof(sum));
  }
}

}  // namespace

SHARDGRAD_CLONES void quantize_blocks(const QuantizeArguments& args, int64_t begin, int64_t end) {
  quantize_in(args, begin, end);
}

SHARDGRAD_CLONES void sum_quantized_blocks(const SumQuantizedArguments& args, int64_t begin, int64_t end) {
  sum_in(args, begin, end);
}

}  // namespace shardgrad::cpu
