"""What does a sync into an engine in other processes cost, beside the ways that trainers use today?

Ceiling: vLLM's own loading of the same tensors, which every way pays; the report tells it apart.
Rivals:  pickled RPC, one call            all merged tensors in one collective_rpc
         pickled RPC, a call per layer
         safetensors in /dev/shm          save_file, then vLLM's reload_weights
Each rival merges first, eagerly, as most trainers do.

    python benchmarks/bench_sync.py [--rounds 5] [--layers 16] [--hidden 1024]

A random Qwen3 of 285 M parameters in bfloat16 (the default), LoRA r=16 on q, v, o and down. All ways of one round are
measured in turn. In place is measured on a second engine, which keeps its weights as they were loaded.
"""

import argparse
import json
import os
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
# Before anything imports vLLM. Its processes find the extensions by this path.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
sys.path.insert(0, str(HERE))
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Trainer and engine share the cores here: idle OpenMP threads of the one would spin on the other's time.
    "OMP_WAIT_POLICY": "passive",
}.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
from bench_merge import _processor  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

import lora_stream  # noqa: E402

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


def make_checkpoint(directory: Path, layers: int, hidden: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32 * hidden,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def make_engine(directory: Path, extension: str):
    from vllm import LLM

    return LLM(
        str(directory),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        disable_log_stats=True,
        worker_extension_cls=extension,
        weight_transfer_config={"backend": "lora_stream"},
    )


def step(model) -> None:
    """What an optimizer does between two syncs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.02)


@torch.no_grad()
def merged_eagerly(model) -> list[tuple[str, torch.Tensor]]:
    """All tensors of the merged model, under checkpoint names."""
    tensors = []
    base = model.get_base_model()
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            continue
        prefix, is_target, _ = name.partition(".base_layer.")
        if is_target:
            delta = base.get_submodule(prefix).get_delta_weight("default")
            parameter = (parameter.float() + delta.float()).to(torch.bfloat16)
        tensors.append((name.replace(".base_layer.", "."), parameter))
    return tensors


def by_pickle(model, engine) -> None:
    engine.collective_rpc("load_pickled", args=(pickle.dumps(merged_eagerly(model)), True, True))
    assert engine.reset_prefix_cache()


def by_pickle_per_layer(model, engine) -> None:
    layers: dict[str, list] = {}
    for name, tensor in merged_eagerly(model):
        parts = name.split(".")
        layers.setdefault(parts[2] if parts[1] == "layers" else name, []).append((name, tensor))
    blobs = list(layers.values())
    for i, tensors in enumerate(blobs):
        engine.collective_rpc("load_pickled", args=(pickle.dumps(tensors), i == 0, i == len(blobs) - 1))
    assert engine.reset_prefix_cache()


def by_safetensors(model, engine, directory: Path) -> None:
    tensors = {name: tensor.detach().contiguous() for name, tensor in merged_eagerly(model)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    engine.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
    assert engine.reset_prefix_cache()


def measure(ways: dict, model, rounds: int) -> tuple[dict[str, list[float]], dict[str, list]]:
    """Seconds of each way, and what it returned, interleaved, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    reports: dict[str, list] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            step(model)
            begin = time.perf_counter()
            report = way()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
                reports[name].append(report)
    return seconds, reports


def quartiles(values: list[float]) -> list[float]:
    return [round(q, 3) for q in statistics.quantiles(values, n=4)]


def over(seconds: dict[str, list[float]], one: str, other: str) -> list[float]:
    return quartiles([a / b for a, b in zip(seconds[one], seconds[other], strict=True)])


def loads_alone(reports: list) -> list[float]:
    """The share of a sync that is not vLLM's own loading: merging and transport, as far as loading does not hide them."""
    return quartiles([1 - report.seconds_loading / report.seconds["total"] for report in reports])


def bench_layerwise(directory: Path, shm: Path, model, rounds: int) -> dict:
    engine = make_engine(directory, "sync_extension.Extension")
    ways = {
        "full": lambda: lora_stream.sync(model, engine, full=True),
        "touched": lambda: lora_stream.sync(model, engine),
        "pickled RPC": lambda: by_pickle(model, engine),
        "pickled RPC per layer": lambda: by_pickle_per_layer(model, engine),
        "safetensors": lambda: by_safetensors(model, engine, shm),
    }
    seconds, reports = measure(ways, model, rounds)
    # The rivals write to the engine behind our back; a touched sync that notices would be a full one.
    assert {report.scope for report in reports["touched"]} == {"trained"}
    engine.llm_engine.engine_core.shutdown()
    return {
        "bytes": {name: reports[name][0].num_bytes for name in ("full", "touched")},
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "ratios": {
            "pickled RPC over full": over(seconds, "pickled RPC", "full"),
            "pickled RPC per layer over full": over(seconds, "pickled RPC per layer", "full"),
            "safetensors over full": over(seconds, "safetensors", "full"),
            "touched over full": over(seconds, "touched", "full"),
        },
        "share of merge and transport": {name: loads_alone(reports[name]) for name in ("full", "touched")},
        "phases of a full sync": {
            phase: quartiles([report.seconds[phase] for report in reports["full"]])
            for phase in reports["full"][0].seconds
        },
    }


def bench_in_place(directory: Path, model, rounds: int) -> dict:
    engine = make_engine(directory, "sync_extension_plain.PlainExtension")
    ways = {
        "layerwise": lambda: lora_stream.sync(model, engine, base_loaded=True),
        "in place": lambda: lora_stream.sync(model, engine, in_place=True),
    }
    seconds, reports = measure(ways, model, rounds)
    engine.llm_engine.engine_core.shutdown()
    return {
        "bytes": {name: reports[name][0].num_bytes for name in ways},
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "ratios": {"in place over layerwise": over(seconds, "in place", "layerwise")},
        "share of merge and transport": {name: loads_alone(reports[name]) for name in ways},
    }


def show(result: dict) -> None:
    for part in ("ratios", "share of merge and transport", "seconds"):
        for name, (low, median, high) in result[part].items():
            print(f"  {part:<28} {name:<32} {median:.3f}  [{low:.3f} {high:.3f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        directory = Path(disk) / "model"
        make_checkpoint(directory, args.layers, args.hidden)
        shutil.copytree(directory, shm, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS))
        print(f"{num_parameters / 1e6:.0f} M parameters, {args.rounds} rounds; median [quartiles]", flush=True)
        layerwise = bench_layerwise(directory, Path(shm), model, args.rounds)
        print("engine as it is by default:")
        show(layerwise)
        in_place = bench_in_place(directory, model, args.rounds)
        print("engine that keeps its weights as they were loaded:")
        show(in_place)
    machine = {"cpu": _processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    print(
        json.dumps(
            {"benchmark": "sync", "parameters": num_parameters, **machine, "default": layerwise, "plain": in_place}
        )
    )


if __name__ == "__main__":
    main()
