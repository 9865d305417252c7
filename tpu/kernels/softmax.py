"""The online softmax of attention kernels: float32 state in VMEM, one value to a row, repeated
over 128 lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .cache import LANES

# Masked scores lie so far below the initial maximum that their weight is 0 even in a row that has
# seen nothing.
START = -1e30
MASKED = -2e30
LOG2_E = 1.4426950408889634


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """a by b over one axis of each, summed in float32; float32 is multiplied in as many passes
    as it needs.
    """
    precision = lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def repeat(x: jax.Array, width: int) -> jax.Array:
    """[row 128], equal along lanes, as [row width]: whole registers, used again."""
    if width <= LANES:
        return x[:, :width]
    whole, rest = divmod(width, LANES)
    return jnp.concatenate([x] * whole + ([x[:, :rest]] if rest else []), axis=1)


def taking(kernel: Callable[..., None], scalars: int, names: Sequence[str]) -> Callable[..., None]:
    """A kernel whose references behind the first `scalars` are those of `names`, which it takes by
    name.
    """

    def run(*refs: Any, **values: Any) -> None:
        behind = scalars + len(names)
        named = dict(zip(names, refs[scalars:behind], strict=True))
        kernel(*refs[:scalars], *refs[behind:], **named, **values)

    return run


def of_rows(values: Any, heads: tuple[int, int], rows: int) -> Any:
    """What `values` [head] (None: 1) has for rows of heads first to last + 1, each of which has
    equally many rows in turn: a number if all have the same, else [row 128].
    """
    first, stop = heads
    if values is None:
        return 1.0
    if stop - first == 1:
        return values[first]
    head = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) // (rows // (stop - first))
    found = jnp.full((rows, LANES), values[first], jnp.float32)
    for n in range(first + 1, stop):
        found = jnp.where(head == n - first, values[n], found)
    return found


def _along(x: Any, width: int) -> Any:
    """A number, or [row 128] equal along lanes as [row width]."""
    return repeat(x, width) if jnp.ndim(x) else x


def capped(
    products: jax.Array, scale: float, soft_cap: float, k_scale: Any
) -> tuple[jax.Array, Any]:
    """Scores and the factor that they lack, to powers of 2: s = scale * products, or c tanh(s /
    c) for c > 0. `k_scale` is what `of_rows` gives of the scales of K.
    """
    factor = weight_factor(scale, soft_cap, k_scale)
    if soft_cap > 0:
        inside = _along((scale / soft_cap) * k_scale, products.shape[1])
        return soft_cap * jnp.tanh(products * inside), factor
    return products, factor


def weight_factor(scale: float, soft_cap: float, k_scale: Any) -> Any:
    """What `capped` scores lack to powers of 2."""
    return LOG2_E if soft_cap > 0 else scale * LOG2_E * k_scale


def update(scores: jax.Array, factor: Any, m_ref: Any, l_ref: Any) -> tuple[jax.Array, jax.Array]:
    """Take scores [row token] into maximum and sum [row 128] -> (weights [row token], decay [row
    128]), float32.

    A weight is 2^(factor * score): one product for each score does for the scale and for the base
    of the power.
    """
    before = m_ref[...]
    maximum = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    width = scores.shape[1]
    weights = jnp.exp2((scores - repeat(maximum, width)) * _along(factor, width))
    decay = jnp.exp2((before - maximum) * factor)
    l_ref[...] = l_ref[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
    m_ref[...] = maximum
    return weights, decay


def with_sinks(
    total: jax.Array, maximum: jax.Array, factor: Any, sinks: Any, heads: tuple[int, int]
) -> jax.Array:
    """Sums [row 128] of weights with those of the sinks (None: there are none) of some heads, first
    and last + 1, which rows have in turn.

    A row that has seen nothing has an infinite sum: its result is 0.
    """
    if sinks is None:
        return total
    first, stop = heads
    head = lax.rem(lax.broadcasted_iota(jnp.int32, total.shape, 0), stop - first)
    sink = jnp.full(total.shape, sinks[first], jnp.float32)
    for n in range(first + 1, stop):
        sink = jnp.where(head == n - first, sinks[n], sink)
    return total + jnp.exp2(sink * LOG2_E - maximum * factor)
