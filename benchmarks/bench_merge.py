"""How far is one fused merge from just copying the weight, and from what eager torch does?

Ceiling: `out.copy_(W)`, which reads W and writes out once, without any arithmetic.
Rivals:  eager  `(W + s * (B @ A)).to(bfloat16)`, the merge of most trainers
         addmm  `torch.addmm(W, B, A, alpha=s, out=full).to(bfloat16)`, float32 W only: the best that torch has

    python benchmarks/bench_merge.py [--rows 4096] [--cols 4096] [--ranks 8,16,32,64,128] [--threads 2] [--repeats 15]
    python benchmarks/bench_merge.py --dora      DoRA, beside PEFT's own merge of it

A and B are float32, out is bfloat16. All that one row shows is measured in turn within the same seconds.
"""

import argparse
import json
import platform
import statistics
import time

import torch

from lora_stream import _C, dora, ops


def measure(candidates: dict, repeats: int) -> dict[str, list[float]]:
    """Seconds of each candidate, interleaved, after one warm-up round."""
    seconds = {name: [] for name in candidates}
    for round_ in range(repeats + 1):
        for name, run in candidates.items():
            begin = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def quartiles(values: list[float]) -> list[float]:
    return [round(q, 3) for q in statistics.quantiles(values, n=4)]


def bench(dtype: torch.dtype, rows: int, cols: int, rank: int, repeats: int) -> dict:
    base = torch.randn(rows, cols).to(dtype)
    lora_A, lora_B = torch.randn(rank, cols), torch.randn(rows, rank)
    out = torch.empty(rows, cols, dtype=torch.bfloat16)
    stats = torch.empty(1, ops.NUM_STATS, dtype=torch.float64)
    candidates = {
        "copy": lambda: out.copy_(base),
        "merge": lambda: ops.merge_cast_(base, lora_A, lora_B, 0.7, out),
        "merge with statistics": lambda: ops.merge_cast_grouped_([base], [lora_A], [lora_B], [0.7], [out], stats),
        "eager": lambda: (base + 0.7 * (lora_B @ lora_A)).to(torch.bfloat16),
    }
    if dtype == torch.float32:
        full = torch.empty_like(base)
        candidates["addmm"] = lambda: torch.addmm(base, lora_B, lora_A, alpha=0.7, out=full).to(torch.bfloat16)
    seconds = measure(candidates, repeats)
    ratios = {
        "merge over copy": [m / c for m, c in zip(seconds["merge"], seconds["copy"], strict=True)],
        "eager over merge": [e / m for e, m in zip(seconds["eager"], seconds["merge"], strict=True)],
        "statistics over merge": [
            s / m for s, m in zip(seconds["merge with statistics"], seconds["merge"], strict=True)
        ],
    }
    if "addmm" in seconds:
        ratios["addmm over merge"] = [a / m for a, m in zip(seconds["addmm"], seconds["merge"], strict=True)]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "rank": rank,
        "gflops": round(2 * rank * rows * cols / statistics.median(seconds["merge"]) / 1e9),
        "ratios": {name: quartiles(values) for name, values in ratios.items()},  # lower quartile, median, upper
    }


def bench_dora(dtype: torch.dtype, rows: int, cols: int, rank: int, repeats: int) -> dict:
    """Norms, scaling, statistics and the one rounding, against PEFT's safe merge and the cast of what it makes."""
    from peft import LoraConfig, get_peft_model

    base = torch.nn.Linear(cols, rows, bias=False).to(dtype)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, use_dora=True, target_modules=["0"])
    layer = get_peft_model(torch.nn.Sequential(base), config).base_model.model[0]
    weight, lora_A, lora_B, magnitude = (
        each.weight.detach()
        for each in (base, *(part["default"] for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)))
    )
    lora_B.normal_(std=0.01)
    out = torch.empty(rows, cols, dtype=torch.bfloat16)
    stats = torch.empty(1, ops.NUM_STATS, dtype=torch.float64)

    def merge_dora() -> None:
        norms = dora.norms(weight, lora_A, lora_B, 2.0, 1, "float32")
        dora.merge(weight, (lora_A, lora_B, 2.0), magnitude.float().unsqueeze(1) / norms, out, "float32")

    @torch.no_grad()
    def merge_by_peft() -> None:
        layer.lora_variant["default"].merge_safe(layer, "default", base.weight).to(torch.bfloat16)

    seconds = measure(
        {
            "merge": lambda: ops.merge_cast_grouped_([weight], [lora_A], [lora_B], [2.0], [out], stats),
            "dora": merge_dora,
            "peft": merge_by_peft,
        },
        repeats,
    )
    ratios = {
        "DoRA over plain merge": [d / m for d, m in zip(seconds["dora"], seconds["merge"], strict=True)],
        "PEFT's DoRA over ours": [p / d for p, d in zip(seconds["peft"], seconds["dora"], strict=True)],
    }
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "rank": rank,
        "gflops": round(2 * 2 * rank * rows * cols / statistics.median(seconds["dora"]) / 1e9),
        "ratios": {name: quartiles(values) for name, values in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--ranks", default="8,16,32,64,128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dora", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = []
    print(f"{args.rows} x {args.cols}, {args.threads} threads, path {_C.cpu_path()}; median [quartiles]")
    for dtype in (torch.float32, torch.bfloat16):
        for rank in map(int, args.ranks.split(",")):
            result = (bench_dora if args.dora else bench)(dtype, args.rows, args.cols, rank, args.repeats)
            results.append(result)
            shown = "   ".join(
                f"{name} {m:.2f} [{low:.2f} {high:.2f}]" for name, (low, m, high) in result["ratios"].items()
            )
            print(f"{result['dtype']:<8} r={rank:<4} {shown}   {result['gflops']} GFLOP/s", flush=True)
    machine = {"cpu": _processor(), "path": _C.cpu_path(), "threads": args.threads, "torch": torch.__version__}
    print(
        json.dumps(
            {
                "benchmark": "dora" if args.dora else "merge",
                "rows": args.rows,
                "cols": args.cols,
                **machine,
                "results": results,
            }
        )
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
