// The Python module: what is not a tensor op. Importing it also registers the ops of ops.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "cpu/paths.h"
#include "staging/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "lora_stream's compiled part";
  m.def(
      "cpu_paths",
      [] {
        std::vector<std::pair<std::string, bool>> paths;
        for (const auto& path : lora_stream::cpu_paths()) paths.emplace_back(path.name, path.supported);
        return paths;
      },
      "The CPU paths built in, fastest first, each with whether this processor supports it.");
  m.def(
      "cpu_path", [] { return std::string(lora_stream::cpu_path().name); },
      "The CPU path in use: the fastest supported one, or the one that LORA_STREAM_CPU names.");
  lora_stream::bind_staging(m);
  m.attr("cuda_built") = false;  // no CUDA kernel in this version
  m.attr("compiler") = __VERSION__;
  m.attr("torch_built_with") = LORA_STREAM_TORCH_VERSION;
}
