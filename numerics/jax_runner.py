"""The JAX side of a comparison: each program compiled ahead of time with its taps as outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Op, Plan, Plans
from ..ops.namespaces import namespace
from ..ops.plan import COMPOSITION
from ..shared.config import DeviceInfo, ResolvedConfig
from ..shared.models import decoder
from ..shared.step import StepInput
from ..tpu.sharding import make_mesh
from ..tpu.weights import load_weights
from .runners import Fault, TapValues, no_progress
from .subject import Subject, Target
from .taps import Declared, Tapped

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}


def make_runner(
    subject: Subject, target: Target, config: ResolvedConfig, device: DeviceInfo, plans: Plans, fault: Fault | None
) -> JaxRunner:
    """A runner on a JAX device."""
    return JaxRunner(subject, target, config, device, plans, fault)


class JaxRunner:
    """See `Runner`."""

    def __init__(
        self, subject: Subject, target: Target, config: ResolvedConfig, device: DeviceInfo, plans: Plans,
        fault: Fault | None,
    ) -> None:  # fmt: skip
        self.target, self.config, self.device, self.plans = target, config, device, plans
        self._model = subject.model
        self._where = jax.devices(PLATFORMS[device.platform])[0]
        windows = subject.model.layer_windows
        segments = [(i, i + 1, window) for i, window in enumerate(windows)]
        weights = load_weights(
            subject.folder, config.load_format, subject.model, decoder.abstract(subject.model), segments,
            jnp.dtype(config.dtype), config.seed, make_mesh([self._where], 1), no_progress,
        )  # fmt: skip
        self._true_layers = [
            {name: jax.device_put(x[0], self._where) for name, x in segment.items()}
            for segment in weights.pop("segments")
        ]
        self._top = {name: jax.device_put(x, self._where) for name, x in weights.items()}
        self._true_tables = decoder.rotary_tables(subject.model, config.max_model_len)
        self._programs: dict[Any, Any] = {}
        self._single: dict[Any, Any] = {}
        self._taps: Mapping[str, Sequence[Declared]] = {}
        self.plant(fault)

    def plant(self, fault: Fault | None) -> None:
        """Have this fault from now on. Programs without a fault stay compiled."""
        self.fault = fault = fault or Fault("none")
        self._top_faulty = fault.at(-1) and bool(fault.ops)
        self._layers = list(self._true_layers)
        if fault.weights is not None:
            for index in range(len(self._layers)):
                if fault.at(index):
                    changed = fault.weights(dict(self.weights(index)), index)
                    self._layers[index] = {name: self.upload(x) for name, x in changed.items()}
        self._tables = fault.tables(*self._true_tables) if fault.tables is not None else self._true_tables
        self.share(self)

    def share(self, other: JaxRunner) -> None:
        """Take over the programs without a fault of a runner of the same model, sizes and plan."""
        self._programs = {key: program for key, program in other._programs.items() if not key[-1][-1]}

    def upload(self, x: np.ndarray) -> jax.Array:
        """An array on the device."""
        return jax.device_put(x, self._where)

    def download(self, x: jax.Array) -> np.ndarray:
        """An array on the host."""
        return np.asarray(x)

    def weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """Weights on the host."""
        found = self._top if layer < 0 else self._layers[layer]
        return {name: np.asarray(x) for name, x in found.items()}

    def prepare(self, step: StepInput, taps: Mapping[str, Sequence[Declared]]) -> None:
        """Compile the programs of the step's descriptor."""
        self.begin(step)
        self._taps = taps
        hidden = jax.ShapeDtypeStruct((step.descriptor.tokens, self._model.hidden_size), jnp.dtype(self.config.dtype))
        jobs: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            ("embed", self._top_faulty): (self._embed, (self._top, self._ids)),
            ("finish", self._top_faulty): (self._finish, (self._top, hidden, hidden)),
            ("head", self._top_faulty): (self._head, (self._top, hidden)),
        }
        kv = jax.ShapeDtypeStruct(self.kv_shape(step), jnp.dtype(self.config.dtype))
        for index, window in enumerate(self._model.layer_windows):
            faulty = self.fault.at(index) and bool(self.fault.ops)
            arguments = (self._layers[index], hidden, hidden, kv, self._batch[False])
            jobs["layer", window, faulty] = (partial(self._layer, window, faulty), arguments)
        for name, (function, arguments) in jobs.items():
            key = (step.descriptor, self._pages, name)
            if key not in self._programs:
                lowered = jax.jit(function).lower(*arguments)
                # As the worker compiles: a rounding that a contract states must happen.
                self._programs[key] = lowered.compile(compiler_options={"xla_allow_excess_precision": False})

    def kv_shape(self, step: StepInput) -> tuple[int, ...]:
        """The cache of a layer."""
        return (self._pages, self.config.page_size, 2 * self._model.num_kv_heads, self._model.head_dim)

    def allocate(self, pages: int) -> None:
        """Say how many pages, the scratch page included, a layer's cache has."""
        self._pages = pages

    def begin(self, step: StepInput) -> None:
        """Take a step."""
        self._step = step
        self._ids = self.upload(np.array(step.field("token_ids")))
        self._batch = {False: self._fields(step, faulty=False)}
        changes = self.fault.batch is not None or self.fault.tables is not None
        self._batch[True] = self._fields(step, faulty=True) if changes else self._batch[False]

    def _fields(self, step: StepInput, *, faulty: bool) -> decoder.Batch:
        names = ("positions", "slots", "page_table", "query_start", "kv_lens", "counts")
        fields = {name: np.array(step.field(name)) for name in names}
        if faulty and self.fault.batch is not None:
            fields = self.fault.batch(fields)
        positions = fields.pop("positions")
        cos, sin = (table[positions] for table in (self._tables if faulty else self._true_tables))
        return decoder.Batch(self.upload(cos), self.upload(sin), **{n: self.upload(x) for n, x in fields.items()})

    def _bound(self, tapped: Tapped) -> Any:
        return self.plans[self._step.descriptor.kind].bind(tapped.wrap)

    def _tapped(self, program: str, faulty: bool = False, replaced: Mapping[str, Any] | None = None) -> Tapped:
        xp = namespace("jax")
        faults = {name: partial(make, xp) for name, make in self.fault.ops.items()} if faulty else {}
        return Tapped(self._taps[program], faults=faults, replaced=replaced or {})

    def _embed(self, top: Any, ids: jax.Array) -> Any:
        tapped = self._tapped("embed", self._top_faulty)
        return decoder.embed(self._bound(tapped), top, ids), tapped.values

    def _layer(
        self, window: int, faulty: bool, weights: Any, hidden: Any, residual: Any, kv: Any, batch: Any,
    ) -> Any:  # fmt: skip
        tapped = self._tapped("layer", faulty)
        function, model = decoder.layer_function(self._model), self._model
        query_len = self._step.descriptor.max_query_len
        out = function(self._bound(tapped), model, weights, hidden, residual, kv, batch, window, query_len)
        return out, tapped.values

    def _finish(self, top: Any, hidden: jax.Array, residual: jax.Array) -> Any:
        tapped = self._tapped("finish", self._top_faulty)
        return decoder.finish(self._bound(tapped), self._model, top, hidden, residual), tapped.values

    def _head(self, top: Any, rows: jax.Array) -> Any:
        tapped = self._tapped("head", self._top_faulty)
        return decoder.head(self.plans["sample"].bind(tapped.wrap), top, rows), tapped.values

    def _run(self, name: Any, *arguments: Any) -> tuple[Any, TapValues]:
        out, values = self._programs[self._step.descriptor, self._pages, name](*arguments)
        return out, [self._host(tap) for tap in values]

    @staticmethod
    def _host(tap: Any) -> Any:
        if not tap:
            return None
        kept, outputs = tap
        return {name: np.asarray(x) for name, x in kept.items()}, tuple(np.asarray(x) for x in outputs)

    def inputs(self, layer: int) -> Mapping[str, np.ndarray]:
        """What a layer is given of the step."""
        return {name: self.download(x) for name, x in self._batch[self.fault.at(layer)]._asdict().items()}

    def embed(self) -> tuple[jax.Array, TapValues]:
        """Hidden states."""
        return self._run(("embed", self._top_faulty), self._top, self._ids)

    def layer(self, index: int, hidden: Any, residual: Any, kv: Any) -> tuple[Any, TapValues]:
        """One layer."""
        here = self.fault.at(index)
        name = ("layer", self._model.layer_windows[index], here and bool(self.fault.ops))
        return self._run(name, self._layers[index], hidden, residual, kv, self._batch[here])

    def by_op(
        self, index: int, hidden: Any, residual: Any, kv: Any, replaced: Mapping[str, Callable[..., Any]]
    ) -> tuple[Any, TapValues]:
        """One layer, each op compiled for itself."""
        here, model, plan = self.fault.at(index), self._model, self.plans[self._step.descriptor.kind]
        tapped = self._tapped("layer", here and bool(self.fault.ops), replaced)
        ops = plan.bind(lambda op, f: tapped.wrap(op, self._alone(plan, op, f)))
        given = self._layers[index], hidden, residual, kv, self._batch[here], model.layer_windows[index]
        out = decoder.layer_function(model)(ops, model, *given, self._step.descriptor.max_query_len)
        return out, [self._host(tap) for tap in tapped.values]

    def _alone(self, plan: Plan, op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        """An op as a program; what is composed of ops stays as it is."""
        key = plan.hash, op.name
        if plan[op.name].provider == COMPOSITION:
            return function
        if key not in self._single:
            self._single[key] = jax.jit(
                lambda *args, **kwargs: function(*args, **kwargs),
                static_argnums=[i for i, n in enumerate(op.signature.parameters) if n in op.static_parameters],
                static_argnames=op.static_parameters,
                compiler_options={"xla_allow_excess_precision": False},
            )
        return self._single[key]

    def fields(self, index: int) -> Mapping[str, np.ndarray]:
        """What a layer reads of the step."""
        return {name: np.asarray(x) for name, x in self._batch[self.fault.at(index)]._asdict().items()}

    def finish(self, hidden: Any, residual: Any) -> tuple[jax.Array, TapValues]:
        """Finished hidden states."""
        return self._run(("finish", self._top_faulty), self._top, hidden, residual)

    def head(self, rows: Any) -> tuple[jax.Array, TapValues]:
        """Logits."""
        return self._run(("head", self._top_faulty), self._top, rows)

    def close(self) -> None:
        """Drop weights and programs."""
        self._programs.clear()
        self._layers, self._true_layers, self._top = [], [], {}
