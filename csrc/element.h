// What an element is: storage types, exact conversions, and the type arithmetic runs in.
//
// CPU and CUDA kernels both include this file, so a value is loaded, computed and rounded by the
// same code everywhere. Every conversion to a narrower type rounds once, to nearest even.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define SHARDGRAD_INLINE __host__ __device__ __forceinline__
#else
#define SHARDGRAD_INLINE inline __attribute__((always_inline))
#endif

namespace shardgrad {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat64 };

// The half-width types are bare bits: arithmetic always happens in a wider type.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

SHARDGRAD_INLINE constexpr int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Arithmetic on `A` and `B` together runs in double if either is double, in float otherwise.
template <class A, class B>
using ComputeType =
    std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double>, double, float>;

template <class To, class From>
SHARDGRAD_INLINE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

SHARDGRAD_INLINE float to_float(BFloat16 value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// The exponent field grows by 112 (bias 15 to bias 127); infinities and NaNs by another 112, to all
// ones. A subnormal has no implicit leading one: giving it one and subtracting it again lets the
// FPU normalize it, on normal floats only, so flush-to-zero modes do not change the result.
SHARDGRAD_INLINE float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t special = magnitude + (224u << 23);
  const float leading_one = bit_cast<float>(113u << 23);
  const uint32_t subnormal =
      bit_cast<uint32_t>(bit_cast<float>(magnitude + (113u << 23)) - leading_one);
  const uint32_t finite = magnitude < (1u << 23) ? subnormal : normal;
  return bit_cast<float>(sign | (magnitude < (31u << 23) ? finite : special));
}

SHARDGRAD_INLINE float to_float(float value) { return value; }
SHARDGRAD_INLINE double to_float(double value) { return value; }

// `from_float` stores a computed value. A double reaches a half-width type through float, as it
// does in torch.
template <class To>
SHARDGRAD_INLINE To from_float(float value) {
  return static_cast<To>(value);
}

template <class To>
SHARDGRAD_INLINE To from_float(double value) {
  if constexpr (std::is_same_v<To, double>) {
    return value;
  } else {
    return from_float<To>(static_cast<float>(value));
  }
}

// Adding half a unit in the last kept place, less one when that place is even, makes truncation
// round to nearest even; the carry turns the largest values into infinity.
template <>
SHARDGRAD_INLINE BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded)};
}

// Normal results round as above. For subnormal ones the FPU rounds: 0.5f has the unit of the
// smallest half (2^-24) in its last place, so adding it leaves the answer in the low bits.
template <>
SHARDGRAD_INLINE Float16 from_float<Float16>(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal =
      bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return {static_cast<uint16_t>(sign | (magnitude < (143u << 23) ? finite : special))};
}

template <class T>
struct TypeTag {
  using type = T;
};

// Calls `visitor` with the TypeTag of the storage type that `dtype` names. Host only: kernels are
// launched with their types already chosen.
template <class Visitor>
inline __attribute__((always_inline)) auto visit(DType dtype, const Visitor& visitor) {
  switch (dtype) {
    case DType::kBFloat16:
      return visitor(TypeTag<BFloat16>{});
    case DType::kFloat16:
      return visitor(TypeTag<Float16>{});
    case DType::kFloat64:
      return visitor(TypeTag<double>{});
    default:
      return visitor(TypeTag<float>{});
  }
}

}  // namespace shardgrad
