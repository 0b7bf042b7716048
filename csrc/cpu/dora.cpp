#include "dora.h"

#include <algorithm>
#include <type_traits>

#include "../dtype.h"

namespace lora_stream {
namespace {

// Sums run in this many lanes, whatever the processor has, so that all of them add alike.
constexpr int64_t kLanes = 16;
// Of a row at a time, each step over all of it before the next: so a compiler makes vectors of the steps.
constexpr int64_t kSegment = 256;

struct LaneStats {
  float kept_sq[kLanes] = {}, delta_sq[kLanes] = {}, projected[kLanes] = {};
  uint32_t changed[kLanes] = {}, unmoved[kLanes] = {}, checksum[kLanes] = {};

  void add_to(MergeStats* stats) const {
    for (int64_t l = 0; l < kLanes; ++l) {
      stats->add({changed[l], unmoved[l], kept_sq[l], delta_sq[l], projected[l], checksum[l]});
    }
  }
};

template <bool kByColumn, bool kDither, class W, class O>
void scale_segment(const float* merged, const float* scale, const W* base, O* out, int64_t width, uint64_t row_key,
                   int64_t first_col, LaneStats& sums) {
  O* const type = nullptr;
  float rounded[kSegment], kept[kSegment], delta[kSegment], moved[kSegment];
  for (int64_t j = 0; j < width; ++j) {
    const float x = merged[j] * scale[kByColumn ? j : 0];
    const float w = to_float(base[j]);
    rounded[j] = kDither && x != w ? dither_to(x, random_bits(row_key, first_col + j), type) : round_to(x, type);
    kept[j] = rounded[j] - round_to(w, type);
    delta[j] = x - w;
    moved[j] = rounded[j] - w;
  }
  for (int64_t j = 0; j < width; ++j) store_as(out + j, rounded[j]);
  for (int64_t j = width; j % kLanes != 0; ++j) rounded[j] = kept[j] = delta[j] = moved[j] = 0.0f;  // adds nothing
  for (int64_t j = 0; j < width; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const uint32_t is_changed = delta[j + l] != 0.0f, is_equal = kept[j + l] == 0.0f;
      sums.kept_sq[l] += kept[j + l] * kept[j + l] + 0.0f * rounded[j + l];  // NaN where that is not finite
      sums.delta_sq[l] += delta[j + l] * delta[j + l];
      sums.projected[l] += moved[j + l] * delta[j + l];
      sums.changed[l] += is_changed;
      sums.unmoved[l] += is_changed & is_equal;
      sums.checksum[l] += float_bits(rounded[j + l]);
    }
  }
}

template <bool kByColumn, bool kDither, class W, class O>
void scale_rows_of(const ScaleArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats) {
  for (int64_t i = row_begin; i < row_end; ++i) {
    const float* merged = args.merged + i * args.cols;
    const float* scale = kByColumn ? args.scale : args.scale + i;
    const W* base = static_cast<const W*>(args.base) + i * args.base_stride;
    O* out = static_cast<O*>(args.out) + i * args.out_stride;
    const uint64_t key = kDither ? row_key(args.place.key, args.place.row + i) : 0;
    LaneStats sums;  // of one row: short enough for float
    for (int64_t j = 0; j < args.cols; j += kSegment) {
      scale_segment<kByColumn, kDither>(merged + j, scale + (kByColumn ? j : 0), base + j, out + j,
                                        std::min(kSegment, args.cols - j), key, args.place.col + j, sums);
    }
    sums.add_to(stats);
  }
}

}  // namespace

void scale_rows(const ScaleArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats) {
  visit_dtype(args.base_dtype, [&](auto* base_type) {
    visit_dtype(args.out_dtype, [&](auto* out_type) {
      using W = std::remove_pointer_t<decltype(base_type)>;
      using O = std::remove_pointer_t<decltype(out_type)>;
      const auto rows_of = [&](auto by_column) {
        if (args.rounding == Rounding::kDither) {
          return scale_rows_of<decltype(by_column)::value, true, W, O>(args, row_begin, row_end, stats);
        }
        return scale_rows_of<decltype(by_column)::value, false, W, O>(args, row_begin, row_end, stats);
      };
      return args.by_column ? rows_of(std::true_type()) : rows_of(std::false_type());
    });
  });
}

// The square of a float is exact in double, so that a fused multiply-add changes nothing.
void add_row_squares(const float* merged, int64_t cols, int64_t row_begin, int64_t row_end, double* sums) {
  for (int64_t i = row_begin; i < row_end; ++i) {
    const float* row = merged + i * cols;
    double lanes[kLanes] = {};
    int64_t j = 0;
    for (; j + kLanes <= cols; j += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) lanes[l] += static_cast<double>(row[j + l]) * row[j + l];
    }
    for (int64_t l = 0; j < cols; ++j, ++l) lanes[l] += static_cast<double>(row[j]) * row[j];
    for (int64_t l = 0; l < kLanes; ++l) sums[i] += lanes[l];
  }
}

void add_column_squares(const float* merged, int64_t rows, int64_t cols, int64_t col_begin, int64_t col_end,
                        double* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = merged + i * cols;
    for (int64_t j = col_begin; j < col_end; ++j) sums[j] += static_cast<double>(row[j]) * row[j];
  }
}

}  // namespace lora_stream
