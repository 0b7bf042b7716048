// All CPU paths give the same bits as the portable one, however the matrix is cut, and the portable one is right
// against float64. Dithered: one of the two neighbours of what is right.
//
// Links csrc/cpu/avx512.cpp compiled over avx512_emulation.h, so that it runs on every processor. AVX2 runs where the
// processor has it. Usage: test_paths [number of random cases]
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "../../csrc/cpu/paths.h"
#include "../../csrc/dtype.h"

using namespace lora_stream;

namespace {

std::mt19937 generator(20260801);

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Mostly weights; now and then what breaks kernels.
float any_value(bool special) {
  static const float specials[] = {0.0f,
                                   -0.0f,
                                   1e-40f,
                                   -3e-39f,
                                   1e-7f,
                                   65504.0f,
                                   65520.0f,
                                   3.38e38f,
                                   -3.4e38f,
                                   std::numeric_limits<float>::infinity(),
                                   -std::numeric_limits<float>::infinity(),
                                   std::numeric_limits<float>::quiet_NaN()};
  if (special && pick(0, 7) == 0) return specials[pick(0, 11)];
  return std::normal_distribution<float>()(generator);
}

void put(std::vector<uint8_t>& memory, int64_t index, DType dtype, float x) {
  visit_dtype(dtype, [&](auto* type) {
    auto* data = reinterpret_cast<decltype(type)>(memory.data());
    store_as(data + index, x);
  });
}

float get(const std::vector<uint8_t>& memory, int64_t index, DType dtype) {
  float x = 0;
  visit_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    x = to_float(reinterpret_cast<const T*>(memory.data())[index]);
  });
  return x;
}

struct Case {
  std::vector<uint8_t> base, lora_A, lora_B;
  MergeArgs args{};
  int64_t out_bytes;

  Case(bool special, int64_t rows, int64_t cols, int64_t rank) {
    args.rows = rows, args.cols = cols, args.rank = rank;
    args.scaling = any_value(false);
    for (DType* dtype : {&args.base_dtype, &args.lora_A_dtype, &args.lora_B_dtype, &args.out_dtype}) {
      *dtype = static_cast<DType>(pick(0, 2));
    }
    args.rounding = pick(0, 1) ? Rounding::kDither : Rounding::kNearest;
    args.place = {static_cast<uint64_t>(pick(0, INT64_MAX)), pick(0, 3) ? pick(0, 99) : pick(0, INT64_MAX - 10000),
                  pick(0, 3) ? pick(0, 99) : pick(0, INT64_MAX - 10000)};
    args.base_stride = cols + pick(0, 3);
    args.out_stride = cols + (pick(0, 1) ? 0 : pick(1, 5));
    const bool transposed = pick(0, 1);
    args.lora_A_strides[0] = transposed ? 1 : cols, args.lora_A_strides[1] = transposed ? rank : 1;
    args.lora_B_strides[0] = transposed ? 1 : rank, args.lora_B_strides[1] = transposed ? rows : 1;
    fill(base, args.base_dtype, rows * args.base_stride, special);
    fill(lora_A, args.lora_A_dtype, rank * cols, special);
    fill(lora_B, args.lora_B_dtype, rows * rank, special);
    args.base = base.data(), args.lora_A = lora_A.data(), args.lora_B = lora_B.data();
    out_bytes = rows * args.out_stride * size_of(args.out_dtype);
  }

  void fill(std::vector<uint8_t>& memory, DType dtype, int64_t count, bool special) {
    memory.assign((count + 1) * size_of(dtype), 0);
    for (int64_t i = 0; i < count; ++i) put(memory, i, dtype, any_value(special));
  }

  std::vector<uint8_t> run(MergeRows merge_rows, MergeStats* stats) {
    // 64-byte aligned, or off by one element; pads between rows hold a pattern that must survive.
    const int64_t shift = args.rows % 2 ? 0 : size_of(args.out_dtype);
    std::vector<uint8_t> memory(out_bytes + 128, 0xa5);
    uint8_t* start = memory.data();
    start += (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64 + shift;
    args.out = start;
    const int64_t half = args.rows / 2;
    merge_rows(args, 0, half, stats);
    merge_rows(args, half, args.rows, stats);
    return std::vector<uint8_t>(start, start + out_bytes);
  }
};

// The part from (row, col) on, as somebody merges it who has nothing else.
Case part_of(const Case& whole, int64_t row, int64_t col) {
  Case part = whole;
  const auto at = [](std::vector<uint8_t>& memory, int64_t index, DType dtype) {
    return memory.data() + index * size_of(dtype);
  };
  MergeArgs& args = part.args;
  args.base = at(part.base, row * args.base_stride + col, args.base_dtype);
  args.lora_A = at(part.lora_A, col * args.lora_A_strides[1], args.lora_A_dtype);
  args.lora_B = at(part.lora_B, row * args.lora_B_strides[0], args.lora_B_dtype);
  args.rows -= row, args.cols -= col;
  args.place.row += row, args.place.col += col;
  part.out_bytes = args.rows * args.out_stride * size_of(args.out_dtype);
  return part;
}

int failures = 0;

void fail(const char* path, const Case& c, const char* what) {
  ++failures;
  std::printf("FAILED %s: %s: rows %ld cols %ld rank %ld base %d A %d B %d out %d\n", path, what,
              static_cast<long>(c.args.rows), static_cast<long>(c.args.cols), static_cast<long>(c.args.rank),
              static_cast<int>(c.args.base_dtype), static_cast<int>(c.args.lora_A_dtype),
              static_cast<int>(c.args.lora_B_dtype), static_cast<int>(c.args.out_dtype));
}

// Within half a step of the output and the float32 rounding errors of the sum.
void check_against_float64(Case& c, const std::vector<uint8_t>& out) {
  for (int64_t i = 0; i < c.args.rows; ++i) {
    for (int64_t j = 0; j < c.args.cols; ++j) {
      double sum = 0, magnitude = 0;
      for (int64_t k = 0; k < c.args.rank; ++k) {
        const double product =
            static_cast<double>(
                get(c.lora_B, i * c.args.lora_B_strides[0] + k * c.args.lora_B_strides[1], c.args.lora_B_dtype)) *
            get(c.lora_A, k * c.args.lora_A_strides[0] + j * c.args.lora_A_strides[1], c.args.lora_A_dtype);
        sum += product, magnitude += std::fabs(product);
      }
      const double base = get(c.base, i * c.args.base_stride + j, c.args.base_dtype);
      const double exact = base + c.args.scaling * sum;
      magnitude = std::fabs(base) + std::fabs(c.args.scaling) * magnitude;
      const int fraction_bits = c.args.out_dtype == DType::kFloat32    ? 23
                                : c.args.out_dtype == DType::kBFloat16 ? 7
                                                                       : 10;
      const double half_step = std::max(std::ldexp(std::fabs(exact), -fraction_bits - 1), std::ldexp(1.0, -25));
      const double allowed = c.args.rounding == Rounding::kDither ? 2 * half_step : half_step;
      const double error = std::fabs(get(out, i * c.args.out_stride + j, c.args.out_dtype) - exact);
      if (!(error <= allowed + std::ldexp(magnitude, -18))) return fail("portable", c, "differs from float64");
    }
  }
}

// The same bits; where the value is a NaN, any NaN.
bool same_values(const Case& c, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, bool* has_nan) {
  const int64_t size = size_of(c.args.out_dtype);
  for (int64_t i = 0; i < c.args.rows * c.args.out_stride; ++i) {
    const bool nan = std::isnan(get(a, i, c.args.out_dtype));
    *has_nan |= nan;
    if (nan ? !std::isnan(get(b, i, c.args.out_dtype)) : std::memcmp(&a[i * size], &b[i * size], size) != 0)
      return false;
  }
  return true;
}

// kept_sq is a NaN where, and only where, an element of out is not finite, or the sum itself is beyond a float64.
bool tells_not_finite(const Case& c, const std::vector<uint8_t>& out, const MergeStats& stats) {
  bool is_finite = true;
  for (int64_t i = 0; i < c.args.rows; ++i) {
    for (int64_t j = 0; j < c.args.cols; ++j) {
      is_finite &= std::isfinite(get(out, i * c.args.out_stride + j, c.args.out_dtype));
    }
  }
  return std::isnan(stats.kept_sq) == !is_finite;
}

bool pads_intact(const Case& c, const std::vector<uint8_t>& out) {
  const int64_t row_bytes = c.args.cols * size_of(c.args.out_dtype),
                stride = c.args.out_stride * size_of(c.args.out_dtype);
  for (int64_t i = 0; i < c.args.rows; ++i) {
    for (int64_t b = row_bytes; b < stride; ++b) {
      if (out[i * stride + b] != 0xa5) return false;
    }
  }
  return true;
}

bool same_stats(const MergeStats& a, const MergeStats& b, bool has_nan) {
  const auto close = [](double x, double y) {
    return (std::isnan(x) && std::isnan(y)) || x == y || std::fabs(x - y) <= 1e-4 * std::fabs(x + y);
  };
  return a.changed == b.changed && a.unmoved == b.unmoved && (has_nan || a.checksum == b.checksum) &&
         close(a.kept_sq, b.kept_sq) && close(a.delta_sq, b.delta_sq) &&
         // A sum of both signs: its error goes with its parts. Of infinities it depends on the order.
         (!(std::isfinite(a.projected) && std::isfinite(b.projected) && std::isfinite(a.kept_sq)) ||
          std::fabs(a.projected - b.projected) <= 1e-4 * (std::sqrt(a.kept_sq * a.delta_sq) + a.delta_sq));
}

void compare(bool special, int64_t rows, int64_t cols, int64_t rank) {
  Case c(special, rows, cols, rank);
  MergeStats expected_stats;
  const auto expected = c.run(merge_rows_portable, &expected_stats);
  if (!special) check_against_float64(c, expected);
  if (!pads_intact(c, expected)) fail("portable", c, "wrote between the rows");
  bool has_nan = false;
  if (!same_values(c, c.run(merge_rows_portable, nullptr), expected, &has_nan)) {
    fail("portable", c, "other bits without statistics");
  }
  for (const CpuPath& path : cpu_paths()) {
    // The AVX-512 paths are emulated here, whatever the processor has.
    const bool emulated = std::strncmp(path.name, "avx512", 6) == 0;
    if (!emulated && !path.supported) continue;
    MergeStats stats;
    if (!same_values(c, c.run(path.merge_rows, &stats), expected, &has_nan)) fail(path.name, c, "other bits");
    if (!same_values(c, c.run(path.merge_rows, nullptr), expected, &has_nan)) {
      fail(path.name, c, "other bits without statistics");
    }
    if (!same_stats(stats, expected_stats, has_nan)) fail(path.name, c, "other statistics");
    if (!tells_not_finite(c, expected, stats)) fail(path.name, c, "kept_sq does not tell whether out is finite");
    if (rows > 0 && cols > 0) {
      const int64_t row = pick(0, rows - 1), col = pick(0, cols - 1);
      Case part = part_of(c, row, col);
      const auto merged = part.run(path.merge_rows, nullptr);
      const int64_t size = size_of(c.args.out_dtype);
      for (int64_t i = 0; i < part.args.rows; ++i) {
        for (int64_t j = 0; j < part.args.cols; ++j) {
          const int64_t in_part = i * c.args.out_stride + j, in_whole = (i + row) * c.args.out_stride + j + col;
          if (std::memcmp(&merged[in_part * size], &expected[in_whole * size], size) != 0 &&
              !std::isnan(get(expected, in_whole, c.args.out_dtype))) {
            return fail(path.name, c, "other bits of a part");
          }
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t num_cases = argc > 1 ? std::atol(argv[1]) : 300;
  for (int64_t i = 0; i < num_cases; ++i) {
    compare(i % 2, pick(1, 40), pick(1, 300), pick(0, 4) ? pick(0, 80) : pick(0, 3));
  }
  for (const auto& [rows, cols, rank] : {std::array<int64_t, 3>{1, 1, 1},
                                         {7, 64, 32},
                                         {6, 256, 33},
                                         {5, 257, 64},
                                         {13, 1, 300},
                                         {0, 5, 2},
                                         {3, 5, 0},
                                         {25, 4096, 16}}) {
    compare(false, rows, cols, rank);
  }
  compare(false, 1200, 2048, 3);  // large enough for streamed stores
  if (failures == 0) std::printf("all paths agree\n");
  return failures != 0;
}
