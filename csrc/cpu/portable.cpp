// The merge in plain C++, for any processor: one lane, and std::fma, which rounds once with or without hardware for it.
#include <cmath>

#include "merge_tile.h"
#include "paths.h"

namespace lora_stream {
namespace {

struct Portable {
  using F = float;
  using I = uint32_t;
  static constexpr int kLanes = 1, kRows = 4, kVectors = 4;

  static F zero() { return 0.0f; }
  static F broadcast(float x) { return x; }
  static F fmadd(F a, F b, F c) { return std::fma(a, b, c); }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static float sum(F x) { return x; }
  static I zero_bits() { return 0; }
  static int64_t sum_bits(I x) { return x; }
  static I add_bits(I sum, F x) { return sum + float_bits(x); }
  static I count_nonzero(I count, F x) { return count + (x != 0.0f); }
  static I count_nonzero_and_equal(I count, F x, F a, F b) { return count + (x != 0.0f && a == b); }
  static I broadcast_bits(uint32_t x) { return x; }
  static void randoms(I row_key, I row_factor, const uint32_t* pair_keys, I& random0, I& random1) {
    const uint32_t x = (*pair_keys ^ row_key) * row_factor, random = x ^ (x >> 16);
    random0 = random & 0xffffu;
    random1 = random >> 16;
  }
  static F where_equal(F a, F b, F equal, F other) { return a == b ? equal : other; }
  template <class T>
  static bool beyond(F, F) {
    return false;
  }
  template <class T, bool kEqual>
  static bool unusual(F x0, F x1, F w0, F w1) {
    return kEqual && (x0 == w0 || x1 == w1);
  }
  template <class T>
  static F dither(F x, I random) {
    return dither_to(x, random, static_cast<T*>(nullptr));
  }
  static void fence() {}

  template <class T>
  static F load(const T* p) {
    return to_float(*p);
  }
  template <class T>
  static F round(F x) {
    return round_to(x, static_cast<T*>(nullptr));
  }
  static void store(float* p, F x) { *p = x; }
  template <class T>
  static void store_exact(T* p, F x0, F x1, bool stream) {
    store_rounded(p, x0, x1, stream);
  }
  template <class T>
  static void store_rounded(T* p, F x0, F x1, bool /*stream*/) {
    store_as(p, x0);
    store_as(p + 1, x1);
  }
};

}  // namespace

void merge_rows_portable(const MergeArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats) {
  merge_rows<Portable>(args, row_begin, row_end, stats);
}

}  // namespace lora_stream
