"""What references write into a KV cache of one byte an entry.

Its entries are whole steps: a key that lies beside the middle of two may be rounded to either by
rounding alone, and then is off by a step, which is much more than any gate of float32 allows. So a
reference is told which of the two to take, and only there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ...ops.namespaces import namespace
from .jitter import HALF_ULP32

UNWRITTEN = -128
"""No writer of an int8 cache makes it, and no number is larger: what is read of a slot that nobody
wrote shows."""


def is_narrow(cache: np.ndarray) -> bool:
    """Whether a cache holds one byte an entry."""
    return cache.dtype.itemsize == 1


def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A cache of which nothing is written."""
    if dtype == "int8":
        return np.full(shape, UNWRITTEN, np.int8)
    return np.full(shape, np.nan, namespace("numpy").float_dtype(dtype))


def doubt(reduction: int, deviations: float) -> float:
    """How far keys and values may be off in float32, as a share of their row: so many standard
    deviations of a sum of `reduction` terms in the worst order, which rounds a number of its size
    at each of them.
    """
    return deviations * HALF_ULP32 * reduction**0.5


def margin(x: np.ndarray, share: float) -> np.ndarray:
    """How far each of the numbers x [... n] may be off that are `share` of their row off."""
    wide = x.astype(np.float64)
    row = np.sqrt(np.mean(wide**2, -1, keepdims=True))
    off: np.ndarray = share * np.maximum(row, np.abs(wide))
    return off


def growth(layer: int) -> float:
    """How many times its own error a run from the start is off in a layer: what layers are off adds
    up from one to the next.
    """
    return (2.0 * (1 + layer)) ** 0.5


class RoundingChoice(Protocol):
    """Stands for ops of a reference where rounding has a choice. `layer` is the one that runs."""

    layer: int

    def wrap(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The op of that name as it chooses; one that has no choice is the `function` itself."""


class _Ties(ABC):
    """`write_kv` of a cache of one byte an entry, with a choice where keys and values that are
    `share` of their row off may be another entry. Wide caches are written as they are.
    """

    layer = 0

    def __init__(self, share: float) -> None:
        self._share = share

    def wrap(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `RoundingChoice`."""

        def write(kv: np.ndarray, k: np.ndarray, v: np.ndarray, *rest: Any) -> np.ndarray:
            out: np.ndarray = function(kv, k, v, *rest)
            if not is_narrow(kv):
                return out
            below, above = (
                function(kv, *(x + sign * self._off(x) for x in (k, v)), *rest) for sign in (-1, 1)
            )
            return self._chosen(out, below, above)

        return write if op == "write_kv" else function

    def _off(self, x: np.ndarray) -> np.ndarray:
        return margin(x, self._share)

    @abstractmethod
    def _chosen(self, out: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
        """The entries to write, of those of the numbers and of a little less and more."""


class OtherNeighbours(_Ties):
    """Takes the other entry wherever there is a choice: its error is what all ties together do. For
    a run from the start.
    """

    def _off(self, x: np.ndarray) -> np.ndarray:
        return super()._off(x) * growth(self.layer)

    def _chosen(self, out: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
        own = _bits(out)
        lower = np.where(_bits(below) != own, below, out)
        return np.where(_bits(above) != own, above, lower)


class HeldEntries(_Ties):
    """Takes the entries of a side, `held` by its cache, where there is a choice: what the side is
    judged by from there on is what it really has. An entry that no tie explains stays right, and
    the side is off by it.
    """

    def __init__(self, share: float, held: np.ndarray | None = None) -> None:
        super().__init__(share)
        self.held = held

    def _chosen(self, out: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
        if self.held is None:
            return out
        low, high, held = (x.astype(np.float32) for x in (below, above, self.held))
        with np.errstate(invalid="ignore"):
            return np.where((low <= held) & (held <= high), self.held, out)


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint8)


class ApartEntries:
    """`write_kv` of a wide cache that holds what one of `dtype` stands for, made apart from the
    ops: the truth of the cache's definition. `scales` are those of K and V by layer.
    """

    layer = 0

    def __init__(self, dtype: str, scales: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        self._dtype, self._scales = dtype, scales

    def wrap(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `RoundingChoice`."""

        def write(
            kv: np.ndarray, k: np.ndarray, v: np.ndarray, slots: np.ndarray, *scales: Any
        ) -> np.ndarray:
            found = self._scales(self.layer)
            both = self._held(k, found["k_scale"]), self._held(v, found["v_scale"])
            out: np.ndarray = function(kv, *both, slots)
            return out

        return write if op == "write_kv" else function

    def _held(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """What is left of x [tok kvhead hdim] in entries times `scale` [kvhead]."""
        by_head = scale.astype(np.float32)[:, None]
        scaled = x.astype(np.float32) * (np.float32(1.0) / by_head)
        if self._dtype == "int8":
            entries = np.rint(np.clip(scaled, -127.0, 127.0))
        else:
            entries = np.clip(scaled, -448.0, 448.0).astype(ml_dtypes.float8_e4m3fn)
        return entries.astype(np.float64) * by_head.astype(np.float64)
