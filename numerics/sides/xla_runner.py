"""The torch-xla side of a comparison: each program traced and compiled by XLA, with its taps as
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...gpu.recording import DTYPES
from ...ops import Op, Plan
from ...ops.namespaces.torch_ import from_numpy, to_numpy
from ...ops.plan import COMPOSITION
from ...shared.models import decoder
from ...shared.models.spec import Layer
from ...shared.progress import silent
from ...shared.step import StepInput
from ...xla.device import place_of
from ...xla.traced import Program as Traced
from ...xla.traced import trace
from ...xla.weights import load_weights
from .runners import Program, Runner, TapValues, plan_of
from .subject import Subject
from .taps import Declared, Tapped


class XlaRunner(Runner):
    """See `Runner`."""

    framework = "torch"

    def _load(
        self, subject: Subject
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        self._where = place_of(self.device.index)
        self._single: dict[Any, Traced] = {}
        config = self.config
        return load_weights(
            subject.folder, config.load_format, subject.model, DTYPES[config.dtype], config.seed,
            self._where, silent,
        )  # fmt: skip

    def upload(self, x: np.ndarray) -> torch.Tensor:
        """A tensor on the device."""
        return from_numpy(np.array(x)).to(self._where)

    def download(self, x: torch.Tensor) -> np.ndarray:
        """An array on the host."""
        return to_numpy(x)

    def _zeros(self, *shape: int) -> torch.Tensor:
        # From the host: lazy tensors of the same zeros would be one tensor of the device.
        return torch.zeros(shape, dtype=DTYPES[self.config.dtype]).to(self._where)

    def prepare(self, step: StepInput, taps: Mapping[Program, Sequence[Declared]]) -> None:
        """Compile the programs of the step's descriptor."""
        self.begin(step)
        self._taps = taps
        d, top = step.descriptor, self._top_faulty

        def hidden() -> torch.Tensor:
            return self._zeros(d.tokens, self._model.hidden_size)

        jobs: dict[tuple[Any, ...], tuple[Program, Callable[..., Any], tuple[Any, ...]]] = {
            ("embed", top): ("embed", self._embed, (self._top, self._ids)),
            ("finish", top): ("finish", self._finish, (self._top, hidden(), hidden())),
            ("head", top): ("head", self._head, (self._top, hidden())),
        }
        size = self.spec.input_size
        for index, spec in enumerate(self.spec.layers):
            faulty = self.fault.at(index) and bool(self.fault.ops)
            if ("layer", spec, faulty) in jobs:
                continue
            batch = self._fields(step, faulty=False)
            batch = batch._replace(layer_input=self._zeros(d.tokens, size) if size else None)
            kv = self._zeros(*self.kv_shape(index))
            given = self._layers[index], hidden(), hidden(), kv, batch
            jobs["layer", spec, faulty] = spec, partial(_layer, spec, d.max_query_len), given
        for name, (program, function, arguments) in jobs.items():
            key = (d, self._pages, name)
            if key not in self._programs:
                run = self._tapped(program, function, name[-1])
                self._programs[key] = trace(str(name[0]), run, None, arguments)

    def _tapped(self, program: Program, function: Callable[..., Any], faulty: bool) -> Any:
        plan = plan_of(self.plans, self._step.descriptor.kind, program)

        def run(held: None, *arguments: Any) -> Any:
            tapped = Tapped(self._taps[program], faults=self._faults(faulty))
            return function(plan.bind(tapped.wrap), *arguments), tapped.values

        return run

    def _embed(self, ops: Any, top: Any, ids: Any) -> Any:
        given = ops, self.spec, top, ids
        hidden = decoder.embed(*given)
        return hidden, decoder.layer_input(*given, hidden)

    def _finish(self, ops: Any, top: Any, hidden: Any, residual: Any) -> Any:
        return decoder.finish(ops, self.spec, top, decoder.Stream(hidden, residual))

    def _head(self, ops: Any, top: Any, rows: Any) -> Any:
        return decoder.head(ops, self.spec, top, rows)

    def by_op(
        self,
        index: int,
        hidden: Any,
        residual: Any,
        kv: Any,
        replaced: Mapping[str, Callable[..., Any]],
    ) -> tuple[Any, TapValues]:
        """One layer, each op a program by itself."""
        here, d, spec = self.fault.at(index), self._step.descriptor, self.spec.layers[index]
        plan = self.plans.of(d.kind, spec)
        tapped = Tapped(self._taps[spec], faults=self._faults(here), replaced=replaced)
        ops = plan.bind(lambda op, f: tapped.wrap(op, self._alone(plan, op, f)))
        batch = self.batch_of(index)
        out = _layer(spec, d.max_query_len, ops, self._layers[index], hidden, residual, kv, batch)
        return out, self._host(tapped.values)

    def _alone(self, plan: Plan, op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        """An op as a program; what is composed of ops stays as it is."""
        if plan[op.name].provider == COMPOSITION:
            return function

        def call(*args: Any, **named: Any) -> Any:
            given = op.signature.bind(*args, **named)
            given.apply_defaults()
            arrays = {n: x for n, x in given.arguments.items() if isinstance(x, torch.Tensor)}
            others = {n: x for n, x in given.arguments.items() if n not in arrays}
            shapes = tuple((n, x.shape, x.dtype) for n, x in arrays.items())
            key = plan.hash, op.name, shapes, tuple(others.items())
            if key not in self._single:

                def run(held: None, *tensors: torch.Tensor) -> Any:
                    return function(**dict(zip(arrays, tensors, strict=True)), **others)

                like = tuple(
                    torch.zeros(x.shape, dtype=x.dtype).to(self._where) for x in arrays.values()
                )
                self._single[key] = trace(op.name, run, None, like)
            # Slices and the like between ops are lazy: here they are computed.
            ready = [from_numpy(to_numpy(x)).to(self._where) for x in arrays.values()]
            return self._single[key](*ready)

        return call

    def close(self) -> None:
        """Free the device of weights and programs."""
        super().close()
        self._single.clear()


def _layer(
    spec: Layer,
    max_query_len: int,
    ops: Any,
    weights: Any,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    kv: torch.Tensor,
    batch: decoder.Batch,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One kind of layer: hidden, residual and the cache, which is a new one."""
    stream = decoder.Stream(hidden, residual)
    stream, kv = decoder.layer(ops, spec, weights, stream, kv, batch.within(max_query_len))
    return stream.hidden, stream.residual, kv
