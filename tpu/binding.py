"""The plan's ops on a mesh: those on heads and on halves of the MLP run shard by shard, XLA partitions the rest.

Only what XLA cannot see through, or would take apart in the wrong place, is put into `shard_map`: kernels, and ops
whose columns are dealt out by `sharding.place`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..ops import OpError, Plan
from ..ops.bindings.jax import bind, named_jit
from ..ops.declare import Op
from ..ops.plan import COMPOSITION, NATIVE
from .sharding import CACHE, HEADS, REPLICATED

COLUMNS = P(None, "tp")
SPECS: Mapping[str, tuple[Mapping[str, P], Any]] = {
    "norm_rope_write_kv": ({"qkv": COLUMNS, "kv": CACHE}, (HEADS, CACHE)),
    "rotary_embedding": ({"q": HEADS, "k": HEADS}, (HEADS, HEADS)),
    "write_kv": ({"kv": CACHE, "k": HEADS, "v": HEADS}, CACHE),
    "paged_attention": ({"q": HEADS, "kv": CACHE}, HEADS),
    "silu_and_mul": ({"x": COLUMNS}, COLUMNS),
}
"""Ops that run shard by shard: how the arguments lie (others are whole on each shard), and the results."""

WHOLE = frozenset("rms_norm add fused_add_rms_norm greedy_sample quantize_logits penalties sample top_logprobs".split())
"""Ops whose arguments are whole on each shard, so that a kernel may compute them everywhere."""


def bind_on(plan: Plan, mesh: Mesh) -> Any:
    """A namespace of the plan's ops for programs on `mesh`. Raises OpError for a kernel that cannot be partitioned."""
    local = bind(plan)
    if mesh.size == 1:
        return local
    check_partition(plan)

    def wrap(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        kernel = plan[op.name].provider not in (NATIVE, COMPOSITION)
        if op.name in SPECS or kernel:
            return _sharded(op, getattr(local, op.name), mesh)
        # XLA partitions it; a composition calls the ops of this namespace, each of them as it should be.
        return named_jit(op, function)

    return plan.bind(wrap)


def check_partition(plan: Plan) -> None:
    """Raise OpError if a kernel of the plan is for an op that is not known to run shard by shard."""
    for name, choice in plan.choices.items():
        if choice.provider not in (NATIVE, COMPOSITION) and name not in SPECS and name not in WHOLE:
            raise OpError(f"op {name!r}: {choice.provider!r} does not run on several shards; disable it (-{name})")


def _sharded(op: Op, function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    specs, results = SPECS.get(op.name, ({}, REPLICATED))

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        fixed = {name: x for name, x in bound.arguments.items() if name in op.static_parameters or x is None}
        arrays = {name: x for name, x in bound.arguments.items() if name not in fixed}

        def shard(*values: Any) -> Any:
            return function(**fixed, **dict(zip(arrays, values, strict=True)))

        inputs = tuple(specs.get(name, REPLICATED) for name in arrays)
        run = jax.shard_map(shard, mesh=mesh, in_specs=inputs, out_specs=results, check_vma=False)
        return run(*arrays.values())

    return call
