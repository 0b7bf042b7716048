"""A stand-in for a vLLM engine with one worker, as far as a sync can tell it from one: layers that several tensors of a
checkpoint fill, a reload that puts back what is not complete, a prefix cache, sleep, restarts, and writers who tell nobody."""

import secrets
from collections import Counter, deque

import torch
from torch import nn

from lora_stream.ring import Receiver
from lora_stream.vllm import wire
from lora_stream.vllm.fingerprint import fingerprint, renew

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED["up_proj"] = "gate_up_proj"


class Weights(nn.Module):
    """A model's weights as vLLM lays them out: the rows of q, k and v in one parameter, those of gate and up in another."""

    def __init__(self, checkpoint: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers: dict[str, nn.Module] = {}
        self.parts: dict[str, set[str]] = {}  # of each layer: names of the tensors that fill it
        self.places: dict[str, tuple[str, str, slice]] = {}  # by such a name: its layer, parameter and rows
        rows: dict[tuple[str, str], list[torch.Tensor]] = {}
        for name, tensor in checkpoint.items():
            path, _, kind = name.rpartition(".")
            parent, _, leaf = path.rpartition(".")
            layer = f"{parent}.{FUSED.get(leaf, leaf)}"
            before = rows.setdefault((layer, kind), [])
            begin = sum(map(len, before))
            self.places[name] = layer, kind, slice(begin, begin + len(tensor))
            self.parts.setdefault(layer, set()).add(name)
            before.append(tensor)
        for (layer, kind), tensors in rows.items():
            if layer not in self.layers:
                self.layers[layer] = nn.Module()
                self.add_module(layer.replace(".", "/"), self.layers[layer])
            self.layers[layer].register_parameter(kind, nn.Parameter(torch.cat(tensors), requires_grad=False))

    def tensor(self, name: str) -> torch.Tensor:
        """The rows that the checkpoint's tensor fills."""
        layer, kind, rows = self.places[name]
        return getattr(self.layers[layer], kind).detach()[rows]

    def all(self) -> dict[str, torch.Tensor]:
        return {name: self.tensor(name).clone() for name in self.places}


class Engine:
    """vLLM's four calls, and what is around them. What a test does to it has a name of its own."""

    def __init__(self, checkpoint: dict[str, torch.Tensor]) -> None:
        """checkpoint: by the names and with the values that are on disk."""
        self.disk = {name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in checkpoint.items()}
        self.is_still = False
        self.fail_at: deque[int | None] = deque()  # for each of the next updates: at which tensor it fails
        self.fails: Counter[str] = Counter()  # how often each call is to fail
        self.restart()

    def restart(self) -> None:
        """On what is on disk."""
        self.weights = Weights(self.disk)
        self.receiver: Receiver | None = None
        self.instance = secrets.token_hex(8)
        self.num_updates, self.unsure = 0, set()
        self.is_open = self.is_still = self.is_paused_by_sender = False
        self.sleep_level = 0
        self.has_prefixes = False

    def sleep(self, level: int) -> None:
        self.sleep_level = level

    def wake_up(self) -> None:
        """After level 2 nothing of the weights is left."""
        if self.sleep_level == 2:
            for parameter in self.weights.parameters():
                parameter.data.normal_()
        self.sleep_level = 0

    def generate(self) -> None:
        """Leaves prefixes that were computed with the present weights."""
        self.has_prefixes = True

    def reload(self, checkpoint: dict[str, torch.Tensor]) -> None:
        """As `reload_weights` from a directory: nobody is told."""
        for name in self.weights.places:
            self.weights.tensor(name).copy_(checkpoint[name])
        self.has_prefixes = False

    def receive(self, checkpoint: dict[str, torch.Tensor]) -> None:
        """From another sender, by the same backend."""
        self._load(iter(checkpoint.items()), [], in_place=False)
        self.num_updates += 1
        self.unsure.clear()
        renew(self.weights)
        self.has_prefixes = False

    def write(self, name: str) -> None:
        """As a call into the worker that scales a weight."""
        self.weights.tensor(name).mul_(1.5)

    # vLLM's calls

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        question = "check" if "manifest" in init_info else "describe"
        self._call("tell" if init_info.get("paused") is not None else question)
        if self.receiver is None or self.receiver.name != init_info["region"]:
            self.receiver = None
            try:
                self.receiver = Receiver(init_info["region"])
            except OSError:
                return  # the sender finds that nobody has answered
        answer = {"question": init_info["question"], "is_open": self.is_open}
        if init_info.get("paused") is not None:
            self.is_paused_by_sender = init_info["paused"]
        elif "manifest" in init_info:
            try:
                self._check(init_info["manifest"], init_info["in_place"])
            except ValueError as error:
                answer["refused"] = str(error)
        else:
            answer |= {
                "dtype": "bfloat16",
                "fused_modules": [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]],
                "fingerprint": [self.instance, ["asleep"] if self.sleep_level else fingerprint(self.weights)],
                "num_updates": self.num_updates,
                "is_mixture": bool(self.unsure),
                "is_paused_by_sender": self.is_paused_by_sender,
                "num_workers": 1,
            }
        self.receiver.post(answer)

    def start_weight_update(self) -> None:
        self._call("start")
        assert not self.is_open, "an update is open already"
        self.is_open = True

    def update_weights(self, update_info: dict) -> None:
        assert self.is_open, "no update is open"
        assert self.is_still, "a forward pass would meet half of the weights"
        answer, taken = {"generation": update_info["generation"]}, []
        fail_at = self.fail_at.popleft() if self.fail_at else None
        try:
            self._check(update_info["manifest"], update_info["in_place"])
            self.receiver.accept(update_info["generation"], update_info["first"])
            metadata = wire.decode(update_info["manifest"])
            weights = self.receiver.tensors(metadata, deadline_s=update_info["deadline_s"])
            self._load(weights, taken, in_place=update_info["in_place"], fail_at=fail_at)
        except Exception as error:
            self.unsure.update(taken)
            self.receiver.post(answer | {"failed": str(error)})
            self.receiver.abort(update_info["generation"], str(error))
        else:
            renew(self.weights)
            self.num_updates += 1
            self.unsure.difference_update(taken)
            self.receiver.post(answer | {"seconds": 0.0, "seconds_waited": 0.0})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish")
        assert self.is_open, "no update is open"
        self.is_open = False

    def is_paused(self) -> bool:
        return self.is_still

    def pause(self) -> None:
        self._call("pause")
        self.is_still = True

    def resume(self) -> None:
        self._call("resume")
        self.is_still = False

    def reset_prefix_cache(self) -> bool:
        self._call("reset")
        self.has_prefixes = False
        return True

    def _call(self, name: str) -> None:
        if self.fails[name] > 0:
            self.fails[name] -= 1
            raise RuntimeError(f"{name} is broken")

    def _check(self, manifest: dict, in_place: bool) -> None:
        if self.sleep_level:
            raise ValueError("the engine sleeps")
        metadata = wire.decode(manifest)
        names = {meta.name for meta in metadata}
        for meta in metadata:
            if meta.name not in self.weights.places:
                raise ValueError(f"{meta.name}: the engine has no such tensor")
            if meta.shape != self.weights.tensor(meta.name).shape:
                raise ValueError(f"{meta.name}: the engine has another shape")
            missing = self.weights.parts[self.weights.places[meta.name][0]] - names
            if missing and not in_place:
                raise ValueError(f"{meta.name}: comes without {sorted(missing)}")

    def _load(self, weights, taken: list[str], *, in_place: bool, fail_at: int | None = None) -> None:
        """A layer is written when all that fills it has come; in place each tensor is."""
        aside: dict[str, dict[str, torch.Tensor]] = {}
        for i, (name, tensor) in enumerate(weights):
            if i == fail_at:
                raise MemoryError("no room")
            taken.append(name)
            layer = self.weights.places[name][0]
            waiting = aside.setdefault(layer, {})
            waiting[name] = tensor.clone()
            del tensor  # which lies in the sender's memory
            if in_place or waiting.keys() == self.weights.parts[layer]:
                for part, values in aside.pop(layer).items():
                    self.weights.tensor(part).copy_(values)
