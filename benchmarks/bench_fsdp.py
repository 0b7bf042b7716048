"""What does a pass over an FSDP2 model cost, beside the ways that trainers stream merged weights today?

Ceiling: the same bytes gathered alone, full_tensor() of shards that were merged and cast before.
Rivals:  verl    its FSDPEngine._merged_lora_per_tensor_param, as installed (0.9.1): backup, merge, full_tensor, cast, restore
         PEFT    merge_adapter, full_tensor and cast, unmerge_adapter

    python benchmarks/bench_fsdp.py [--ranks 1 2] [--rounds 5] [--layers 6] [--hidden 1024] [--bucket-mib 16]

A random Qwen2-like model in float32 (the default has 125 M parameters), LoRA r=16 on all linear layers, gloo on the CPU, the
cores shared among the ranks. All ways of one round run in turn on the same model, and every rank drops each tensor when it has it, as
one does whose engine has taken it. Seconds are those of the slowest rank; extra memory is how far its resident set rose above
where it was before. Without verl installed its row is left out.
"""

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from bench_merge import _processor
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

import lora_stream

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_model(layers: int, hidden: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32 * hidden,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        tie_word_embeddings=True,
    )
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.02)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_lora_stream(model, bucket_bytes: int, **kwargs):
    return lambda: lora_stream.stream(model, bucket_bytes=bucket_bytes, **kwargs)


def by_verl(model):
    from verl.workers.engine.fsdp import transformer_impl

    if not torch.cuda.is_available():  # where it asks for a GPU's number and free memory
        transformer_impl.get_device_id = lambda: "cpu"
        transformer_impl.log_gpu_memory_usage = lambda *args, **kwargs: None
    engine = SimpleNamespace(module=model, _is_offload_param=False)
    return lambda: transformer_impl.FSDPEngine._merged_lora_per_tensor_param(engine)


@torch.no_grad()
def _by_peft(model):
    model.merge_adapter()
    try:
        for name, tensor in model.state_dict().items():
            if "lora_" not in name:
                yield name, tensor.full_tensor().to(torch.bfloat16)
    finally:
        model.unmerge_adapter()


def gathered_alone(model):
    """full_tensor() of what the wire carries: bfloat16 shards of every base parameter, tied ones once."""
    shards = {
        name: DTensor.from_local(
            p.to_local().detach().to(torch.bfloat16), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
        )
        for name, p in model.named_parameters()
        if "lora_" not in name
    }
    return lambda: ((name, shard.full_tensor()) for name, shard in shards.items())


def measure(way) -> tuple[float, int, int]:
    """Seconds, extra resident bytes, and tensors of one run, on the slowest and largest rank."""
    ctypes.CDLL(None).malloc_trim(0)  # what the way before has left must not serve this one unseen
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts anew
    before, begin = _status("VmRSS"), time.perf_counter()
    num_tensors = 0
    for _name, tensor in way():
        num_tensors += 1
        del tensor
    dist.barrier()
    seconds, extra = time.perf_counter() - begin, max(0, _status("VmHWM") - before)
    found = torch.tensor([seconds, extra], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found[0].item(), int(found[1]), num_tensors


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def serve(rank: int, num_ranks: int, store: str, args: argparse.Namespace, results) -> None:
    torch.set_num_threads(max(1, os.cpu_count() // num_ranks))
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    model = make_model(args.layers, args.hidden)
    bucket_bytes = args.bucket_mib << 20
    ways = {
        "ours": by_lora_stream(model, bucket_bytes),
        "ours, to one sender": by_lora_stream(model, bucket_bytes, gather="sender"),
        "ours, trained scope": by_lora_stream(model, bucket_bytes, scope="trained"),
        "gathered alone": gathered_alone(model),
        "PEFT": lambda: _by_peft(model),
    }
    try:
        ways["verl"] = by_verl(model)
    except ImportError as error:
        if rank == 0:
            print(f"verl is left out: {error}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    extra: dict[str, list[int]] = {name: [] for name in ways}
    for round_ in range(args.rounds + 1):
        for name, way in ways.items():
            took, more, _ = measure(way)
            if round_:
                seconds[name].append(took)
                extra[name].append(more)
    if rank == 0:
        stream = by_lora_stream(model, bucket_bytes)()
        for _name, tensor in stream:
            del tensor
        results.put(summary(model, stream, seconds, extra))
    else:
        for _item in by_lora_stream(model, bucket_bytes)():
            pass
    dist.barrier()
    dist.destroy_process_group()


def summary(model, stream, seconds: dict, extra: dict) -> dict:
    def over(one: str, other: str) -> list[float]:
        return quartiles([a / b for a, b in zip(seconds[one], seconds[other], strict=True)])

    rivals = [name for name in ("verl", "PEFT") if name in seconds]
    ratios = {f"{rival} over ours": over(rival, "ours") for rival in rivals}
    if dist.get_world_size() > 1:
        ratios["ours over gathered alone"] = over("ours", "gathered alone")
        ratios["ours, to one sender, over ours"] = over("ours, to one sender", "ours")
    ratios["ours, trained scope, over ours"] = over("ours, trained scope", "ours")
    return {
        "parameters": sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name),
        "bytes sent": stream.plan.num_bytes,
        "bytes gathered": stream.stats.traffic.gathered,
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "extra MiB": {name: round(statistics.median(values) / 2**20) for name, values in extra.items()},
        "ratios": ratios,
    }


def quartiles(values: list[float]) -> list[float]:
    return [round(q, 3) for q in statistics.quantiles(values, n=4)]


def show(num_ranks: int, result: dict) -> None:
    print(f"{num_ranks} ranks, {result['parameters'] / 1e6:.0f} M parameters, {result['bytes sent'] >> 20} MiB sent")
    for name, (low, median, high) in result["seconds"].items():
        print(f"  {name:<34} {median:.3f} s  [{low:.3f} {high:.3f}]  {result['extra MiB'][name]} MiB more")
    for name, (low, median, high) in result["ratios"].items():
        print(f"  {name:<34} {median:.2f}  [{low:.2f} {high:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--bucket-mib", type=int, default=16)
    args = parser.parse_args()
    found = {}
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results = torch.multiprocessing.get_context("spawn").SimpleQueue()
            arguments = (num_ranks, str(Path(folder) / "store"), args, results)
            torch.multiprocessing.spawn(serve, args=arguments, nprocs=num_ranks)
            found[num_ranks] = results.get()
        show(num_ranks, found[num_ranks])
    machine = {"cpu": _processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps({"benchmark": "fsdp", **machine, "bucket MiB": args.bucket_mib, "ranks": found}))


if __name__ == "__main__":
    main()
