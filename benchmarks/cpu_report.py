"""Runs the CPU set of benchmarks and writes what they found as one page, benchmarks/results/cpu.md.

    make bench          which is: python benchmarks/cpu_report.py
    python benchmarks/cpu_report.py --only merge --out /tmp/cpu.md

About ten minutes on two cores. A peer is measured where the environment has it (see benchmarks/peers/README.md), and is in the
table with the reason where not.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lora_stream.bench.results import Result
from lora_stream.bench.showing import markdown_of

ROOT = Path(__file__).parents[1]
PEERS = Path(sys.prefix) / "peers"
SMALL = "--model qwen3-0.6b --layers 12 --vocab 32768"

# title, command, what of the peers is in the path
SET = [
    ("One merge", "bench merge --shape 4096x4096 --ranks 8,16,64 --repeats 4", ()),
    ("One merge of a DoRA", "bench merge --dora --shape 4096x4096 --ranks 8,16,64 --repeats 4", ()),
    (
        "A pass over a model, beside verl",
        f"bench stream {SMALL} --ranks 0,1,2 --bucket-mib 16 --repeats 3 --peer benchmarks/peers/verl_merged_lora.py",
        ("verl", "common"),
    ),
    (
        "A pass over a model, beside TRL",
        f"bench stream {SMALL} --ranks 0,2 --bucket-mib 16 --repeats 3 --peer benchmarks/peers/trl_sync_weights.py",
        ("trl", "common"),
    ),
    (
        "A sync into a live vLLM",
        "bench sync --model qwen3-0.6b --layers 8 --vocab 16384 --batch 1,8 --tokens 10 --repeats 3",
        (),
    ),
]


def run(command: str, peers: tuple[str, ...], file: Path) -> Result:
    path = os.pathsep.join(str(PEERS / name) for name in peers)
    arguments = [*shlex.split(command), "--json", str(file)]
    subprocess.run(
        [sys.executable, "-c", "from lora_stream.cli import main; main()", *arguments],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
    )
    return Result.from_dict(json.loads(file.read_text()))


def section(title: str, command: str, peers: tuple[str, ...], result: Result) -> str:
    lines = [f"## {title}", ""]
    path = f"PYTHONPATH={':'.join(f'.venv/peers/{name}' for name in peers)} " if peers else ""
    lines += ["```", f"{path}lora-stream {command}", "```", ""]
    for group in result.groups:
        lines += [f"{group.name}:", "", markdown_of(group), ""]
        if group.note:
            lines += [f"{group.note}.", ""]
    return "\n".join(lines)


def checkpoint_section() -> str:
    command = [sys.executable, "benchmarks/bench_merge_checkpoint.py"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    shown = "\n".join(line for line in done.stdout.splitlines() if not line.startswith("{"))
    return "\n".join(
        [
            "## A merge from files into files",
            "",
            "```",
            "python benchmarks/bench_merge_checkpoint.py",
            "```",
            "",
            "```",
            shown,
            "```",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="benchmarks whose command has this word; nothing is left out without it"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu.md")
    args = parser.parse_args()
    begin = time.perf_counter()
    sections, result = [], None
    with tempfile.TemporaryDirectory() as folder:
        for title, command, peers in SET:
            if args.only in command:
                print(f"{time.perf_counter() - begin:5.0f} s  lora-stream {command}", flush=True)
                result = run(command, peers, Path(folder) / "result.json")
                sections.append(section(title, command, peers, result))
    if args.only in "checkpoint":
        print(f"{time.perf_counter() - begin:5.0f} s  benchmarks/bench_merge_checkpoint.py", flush=True)
        sections.append(checkpoint_section())
    where = "" if result is None else ", ".join(f"{key} {value}" for key, value in result.machine.items())
    versions = "" if result is None else ", ".join(f"{key} {value}" for key, value in result.versions.items())
    head = f"""# Measured on a CPU

By `make bench`. {where}; {versions}.

Medians with the quartiles in brackets. All ways of a table ran in turn within the same seconds, so ratios mean more than times: the
machine is shared. "beside ours" says of a way how long it takes over ours, and "within the spread" where that is less than it
scatters. "bytes alone" is the ceiling of a pass: the wire's bytes cast, or gathered, and nothing else done.
"""
    args.out.write_text("\n".join([head, *sections]))
    print(f"{time.perf_counter() - begin:5.0f} s  wrote {args.out}")


if __name__ == "__main__":
    main()
