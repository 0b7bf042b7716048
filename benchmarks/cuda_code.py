"""What machine code did nvcc make of the CUDA kernel? Needs no GPU: reads the built extension.

    python benchmarks/cuda_code.py

For every kernel and architecture: registers, stack, local memory, tensor-core and memory instructions. Fails where a
register spills, where two blocks do not fit on a multiprocessor, and where a load or store on the aligned path is not 16
bytes wide. Needs cuobjdump, from a CUDA toolkit or the triton wheel. Ends in one JSON line.
"""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

OPERANDS = ["bfloat16", "float16", "two planes", "three planes"]  # csrc/cuda/merge_kernel.h: Operands
STATISTICS = ["no", "rounding", "fidelity"]  # there, too
MULTIPLICATIONS = [1, 1, 3, 6]  # per 16 x 8 results and 16 ranks
REGISTERS = 128  # of a thread: 64 Ki of a multiprocessor, for two blocks of 256 threads


def extension() -> Path:
    spec = find_spec("lora_stream")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("_C*.so"))


def cuobjdump() -> str | None:
    found = shutil.which("cuobjdump")
    triton = find_spec("triton")
    if found is None and triton is not None and triton.origin is not None:
        found = shutil.which("cuobjdump", path=str(Path(triton.origin).parent / "backends/nvidia/bin"))
    return found


def identity(symbol: str) -> tuple[str, int, str] | None:
    """(operands, bytes of a base element, statistics) of a mangled name."""
    match = re.search(r"merge_kernelILNS.*?OperandsE(\d)ELi(\d)ELNS.*?StatisticsE(\d)E", symbol)
    return match and (OPERANDS[int(match[1])], int(match[2]), STATISTICS[int(match[3])])


def sections(dump: str):
    """(architecture, symbol, text) of each function in a dump."""
    architecture = ""
    for block in re.split(r"\n(?=Fatbin elf code)", dump):
        if found := re.search(r"arch = (sm_\w+)", block):
            architecture = found[1]
        for function in re.split(r"\n\s*Function\s*:?\s*", block)[1:]:
            symbol, _, text = function.partition("\n")
            yield architecture, symbol.strip().rstrip(":"), text


def read(library: Path, tool: str) -> list[dict]:
    """One record for each kernel and architecture."""
    usage = subprocess.run([tool, "-res-usage", library], check=True, capture_output=True, text=True)
    resources = {}
    for architecture, symbol, text in sections(usage.stdout + usage.stderr):
        numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
        resources[architecture, symbol] = {name: int(value) for name, value in numbers.items()}
    code = subprocess.run([tool, "-sass", library], check=True, capture_output=True, text=True).stdout
    records = []
    for architecture, symbol, text in sections(code):
        kernel = identity(symbol)
        if kernel is None:
            continue
        operations = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
        counts = Counter(operation.split(".")[0] for operation in operations)
        whole = Counter(operations)
        records.append(
            {
                "architecture": architecture,
                "operands": kernel[0],
                "base_bytes": kernel[1],
                "statistics": kernel[2],
                "registers": resources[architecture, symbol]["REG"],
                "stack": resources[architecture, symbol]["STACK"],
                "local": resources[architecture, symbol]["LOCAL"],
                "spills": counts["STL"] + counts["LDL"],
                "instructions": len(operations),
                "multiplications": counts["HMMA"],
                "ldmatrix": counts["LDSM"],
                "base_loads": counts["LDGSTS"],
                "base_loads_16": sum(n for name, n in whole.items() if name.startswith("LDGSTS") and ".128" in name),
                "out_stores_16": sum(n for name, n in whole.items() if name.startswith("STG") and ".128" in name),
            }
        )
    return sorted(
        records,
        key=lambda r: (
            r["architecture"],
            OPERANDS.index(r["operands"]),
            r["base_bytes"],
            STATISTICS.index(r["statistics"]),
        ),
    )


def faults(record: dict) -> list[str]:
    """What is wrong with a kernel's machine code."""
    base_loads = 4 * (record["base_bytes"] // 2) * 2  # of a tile, in the loop and before it
    expected = {
        "stack": 0,
        "local": 0,
        "spills": 0,
        # 64 columns, 16 ranks; the loops around it are not unrolled.
        "multiplications": 8 * MULTIPLICATIONS[OPERANDS.index(record["operands"])],
        "base_loads": base_loads,
        "base_loads_16": base_loads,
        "out_stores_16": 4 + 8,  # a tile's 16-bit results in lines, or its float32 results in sectors
    }
    wrong = [f"{name} {record[name]}, expected {value}" for name, value in expected.items() if record[name] != value]
    if record["registers"] > REGISTERS:
        wrong.append(f"{record['registers']} registers, more than {REGISTERS}")
    return wrong


def main() -> int:
    tool = cuobjdump()
    if tool is None:
        print("cuda_code: no cuobjdump: put a CUDA toolkit's bin/ on PATH or install triton", file=sys.stderr)
        return 2
    records = read(extension(), tool)
    if not records:
        print("cuda_code: the extension was built without the CUDA kernel", file=sys.stderr)
        return 2
    print(
        "| arch | operands | base | statistics | registers | stack | spills | instructions | HMMA | LDSM | base 16-byte loads | out 16-byte stores |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    failed = 0
    for record in records:
        print(
            f"| {record['architecture']} | {record['operands']} | {8 * record['base_bytes']} bit | "
            f"{record['statistics']} | {record['registers']} | {record['stack']} | {record['spills']} | "
            f"{record['instructions']} | {record['multiplications']} | {record['ldmatrix']} | "
            f"{record['base_loads_16']} | {record['out_stores_16']} |"
        )
        for fault in faults(record):
            failed += 1
            print(f"cuda_code: {record['architecture']}, {record['operands']}: {fault}", file=sys.stderr)
    print(json.dumps({"benchmark": "cuda_code", "kernels": len(records), "faults": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
