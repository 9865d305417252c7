"""Finds torch-xla's device, and makes sure that the process runs as the ops' contracts say.

The runtime of torch-xla starts once in a process, on one kind of device and with one set of flags.
What is not as it must be by then is an error.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import version

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from ..shared.backends import has_tpu
from ..shared.config import DeviceInfo, host_memory, parse_device
from ..shared.errors import BackendUnavailable
from . import GIVEN_DEVICE

RELEASE = "2.9"
"""The release of both torch and torch-xla: what is called here is not all public."""
EXCESS = "--xla_allow_excess_precision"
"""XLA may keep float32 between two ops unless this is false, and a rounding that a contract states
must happen.
"""
PLATFORMS = {"cpu": "CPU", "tpu": "TPU"}


def find_device(device: str) -> DeviceInfo:
    """The XLA device that `device` (auto, cpu, tpu, tpu:1) names. Raises BackendUnavailable."""
    kind, index = parse_device(device)
    check_release(version("torch"), version("torch_xla"))
    if kind == "cuda":
        raise BackendUnavailable(
            "device: torch-xla has no cuda device here; use the torch or the jax backend on NVIDIA "
            "GPUs"
        )
    if kind == "auto":
        kind = "tpu" if has_tpu() else "cpu"
    elif kind == "tpu" and not has_tpu():
        raise BackendUnavailable("device: torch-xla has no tpu device here")
    start(kind)
    count = xr.addressable_device_count()
    if index is not None and index >= count:
        raise BackendUnavailable(f"device: got {device}, the numbers here go from 0 to {count - 1}")
    if kind == "cpu":
        return DeviceInfo("cpu", "cpu", host_memory(), index)
    memory = xm.get_memory_info(str(place_of(index)))
    return DeviceInfo(kind, "TPU", int(memory["bytes_limit"]), index)


def check_release(of_torch: str, of_torch_xla: str) -> None:
    """Raise BackendUnavailable unless torch and torch-xla are those that this room is written for.

    A torch-xla is built for one release of torch.
    """
    for name, found in (("torch", of_torch), ("torch_xla", of_torch_xla)):
        if not found.startswith(f"{RELEASE}."):
            raise BackendUnavailable(
                f"backend torch-xla: {name} is {found}, allowed is {RELEASE}: "
                "pip install 'twinfer[torch-xla]', in an environment of its own"
            )


def place_of(index: int | None) -> torch.device:
    """The torch device of a number; None is the first."""
    return torch.device(f"xla:{index or 0}")


@cache
def start(kind: str) -> None:
    """Start the runtime on a kind of device, if that was not done. Raises BackendUnavailable."""
    wanted = PLATFORMS[kind]
    if GIVEN_DEVICE not in (None, wanted):
        raise BackendUnavailable(
            f"device: got {kind}, and PJRT_DEVICE is {GIVEN_DEVICE} in this process, which decides "
            "where torch-xla runs; leave it out, or start another process"
        )
    os.environ["PJRT_DEVICE"] = wanted
    flags = os.environ.get("XLA_FLAGS", "")
    if EXCESS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {EXCESS}=false".strip()
    # bfloat16 passes are what a TPU makes of a float32 product unless it is asked for more.
    torch_xla._XLAC._xla_set_mat_mul_precision("highest")
    found = xm.xla_device_hw(place_of(None))
    if found != wanted:
        raise BackendUnavailable(
            f"device: got {kind}, and torch-xla runs on {found} in this process already"
        )
    check_rounding()


def check_rounding() -> None:
    """Raise BackendUnavailable if XLA leaves out roundings between ops in this process."""
    x, y = (torch.tensor([number], dtype=torch.bfloat16) for number in (256.0, 1.0))
    total = x.to(place_of(None)) + y.to(place_of(None))
    # 257 has nine digits, bfloat16 eight.
    if total.to(torch.float32).cpu().item() != 256.0:
        raise BackendUnavailable(
            f"XLA_FLAGS: got {os.environ.get('XLA_FLAGS', '')!r}, with which XLA leaves out "
            f"roundings between ops; it must say {EXCESS}=false before torch-xla runs anything"
        )
