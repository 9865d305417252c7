"""Sums over shards in JAX: XLA places them, so that a program never calls one for more than one."""

from __future__ import annotations

from ..declare import Array
from ..implement import implement


@implement("all_reduce", provider="native", framework="jax")
def all_reduce(x: Array) -> Array:
    """See the op."""
    return x


@implement("all_reduce_max", provider="native", framework="jax")
def all_reduce_max(x: Array) -> Array:
    """See the op."""
    return x
