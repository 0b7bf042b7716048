// The random numbers of dithered (stochastic) rounding.
//
// A float32 sum becomes one of its two neighbours in the output's dtype: the one further from zero with a probability
// equal to the fraction of the step that the sum lies beyond the other one. That is unbiased, where rounding to nearest
// would put all small changes back (Gupta et al., 2015). The number that decides is a function of a key and of the
// element's place in the whole parameter: the same for every thread, processor, device and sharding, and again at the
// next merge, so that an element that a growing delta has moved stays moved.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LORA_STREAM_ANYWHERE __host__ __device__ __forceinline__
#else
#define LORA_STREAM_ANYWHERE inline
#endif

namespace lora_stream {

// Where the first element of a matrix lies: the key says in which parameter.
struct Place {
  uint64_t key;
  int64_t row, col;
};

// SplitMix64 (Steele, Lea and Flood, 2014), as a function of its counter.
LORA_STREAM_ANYWHERE uint64_t row_key(uint64_t key, int64_t row) {
  uint64_t z = key + (static_cast<uint64_t>(row) + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Of columns 2 * pair and 2 * pair + 1: the finalizer of MurmurHash3.
LORA_STREAM_ANYWHERE uint32_t pair_key(int64_t pair) {
  uint32_t x = static_cast<uint32_t>(pair);
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// 16 random bits for each of two neighbouring columns, the even one's in the lower half: multiplication by a random odd
// number, as in multiplicative hashing (Dietzfelbinger et al., 1997). Vectors compute the same: see randoms() of the
// CPU paths.
LORA_STREAM_ANYWHERE uint32_t random_pair(uint64_t row_key, uint32_t pair_key) {
  const uint32_t x = (pair_key ^ static_cast<uint32_t>(row_key)) * (static_cast<uint32_t>(row_key >> 32) | 1u);
  return x ^ (x >> 16);
}

LORA_STREAM_ANYWHERE uint32_t random_bits(uint64_t row_key, int64_t col) {
  return random_pair(row_key, pair_key(col >> 1)) >> (col & 1 ? 16 : 0) & 0xffffu;
}

}  // namespace lora_stream
