"""The torch side of a comparison: the layer function as the worker compiles it (or not), with its taps as outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..gpu.module import Decoder
from ..gpu.precision import pin_precision
from ..gpu.weights import load_weights
from ..ops import Op, Plan, Plans
from ..ops.bindings.torch import activation_positions, opaque
from ..ops.namespaces import namespace
from ..ops.namespaces.torch_ import from_numpy, to_numpy
from ..shared.config import DeviceInfo, ResolvedConfig
from ..shared.models import decoder
from ..shared.step import StepInput
from .runners import Fault, TapValues, no_progress
from .subject import Subject, Target
from .taps import Declared, Tapped


def make_runner(
    subject: Subject, target: Target, config: ResolvedConfig, device: DeviceInfo, plans: Plans, fault: Fault | None
) -> TorchRunner:
    """A runner on a torch device."""
    return TorchRunner(subject, target, config, device, plans, fault)


class TorchRunner:
    """See `Runner`."""

    def __init__(
        self, subject: Subject, target: Target, config: ResolvedConfig, device: DeviceInfo, plans: Plans,
        fault: Fault | None,
    ) -> None:  # fmt: skip
        pin_precision()
        self.target, self.config, self.device, self.plans = target, config, device, plans
        self._model = subject.model
        self._where = torch.device(device.platform)
        self._compiling = config.compile_level > 0
        table = decoder.abstract(subject.model)
        dtype = getattr(torch, config.dtype)
        module = Decoder(subject.model, table, {}, dtype, self._where)
        load_weights(module, subject.folder, config.load_format, table, config.seed, no_progress)
        self._true_layers = [{n: p.detach() for n, p in layer.named_parameters()} for layer in module.layers]
        self._top = {n: p.detach() for n, p in module.named_parameters(recurse=False)}
        self._true_tables = decoder.rotary_tables(subject.model, config.max_model_len)
        self._programs: dict[Any, Callable[..., Any]] = {}
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

    def share(self, other: TorchRunner) -> None:
        """Take over the programs without a fault of a runner of the same model, sizes and plan."""
        self._programs = {key: program for key, program in other._programs.items() if not key[-1]}

    def upload(self, x: np.ndarray) -> torch.Tensor:
        """A tensor on the device."""
        return from_numpy(np.array(x)).to(self._where)

    def download(self, x: torch.Tensor) -> np.ndarray:
        """An array on the host."""
        return to_numpy(x)

    def weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """Weights on the host."""
        found = self._top if layer < 0 else self._layers[layer]
        return {name: to_numpy(x) for name, x in found.items()}

    def allocate(self, pages: int) -> None:
        """Say how many pages, the scratch page included, a layer's cache has."""
        self._pages = pages

    def prepare(self, step: StepInput, taps: Mapping[str, Sequence[Declared]]) -> None:
        """Make the programs of the step's descriptor; a compiled one is run once on padding."""
        self._taps = taps
        d, top_faulty = step.descriptor, self._top_faulty
        if (d, "embed", top_faulty) not in self._programs:
            plan, sample = self.plans[d.kind], self.plans["sample"]
            self._programs[d, "embed", top_faulty] = self._program(
                "embed", plan, lambda ops, top, ids: decoder.embed(ops, top, ids), top_faulty
            )
            self._programs[d, "finish", top_faulty] = self._program(
                "finish",
                plan,
                lambda ops, top, hidden, residual: decoder.finish(ops, self._model, top, hidden, residual),
                top_faulty,
            )
            self._programs[d, "head", top_faulty] = self._program(
                "head", sample, lambda ops, top, x: decoder.head(ops, top, x), top_faulty
            )
        model, function = self._model, decoder.layer_function(self._model)
        for index, window in enumerate(model.layer_windows):
            faulty = self.fault.at(index) and bool(self.fault.ops)
            if (d, "layer", window, faulty) in self._programs:
                continue

            def layer(ops: Any, *given: Any, window: int = window) -> Any:
                return function(ops, model, *given, window, d.max_query_len)

            self._programs[d, "layer", window, faulty] = self._program("layer", self.plans[d.kind], layer, faulty)
            if self._compiling:
                self.begin(step)
                hidden = torch.zeros(d.tokens, model.hidden_size, dtype=getattr(torch, self.config.dtype))
                shape = (self._pages, self.config.page_size, 2 * model.num_kv_heads, model.head_dim)
                kv = torch.zeros(shape, dtype=hidden.dtype, device=self._where)
                self.layer(index, hidden.to(self._where), hidden.to(self._where), kv)

    def _program(self, name: str, plan: Plan, function: Callable[..., Any], faulty: bool = False) -> Callable[..., Any]:
        declared = self._taps[name]
        xp = namespace("torch")
        faults = {op: partial(make, xp) for op, make in self.fault.ops.items()} if faulty else {}
        compiled = self._compiling and name == "layer"

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
            tapped.values.clear()
            out = function(ops, *arguments)
            return out, list(tapped.values)

        return torch.compile(traced, fullgraph=True, dynamic=False)

    def _chosen(self, plan: Plan, op: Op, function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
        """What the binding makes of an op; one that writes in place gets copies, but for the state that it is for."""
        choice = plan[op.name].implementation
        if compiled and (choice.host_metadata or choice.inplace or choice.opaque):
            function = opaque(op, choice)
        if not choice.inplace or op.state:
            return function
        positions = activation_positions(op)

        def call(*args: Any) -> Any:
            return function(*(value.clone() if i in positions else value for i, value in enumerate(args)))

        return call

    def begin(self, step: StepInput) -> None:
        """Take a step."""
        self._step = step
        self._ids = self.upload(step.field("token_ids"))
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
        on_host = ("query_start", "kv_lens", "counts")
        stay = self.plans[step.descriptor.kind]["paged_attention"].implementation.host_metadata
        moved = {n: from_numpy(x) if stay and n in on_host else self.upload(x) for n, x in fields.items()}
        return decoder.Batch(self.upload(cos), self.upload(sin), **moved)

    @torch.inference_mode()
    def _run(self, name: tuple[Any, ...], *arguments: Any) -> tuple[Any, TapValues]:
        out, values = self._programs[(self._step.descriptor, *name)](*arguments)
        return out, [self._host(tap) for tap in values]

    @staticmethod
    def _host(tap: Any) -> Any:
        if not tap:
            return None
        kept, outputs = tap
        return {name: to_numpy(x) for name, x in kept.items()}, tuple(to_numpy(x) for x in outputs)

    def inputs(self, layer: int) -> Mapping[str, np.ndarray]:
        """What a layer is given of the step."""
        return {name: self.download(x) for name, x in self._batch[self.fault.at(layer)]._asdict().items()}

    def embed(self) -> tuple[torch.Tensor, TapValues]:
        """Hidden states."""
        return self._run(("embed", self._top_faulty), self._top, self._ids)

    def layer(self, index: int, hidden: Any, residual: Any, kv: Any) -> tuple[Any, TapValues]:
        """One layer."""
        here = self.fault.at(index)
        name = ("layer", self._model.layer_windows[index], here and bool(self.fault.ops))
        return self._run(name, self._layers[index], hidden, residual, kv.clone(), self._batch[here])

    @torch.inference_mode()
    def by_op(
        self, index: int, hidden: Any, residual: Any, kv: Any, replaced: Mapping[str, Callable[..., Any]]
    ) -> tuple[Any, TapValues]:
        """One layer, not compiled."""
        here, d, model = self.fault.at(index), self._step.descriptor, self._model
        xp, plan = namespace("torch"), self.plans[d.kind]
        faults = {op: partial(make, xp) for op, make in self.fault.ops.items()} if here else {}
        tapped = Tapped(self._taps["layer"], torch.clone, faults, replaced=replaced)
        ops = plan.bind(lambda op, f: tapped.wrap(op, self._chosen(plan, op, f, False)))
        given = self._layers[index], hidden, residual, kv.clone(), self._batch[here]
        out = decoder.layer_function(model)(ops, model, *given, model.layer_windows[index], d.max_query_len)
        return out, [self._host(tap) for tap in tapped.values]

    def fields(self, index: int) -> Mapping[str, np.ndarray]:
        """What a layer reads of the step."""
        return {name: to_numpy(x) for name, x in self._batch[self.fault.at(index)]._asdict().items()}

    def finish(self, hidden: Any, residual: Any) -> tuple[torch.Tensor, TapValues]:
        """Finished hidden states."""
        return self._run(("finish", self._top_faulty), self._top, hidden, residual)

    def head(self, rows: Any) -> tuple[torch.Tensor, TapValues]:
        """Logits."""
        return self._run(("head", self._top_faulty), self._top, rows)

    def close(self) -> None:
        """Drop weights and programs."""
        self._programs.clear()
        self._layers, self._true_layers, self._top = [], [], {}
        if self._where.type == "cuda":
            torch.cuda.empty_cache()
