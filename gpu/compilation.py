"""Regional compilation: the layer function compiled once per kind and range of sizes, run by every
layer.

Sizes named in `compile_sizes` are compiled with static shapes, all others of a kind share code with
an open number of tokens: one compilation serves a whole ladder, and the number of tokens only moves
the bounds of loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from ..bucketing import Descriptor
from ..ops import REGISTRY, BoundPlans, Plan, Plans
from ..ops.plan import COMPOSITION
from ..shared.compilation_config import CUDAGraphMode, ResolvedCompilation
from ..shared.errors import ConfigError
from ..shared.models import decoder
from ..shared.models.spec import Layer, Model, Norm
from ..shared.models.stages import Rows, any_replaced
from .backend import make_backend

LayerFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(weights, hidden, residual [tok dim], kv, batch) -> hidden, residual. Three more arguments: what
`rows` of the batch are made of.
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled version: for one number of tokens, or (`last` > `first`) for a range of them."""

    kind: str
    first: int
    last: int

    @property
    def static(self) -> bool:
        """Whether the number of tokens is a constant of the code."""
        return self.first == self.last

    def __str__(self) -> str:
        return (
            f"{self.kind}_{self.first}"
            if self.static
            else f"{self.kind}_{self.first}_to_{self.last}"
        )


def variants(
    descriptors: Iterable[Descriptor], compilation: ResolvedCompilation
) -> dict[Descriptor, Variant]:
    """The version that serves each descriptor."""
    chosen = {}
    largest: dict[str, int] = {}
    descriptors = list(descriptors)
    for d in descriptors:
        largest[d.kind] = max(largest.get(d.kind, 0), d.tokens)
    for d in descriptors:
        # Dynamo takes a size of 1 for a constant whatever it is told.
        first, last = 2, max(largest[d.kind], 3)
        if d.tokens in compilation.compile_sizes or d.tokens == 1:
            first = last = d.tokens
        for low, high in compilation.compile_ranges:
            if first < last and low <= d.tokens <= high:
                first, last = low, high
        chosen[d] = Variant(d.kind, first, last)
    return chosen


def compile_order(chosen: Mapping[Descriptor, Variant]) -> list[Descriptor]:
    """All descriptors, the middle one of each version first: its size is what the code generator
    tunes for.
    """
    members: dict[Variant, list[Descriptor]] = {}
    for d, variant in chosen.items():
        members.setdefault(variant, []).append(d)
    first = [sorted(ds, key=lambda d: d.tokens)[len(ds) // 2] for ds in members.values()]
    return first + [d for d in chosen if d not in first]


def compiled_kinds(model: Model, plans: Plans, compilation: ResolvedCompilation) -> frozenset[str]:
    """The kinds of steps whose layers go to the compiler. With `skip_kernels`, those made of
    kernels alone do not: each would be an opaque call, so there is nothing to generate, and tracing
    them is most of a start.
    """
    if compilation.level == 0:
        return frozenset()
    # What a stage from outside does between its ops is not known.
    skips = compilation.skip_kernels and not any_replaced(model)
    return frozenset(
        kind for kind in ("decode", "mixed") if not (skips and _all_kernels(plans, kind))
    )


def _all_kernels(plans: Plans, kind: str) -> bool:
    """Whether the layers of a kind of step call nothing but kernels."""
    return all(_only_kernels(layer.plan, layer.called) for layer in plans.layers[kind].values())


def check_effect(compilation: ResolvedCompilation, compiled: frozenset[str]) -> None:
    """Raise ConfigError for an option that has no effect under this plan.

    `compiled`: the kinds of steps whose layers go to the compiler.
    """
    if compilation.road == "piecewise":
        return
    for name in ("compile_sizes", "compile_ranges"):
        asked = getattr(compilation, name)
        if asked and not compiled:
            raise ConfigError(
                f"{name}: got {asked}, allowed is none: every op of a layer is a kernel, so no "
                "layer is compiled; "
                f"use_inductor=True compiles all of them"
            )
    mode = compilation.cudagraph_mode
    if compilation.splitting_given and not mode.has_mode(CUDAGraphMode.PIECEWISE):
        raise ConfigError(
            f"splitting_ops: got {list(compilation.splitting_ops)}, allowed is none: "
            f"cudagraph_mode is {mode.name}, "
            f"which captures nothing in pieces"
        )


def _only_kernels(plan: Plan, ops: Iterable[str]) -> bool:
    for name in ops:
        choice = plan[name]
        if choice.provider == COMPOSITION:
            if not _only_kernels(plan, REGISTRY[name].composition):
                return False
        elif not choice.implementation.opaque:
            return False
    return True


def copy_of(function: FunctionType, title: str) -> FunctionType:
    """The function with a code object of its own, called `title`.

    Dynamo keeps compiled versions on the code object, tries them one after the other, and makes few
    of them: what is compiled more than once needs a copy for each version.
    """
    code = function.__code__.replace(co_name=title)
    return FunctionType(
        code, function.__globals__, title, function.__defaults__, function.__closure__
    )


class RegionCompiler:
    """Compiles functions of a step: a copy of the function for each version, so that versions do
    not see each other.
    """

    def __init__(self, compilation: ResolvedCompilation) -> None:
        self._compilation = compilation
        self.enabled = compilation.level > 0

    def compile(
        self, function: FunctionType, variant: Variant, name: str, plan: Plan
    ) -> Callable[..., Any]:
        """`function` compiled for a version by the first call, for which `mark` must have named
        what stays open.

        `plan` is that of its ops.
        """
        if not self.enabled:
            return function
        title = f"{name}_{variant}"
        copy = copy_of(function, title)
        backend = make_backend(self._compilation, title)
        if self._compilation.wraps:
            from .passes import passes_backend

            backend = passes_backend(plan, backend)
        # Not dynamic: only what `mark` names stays open, whatever sizes an earlier engine of the
        # process had.
        return torch.compile(copy, fullgraph=True, backend=backend, dynamic=False)

    def mark(self, variant: Variant, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the first dimension of these open in what the next call compiles. Fails if the
        code fixes it.
        """
        if self.enabled and not variant.static:
            for tensor in tensors:
                torch._dynamo.mark_dynamic(tensor, 0)


class LayerCompiler:
    """The function of each kind of layer and version: layers of a kind share theirs."""

    def __init__(
        self,
        model: Model,
        ops: BoundPlans,
        plans: Plans,
        compiler: RegionCompiler,
        chosen: Mapping[Descriptor, Variant],
        compiled: frozenset[str],
    ) -> None:
        self._model, self._ops, self._plans, self._compiler, self._chosen = (
            model,
            ops,
            plans,
            compiler,
            chosen,
        )
        self.compiled = compiled
        self._functions: dict[tuple[Any, ...], LayerFunction] = {}
        self._of_steps: dict[tuple[Descriptor, bool], list[LayerFunction]] = {}

    def functions(self, d: Descriptor, drops: bool) -> list[LayerFunction]:
        """What runs each layer in the steps of a descriptor. A last layer that drops rows has a
        function of its own.
        """
        if (d, drops) not in self._of_steps:
            layers, joints = self._model.layers, decoder.joints(self._model)
            ends = list(zip(joints[:-1], [norm is not None for norm in joints[1:]], strict=True))
            variant = self._chosen[d]
            functions = [
                self._function(variant, spec, False, *own)
                for spec, own in zip(layers[:-1], ends[:-1], strict=True)
            ]
            last = self._function(variant, layers[-1], drops, *ends[-1])
            self._of_steps[d, drops] = [*functions, last]
        return self._of_steps[d, drops]

    def _function(self, *key: Any) -> LayerFunction:
        if key not in self._functions:
            self._functions[key] = self._build(*key)
        return self._functions[key]

    def _build(
        self, variant: Variant, spec: Layer, drops: bool, before: Norm | None, joins_next: bool
    ) -> LayerFunction:
        plain = layer_function(
            spec,
            self._ops.of(variant.kind, spec),
            before,
            decode=variant.kind == "decode",
            joins_next=joins_next,
        )
        if variant.kind not in self.compiled:
            return plain
        number = self._model.kinds.index(spec)
        name = ("last_layer" if drops else "layer") + (f"_kind_{number}" if number else "")
        name += "" if before is None else "_joined"
        return self._compiler.compile(plain, variant, name, self._plans.of(variant.kind, spec))

    def mark(self, d: Descriptor, kv: Sequence[torch.Tensor], batch: decoder.Batch) -> None:
        """Name the open dimensions before the first call for a descriptor: pages, and tokens of
        a version for many.
        """
        for cache in kv:
            torch._dynamo.mark_dynamic(cache, 0)
        per_request = (
            (batch.page_table, batch.query_start, batch.kv_lens) if d.kind == "decode" else ()
        )
        open_ones = [x for x in per_request if x.device == batch.slots.device]
        of_tokens = [batch.cos, batch.sin, batch.slots]
        self._compiler.mark(self._chosen[d], [*of_tokens, *open_ones])


def layer_function(
    spec: Layer, ops: Any, before: Norm | None, *, decode: bool, joins_next: bool
) -> FunctionType:
    """One kind of layer as a function, with all that is fixed bound: see `decoder.layer`."""

    def layer(
        weights: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        residual: torch.Tensor,
        kv: torch.Tensor,
        batch: decoder.Batch,
        *rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A mixed program may hold one request whose queries fill it.
        max_query_len = 1 if decode else hidden.shape[0]
        inside = batch.within(max_query_len, Rows(*rows) if rows else None)
        stream = decoder.Stream(hidden, residual)
        stream, _ = decoder.layer(ops, spec, weights, stream, kv, inside, before, joins_next)
        return stream.hidden, stream.residual

    return layer  # type: ignore[return-value]  # mypy does not take a function for a FunctionType
