// bfloat16 and float16 as bit patterns, and their conversions to and from float32 (nearest-even, as torch rounds).
#pragma once

#include <cstdint>
#include <cstring>

#include "merge_cast.h"

namespace lora_stream {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1fu) {  // infinity, or a NaN, which the hardware conversion makes quiet
    return bits_float(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  }
  if (exponent == 0) {                                                          // zero and denormals: exact in float32
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -value : value;
  }
  return bits_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Rounds to the nearest value of T, as a float: exact in T, so that a later conversion to T only drops zero bits.
inline float round_to(float x, float*) { return x; }

inline float round_to(float x, BFloat16*) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return bits_float(x != x ? 0x7fc00000u : rounded);  // rounding a NaN's payload could carry it into infinity
}

inline uint16_t float16_bits(float x) {
  const uint32_t bits = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u | static_cast<uint16_t>((magnitude >> 13) & 0x3ffu);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: a denormal, a multiple of 2^-24
    // Adding 0.5 puts the multiple of 2^-24 into the low mantissa bits, rounded by the addition itself.
    return sign | static_cast<uint16_t>(float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u);
  }
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

inline float round_to(float x, Float16*) { return to_float(Float16{float16_bits(x)}); }

inline float dither_to(float x, uint32_t /*random*/, float*) { return x; }

// One of the two values of T around x, as a float; 16 random bits decide, see dither.h. Finite where x is less than a
// step beyond the largest value of T; there and above it they do not count.
inline float dither_to(float x, uint32_t random, BFloat16*) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return bits_float(0x7fc00000u);
  return bits_float((magnitude < 0x7f7f0000u ? bits + random : bits) & 0xffff0000u);
}

inline float dither_to(float x, uint32_t random, Float16* type) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x47800000u) return round_to(x, type);               // 2^16 and above is an overflow
  if (magnitude >= 0x477fe000u) return bits_float(bits & 0xffffe000u);  // 65504
  if (magnitude >= 0x38800000u) return bits_float((bits + (random >> 3)) & 0xffffe000u);
  const float steps = bits_float(magnitude) * 16777216.0f;  // of denormals, 2^-24; exact
  const float whole = static_cast<float>(static_cast<int32_t>(steps));
  const bool up = (static_cast<float>(random) + 0.5f) * 1.52587890625e-5f < steps - whole;  // 2^-16
  return bits_float(float_bits((up ? whole + 1.0f : whole) * 5.9604644775390625e-8f) | (bits & 0x80000000u));
}

inline void store_as(float* out, float x) { *out = x; }
inline void store_as(BFloat16* out, float x) { out->bits = static_cast<uint16_t>(float_bits(round_to(x, out)) >> 16); }
inline void store_as(Float16* out, float x) { out->bits = float16_bits(x); }

// Calls f with a null pointer of the C++ type of `dtype`.
template <class F>
void visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<Float16*>(nullptr));
  }
}

}  // namespace lora_stream
