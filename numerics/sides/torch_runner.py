"""The torch side of a comparison: the layer function as the worker compiles it (or not), with
its taps as outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch

from ...gpu.compilation import copy_of
from ...gpu.module import Decoder
from ...gpu.precision import pin_precision
from ...gpu.weights import load_weights
from ...ops import Op, Plan
from ...ops.bindings.torch import activation_positions, opaque
from ...ops.namespaces.torch_ import from_numpy, to_numpy
from ...shared.models import decoder
from ...shared.models.spec import Layer
from ...shared.progress import silent
from ...shared.step import HOST_LENGTHS, StepInput
from .runners import Program, Runner, TapValues
from .subject import Subject
from .taps import Declared, Tapped


class TorchRunner(Runner):
    """See `Runner`."""

    framework = "torch"

    def _load(
        self, subject: Subject
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        pin_precision()
        self._where = torch.device(self.device.platform)
        self._compiling = self.config.compile_level > 0
        table = decoder.parameters_of(subject.model)
        module = Decoder(subject.model, table, None, getattr(torch, self.config.dtype), self._where)
        load_weights(
            module, subject.folder, self.config.load_format, table, self.config.seed, silent
        )
        layers = [{n: p.detach() for n, p in layer.named_parameters()} for layer in module.layers]
        return {n: p.detach() for n, p in module.named_parameters(recurse=False)}, layers

    @torch.inference_mode()
    def upload(self, x: np.ndarray) -> torch.Tensor:
        """A tensor on the device, of the kind that programs give: what is compiled tells others."""
        return from_numpy(np.array(x)).to(self._where)

    def download(self, x: torch.Tensor) -> np.ndarray:
        """An array on the host."""
        return to_numpy(x)

    @torch.inference_mode()
    def prepare(self, step: StepInput, taps: Mapping[Program, Sequence[Declared]]) -> None:
        """Make the programs of the step's descriptor; a compiled one is run once on padding."""
        self._taps = taps
        d, model = step.descriptor, self._model
        plan, sample = self.plans[d.kind], self.plans["sample"]
        top: dict[str, tuple[Plan, Callable[..., Any]]] = {
            "embed": (plan, self._embed),
            "finish": (plan, self._finish),
            "head": (sample, self._head),
        }
        for program, (chosen, run) in top.items():
            top_key = (d, self._pages, (program, self._top_faulty))
            if top_key not in self._programs:
                self._programs[top_key] = self._program(program, chosen, run, self._top_faulty)
        for index, spec in enumerate(self.spec.layers):
            faulty = self.fault.at(index) and bool(self.fault.ops)
            key = (d, self._pages, ("layer", spec, faulty))
            if key in self._programs:
                continue
            run = partial(run_layer, spec, d.max_query_len)
            self._programs[key] = self._program(spec, self.plans.of(d.kind, spec), run, faulty)
            if self._compiling:
                self.begin(step)
                dtype = getattr(torch, self.config.dtype)
                hidden = torch.zeros(d.tokens, model.hidden_size, dtype=dtype, device=self._where)
                kv = torch.zeros(self.kv_shape(index), dtype=dtype, device=self._where)
                if self.spec.input_size:
                    shape = len(self.spec.layers), d.tokens, self.spec.input_size
                    inputs = torch.zeros(shape, dtype=dtype, device=self._where)
                    self._batch = {
                        faulty: batch._replace(layer_input=inputs)
                        for faulty, batch in self._batch.items()
                    }
                self.layer(index, hidden, hidden.clone(), kv)

    def _embed(self, ops: Any, top: Any, ids: Any) -> Any:
        given = ops, self.spec, top, ids
        hidden = decoder.embed(*given)
        return hidden, decoder.layer_input(*given, hidden)

    def _head(self, ops: Any, top: Any, rows: Any) -> Any:
        return decoder.head(ops, self.spec, top, rows)

    def _finish(self, ops: Any, top: Any, hidden: Any, residual: Any) -> Any:
        return decoder.finish(ops, self.spec, top, decoder.Stream(hidden, residual))

    def _program(
        self, name: Program, plan: Plan, function: Callable[..., Any], faulty: bool = False
    ) -> Callable[..., Any]:
        declared, faults = self._taps[name], self._faults(faulty)
        compiled = self._compiling and not isinstance(name, str)

        def run(*arguments: Any) -> Any:
            tapped = Tapped(declared, torch.clone, faults)
            ops = plan.bind(lambda op, f: tapped.wrap(op, self._chosen(plan, op, f, compiled)))
            return function(ops, *arguments), tapped.values

        if not compiled:
            return run
        # Bound once, outside of what is traced: registries and signatures are not for Dynamo.
        tapped = Tapped(declared, torch.clone, faults)
        ops = plan.bind(lambda op, f: tapped.wrap(op, self._chosen(plan, op, f, compiled)))

        def traced(*arguments: Any) -> Any:
            return function(ops, *arguments), list(tapped.values)

        # A function of this name is compiled for each kind of layer, shape and mode.
        run_compiled = torch.compile(
            copy_of(cast(FunctionType, traced), "traced_layer"), fullgraph=True, dynamic=False
        )

        def run_cleared(*arguments: Any) -> Any:
            # What is traced finds no values, or it would be compiled again for each state of them.
            tapped.values.clear()
            return run_compiled(*arguments)

        return run_cleared

    def _chosen(
        self, plan: Plan, op: Op, function: Callable[..., Any], compiled: bool
    ) -> Callable[..., Any]:
        """What the binding makes of an op; one that writes in place gets copies, but for the
        state that it is for.
        """
        choice = plan[op.name].implementation
        if compiled and (choice.host_metadata or choice.inplace or choice.opaque):
            function = opaque(op, choice)
        if not choice.inplace or op.state:
            return function
        positions = activation_positions(op)

        def call(*args: Any) -> Any:
            return function(
                *(value.clone() if i in positions else value for i, value in enumerate(args))
            )

        return call

    @torch.inference_mode()
    def _placed(self, step: StepInput, fields: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        stay = self.plans.host_metadata(step.descriptor.kind)
        return {
            n: from_numpy(x) if stay and n in HOST_LENGTHS else self.upload(x)
            for n, x in fields.items()
        }

    @torch.inference_mode()
    def _run(self, name: tuple[Any, ...], *arguments: Any) -> tuple[Any, TapValues]:
        return super()._run(name, *arguments)

    @torch.inference_mode()
    def layer(self, index: int, hidden: Any, residual: Any, kv: Any) -> tuple[Any, TapValues]:
        """One layer, which writes its own copy of the cache."""
        return super().layer(index, hidden, residual, kv.clone())

    @torch.inference_mode()
    def by_op(
        self,
        index: int,
        hidden: Any,
        residual: Any,
        kv: Any,
        replaced: Mapping[str, Callable[..., Any]],
    ) -> tuple[Any, TapValues]:
        """One layer, not compiled."""
        here, d, spec = self.fault.at(index), self._step.descriptor, self.spec.layers[index]
        plan = self.plans.of(d.kind, spec)
        tapped = Tapped(self._taps[spec], torch.clone, self._faults(here), replaced=replaced)
        ops = plan.bind(lambda op, f: tapped.wrap(op, self._chosen(plan, op, f, False)))
        given = self._layers[index], hidden, residual, kv.clone(), self.batch_of(index)
        return run_layer(spec, d.max_query_len, ops, *given), self._host(tapped.values)

    def close(self) -> None:
        """Free the device of weights and programs."""
        super().close()
        if self._where.type == "cuda":
            torch.cuda.empty_cache()


def run_layer(
    spec: Layer,
    max_query_len: int,
    ops: Any,
    weights: Any,
    hidden: Any,
    residual: Any,
    kv: Any,
    batch: decoder.Batch,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One kind of layer: hidden, residual and the cache."""
    stream = decoder.Stream(hidden, residual)
    stream, kv = decoder.layer(ops, spec, weights, stream, kv, batch.within(max_query_len))
    return stream.hidden, stream.residual, kv
