// Which launches merge a group of matrices: tables of work for merge_kernel.h. Plain C++, no device is asked.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "merge_kernel.h"

namespace lora_stream::cuda {

// Rows of an item. More share one copy of lora_A's strip, fewer share the work better among the blocks.
constexpr int64_t kMaxItemRows = 512;
// Items that each block gets at least, where there is enough to do: the last round then costs an eighth at most.
constexpr int64_t kItemsPerBlock = 8;
// Of a launch; the blocks count on past it.
constexpr int64_t kMaxItems = int64_t{1} << 30;
// The kernel counts a matrix's rows and columns in 32 bits, so larger ones are cut. A multiple of kMaxItemRows.
constexpr int64_t kMaxSide = int64_t{1} << 28;

struct Launch {
  Operands operands;
  int base_bytes;
  int64_t shared_bytes;
  std::unique_ptr<Table> table;
};

inline Operands operands_of(const MergeArgs& args, bool fast) {
  if (args.lora_A_dtype == args.lora_B_dtype && args.lora_A_dtype == DType::kBFloat16) return Operands::kBFloat16;
  if (args.lora_A_dtype == args.lora_B_dtype && args.lora_A_dtype == DType::kFloat16) return Operands::kFloat16;
  return fast ? Operands::kTwoPlanes : Operands::kThreePlanes;
}

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

inline int64_t num_items(const MergeArgs& args, int64_t item_rows) {
  return round_up(args.rows, item_rows) / item_rows * (round_up(args.cols, kStripCols) / kStripCols);
}

inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Rows from `row` and columns from `col` on, kMaxSide of them at most.
inline MergeArgs block_of(MergeArgs args, int64_t row, int64_t col) {
  const auto at = [](auto* data, int64_t element, DType dtype) {
    return static_cast<const char*>(data) + element * bytes_of(dtype);
  };
  args.base = at(args.base, row * args.base_stride + col, args.base_dtype);
  args.out = const_cast<char*>(at(args.out, row * args.out_stride + col, args.out_dtype));
  args.lora_A = at(args.lora_A, col, args.lora_A_dtype);
  args.lora_B = at(args.lora_B, row * args.lora_B_strides[0], args.lora_B_dtype);
  args.place.row += row;
  args.place.col += col;
  args.rows = std::min(args.rows - row, kMaxSide);
  args.cols = std::min(args.cols - col, kMaxSide);
  return args;
}

// stats: [group.size(), kNumStats] or null. max_shared_bytes: of a block. min_items: how many there should be at least,
// by cutting into fewer rows each.
inline std::vector<Launch> schedule(const std::vector<MergeArgs>& group, double* stats, bool fast,
                                    int64_t max_shared_bytes, int64_t min_items) {
  std::vector<Launch> launches;
  int64_t elements = 0;
  for (const MergeArgs& args : group) elements += args.rows * args.cols;
  const int64_t fair_rows = elements / (kStripCols * std::max<int64_t>(1, min_items));
  const int64_t item_rows =
      min_items == 0 ? kMaxItemRows : std::clamp(fair_rows / kStepRows * kStepRows, int64_t{kStepRows}, kMaxItemRows);

  const auto add = [&](const MergeArgs& args, double* stats) {
    const Operands operands = operands_of(args, fast);
    const int base_bytes = static_cast<int>(bytes_of(args.base_dtype));
    const int64_t items = num_items(args, item_rows);
    auto launch = std::find_if(launches.begin(), launches.end(), [&](const Launch& launch) {
      return launch.operands == operands && launch.base_bytes == base_bytes &&
             launch.table->num_entries < kMaxEntries && launch.table->num_items + items <= kMaxItems;
    });
    if (launch == launches.end()) {
      launches.push_back({operands, base_bytes, 0, std::make_unique<Table>()});
      launch = launches.end() - 1;
      launch->table->item_rows = static_cast<int32_t>(item_rows);
    }
    Table& table = *launch->table;
    Entry& entry = table.entries[table.num_entries++];
    entry = {args, stats, table.num_items};
    if (args.rank == 0) entry.args.scaling = 1.0f;  // see merge()
    table.num_items += static_cast<int32_t>(items);
    // As much of the rank as fits beside the ring; what is left over comes piece by piece.
    const int64_t rank_bytes = strip_bytes(operands, kStepRank);
    const int64_t fit = (max_shared_bytes - shared_bytes(operands, base_bytes, 0)) / rank_bytes * kStepRank;
    const int64_t ranks = std::clamp(round_up(args.rank, kStepRank), int64_t{kStepRank}, fit);
    table.strip_ranks = static_cast<int32_t>(std::max<int64_t>(table.strip_ranks, ranks));
    launch->shared_bytes = shared_bytes(operands, base_bytes, table.strip_ranks);
  };
  for (size_t i = 0; i < group.size(); ++i) {
    double* const own_stats = stats == nullptr ? nullptr : stats + i * kNumStats;
    for (int64_t row = 0; row < group[i].rows; row += kMaxSide) {
      for (int64_t col = 0; col < group[i].cols; col += kMaxSide) add(block_of(group[i], row, col), own_stats);
    }
  }
  return launches;
}

}  // namespace lora_stream::cuda
