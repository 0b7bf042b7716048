// The merge with AVX-512 (F, BW): 16 lanes, a 6 x 64 tile, 24 of the 32 registers for sums. A second version rounds
// with AVX512_BF16.
#if defined(__x86_64__)

// The standard headers come first: see avx2.cpp.
#if !defined(LORA_STREAM_EMULATE_AVX512)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "../dtype.h"
#include "paths.h"

#if defined(LORA_STREAM_EMULATE_AVX512)
#include "avx512_emulation.h"  // the intrinsics in plain C++, for tests on processors without them
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512bf16")
#endif

#include "merge_tile.h"

namespace lora_stream {
namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16, kRows = 6, kVectors = 4;

  static F zero() { return _mm512_setzero_ps(); }
  static F broadcast(float x) { return _mm512_set1_ps(x); }
  static F fmadd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static float sum(F x) {
    alignas(64) float lanes[16];
    _mm512_store_ps(lanes, x);
    float total = 0.0f;
    for (float lane : lanes) total += lane;
    return total;
  }
  static I zero_bits() { return _mm512_setzero_si512(); }
  static int64_t sum_bits(I x) {
    alignas(64) uint32_t lanes[16];
    _mm512_store_si512(lanes, x);
    int64_t total = 0;
    for (uint32_t lane : lanes) total += lane;
    return total;
  }
  static I add_bits(I sum, F x) { return _mm512_add_epi32(sum, _mm512_castps_si512(x)); }
  static I count_nonzero(I count, F x) { return count_if(count, nonzero(x)); }
  static I count_nonzero_and_equal(I count, F x, F a, F b) {
    return count_if(count, nonzero(x) & _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ));
  }
  static __mmask16 nonzero(F x) { return _mm512_cmp_ps_mask(x, zero(), _CMP_NEQ_UQ); }
  static I count_if(I count, __mmask16 mask) { return _mm512_mask_add_epi32(count, mask, count, _mm512_set1_epi32(1)); }

  static I broadcast_bits(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static void randoms(I row_key, I row_factor, const uint32_t* pair_keys, I& random0, I& random1) {
    const __m512i x = _mm512_mullo_epi32(_mm512_xor_si512(row_key, _mm512_loadu_si512(pair_keys)), row_factor);
    const __m512i random = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    random0 = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(random));
    random1 = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(random, 1));
  }
  static F where_equal(F a, F b, F equal, F other) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), other, equal);
  }
  static __m512i magnitude(F x) { return _mm512_and_si512(_mm512_castps_si512(x), broadcast_bits(0x7fffffffu)); }
  template <class T>
  static bool beyond(F x0, F x1) {
    constexpr uint32_t kLargest = std::is_same_v<T, BFloat16> ? 0x7f7f0000u : 0x477fe000u;
    const __m512i larger = _mm512_max_epi32(magnitude(x0), magnitude(x1));
    return _mm512_cmpgt_epi32_mask(larger, broadcast_bits(kLargest - 1)) != 0;
  }
  template <class T, bool kEqual>
  static bool unusual(F x0, F x1, F w0, F w1) {
    const bool equal = kEqual && (_mm512_cmp_ps_mask(x0, w0, _CMP_EQ_OQ) | _mm512_cmp_ps_mask(x1, w1, _CMP_EQ_OQ)) != 0;
    return beyond<T>(x0, x1) || equal;
  }
  template <class T>
  static F dither(F x, I random) {
    const __m512i bits = _mm512_castps_si512(x);
    if constexpr (std::is_same_v<T, BFloat16>) {
      return _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(bits, random), broadcast_bits(0xffff0000u)));
    } else {
      const __m512i normal =
          _mm512_and_si512(_mm512_add_epi32(bits, _mm512_srli_epi32(random, 3)), broadcast_bits(0xffffe000u));
      const F size = _mm512_castsi512_ps(magnitude(x));
      const __mmask16 is_small = _mm512_cmp_ps_mask(size, broadcast(6.103515625e-5f), _CMP_LT_OQ);
      if (is_small == 0) return _mm512_castsi512_ps(normal);
      const F steps = mul(size, broadcast(16777216.0f));
      const F whole = _mm512_cvtepi32_ps(_mm512_cvttps_epi32(steps));
      const F threshold = mul(add(_mm512_cvtepi32_ps(random), broadcast(0.5f)), broadcast(1.52587890625e-5f));
      const __mmask16 up = _mm512_cmp_ps_mask(threshold, sub(steps, whole), _CMP_LT_OQ);
      const F steps_up = _mm512_mask_blend_ps(up, whole, add(whole, broadcast(1.0f)));
      const __m512i small = _mm512_castps_si512(mul(steps_up, broadcast(5.9604644775390625e-8f)));
      const __m512i sign = _mm512_and_si512(bits, broadcast_bits(0x80000000u));
      return _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_small, normal, _mm512_or_si512(small, sign)));
    }
  }
  static void fence() { _mm_sfence(); }

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const BFloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static F load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

  // round() of dtype.h, lane by lane
  static __m512i bfloat16_bits(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, _mm512_set1_epi32(0x7fc00000));
  }
  static __m256i upper_halves(__m512i x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)); }

  template <class T>
  static F round(F x) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      return _mm512_castsi512_ps(_mm512_and_si512(bfloat16_bits(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    } else if constexpr (std::is_same_v<T, Float16>) {
      return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      return x;
    }
  }

  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store_rounded(float* p, F x0, F x1, bool stream) {
    if (stream) {
      _mm512_stream_ps(p, x0);
      _mm512_stream_ps(p + 16, x1);
    } else {
      _mm512_storeu_ps(p, x0);
      _mm512_storeu_ps(p + 16, x1);
    }
  }
  static void store_rounded(BFloat16* p, F x0, F x1, bool stream) {
    store_bits(p, join(upper_halves(bfloat16_bits(x0)), upper_halves(bfloat16_bits(x1))), stream);
  }
  static void store_rounded(Float16* p, F x0, F x1, bool stream) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    store_bits(p, join(_mm512_cvtps_ph(x0, kNearest), _mm512_cvtps_ph(x1, kNearest)), stream);
  }

  template <class T>
  static void store_exact(T* p, F x0, F x1, bool stream) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      store_bits(p, join(upper_halves(_mm512_castps_si512(x0)), upper_halves(_mm512_castps_si512(x1))), stream);
    } else {
      store_rounded(p, x0, x1, stream);
    }
  }

  static __m512i join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
  static void store_bits(void* p, __m512i bits, bool stream) {
    if (stream) {
      _mm512_stream_si512(static_cast<__m512i*>(p), bits);
    } else {
      _mm512_storeu_si512(p, bits);
    }
  }
};

struct Avx512Bf16 : Avx512 {
  using Avx512::store_rounded;
  static void store_rounded(BFloat16* p, F x0, F x1, bool stream) {
    // The instruction flushes denormals to zero and keeps NaN payloads, which the other paths do not: where any lane is
    // not a normal number, zero included (rare in weights), the integer rounding does the work.
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    const __m512i e0 = _mm512_and_si512(_mm512_castps_si512(x0), exponent);
    const __m512i e1 = _mm512_and_si512(_mm512_castps_si512(x1), exponent);
    const auto special = _mm512_cmpeq_epi32_mask(e0, _mm512_setzero_si512()) |
                         _mm512_cmpeq_epi32_mask(e1, _mm512_setzero_si512()) | _mm512_cmpeq_epi32_mask(e0, exponent) |
                         _mm512_cmpeq_epi32_mask(e1, exponent);
    if (__builtin_expect(special != 0, 0)) return Avx512::store_rounded(p, x0, x1, stream);
    store_bits(p, (__m512i)_mm512_cvtne2ps_pbh(x1, x0), stream);
  }
};

}  // namespace

void merge_rows_avx512(const MergeArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats) {
  merge_rows<Avx512>(args, row_begin, row_end, stats);
}

void merge_rows_avx512_bf16(const MergeArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats) {
  merge_rows<Avx512Bf16>(args, row_begin, row_end, stats);
}

}  // namespace lora_stream

#if defined(LORA_STREAM_EMULATE_AVX512)
#elif defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
