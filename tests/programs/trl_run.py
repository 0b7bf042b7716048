"""Run with TRL in the path: TRL's own GRPOTrainer takes some steps with the drop-in in place, and tells what came of it.

    trl_run.py colocate|URL BASE OUT

Into OUT goes logprobs.json, what the colocated engine computes at the end; merged.safetensors, the stream of the live model then;
facts.json.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from vllm import LLM

import tests.conftest  # noqa: F401  the engine's environment, before anything imports vLLM
from lora_stream.integrations import trl as drop_in
from tests.models import sent, state
from tests.vllm import live


def small_llm(**kwargs):
    """As TRL makes it, but for what takes minutes on a CPU, and for logprobs that can be compared."""
    small = {"enforce_eager": True, "logprobs_mode": "raw_logprobs", "max_model_len": 256, "disable_log_stats": True}
    return LLM(**{**kwargs, **small})


def reward(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]


def main():
    warnings.simplefilter("ignore")
    where, base, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    vllm_generation.LLM = small_llm
    mode = {"vllm_mode": "colocate"} if where == "colocate" else {"vllm_mode": "server", "vllm_server_base_url": where}
    config = GRPOConfig(
        output_dir=str(out / "trainer"),
        use_vllm=True,
        vllm_gpu_memory_utilization=0.3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=0.05,
        max_steps=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        **mode,
    )
    syncs = []
    with drop_in.patch():
        trainer = GRPOTrainer(
            model=base,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7", "w8 w9"] * 4}),
            peft_config=LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]),
        )
        generation = trainer.vllm_generation
        sync_weights = generation.sync_weights

        def watched():
            sync_weights()
            syncs.append(generation.report.scope)

        generation.sync_weights = watched
        trainer.train()
        before = state(trainer.model)
        generation.sync_weights()
    after = state(trainer.model)
    facts = {
        "syncs": syncs,
        "merged": len(generation.report.merged),
        "moved": generation.report.fidelity.moved > 0,
        "same model": before["layers"] == after["layers"]
        and all(torch.equal(value[0], after["tensors"][name][0]) for name, value in before["tensors"].items()),
        "steps": trainer.state.global_step,
        "is TRL's own again": vllm_generation.VLLMGeneration.sync_weights.__module__.startswith("trl."),
    }
    save_file(sent(trainer.model), out / "merged.safetensors")
    if where == "colocate":
        (out / "logprobs.json").write_text(json.dumps(live.logprobs(generation.llm)))
    (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
