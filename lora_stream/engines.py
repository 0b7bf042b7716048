"""The seam to an engine: what `sync` needs of one, and which objects are taken for one."""

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from lora_stream.merged_weights import FreshStaging, Staging
from lora_stream.packing import ALIGNMENT
from lora_stream.plan import ParamMeta
from lora_stream.ring import DEADLINE_S, NUM_SLOTS, SLOT_BYTES
from lora_stream.vllm.channel import Channel
from lora_stream.vllm.clients import CallsClient, EngineClient, LLMClient, RayClient, ServerClient
from lora_stream.vllm.remote import RemoteEngine

STAGING_BYTES = NUM_SLOTS * SLOT_BYTES


class Engine(Protocol):
    """The seam to an engine: what `sync` needs of one."""

    wire_dtype: torch.dtype | None  # what the engine wants on the wire; None: no wish
    fused_modules: Sequence[Sequence[str]]
    is_pristine: bool  # nobody has sent it weights since it loaded its checkpoint, as far as it knows
    is_mixture: bool  # an update broke off in it, and nobody has mended that
    seconds_loading: float | None  # of the last update, what the engine itself took; None: not known

    def check(self, metadata: Sequence[ParamMeta]) -> None:
        """Raise ValueError, the engine untouched, if it could not load exactly this."""

    def fingerprint(self) -> object:
        """Equal to what it was after a sync as long as nobody else has changed the engine's weights."""

    def pause(self) -> None:
        """Before an update: hold the engine still, unless it is."""

    def resume(self) -> None:
        """After it: undo what pause() did."""

    @property
    def staging(self) -> Staging:
        """Where a stream for `update` must put its tensors."""

    def update(
        self, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], weight_version: str | None
    ) -> None:
        """Load the weights, drop every cache of the old ones, set the version. On an error, put back what can be."""


def engine_of(
    engine: object, *, in_place: bool = False, deadline_s: float = DEADLINE_S, staging_bytes: int = STAGING_BYTES
) -> Engine:
    """The engine that an object stands for; the arguments are those of `sync`."""
    client: EngineClient
    # An LLM object exists only where its module was imported; lora_stream itself does not import vLLM for this.
    llm_class = getattr(sys.modules.get("vllm.entrypoints.llm"), "LLM", None)
    if llm_class is not None and isinstance(engine, llm_class):
        from lora_stream.vllm.llm import LLMEngine, is_in_this_process

        if is_in_this_process(engine):
            return LLMEngine(engine, in_place=in_place)
        client = LLMClient(engine)
    elif isinstance(engine, ServerClient | RayClient):
        client = engine
    elif type(engine).__module__.split(".")[0] == "ray":
        client = RayClient([engine])
    elif all(callable(getattr(engine, name, None)) for name in _CALLS):
        client = CallsClient(engine)
    elif callable(getattr(engine, "load_weights", None)):
        if in_place:
            raise ValueError("in_place is for vLLM; an object with load_weights decides itself where it writes")
        return _Loader(engine)
    else:
        raise ValueError(
            "engine must be a vllm.LLM, the URL of a vLLM server, a Ray actor that wraps an engine, a client with vLLM's "
            "weight-transfer calls, or have a method load_weights(iterable); got "
            f"{type(engine).__module__}.{type(engine).__name__}"
        )
    return RemoteEngine(client, _channel_to(engine, deadline_s, staging_bytes), in_place=in_place)


_CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")

# Shared memory stays between syncs, for as long as the engine's object does.
_channels: "weakref.WeakKeyDictionary[object, Channel]" = weakref.WeakKeyDictionary()
_servers: dict[str, ServerClient] = {}


def by_url(engine: object) -> object:
    """The engine; for the URL of a server the client that stands for it from now on."""
    if not isinstance(engine, str):
        return engine
    if engine not in _servers:
        _servers[engine] = ServerClient(engine)
    return _servers[engine]


def _channel_to(engine: object, deadline_s: float, staging_bytes: int) -> Channel:
    slot_bytes = staging_bytes // NUM_SLOTS // ALIGNMENT * ALIGNMENT
    if slot_bytes <= 0:
        raise ValueError(f"staging_bytes must be at least {NUM_SLOTS * ALIGNMENT}, got {staging_bytes}")
    if deadline_s <= 0:
        raise ValueError(f"deadline_s must be positive, got {deadline_s}")
    channel = _channels.get(engine)
    if channel is None or channel.slot_bytes != slot_bytes:
        channel = _channels[engine] = Channel(num_slots=NUM_SLOTS, slot_bytes=slot_bytes)
    channel.deadline_s = deadline_s
    return channel


class _Loader:
    """Any object with ``load_weights``. What it checks and how it fails is its own affair."""

    wire_dtype = None
    fused_modules = ()
    is_pristine = True
    is_mixture = False
    seconds_loading = None

    def __init__(self, engine) -> None:
        self._engine = engine
        self.staging = FreshStaging()

    def check(self, metadata: Sequence[ParamMeta]) -> None:
        pass

    def fingerprint(self) -> object:
        return None

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def update(
        self, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], weight_version: str | None
    ) -> None:
        self._engine.load_weights(weights)
