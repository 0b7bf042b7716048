#pragma once

#include <pybind11/pybind11.h>

namespace lora_stream {

void bind_staging(pybind11::module_& m);

}  // namespace lora_stream
