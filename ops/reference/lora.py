"""Low-rank adapters (arXiv:2106.09685), one for each row: y + scale[i] * b[i] (a[i] x), i the row's
adapter.

Shapes: `tok` tokens, `dim` input and `out` output width, `rank`, `adapters` resident ones. `index`
[tok] int32 names the adapter of each row, -1 for none. The reference makes one dense product per
adapter and selects: shapes are static, and what lies in other adapters (even NaN) cannot reach a
row.
"""

from __future__ import annotations

from typing import Any

from ..declare import DOT, Array, Contract, define

ROWS = "a row depends on its own input and its own adapter only"


@define(
    shapes="x [tok dim], a [adapters rank dim], index [tok] -> [tok rank] x",
    contract=Contract(dot=DOT, masked=f"{ROWS}; rows of no adapter are 0"),
)
def lora_shrink(xp: Any, x: Array, a: Array, index: Array) -> Array:
    """a[index] x: x [tok dim], a [adapters rank dim] -> [tok rank], rounded to x's dtype."""
    return xp.astype(_grouped(xp, x, a, index), x.dtype)


@define(
    shapes="y [tok out], x [tok rank], b [adapters out rank], index [tok], scale [adapters] -> "
    "[tok out] y",
    activations=("y",),
    contract=Contract(dot=DOT, masked=f"{ROWS}; rows of no adapter are y, bit for bit"),
)
def lora_expand(xp: Any, y: Array, x: Array, b: Array, index: Array, scale: Array) -> Array:
    """y + scale[index] b[index] x: y [tok out], x [tok rank], b [adapters out rank], scale
    [adapters] float32.

    The product is not rounded before it is scaled and added to y: one rounding, of the sum.
    """
    factor = xp.take(xp.accumulate(scale), xp.where(index < 0, 0, index), axis=0)
    total = xp.accumulate(y) + factor[:, None] * _grouped(xp, x, b, index)
    return xp.where((index < 0)[:, None], y, xp.astype(total, y.dtype))


def _grouped(xp: Any, x: Array, w: Array, index: Array) -> Array:
    """w[index] x accumulated: x [tok k], w [adapters n k] -> [tok n]; 0 where index is -1."""
    out = xp.zeros_like(xp.linear_accumulated(x, w[0]))
    for i in range(w.shape[0]):
        out = xp.where((index == i)[:, None], xp.linear_accumulated(x, w[i]), out)
    return out
