"""Which GPU, or the CPU, a worker runs on."""

from __future__ import annotations

import torch

from ..shared.config import DeviceInfo, host_memory, parse_device
from ..shared.errors import BackendUnavailable, ConfigError
from ..shared.models.spec import Place


def find_device(device: str) -> DeviceInfo:
    """The torch device that `device` (auto, cpu, cuda, tpu, cuda:1) names. Raises
    BackendUnavailable.
    """
    kind, index = parse_device(device)
    if kind == "tpu":
        raise BackendUnavailable(
            "device: torch has no tpu device here; use the jax backend on TPUs"
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("device: torch has no cuda device here")
    cuda = kind == "cuda" or (kind == "auto" and torch.cuda.is_available())
    count = torch.cuda.device_count() if cuda else 1
    if index is not None and index >= count:
        raise BackendUnavailable(f"device: got {device}, the numbers here go from 0 to {count - 1}")
    if not cuda:
        return DeviceInfo("cpu", "cpu", host_memory())
    if count > 1 and index is None:
        # The thread's current one, and kept: other code of this process, JAX among it, may make
        # another one current later.
        index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index or 0)
    return DeviceInfo("cuda", properties.name, properties.total_memory, index)


def find_rank_device(device: str, place: Place) -> DeviceInfo:
    """The torch device of one of several ranks: each GPU of a machine has one of them. Raises
    BackendUnavailable, ConfigError.
    """
    found = find_device(device)
    if found.platform != "cuda":
        return found
    count = torch.cuda.device_count()
    if count < place.here.count:
        raise ConfigError(
            f"tensor_parallel_size: got {place.here.count}, this machine has {count} GPUs: each "
            "takes one of the ranks"
        )
    return find_device(f"cuda:{place.here.index}")
