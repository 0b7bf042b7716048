// The merge on a GPU: one persistent launch over a table of matrices.
//
//   out = round(fp32(base) + scaling * (fp32(lora_B) @ fp32(lora_A)))        as in ../merge_cast.h
//
// An *item* is a strip of kStripCols columns by table.item_rows rows of one matrix. A block takes item after item:
//
//   lora_A's strip ──► shared memory, once per item, by all eight warps; then every warp goes its own way:
//     base tile ──► a ring in shared memory, copied asynchronously some steps ahead
//     lora_B's rows ──► registers, one step ahead
//     sum += lora_B @ lora_A on the tensor cores, 16 ranks at a time
//     out = round(fma(scaling, sum, base)), by way of the same shared memory into whole 128-byte lines
//
// Each element of base is read once and each element of out is written once; no barrier but those around lora_A.
//
// Precision. The tensor cores multiply 16-bit numbers exactly and add in float32, but cut the sum instead of rounding
// it. Two bfloat16 or two float16 operands go in as they are. All others are split into bfloat16 planes that add up to
// the number, 3 of them (24 bits, as float32 has) or 2 (precision "fast"), and all products of planes down to the last
// one's size are added, small ones first. Each 16 ranks start from zero and are added to the sum in float32, rounded:
// so cutting never meets the whole sum, and the order of addition is the CPU's.
//
// What planes cannot hold (infinities, NaNs, what rounds to infinity in bfloat16, and numbers so small that their last
// plane is none) is noticed while it is split; that tile is summed again in plain float32.
//
// lora_A and lora_B are small, so they come as this kernel likes to read them; who calls it makes copies where needed:
// both of one dtype, rows adjacent in memory, lora_A's rows aligned to 16 bytes and filled up to a multiple of 8
// elements, an even rank and lora_B's rows aligned to two elements. base and out may lie as they like.
#pragma once

#include "../merge_cast.h"
#include "intrinsics.h"

namespace lora_stream::cuda {

// How lora_A and lora_B enter the tensor cores.
enum class Operands { kBFloat16, kFloat16, kTwoPlanes, kThreePlanes };

__host__ __device__ constexpr int num_planes(Operands operands) {
  return operands == Operands::kThreePlanes ? 3 : operands == Operands::kTwoPlanes ? 2 : 1;
}

// What is added up beside the merge. kFidelity is all of ../merge_cast.h's MergeStats, kRounding leaves `projected`
// out, as NaN.
enum class Statistics { kNone, kRounding, kFidelity };

constexpr int kThreads = 256;
constexpr int kStripCols = 128;  // of a block; two warps side by side
constexpr int kStepRows = 64;    // of a block; four warps one below the other
constexpr int kTileCols = 64;    // of a warp
constexpr int kTileRows = 16;
constexpr int kStepRank = 16;                 // of one multiplication
constexpr int kStripStride = kStripCols + 8;  // eight more, so that eight rows lie in different banks
constexpr int kNumSums = kTileCols / 8;       // 16 x 8 results of a warp
constexpr int kNumStats = 6;                  // as in ops.py
constexpr int kStatsWords = 7;                // of a thread: an odd number, so that 32 threads meet no bank twice
__host__ __device__ constexpr int num_stages(int base_bytes) { return base_bytes == 4 ? 2 : 3; }

__host__ __device__ constexpr int64_t strip_bytes(Operands operands, int64_t ranks) {
  return ranks * kStripStride * 2 * num_planes(operands);
}
__host__ __device__ constexpr int64_t ring_bytes(int base_bytes) {
  return static_cast<int64_t>(num_stages(base_bytes)) * kStepRows * kStripCols * base_bytes;
}
// Shared memory of a block: statistics, the ring, lora_A's strip.
constexpr int64_t kStatsBytes = kThreads * kStatsWords * 4;
__host__ __device__ constexpr int64_t shared_bytes(Operands operands, int base_bytes, int64_t strip_ranks) {
  return kStatsBytes + ring_bytes(base_bytes) + strip_bytes(operands, strip_ranks);
}

struct Entry {
  MergeArgs args;
  double* stats;  // [kNumStats], added to; null where nobody asks
  int32_t first_item;
};

// A kernel's parameters may have 32764 bytes: so a table is never uploaded.
constexpr int kMaxEntries = 194;

struct Table {
  int32_t num_items;
  int32_t item_rows;    // a multiple of kStepRows
  int32_t strip_ranks;  // how much of lora_A is in shared memory at once; a multiple of kStepRank
  int32_t num_entries;
  Entry entries[kMaxEntries];
};
static_assert(sizeof(Table) <= 32764);

// Where a thread stands. A result of the tensor cores gives a lane two elements each of rows `row` and `row + 8`;
// lora_A's columns are permuted so that those of four results are eight neighbours, at column 32 * c + 8 * quad.
struct Lane {
  int thread, lane, warp, row, quad, tile_row, tile_col;

  __device__ __forceinline__ explicit Lane(int thread)
      : thread(thread),
        lane(thread & 31),
        warp(thread >> 5),
        row(lane >> 2),
        quad(lane & 3),
        tile_row((warp & 3) * kTileRows),
        tile_col((warp >> 2) * kTileCols) {}

  // The same, computed anew.
  __device__ __forceinline__ Lane again() const { return Lane(opaque(thread)); }
};

__device__ __forceinline__ bool is_aligned(const void* data, int64_t stride_bytes, int bytes) {
  return ((reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride_bytes)) & (bytes - 1)) == 0;
}

__device__ __forceinline__ uint32_t pack(DType dtype, float low, float high) {
  return dtype == DType::kBFloat16 ? pack_bfloat16(low, high) : pack_float16(low, high);
}

__device__ __forceinline__ void unpack(DType dtype, uint32_t word, float& low, float& high) {
  if (dtype == DType::kBFloat16) {
    low = bits_float(word << 16);
    high = bits_float(word & 0xffff0000u);
  } else {
    low = float16_float(word & 0xffffu);
    high = float16_float(word >> 16);
  }
}

// Two neighbours as they lie in memory: 32-bit words.
__host__ __device__ constexpr int num_words(Operands operands) { return num_planes(operands) > 1 ? 2 : 1; }

// Two neighbours as 16-bit operands: one word per plane; the planes add up to the number. Returns whether one of the
// two is beyond what planes hold.
template <Operands kOperands>
__device__ __forceinline__ bool split(const uint32_t* words, uint32_t (&planes)[num_planes(kOperands)]) {
  constexpr int kPlanes = num_planes(kOperands);
  if constexpr (kPlanes == 1) {
    planes[0] = words[0];
    return false;
  } else {
    float low = bits_float(words[0]), high = bits_float(words[1]);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      planes[p] = pack_bfloat16(low, high);
      low -= bits_float(planes[p] << 16);  // exact
      high -= bits_float(planes[p] & 0xffff0000u);
    }
    // Three planes leave nothing of an ordinary number. What is left is a NaN where the first plane was infinite.
    if constexpr (kPlanes == 3) return low != 0.0f || high != 0.0f;
    constexpr float kLeft = 1.0f / 32768;
    return !(absolute(low) <= kLeft * absolute(bits_float(words[0]))) ||
           !(absolute(high) <= kLeft * absolute(bits_float(words[1])));
  }
}

template <Operands kOperands>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0,
                                             uint32_t right1) {
  if constexpr (kOperands == Operands::kFloat16) {
    multiply_add_float16(sum, left, right0, right1);
  } else {
    multiply_add_bfloat16(sum, left, right0, right1);
  }
}

// -- lora_A ---------------------------------------------------------------------------------------------------------

// Columns [col, col + kStripCols) of up to max_ranks ranks from rank_begin on into shared memory, plane after plane,
// zero past the matrix. Returns whether this thread met something beyond what planes hold.
template <Operands kOperands>
__device__ __forceinline__ bool stage_lora_A(const MergeArgs& args, int col, int rank_begin, int max_ranks,
                                             uint16_t* strip) {
  constexpr int kGroups = kStripCols / 8, kWords = num_words(kOperands), kLoads = kWords;
  const int ranks_left = static_cast<int>(args.rank) - rank_begin;
  const int filled_ranks = (ranks_left + kStepRank - 1) / kStepRank * kStepRank;
  const int ranks = filled_ranks < max_ranks ? filled_ranks : max_ranks;
  bool beyond = false;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < ranks * kGroups; i += kThreads) {
    const int rank = i / kGroups, group = i % kGroups;
    uint32_t words[8 * kLoads / 2] = {};  // eight neighbours
    if (rank < ranks_left && col + group * 8 < static_cast<int>(args.cols)) {
      const auto* row = static_cast<const char*>(args.lora_A) +
                        ((rank_begin + rank) * args.lora_A_strides[0] + col + group * 8) * (2 * kWords);
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        const uint4 x = load_cached(reinterpret_cast<const uint4*>(row) + load);
        words[4 * load] = x.x, words[4 * load + 1] = x.y, words[4 * load + 2] = x.z, words[4 * load + 3] = x.w;
      }
    }
    // Column 32 c + 8 quad + 2 j + e goes to 32 c + 8 j + 2 quad + e: see Lane.
    uint16_t* slot = strip + rank * kStripStride + group / 4 * 32 + group % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t planes[num_planes(kOperands)];
      beyond |= split<kOperands>(words + j * kWords, planes);
#pragma unroll
      for (int p = 0; p < num_planes(kOperands); ++p) {
        *reinterpret_cast<uint32_t*>(slot + p * max_ranks * kStripStride + 8 * j) = planes[p];
      }
    }
  }
  return beyond;
}

// -- lora_B ---------------------------------------------------------------------------------------------------------

// A lane's share of 16 rows by 16 ranks: pairs of ranks of rows `row` and `row + 8`, in the order of the left operand.
template <Operands kOperands>
struct Pairs {
  uint32_t words[4][num_words(kOperands)];
};

// rows: of the warp's tile, from `row` on, that are there.
template <Operands kOperands>
__device__ __forceinline__ Pairs<kOperands> load_lora_B(const MergeArgs& args, int row, int rows, int rank,
                                                        const Lane& lane) {
  constexpr int kWords = num_words(kOperands);
  const auto* corner = static_cast<const char*>(args.lora_B) +
                       ((row + lane.row) * args.lora_B_strides[0] + rank + lane.quad * 2) * (2 * kWords);
  const int ranks_left = static_cast<int>(args.rank) - rank - lane.quad * 2;
  Pairs<kOperands> pairs = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (lane.row + (i & 1) * 8 >= rows || (i >> 1) * 8 >= ranks_left) continue;
    const char* pair = corner + ((i & 1) * 8 * args.lora_B_strides[0] + (i >> 1) * 8) * (2 * kWords);
    if constexpr (kWords == 2) {
      const uint2 x = load_cached(reinterpret_cast<const uint2*>(pair));
      pairs.words[i][0] = x.x, pairs.words[i][1] = x.y;
    } else {
      pairs.words[i][0] = load_cached(reinterpret_cast<const uint32_t*>(pair));
    }
  }
  return pairs;
}

// -- the tile of base and out ---------------------------------------------------------------------------------------

// A tile lies in shared memory row by row, in chunks of 16 bytes. The chunks of odd rows change places, so that the
// eight lanes that the memory serves at a time, four in each of two rows, find them in different banks.
template <int kBaseBytes>
struct Tile {
  static constexpr int kChunks = kTileCols * kBaseBytes / 16;  // of a row
  static constexpr int kRows = 32 / kChunks;                   // that a warp reads or writes at a time, whole lines
  static constexpr int kBytes = kTileRows * kTileCols * kBaseBytes;

  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int odd = row & 1;
    return (row * kChunks + (kBaseBytes == 4 ? chunk ^ odd : chunk ^ (odd << 2))) * 16;
  }
};

// Copies up to 16 bytes, element by element, where not all of them are there or they are not aligned.
template <int kBytes>
__device__ __forceinline__ void copy_elements(void* target, const void* source, int count) {
#pragma unroll 1
  for (int e = 0; e < count; ++e) {
    if constexpr (kBytes == 4) {
      static_cast<uint32_t*>(target)[e] = static_cast<const uint32_t*>(source)[e];
    } else {
      static_cast<uint16_t*>(target)[e] = static_cast<const uint16_t*>(source)[e];
    }
  }
}

// Sends for `rows` by `cols` elements of base, from (row, col) on, that are there of a tile. Closes a group of copies
// also where there are none.
template <int kBaseBytes>
__device__ __forceinline__ void fetch_base(const MergeArgs& args, int row, int rows, int col, int cols,
                                           unsigned char* tile, const Lane& lane) {
  using T = Tile<kBaseBytes>;
  constexpr int kWidth = 16 / kBaseBytes;
  const int first_row = lane.lane / T::kChunks, chunk = lane.lane % T::kChunks, width = cols - chunk * kWidth;
  const int64_t stride_bytes = args.base_stride * kBaseBytes;
  const char* source =
      static_cast<const char*>(args.base) + (row + first_row) * stride_bytes + (col + chunk * kWidth) * kBaseBytes;
  unsigned char* target = tile + T::offset(first_row, chunk);
  const bool vectors = is_aligned(args.base, stride_bytes, 16) && width >= kWidth;
#pragma unroll
  for (int r = 0; r < kTileRows; r += T::kRows) {
    if (r + first_row < rows && width > 0) {
      if (vectors) {
        copy_async(target, source);
      } else {
        copy_elements<kBaseBytes>(target, source, width < kWidth ? width : kWidth);
      }
    }
    source += T::kRows * stride_bytes;
    target += T::kRows * T::kChunks * 16;
  }
  copy_async_commit();
}

// Eight neighbours of base, from shared memory.
template <int kBaseBytes>
__device__ __forceinline__ void read_base(const unsigned char* tile, int row, int c, DType dtype, const Lane& lane,
                                          float (&base)[8]) {
  using T = Tile<kBaseBytes>;
  if constexpr (kBaseBytes == 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 x = *reinterpret_cast<const float4*>(tile + T::offset(row, c * 8 + lane.quad * 2 + half));
      base[4 * half] = x.x, base[4 * half + 1] = x.y, base[4 * half + 2] = x.z, base[4 * half + 3] = x.w;
    }
  } else {
    const uint4 x = *reinterpret_cast<const uint4*>(tile + T::offset(row, c * 4 + lane.quad));
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) unpack(dtype, words[j], base[2 * j], base[2 * j + 1]);
  }
}

// Where a lane leaves eight 16-bit results: over the first of the chunks that it alone has read.
template <int kBaseBytes>
__device__ __forceinline__ int result_offset(int row, int eighth) {
  return Tile<kBaseBytes>::offset(row, kBaseBytes == 4 ? eighth * 2 : eighth);
}

// The tile's 16-bit results from shared memory to out, in whole lines.
template <int kBaseBytes>
__device__ __forceinline__ void store_results(const MergeArgs& args, int row, int rows, int col, int cols,
                                              const unsigned char* tile, const Lane& lane) {
  constexpr int kRows = 4;
  const int first_row = lane.lane / 8, eighth = lane.lane % 8, width = cols - eighth * 8;
  uint16_t* target = static_cast<uint16_t*>(args.out) + (row + first_row) * args.out_stride + col + eighth * 8;
  const unsigned char* source = tile + result_offset<kBaseBytes>(first_row, eighth);
  const bool vectors = is_aligned(args.out, args.out_stride * 2, 16) && width >= 8;
#pragma unroll
  for (int r = 0; r < kTileRows; r += kRows) {
    if (r + first_row < rows && width > 0) {
      if (vectors) {
        store_streaming(target, *reinterpret_cast<const uint4*>(source));
      } else {
        copy_elements<2>(target, source, width < 8 ? width : 8);
      }
    }
    target += kRows * args.out_stride;
    source += kRows * Tile<kBaseBytes>::kChunks * 16;
  }
}

// Eight neighbours of a float32 out, `width` of which are there: a whole sector.
__device__ __forceinline__ void store_float32(float* target, bool vectors, int width, const float (&merged)[8]) {
  if (vectors && width >= 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_streaming(target + 4 * half, uint4{float_bits(merged[4 * half]), float_bits(merged[4 * half + 1]),
                                               float_bits(merged[4 * half + 2]), float_bits(merged[4 * half + 3])});
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < width) target[j] = merged[j];
    }
  }
}

// -- statistics -----------------------------------------------------------------------------------------------------

// One thread's share of MergeStats, over one item. It waits in shared memory while the multiplications need all
// registers.
struct Sums {
  uint32_t changed, unmoved, checksum;
  float kept_sq, delta_sq, projected;
  uint32_t unused[kStatsWords - kNumStats];

  __device__ __forceinline__ void add(float rounded_base, float delta, float rounded) {
    const float kept = rounded - rounded_base;
    kept_sq = fma(kept, kept, fma(rounded, 0.0f, kept_sq));  // infinity times zero is a NaN
    delta_sq = fma(delta, delta, delta_sq);
    changed += delta != 0.0f;
    unmoved += delta != 0.0f && rounded == rounded_base;
    checksum += float_bits(rounded);
  }

  // Adds the warp's sums to the matrix's. The checksum is one modulo 2**32; the caller of the kernel takes the rest.
  template <Statistics kStatistics>
  __device__ __forceinline__ void add_to(double* stats, const Lane& lane) {
    if constexpr (kStatistics != Statistics::kFidelity) projected = bits_float(0x7fc00000u);  // nobody has looked
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      changed += __shfl_xor_sync(~0u, changed, offset);
      unmoved += __shfl_xor_sync(~0u, unmoved, offset);
      checksum += __shfl_xor_sync(~0u, checksum, offset);
      kept_sq += __shfl_xor_sync(~0u, kept_sq, offset);
      delta_sq += __shfl_xor_sync(~0u, delta_sq, offset);
      projected += __shfl_xor_sync(~0u, projected, offset);
    }
    if (lane.lane != 0) return;
    atomicAdd(stats + 0, static_cast<double>(changed));
    atomicAdd(stats + 1, static_cast<double>(unmoved));
    atomicAdd(stats + 2, static_cast<double>(kept_sq));
    atomicAdd(stats + 3, static_cast<double>(delta_sq));
    atomicAdd(stats + 4, static_cast<double>(projected));
    atomicAdd(stats + 5, static_cast<double>(checksum));
  }
};

// -- dithering ------------------------------------------------------------------------------------------------------

// One of the two neighbours of the sum x in out's dtype, as dither_to() of ../dtype.h; a sum that is the base itself
// stays as it is, to be rounded to nearest.
__device__ __forceinline__ float dither(DType dtype, float x, float base, uint32_t random) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  if (dtype == DType::kBFloat16) {
    const uint32_t dithered = (magnitude < 0x7f7f0000u ? bits + random : bits) & 0xffff0000u;
    return x == base || magnitude > 0x7f800000u ? x : bits_float(dithered);
  }
  const uint32_t dithered = (magnitude < 0x477fe000u ? bits + (random >> 3) : bits) & 0xffffe000u;
  if (x == base || magnitude >= 0x47800000u) return x;
  if (magnitude >= 0x38800000u) return bits_float(dithered);
  const float steps = bits_float(magnitude) * 16777216.0f;  // of denormals
  const float whole = static_cast<float>(static_cast<int32_t>(steps));
  const bool up = (static_cast<float>(random) + 0.5f) * (1.0f / 65536) < steps - whole;
  return bits_float(float_bits((up ? whole + 1.0f : whole) * (1.0f / 16777216)) | (bits & 0x80000000u));
}

// -- the kernel -----------------------------------------------------------------------------------------------------

// Adds kStepRank ranks to the warp's sums.
template <Operands kOperands>
__device__ __forceinline__ void multiply_step(const uint16_t* strip, int plane_ranks, int rank,
                                              const uint32_t (&left)[num_planes(kOperands)][4], const Lane& lane,
                                              float (&sums)[kNumSums][4]) {
  constexpr int kPlanes = num_planes(kOperands);
#pragma unroll
  for (int n = 0; n < kNumSums; n += 2) {  // 16 columns
    // Keeps ptxas from fetching the operands of later columns so early that registers run out.
    if (kPlanes == 3 && n % 4 == 0) __syncwarp();
    float chunk[2][4] = {};
#pragma unroll
    for (int q = kPlanes - 1; q >= 0; --q) {  // the largest product last
      uint32_t right[4];
      load_matrices_transposed(right, strip + (q * plane_ranks + rank + (lane.lane & 15)) * kStripStride +
                                          lane.tile_col + n * 8 + (lane.lane >> 4) * 8);
#pragma unroll
      for (int p = kPlanes - 1 - q; p >= 0; --p) {
        multiply_add<kOperands>(chunk[0], left[p], right[0], right[1]);
        multiply_add<kOperands>(chunk[1], left[p], right[2], right[3]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sums[n][e] += chunk[0][e];
      sums[n + 1][e] += chunk[1][e];
    }
  }
}

// The warp's sums in plain float32, for values that no planes hold. Slow; one rank after the other.
__device__ __forceinline__ void sum_again(const MergeArgs& args, int row, int rows, int col, int cols, const Lane& lane,
                                          float (&sums)[kNumSums][4]) {
#pragma unroll
  for (int n = 0; n < kNumSums; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
  }
  const float* A = static_cast<const float*>(args.lora_A) + col + lane.quad * 8;
  const float* B = static_cast<const float*>(args.lora_B) + (row + lane.row) * args.lora_B_strides[0];
#pragma unroll 1
  for (int64_t k = 0; k < args.rank; ++k, ++B, A += args.lora_A_strides[0]) {
    const float b0 = lane.row < rows ? load_cached(B) : 0.0f;
    const float b1 = lane.row + 8 < rows ? load_cached(B + 8 * args.lora_B_strides[0]) : 0.0f;
#pragma unroll
    for (int c = 0; c < kTileCols / 32; ++c) {
      if (c * 32 + lane.quad * 8 >= cols) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = load_cached(reinterpret_cast<const float4*>(A + c * 32) + half);
        const float a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float (&sum)[4] = sums[c * 4 + half * 2 + j / 2];
          sum[j % 2] = fma(b0, a[j], sum[j % 2]);
          sum[2 + j % 2] = fma(b1, a[j], sum[2 + j % 2]);
        }
      }
    }
  }
}

// Sums and base to results: into the tile where they have 16 bits, else to out.
template <int kBaseBytes, Statistics kStatistics>
__device__ __forceinline__ void finish_tile(const MergeArgs& args, int row, int rows, int col, int cols,
                                            unsigned char* tile, const Lane& lane, const float (&sums)[kNumSums][4],
                                            Sums* shared_stats) {
  constexpr bool kStats = kStatistics != Statistics::kNone;
  const bool dithers = args.rounding == Rounding::kDither && args.out_dtype != DType::kFloat32;
  Sums stats = {};
  if constexpr (kStats) stats = *shared_stats;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint64_t key = dithers ? row_key(args.place.key, args.place.row + row + lane.row + h * 8) : 0;
#pragma unroll
    for (int c = 0; c < kTileCols / 32; ++c) {
      const int r = lane.row + h * 8, width = r < rows ? cols - c * 32 - lane.quad * 8 : 0;
      float base[8], merged[8];
      read_base<kBaseBytes>(tile, r, c, args.base_dtype, lane, base);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        merged[j] = fma(args.scaling, sums[c * 4 + j / 2][h * 2 + j % 2], base[j]);
      }
      if (dithers) {
        const int64_t first_col = args.place.col + col + c * 32 + lane.quad * 8;
        if (first_col % 2 == 0) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint32_t pair = random_pair(key, pair_key(first_col / 2 + j));
            merged[2 * j] = dither(args.out_dtype, merged[2 * j], base[2 * j], pair & 0xffffu);
            merged[2 * j + 1] = dither(args.out_dtype, merged[2 * j + 1], base[2 * j + 1], pair >> 16);
          }
        } else {  // cut within a pair
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            merged[j] = dither(args.out_dtype, merged[j], base[j], random_bits(key, first_col + j));
          }
        }
      }
      const auto delta = [&](int j) { return args.scaling * sums[c * 4 + j / 2][h * 2 + j % 2]; };
      const auto project = [&](int j) {
        if (j < width) stats.projected = fma(merged[j] - base[j], delta(j), stats.projected);
      };
      if (args.out_dtype == DType::kFloat32) {
        if constexpr (kStatistics == Statistics::kFidelity) {
#pragma unroll
          for (int j = 0; j < 8; ++j) project(j);
        }
        float* target = static_cast<float*>(args.out) + (row + r) * args.out_stride + col + c * 32 + lane.quad * 8;
        store_float32(target, is_aligned(args.out, args.out_stride * 4, 16), width, merged);
      } else {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = pack(args.out_dtype, merged[2 * j], merged[2 * j + 1]);
          if constexpr (kStats) {
            unpack(args.out_dtype, words[j], merged[2 * j], merged[2 * j + 1]);
            if constexpr (kStatistics == Statistics::kFidelity) {
              project(2 * j);
              project(2 * j + 1);
            }
            unpack(args.out_dtype, pack(args.out_dtype, base[2 * j], base[2 * j + 1]), base[2 * j], base[2 * j + 1]);
          }
        }
        *reinterpret_cast<uint4*>(tile + result_offset<kBaseBytes>(r, c * 4 + lane.quad)) =
            uint4{words[0], words[1], words[2], words[3]};
      }
      if constexpr (kStats) {  // base and merged are rounded now
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (j < width) stats.add(base[j], delta(j), merged[j]);
        }
      }
    }
  }
  if constexpr (kStats) *shared_stats = stats;
}

__device__ __forceinline__ int find_entry(const Table& table, int item) {
  int low = 0, high = table.num_entries - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.entries[middle].first_item <= item) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// How much of `size` from `begin` to `end` there is.
__device__ __forceinline__ int part(int begin, int end, int size) {
  return end - begin < size ? (end > begin ? end - begin : 0) : size;
}

template <Operands kOperands, int kBaseBytes, Statistics kStatistics>
__device__ __forceinline__ void merge(const Table& table) {
  using T = Tile<kBaseBytes>;
  constexpr int kPlanes = num_planes(kOperands), kStages = num_stages(kBaseBytes);
  LORA_STREAM_SHARED_MEMORY(shared);
  const Lane lane(static_cast<int>(threadIdx.x));
  const auto stats = [&] { return reinterpret_cast<Sums*>(shared) + opaque(lane.thread); };
  unsigned char* const ring = shared + kStatsBytes + lane.warp * kStages * T::kBytes;  // this warp's
  auto* const strip = reinterpret_cast<uint16_t*>(shared + kStatsBytes + ring_bytes(kBaseBytes));

#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < table.num_items;) {
    const Entry& entry = table.entries[find_entry(table, item)];
    const MergeArgs& args = entry.args;
    const auto num_strips = [&] { return (opaque(static_cast<int>(args.cols)) + kStripCols - 1) / kStripCols; };
    const int local = item - entry.first_item;
    const int col = local % num_strips() * kStripCols + lane.tile_col;
    const auto cols = [&] { return part(opaque(col), static_cast<int>(args.cols), kTileCols); };
    const int first_row = local / num_strips() * table.item_rows;
    const int row_end = first_row + part(first_row, static_cast<int>(args.rows), table.item_rows);
    const auto rows = [&](int row) { return part(row, opaque(row_end), kTileRows); };
    const auto tile_at = [&](int row) { return ring + row / kStepRows % kStages * T::kBytes; };
    const int rank = static_cast<int>(args.rank);
    bool staged = false, beyond_A = false;
    if constexpr (kStatistics != Statistics::kNone) *stats() = {};

    __syncwarp();  // the last item's tiles have been stored
#pragma unroll 1
    for (int row = first_row + lane.tile_row; row < first_row + (kStages - 1) * kStepRows; row += kStepRows) {
      fetch_base<kBaseBytes>(args, row, rows(row), col, cols(), tile_at(row), lane);
    }
    Pairs<kOperands> next =
        load_lora_B<kOperands>(args, first_row + lane.tile_row, rows(first_row + lane.tile_row), 0, lane);
#pragma unroll 1
    for (int row = first_row + lane.tile_row; row < row_end + lane.tile_row; row += kStepRows) {
      __syncwarp();  // the tile that is overwritten now has been stored
      const int ahead = row + (kStages - 1) * kStepRows;
      fetch_base<kBaseBytes>(args, ahead, rows(ahead), col, cols(), tile_at(ahead), lane.again());

      float sums[kNumSums][4];
#pragma unroll
      for (int n = 0; n < kNumSums; ++n) {
        // Without an adapter -0.0, scaled by 1, is added: base keeps its bits, also where it is -0.0.
        sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = rank > 0 ? 0.0f : -0.0f;
      }
      bool beyond_B = false;
#pragma unroll 1
      for (int k = 0, slot = 0; k < rank; k += kStepRank, slot += kStepRank) {
        if (slot == table.strip_ranks) slot = 0;
        if (slot == 0 && !staged) {
          __syncthreads();  // all warps are done with what is there
          const bool beyond = stage_lora_A<kOperands>(args, col - lane.tile_col, k, table.strip_ranks, strip);
          beyond_A = (__syncthreads_or(beyond) != 0) || (k > 0 && beyond_A);
          staged = rank <= table.strip_ranks;  // else it comes in pieces, for every step anew
        }
        uint32_t left[kPlanes][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t planes[kPlanes];
          beyond_B |= split<kOperands>(next.words[i], planes);
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) left[p][i] = planes[p];
        }
        const bool is_last = k + kStepRank >= rank;
        const int next_row = is_last ? row + kStepRows : row;
        next = load_lora_B<kOperands>(args, next_row, rows(next_row), is_last ? 0 : k + kStepRank, lane.again());
        multiply_step<kOperands>(strip, table.strip_ranks, slot, left, lane.again(), sums);
      }
      if constexpr (kPlanes > 1) {
        if (__any_sync(~0u, beyond_B) || beyond_A) sum_again(args, row, rows(row), col, cols(), lane.again(), sums);
      }

      copy_async_wait<kStages - 1>();
      __syncwarp();  // every lane's copies have arrived
      finish_tile<kBaseBytes, kStatistics>(args, row, rows(row), col, cols(), tile_at(row), lane.again(), sums,
                                           stats());
      if (args.out_dtype != DType::kFloat32) {
        __syncwarp();  // every lane's results are in the tile
        store_results<kBaseBytes>(args, row, rows(row), col, cols(), tile_at(row), lane.again());
      }
    }
    if constexpr (kStatistics != Statistics::kNone) stats()->template add_to<kStatistics>(entry.stats, lane);
    // The number of this item from where it lies: carried through the loops it would cost a register that they need.
    item = entry.first_item + (row_end - 1) / table.item_rows * num_strips() + col / kStripCols;
    item += static_cast<int>(gridDim.x);
  }
}

}  // namespace lora_stream::cuda
