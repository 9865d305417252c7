"""The exact reference with inputs that are a little off: what shows how much an op amplifies.

Every op that is called, those inside of a composition too, gets floating inputs of which each
element is off by a uniform relative error of at most half a float32 ulp, 2^-24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...ops import REGISTRY, Op
from ...ops.testing import widened
from .reference import bound
from .taps import Tracer

HALF_ULP32 = 2.0**-24


class Jitter(Tracer):
    """Gives every op such inputs. Give it to a Reference as its tracer."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self._rng = rng

    def wrap(self, op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        """The op with such inputs."""

        def call(*args: Any, **named: Any) -> Any:
            args = tuple(self._off(x) for x in args)
            return function(*args, **{name: self._off(x) for name, x in named.items()})

        return call

    def _off(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
            return x
        return x.astype(np.float64) * (1.0 + HALF_ULP32 * self._rng.uniform(-1.0, 1.0, x.shape))


def evaluate_jittered(
    op: str, arguments: Mapping[str, Any], rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """One op, as `evaluate` does exactly, with such inputs."""
    given = widened(REGISTRY[op], dict(arguments))
    with np.errstate(all="ignore"):
        out = getattr(bound(True, Jitter(rng)), op)(**given)
    return out if isinstance(out, tuple) else (out,)
