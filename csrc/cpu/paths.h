// The CPU paths of the merge and the choice among them, made once at run time from what the processor has.
#pragma once

#include <vector>

#include "../merge_cast.h"

namespace lora_stream {

// Merges rows [row_begin, row_end) on the calling thread. `stats` may be null.
using MergeRows = void (*)(const MergeArgs& args, int64_t row_begin, int64_t row_end, MergeStats* stats);

void merge_rows_portable(const MergeArgs&, int64_t, int64_t, MergeStats*);
#if defined(__x86_64__)
void merge_rows_avx2(const MergeArgs&, int64_t, int64_t, MergeStats*);
void merge_rows_avx512(const MergeArgs&, int64_t, int64_t, MergeStats*);
void merge_rows_avx512_bf16(const MergeArgs&, int64_t, int64_t, MergeStats*);
#endif

struct CpuPath {
  const char* name;
  MergeRows merge_rows;
  bool supported;  // by this processor
};

// Fastest first; "portable" is last and always supported.
const std::vector<CpuPath>& cpu_paths();

// The path in use: the fastest supported one, or the one that LORA_STREAM_CPU names. Throws std::runtime_error for an
// unknown name and for a path that this processor cannot run. Read at every call, so that tests can change it.
const CpuPath& cpu_path();

}  // namespace lora_stream
