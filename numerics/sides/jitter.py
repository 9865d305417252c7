"""The exact reference with inputs that are a little off: what shows how much an op amplifies.

Every op that is called gets floating inputs of which each element is off by a uniform relative
error of at most half a unit in the last place, of float32 (2^-24) if nothing else is said. Of a
composition these are the ops inside: it rounds nothing besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...ops import Op
from .taps import Tracer

HALF_ULP32 = 2.0**-24


class Jitter(Tracer):
    """Gives every op such inputs. Give it to a Reference or to `evaluate` as the tracer."""

    def __init__(self, rng: np.random.Generator, half_ulp: float = HALF_ULP32) -> None:
        super().__init__()
        self._rng, self._half_ulp = rng, half_ulp

    def wrap(self, op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        """The op with such inputs."""
        if op.composition:
            return function

        def call(*args: Any, **named: Any) -> Any:
            args = tuple(self._off(x) for x in args)
            return function(*args, **{name: self._off(x) for name, x in named.items()})

        return call

    def _off(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
            return x
        return x.astype(np.float64) * (1.0 + self._half_ulp * self._rng.uniform(-1.0, 1.0, x.shape))
