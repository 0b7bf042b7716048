// The ops of lora_stream/dora.py on the CPU, through torch's stable ABI.
//
//   _add_squares_  what the norms are made of
//   _scale_cast_   scaling and rounding, with statistics
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "cpu/dora.h"
#include "merge_cast.h"

namespace lora_stream {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrain = 32 * 1024;  // elements; a thread is not worth waking for fewer

DType dtype_of(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "_scale_cast_: base and out must be float32, bfloat16 or float16, got ",
                  torch::headeronly::toString(type));
  return type == ScalarType::Float ? DType::kFloat32
                                   : (type == ScalarType::BFloat16 ? DType::kBFloat16 : DType::kFloat16);
}

void check_merged(const Tensor& merged) {
  STD_TORCH_CHECK(
      merged.is_cpu() && merged.dim() == 2 && merged.is_contiguous() && merged.scalar_type() == ScalarType::Float,
      "merged must be a contiguous float32 matrix on the CPU");
}

void add_squares_(const Tensor& merged, int64_t dim, const Tensor& sums) {
  check_merged(merged);
  const int64_t rows = merged.size(0), cols = merged.size(1);
  STD_TORCH_CHECK(dim == 0 || dim == 1, "_add_squares_: dim must be 0 or 1, got ", dim);
  STD_TORCH_CHECK(sums.is_cpu() && sums.dim() == 1 && sums.is_contiguous() &&
                      sums.size(0) == (dim == 1 ? rows : cols) && sums.scalar_type() == ScalarType::Double,
                  "_add_squares_: sums must be float64 [", dim == 1 ? rows : cols, "]");
  const auto* data = static_cast<const float*>(merged.const_data_ptr());
  auto* const out = static_cast<double*>(sums.mutable_data_ptr());
  if (dim == 1) {
    torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols)),
                                [&](int64_t begin, int64_t end) { add_row_squares(data, cols, begin, end, out); });
  } else {
    torch::stable::parallel_for(
        0, cols, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, rows)),
        [&](int64_t begin, int64_t end) { add_column_squares(data, rows, cols, begin, end, out); });
  }
}

// place: key, row and column of merged[0, 0], see dither.h; nothing: rounding to nearest.
void scale_cast_(const Tensor& merged, const Tensor& scale, const Tensor& base, const Tensor& out, const Tensor& stats,
                 const std::vector<int64_t>& place) {
  check_merged(merged);
  ScaleArgs args{};
  args.rows = merged.size(0);
  args.cols = merged.size(1);
  for (const Tensor* each : {&base, &out}) {
    STD_TORCH_CHECK(each->is_cpu() && each->dim() == 2 && each->size(0) == args.rows && each->size(1) == args.cols &&
                        (args.cols <= 1 || each->stride(1) == 1),
                    "_scale_cast_: base and out must be matrices of merged's shape with adjacent elements in a row");
  }
  STD_TORCH_CHECK(
      scale.is_cpu() && scale.dim() == 2 && scale.is_contiguous() && scale.scalar_type() == ScalarType::Float &&
          ((scale.size(0) == args.rows && scale.size(1) == 1) || (scale.size(0) == 1 && scale.size(1) == args.cols)),
      "_scale_cast_: scale must be float32 [", args.rows, ", 1] or [1, ", args.cols, "]");
  STD_TORCH_CHECK(stats.is_cpu() && stats.dim() == 1 && stats.size(0) == 6 && stats.is_contiguous() &&
                      stats.scalar_type() == ScalarType::Double,
                  "_scale_cast_: stats must be float64 [6]");
  args.by_column = !(scale.size(0) == args.rows && scale.size(1) == 1);
  args.merged = static_cast<const float*>(merged.const_data_ptr());
  args.scale = static_cast<const float*>(scale.const_data_ptr());
  args.base = base.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.base_stride = base.stride(0);
  args.out_stride = out.stride(0);
  args.base_dtype = dtype_of(base);
  args.out_dtype = dtype_of(out);
  STD_TORCH_CHECK(place.empty() || place.size() == 3, "_scale_cast_: place must hold key, row and column, or nothing");
  if (!place.empty()) {
    args.rounding = Rounding::kDither;
    args.place = {static_cast<uint64_t>(place[0]), place[1], place[2]};
  }
  MergeStats sum;
  std::mutex mutex;
  torch::stable::parallel_for(0, args.rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, args.cols)),
                              [&](int64_t begin, int64_t end) {
                                MergeStats own;
                                scale_rows(args, begin, end, &own);
                                const std::lock_guard<std::mutex> lock(mutex);
                                sum.add(own);
                              });
  auto* const found = static_cast<double*>(stats.mutable_data_ptr());
  found[0] += static_cast<double>(sum.changed);
  found[1] += static_cast<double>(sum.unmoved);
  found[2] += sum.kept_sq;
  found[3] += sum.delta_sq;
  found[4] += sum.projected;
  found[5] += static_cast<double>(sum.checksum);
}

}  // namespace
}  // namespace lora_stream

STABLE_TORCH_LIBRARY_FRAGMENT(lora_stream, m) {
  m.def("_add_squares_(Tensor merged, int dim, Tensor(a!) sums) -> ()");
  m.def("_scale_cast_(Tensor merged, Tensor scale, Tensor base, Tensor(a!) out, Tensor(b!) stats, int[] place) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lora_stream, CPU, m) {
  m.impl("_add_squares_", TORCH_BOX(&lora_stream::add_squares_));
  m.impl("_scale_cast_", TORCH_BOX(&lora_stream::scale_cast_));
}
