"""The plan's ops on a mesh: those on heads and on halves of the MLP run shard by shard, XLA
partitions the rest.

Only what XLA cannot see through, or would take apart in the wrong place, is put into `shard_map`:
kernels, and ops whose columns are dealt out by `sharding.place`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..ops import OpError, Plan
from ..ops.bindings.jax import bind, named_jit, taking
from ..ops.declare import REGISTRY, Op
from ..ops.dimensions import Axes
from ..ops.namespaces import namespace
from ..ops.namespaces.jax_ import InStack
from ..ops.plan import COMPOSITION, NATIVE
from ..ops.reference.quantization import quantize_fp8_dynamic
from .sharding import REPLICATED

PROJECTIONS = ("linear_grouped", "linear_fp8")
"""Ops whose kernels run shard by shard as their weight is dealt out, which it says itself: by rows
it gives columns of the result, by the entries of its rows parts of a sum.
"""


def bind_on(plan: Plan, mesh: Mesh) -> Any:
    """A namespace of the plan's ops for programs on `mesh`. Raises OpError for a kernel that
    cannot be partitioned.
    """
    local = bind(plan)
    if mesh.size == 1:
        return local
    check_partition(plan)

    def wrap(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        kernel = plan[op.name].provider not in (NATIVE, COMPOSITION)
        if kernel and op.name in PROJECTIONS:
            chosen = plan[op.name].implementation
            return _projection(op, chosen.function, chosen.part, mesh)
        if op.shards or kernel:
            return _sharded(op, getattr(local, op.name), mesh)
        # XLA partitions it; a composition calls the ops of this namespace, each of them as it
        # should be.
        return named_jit(op, taking(plan[op.name], function))

    return plan.bind(wrap)


def check_partition(plan: Plan) -> None:
    """Raise OpError if a kernel of the plan is for an op that is not known to run shard by
    shard.
    """
    # What only runs within an op that is put on the shards as a whole needs to say nothing.
    inside = {
        finer
        for name, choice in plan.choices.items()
        if choice.provider == COMPOSITION and REGISTRY[name].shards
        for finer in REGISTRY[name].composition
    }
    for name, choice in plan.choices.items():
        if choice.provider in (NATIVE, COMPOSITION) or name in inside:
            continue
        gives_parts = name in PROJECTIONS and choice.implementation.part is not None
        if not (gives_parts or _says_its_shards(REGISTRY[name])):
            raise OpError(
                f"op {name!r}: {choice.provider!r} does not run on several shards; disable it "
                f"(-{name})"
            )


def _says_its_shards(op: Op) -> bool:
    return op.shapes is not None and op.shards is not None


def _spec_of(op: Op, axes: Axes, x: Any) -> Any:
    """How an argument lies."""
    spec = _spec(op, axes, x.ndim)
    return _spec_in_stack(x, spec) if isinstance(x, InStack) else spec


def _is_sum(op: Op, axes: Axes) -> bool:
    """Whether a result is the sum of what the shards have: nothing of it is dealt out."""
    dealt = set(op.shards or ())
    return bool(dealt) and dealt.isdisjoint(name for d in axes.dimensions for name in d.names)


def _with_own_experts(op: Op, arrays: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a shard, which counts experts from its first one: those of others are
    below 0, or more than it has.
    """
    if "expert" not in (op.shards or ()):
        return arrays
    first = jax.lax.axis_index("tp") * arrays["gate_up"].shape[0]
    return arrays | {"experts": arrays["experts"] - first}


def _spec(op: Op, axes: Axes, rank: int) -> P:
    """How an array lies: its dimensions that the shards of an op deal out are split, the others
    whole.
    """
    dealt = [
        "tp" if set(dimension.names) & set(op.shards or ()) else None
        for dimension in axes.dimensions
    ]
    return P(*[None] * (rank - len(dealt)), *dealt) if any(dealt) else REPLICATED


def _parted(op: Op, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a call by name: those that are the same on all shards, None among them, and
    the arrays.
    """
    fixed = {name: x for name, x in given.items() if name in op.static_parameters or x is None}
    return fixed, {name: x for name, x in given.items() if name not in fixed}


def _projection(op: Op, whole: Any, part: Any, mesh: Mesh) -> Callable[..., Any]:
    """A product with a narrow weight, an `InStack`, by an implementation and its `part`. Parts of
    sums are added in float32, then comes the bias, and the result is rounded once: as where XLA
    partitions a product.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given = op.signature.bind(*args, **kwargs).arguments
        if not isinstance(given["weight"], InStack):
            raise OpError(
                f"op {op.name!r}: a weight that is no part of a stack does not say which of its "
                "dimensions shards deal out"
            )
        dealt, of_sum = given["weight"].dealt, given["weight"].dealt == 1
        if of_sum and given.get("x_scale", given) is None:
            # A row has one scale, also where its entries are dealt out.
            x, scale = quantize_fp8_dynamic(namespace("jax"), given["x"], "row", 0)
            given |= {"x": x, "x_scale": scale}
        fixed, arrays = _parted(op, given)
        dtype = given.get("dtype", given["x"].dtype)

        def shard(*values: Any) -> Any:
            own = fixed | dict(zip(arrays, values, strict=True))
            if not of_sum:
                return whole(**own)
            bias = own.pop("bias")
            y = jax.lax.psum(part(**own, bias=None), "tp")
            return (y if bias is None else y + bias.astype(y.dtype)[None, :]).astype(dtype)

        inputs = tuple(_side(name, x, dealt) for name, x in arrays.items())
        out = P(None, "tp") if dealt == 0 else REPLICATED
        run = jax.shard_map(shard, mesh=mesh, in_specs=inputs, out_specs=out, check_vma=False)
        return run(*arrays.values())

    return named_jit(op, call)


def _side(name: str, x: Any, dealt: int | None) -> Any:
    """How an argument of a product lies, of whose weight the dimension `dealt` is dealt out. Scales
    may be one for all rows, or one for a whole row.
    """
    if name == "bias":
        return P("tp") if dealt == 0 else REPLICATED
    of_tokens = name in ("x", "x_scale")  # whose rows are not those of the weight
    if dealt is None or x.shape[dealt] == 1 or (dealt == 0 and of_tokens):
        spec = REPLICATED
    else:
        spec = P("tp", None) if dealt == 0 else P(None, "tp")
    return _spec_in_stack(x, spec) if isinstance(x, InStack) else spec


def _spec_in_stack(x: InStack, spec: P) -> InStack:
    """How one array of a stack lies: all do as it does."""
    return replace(x, stack=P(None, *spec), index=REPLICATED)


def _sharded(op: Op, function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    if op.shapes is None:
        raise OpError(
            f"op {op.name!r} does not say its shapes, so that it cannot run on several shards"
        )
    shapes = op.shapes

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        fixed, arrays = _parted(op, bound.arguments)

        def shard(*values: Any) -> Any:
            own = _with_own_experts(op, dict(zip(arrays, values, strict=True)))
            found = function(**fixed, **own)
            if not any(sums):
                return found
            parts = (found,) if op.gives_one else found
            summed = [
                jax.lax.psum(x, "tp") if is_sum else x
                for x, is_sum in zip(parts, sums, strict=True)
            ]
            return summed[0] if op.gives_one else tuple(summed)

        sums = [_is_sum(op, r.axes) for r in shapes.results]
        inputs = tuple(_spec_of(op, shapes.arrays[name], x) for name, x in arrays.items())
        outputs = shapes.outputs(shapes.check(bound.arguments))
        results = [
            _spec(op, r.axes, len(shape))
            for r, (shape, _) in zip(shapes.results, outputs, strict=True)
        ]
        out = results[0] if op.gives_one else tuple(results)
        run = jax.shard_map(shard, mesh=mesh, in_specs=inputs, out_specs=out, check_vma=False)
        return run(*arrays.values())

    return call
