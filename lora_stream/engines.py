"""The seam to an engine: what `sync` needs of one, and which objects are taken for one."""

import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from lora_stream.plan import ParamMeta


class Engine(Protocol):
    """The seam to an engine: what `sync` needs of one."""

    wire_dtype: torch.dtype | None  # what the engine wants on the wire; None: no wish
    fused_modules: Sequence[Sequence[str]]

    def check(self, metadata: Sequence[ParamMeta]) -> None:
        """Raise ValueError, the engine untouched, if it could not load exactly this."""

    def fingerprint(self) -> object:
        """Equal to what it was after a sync as long as nobody else has changed the engine's weights."""

    def update(
        self, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], weight_version: str | None
    ) -> None:
        """Load the weights, drop every cache of the old ones, set the version. On an error, put back what can be."""


def engine_of(engine: object) -> Engine:
    # An LLM object exists only where its module was imported; lora_stream itself does not import vLLM for this.
    llm_class = getattr(sys.modules.get("vllm.entrypoints.llm"), "LLM", None)
    if llm_class is not None and isinstance(engine, llm_class):
        from lora_stream.vllm.llm import LLMEngine

        return LLMEngine(engine)
    if callable(getattr(engine, "load_weights", None)):
        return _Loader(engine)
    raise ValueError(
        f"engine must be a vllm.LLM or have a method load_weights(iterable), got {type(engine).__module__}."
        f"{type(engine).__name__}"
    )


class _Loader:
    """Any object with ``load_weights``. What it checks and how it fails is its own affair."""

    wire_dtype = None
    fused_modules = ()

    def __init__(self, engine) -> None:
        self._engine = engine

    def check(self, metadata: Sequence[ParamMeta]) -> None:
        pass

    def fingerprint(self) -> object:
        return None

    def update(
        self, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], weight_version: str | None
    ) -> None:
        self._engine.load_weights(weights)
