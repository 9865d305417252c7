"""Finds devices: those of this machine, and those of a TPU topology that is only described."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from ..shared.backends import has_nvidia, has_tpu
from ..shared.config import DeviceInfo, host_memory, parse_device
from ..shared.errors import BackendUnavailable, ConfigError
from ..shared.waiting import waiting
from .chips import BY_KIND, CHIPS, OTHER_NAMES, Chip

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}
WITH_TPU = "tpu,cpu"
"""The platforms that JAX chooses when it is imported where a TPU is to be seen, as
jax/_src/cloud_tpu_init.py does.
"""
FIBERS = "--fibers_default_thread_stack_size"
FIBER_STACK = 1 << 20
"""Bytes. To generate code for SparseCores (scatters of the penalties), libtpu 0.0.42.1 needs a
frame of 86 KiB; now and then it does so on a thread with a stack of 64 KiB, and the process ends.
"""

_failure = ""
"""Why the TPU did not start, where this process goes on with the CPU alone."""


def find_device(device: str) -> DeviceInfo:
    """The JAX device that `device` (auto, cpu, cuda, tpu, tpu:1) names. Raises BackendUnavailable.

    A number is the device's place among those of its kind that this process has.
    """
    kind, index = parse_device(device)
    local = local_devices(kind)
    if index is not None and index >= len(local):
        raise BackendUnavailable(
            f"device: got {device}, the numbers here go from 0 to {len(local) - 1}"
        )
    found = local[index or 0]
    platform = "cuda" if found.platform in ("gpu", "cuda") else found.platform
    memory = (
        host_memory()
        if platform == "cpu"
        else int((found.memory_stats() or {}).get("bytes_limit", 0))
    )
    return DeviceInfo(platform, found.device_kind, memory, index)


def local_devices(kind: str) -> list[jax.Device]:
    """The JAX devices of a kind (auto, cpu, cuda, tpu) that this process has. Raises
    BackendUnavailable.
    """
    return [device for device in devices(kind) if device.process_index == jax.process_index()]


def devices_of(device: DeviceInfo) -> list[jax.Device]:
    """The devices that a worker on `device` may use: that one if it has a number, else all of
    its kind.
    """
    if device.index is None:
        return devices(device.platform)
    return [local_devices(device.platform)[device.index]]


def memory_of(device: jax.Device) -> tuple[int, int]:
    """Bytes that a device lets programs use, and those in use."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)


def compiler_memory(kind: str) -> int:
    """Bytes that the compiler lets a program use on a TPU of a kind; 0 if it is not known."""
    chip = BY_KIND.get(OTHER_NAMES.get(kind, kind))
    return 0 if chip is None else chip.hbm


def devices(device: str) -> list[jax.Device]:
    """All JAX devices of the kind that `device` names, of all processes. Raises
    BackendUnavailable.
    """
    global _failure
    if device != "tpu":
        leave_out_libtpu()
    deepen_fibers()
    # JAX would take the CPU, and say so to nobody, where a TPU does not start.
    wanted = "tpu" if device == "auto" and _expects_tpu() else device
    try:
        if wanted == "tpu" and _failure:
            raise RuntimeError(_failure)
        with _waiting_for_the_others():
            return jax.devices(PLATFORMS[wanted] if wanted != "auto" else None)
    except RuntimeError as error:
        if device == "cpu" and jax.config.jax_platforms and _nobody_chose():
            # JAX starts a TPU that it sees for any device, and gives none where that fails.
            jax.config.update("jax_platforms", "cpu")
            _failure = str(error)
            return devices(device)
        why = str(error).splitlines()[0]
        hint = ". A TPU is to be seen; --device cpu runs without it" if wanted != device else ""
        raise BackendUnavailable(
            f"device: JAX has no {wanted} device here ({why}){hint}"
        ) from error


def _nobody_chose() -> bool:
    """Whether nobody has chosen platforms, or JAX alone."""
    given = jax.config.jax_platforms
    return not given or (given == WITH_TPU and not os.environ.get("JAX_PLATFORMS"))


def _expects_tpu() -> bool:
    """Whether JAX is to run on a TPU: one is to be seen, and nobody has chosen platforms."""
    return has_tpu() and (bool(_failure) or _nobody_chose())


def _waiting_for_the_others() -> AbstractContextManager[None]:
    """For a look at the devices: the first one, where processes were joined, ends when all of
    these have looked at theirs.
    """
    if not jax.distributed.is_initialized():
        return nullcontext()
    return waiting(lambda: "the devices of all processes that were joined")


def leave_out_libtpu(pci: Path = Path("/sys/bus/pci/devices")) -> None:
    """Keep JAX from starting an installed libtpu where there is no TPU: that asks the network and
    prints complaints.

    Does nothing if somebody has chosen platforms (JAX_PLATFORMS), or where a TPU is to be seen.
    """
    if jax.config.jax_platforms or find_spec("libtpu") is None or has_tpu(pci):
        return
    nvidia = any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)) and has_nvidia()
    jax.config.update("jax_platforms", "cuda,cpu" if nvidia else "cpu")


def deepen_fibers() -> None:
    """Have libtpu's fibers run on stacks that its own compiler fits in. Call it before libtpu
    starts.
    """
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    # Of releases that do not know the flag, it would end the process.
    if FIBERS not in given and libtpu_is_known():
        os.environ["LIBTPU_INIT_ARGS"] = f"{given} {FIBERS}={FIBER_STACK}".strip()


def libtpu_is_known() -> bool:
    """Whether libtpu is a release whose own options were tried; others may not have them."""
    return find_spec("libtpu") is not None and version("libtpu").startswith("0.0.42.")


@dataclass(frozen=True, slots=True)
class Topology:
    """The devices of a TPU slice that nobody has to own."""

    name: str
    chip: Chip
    devices: list[Any]

    @property
    def info(self) -> DeviceInfo:
        """One of its devices."""
        return DeviceInfo("tpu", self.devices[0].device_kind, self.chip.hbm)

    @property
    def hosts(self) -> int:
        """Machines that hold its chips: one process each."""
        return len({device.process_index for device in self.devices})


def topology(name: str) -> Topology:
    """The slice that `name` describes: v4, v5e, v5p, v6e or tpu7x, a colon, and its shape in chips,
    such as v6e:2x4.

    A single chip is 1x1; up to eight v5e or v6e chips count as one host. Raises ConfigError and
    BackendUnavailable.
    """
    generation, colon, shape = name.partition(":")
    sides = shape.split("x")
    if (
        generation not in CHIPS
        or not colon
        or not all(side.isdigit() and int(side) > 0 for side in sides)
    ):
        raise ConfigError(
            f"topology: got {name!r}, must be one of {', '.join(CHIPS)}, a colon and a shape such "
            "as 2x2"
        )
    flat = generation in ("v5e", "v6e")
    wanted = 2 if flat else 3
    if len(sides) != wanted:
        raise ConfigError(f"topology: got {name!r}, {generation} slices have {wanted} sides")
    if find_spec("libtpu") is None:
        raise BackendUnavailable(
            "topology: libtpu is not installed here: pip install 'twinfer[tpu]'"
        )
    # libtpu describes a slice from these, without a metadata server, when no chip is there.
    described = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    # Compiling holds no chip, so any number of processes may do it at a time.
    described |= {"TPU_WORKER_ID": "0", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    for variable, value in described.items():
        os.environ.setdefault(variable, value)
    deepen_fibers()
    options: dict[str, Any] = {"chip_config_name": "megacore"} if generation == "v4" else {}
    chips = [int(side) for side in sides]
    if flat and chips in ([1, 1], [2, 4]):
        options["chips_per_host_bounds"] = [*chips, 1]
    elif not flat and chips == [1, 1, 1]:
        options["chips_per_host_bounds"] = chips
    try:
        described_slice = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **options
        )
    except Exception as error:  # libtpu raises several kinds for a shape that it does not know
        raise ConfigError(
            f"topology: got {name!r}, libtpu knows no such slice ({str(error).splitlines()[0]})"
        ) from error
    return Topology(name, CHIPS[generation], list(described_slice.devices))
