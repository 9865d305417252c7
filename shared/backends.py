"""Which backend runs where nobody says: by the accelerator that this machine has.

Accelerators are looked for among device files, which takes no time and imports no framework. Only
the backend that is tried is imported; one that cannot run here is passed over, and the reason is
told.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from .config import Backend, Change, DeviceInfo, parse_device
from .errors import BackendUnavailable
from .worker import backend_module, is_installed

PCI = Path("/sys/bus/pci/devices")
DEV = Path("/dev")
GOOGLE = "0x1ae0"
"""PCI vendor of TPU chips, and of network cards and disks in Google's cloud."""
TPU_CHIPS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
"""PCI devices of TPU generations v2 to 7x, as jax/_src/hardware_utils.py lists them."""
ACCELERATORS = ("tpu", "cuda")
NVIDIA = ("nvidiactl", "dxg")
"""What an NVIDIA driver puts among the devices: on Linux, and in Linux on Windows."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend, the device that it is asked for, and why."""

    backend: Backend
    device: str
    why: str


def has_tpu(pci: Path = PCI, dev: Path = DEV) -> bool:
    """Whether a TPU chip is on the PCI bus, or a TPU driver offers one."""
    chips = (path.parent for path in pci.glob("*/vendor") if _word(path) == GOOGLE)
    return any(_word(chip / "device") in TPU_CHIPS for chip in chips) or any(
        dev.glob("accel[0-9]*")
    )


def has_nvidia(dev: Path = DEV) -> bool:
    """Whether an NVIDIA driver is loaded."""
    return any((dev / name).exists() for name in NVIDIA)


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def candidates(device: str, pci: Path = PCI, dev: Path = DEV) -> Iterator[Candidate]:
    """What `backend="auto"` tries for the option `device` (auto, cpu, cuda, tpu, cuda:1), best
    first.
    """
    kind, _ = parse_device(device)
    anything = kind == "auto"
    tpu, nvidia = has_tpu(pci, dev), has_nvidia(dev)
    if kind == "tpu" or (anything and tpu):
        yield Candidate("jax", "tpu" if anything else device, "runs TPUs")
    if kind == "cuda" or (anything and nvidia):
        yield Candidate("torch", "cuda" if anything else device, "is the faster one on NVIDIA GPUs")
        yield Candidate("jax", "cuda" if anything else device, "runs NVIDIA GPUs too")
    if kind == "cpu" or anything:
        seen = "" if kind == "cpu" or tpu or nvidia else "; no TPU and no NVIDIA driver was found"
        yield Candidate("torch", device, f"is the faster one on CPUs{seen}")
        yield Candidate("jax", "cpu" if anything else device, "runs CPUs too")


def find_backend(backend: str, device: str) -> tuple[Backend, DeviceInfo, list[Change]]:
    """The backend and device that run for the options `backend` and `device`, and what was chosen.

    Raises BackendUnavailable, ConfigError.
    """
    if backend != "auto":
        module = backend_module(backend)
        return cast(Backend, backend), module.find_device(device), []
    reasons: list[str] = []
    lost: list[str] = []
    """The reasons that cost an accelerator which this machine has."""
    for candidate in candidates(device):
        try:
            info: DeviceInfo = backend_module(candidate.backend).find_device(candidate.device)
        except BackendUnavailable as error:
            reasons.append(f"{candidate.backend} on {candidate.device} is not to be had: {error}")
            if parse_device(candidate.device)[0] in ACCELERATORS:
                lost.append(reasons[-1])
            continue
        why = "; ".join([f"{candidate.backend} {candidate.why}", *reasons])
        if lost and info.platform == "cpu":
            # Aloud: what a start fills in is told to those who ask for it.
            warnings.warn(
                f"device: what runs is the CPU: {'; '.join(lost)}. --device cpu says so before",
                stacklevel=2,
            )
        return candidate.backend, info, [Change("backend", backend, candidate.backend, why)]
    raise BackendUnavailable(f"backend: none runs here: {'; '.join(reasons)}")


def first_installed(device: str) -> Backend:
    """The backend that `find_backend("auto", device)` tries first of those that are installed.
    Imports neither.

    Where none is installed it is the best one, whose error says what to install.
    """
    backends = [candidate.backend for candidate in candidates(device)]
    return next((backend for backend in backends if is_installed(backend)), backends[0])
