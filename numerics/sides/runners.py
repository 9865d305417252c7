"""What a backend offers to a comparison: the model's programs one by one, over its plan, with
taps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from ...ops import OpError, Plans
from ...ops.namespaces import namespace
from ...shared.config import DeviceInfo, ResolvedConfig
from ...shared.errors import BackendUnavailable, ConfigError
from ...shared.models import decoder
from ...shared.models.spec import Layer
from ...shared.step import StepInput
from ...shared.worker import backend_module
from .reference import cache_shapes, step_batch
from .subject import Subject, Target
from .taps import Declared

Device = Any
"""An array where the backend keeps it."""
TapValues = Sequence[tuple[Mapping[str, np.ndarray], tuple[np.ndarray, ...]] | None]
"""For each declared tap, the kept arguments and the outputs on the host; None for a tap that is
not kept.
"""
Program = str | Layer
"""`embed`, `finish`, `head`, or a kind of layer."""
OpFault = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong on purpose, in layer `layer` (None: in all layers, and before and after
    them).

    `ops` wrap the functions of some ops; they get the framework's array namespace `xp` first.
    `weights` changes the weights of a layer, `tables` those of the rotary embedding, `batch` the
    fields of a step.
    """

    name: str
    ops: Mapping[str, Callable[[Any, Callable[..., Any]], Callable[..., Any]]] = field(
        default_factory=dict
    )
    weights: Callable[[dict[str, np.ndarray], Any], dict[str, np.ndarray]] | None = None
    tables: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    batch: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None
    layer: int | None = None

    def at(self, layer: int) -> bool:
        """Whether the fault is in a layer; -1 is outside of layers."""
        return self.layer is None or self.layer == layer


class Runner(ABC):
    """One backend on one device. Arrays stay there; `download` brings one to the host.

    `embed`, `layer`, `finish` and `head` run compiled programs in which the taps are extra outputs.
    `prepare` says which taps each program has, and compiles it; nothing is compiled afterwards.
    """

    framework: str

    def __init__(
        self, subject: Subject, target: Target, config: ResolvedConfig, device: DeviceInfo,
        plans: Plans,
        fault: Fault | None,
    ) -> None:  # fmt: skip
        self.target, self.config, self.device, self.plans = target, config, device, plans
        self._model = subject.model
        self.spec = decoder.model_of(subject.model)
        self._top, self._true_layers = self._load(subject)
        self._true_tables = decoder.rotary_tables(subject.model, config.max_model_len)
        # By descriptor, pages and name, which ends with whether the program has a fault.
        self._programs: dict[tuple[Any, int, tuple[Any, ...]], Callable[..., Any]] = {}
        self._taps: Mapping[Program, Sequence[Declared]] = {}
        self.plant(fault)

    @abstractmethod
    def _load(self, subject: Subject) -> tuple[dict[str, Device], list[dict[str, Device]]]:
        """The weights on the device: those outside of layers, and those of each layer."""

    @abstractmethod
    def prepare(self, step: StepInput, taps: Mapping[Program, Sequence[Declared]]) -> None:
        """Compile the programs of the step's descriptor with these taps, by program."""

    @abstractmethod
    def upload(self, x: np.ndarray) -> Device:
        """An array on the device."""

    @abstractmethod
    def download(self, x: Device) -> np.ndarray:
        """An array on the host, in its own dtype."""

    @abstractmethod
    def by_op(
        self,
        index: int,
        hidden: Device,
        residual: Device,
        kv: Device,
        replaced: Mapping[str, Callable[..., Any]],
    ) -> tuple[tuple[Device, Device, Device], TapValues]:
        """One layer as its ops one by one, nothing compiled together, with other functions at
        some taps.
        """

    def plant(self, fault: Fault | None) -> None:
        """Have this fault, or none, from now on: for tests of the comparison itself. Programs
        without one are kept.
        """
        self.fault = fault = fault or Fault("none")
        self._top_faulty = fault.at(-1) and bool(fault.ops)
        self._layers = list(self._true_layers)
        if fault.weights is not None:
            for index in range(len(self._layers)):
                if fault.at(index):
                    changed = fault.weights(dict(self.weights(index)), index)
                    self._layers[index] = {name: self.upload(x) for name, x in changed.items()}
        self._tables = (
            fault.tables(*self._true_tables) if fault.tables is not None else self._true_tables
        )
        self.share(self)

    def share(self, other: Runner) -> None:
        """Take over the programs without a fault of a runner of the same model, sizes and plan."""
        self._programs = {
            key: program for key, program in other._programs.items() if not key[-1][-1]
        }

    def weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """The weights of a layer as the device holds them; -1: those outside of layers."""
        found = self._top if layer < 0 else self._layers[layer]
        return {name: self.download(x) for name, x in found.items()}

    def allocate(self, pages: int) -> None:
        """Say how many pages, the scratch page included, a layer's cache has. Comes before
        `prepare`.
        """
        self._pages = pages

    def kv_shape(self, layer: int) -> tuple[int, ...]:
        """The cache of a layer."""
        return cache_shapes(self._model, self._pages, self.config.page_size)[layer]

    def begin(self, step: StepInput) -> None:
        """Take the step that the next programs belong to."""
        self._step = step
        self._ids = self.upload(np.array(step.field("token_ids")))
        self._batch = {False: self._fields(step, faulty=False)}
        changes = self.fault.batch is not None or self.fault.tables is not None
        self._batch[True] = self._fields(step, faulty=True) if changes else self._batch[False]

    def _fields(self, step: StepInput, *, faulty: bool) -> decoder.Batch:
        tables = self._tables if faulty else self._true_tables
        fields = step_batch(step, tables, self.fault.batch if faulty else None).arrays()
        angles = {name: self.upload(fields.pop(name)) for name in ("cos", "sin")}
        batch = decoder.Batch(**angles, **self._placed(step, fields))
        return batch.within(step.descriptor.max_query_len)

    def _placed(self, step: StepInput, fields: Mapping[str, np.ndarray]) -> dict[str, Device]:
        """A step's metadata where the programs read it."""
        return {name: self.upload(x) for name, x in fields.items()}

    def _faults(self, faulty: bool) -> dict[str, OpFault]:
        """The fault's ops for this framework."""
        xp = namespace(self.framework)
        return {name: partial(make, xp) for name, make in self.fault.ops.items()} if faulty else {}

    def inputs(self, layer: int) -> Mapping[str, np.ndarray]:
        """What a layer is given of the step besides weights and activations, as the device holds
        it: the fields of `decoder.Batch`.
        """
        return {
            name: self.download(x) for name, x in self._batch[self.fault.at(layer)].arrays().items()
        }

    def _run(self, name: tuple[Any, ...], *arguments: Any) -> tuple[Any, TapValues]:
        out, values = self._programs[self._step.descriptor, self._pages, name](*arguments)
        return out, self._host(values)

    def _host(self, values: Sequence[Any]) -> TapValues:
        return [
            (
                {name: self.download(x) for name, x in tap[0].items()},
                tuple(self.download(x) for x in tap[1]),
            )
            if tap
            else None
            for tap in values
        ]

    def embed(self) -> tuple[Device, TapValues]:
        """Hidden states [tok dim]. Layers that have inputs of their own get those of this call."""
        (hidden, inputs), values = self._run(("embed", self._top_faulty), self._top, self._ids)
        self._batch = {
            faulty: batch._replace(layer_input=inputs) for faulty, batch in self._batch.items()
        }
        return hidden, values

    def layer(
        self, index: int, hidden: Device, residual: Device, kv: Device
    ) -> tuple[tuple[Device, Device, Device], TapValues]:
        """One layer. The arrays that are given stay as they are."""
        here = self.fault.at(index)
        name = ("layer", self.spec.layers[index], here and bool(self.fault.ops))
        return self._run(name, self._layers[index], hidden, residual, kv, self.batch_of(index))

    def batch_of(self, index: int) -> decoder.Batch:
        """What a layer is given of the step."""
        return self._batch[self.fault.at(index)].of_layer(index)

    def finish(self, hidden: Device, residual: Device) -> tuple[Device, TapValues]:
        """Finished hidden states [tok dim]."""
        return self._run(("finish", self._top_faulty), self._top, hidden, residual)

    def head(self, rows: Device) -> tuple[Device, TapValues]:
        """Logits [tok vocab]."""
        return self._run(("head", self._top_faulty), self._top, rows)

    def close(self) -> None:
        """Free the device of weights and programs."""
        self._programs.clear()
        self._layers, self._true_layers, self._top = [], [], {}


RUNNERS = {
    "jax": ("jax_runner", "JaxRunner"),
    "torch": ("torch_runner", "TorchRunner"),
    "torch-xla": ("xla_runner", "XlaRunner"),
}


def create_runner(subject: Subject, target: Target, fault: Fault | None = None) -> Runner:
    """A runner for `target`, its weights loaded. Raises ConfigError, ModelError,
    BackendUnavailable.
    """
    device = backend_module(target.backend).find_device(target.device)
    config = subject.resolved(target)
    try:
        plans = backend_module(target.backend, "plans").make_plans(subject.model, config)
    except OpError as error:
        raise ConfigError(f"target {target}: {' '.join(str(error).split())}") from error
    try:
        # Loaded by name: whoever imports this package must not get both frameworks with it.
        room, name = RUNNERS[target.backend]
        kind = getattr(import_module(f".{room}", __package__), name)
    except ImportError as error:
        raise BackendUnavailable(f"backend {target.backend}: {error}") from error
    runner: Runner = kind(subject, target, config, device, plans, fault)
    return runner


def plan_of(plans: Any, kind: str, program: Program) -> Any:
    """The plan that a program runs under, in steps of a kind."""
    if isinstance(program, str):
        return plans["sample" if program == "head" else kind]
    return plans.of(kind, program)
