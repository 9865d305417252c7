"""What a backend offers to a comparison: the model's programs one by one, over its plan, with taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from ..ops import OpError, Plans
from ..shared.config import DeviceInfo, ResolvedConfig
from ..shared.errors import BackendUnavailable, ConfigError
from ..shared.step import StepInput
from ..shared.worker import backend_module
from .subject import Subject, Target
from .taps import Declared

Device = Any
"""An array where the backend keeps it."""
TapValues = Sequence[tuple[Mapping[str, np.ndarray], tuple[np.ndarray, ...]] | None]
"""For each declared tap, the kept arguments and the outputs on the host; None for a tap that is not kept."""
OpFault = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong on purpose, in layer `layer` (None: in all layers, and before and after them).

    `ops` wrap the functions of some ops; they get the framework's array namespace `xp` first. `weights` changes the
    weights of a layer, `tables` those of the rotary embedding, `batch` the fields of a step.
    """

    name: str
    ops: Mapping[str, Callable[[Any, Callable[..., Any]], Callable[..., Any]]] = field(default_factory=dict)
    weights: Callable[[dict[str, np.ndarray], Any], dict[str, np.ndarray]] | None = None
    tables: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    batch: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None
    layer: int | None = None

    def at(self, layer: int) -> bool:
        """Whether the fault is in a layer; -1 is outside of layers."""
        return self.layer is None or self.layer == layer


class Runner(Protocol):
    """One backend on one device. Arrays stay there; `download` brings one to the host.

    `embed`, `layer`, `finish` and `head` run compiled programs in which the taps are extra outputs. `prepare` says
    which taps each program has, and compiles it; nothing is compiled afterwards.
    """

    target: Target
    config: ResolvedConfig
    device: DeviceInfo
    plans: Plans
    fault: Fault

    def prepare(self, step: StepInput, taps: Mapping[str, Sequence[Declared]]) -> None:
        """Compile the programs of the step's descriptor with these taps, by program."""
        ...

    def allocate(self, pages: int) -> None:
        """Say how many pages, the scratch page included, a layer's cache has. Comes before `prepare`."""
        ...

    def begin(self, step: StepInput) -> None:
        """Take the step that the next programs belong to."""
        ...

    def plant(self, fault: Fault | None) -> None:
        """Have this fault, or none, from now on: for tests of the comparison itself."""
        ...

    def share(self, other: Any) -> None:
        """Take over the programs without a fault of a runner of the same model, sizes and plan."""
        ...

    def upload(self, x: np.ndarray) -> Device:
        """An array on the device."""
        ...

    def download(self, x: Device) -> np.ndarray:
        """An array on the host, in its own dtype."""
        ...

    def inputs(self, layer: int) -> Mapping[str, np.ndarray]:
        """What a layer is given of the step besides weights and activations, as the device holds it."""
        ...

    def embed(self) -> tuple[Device, TapValues]:
        """Hidden states [tok dim]."""
        ...

    def layer(
        self, index: int, hidden: Device, residual: Device, kv: Device
    ) -> tuple[tuple[Device, Device, Device], TapValues]:
        """One layer. The arrays that are given stay as they are."""
        ...

    def by_op(
        self, index: int, hidden: Device, residual: Device, kv: Device, replaced: Mapping[str, Callable[..., Any]]
    ) -> tuple[tuple[Device, Device, Device], TapValues]:
        """One layer as its ops one by one, nothing compiled together, with other functions at some taps."""
        ...

    def fields(self, index: int) -> Mapping[str, np.ndarray]:
        """What a layer reads of the step, as the device holds it: the fields of `decoder.Batch`."""
        ...

    def finish(self, hidden: Device, residual: Device) -> tuple[Device, TapValues]:
        """Finished hidden states [tok dim]."""
        ...

    def head(self, rows: Device) -> tuple[Device, TapValues]:
        """Logits [tok vocab]."""
        ...

    def weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """The weights of a layer as the device holds them; -1: those outside of layers."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...


ROOMS = {"jax": "jax_runner", "torch": "torch_runner"}


def create_runner(subject: Subject, target: Target, fault: Fault | None = None) -> Runner:
    """A runner for `target`, its weights loaded. Raises ConfigError, ModelError, BackendUnavailable."""
    device = backend_module(target.backend).find_device(target.device)
    config = subject.resolved(target)
    try:
        plans = backend_module(target.backend, "plans").make_plans(subject.model, config)
    except OpError as error:
        raise ConfigError(f"target {target}: {' '.join(str(error).split())}") from error
    try:
        # Loaded by name: whoever imports this package must not get both frameworks with it.
        room = import_module(f".{ROOMS[target.backend]}", __package__)
    except ImportError as error:
        raise BackendUnavailable(f"backend {target.backend}: {error}") from error
    runner: Runner = room.make_runner(subject, target, config, device, plans, fault)
    return runner


def no_progress(what: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""
