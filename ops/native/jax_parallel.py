"""The sum over shards in JAX: XLA places it, so that a program never calls it for more than one."""

from __future__ import annotations

from ..declare import Array
from ..implement import implement


@implement("all_reduce", provider="native", framework="jax")
def all_reduce(x: Array) -> Array:
    """See the op."""
    return x
