"""Whether a worker's weights are still those of the last update: somebody may have reloaded them from disk, or written them.

update ──► renew: other elements are looked at from now on ──► fingerprint ──► the sender compares it at the next sync
"""

import hashlib
import itertools
import weakref

import torch
from torch import nn

from lora_stream.samples import Sample, bits_of

_samples: "weakref.WeakKeyDictionary[nn.Module, Sample]" = weakref.WeakKeyDictionary()
# What a linear layer of vLLM's CPU build computes with, numbered as seen: it packs the weight and drops it.
_packed: "weakref.WeakKeyDictionary[object, int]" = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def renew(model: nn.Module) -> None:
    """After an update."""
    _samples[model] = Sample()


def fingerprint(model: nn.Module) -> list[str]:
    """Of all vectors, which are small, of a sample of every larger parameter, and of who packed those that are packed."""
    if is_asleep():
        return ["asleep"]
    sample = _samples.setdefault(model, Sample())
    parameters = [parameter.detach() for parameter in model.parameters()]
    looked_at = [each.contiguous() if each.ndim <= 1 else sample.of(each) for each in parameters]
    digest = hashlib.sha256(bits_of(looked_at).numpy())
    packed = (getattr(module, "cpu_linear", None) for module in model.modules())
    digest.update(repr([_packed.setdefault(each, next(_numbers)) for each in packed if each is not None]).encode())
    return [sample.token, digest.hexdigest()]


def is_asleep() -> bool:
    """Whether sleep mode has taken the weights from the device; the CPU keeps them."""
    if not torch.cuda.is_available():
        return False
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    return allocator is not None and any(
        data.is_asleep for data in allocator.pointer_to_data.values() if data.tag == "weights"
    )
