// The AVX-512 intrinsics that csrc/cpu/avx512.cpp uses, in plain C++: lane by lane, as the instruction set reference
// defines them. So the very text of that file runs, and is compared with the other paths, on any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "../../csrc/dtype.h"

using __mmask16 = uint16_t;

struct __m512 {
  float lane[16];
};
struct __m512i {
  uint32_t lane[16];
};
struct __m256i {
  uint16_t half[16];
};

enum { _CMP_EQ_OQ = 0, _CMP_UNORD_Q = 3, _CMP_NEQ_UQ = 4, _CMP_LT_OQ = 17 };
enum { _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8 };

namespace emulation {
template <class T, class F>
T lanes(F f) {
  T result;
  for (int i = 0; i < 16; ++i) result.lane[i] = f(i);
  return result;
}
}  // namespace emulation

inline __m512 _mm512_set1_ps(float x) {
  return emulation::lanes<__m512>([&](int) { return x; });
}
inline __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0.0f); }
inline __m512i _mm512_set1_epi32(int x) {
  return emulation::lanes<__m512i>([&](int) { return static_cast<uint32_t>(x); });
}
inline __m512i _mm512_setzero_si512() { return _mm512_set1_epi32(0); }
inline __m512 _mm512_fmadd_ps(const __m512& a, const __m512& b, const __m512& c) {
  return emulation::lanes<__m512>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline __m512 _mm512_add_ps(const __m512& a, const __m512& b) {
  return emulation::lanes<__m512>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline __m512 _mm512_sub_ps(const __m512& a, const __m512& b) {
  return emulation::lanes<__m512>([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline __m512 _mm512_mul_ps(const __m512& a, const __m512& b) {
  return emulation::lanes<__m512>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline __m512i _mm512_add_epi32(const __m512i& a, const __m512i& b) {
  return emulation::lanes<__m512i>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline __m512i _mm512_mask_add_epi32(const __m512i& src, __mmask16 mask, const __m512i& a, const __m512i& b) {
  return emulation::lanes<__m512i>([&](int i) { return (mask >> i) & 1 ? a.lane[i] + b.lane[i] : src.lane[i]; });
}
inline __m512i _mm512_and_si512(const __m512i& a, const __m512i& b) {
  return emulation::lanes<__m512i>([&](int i) { return a.lane[i] & b.lane[i]; });
}
inline __m512i _mm512_srli_epi32(const __m512i& a, unsigned count) {
  return emulation::lanes<__m512i>([&](int i) { return a.lane[i] >> count; });
}
inline __m512i _mm512_slli_epi32(const __m512i& a, unsigned count) {
  return emulation::lanes<__m512i>([&](int i) { return a.lane[i] << count; });
}
inline __m512i _mm512_mask_blend_epi32(__mmask16 mask, const __m512i& a, const __m512i& b) {
  return emulation::lanes<__m512i>([&](int i) { return (mask >> i) & 1 ? b.lane[i] : a.lane[i]; });
}
inline __m512i _mm512_xor_si512(const __m512i& a, const __m512i& b) {
  return emulation::lanes<__m512i>([&](int i) { return a.lane[i] ^ b.lane[i]; });
}
inline __m512i _mm512_or_si512(const __m512i& a, const __m512i& b) {
  return emulation::lanes<__m512i>([&](int i) { return a.lane[i] | b.lane[i]; });
}
inline __m512i _mm512_mullo_epi32(const __m512i& a, const __m512i& b) {
  return emulation::lanes<__m512i>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline __m512i _mm512_max_epi32(const __m512i& a, const __m512i& b) {
  return emulation::lanes<__m512i>(
      [&](int i) { return static_cast<int32_t>(a.lane[i]) > static_cast<int32_t>(b.lane[i]) ? a.lane[i] : b.lane[i]; });
}
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, const __m512& a, const __m512& b) {
  return emulation::lanes<__m512>([&](int i) { return (mask >> i) & 1 ? b.lane[i] : a.lane[i]; });
}
inline __m512i _mm512_cvttps_epi32(const __m512& a) {
  return emulation::lanes<__m512i>([&](int i) {  // what does not fit becomes the smallest integer
    return a.lane[i] > -2147483648.0f && a.lane[i] < 2147483648.0f
               ? static_cast<uint32_t>(static_cast<int32_t>(a.lane[i]))
               : 0x80000000u;
  });
}
inline __m512 _mm512_cvtepi32_ps(const __m512i& a) {
  return emulation::lanes<__m512>([&](int i) { return static_cast<float>(static_cast<int32_t>(a.lane[i])); });
}
inline __mmask16 _mm512_cmpgt_epi32_mask(const __m512i& a, const __m512i& b) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool holds = static_cast<int32_t>(a.lane[i]) > static_cast<int32_t>(b.lane[i]);
    mask |= static_cast<__mmask16>(holds << i);
  }
  return mask;
}
inline __mmask16 _mm512_cmpeq_epi32_mask(const __m512i& a, const __m512i& b) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<__mmask16>((a.lane[i] == b.lane[i]) << i);
  return mask;
}
inline __mmask16 _mm512_cmp_ps_mask(const __m512& a, const __m512& b, int predicate) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) {
    const float x = a.lane[i], y = b.lane[i];
    const bool holds = predicate == _CMP_EQ_OQ    ? x == y
                       : predicate == _CMP_NEQ_UQ ? x != y
                       : predicate == _CMP_LT_OQ  ? x < y
                                                  : x != x || y != y;
    mask |= static_cast<__mmask16>(holds << i);
  }
  return mask;
}

inline __m512i _mm512_castps_si512(const __m512& a) {
  return emulation::lanes<__m512i>([&](int i) { return lora_stream::float_bits(a.lane[i]); });
}
inline __m512 _mm512_castsi512_ps(const __m512i& a) {
  return emulation::lanes<__m512>([&](int i) { return lora_stream::bits_float(a.lane[i]); });
}
inline __m512i _mm512_cvtepu16_epi32(const __m256i& a) {
  return emulation::lanes<__m512i>([&](int i) { return static_cast<uint32_t>(a.half[i]); });
}
inline __m256i _mm512_cvtepi32_epi16(const __m512i& a) {
  __m256i result;
  for (int i = 0; i < 16; ++i) result.half[i] = static_cast<uint16_t>(a.lane[i]);
  return result;
}
inline __m512 _mm512_cvtph_ps(const __m256i& a) {
  return emulation::lanes<__m512>([&](int i) { return lora_stream::to_float(lora_stream::Float16{a.half[i]}); });
}
inline __m256i _mm512_cvtps_ph(const __m512& a, int) {
  __m256i result;
  for (int i = 0; i < 16; ++i) result.half[i] = lora_stream::float16_bits(a.lane[i]);
  return result;
}
inline __m512i _mm512_castsi256_si512(const __m256i& a) {
  __m512i result{};
  std::memcpy(&result, &a, sizeof a);
  return result;
}
inline __m256i _mm512_castsi512_si256(const __m512i& a) {
  __m256i low;
  std::memcpy(&low, &a, sizeof low);
  return low;
}
inline __m256i _mm512_extracti64x4_epi64(const __m512i& a, int position) {
  __m256i half;
  std::memcpy(&half, a.lane + 8 * position, sizeof half);
  return half;
}
inline __m512i _mm512_inserti64x4(const __m512i& a, const __m256i& b, int position) {
  __m512i result = a;
  std::memcpy(reinterpret_cast<char*>(&result) + 32 * position, &b, sizeof b);
  return result;
}
// First operand into the upper half. Denormals are flushed, in and out; a NaN keeps its payload's upper bits.
inline __m512i _mm512_cvtne2ps_pbh(const __m512& upper, const __m512& lower) {
  uint16_t halves[32];
  for (int i = 0; i < 32; ++i) {
    const float x = i < 16 ? lower.lane[i] : upper.lane[i - 16];
    const uint32_t bits = lora_stream::float_bits(x);
    if (x != x) {
      halves[i] = static_cast<uint16_t>((bits >> 16) | 0x40u);
    } else if ((bits & 0x7f800000u) == 0) {
      halves[i] = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    } else {
      halves[i] = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
  }
  __m512i result;
  std::memcpy(&result, halves, sizeof halves);
  return result;
}

template <class T>
T emulated_load(const void* p) {
  T result;
  std::memcpy(&result, p, sizeof result);
  return result;
}
inline __m512i _mm512_loadu_si512(const void* p) { return emulated_load<__m512i>(p); }
inline __m512 _mm512_loadu_ps(const float* p) { return emulated_load<__m512>(p); }
inline __m256i _mm256_loadu_si256(const __m256i* p) { return emulated_load<__m256i>(p); }
inline void _mm512_storeu_ps(float* p, const __m512& x) { std::memcpy(p, &x, sizeof x); }
inline void _mm512_storeu_si512(void* p, const __m512i& x) { std::memcpy(p, &x, sizeof x); }

// The aligned ones fault on other addresses.
inline void emulated_aligned_store(void* p, const void* x) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) std::abort();
  std::memcpy(p, x, 64);
}
inline void _mm512_store_ps(float* p, const __m512& x) { emulated_aligned_store(p, &x); }
inline void _mm512_store_si512(void* p, const __m512i& x) { emulated_aligned_store(p, &x); }
inline void _mm512_stream_ps(float* p, const __m512& x) { emulated_aligned_store(p, &x); }
inline void _mm512_stream_si512(__m512i* p, const __m512i& x) { emulated_aligned_store(p, &x); }
inline void _mm_sfence() {}
