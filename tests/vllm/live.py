"""Engines for the tests of this folder. Imports vLLM: import it after `pytest.importorskip`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

SIZES = {
    "vocab_size": 1021,  # not a multiple of vLLM's padding
    "hidden_size": 128,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
PROMPTS = [list(range(1, 40)), list(range(500, 511))]


def make_llm(directory: Path, dtype: str, **kwargs) -> LLM:
    return LLM(
        str(directory),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        **kwargs,
    )


def shut_down(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()


def logprobs(llm: LLM, prompts=PROMPTS) -> list:
    """Everything the engine computes for the prompts: logprobs of their tokens and of a greedy continuation."""
    sampling = SamplingParams(
        max_tokens=6, temperature=0, logprobs=3, prompt_logprobs=2, detokenize=False, ignore_eos=True
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [
        [{token: entry.logprob for token, entry in position.items()} for position in positions]
        for output in outputs
        for positions in (output.prompt_logprobs[1:], output.outputs[0].logprobs)
    ]


@dataclass
class Setup:
    directory: Path
    dtype: torch.dtype
    llm: LLM

    def base(self) -> torch.nn.Module:
        """The model that the engine was started on, in a trainer."""
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=self.dtype).eval()


SETUPS = {
    "bfloat16, tied, through the backend": (
        torch.bfloat16,
        True,
        {"weight_transfer_config": {"backend": "lora_stream"}},
    ),
    "float32, untied, biases, through load_weights": (torch.float32, False, {}),
}


def start(kind: str, directory: Path) -> Setup:
    """An engine of the kind, on a random model that is saved in `directory`."""
    dtype, tied, kwargs = SETUPS[kind]
    torch.manual_seed(1)
    if tied:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.to(dtype).save_pretrained(directory)
    llm = make_llm(directory, str(dtype).removeprefix("torch."), **kwargs)
    return Setup(directory, dtype, llm)
