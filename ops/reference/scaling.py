"""A product with a number that the model states, for models whose streams, sublayers or logits are scaled."""

from __future__ import annotations

from typing import Any

from ..declare import Array, define


@define(activations=("x",))
def scale(xp: Any, x: Array, factor: float) -> Array:
    """x * factor, elementwise: x [... n]. The factor is not rounded to the storage dtype before."""
    return xp.astype(xp.accumulate(x) * factor, x.dtype)
