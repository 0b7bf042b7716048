"""What of ours has a name in /dev/shm. Names carry the pid of who made them; what tests that run beside this one make does not count."""

import os
from pathlib import Path


def regions() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob("lora_stream-*") if not _is_others(path.name))


def _is_others(name: str) -> bool:
    """Whether its maker lives and neither is this process nor comes from it."""
    pid = int(name.split("-")[1])
    while pid > 1 and pid != os.getpid():
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False  # killed: whoever sweeps next must have taken its name away
    return pid != os.getpid()
