"""Run by torch.distributed.run with TRL in the path: TRL's own VLLMGeneration syncs a sharded model on every rank, patched, to
stand-ins for engines, because its own need a GPU or are tested in tests/programs.

    trl_ranks.py OUT

OUT/RANK.pt: what each way delivered on the rank, and what a dithered stream of the unsharded model yields.
"""

import sys
import types
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from lora_stream.integrations import trl as drop_in
from tests import oracle
from tests.models import llama, sent, with_lora


class Engine:
    """Takes weights as an engine does."""

    def __init__(self):
        self.tensors, self.woken = {}, []

    def load_weights(self, weights):
        self.tensors.update(weights)

    def wake_up(self, tags):
        self.woken += tags


class Client(VLLMClient):
    """TRL's client of a server that runs vLLM's nccl backend."""

    def __init__(self, backend):
        self.backend, self.tensors, self.metadata, self.resets = backend, {}, None, 0

    def get_server_info(self):
        return {"weight_transfer_config": self.backend and {"backend": self.backend}}

    def update_named_params(self, metadata, named_params):
        self.metadata = metadata
        for name, tensor in named_params:
            self.tensors[name] = tensor.clone()

    def reset_prefix_cache(self):
        self.resets += 1


def generation_of(model, accelerator, **attributes):
    made = object.__new__(VLLMGeneration)  # its constructor starts an engine
    made.model, made.accelerator = model, accelerator
    for name, value in {"enable_sleep_mode": False, "_weight_metadata": None, **attributes}.items():
        setattr(made, name, value)
    return made


def main():
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    is_main = accelerator.is_main_process
    torch.manual_seed(3)
    model = with_lora(llama(), modules_to_save=["lm_head"])
    found = {"unsharded": sent(model)}
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)

    with drop_in.patch():
        engine = Engine()
        colocated = generation_of(model, accelerator, mode="colocate", llm=engine, enable_sleep_mode=True)
        colocated.sync_weights()
        found["colocated"] = engine.tensors
        found["woken"] = (engine.woken, colocated._llm_weights_sleeping)
        found["scope"] = colocated.report.scope

        client = Client("nccl") if is_main else None
        server = generation_of(model, accelerator, mode="server", vllm_client=client)
        server.sync_weights()
        if is_main:
            found["nccl"] = client.tensors
            told = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in client.tensors.items()]
            found["metadata is iteration"] = told == client.metadata
            found["resets"] = client.resets

        # Without LoRA TRL's own goes on: every tensor in the parameters' dtype.
        plain = generation_of(llama(), accelerator, mode="server", vllm_client=Client("nccl") if is_main else None)
        plain._dist = types.SimpleNamespace(is_fsdp=False, gather_params=lambda _: warnings.catch_warnings())
        plain.sync_weights()
        if is_main:
            found["plain"] = {tensor.dtype for tensor in plain.vllm_client.tensors.values()}

        found["communicators"] = {}
        for backend in ("lora_stream", "nccl"):
            try:
                Client(backend).init_communicator("cpu")
                found["communicators"][backend] = "none asked for"
            except AttributeError as error:  # TRL's own asks the server for its size, and the stand-in has none
                found["communicators"][backend] = str(error)
    torch.save(found, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
