#include "paths.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace lora_stream {

const std::vector<CpuPath>& cpu_paths() {
  static const std::vector<CpuPath> paths = [] {
    std::vector<CpuPath> found;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    found.push_back({"avx512_bf16", merge_rows_avx512_bf16, avx512_bf16});
    found.push_back({"avx512", merge_rows_avx512, avx512});
    found.push_back({"avx2", merge_rows_avx2, avx2});
#endif
    found.push_back({"portable", merge_rows_portable, true});
    return found;
  }();
  return paths;
}

const CpuPath& cpu_path() {
  const char* wanted = std::getenv("LORA_STREAM_CPU");
  for (const CpuPath& path : cpu_paths()) {
    if (wanted == nullptr || *wanted == '\0' ? path.supported : path.name == std::string(wanted)) {
      if (!path.supported) {
        throw std::runtime_error(std::string("LORA_STREAM_CPU=") + wanted +
                                 ": this processor lacks the instructions; unset it or name a path that "
                                 "`lora-stream doctor` lists as supported");
      }
      return path;
    }
  }
  std::string names;
  for (const CpuPath& path : cpu_paths()) names += std::string(names.empty() ? "" : ", ") + path.name;
  throw std::runtime_error(std::string("LORA_STREAM_CPU=") + wanted + ": expected one of " + names);
}

}  // namespace lora_stream
