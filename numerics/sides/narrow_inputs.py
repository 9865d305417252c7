"""What references quantise before a product, where rounding decides between two entries.

An activation that lies beside the middle of two entries may be rounded to either by float32
rounding alone. It is then off by a step, and so are the row that it is in and all later rows of its
request: much more than any gate of float32 allows. So a reference is told which of the two to take,
and only there. Nobody sees which entries the programs of a side took; what its layer gave says it
(`settled`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...ops import REGISTRY
from ...ops.namespaces import namespace
from ...ops.reference.quantization import quantize_fp8, quantize_fp8_dynamic, quantize_int8
from .narrow_cache import margin

FIXED: Mapping[str, Callable[..., Any]] = {
    "quantize_int8": quantize_int8,
    "quantize_int8_dynamic": quantize_int8,
    "quantize_fp8": quantize_fp8,
    "quantize_fp8_dynamic": quantize_fp8,
}
"""What quantises by given scales, for each op that quantises activations."""


class _Inputs(ABC):
    """Ops that quantise activations, with a choice where inputs that are `share` of their row off
    may be another entry.
    """

    layer = 0

    def __init__(self, share: float) -> None:
        self._share = share

    def wrap(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `Choosing`."""
        signature = REGISTRY[op].signature

        def quantise(*args: Any, **named: Any) -> Any:
            x, *_ = signature.bind(*args, **named).arguments.values()
            found = function(*args, **named)
            if isinstance(found, tuple):
                return self._entries(op, x, *found), found[1]
            return self._entries(op, x, found, signature.bind(*args, **named).arguments["scale"])

        def product(*args: Any, **named: Any) -> Any:
            given = signature.bind(*args, **named).arguments
            if given["x_scale"] is None:
                x = given["x"]
                values, scale = quantize_fp8_dynamic(namespace("numpy"), x, "row", 0)
                values = self._entries("quantize_fp8_dynamic", x, values, scale)
                given = {**given, "x": values, "x_scale": scale}
            return function(**given)

        if op in FIXED:
            return quantise
        return product if op == "linear_fp8" else function

    def _entries(self, op: str, x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
        off = self._off(x)
        others = (FIXED[op](namespace("numpy"), y, scale) for y in (x - off, x + off))
        return self._chosen(values, *(other.astype(values.dtype) for other in others))

    def _off(self, x: np.ndarray) -> np.ndarray:
        return margin(x.astype(np.float64), self._share)

    @abstractmethod
    def _chosen(self, values: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
        """The entries that go into a product, of those of the numbers and of a little less and
        more.
        """


class OtherInputs(_Inputs):
    """Takes the other entry wherever there is a choice, as `narrow_cache.OtherNeighbours` does."""

    def _off(self, x: np.ndarray) -> np.ndarray:
        return super()._off(x) * (2.0 * (1 + self.layer)) ** 0.5

    def _chosen(self, values: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
        lower = np.where(_differ(below, values), below, values)
        return np.where(_differ(above, values), above, lower)


class Tie(NamedTuple):
    """An entry that may be another: in which of the calls that quantise, where, and what it may
    be.
    """

    call: int
    row: int
    column: int
    entry: float


class TriedInputs(_Inputs):
    """Takes the other entry at some ties. `ties` are all that it came by, `entries` what went into
    the products, call by call.
    """

    def __init__(self, share: float, taken: Sequence[Tie] = ()) -> None:
        super().__init__(share)
        self._taken = taken
        self.ties: list[Tie] = []
        self.entries: list[np.ndarray] = []

    def _chosen(self, values: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
        call, out = len(self.entries), values.copy()
        for other in (below, above):
            for row, column in np.argwhere(_differ(other, values)).tolist():
                self.ties.append(Tie(call, row, column, float(other[row, column])))
        for tie in self._taken:
            if tie.call == call:
                out[tie.row, tie.column] = tie.entry
        self.entries.append(out)
        return out


class HeldInputs(_Inputs):
    """Takes these entries, whatever rounding makes of the inputs."""

    def __init__(self, entries: Sequence[np.ndarray]) -> None:
        super().__init__(0.0)
        self._left = iter(entries)

    def _entries(self, op: str, x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return next(self._left)

    def _chosen(self, values: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
        return values


def _differ(other: np.ndarray, values: np.ndarray) -> np.ndarray:
    there = np.isfinite(values.astype(np.float32))
    found: np.ndarray = there & (other != values)
    return found


def settled(
    run: Callable[[TriedInputs], np.ndarray], share: float, got: np.ndarray,
    requests: Sequence[range], judged: np.ndarray, limit: float,
) -> tuple[np.ndarray, list[np.ndarray]]:  # fmt: skip
    """What `run` gives [tok dim] with the entries that a side took at ties, as far as what it
    `got` in the rows `judged` says so, and all entries that went into products.

    In each request the first row that is more than `limit` off is looked at: of the ties of its
    own, and of those rows before it that are not judged, the one is taken that brings it nearest.
    A row that no tie brings nearer stays off, and so does what comes behind it: no tie explains
    what is no tie's.
    """
    taken: list[Tie] = []
    is_judged = np.isin(np.arange(len(got)), judged)
    left = list(requests)
    while True:
        tried = TriedInputs(share, taken)
        right = run(tried)
        off = off_by(got, right)
        firsts = {rows: next((i for i in rows if is_judged[i] and off[i] > limit), -1) for rows in left}
        choices = {
            rows: [
                tie for tie in tried.ties
                if tie not in taken
                and (tie.row == first or (tie.row in rows and tie.row < first and not is_judged[tie.row]))
            ]
            for rows, first in firsts.items()
            if first >= 0
        }  # fmt: skip
        left = [rows for rows, ties in choices.items() if ties]
        best = {rows: (float(off[firsts[rows]]), None) for rows in left}
        # Requests do not see each other: one tie of each is tried at a time.
        for number in range(max((len(choices[rows]) for rows in left), default=0)):
            now = {rows: choices[rows][number] for rows in left if number < len(choices[rows])}
            found = off_by(got, run(TriedInputs(share, [*taken, *now.values()])))
            for rows, tie in now.items():
                best[rows] = min(best[rows], (float(found[firsts[rows]]), tie), key=lambda x: x[0])
        left = [rows for rows in left if best[rows][1] is not None]
        if not left:
            return right, tried.entries
        taken = taken + [best[rows][1] for rows in left]


def off_by(got: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The relative error of each row."""
    error = np.linalg.norm(got - right, axis=1)
    found: np.ndarray = error / np.maximum(np.linalg.norm(right, axis=1), 1e-30)
    return found
