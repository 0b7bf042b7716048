// The merge on one CPU thread, written once over a vector type V and compiled for each instruction set.
//
// For each group of kRows rows, strip by strip of kStripCols columns:
//
//   sum[i][j] = sum_k B[i, k] * A[k, j]     tile by tile in registers; base is on its way from memory meanwhile
//   out[i][j] = round(fma(scaling, sum[i][j], base[i][j]))     row by row, past the cache where that pays
//
// lora_A is copied once per block of columns, lora_B once per group of rows, to float32 in the order in which a tile
// reads them; so any dtype, stride and alignment of theirs costs nothing in the inner loop. base is read once, out is
// written once.
//
// V gives: F (a vector of float), I (one of uint32), kLanes, kRows, kVectors (the tile is kRows x kVectors * kLanes;
//   kVectors is even) and, as static functions: zero, broadcast, fmadd(a, b, c) = a * b + c rounded once, add, sub,
//   mul, sum(F); load(const T*), store(float*, F) unaligned; round<T>(F), the value rounded to T; store_rounded(T*, F,
//   F, stream), two vectors rounded and stored; store_exact, the same for values that T holds; fence(), which orders
//   streamed stores before later ones; for the statistics zero_bits, sum_bits(I), add_bits(I, F), which adds bit
//   patterns, count_nonzero(I, F) and count_nonzero_and_equal(I, F, F, F), which add one to each lane that satisfies
//   the name. For dithering, see dither.h: broadcast_bits, randoms(I row_key, I row_factor, const uint32_t* pair_keys,
//   I&, I&), the random bits of as many pairs of columns as there are lanes, dither<T>(F, I), which is dither_to() for
//   what is not beyond<T>(F, F), as large as the largest T in any lane; unusual<T, kEqual>(x0, x1, w0, w1), a quick
//   look whether that may be, or with kEqual whether a lane of x equals that of w; where_equal(a, b, F equal, F other).
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "../dtype.h"

namespace lora_stream {

// lora_A's copy of one block of columns. All columns of usual matrices: rows are then read and written whole, and the
// copy streams in from a last-level cache, once for kGroups groups of rows.
inline constexpr int64_t kPackedBytes = 4 * 1024 * 1024;
inline constexpr int64_t kGroups = 4;
// Outputs larger than this are not worth a place in the cache: the consumer reads them much later.
inline constexpr int64_t kStreamBytes = 4 * 1024 * 1024;

// Columns whose sums wait in the first-level cache, so that base is read and out is written in long runs.
inline constexpr int64_t kStripCols = 256;

struct FreeAligned {
  void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
};
using AlignedFloats = std::unique_ptr<float[], FreeAligned>;
inline AlignedFloats allocate_floats(int64_t count) {
  return AlignedFloats(static_cast<float*>(::operator new(sizeof(float) * count, std::align_val_t{64})));
}

// packed[j / kCols][k][j % kCols] = A[k, col_begin + j], zero past the last column
template <class V>
void pack_lora_A(const MergeArgs& args, int64_t col_begin, int64_t col_end, float* packed) {
  constexpr int64_t kCols = V::kVectors * V::kLanes;
  visit_dtype(args.lora_A_dtype, [&](auto* type) {
    const auto* A = static_cast<decltype(type)>(const_cast<void*>(args.lora_A));
    for (int64_t panel = col_begin; panel < col_end; panel += kCols) {
      const int64_t width = std::min(kCols, col_end - panel);
      for (int64_t k = 0; k < args.rank; ++k, packed += kCols) {
        const auto* row = A + k * args.lora_A_strides[0] + panel * args.lora_A_strides[1];
        for (int64_t j = 0; j < width; ++j) packed[j] = to_float(row[j * args.lora_A_strides[1]]);
        for (int64_t j = width; j < kCols; ++j) packed[j] = 0.0f;
      }
    }
  });
}

// packed[k][i] = B[row_begin + i, k], zero past the last row
template <class V>
void pack_lora_B(const MergeArgs& args, int64_t row_begin, int64_t rows, float* packed) {
  visit_dtype(args.lora_B_dtype, [&](auto* type) {
    const auto* B = static_cast<decltype(type)>(const_cast<void*>(args.lora_B)) + row_begin * args.lora_B_strides[0];
    for (int64_t k = 0; k < args.rank; ++k, B += args.lora_B_strides[1], packed += V::kRows) {
      for (int64_t i = 0; i < rows; ++i) packed[i] = to_float(B[i * args.lora_B_strides[0]]);
      for (int64_t i = rows; i < V::kRows; ++i) packed[i] = 0.0f;
    }
  });
}

// sum[i * kStripCols + j] = sum over all k, chunk by chunk. One copy per instruction set, whatever the dtypes: its
// loops are unrolled whole, which takes the compiler long.
template <class V>
__attribute__((noinline)) void dot_tile(const float* A, const float* B, int64_t rank, float* sum) {
  using F = typename V::F;
  for (int64_t begin = 0; begin < rank; begin += kChunk) {
    F chunk[V::kRows][V::kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < V::kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < V::kVectors; ++v) chunk[i][v] = V::zero();
    }
    for (int64_t k = begin, end = std::min(rank, begin + kChunk); k < end; ++k) {
      F a[V::kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < V::kVectors; ++v) a[v] = V::load(A + v * V::kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < V::kRows; ++i) {
        const F b = V::broadcast(B[i]);
#pragma GCC unroll 8
        for (int v = 0; v < V::kVectors; ++v) chunk[i][v] = V::fmadd(b, a[v], chunk[i][v]);
      }
      A += V::kVectors * V::kLanes;
      B += V::kRows;
    }
#pragma GCC unroll 8
    for (int i = 0; i < V::kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < V::kVectors; ++v) {
        float* total = sum + i * kStripCols + v * V::kLanes;
        V::store(total, begin == 0 ? chunk[i][v] : V::add(V::load(total), chunk[i][v]));
      }
    }
  }
}

// The cache lines of one tile's row, or what there is of them: an address past the end is no fault.
template <class V, class W>
inline __attribute__((always_inline)) void prefetch(const W* row) {
  constexpr int64_t kBytes = V::kVectors * V::kLanes * static_cast<int64_t>(sizeof(W));
  const char* line = reinterpret_cast<const char*>(row);
  for (int64_t offset = 0; offset < kBytes; offset += 64) __builtin_prefetch(line + offset);
}

// Sums over one group of rows, kept in vectors until its end.
template <class V>
struct GroupStats {
  typename V::F kept_sq = V::zero(), delta_sq = V::zero(), projected = V::zero();
  typename V::I changed = V::zero_bits(), unmoved = V::zero_bits(), checksum = V::zero_bits();

  inline __attribute__((always_inline)) void add(typename V::F base, typename V::F rounded_base, typename V::F delta,
                                                 typename V::F rounded) {
    const auto kept = V::sub(rounded, rounded_base);
    kept_sq = V::fmadd(kept, kept, V::fmadd(rounded, V::zero(), kept_sq));  // infinity times zero is a NaN
    delta_sq = V::fmadd(delta, delta, delta_sq);
    projected = V::fmadd(V::sub(rounded, base), delta, projected);
    changed = V::count_nonzero(changed, delta);
    unmoved = V::count_nonzero_and_equal(unmoved, delta, rounded, rounded_base);
    checksum = V::add_bits(checksum, rounded);
  }

  void add_to(MergeStats* stats) const {
    stats->add({V::sum_bits(changed), V::sum_bits(unmoved), V::sum(kept_sq), V::sum(delta_sq), V::sum(projected),
                static_cast<uint32_t>(V::sum_bits(checksum))});
  }
};

// One row of a strip: sums and base in, outputs out.
template <class V, class W, class O, bool kStats, bool kDither>
void finish_row(const float* sum, float scaling, const W* base, O* out, int64_t cols, bool stream, uint64_t row_key,
                int64_t first_col, const uint32_t* pair_keys, GroupStats<V>& stats, MergeStats* own_stats) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr int64_t kStep = 2 * V::kLanes;
  O* const type = nullptr;
  const auto finish_one = [&](int64_t j) {
    const float w = to_float(base[j]);
    float x = std::fma(scaling, sum[j], w);
    x = kDither && x != w ? dither_to(x, random_bits(row_key, first_col + j), type) : round_to(x, type);
    if (kStats) {
      const float delta = scaling * sum[j];
      const float rounded_base = round_to(w, type), kept = x - rounded_base;
      own_stats->add({delta != 0.0f, delta != 0.0f && x == rounded_base, kept * kept + 0.0f * x, delta * delta,
                      (x - w) * delta, float_bits(x)});
    }
    store_as(out + j, x);
  };
  const F s = V::broadcast(scaling);
  [[maybe_unused]] const I key = V::broadcast_bits(static_cast<uint32_t>(row_key));
  [[maybe_unused]] const I factor = V::broadcast_bits(static_cast<uint32_t>(row_key >> 32) | 1u);
  int64_t j = 0;
  // What is cut within a pair of columns goes the slow way.
  for (; j + kStep <= (kDither && first_col % 2 != 0 ? 0 : cols); j += kStep) {
    const F dot0 = V::load(sum + j);
    const F dot1 = V::load(sum + j + V::kLanes);
    const F w0 = V::load(base + j);
    const F w1 = V::load(base + j + V::kLanes);
    F x0 = V::fmadd(s, dot0, w0);
    F x1 = V::fmadd(s, dot1, w1);
    if constexpr (kDither) {
      I random0, random1;
      V::randoms(key, factor, pair_keys + j / 2, random0, random1);
      F y0 = V::template dither<O>(x0, random0);
      F y1 = V::template dither<O>(x1, random1);
      // A base in out's dtype is exact there and stays as it is by itself.
      constexpr bool kMayRound = !std::is_same_v<W, O>;
      if (__builtin_expect(V::template unusual<O, kMayRound>(x0, x1, w0, w1), 0)) {
        if (V::template beyond<O>(x0, x1)) {
          for (int64_t l = 0; l < kStep; ++l) finish_one(j + l);
          continue;
        }
        y0 = V::where_equal(x0, w0, V::template round<O>(x0), y0);
        y1 = V::where_equal(x1, w1, V::template round<O>(x1), y1);
      }
      x0 = y0;
      x1 = y1;
    } else if (kStats) {
      x0 = V::template round<O>(x0);
      x1 = V::template round<O>(x1);
    }
    if (kStats) {
      stats.add(w0, std::is_same_v<W, O> ? w0 : V::template round<O>(w0), V::mul(s, dot0), x0);
      stats.add(w1, std::is_same_v<W, O> ? w1 : V::template round<O>(w1), V::mul(s, dot1), x1);
    }
    if (kStats || kDither) {
      V::store_exact(out + j, x0, x1, stream);
    } else {
      V::store_rounded(out + j, x0, x1, stream);
    }
  }
  for (; j < cols; ++j) finish_one(j);
}

// Whether out is written past the cache. Such a store must be aligned, in the first row and from row to row.
template <class V, class O>
bool streams(const MergeArgs& args) {
  constexpr int64_t kBytes = sizeof(O);
  const auto aligned = [](int64_t bytes) { return bytes % (2 * V::kLanes * kBytes) == 0; };
  return args.rows * args.cols * kBytes >= kStreamBytes && aligned(reinterpret_cast<intptr_t>(args.out)) &&
         aligned(args.out_stride * kBytes);
}

template <class V, class W, class O, bool kStats, bool kDither>
void merge_rows_of(const MergeArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats) {
  constexpr int64_t kCols = V::kVectors * V::kLanes;
  const W* base = static_cast<const W*>(args.base);
  O* out = static_cast<O*>(args.out);
  // A block of columns is as many strips as kPackedBytes hold lora_A for, but at least one.
  const int64_t strip_floats = args.rank * kStripCols;
  const int64_t num_strips =
      std::min((args.cols + kStripCols - 1) / kStripCols, std::max<int64_t>(1, kPackedBytes / 4 / strip_floats));
  const int64_t group_floats = args.rank * V::kRows;
  const AlignedFloats packed = allocate_floats(num_strips * strip_floats + kGroups * group_floats);
  float* const packed_B = packed.get() + num_strips * strip_floats;
  const bool stream = streams<V, O>(args);
  alignas(64) float sum[V::kRows * kStripCols];
  std::unique_ptr<uint32_t[]> pair_keys(kDither ? new uint32_t[num_strips * kStripCols / 2] : nullptr);

  for (int64_t block = 0; block < args.cols; block += num_strips * kStripCols) {
    const int64_t block_end = std::min(args.cols, block + num_strips * kStripCols);
    pack_lora_A<V>(args, block, block_end, packed.get());
    if (kDither) {
      for (int64_t p = 0; p < (block_end - block + 1) / 2; ++p)
        pair_keys[p] = pair_key((args.place.col + block) / 2 + p);
    }
    for (int64_t first_row = row_begin; first_row < row_end; first_row += kGroups * V::kRows) {
      const int64_t last_row = std::min(row_end, first_row + kGroups * V::kRows);
      for (int64_t row = first_row; row < last_row; row += V::kRows) {
        pack_lora_B<V>(args, row, std::min<int64_t>(V::kRows, last_row - row),
                       packed_B + (row - first_row) / V::kRows * group_floats);
      }
      GroupStats<V> group_stats;
      const float* A = packed.get();
      for (int64_t col = block; col < block_end; col += kStripCols, A += strip_floats) {
        const int64_t cols = std::min(kStripCols, block_end - col);
        const float* B = packed_B;
        for (int64_t row = first_row; row < last_row; row += V::kRows, B += group_floats) {
          const int64_t rows = std::min<int64_t>(V::kRows, last_row - row);
          // What is needed next of base comes from memory meanwhile, a few lines per tile: all at once would fill the
          // buffers of outstanding misses and stall.
          const bool last = row + V::kRows >= last_row;
          const int64_t next_row = last ? first_row : row + V::kRows;
          const W* next = base + next_row * args.base_stride + (last ? col + kStripCols : col);
          const int64_t next_rows = std::min<int64_t>(V::kRows, last_row - next_row);
          const float* panel = A;
          for (int64_t j = 0; j < cols; j += kCols, panel += args.rank * kCols) {
            for (int64_t i = 0; i < next_rows; ++i) prefetch<V>(next + i * args.base_stride + j);
            dot_tile<V>(panel, B, args.rank, sum + j);
          }
          for (int64_t i = 0; i < rows; ++i) {
            const uint64_t key = kDither ? row_key(args.place.key, args.place.row + row + i) : 0;
            finish_row<V, W, O, kStats, kDither>(
                sum + i * kStripCols, args.scaling, base + (row + i) * args.base_stride + col,
                out + (row + i) * args.out_stride + col, cols, stream, key, args.place.col + col,
                pair_keys.get() + (col - block) / 2, group_stats, stats);
          }
        }
      }
      if (kStats) group_stats.add_to(stats);
    }
  }
  if (stream) V::fence();
}

// Without an adapter the value is the rounded base: no addition, which would turn -0.0 into 0.0.
template <class V, class W, class O, bool kStats>
void cast_rows(const MergeArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats) {
  constexpr int64_t kStep = 2 * V::kLanes;
  const bool stream = streams<V, O>(args);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const W* base = static_cast<const W*>(args.base) + row * args.base_stride;
    O* out = static_cast<O*>(args.out) + row * args.out_stride;
    typename V::F not_finite = V::zero();
    typename V::I checksum = V::zero_bits();
    int64_t j = 0;
    for (; j + kStep <= args.cols; j += kStep) {
      typename V::F x0 = V::load(base + j), x1 = V::load(base + j + V::kLanes);
      if constexpr (!std::is_same_v<W, O>) {
        x0 = V::template round<O>(x0);
        x1 = V::template round<O>(x1);
      }
      if (kStats) {
        not_finite = V::fmadd(x0, V::zero(), V::fmadd(x1, V::zero(), not_finite));
        checksum = V::add_bits(V::add_bits(checksum, x0), x1);
      }
      V::store_exact(out + j, x0, x1, stream);
    }
    MergeStats rest;
    for (; j < args.cols; ++j) {
      const float x = round_to(to_float(base[j]), static_cast<O*>(nullptr));
      store_as(out + j, x);
      rest.kept_sq += 0.0f * x;
      rest.checksum += float_bits(x);
    }
    if (!kStats) continue;
    rest.kept_sq += V::sum(not_finite);
    rest.checksum += static_cast<uint32_t>(V::sum_bits(checksum));
    stats->add(rest);
  }
  if (stream) V::fence();
}

template <class V>
void merge_rows(const MergeArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats) {
  visit_dtype(args.base_dtype, [&](auto* base_type) {
    visit_dtype(args.out_dtype, [&](auto* out_type) {
      using W = std::remove_pointer_t<decltype(base_type)>;
      using O = std::remove_pointer_t<decltype(out_type)>;
      if (args.rank == 0) {
        if (stats != nullptr) return cast_rows<V, W, O, true>(args, row_begin, row_end, stats);
        return cast_rows<V, W, O, false>(args, row_begin, row_end, stats);
      }
      if constexpr (!std::is_same_v<O, float>) {  // the sum is a float already
        if (args.rounding == Rounding::kDither) {
          if (stats != nullptr) return merge_rows_of<V, W, O, true, true>(args, row_begin, row_end, stats);
          return merge_rows_of<V, W, O, false, true>(args, row_begin, row_end, stats);
        }
      }
      if (stats != nullptr) return merge_rows_of<V, W, O, true, false>(args, row_begin, row_end, stats);
      return merge_rows_of<V, W, O, false, false>(args, row_begin, row_end, stats);
    });
  });
}

}  // namespace lora_stream
