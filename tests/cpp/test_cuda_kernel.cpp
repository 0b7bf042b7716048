// The text of the CUDA kernel, run on the CPU by cuda_emulation.h, is right against float64.
//
// Usage: test_cuda_kernel [all | small] [a fault that must be noticed]
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "../../csrc/cuda/merge_kernel.h"
#include "../../csrc/cuda/schedule.h"

using namespace lora_stream;

namespace {

std::mt19937 generator(20260801);
int failures = 0;
int64_t elements = 0;

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }
float normal() { return std::normal_distribution<float>()(generator); }

void expect(bool ok, const std::string& what) {
  if (ok) return;
  if (++failures <= 20) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

template <class F>
auto with_dtype(DType dtype, F f) {
  if (dtype == DType::kFloat32) return f(static_cast<float*>(nullptr));
  if (dtype == DType::kBFloat16) return f(static_cast<BFloat16*>(nullptr));
  return f(static_cast<Float16*>(nullptr));
}

// Elements in memory whose first one may lie anywhere.
struct Values {
  std::vector<uint8_t> memory;
  DType dtype;
  int64_t start;

  Values(DType dtype, int64_t count, int64_t start) : dtype(dtype), start(start) {
    memory.assign((count + start) * bytes() + 16, 0xab);
  }
  int64_t bytes() const { return dtype == DType::kFloat32 ? 4 : 2; }
  uint8_t* data() {
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (16 - address % 16) % 16 + start * bytes();
  }
  void set(int64_t index, float x) {
    with_dtype(dtype, [&](auto* type) { store_as(reinterpret_cast<decltype(type)>(data()) + index, x); });
  }
  float get(int64_t index) {
    return with_dtype(dtype, [&](auto* type) { return to_float(reinterpret_cast<decltype(type)>(data())[index]); });
  }
};

struct Shape {
  int64_t rows, cols, rank;
};

struct Options {
  DType base = DType::kBFloat16, adapter = DType::kFloat32, out = DType::kBFloat16;
  int64_t pad = 0;    // elements of base and out between rows
  int64_t start = 0;  // elements before the first
  bool in_place = false;
  bool fast = false;
  bool stats = true;
  bool fidelity = true;
  bool dither = false;
  double delta = 1.0;         // its size over base's
  float (*value)() = normal;  // of lora_A and lora_B
  int64_t shared_bytes = 227 * 1024;
  int64_t min_items = 0;  // items as long as can be; else shorter ones
};

struct Problem {
  MergeArgs args{};
  Values base, lora_A, lora_B, out;
  std::vector<double> old_base;

  Problem(Shape shape, const Options& o)
      : base(o.base, shape.rows * (shape.cols + o.pad), o.start),
        lora_A(o.adapter, even_rank(shape) * filled_cols(shape), 0),
        lora_B(o.adapter, shape.rows * even_rank(shape), 0),
        out(o.out, shape.rows * (shape.cols + o.pad), o.start) {
    args.rows = shape.rows, args.cols = shape.cols, args.rank = even_rank(shape);
    args.base_stride = args.out_stride = shape.cols + o.pad;
    args.lora_A_strides[0] = filled_cols(shape), args.lora_A_strides[1] = 1;
    args.lora_B_strides[0] = args.rank, args.lora_B_strides[1] = 1;
    args.base_dtype = o.base, args.lora_A_dtype = args.lora_B_dtype = o.adapter, args.out_dtype = o.out;
    if (o.dither) {
      args.rounding = Rounding::kDither;
      args.place = {generator(), pick(0, 1000), pick(0, 1) ? pick(0, 1000) : pick(0, int64_t{1} << 40)};
    }
    args.scaling = static_cast<float>(o.delta * 0.02 / std::sqrt(std::max<double>(1, shape.rank)));
    // As merge_kernel.h asks for them: a rank more where it is odd, rows of lora_A filled up, all with zeros.
    for (int64_t k = 0; k < args.rank; ++k) {
      for (int64_t j = 0; j < filled_cols(shape); ++j) {
        lora_A.set(k * filled_cols(shape) + j, k < shape.rank && j < shape.cols ? o.value() : 0.0f);
      }
      for (int64_t i = 0; i < shape.rows; ++i) lora_B.set(i * args.rank + k, k < shape.rank ? o.value() : 0.0f);
    }
    for (int64_t i = 0; i < shape.rows * args.base_stride; ++i) {
      base.set(i, 0.02f * normal());
      out.set(i, 7.0f);
    }
    for (int64_t i = 0; i < shape.rows; ++i) {
      for (int64_t j = 0; j < shape.cols; ++j) old_base.push_back(base.get(i * args.base_stride + j));
    }
    args.base = base.data(), args.lora_A = lora_A.data(), args.lora_B = lora_B.data();
    args.out = o.in_place ? base.data() : out.data();
  }

  static int64_t filled_cols(const Shape& shape) { return cuda::round_up(shape.cols, 8); }
  static int64_t even_rank(const Shape& shape) { return cuda::round_up(shape.rank, 2); }
  double a(int64_t k, int64_t j) { return lora_A.get(k * args.lora_A_strides[0] + j * args.lora_A_strides[1]); }
  double b(int64_t i, int64_t k) { return lora_B.get(i * args.lora_B_strides[0] + k * args.lora_B_strides[1]); }
};

template <cuda::Operands kOperands, int kBaseBytes>
void run(const cuda::Table& table, int64_t shared_bytes, bool stats, bool fidelity) {
  using cuda::Statistics;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(pick(1, 3), table.num_items));
  const auto seed = static_cast<unsigned>(pick(0, 3));
  const auto with_statistics = [&](auto statistics) {
    emulation::launch(blocks, cuda::kThreads, shared_bytes, seed,
                      [&] { cuda::merge<kOperands, kBaseBytes, statistics.value>(table); });
  };
  if (!stats) return with_statistics(std::integral_constant<Statistics, Statistics::kNone>{});
  if (!fidelity) return with_statistics(std::integral_constant<Statistics, Statistics::kRounding>{});
  with_statistics(std::integral_constant<Statistics, Statistics::kFidelity>{});
}

void merge_all(const std::vector<MergeArgs>& group, double* stats, const Options& o) {
  for (const cuda::Launch& launch : cuda::schedule(group, stats, o.fast, o.shared_bytes, o.min_items)) {
    const auto with_operands = [&](auto operands) {
      if (launch.base_bytes == 4) {
        run<operands.value, 4>(*launch.table, launch.shared_bytes, stats != nullptr, o.fidelity);
      } else {
        run<operands.value, 2>(*launch.table, launch.shared_bytes, stats != nullptr, o.fidelity);
      }
    };
    using cuda::Operands;
    switch (launch.operands) {
      case Operands::kBFloat16:
        with_operands(std::integral_constant<Operands, Operands::kBFloat16>{});
        break;
      case Operands::kFloat16:
        with_operands(std::integral_constant<Operands, Operands::kFloat16>{});
        break;
      case Operands::kTwoPlanes:
        with_operands(std::integral_constant<Operands, Operands::kTwoPlanes>{});
        break;
      case Operands::kThreePlanes:
        with_operands(std::integral_constant<Operands, Operands::kThreePlanes>{});
        break;
    }
  }
}

double step_of(DType dtype, double x) {
  const int bits = dtype == DType::kFloat32 ? 23 : dtype == DType::kBFloat16 ? 7 : 10;
  const int least = dtype == DType::kFloat16 ? -14 : -126;
  int exponent;
  std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent - 1, least) - bits);
}

// Merges the group in one call and holds it against float64. Returns the share of elements that are not the exact sum
// rounded once.
double check(const char* name, const std::vector<Shape>& shapes, const Options& o) {
  std::vector<Problem> problems;
  problems.reserve(shapes.size());
  for (const Shape& shape : shapes) problems.emplace_back(shape, o);
  std::vector<MergeArgs> group;
  for (Problem& problem : problems) group.push_back(problem.args);
  std::vector<double> stats(shapes.size() * cuda::kNumStats, 0.0);
  merge_all(group, o.stats ? stats.data() : nullptr, o);

  // What is said in lora_stream/ops.py.
  const double epsilon = o.fast ? std::ldexp(1.0, -15) : std::ldexp(1.0, -18);
  int64_t misrounded = 0, count = 0;
  for (size_t p = 0; p < problems.size(); ++p) {
    Problem& x = problems[p];
    const MergeArgs& args = x.args;
    const std::string where = std::string(name) + " [" + std::to_string(args.rows) + ", " + std::to_string(args.cols) +
                              "] rank " + std::to_string(args.rank);
    Values& out = o.in_place ? x.base : x.out;
    double changed = 0, unmoved = 0, kept_sq = 0, delta_sq = 0, projected = 0;
    uint32_t checksum = 0;
    for (int64_t i = 0; i < args.rows; ++i) {
      for (int64_t j = 0; j < args.cols; ++j) {
        double sum = 0, magnitude = 0;
        for (int64_t k = 0; k < args.rank; ++k) {
          sum += x.b(i, k) * x.a(k, j);
          magnitude += std::fabs(x.b(i, k) * x.a(k, j));
        }
        const double base = x.old_base[i * args.cols + j], delta = static_cast<double>(args.scaling) * sum;
        const double exact = base + delta, got = out.get(i * args.out_stride + j);
        const float rounded = with_dtype(o.out, [&](auto* type) { return round_to(static_cast<float>(exact), type); });
        const float rounded_base =
            with_dtype(o.out, [&](auto* type) { return round_to(static_cast<float>(base), type); });
        magnitude = std::fabs(base) + std::fabs(args.scaling) * magnitude;
        const double share = o.dither && o.out != DType::kFloat32 ? 1.0 : 0.5;  // of a step
        expect(std::fabs(got - exact) <= share * step_of(o.out, exact) + epsilon * magnitude,
               where + " at " + std::to_string(i) + ", " + std::to_string(j) + ": got " + std::to_string(got) +
                   ", expected " + std::to_string(exact));
        misrounded += got != rounded;
        ++count;
        changed += delta != 0;
        unmoved += delta != 0 && static_cast<float>(got) == rounded_base;
        kept_sq += (got - rounded_base) * (got - rounded_base);
        delta_sq += delta * delta;
        projected += (got - base) * delta;
        checksum += float_bits(static_cast<float>(got));
      }
      for (int64_t j = args.cols; j < args.out_stride; ++j) {
        expect(o.in_place || out.get(i * args.out_stride + j) == 7.0f, where + ": wrote between the rows");
      }
    }
    if (!o.stats) continue;
    const double* s = stats.data() + p * cuda::kNumStats;
    const auto near = [](double got, double expected) { return std::fabs(got - expected) <= 1e-3 * expected + 1e-30; };
    expect(s[0] == changed, where + ": changed " + std::to_string(s[0]) + ", expected " + std::to_string(changed));
    expect(s[1] == unmoved, where + ": unmoved " + std::to_string(s[1]) + ", expected " + std::to_string(unmoved));
    expect(near(s[2], kept_sq), where + ": kept_sq " + std::to_string(s[2]) + ", expected " + std::to_string(kept_sq));
    expect(near(s[3], delta_sq), where + ": delta_sq");
    expect(o.fidelity ? std::fabs(s[4] - projected) <= 1e-3 * (std::sqrt(kept_sq * delta_sq) + delta_sq) + 1e-30
                      : std::isnan(s[4]) || args.rows * args.cols == 0,
           where + ": projected " + std::to_string(s[4]) + ", expected " + std::to_string(projected));
    expect(static_cast<uint32_t>(std::fmod(s[5], 4294967296.0)) == checksum, where + ": checksum");
  }
  elements += count;
  return count == 0 ? 0.0 : static_cast<double>(misrounded) / static_cast<double>(count);
}

const std::vector<Shape> kOdd = {{1, 1, 1},    {3, 5, 2},     {64, 128, 16}, {65, 129, 13}, {17, 136, 8}, {0, 8, 4},
                                 {130, 40, 0}, {200, 24, 16}, {5, 0, 4},     {2, 300, 33},  {31, 8, 7}};

const DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

void every_combination_of_dtypes() {
  for (DType base : kDTypes) {
    for (DType out : kDTypes) {
      for (DType adapter : kDTypes) {
        for (bool stats : {false, true}) {
          Options o;
          o.base = base, o.out = out, o.adapter = adapter, o.stats = stats;
          o.dither = pick(0, 1), o.fidelity = pick(0, 1);
          o.pad = pick(0, 1) * 8, o.start = pick(0, 3) == 0, o.fast = pick(0, 3) == 0, o.min_items = pick(0, 1) * 8;
          check("dtypes", {{70, 40, 17}, {3, 9, 4}}, o);
        }
      }
    }
  }
}

void every_layout() {
  for (int64_t pad : {0, 3, 8}) {
    for (int64_t start : {0, 1, 4}) {
      for (DType base : {DType::kFloat32, DType::kBFloat16}) {
        Options o;
        o.pad = pad, o.start = start, o.base = base;
        o.adapter = pick(0, 1) ? DType::kFloat32 : DType::kBFloat16;
        check("layout", kOdd, o);
      }
    }
  }
}

void large_ranks_and_ranks_that_do_not_fit() {
  Options o;
  check("rank 256", {{40, 136, 256}, {70, 24, 100}}, o);
  o.adapter = DType::kBFloat16;
  check("rank 256 bfloat16", {{40, 136, 250}}, o);
  o = {};
  o.shared_bytes = 99 * 1024;  // what consumer GPUs have
  check("in pieces", {{200, 24, 200}, {70, 130, 16}}, o);
  o.base = DType::kFloat32;
  check("in pieces of 16", {{70, 72, 70}}, o);
  check("in pieces, rank 1024", {{20, 24, 1024}}, o);
}

void out_may_be_base() {
  for (DType dtype : kDTypes) {
    Options o;
    o.base = o.out = dtype, o.in_place = true;
    check("in place", kOdd, o);
    o.pad = 3, o.stats = false;
    check("in place, odd rows", kOdd, o);
  }
}

// Contract: 99.99 % of the elements are the exact sum rounded once, also as tensor cores add.
void elements_are_the_exact_sum_rounded_once() {
  for (bool cut : {false, true}) {
    emulation::cut_sums = cut;
    for (DType adapter : kDTypes) {
      for (auto [rank, delta] : {std::pair<int64_t, double>{16, 1.0}, {64, 1.0}, {256, 0.25}}) {
        if (!cut && rank != 64) continue;  // the harder case is enough
        Options o;
        o.base = DType::kFloat32, o.adapter = adapter, o.delta = delta;
        const double share = check("exactness", {{rank > 64 ? 50 : 250, 240, rank}}, o);
        std::printf("  %s sums, %s, rank %3d: %.4f %% misrounded\n", cut ? "cut  " : "exact",
                    adapter == DType::kFloat32    ? "float32 "
                    : adapter == DType::kBFloat16 ? "bfloat16"
                                                  : "float16 ",
                    static_cast<int>(rank), 100 * share);
        expect(share <= 1e-4, "more than 0.01 % are not the exact sum rounded once");
      }
    }
  }
  Options o;
  o.base = DType::kFloat32, o.fast = true, o.delta = 0.1;
  const double share = check("fast", {{120, 240, 64}}, o);
  std::printf("  cut   sums, float32, precision fast, rank 64, delta a tenth of base: %.4f %% misrounded\n",
              100 * share);
  expect(share > 1e-4 && share < 2e-3, "precision fast is another arithmetic, and this much coarser");
  emulation::cut_sums = false;
}

float any_value() {
  static const float kSpecial[] = {std::numeric_limits<float>::infinity(),
                                   -std::numeric_limits<float>::infinity(),
                                   std::numeric_limits<float>::quiet_NaN(),
                                   3.39e38f,
                                   1e38f,
                                   -1e38f,
                                   1e-40f,
                                   -3e-39f,
                                   0.0f,
                                   -0.0f};
  return pick(0, 40) == 0 ? kSpecial[pick(0, 9)] : normal();
}

// Against float32: infinite where it is, NaN where it is, near elsewhere.
void infinities_nans_and_denormals_propagate_as_in_float32() {
  for (DType adapter : kDTypes) {
    for (bool fast : {false, true}) {
      Options o;
      o.base = DType::kFloat32, o.adapter = adapter, o.fast = fast, o.value = any_value;
      o.out = DType::kFloat32;
      Problem x({90, 140, 3}, o);
      x.base.set(0, -0.0f);
      x.base.set(1, std::numeric_limits<float>::infinity());
      x.base.set(2, std::numeric_limits<float>::quiet_NaN());
      x.args.scaling = 1.0f;
      std::vector<float> base;
      for (int64_t i = 0; i < 90 * 140; ++i) base.push_back(x.base.get(i));
      merge_all({x.args}, nullptr, o);
      for (int64_t i = 0; i < 90; ++i) {
        for (int64_t j = 0; j < 140; ++j) {
          float sum = 0;
          double magnitude = std::fabs(base[i * 140 + j]);
          bool overflows = false;  // finite products past float32's end may meet in either order, and cancel or not
          for (int64_t k = 0; k < 3; ++k) {
            const auto b = static_cast<float>(x.b(i, k)), a = static_cast<float>(x.a(k, j));
            const double product = std::fabs(static_cast<double>(b) * a);
            sum = std::fma(b, a, sum);
            magnitude += product;
            overflows |= std::isfinite(product) && product > std::numeric_limits<float>::max();
          }
          overflows |= std::isfinite(magnitude) && magnitude > std::numeric_limits<float>::max();
          const float expected = base[i * 140 + j] + sum, got = x.out.get(i * 140 + j);
          const bool alike = overflows              ? true
                             : std::isnan(expected) ? std::isnan(got)
                             : std::isinf(expected) ? got == expected
                                                    : std::fabs(static_cast<double>(got) - expected) <=
                                                          magnitude * std::ldexp(1.0, fast ? -14 : -18) + 1e-37;
          expect(alike, "special values: got " + std::to_string(got) + ", expected " + std::to_string(expected));
          ++elements;
        }
      }
    }
  }
  // A cast keeps what an addition would not.
  Options o;
  o.base = o.out = DType::kFloat32;
  Problem x({1, 3, 0}, o);
  const float values[] = {-0.0f, 1e-40f, -std::numeric_limits<float>::infinity()};
  for (int64_t j = 0; j < 3; ++j) x.base.set(j, values[j]);
  merge_all({x.args}, nullptr, o);
  for (int64_t j = 0; j < 3; ++j) expect(float_bits(x.out.get(j)) == float_bits(values[j]), "a cast changed a value");
}

// The kernel's own float32 sums, dithered by what the CPU paths use, give the very bits; of bases up to the largest
// values too, of zero deltas, and however the matrix is cut.
void dither_decides_as_on_the_cpu() {
  for (DType base : kDTypes) {
    for (DType out : {DType::kBFloat16, DType::kFloat16}) {
      for (double size : {1.0, 1e-5, 1e-39, 3e6, 1.6e40}) {  // of base, over 0.02
        Options o;
        o.base = base, o.out = out, o.dither = true, o.pad = pick(0, 3);
        o.adapter = pick(0, 1) ? DType::kFloat32 : DType::kBFloat16;
        const Shape shape{pick(1, 80), pick(1, 200), pick(1, 20)};
        Problem x(shape, o);
        for (int64_t i = 0; i < shape.rows * x.args.base_stride; ++i) {
          const double w = size > 1e39 ? 3e38 * (1 + 0.13 * normal()) : 0.02 * size * normal();
          x.base.set(i, static_cast<float>(std::min<double>(w, std::numeric_limits<float>::max())));
        }
        if (size < 1e39) x.args.scaling *= static_cast<float>(size);
        for (int64_t k = 0; k < x.args.rank; ++k) x.lora_B.set(k, 0.0f);  // a row without a delta
        Values sums(DType::kFloat32, shape.rows * x.args.out_stride, 0);
        MergeArgs exact = x.args;
        exact.out = sums.data(), exact.out_dtype = DType::kFloat32;
        merge_all({exact}, nullptr, o);
        merge_all({x.args}, nullptr, o);
        const int64_t row = pick(0, shape.rows - 1), col = pick(0, (shape.cols - 1) / 8) * 8;
        Values part_out(out, shape.rows * x.args.out_stride, 0);
        MergeArgs part = cuda::block_of(x.args, row, col);
        part.out = part_out.data();
        merge_all({part}, nullptr, o);
        for (int64_t i = 0; i < shape.rows; ++i) {
          for (int64_t j = 0; j < shape.cols; ++j) {
            const float w = x.base.get(i * x.args.base_stride + j), sum = sums.get(i * x.args.out_stride + j);
            const uint32_t random = random_bits(row_key(x.args.place.key, x.args.place.row + i), x.args.place.col + j);
            const float expected = with_dtype(
                out, [&](auto* type) { return sum == w ? round_to(sum, type) : dither_to(sum, random, type); });
            const float got = x.out.get(i * x.args.out_stride + j);
            expect(float_bits(got) == float_bits(expected) || (std::isnan(got) && std::isnan(expected)),
                   "dithered to " + std::to_string(got) + ", expected " + std::to_string(expected));
            if (i >= row && j >= col) {
              const float of_part = part_out.get((i - row) * x.args.out_stride + j - col);
              expect(float_bits(got) == float_bits(of_part) || std::isnan(got), "other bits of a part");
            }
            ++elements;
          }
        }
      }
    }
  }
}

void a_table_of_hundreds_of_matrices_takes_few_launches() {
  std::vector<Shape> shapes;
  for (int i = 0; i < 300; ++i) shapes.push_back({pick(0, 9), pick(1, 20), pick(0, 5)});
  Options o;
  check("table", shapes, o);
  std::vector<MergeArgs> group(cuda::kMaxEntries - 2);
  for (MergeArgs& args : group) args.rows = args.cols = 4096, args.rank = 16;
  const auto launches = cuda::schedule(group, nullptr, false, 227 * 1024, 8 * 264);
  expect(launches.size() == 1, "that many matrices of one kind are one launch");
  expect(launches[0].table->num_items == (cuda::kMaxEntries - 2) * 8 * 32, "items of 512 rows");
  for (MergeArgs& args : group) args.rank = 100000;
  for (int64_t limit : {99, 163, 227}) {
    const auto launch = std::move(cuda::schedule(group, nullptr, false, limit * 1024, 8 * 264)[0]);
    expect(launch.shared_bytes <= limit * 1024 && launch.table->strip_ranks >= 16, "shared memory is bounded");
  }
  // Matrices of 2^37 elements, tall and wide, and more of them than one launch has items for.
  group.assign(40, {});
  for (size_t i = 0; i < group.size(); ++i) {
    MergeArgs& args = group[i];
    args.rows = int64_t{1} << (i % 2 ? 33 : 4), args.cols = int64_t{1} << (i % 2 ? 4 : 33), args.rank = 2;
    args.base_stride = args.out_stride = args.lora_A_strides[0] = args.cols, args.lora_B_strides[0] = 2;
    args.out_dtype = DType::kBFloat16;
  }
  int64_t items = 0, elements = 0, last_base = 0, last_out = 0, last_A = 0, last_B = 0, last_row = 0, last_col = 0;
  for (const auto& launch : cuda::schedule(group, nullptr, false, 227 * 1024, 8 * 264)) {
    expect(launch.table->num_items > 0 && launch.table->num_items <= cuda::kMaxItems, "items of a launch");
    items += launch.table->num_items;
    for (int i = 0; i < launch.table->num_entries; ++i) {
      const MergeArgs& args = launch.table->entries[i].args;
      elements += args.rows * args.cols;
      const auto at = [](const void* data) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(data)); };
      last_base = std::max(last_base, at(args.base)), last_out = std::max(last_out, at(args.out));
      last_A = std::max(last_A, at(args.lora_A)), last_B = std::max(last_B, at(args.lora_B));
      last_row = std::max(last_row, args.place.row), last_col = std::max(last_col, args.place.col);
    }
  }
  expect(elements == 40 * (int64_t{1} << 37), "every element is in one launch");
  expect(items == 20 * ((int64_t{1} << 33) / 512 + (int64_t{1} << 33) / 128), "items of large matrices");
  const int64_t last = (int64_t{1} << 33) - cuda::kMaxSide;  // where the last block begins
  expect(last_base == last * 16 * 4 && last_out == last * 16 * 2, "blocks of a tall matrix");
  expect(last_A == last * 4 && last_B == last * 2 * 4, "blocks of lora_A and lora_B");
  expect(last_row == last && last_col == last, "places of blocks");
}

void small() {
  Options o;
  check("small", {{3, 5, 2}, {65, 129, 13}, {270, 40, 16}}, o);
  o.base = DType::kFloat32, o.adapter = DType::kBFloat16, o.in_place = true, o.out = DType::kFloat32;
  check("small in place", {{200, 40, 16}}, o);
  o = {};
  o.base = DType::kFloat32, o.shared_bytes = 99 * 1024;
  check("small in pieces", {{200, 24, 60}}, o);
  o.min_items = 100, o.dither = true;
  check("small items", {{200, 24, 60}}, o);
  o.min_items = 0, o.stats = o.dither = false;
  check("small casts", {{200, 500, 0}, {20, 700, 0}}, o);
  o.base = DType::kBFloat16, o.out = DType::kFloat32;
  check("small casts", {{200, 500, 0}, {20, 700, 0}}, o);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string suite = argc > 1 ? argv[1] : "all", fault = argc > 2 ? argv[2] : "";
  using emulation::Fault;
  if (fault == "no_barrier_before") emulation::fault = Fault::kNoBarrierBefore;
  if (fault == "no_barrier_after") emulation::fault = Fault::kNoBarrierAfter;
  if (fault == "no_warp_barrier") emulation::fault = Fault::kNoWarpBarrier;
  if (fault == "no_wait") emulation::fault = Fault::kNoWait;
  if (fault == "short_memory") emulation::fault = Fault::kShortMemory;
  if (fault == "misaligned_memory") emulation::fault = Fault::kMisalignedMemory;
  if (fault == "missed_barrier") emulation::fault = Fault::kMissedBarrier;
  small();
  if (suite == "all") {
    every_combination_of_dtypes();
    every_layout();
    large_ranks_and_ranks_that_do_not_fit();
    out_may_be_base();
    elements_are_the_exact_sum_rounded_once();
    infinities_nans_and_denormals_propagate_as_in_float32();
    dither_decides_as_on_the_cpu();
    a_table_of_hundreds_of_matrices_takes_few_launches();
  }
  std::printf("%lld elements, %d failures\n", static_cast<long long>(elements), failures);
  return failures == 0 ? 0 : 1;
}
