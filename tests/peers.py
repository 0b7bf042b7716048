"""verl, TRL and Ray, each in a directory of its own (see the Makefile), which only processes that are started here get in their path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PEERS = Path(sys.prefix) / "peers"
VERL, TRL, COMMON = (PEERS / name for name in ("verl", "trl", "common"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def needs(directory: Path):
    return pytest.mark.skipif(not directory.exists(), reason=f"there is no {directory}, which `make test` fills")


def run(*arguments, path=(), timeout: float = 300, **environment: str) -> str:
    """What Python printed, with the arguments and these directories in its path. Fails the test if it did."""
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path))), **environment}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **environment},
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done.stdout
