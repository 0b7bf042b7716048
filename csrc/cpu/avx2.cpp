// The merge with AVX2, FMA and F16C: 8 lanes, a 6 x 16 tile, 12 of the 16 registers for sums.
#if defined(__x86_64__)

// The standard headers come first: what they inline must not be compiled for this instruction set, or the linker could
// keep that copy for the whole program.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "../dtype.h"
#include "paths.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "merge_tile.h"

namespace lora_stream {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8, kRows = 6, kVectors = 2;

  static F zero() { return _mm256_setzero_ps(); }
  static F broadcast(float x) { return _mm256_set1_ps(x); }
  static F fmadd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static float sum(F x) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, x);
    float total = 0.0f;
    for (float lane : lanes) total += lane;
    return total;
  }
  static I zero_bits() { return _mm256_setzero_si256(); }
  static int64_t sum_bits(I x) {
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), x);
    int64_t total = 0;
    for (uint32_t lane : lanes) total += lane;
    return total;
  }
  static I add_bits(I sum, F x) { return _mm256_add_epi32(sum, _mm256_castps_si256(x)); }
  // A true comparison is a lane of ones, which is -1.
  static I count_nonzero(I count, F x) { return _mm256_sub_epi32(count, _mm256_castps_si256(nonzero(x))); }
  static I count_nonzero_and_equal(I count, F x, F a, F b) {
    return _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_and_ps(nonzero(x), _mm256_cmp_ps(a, b, _CMP_EQ_OQ))));
  }
  static F nonzero(F x) { return _mm256_cmp_ps(x, zero(), _CMP_NEQ_UQ); }

  static I broadcast_bits(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static void randoms(I row_key, I row_factor, const uint32_t* pair_keys, I& random0, I& random1) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair_keys));
    const __m256i x = _mm256_mullo_epi32(_mm256_xor_si256(row_key, pairs), row_factor);
    const __m256i random = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    random0 = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(random));
    random1 = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(random, 1));
  }
  static F where_equal(F a, F b, F equal, F other) {
    return _mm256_blendv_ps(other, equal, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
  }
  template <class T>
  static bool beyond(F x0, F x1) {
    return _mm256_movemask_ps(are_beyond<T>(x0, x1)) != 0;
  }
  template <class T>
  static F are_beyond(F x0, F x1) {
    constexpr uint32_t kLargest = std::is_same_v<T, BFloat16> ? 0x7f7f0000u : 0x477fe000u;
    const __m256i larger = _mm256_max_epi32(magnitude(x0), magnitude(x1));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(larger, broadcast_bits(kLargest - 1)));
  }
  template <class T, bool kEqual>
  static bool unusual(F x0, F x1, F w0, F w1) {
    // bfloat16's largest value is close to float32's: the bit that numbers from 2 on have is enough.
    F found = std::is_same_v<T, BFloat16> ? _mm256_or_ps(x0, x1) : are_beyond<T>(x0, x1);
    if constexpr (kEqual) {
      const F equal = _mm256_or_ps(_mm256_cmp_ps(x0, w0, _CMP_EQ_OQ), _mm256_cmp_ps(x1, w1, _CMP_EQ_OQ));
      found = _mm256_or_ps(found, equal);
    }
    return !_mm256_testz_si256(_mm256_castps_si256(found), broadcast_bits(0x40000000u));
  }
  static __m256i magnitude(F x) { return _mm256_and_si256(_mm256_castps_si256(x), broadcast_bits(0x7fffffffu)); }
  template <class T>
  static F dither(F x, I random) {
    const __m256i bits = _mm256_castps_si256(x);
    if constexpr (std::is_same_v<T, BFloat16>) {
      return _mm256_castsi256_ps(_mm256_and_si256(_mm256_add_epi32(bits, random), broadcast_bits(0xffff0000u)));
    } else {
      const F normal = _mm256_castsi256_ps(
          _mm256_and_si256(_mm256_add_epi32(bits, _mm256_srli_epi32(random, 3)), broadcast_bits(0xffffe000u)));
      const F size = _mm256_castsi256_ps(magnitude(x));
      const F is_small = _mm256_cmp_ps(size, broadcast(6.103515625e-5f), _CMP_LT_OQ);
      if (_mm256_movemask_ps(is_small) == 0) return normal;
      const F steps = mul(size, broadcast(16777216.0f));
      const F whole = _mm256_floor_ps(steps);
      const F threshold = mul(add(_mm256_cvtepi32_ps(random), broadcast(0.5f)), broadcast(1.52587890625e-5f));
      const F up = _mm256_cmp_ps(threshold, sub(steps, whole), _CMP_LT_OQ);
      const F small = mul(add(whole, _mm256_and_ps(up, broadcast(1.0f))), broadcast(5.9604644775390625e-8f));
      const F sign = _mm256_castsi256_ps(_mm256_and_si256(bits, broadcast_bits(0x80000000u)));
      return _mm256_blendv_ps(normal, _mm256_or_ps(small, sign), is_small);
    }
  }
  static void fence() { _mm_sfence(); }

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static F load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

  // round() of dtype.h, lane by lane
  static __m256i bfloat16_bits(F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
  }
  template <class T>
  static F round(F x) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      return _mm256_castsi256_ps(_mm256_and_si256(bfloat16_bits(x), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    } else if constexpr (std::is_same_v<T, Float16>) {
      return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      return x;
    }
  }

  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void store_rounded(float* p, F x0, F x1, bool stream) {
    if (stream) {
      _mm256_stream_ps(p, x0);
      _mm256_stream_ps(p + 8, x1);
    } else {
      _mm256_storeu_ps(p, x0);
      _mm256_storeu_ps(p + 8, x1);
    }
  }
  static void store_rounded(BFloat16* p, F x0, F x1, bool stream) {
    store_upper_halves(p, bfloat16_bits(x0), bfloat16_bits(x1), stream);
  }
  static void store_rounded(Float16* p, F x0, F x1, bool stream) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    store_bits(p, _mm256_set_m128i(_mm256_cvtps_ph(x1, kNearest), _mm256_cvtps_ph(x0, kNearest)), stream);
  }

  template <class T>
  static void store_exact(T* p, F x0, F x1, bool stream) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      store_upper_halves(p, _mm256_castps_si256(x0), _mm256_castps_si256(x1), stream);
    } else {
      store_rounded(p, x0, x1, stream);
    }
  }

  static void store_upper_halves(void* p, __m256i x0, __m256i x1, bool stream) {
    // packus works in 128-bit halves: lanes 0-3 of both, then 4-7 of both; the permutation puts them in order.
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(x0, 16), _mm256_srli_epi32(x1, 16));
    store_bits(p, _mm256_permute4x64_epi64(packed, 0xd8), stream);
  }
  static void store_bits(void* p, __m256i bits, bool stream) {
    if (stream) {
      _mm256_stream_si256(static_cast<__m256i*>(p), bits);
    } else {
      _mm256_storeu_si256(static_cast<__m256i*>(p), bits);
    }
  }
};

}  // namespace

void merge_rows_avx2(const MergeArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats) {
  merge_rows<Avx2>(args, row_begin, row_end, stats);
}

}  // namespace lora_stream

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
