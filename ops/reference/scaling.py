"""Products with numbers that the model states, for models whose streams, sublayers or logits are
scaled, with one number of a checkpoint, and with one number for each token.
"""

from __future__ import annotations

from typing import Any

from ..declare import Array, define
from .dense import along


@define(shapes="x [... n] -> [... n] x", shards=(), activations=("x",))
def scale(xp: Any, x: Array, factor: float) -> Array:
    """x * factor, elementwise: x [... n]. The factor is not rounded to the storage dtype before."""
    y = xp.accumulate(x)
    # Without the choice, which NaN alone takes, compilers make one operation of this product and a
    # sum behind it.
    return xp.astype(xp.where(y == y, y * factor, y), x.dtype)


@define(
    shapes="x [tok head hdim], factor [tok] -> [tok head hdim] x",
    shards=("head",),
    activations=("x",),
)
def scale_tokens(xp: Any, x: Array, factor: Array) -> Array:
    """x [tok head hdim] times the float32 factor [tok] of each token."""
    return xp.astype(xp.accumulate(x) * factor[:, None, None], x.dtype)


@define(shapes="x [... n], factor [1] -> [... n] x", shards=(), activations=("x",))
def scale_by(xp: Any, x: Array, factor: Array) -> Array:
    """x [... n] times the number factor [1], which is a weight: Gemma 4's `layer_scalar`."""
    y = xp.accumulate(x)
    return xp.astype(y * along(xp.accumulate(factor), y), x.dtype)
