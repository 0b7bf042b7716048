"""The CPU as a platform of verl, by verl's own way to add one: then its engines run here as they are."""

import contextlib
import types

import torch
from torch.distributed.fsdp import _init_utils
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase


class _Device(str):
    """A device to torch, and in verl's f"{name}:{id}" the number of one."""

    def __format__(self, spec):
        return "0"


_DEVICE = _Device("cpu")


@platform_manager.PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    # torch.cpu, and what it lacks of an accelerator's module
    device_module = types.SimpleNamespace(
        **{
            name: getattr(torch.cpu, name) for name in ("is_available", "synchronize", "current_device", "device_count")
        },
        empty_cache=lambda: None,
        memory_allocated=lambda *args: 0,
        memory_reserved=lambda *args: 0,
        mem_get_info=lambda *args: (1 << 30, 1 << 30),
    )

    def is_available(self):
        return True

    def current_device(self):
        return _DEVICE

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "NO_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


platform_manager.set_platform(PlatformCPU())

# verl has FSDP1 send its modules' states around, which torch refuses for modules on the CPU, but which gloo can.
_init_utils._check_module_states_for_sync_module_states = lambda states: None
