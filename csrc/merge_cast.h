// One merge as plain numbers: what a kernel needs, and nothing of torch.
//
//   out[i, j] = round(fp32(base[i, j]) + scaling * sum_k fp32(lora_B[i, k]) * fp32(lora_A[k, j]))
//
// The sum over k runs in float32 fused multiply-adds, in chunks of kChunk that are added up in order. Every path keeps
// that order for each element, so that all of them give the same bits (only which NaN a NaN is may differ); the chunks
// keep the error of large ranks small.
#pragma once

#include <cstdint>

#include "dither.h"

namespace lora_stream {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// To out's dtype: to the nearest value, ties to even; or to one of the two neighbours, see dither.h. A sum that is the
// base itself is rounded to nearest both ways, as a weight without an adapter is.
enum class Rounding : int32_t { kNearest, kDither };

inline constexpr int64_t kChunk = 16;

struct MergeArgs {
  const void* base;    // [rows, cols], row-major with a row stride
  const void* lora_A;  // [rank, cols], any strides
  const void* lora_B;  // [rows, rank], any strides
  void* out;           // [rows, cols], row-major with a row stride; may be base itself
  int64_t rows, cols, rank;
  int64_t base_stride, out_stride;  // all strides in elements
  int64_t lora_A_strides[2], lora_B_strides[2];
  float scaling;
  DType base_dtype, lora_A_dtype, lora_B_dtype, out_dtype;
  Rounding rounding;
  Place place;  // of base[0, 0], for kDither
};

// What rounding did to a merge. delta is the float32 product times scaling, nearest() the rounding of a base to out's
// dtype.
struct MergeStats {
  int64_t changed = 0;    // elements with delta != 0
  int64_t unmoved = 0;    // of those, elements with out == nearest(base): the update that was lost
  double kept_sq = 0;     // sum of (out - nearest(base))^2; NaN where, and only where, an element of out is not finite
  double delta_sq = 0;    // sum of delta^2
  double projected = 0;   // sum of (out - base) * delta: delta_sq where all of the update has arrived
  uint32_t checksum = 0;  // of out's values; a sum, so that no order of rows or threads shows in it

  void add(const MergeStats& other) {
    changed += other.changed;
    unmoved += other.unmoved;
    kept_sq += other.kept_sq;
    delta_sq += other.delta_sq;
    projected += other.projected;
    checksum += other.checksum;
  }
};

}  // namespace lora_stream
