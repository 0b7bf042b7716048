"""What does a merge from files into files cost, beside copying the same files and beside PEFT?

Ceiling: the base's weights copied and the adapter read, once left to the page cache and once flushed to the disk, as ours is.
Rival:   PEFT's merge_and_unload and save_pretrained, which flush nothing. Beside it, to compare like with like, ours with the
         flushing taken out.

    python benchmarks/bench_merge_checkpoint.py [--rounds 3] [--layers 24] [--directory DIR]

A random Qwen2-0.5B (494 M parameters, tied) in bfloat16 and a LoRA r=16 on all linear layers. Every run is a process of its own,
the ways take turns; seconds are without imports, extra memory is how far the process's resident set rose above what it was
after them, mapped files included. Ends in one JSON line.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lora_stream.bench.measuring import processor

WAYS = ("copy", "copy, flushed", "lora_stream", "lora_stream, not flushed", "PEFT")


def make(directory: Path, layers: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(directory / "base")
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.02)
    model.save_pretrained(directory / "adapter")


def prepare(way: str):
    """The work, its imports done."""
    if way.startswith("copy"):
        from safetensors.torch import load_file

        def copy(directory: Path, out: Path) -> None:
            shutil.copytree(directory / "base", out)
            if way.endswith("flushed"):
                for path in out.iterdir():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            load_file(directory / "adapter" / "adapter_model.safetensors")

        return copy
    import peft
    import torch
    import transformers
    from transformers import Qwen2ForCausalLM  # noqa: F401 - transformers imports what is asked for, then

    if way == "PEFT":

        def by_peft(directory: Path, out: Path) -> None:
            model = transformers.AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.bfloat16)
            peft.PeftModel.from_pretrained(model, directory / "adapter").merge_and_unload().save_pretrained(out)

        return by_peft
    from lora_stream.checkpoint import merge

    if way.endswith("not flushed"):
        os.fsync = os.fdatasync = lambda descriptor: None

    return lambda directory, out: merge(directory / "adapter", out, base=directory / "base")


def run_one(way: str, directory: Path) -> dict:
    work, out = prepare(way), directory / "out"
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    begin = time.perf_counter()
    work(directory, out)
    seconds, peak = time.perf_counter() - begin, _status("VmHWM")
    shutil.rmtree(out)
    return {"seconds": seconds, "extra_mib": (peak - before) >> 20, "peak_mib": peak >> 20}


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--directory", type=Path, help="where to work, on the disk that is of interest")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_one(options.one, options.directory)))
        return
    runs: dict[str, list[dict]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        make(directory, options.layers)
        size = (directory / "base" / "model.safetensors").stat().st_size
        for i in range(options.rounds + 1):
            for way in WAYS:
                os.sync()  # what the way before has left must not slow this one
                command = [sys.executable, __file__, "--one", way, "--directory", str(directory)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                if i:  # the first round warms the page cache
                    runs[way].append(json.loads(done.stdout.splitlines()[-1]))
    report(runs, size)


def report(runs: dict[str, list[dict]], size: int) -> None:
    def median(way: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[way])

    print(f"{size / 1e6:.0f} MB of weights\n")
    print("| way | seconds | spread | time over ours | extra MiB |")
    print("|---|---|---|---|---|")
    ours = median("lora_stream", "seconds")
    for way, found in runs.items():
        times = [run["seconds"] for run in found]
        spread = f"{min(times):.2f}-{max(times):.2f}"
        seconds = median(way, "seconds")
        print(f"| {way} | {seconds:.2f} | {spread} | {seconds / ours:.2f} | {median(way, 'extra_mib'):.0f} |")
    ratios = {
        "over_copy_flushed": ours / median("copy, flushed", "seconds"),
        "over_copy": ours / median("copy", "seconds"),
        "peft_over_ours": median("PEFT", "seconds") / ours,
        "peft_over_ours_not_flushed": median("PEFT", "seconds") / median("lora_stream, not flushed", "seconds"),
        "extra_memory_of_peft": median("lora_stream", "extra_mib") / median("PEFT", "extra_mib"),
        "peak_memory_of_peft": median("lora_stream", "peak_mib") / median("PEFT", "peak_mib"),
    }
    print()
    print(
        json.dumps({"benchmark": "merge_checkpoint", "processor": processor(), "bytes": size, **ratios, "runs": runs})
    )


if __name__ == "__main__":
    main()
