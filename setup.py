"""Builds lora_stream._C. Everything else about the package is in pyproject.toml.

LORA_STREAM_CUDA=auto|0|1   build the CUDA kernels where that is possible (auto, the default), never (0), or fail (1).
There are none in this version: auto builds for the CPU, 1 fails.
"""

import os
import shutil
from pathlib import Path

import pybind11
import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# The ops use nothing newer than this torch, so that one binary serves it and all later ones.
TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11


def check_cuda() -> None:
    """Stop a build that was asked for CUDA and cannot have it: it must not become a CPU build silently."""
    wanted = os.environ.get("LORA_STREAM_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"LORA_STREAM_CUDA must be auto, 0 or 1, got {wanted!r}")
    if wanted != "1":
        return
    home = os.environ.get("CUDA_HOME")
    if shutil.which("nvcc", path=str(Path(home) / "bin") if home else None) is None:
        raise SystemExit(
            "LORA_STREAM_CUDA=1 but no nvcc was found: set CUDA_HOME to a CUDA toolkit or put its bin/ on PATH, "
            "or build for the CPU with LORA_STREAM_CUDA=0"
        )
    raise SystemExit(
        "LORA_STREAM_CUDA=1 but this version has no CUDA kernel yet (CUDA tensors are merged by torch, slowly): "
        "build with LORA_STREAM_CUDA=auto or 0"
    )


check_cuda()
setup(
    ext_modules=[
        CppExtension(
            "lora_stream._C",
            sorted(str(path) for path in Path("csrc").rglob("*.cpp")),
            include_dirs=[pybind11.get_include()],
            define_macros=[
                ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
                ("LORA_STREAM_TORCH_VERSION", f'"{torch.__version__}"'),
            ],
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=shutil.which("ninja") is not None)},
)
