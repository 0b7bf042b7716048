// The Python module: what is not a tensor op. Importing it also registers the ops of ops.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "cpu/paths.h"
#if defined(LORA_STREAM_CUDA)
#include "cuda/launch.h"
#endif
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
#if defined(LORA_STREAM_CUDA)
  const char* const architectures = lora_stream::cuda::architectures();
  const auto pin = [](uintptr_t address, std::size_t bytes, int device) {
    return lora_stream::cuda::pin(reinterpret_cast<void*>(address), bytes, device);
  };
  const auto unpin = [](uintptr_t address) { lora_stream::cuda::unpin(reinterpret_cast<void*>(address)); };
#else
  const char* const architectures = "";
  const auto pin = [](uintptr_t, std::size_t, int) { return std::string("this build has no CUDA"); };
  const auto unpin = [](uintptr_t) {};
#endif
  m.attr("cuda_architectures") = architectures;
  m.def("pin", pin, "Let CUDA devices read and write host memory directly; returns an empty text or the error.",
        pybind11::arg("address"), pybind11::arg("bytes"), pybind11::arg("device"));
  m.def("unpin", unpin, "Undo pin().", pybind11::arg("address"));
  m.attr("compiler") = __VERSION__;
  m.attr("torch_built_with") = LORA_STREAM_TORCH_VERSION;
}
