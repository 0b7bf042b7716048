// Merges on a GPU, for callers that know torch: plain structs and pointers in, text out.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "../merge_cast.h"

namespace lora_stream::cuda {

// Enqueues the merges of a group on `stream` (a cudaStream_t) of `device`; returns at once. stats: float64
// [group.size(), 6] in the device's memory, added to, its checksums without the modulo; or null. Without `fidelity` its
// `projected` is NaN. Returns an empty text, or what went wrong.
std::string merge(const std::vector<MergeArgs>& group, double* stats, bool fidelity, bool fast, int device,
                  void* stream);

// Whether the device can write to host memory from `begin` up to `end`: it is pinned there. On success the addresses
// that the device knows it by are the host's.
bool is_pinned(const void* begin, const void* end);

// Lets devices read and write host memory directly, until unpin. The context is that of `device`; others may use the
// memory too. Returns an empty text, or what went wrong.
std::string pin(void* memory, std::size_t bytes, int device);
void unpin(void* memory);

// The architectures that there is machine code for, and PTX for later ones: "sm_80 sm_90 sm_100 compute_100".
const char* architectures();

}  // namespace lora_stream::cuda
