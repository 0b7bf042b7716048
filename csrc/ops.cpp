// The tensor ops, registered through torch's stable ABI: one binary serves several torch versions.
//
//   merge_cast_          one matrix
//   merge_cast_grouped_  many matrices in one parallel loop, with optional rounding statistics
//   _merge_cast_cuda_    what lora_stream/ops.py makes of both on a CUDA device: only there the current stream is known
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/paths.h"
#include "merge_cast.h"
#if defined(LORA_STREAM_CUDA)
#include "cuda/launch.h"
#endif

namespace lora_stream {
namespace {

using torch::stable::Tensor;

// A thread is not worth waking for fewer multiply-adds than this.
constexpr int64_t kGrainOps = 64 * 1024;
// Rows a thread takes at a time; a multiple of every path's tile height.
constexpr int64_t kBlockRows = 24;
constexpr int64_t kNumStats = 6;

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) text += (d ? ", " : "") + std::to_string(tensor.size(d));
  return text + "]";
}

DType dtype_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case torch::headeronly::ScalarType::Float:
      return DType::kFloat32;
    case torch::headeronly::ScalarType::BFloat16:
      return DType::kBFloat16;
    case torch::headeronly::ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, "merge_cast_: ", name, " must be float32, bfloat16 or float16, got ",
                      torch::headeronly::toString(tensor.scalar_type()), "; cast it first");
  }
}

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

void check_matrix(const char* name, const Tensor& tensor, const char* shape, int64_t rows, int64_t cols) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == cols, "merge_cast_: ", name,
                  " must have shape ", shape, " = [", rows, ", ", cols, "], got ", shape_text(tensor));
}

void check_rows_contiguous(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == 1, "merge_cast_: ", name,
                  " must have adjacent elements in a row (stride(1) == 1), got stride(1) == ", tensor.stride(1),
                  "; call .contiguous() first");
}

struct Bytes {
  uintptr_t begin, end;
};

Bytes extent(const void* data, const Tensor& tensor, DType dtype) {
  int64_t last = 0;
  for (int64_t d = 0; d < 2; ++d) {
    if (tensor.size(d) == 0) return {0, 0};
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + static_cast<uintptr_t>((last + 1) * element_size(dtype))};
}

void check_on_cpu(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_cpu(), "merge_cast_: all tensors must be on one device, but base is on the CPU and ", name,
                  " is not");
}

bool overlap(const Bytes& a, const Bytes& b) { return a.begin < b.end && b.begin < a.end; }

MergeArgs checked_args(const Tensor& base, const Tensor& lora_A, const Tensor& lora_B, double scaling,
                       const Tensor& out) {
  STD_TORCH_CHECK(base.dim() == 2, "merge_cast_: base must be a matrix [rows, cols], got ", shape_text(base));
  STD_TORCH_CHECK(lora_A.dim() == 2, "merge_cast_: lora_A must be a matrix [rank, cols], got ", shape_text(lora_A));
  MergeArgs args{};
  args.rows = base.size(0);
  args.cols = base.size(1);
  args.rank = lora_A.size(0);
  check_matrix("base", base, "[rows, cols]", args.rows, args.cols);
  check_matrix("lora_A", lora_A, "[rank, cols]", args.rank, args.cols);
  check_matrix("lora_B", lora_B, "[rows, rank]", args.rows, args.rank);
  check_matrix("out", out, "[rows, cols]", args.rows, args.cols);
  check_rows_contiguous("base", base);
  check_rows_contiguous("out", out);
  STD_TORCH_CHECK(args.rows <= 1 || out.stride(0) >= args.cols,
                  "merge_cast_: out must not overlap itself, got stride(0) ", out.stride(0), " with ", args.cols,
                  " columns");
  args.base_dtype = dtype_of("base", base);
  args.lora_A_dtype = dtype_of("lora_A", lora_A);
  args.lora_B_dtype = dtype_of("lora_B", lora_B);
  args.out_dtype = dtype_of("out", out);
  args.base = base.const_data_ptr();
  args.lora_A = lora_A.const_data_ptr();
  args.lora_B = lora_B.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.base_stride = base.stride(0);
  args.out_stride = out.stride(0);
  for (int64_t d = 0; d < 2; ++d) {
    args.lora_A_strides[d] = lora_A.stride(d);
    args.lora_B_strides[d] = lora_B.stride(d);
  }
  args.scaling = static_cast<float>(scaling);

  const Bytes written = extent(args.out, out, args.out_dtype);
  const bool in_place = args.out == args.base && args.out_dtype == args.base_dtype &&
                        (args.out_stride == args.base_stride || args.rows <= 1);
  STD_TORCH_CHECK(in_place || !overlap(written, extent(args.base, base, args.base_dtype)),
                  "merge_cast_: out overlaps base without being the same matrix; pass base itself or other memory");
  STD_TORCH_CHECK(!overlap(written, extent(args.lora_A, lora_A, args.lora_A_dtype)) &&
                      !overlap(written, extent(args.lora_B, lora_B, args.lora_B_dtype)),
                  "merge_cast_: out overlaps lora_A or lora_B; pass other memory");
  return args;
}

// What one matrix writes no other may read or write: threads work on all of them at once, in no order.
void check_disjoint(const std::vector<MergeArgs>& group, const std::vector<Tensor>& bases,
                    const std::vector<Tensor>& lora_As, const std::vector<Tensor>& lora_Bs,
                    const std::vector<Tensor>& outs) {
  std::vector<std::pair<Bytes, size_t>> written;  // by address
  for (size_t i = 0; i < group.size(); ++i) {
    const Bytes bytes = extent(group[i].out, outs[i], group[i].out_dtype);
    if (bytes.begin < bytes.end) written.emplace_back(bytes, i);
  }
  std::sort(written.begin(), written.end(), [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  for (size_t k = 1; k < written.size(); ++k) {
    STD_TORCH_CHECK(!overlap(written[k - 1].first, written[k].first), "merge_cast_grouped_: outs ",
                    written[k - 1].second, " and ", written[k].second, " overlap; pass other memory");
  }
  const auto check_input = [&](const char* name, size_t i, const Bytes& read) {
    auto next = std::lower_bound(written.begin(), written.end(), read.end,
                                 [](const auto& entry, uintptr_t end) { return entry.first.begin < end; });
    while (next != written.begin() && overlap((--next)->first, read)) {
      STD_TORCH_CHECK(next->second == i, "merge_cast_grouped_: out ", next->second, " overlaps ", name, " ", i,
                      "; pass other memory");
    }
  };
  for (size_t i = 0; i < group.size(); ++i) {
    check_input("base", i, extent(group[i].base, bases[i], group[i].base_dtype));
    check_input("lora_A", i, extent(group[i].lora_A, lora_As[i], group[i].lora_A_dtype));
    check_input("lora_B", i, extent(group[i].lora_B, lora_Bs[i], group[i].lora_B_dtype));
  }
}

// All matrices' rows form one range of blocks, so that threads share many small matrices as well as one large one.
void merge_all(const std::vector<MergeArgs>& group, double* stats) {
  const MergeRows merge_rows = cpu_path().merge_rows;
  std::vector<int64_t> first_block{0};
  int64_t ops = 0;
  for (const MergeArgs& args : group) {
    first_block.push_back(first_block.back() + (args.rows + kBlockRows - 1) / kBlockRows);
    ops += args.rows * args.cols * (args.rank + 1);
  }
  // No rows at all: nothing is merged, but the statistics must be written.
  const int64_t num_blocks = first_block.back();
  const int64_t grain = std::max<int64_t>(1, kGrainOps / std::max<int64_t>(1, ops / std::max<int64_t>(1, num_blocks)));

  std::vector<MergeStats> sums(group.size());
  std::mutex mutex;
  torch::stable::parallel_for(0, num_blocks, grain, [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(first_block.begin(), first_block.end(), begin) - first_block.begin() - 1;
    for (int64_t block = begin; block < end; block = first_block[++i]) {
      const int64_t row_begin = (block - first_block[i]) * kBlockRows;
      const int64_t row_end =
          std::min(group[i].rows, (std::min(end, first_block[i + 1]) - first_block[i]) * kBlockRows);
      if (row_begin >= row_end) continue;
      MergeStats own;
      merge_rows(group[i], row_begin, row_end, stats != nullptr ? &own : nullptr);
      if (stats != nullptr) {
        const std::lock_guard<std::mutex> lock(mutex);
        sums[i].add(own);
      }
    }
  });
  if (stats == nullptr) return;
  for (const MergeStats& sum : sums) {
    *stats++ = static_cast<double>(sum.changed);
    *stats++ = static_cast<double>(sum.unmoved);
    *stats++ = sum.kept_sq;
    *stats++ = sum.delta_sq;
    *stats++ = sum.projected;
    *stats++ = static_cast<double>(sum.checksum);
  }
}

// places: key, row and column of each matrix, see dither.h; none: rounding to nearest.
std::vector<MergeArgs> checked_group(const std::vector<Tensor>& bases, const std::vector<Tensor>& lora_As,
                                     const std::vector<Tensor>& lora_Bs, const std::vector<double>& scalings,
                                     const std::vector<Tensor>& outs, const std::vector<int64_t>& places) {
  const size_t num = bases.size();
  STD_TORCH_CHECK(lora_As.size() == num && lora_Bs.size() == num && scalings.size() == num && outs.size() == num,
                  "merge_cast_grouped_: the lists must have one length, got ", num, " bases, ", lora_As.size(),
                  " lora_As, ", lora_Bs.size(), " lora_Bs, ", scalings.size(), " scalings, ", outs.size(), " outs");
  STD_TORCH_CHECK(places.empty() || places.size() == 3 * num,
                  "merge_cast_grouped_: places must hold key, row and column of each of the ", num,
                  " matrices, or nothing, got ", places.size(), " numbers");
  std::vector<MergeArgs> group;
  group.reserve(num);
  for (size_t i = 0; i < num; ++i) {
    MergeArgs args = checked_args(bases[i], lora_As[i], lora_Bs[i], scalings[i], outs[i]);
    if (!places.empty()) {
      args.rounding = Rounding::kDither;
      args.place = {static_cast<uint64_t>(places[3 * i]), places[3 * i + 1], places[3 * i + 2]};
    }
    group.push_back(args);
  }
  check_disjoint(group, bases, lora_As, lora_Bs, outs);
  return group;
}

double* checked_stats(const std::optional<Tensor>& stats, size_t num) {
  if (!stats.has_value()) return nullptr;
  STD_TORCH_CHECK(stats->scalar_type() == torch::headeronly::ScalarType::Double && stats->dim() == 2 &&
                      stats->size(0) == static_cast<int64_t>(num) && stats->size(1) == kNumStats &&
                      stats->is_contiguous(),
                  "merge_cast_grouped_: stats must be a contiguous float64 tensor [", num, ", ", kNumStats, "], got ",
                  shape_text(*stats));
  return static_cast<double*>(stats->mutable_data_ptr());
}

// `fidelity` and `fast` are for devices that can leave something out for speed: here there is one arithmetic, and all
// of the statistics.
void merge_cast_grouped_(const std::vector<Tensor>& bases, const std::vector<Tensor>& lora_As,
                         const std::vector<Tensor>& lora_Bs, const std::vector<double>& scalings,
                         const std::vector<Tensor>& outs, const std::optional<Tensor>& stats,
                         const std::vector<int64_t>& places, bool /*fidelity*/, bool /*fast*/) {
  const auto check = [](const char* name, const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) check_on_cpu(name, tensor);
  };
  check("a lora_A", lora_As);
  check("a lora_B", lora_Bs);
  check("an out", outs);
  if (stats.has_value()) check_on_cpu("stats", *stats);
  const std::vector<MergeArgs> group = checked_group(bases, lora_As, lora_Bs, scalings, outs, places);
  merge_all(group, checked_stats(stats, group.size()));
}

void merge_cast_(const Tensor& base, const Tensor& lora_A, const Tensor& lora_B, double scaling, const Tensor& out,
                 const std::vector<int64_t>& place, bool fast) {
  merge_cast_grouped_({base}, {lora_A}, {lora_B}, {scaling}, {out}, std::nullopt, place, false, fast);
}

#if defined(LORA_STREAM_CUDA)

// What merge_kernel.h asks for; lora_stream/ops.py makes copies of pairs that lie otherwise.
void check_layout(const MergeArgs& args) {
  if (args.rows == 0 || args.cols == 0 || args.rank == 0) return;  // nothing of them is read
  const auto aligned = [](const void* data, int64_t stride_bytes, int64_t bytes) {
    return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride_bytes)) % bytes == 0;
  };
  const int64_t bytes = element_size(args.lora_A_dtype);
  STD_TORCH_CHECK(args.lora_A_dtype == args.lora_B_dtype && args.rank % 2 == 0 && args.lora_A_strides[1] == 1 &&
                      args.lora_B_strides[1] == 1 && args.lora_A_strides[0] >= (args.cols + 7) / 8 * 8 &&
                      aligned(args.lora_A, args.lora_A_strides[0] * bytes, 16) &&
                      aligned(args.lora_B, args.rows > 1 ? args.lora_B_strides[0] * bytes : 0, 2 * bytes),
                  "_merge_cast_cuda_: lora_A and lora_B must lie as csrc/cuda/merge_kernel.h says; call merge_cast_");
}

// Enqueues on `stream`, a cudaStream_t; stats are added to, their checksums without the modulo.
void merge_cast_cuda_(const std::vector<Tensor>& bases, const std::vector<Tensor>& lora_As,
                      const std::vector<Tensor>& lora_Bs, const std::vector<double>& scalings,
                      const std::vector<Tensor>& outs, const std::optional<Tensor>& stats,
                      const std::vector<int64_t>& places, int64_t stream, bool fidelity, bool fast) {
  const std::vector<MergeArgs> group = checked_group(bases, lora_As, lora_Bs, scalings, outs, places);
  if (group.empty()) return;
  const int device = bases[0].get_device();
  const auto check_device = [&](const char* name, const Tensor& tensor) {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device() == device,
                    "merge_cast_: all tensors must be on one device, ", "but the first base is on cuda:", device,
                    " and ", name, " is on ", tensor.is_cpu() ? "the CPU" : "another device");
  };
  for (size_t i = 0; i < group.size(); ++i) {
    check_device("a base", bases[i]);
    check_device("a lora_A", lora_As[i]);
    check_device("a lora_B", lora_Bs[i]);
    check_layout(group[i]);
    if (!outs[i].is_cpu()) {
      check_device("an out", outs[i]);
      continue;
    }
    const Bytes written = extent(group[i].out, outs[i], group[i].out_dtype);
    STD_TORCH_CHECK(written.begin == written.end || cuda::is_pinned(reinterpret_cast<const void*>(written.begin),
                                                                    reinterpret_cast<const void*>(written.end)),
                    "merge_cast_: out ", i, " is in host memory that cuda:", device,
                    " cannot write to; pass memory on the device or pinned memory (tensor.pin_memory())");
  }
  if (stats.has_value()) check_device("stats", *stats);
  const std::string error =
      cuda::merge(group, checked_stats(stats, group.size()), fidelity, fast, device, reinterpret_cast<void*>(stream));
  STD_TORCH_CHECK(error.empty(), "merge_cast_ on cuda:", device, ": ", error);
}

#endif

}  // namespace
}  // namespace lora_stream

STABLE_TORCH_LIBRARY(lora_stream, m) {
  m.def(
      "merge_cast_(Tensor base, Tensor lora_A, Tensor lora_B, float scaling, Tensor(a!) out, *, int[] place=[], "
      "bool fast=False) -> ()");
  m.def(
      "merge_cast_grouped_(Tensor[] bases, Tensor[] lora_As, Tensor[] lora_Bs, float[] scalings, Tensor(a!)[] outs, "
      "Tensor(b!)? stats=None, *, int[] places=[], bool fidelity=True, bool fast=False) -> ()");
#if defined(LORA_STREAM_CUDA)
  m.def(
      "_merge_cast_cuda_(Tensor[] bases, Tensor[] lora_As, Tensor[] lora_Bs, float[] scalings, Tensor(a!)[] outs, "
      "Tensor(b!)? stats, int[] places, int stream, bool fidelity, bool fast) -> ()");
#endif
}

STABLE_TORCH_LIBRARY_IMPL(lora_stream, CPU, m) {
  m.impl("merge_cast_", TORCH_BOX(&lora_stream::merge_cast_));
  m.impl("merge_cast_grouped_", TORCH_BOX(&lora_stream::merge_cast_grouped_));
}

#if defined(LORA_STREAM_CUDA)
STABLE_TORCH_LIBRARY_IMPL(lora_stream, CUDA, m) {
  m.impl("_merge_cast_cuda_", TORCH_BOX(&lora_stream::merge_cast_cuda_));
}
#endif
