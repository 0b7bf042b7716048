// The machine instructions that merge_kernel.h is written in: the only file that knows PTX.
//
// Without nvcc the same names come from tests/cpp/cuda_emulation.h in plain C++, so that the text of the kernel runs,
// and is tested, on any processor.
#pragma once

#include <cstdint>

#if !defined(__CUDACC__)
#include "cuda_emulation.h"
#else

#include <cuda_runtime.h>

#define LORA_STREAM_SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

namespace lora_stream::cuda {

// x, but the compiler does not know that. What follows from it is computed anew each time, instead of being carried
// through all loops in registers that the sums need.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("mov.u32 %0, %1;" : "=r"(x) : "r"(x));
  return x;
}

__device__ __forceinline__ float bits_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t float_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// Two floats rounded to nearest even, `low` in the low half. A NaN becomes the canonical one.
__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ uint32_t pack_float16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ float float16_float(uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(bits)));
  return x;
}

// Four 8 x 8 matrices of 16-bit elements, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// sum[16 x 8] += left[16 x 16] * right[16 x 8], in the fragment layouts of PTX's mma.m16n8k16.
__device__ __forceinline__ void multiply_add_bfloat16(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0,
                                                      uint32_t right1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

__device__ __forceinline__ void multiply_add_float16(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0,
                                                     uint32_t right1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// 16 bytes from global to shared memory, past the first-level cache and the registers. They are there once the group
// that they belong to has been waited for.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}

// Closes a group of copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all of this thread's groups but the newest kPending have arrived.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// What many blocks read: through the caches.
template <class T>
__device__ __forceinline__ T load_cached(const T* global) {
  return __ldg(global);
}

// What nobody reads soon: first to leave the cache.
__device__ __forceinline__ void store_streaming(void* global, uint4 words) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

}  // namespace lora_stream::cuda

#endif
