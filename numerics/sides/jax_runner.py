"""The JAX side of a comparison: each program compiled ahead of time with its taps as outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...ops import Op, Plan
from ...ops.plan import COMPOSITION
from ...shared.models import decoder
from ...shared.models.blocks import single_blocks
from ...shared.models.spec import Layer
from ...shared.progress import silent
from ...shared.step import StepInput
from ...tpu.sharding import make_mesh
from ...tpu.weights import load_weights
from .runners import Program, Runner, TapValues
from .subject import Subject
from .taps import Declared, Tapped

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}


class JaxRunner(Runner):
    """See `Runner`."""

    framework = "jax"

    def _load(self, subject: Subject) -> tuple[dict[str, jax.Array], list[dict[str, jax.Array]]]:
        self._where = jax.devices(PLATFORMS[self.device.platform])[0]
        self._single: dict[Any, Any] = {}
        blocks = single_blocks(subject.model.num_layers)
        weights = load_weights(
            subject.folder, self.config.load_format, subject.model,
            decoder.parameters_of(subject.model), blocks,
            jnp.dtype(self.config.dtype), self.config.seed, make_mesh([self._where], 1), silent,
        )  # fmt: skip
        layers = [
            {name: jax.device_put(x[0], self._where) for name, x in of_layer.items()}
            for (of_layer,) in weights.pop("blocks")
        ]
        return {name: jax.device_put(x, self._where) for name, x in weights.items()}, layers

    def upload(self, x: np.ndarray) -> jax.Array:
        """An array on the device."""
        return jax.device_put(x, self._where)

    def download(self, x: jax.Array) -> np.ndarray:
        """An array on the host."""
        return np.asarray(x)

    def prepare(self, step: StepInput, taps: Mapping[Program, Sequence[Declared]]) -> None:
        """Compile the programs of the step's descriptor."""
        self.begin(step)
        self._taps = taps
        hidden = jax.ShapeDtypeStruct(
            (step.descriptor.tokens, self._model.hidden_size), jnp.dtype(self.config.dtype)
        )
        jobs: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            ("embed", self._top_faulty): (self._embed, (self._top, self._ids)),
            ("finish", self._top_faulty): (self._finish, (self._top, hidden, hidden)),
            ("head", self._top_faulty): (self._head, (self._top, hidden)),
        }
        size = self.spec.input_size
        inputs = jax.ShapeDtypeStruct((step.descriptor.tokens, size), hidden.dtype)
        for index, spec in enumerate(self.spec.layers):
            faulty = self.fault.at(index) and bool(self.fault.ops)
            kv = jax.ShapeDtypeStruct(self.kv_shape(index), hidden.dtype)
            batch = self._batch[False]._replace(layer_input=inputs if size else None)
            arguments = (self._layers[index], hidden, hidden, kv, batch)
            jobs["layer", spec, faulty] = (partial(self._layer, spec, faulty), arguments)
        for name, (function, arguments) in jobs.items():
            key = (step.descriptor, self._pages, name)
            if key not in self._programs:
                lowered = jax.jit(function).lower(*arguments)
                # As the worker compiles: a rounding that a contract states must happen.
                self._programs[key] = lowered.compile(
                    compiler_options={"xla_allow_excess_precision": False}
                )

    def _bound(self, tapped: Tapped) -> Any:
        return self.plans[self._step.descriptor.kind].bind(tapped.wrap)

    def _tapped(
        self, program: Program, faulty: bool = False, replaced: Mapping[str, Any] | None = None
    ) -> Tapped:
        return Tapped(self._taps[program], faults=self._faults(faulty), replaced=replaced or {})

    def _embed(self, top: Any, ids: jax.Array) -> Any:
        tapped = self._tapped("embed", self._top_faulty)
        given = self._bound(tapped), self.spec, top, ids
        hidden = decoder.embed(*given)
        return (hidden, decoder.layer_input(*given, hidden)), tapped.values

    def _layer(
        self, spec: Layer, faulty: bool, weights: Any, hidden: Any, residual: Any, kv: Any,
        batch: decoder.Batch,
    ) -> Any:  # fmt: skip
        tapped, d = self._tapped(spec, faulty), self._step.descriptor
        ops = self.plans.of(d.kind, spec).bind(tapped.wrap)
        stream, batch = decoder.Stream(hidden, residual), batch.within(d.max_query_len)
        stream, kv = decoder.layer(ops, spec, weights, stream, kv, batch)
        return (*stream, kv), tapped.values

    def _finish(self, top: Any, hidden: jax.Array, residual: jax.Array) -> Any:
        tapped = self._tapped("finish", self._top_faulty)
        stream = decoder.Stream(hidden, residual)
        return decoder.finish(self._bound(tapped), self.spec, top, stream), tapped.values

    def _head(self, top: Any, rows: jax.Array) -> Any:
        tapped = self._tapped("head", self._top_faulty)
        return decoder.head(
            self.plans["sample"].bind(tapped.wrap), self.spec, top, rows
        ), tapped.values

    def by_op(
        self,
        index: int,
        hidden: Any,
        residual: Any,
        kv: Any,
        replaced: Mapping[str, Callable[..., Any]],
    ) -> tuple[Any, TapValues]:
        """One layer, each op compiled for itself."""
        here, spec = self.fault.at(index), self.spec.layers[index]
        plan = self.plans.of(self._step.descriptor.kind, spec)
        tapped = self._tapped(spec, here and bool(self.fault.ops), replaced)
        ops = plan.bind(lambda op, f: tapped.wrap(op, self._alone(plan, op, f)))
        stream = decoder.Stream(hidden, residual)
        stream, kv = decoder.layer(ops, spec, self._layers[index], stream, kv, self.batch_of(index))
        return (*stream, kv), self._host(tapped.values)

    def _alone(self, plan: Plan, op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        """An op as a program; what is composed of ops stays as it is."""
        key = plan.hash, op.name
        if plan[op.name].provider == COMPOSITION:
            return function
        if key not in self._single:
            self._single[key] = jax.jit(
                lambda *args, **kwargs: function(*args, **kwargs),
                static_argnums=[
                    i for i, n in enumerate(op.signature.parameters) if n in op.static_parameters
                ],
                static_argnames=op.static_parameters,
                compiler_options={"xla_allow_excess_precision": False},
            )
        return self._single[key]
