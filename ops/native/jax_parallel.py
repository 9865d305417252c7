"""Sums over shards in JAX: XLA places them, so that a program never calls one for more than one."""

from __future__ import annotations

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from ..reference.quantization import largest_of_rows, scale_of


@implement("all_reduce", provider="native", framework="jax")
def all_reduce(x: Array) -> Array:
    """See the op."""
    return x


@implement("token_scales", provider="native", framework="jax")
def token_scales(x: Array, limit: float) -> Array:
    """See the op."""
    xp = namespace("jax")
    return scale_of(xp, largest_of_rows(xp, x), limit)
