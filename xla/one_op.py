"""One op as a program by itself: for tests, and for comparing backends op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..ops.namespaces.torch_ import from_numpy, to_numpy
from .device import place_of, start
from .traced import trace


def run_op(
    name: str, function: Callable[..., Any], arguments: Mapping[str, Any], platform: str = "cpu"
) -> tuple[np.ndarray, ...]:
    """The outputs as numpy arrays. Arrays among the arguments are those of the program."""
    start(platform)
    arrays = {n: x for n, x in arguments.items() if isinstance(x, np.ndarray)}
    others = {n: x for n, x in arguments.items() if n not in arrays}

    def program(held: None, *given: Any) -> tuple[Any, ...]:
        out = function(**dict(zip(arrays, given, strict=True)), **others)
        return out if isinstance(out, tuple) else (out,)

    given = [from_numpy(x.copy()).to(place_of(None)) for x in arrays.values()]
    return tuple(map(to_numpy, trace(name, program, None, given)(*given)))
