"""Builds lora_stream._C. Everything else about the package is in pyproject.toml.

LORA_STREAM_CUDA=auto|0|1     build the CUDA kernel if there is an nvcc (auto, the default), never (0), or fail without (1).
TORCH_CUDA_ARCH_LIST          which GPUs to build for, as torch reads it: "8.0;9.0+PTX". Default: DEFAULT_ARCHITECTURES.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pybind11
import torch
from setuptools import setup
from setuptools.modified import newer_group
from torch.utils.cpp_extension import BuildExtension, CppExtension

# The ops use nothing newer than this torch, so that one binary serves it and all later ones.
TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11
DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"
MIN_NVCC = (12, 1)  # the first to pass a kernel 32 KiB of parameters


def find_nvcc() -> str | None:
    """The nvcc to build with, None for a CPU build. A build that was asked for CUDA never becomes a CPU build silently."""
    wanted = os.environ.get("LORA_STREAM_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"LORA_STREAM_CUDA must be auto, 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home) / "bin") if home else None)
    if nvcc is None:
        problem = "no nvcc was found: set CUDA_HOME to a CUDA toolkit or put its bin/ on PATH"
    else:
        release = re.search(r"release (\d+)\.(\d+)", run(nvcc, "--version"))
        version = tuple(map(int, release.groups())) if release else (0, 0)
        if version >= MIN_NVCC:
            return nvcc
        problem = f"{nvcc} is release {'.'.join(map(str, version))}, older than {'.'.join(map(str, MIN_NVCC))}"
    if wanted == "1":
        raise SystemExit(f"LORA_STREAM_CUDA=1 but {problem}; or build for the CPU with LORA_STREAM_CUDA=0")
    if torch.version.cuda is not None:
        print(f"lora_stream: building without the CUDA kernel, although this torch has CUDA: {problem}")
    return None


def run(*command: str) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def architectures(nvcc: str) -> list[str]:
    """["sm_80", ..., "compute_100"]: machine code for each, PTX for the last one where +PTX asks for it."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    known = set(re.findall(r"compute_(\d+)", run(nvcc, "--list-gpu-arch")))
    names = []
    for item in re.split(r"[;, ]+", (asked or DEFAULT_ARCHITECTURES).strip()):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected entries like 9.0 or 9.0+PTX, got {item!r}")
        number = match[1] + match[2]
        if int(number) < 80:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: {item}: the kernel needs compute capability 8.0 or later")
        if number not in known:
            if asked:
                raise SystemExit(f"TORCH_CUDA_ARCH_LIST: {item} is not among those that {nvcc} knows: {sorted(known)}")
            continue  # an older toolkit: what it does know
        names.append(f"sm_{number}")
        if match[4]:
            names.append(f"compute_{number}")
    if not names:
        raise SystemExit(f"{nvcc} knows none of {DEFAULT_ARCHITECTURES}: set TORCH_CUDA_ARCH_LIST")
    if not any(name.startswith("compute") for name in names) and not asked:
        names.append(names[-1].replace("sm_", "compute_"))  # for devices later than that toolkit
    return names


class Build(BuildExtension):
    """nvcc makes an object of the one .cu file, which includes no header of torch's; g++ links it in."""

    def build_extension(self, ext) -> None:
        if NVCC is not None:
            self.add_cuda(ext, NVCC)
        super().build_extension(ext)

    def add_cuda(self, ext, nvcc: str) -> None:
        names = architectures(nvcc)
        source = "csrc/cuda/launch.cu"
        target = Path(self.build_temp) / f"launch-{'-'.join(names)}.o"
        target.parent.mkdir(parents=True, exist_ok=True)
        sources = [source, "setup.py", *map(str, Path("csrc").glob("*.h")), *map(str, Path("csrc/cuda").glob("*.h"))]
        if newer_group(sources, str(target)):
            codes = [f"-gencode=arch=compute_{name.split('_')[1]},code={name}" for name in names]
            define = f'-DLORA_STREAM_CUDA_ARCHITECTURES="{" ".join(names)}"'
            command = [nvcc, "-std=c++17", "-O3", "--threads", "0", "-Xcompiler", "-fPIC,-Wall", define, *codes]
            self.spawn([*command, "-c", source, "-o", str(target)])
        ext.extra_objects.append(str(target))
        ext.define_macros.append(("LORA_STREAM_CUDA", None))
        # The static runtime, wherever this nvcc links it from: the extension then also loads where no CUDA is installed.
        libraries = re.search(r"LIBRARIES=(.*)", run(nvcc, "--dryrun", "-c", source, "-o", os.devnull))
        ext.library_dirs += re.findall(r'-L([^\s"]+)', libraries[1] if libraries else "")
        ext.libraries += ["cudart_static", "dl", "rt", "pthread"]


NVCC = find_nvcc()  # first: a build that cannot be what was asked for ends here
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
    cmdclass={"build_ext": Build.with_options(use_ninja=shutil.which("ninja") is not None)},
)
