// The two steps of DoRA beside the merge itself, over merged weights in float32: squares for the norms, and scaling
// with the one rounding. Plain C++ that every compiler makes vectors of; no order of sums depends on threads or
// instruction sets.
#pragma once

#include <cstdint>

#include "../merge_cast.h"

namespace lora_stream {

struct ScaleArgs {
  const float* merged;  // base + delta, [rows, cols], contiguous
  const float* scale;   // [rows], or [cols] where by_column
  bool by_column;
  const void* base;  // [rows, cols], row-major with a row stride
  void* out;         // likewise
  int64_t rows, cols, base_stride, out_stride;
  DType base_dtype, out_dtype;
  Rounding rounding;
  Place place;  // of merged[0, 0], for kDither
};

// out[i, j] = round(scale * merged[i, j]) for rows [row_begin, row_end); statistics with scale * merged - base as the
// delta.
void scale_rows(const ScaleArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats);

// sums[i] += sum_j merged[i, j]^2, for rows [row_begin, row_end) of contiguous rows.
void add_row_squares(const float* merged, int64_t cols, int64_t row_begin, int64_t row_end, double* sums);

// sums[j] += sum_i merged[i, j]^2, for columns [col_begin, col_end), row after row.
void add_column_squares(const float* merged, int64_t rows, int64_t cols, int64_t col_begin, int64_t col_end,
                        double* sums);

}  // namespace lora_stream
