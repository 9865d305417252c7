"""Arrays that implementations get wrong, shared by the groups. Everything is a function of a
name: runs repeat.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ..testing import DTYPES, Arguments

Make = Callable[[str], Arguments]


def huge(dtype: str) -> float:
    """A magnitude that the dtype holds, and whose square float32 still holds, with room: beyond,
    its accumulation overflows, as the contract implies.
    """
    return 1e4 if dtype == "float16" else 1e15


def generator(name: str) -> np.random.Generator:
    """A random generator that depends on the name only."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def normal(rng: np.random.Generator, dtype: str, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal numbers of a storage dtype."""
    return np.asarray((rng.normal(size=shape) * scale).astype(DTYPES[dtype]))


def weights(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Weights of a norm: around 1, some negative, none near 0."""
    sign = np.where(rng.random(shape) < 0.1, -1.0, 1.0)
    return np.asarray((sign * rng.uniform(0.3, 2.0, shape)).astype(DTYPES[dtype]))


def hostile_rows(
    rng: np.random.Generator, dtype: str, rows: int, n: int, kinds: tuple[str, ...] = ()
) -> np.ndarray:
    """Rows that differ in kind: normal, zero, huge, tiny, with one outlier channel (in its
    tail), with a large mean.
    """
    x, large = rng.normal(size=(rows, n)), huge(dtype)
    for i, kind in enumerate(
        kinds or ("normal", "zero", "huge", "tiny", "outlier", "mean", "spread")
    ):
        if i >= rows:
            break
        if kind == "zero":
            x[i] = 0.0
        elif kind in ("huge", "tiny"):
            x[i] *= large if kind == "huge" else 1 / large
        elif kind == "outlier":
            x[i, -2] = 300.0
        elif kind == "mean":
            x[i] = x[i] * 0.01 + 5.0
        elif kind == "spread":
            x[i] *= 10.0 ** (rng.uniform(-1, 1, n) * min(6.0, np.log10(large) - 1))
    return np.asarray(x.astype(DTYPES[dtype]))


def strided(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """The same values as a view into an array twice as long in `axis`, whose other half is NaN
    (or -1).
    """
    fill = np.full(x.shape, np.nan if x.dtype.kind not in "iub" else -1).astype(x.dtype)
    return np.split(np.concatenate([x, fill], axis=axis), 2, axis=axis)[0]


def to_bfloat16(x: Any) -> Any:
    """x rounded to bfloat16, in float64: for mutants that round where the contract does not."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def to_tf32(x: Any) -> Any:
    """x with 10 mantissa bits, in float64: what a framework's default may make of a float32
    product.
    """
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(mantissa * 2.0**11) / 2.0**11, exponent)
