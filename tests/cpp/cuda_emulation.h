// What csrc/cuda/merge_kernel.h needs of CUDA, in plain C++: its text runs on any processor, one fiber per CUDA thread.
//
// Every intrinsic does what the PTX reference says of it, and is as strict as the machine: 16-byte accesses must be
// aligned, asynchronous copies arrive only when they are waited for, shared memory begins as NaNs, threads run in any
// order between barriers. What touches the kernel's memory is in this file, compiled with the test, so that the
// sanitizers see it; the scheduler is in cuda_emulation.cpp, which ThreadSanitizer must not see.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../csrc/dtype.h"

#define __host__
#define __device__
#define __forceinline__ inline
#define LORA_STREAM_SHARED_MEMORY(name) unsigned char* const name = emulation::shared_memory()

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

namespace emulation {

struct Index {
  unsigned x;
};

// Mistakes that a test can order, to see that they are noticed.
enum class Fault {
  kNone,
  kNoBarrierBefore,
  kNoBarrierAfter,
  kNoWarpBarrier,
  kNoWait,
  kShortMemory,
  kMisalignedMemory,
  kMissedBarrier
};
extern Fault fault;
// Whether the tensor cores cut addends below the last bits of the largest, and the sum, as hardware was seen to do.
extern bool cut_sums;

// What the lanes of a warp show each other.
struct Exchange {
  uint32_t words[32][8];
};

unsigned thread();
unsigned block();
unsigned num_blocks();
unsigned char* shared_memory();
Exchange& exchange();
void warp_barrier();
void block_barrier();

// Runs `kernel(context)` in every thread. `seed` shuffles the order in which threads run.
void launch(unsigned blocks, unsigned threads, std::size_t shared_bytes, void (*kernel)(void*), void* context,
            unsigned seed);

template <class Kernel>
void launch(unsigned blocks, unsigned threads, std::size_t shared_bytes, unsigned seed, Kernel kernel) {
  launch(blocks, threads, shared_bytes, [](void* context) { (*static_cast<Kernel*>(context))(); }, &kernel, seed);
}

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda_emulation: %s\n", what);
  std::_Exit(1);
}

inline void check_aligned(const void* address, std::size_t bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) fail(what);
}

// 16 bytes in two words, which sanitizers see each.
inline void copy_16(void* to, const void* from) {
  for (int i = 0; i < 2; ++i) {
    uint64_t word;
    std::memcpy(&word, static_cast<const char*>(from) + 8 * i, 8);
    std::memcpy(static_cast<char*>(to) + 8 * i, &word, 8);
  }
}

struct Copy {
  void* shared;
  const void* global;
};
// Of the running thread: groups of copies that have not arrived, the last one still open.
std::vector<std::vector<Copy>>& copies();

}  // namespace emulation

#define threadIdx (emulation::Index{emulation::thread()})
#define blockIdx (emulation::Index{emulation::block()})
#define gridDim (emulation::Index{emulation::num_blocks()})

inline void __syncthreads() {
  using emulation::Fault;
  if (emulation::fault == Fault::kNoBarrierBefore) return;
  if (emulation::fault == Fault::kMissedBarrier && emulation::thread() == 77) return;
  emulation::block_barrier();
}

inline void __syncwarp() {
  if (emulation::fault != emulation::Fault::kNoWarpBarrier) emulation::warp_barrier();
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  static_assert(sizeof value == 4);
  auto& words = emulation::exchange().words;
  const unsigned lane = emulation::thread() % 32;
  std::memcpy(&words[lane][0], &value, 4);
  emulation::warp_barrier();
  std::memcpy(&value, &words[lane ^ static_cast<unsigned>(mask)][0], 4);
  emulation::warp_barrier();
  return value;
}

inline bool __any_sync(unsigned, bool value) {
  auto& words = emulation::exchange().words;
  words[emulation::thread() % 32][0] = value;
  emulation::warp_barrier();
  bool any = false;
  for (auto& lane : words) any |= lane[0] != 0;
  emulation::warp_barrier();
  return any;
}

inline int __syncthreads_or(int value) {
  static int any[2];  // in turns: a thread may begin the next one while others still read this one
  static unsigned calls[1024];
  int& result = any[calls[emulation::thread()]++ & 1];
  if (value) __atomic_store_n(&result, 1, __ATOMIC_RELAXED);
  if (emulation::fault == emulation::Fault::kNoBarrierAfter) return value;
  emulation::block_barrier();
  const int is_any = __atomic_load_n(&result, __ATOMIC_RELAXED);
  emulation::block_barrier();
  __atomic_store_n(&result, 0, __ATOMIC_RELAXED);
  return is_any;
}

inline double atomicAdd(double* address, double value) {
  auto* bits = reinterpret_cast<uint64_t*>(address);
  uint64_t old = __atomic_load_n(bits, __ATOMIC_RELAXED), sum_bits;
  double before;
  do {
    std::memcpy(&before, &old, 8);
    const double sum = before + value;
    std::memcpy(&sum_bits, &sum, 8);
  } while (!__atomic_compare_exchange_n(bits, &old, sum_bits, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}

namespace lora_stream::cuda {

using lora_stream::bits_float;
using lora_stream::float_bits;

inline int opaque(int x) { return x; }
inline float absolute(float x) { return std::fabs(x); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }

inline uint32_t pack_bfloat16(float low, float high) {
  const auto round = [](float x) -> uint32_t {
    return x != x ? 0x7fffu : float_bits(round_to(x, (BFloat16*)nullptr)) >> 16;
  };
  return round(low) | round(high) << 16;
}

inline uint32_t pack_float16(float low, float high) {
  const auto round = [](float x) -> uint32_t { return x != x ? 0x7fffu : float16_bits(x); };
  return round(low) | round(high) << 16;
}

inline float float16_float(uint32_t bits) { return to_float(Float16{static_cast<uint16_t>(bits)}); }

inline void load_matrices_transposed(uint32_t (&words)[4], const void* row) {
  emulation::check_aligned(row, 16, "ldmatrix: a row is not aligned to 16 bytes");
  auto& shown = emulation::exchange().words;
  const unsigned lane = emulation::thread() % 32;
  emulation::copy_16(shown[lane], row);
  emulation::warp_barrier();
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    uint16_t halves[2];
    for (unsigned e = 0; e < 2; ++e) {
      const unsigned r = lane % 4 * 2 + e, c = lane / 4;
      std::memcpy(&halves[e], reinterpret_cast<const char*>(shown[matrix * 8 + r]) + 2 * c, 2);
    }
    words[matrix] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
  }
  emulation::warp_barrier();
}

// c plus n exact products. With cut_sums as tensor cores were seen to add: addends are aligned to the largest and cut
// two bits below its last one, and so is the sum at its last one.
inline float add_products(const double* products, int n, float c) {
  double largest = std::fabs(static_cast<double>(c)), sum = c;
  for (int i = 0; i < n; ++i) {
    largest = std::fmax(largest, std::fabs(products[i]));
    sum += products[i];
  }
  if (!emulation::cut_sums || largest == 0 || !std::isfinite(sum)) return static_cast<float>(sum);
  int exponent;
  std::frexp(largest, &exponent);
  const double quantum = std::ldexp(1.0, exponent - 26);
  sum = std::trunc(c / quantum);
  for (int i = 0; i < n; ++i) sum += std::trunc(products[i] / quantum);
  sum *= quantum;
  const float rounded = static_cast<float>(sum);
  return std::fabs(static_cast<double>(rounded)) > std::fabs(sum) ? std::nextafter(rounded, 0.0f) : rounded;
}

template <class Decode>
void multiply_add(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1, Decode decode) {
  auto& shown = emulation::exchange().words;
  const unsigned lane = emulation::thread() % 32;
  std::memcpy(shown[lane], left, 16);
  shown[lane][4] = right0;
  shown[lane][5] = right1;
  emulation::warp_barrier();
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + 8 * (i / 2), col = lane % 4 * 2 + i % 2;
    double products[16];
    for (unsigned k = 0; k < 16; ++k) {
      const float a = decode(shown[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)] >> 16 * (k % 2) & 0xffffu);
      const float b = decode(shown[col * 4 + k % 8 / 2][4 + k / 8] >> 16 * (k % 2) & 0xffffu);
      products[k] = static_cast<double>(a) * b;
    }
    sum[i] = add_products(products, 16, sum[i]);
  }
  emulation::warp_barrier();
}

inline void multiply_add_bfloat16(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1) {
  multiply_add(sum, left, right0, right1, [](uint32_t bits) { return bits_float(bits << 16); });
}

inline void multiply_add_float16(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1) {
  multiply_add(sum, left, right0, right1, float16_float);
}

inline void copy_async(void* shared, const void* global) {
  emulation::check_aligned(shared, 16, "cp.async: shared address not aligned to 16 bytes");
  emulation::check_aligned(global, 16, "cp.async: global address not aligned to 16 bytes");
  emulation::copies().back().push_back({shared, global});
  static const char kUndefined[16] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  emulation::copy_16(shared, kUndefined);  // until the copy is waited for
}

inline void copy_async_commit() { emulation::copies().emplace_back(); }

template <int kPending>
void copy_async_wait() {
  if (emulation::fault == emulation::Fault::kNoWait) return;
  auto& groups = emulation::copies();
  while (groups.size() > kPending + 1) {
    for (const auto& copy : groups.front()) emulation::copy_16(copy.shared, copy.global);
    groups.erase(groups.begin());
  }
}

template <class T>
T load_cached(const T* global) {
  emulation::check_aligned(global, sizeof(T), "ld.global: address not aligned");
  T value;
  std::memcpy(&value, global, sizeof value);
  return value;
}

inline void store_streaming(void* global, uint4 words) {
  emulation::check_aligned(global, 16, "st.global: address not aligned to 16 bytes");
  emulation::copy_16(global, &words);
}

}  // namespace lora_stream::cuda
