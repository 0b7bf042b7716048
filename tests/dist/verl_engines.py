"""Run by torch.distributed.run with verl in the path: verl's own FSDP engine streams its merged weights, as it is and patched,
and saves a checkpoint, patched.

    verl_engines.py WORK CASE ...

Of every case WORK/CASE/ holds verl.safetensors and ours.safetensors (what each stream yielded on rank 0, verl's tied tensors and
all), whole.pt (the unsharded parameters, as the model names them), facts.json, and the checkpoint.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import benchmarks.peers.verl_cpu  # noqa: F401  before verl looks for a device
from lora_stream.integrations import verl as drop_in
from tests.dist.verl_cases import CASES
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.trainer.config import CheckpointConfig
from verl.utils import fsdp_utils
from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp import transformer_impl


def make_engine(directory, case):
    torch.manual_seed(7)
    adapter = directory / "adapter"
    engine = transformer_impl.FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(directory / "base"),
            load_tokenizer=False,
            override_config={"attn_implementation": "eager"},
            enable_gradient_checkpointing=False,
            use_remove_padding=False,
            lora_rank=4,
            lora_alpha=6,
            target_modules=["q_proj", "v_proj", "down_proj"],
            lora={"merge": case.get("merge", True)},
            lora_adapter_path=str(adapter) if adapter.exists() else None,
        ),
        engine_config=FSDPEngineConfig(
            strategy=case["strategy"],
            param_offload=case.get("param_offload", False),
            model_dtype=case.get("model_dtype", "fp32"),
            use_torch_compile=False,
            use_orig_params=case.get("use_orig_params", False),
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        checkpoint_config=CheckpointConfig(save_contents=["model"], load_contents=["model"]),
    )
    engine.initialize()
    with torch.no_grad():  # what trains gets values, A and B and copies, on every rank its own
        torch.manual_seed(dist.get_rank())
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.normal_(std=0.2)
    return engine


def whole(module):
    """Every parameter unsharded, by the name that PEFT's model gives it."""
    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
                for name, parameter in module.named_parameters(remove_duplicate=False)
                if "_flat_param" not in name
            }
    return {name: p.full_tensor().detach() for name, p in module.named_parameters(remove_duplicate=False)}


def counted(module, name, counts):
    original = getattr(module, name)

    def call(*args, **kwargs):
        counts[name] = counts.get(name, 0) + 1
        return original(*args, **kwargs)

    setattr(module, name, call)
    return lambda: setattr(module, name, original)


def collect(engine, facts, label):
    """What the engine's stream yields, and how often the model was loaded and offloaded for it."""
    counts = facts.setdefault("calls", {})[label] = {}
    modules = (fsdp_utils, transformer_impl)
    names = ("load_fsdp_model_to_gpu", "offload_fsdp_model_to_cpu")
    restore = [counted(module, name, counts) for module in modules for name in names]
    try:
        stream, peft_config = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
        tensors = {name: tensor.detach().clone() for name, tensor in stream}
    finally:
        for undo in restore:
            undo()
    facts.setdefault("peft_config", {})[label] = peft_config
    return tensors


def main():
    work, *wishes = sys.argv[1:]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for wish in wishes:
        directory, facts = Path(work) / wish, {}
        engine = make_engine(directory, CASES[wish])
        before = whole(engine.module)
        results = {"verl": collect(engine, facts, "verl")}
        with drop_in.patch():
            try:
                results["ours"] = collect(engine, facts, "ours")
            except ValueError as error:
                facts["refused"] = str(error)
            handler = CheckpointHandler(
                engine, torch.utils.data.DataLoader([]), default_local_dir=str(directory / "saved"), lora_train_meta={"r": 1}
            )
            handler.train_dataloader = type("Loader", (), {"state_dict": staticmethod(dict)})
            handler.save_checkpoint(1)
            if CASES[wish].get("merge", True):
                engine._qat_enabled = True
                try:
                    collect(engine, facts, "qat")
                except ValueError as error:
                    facts["qat"] = str(error)
                engine._qat_enabled = False
        results["verl again"] = collect(engine, facts, "verl again")
        facts["is verl's own again"] = all(
            torch.equal(tensor, results["verl again"][name]) for name, tensor in results["verl"].items()
        )
        after = whole(engine.module)
        facts["same model"] = all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        if dist.get_rank() == 0:
            torch.save(before, directory / "whole.pt")
            (directory / "facts.json").write_text(json.dumps(facts, default=str))
            for label in ("verl", "ours"):
                if label in results:
                    tensors = {name: tensor.contiguous().clone() for name, tensor in results[label].items()}
                    save_file(tensors, directory / f"{label}.safetensors")
        dist.barrier()
    # Last, because it stays: the setting that has every worker import a module.
    settings = {"path": str(Path(work) / wishes[0] / "base"), "load_tokenizer": False}
    attention = {"attn_implementation": "eager"}
    HFModelConfig(
        **settings, override_config=attention, external_lib="lora_stream.integrations.verl_external_lib"
    )
    home = transformer_impl.FSDPEngine.get_per_tensor_param.__module__
    (Path(work) / f"external_lib_{dist.get_rank()}").write_text(home)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
