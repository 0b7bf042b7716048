"""What does the merge cost on a GPU, beside just copying the weights and beside what else merges them?

Ceiling: `out.copy_(W)` of the same bytes on the device, `host.copy_(out)` through PCIe for pinned memory.
Rivals:  addmm_     `W.addmm_(B, A, alpha=s)` in place (one dtype for all)
         addmm out  `torch.addmm(W, B, A, alpha=s, out=out)` (one dtype for all)
         eager      `(W + s * (B @ A)).to(bfloat16)`, the merge of most trainers
         PEFT       `merge_adapter()`, in place
         Triton     a grouped kernel of the same idea, benchmarks/triton_merge.py

    python benchmarks/bench_cuda.py [--layers 32] [--ranks 16,64,128] [--repeats 7] [--only kernel,host,stream]

The matrices are those of Llama-3-8B with LoRA on all linear layers: 224 in 32 layers. Everything of one row is measured in
turn within the same seconds; the median is shown with the quartiles. One JSON line for each row, a short table last.
"""

import argparse
import itertools
import json
import os
import statistics
import threading
import time

import torch
from torch import nn

from lora_stream import _C, ops
from lora_stream.rounding import ORIGIN

# out, in of q, k, v, o, gate, up, down
LLAMA_3_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
SCALING = 0.7


def seconds_on_device(candidates: dict, repeats: int) -> dict[str, list[float]]:
    """By events, interleaved, after one warm-up round. All buffers are far larger than the cache."""
    seconds = {name: [] for name in candidates}
    for round_ in range(repeats + 1):
        for name, run in candidates.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if round_:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    return seconds


def quartiles(values: list[float]) -> list[float]:
    return [round(q, 3) for q in statistics.quantiles(values, n=4)]


def shares(seconds: dict[str, list[float]], ceiling: str) -> dict[str, list[float]]:
    """Of the ceiling's speed, round by round: 1 is as fast as copying."""
    return {
        name: quartiles([c / s for c, s in zip(seconds[ceiling], values, strict=True)])
        for name, values in seconds.items()
        if name != ceiling
    }


def report(row: dict) -> dict:
    print(json.dumps(row), flush=True)
    return row


def ceiling(num_bytes: int = 4 << 30) -> dict:
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = seconds_on_device({"copy": lambda: target.copy_(source)}, 9)["copy"]
    return report({"benchmark": "ceiling", "copy_TB_per_s": round(num_bytes / statistics.median(seconds) / 1e12, 3)})


def kernel(layers: int, ranks: list[int], repeats: int) -> list[dict]:
    """The kernel against its ceiling and rivals, one row for each rank and pair of dtypes."""
    rows = []
    names = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    shapes = LLAMA_3_8B * layers
    for base_dtype in names:
        bases = [torch.randn(shape, device="cuda", dtype=base_dtype) * 0.02 for shape in shapes]
        outs = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        moved = sum(base.numel() * (base.element_size() + 2) for base in bases)
        for pair_dtype, rank in itertools.product(names, ranks):
            As = [torch.randn(rank, n, device="cuda").to(pair_dtype) for _, n in shapes]
            Bs = [torch.randn(m, rank, device="cuda").to(pair_dtype) * 1e-3 for m, _ in shapes]
            seconds = seconds_on_device(merges(bases, As, Bs, outs), repeats)
            row = {
                "benchmark": "kernel",
                "base": names[base_dtype],
                "pair": names[pair_dtype],
                "rank": rank,
                "matrices": len(shapes),
                "copy_TB_per_s": round(moved / statistics.median(seconds["copy"]) / 1e12, 3),
                "share_of_copy": shares(seconds, "copy"),
            }
            rows.append(report(row))
        del bases, outs
        torch.cuda.empty_cache()
    return rows


def merges(bases, As, Bs, outs) -> dict:
    """Ours, copying, and the rivals that can do it with these dtypes."""
    scalings = [SCALING] * len(bases)
    stats = torch.empty(len(bases), ops.NUM_STATS, dtype=torch.float64, device=bases[0].device)
    each = list(zip(bases, As, Bs, outs, strict=True))
    base_dtype, pair_dtype = bases[0].dtype, As[0].dtype
    candidates = {
        "copy": lambda: [out.copy_(base) for base, _, _, out in each],
        "ours": lambda: ops.merge_cast_grouped_(bases, As, Bs, scalings, outs),
        "ours with statistics": lambda: ops.merge_cast_grouped_(bases, As, Bs, scalings, outs, stats),
        "ours, dithered": lambda: ops.merge_cast_grouped_(bases, As, Bs, scalings, outs, places=[ORIGIN] * len(bases)),
        "ours with statistics but fidelity": lambda: ops.merge_cast_grouped_(
            bases, As, Bs, scalings, outs, stats, fidelity=False
        ),
        "ours one by one": lambda: [ops.merge_cast_(base, A, B, SCALING, out) for base, A, B, out in each],
        "eager": lambda: [(base + SCALING * (B @ A)).to(torch.bfloat16) for base, A, B, _ in each],
    }
    if pair_dtype == torch.float32:
        candidates["ours, precision fast"] = lambda: ops.merge_cast_grouped_(
            bases, As, Bs, scalings, outs, precision="fast"
        )
    if pair_dtype == base_dtype:
        full = outs if base_dtype == torch.bfloat16 else [torch.empty_like(base) for base in bases]
        candidates["addmm out"] = lambda: [
            torch.addmm(base, B, A, alpha=SCALING, out=out) for (base, A, B, _), out in zip(each, full, strict=True)
        ]
        candidates["addmm_"] = lambda: [base.addmm_(B, A, alpha=1e-6) for base, A, B, _ in each]
    if (rival := triton_rival(each)) is not None:
        candidates["Triton"] = rival
    return candidates


def triton_rival(each):
    try:
        from triton_merge import TritonMerge

        merge = TritonMerge(each, SCALING)
        merge()
    except Exception as error:  # it is only a rival: say why it is missing, and go on
        print(
            json.dumps(
                {"benchmark": "kernel", "without": "Triton", "because": f"{type(error).__name__}: {error}"[:200]}
            )
        )
        return None
    return merge


def peft(layers: int, rank: int, repeats: int) -> dict | None:
    """PEFT's own merge, in place, of the same matrices in bfloat16 with float32 adapters."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        print(json.dumps({"benchmark": "peft", "without": "PEFT", "because": str(error)}))
        return None
    with torch.device("cuda"):
        linears = [nn.Linear(n, m, bias=False, dtype=torch.bfloat16) for m, n in LLAMA_3_8B * layers]
        model = nn.ModuleDict({f"linear{i}": linear for i, linear in enumerate(linears)})
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(model), init_lora_weights=False)
        model = inject_adapter_in_model(config, model)
    layers_ = list(model.values())
    bases = [layer.base_layer.weight.detach() for layer in layers_]
    As = [layer.lora_A["default"].weight.detach() for layer in layers_]
    Bs = [layer.lora_B["default"].weight.detach() for layer in layers_]
    outs = [torch.empty_like(base) for base in bases]
    scalings = [2.0] * len(bases)
    with torch.no_grad():
        seconds = seconds_on_device(
            {
                "copy": lambda: [out.copy_(base) for out, base in zip(outs, bases, strict=True)],
                "ours with statistics": lambda: ops.merge_cast_grouped_(
                    bases,
                    As,
                    Bs,
                    scalings,
                    outs,
                    torch.empty(len(bases), ops.NUM_STATS, dtype=torch.float64, device="cuda"),
                ),
                "PEFT merge": lambda: [layer.merge() for layer in layers_],
                "PEFT unmerge": lambda: [layer.unmerge() for layer in layers_],
            },
            repeats,
        )
    return report({"benchmark": "peft", "rank": rank, "share_of_copy": shares(seconds, "copy")})


def host(repeats: int) -> list[dict]:
    """Merged weights in pinned host memory: stores of the kernel, or a copy engine behind device memory."""
    rows = []
    for pair_dtype, rank in ((torch.bfloat16, 16), (torch.float32, 64)):
        bases = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in LLAMA_3_8B]
        As = [torch.randn(rank, n, device="cuda").to(pair_dtype) for _, n in LLAMA_3_8B]
        Bs = [torch.randn(m, rank, device="cuda").to(pair_dtype) for m, _ in LLAMA_3_8B]
        pinned = [torch.empty(shape, dtype=torch.bfloat16, pin_memory=True) for shape in LLAMA_3_8B]
        seconds = seconds_on_device(ways_to_host(bases, As, Bs, pinned), repeats)
        moved = sum(far.numel() * 2 for far in pinned)
        row = {
            "benchmark": "host",
            "pair": str(pair_dtype).removeprefix("torch."),
            "rank": rank,
            "copy_GB_per_s": round(moved / statistics.median(seconds["copy"]) / 1e9, 2),
            "share_of_copy": shares(seconds, "copy"),
        }
        rows.append(report(row))
    return rows


def ways_to_host(bases, As, Bs, pinned) -> dict:
    staging = [torch.empty_like(base) for base in bases]
    copying = torch.cuda.Stream()
    scalings = [SCALING] * len(bases)

    def copy() -> None:
        for near, far in zip(staging, pinned, strict=True):
            far.copy_(near, non_blocking=True)

    def copy_engine() -> None:
        current = torch.cuda.current_stream()
        for base, A, B, near, far in zip(bases, As, Bs, staging, pinned, strict=True):
            ops.merge_cast_(base, A, B, SCALING, near)
            copying.wait_event(current.record_event())
            with torch.cuda.stream(copying):
                far.copy_(near, non_blocking=True)
        current.wait_stream(copying)

    return {
        "copy": copy,
        "kernel stores": lambda: ops.merge_cast_grouped_(bases, As, Bs, scalings, pinned),
        "copy engine": copy_engine,
    }


def stream(layers: int, repeats: int) -> list[dict]:
    """A pass over a PEFT model, to consumers that drop what they get, and through a ring to a reader."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from lora_stream.merged_weights import MergedWeights
    from lora_stream.ring import Receiver, Sender

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, lora)
    weights = MergedWeights(model)
    num_bytes = weights.plan.num_bytes

    def consume(_way):
        for _, tensor in weights:
            del tensor

    sender = Sender(num_slots=8, slot_bytes=64 << 20)
    receiver = Receiver(sender.link())
    sender.unlink()

    def through_ring(way):
        os.environ["LORA_STREAM_TO_HOST"] = way
        generation, first = sender.begin(lambda: None)
        receiver.accept(generation, first)

        def read():
            for _, tensor in receiver.tensors(weights.metadata()):
                del tensor

        reading = threading.Thread(target=read)
        reading.start()
        for _ in weights.stream_into(sender):
            pass
        reading.join()
        sender.end()

    sender.pin(torch.device("cuda", torch.cuda.current_device()))
    near = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    far = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    ways = {
        "device copy": lambda: [p.clone() for p in model.parameters()],
        "pass": lambda: consume(""),
        "host copy": lambda: [far.copy_(near, non_blocking=True) for _ in range(num_bytes // near.numel())],
        "ring, copy": lambda: through_ring("copy"),
        "ring, store": lambda: through_ring("store"),
    }
    seconds = {name: [] for name in ways}
    for round_ in range(repeats + 1):
        for name, run in ways.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    return [
        report(
            {
                "benchmark": "stream",
                "layers": layers,
                "GB": round(num_bytes / 1e9, 2),
                "seconds": {name: quartiles(values) for name, values in seconds.items()},
                "share_of_device_copy": shares({n: seconds[n] for n in ("device copy", "pass")}, "device copy"),
                "share_of_host_copy": shares(
                    {n: seconds[n] for n in ("host copy", "ring, copy", "ring, store")}, "host copy"
                ),
            }
        )
    ]


def table(rows: list[dict]) -> None:
    """Medians as shares of the copy, one line for each row."""
    print("\n| what | base | A, B | rank | share of copy (median) |\n|---|---|---|---|---|")
    for row in rows:
        found = {}
        for key in ("share_of_copy", "share_of_device_copy", "share_of_host_copy"):
            found |= {name: values[1] for name, values in row.get(key, {}).items()}
        text = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
        print(
            f"| {row['benchmark']} | {row.get('base', '')} | {row.get('pair', '')} | {row.get('rank', '')} | {text} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", default="16,64,128")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="kernel,host,stream")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_cuda: needs a CUDA device")
    torch.manual_seed(0)
    only = args.only.split(",")
    first = ceiling()
    rows = []
    if "kernel" in only:
        rows += kernel(args.layers, [int(rank) for rank in args.ranks.split(",")], args.repeats)
        torch.cuda.empty_cache()
        rows += [row for row in [peft(args.layers, 16, args.repeats)] if row is not None]
        torch.cuda.empty_cache()
    if "host" in only:
        rows += host(args.repeats)
    if "stream" in only:
        torch.cuda.empty_cache()
        rows += stream(max(1, args.layers // 4), args.repeats)
    table(rows)
    print(
        json.dumps(
            {
                "benchmark": "bench_cuda",
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "built_for": _C.cuda_architectures,
                **{k: v for k, v in first.items() if k != "benchmark"},
                "rows": len(rows),
            }
        )
    )


if __name__ == "__main__":
    main()
