"""What references quantise before a product, where rounding decides between two entries.

An activation that lies beside the middle of two entries may be rounded to either by float32
rounding alone. It is then off by a step, and so are the row that it is in and all later rows of its
request: much more than any gate of float32 allows. So a reference is told which of the two to take,
and only there. Nobody sees which entries the programs of a side took; what its layer gave says it
(`settle`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from ...ops import REGISTRY
from ...ops.namespaces import namespace
from ...ops.reference.quantization import quantize_fp8, quantize_fp8_dynamic, quantize_int8
from .narrow_cache import growth, margin

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
        """See `RoundingChoice`."""
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
        return margin(x, self._share)

    @abstractmethod
    def _chosen(self, values: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
        """The entries that go into a product, of those of the numbers and of a little less and
        more.
        """


class OtherInputs(_Inputs):
    """Takes the other entry wherever there is a choice, as `narrow_cache.OtherNeighbours` does."""

    def _off(self, x: np.ndarray) -> np.ndarray:
        return super()._off(x) * growth(self.layer)

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
    """Takes these entries, call by call and again from the first, whatever rounding makes of the
    inputs.
    """

    def __init__(self, entries: Sequence[np.ndarray]) -> None:
        super().__init__(0.0)
        self._next = cycle(entries)

    def _entries(self, op: str, x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return next(self._next)

    def _chosen(self, values: np.ndarray, below: np.ndarray, above: np.ndarray) -> np.ndarray:
        return values


def _differ(other: np.ndarray, values: np.ndarray) -> np.ndarray:
    there = np.isfinite(values.astype(np.float32))
    found: np.ndarray = there & (other != values)
    return found


MOST = 32
"""Runs in which the entries of one row are looked for."""
NEARER = 10.0
"""So many times nearer no tie brings a row by luck: an error of hundreds of numbers has the
direction of what one entry makes of them only if it is that. What is left is judged as ever.
"""
Ties = tuple[Tie, ...]
Seen = tuple[float, ...]
"""How far a row is off in each of the things that are seen of it, 0 for what is within the limit.
"""


def settle(
    run: Callable[[TriedInputs], Sequence[np.ndarray]], share: float, got: Sequence[np.ndarray],
    requests: Sequence[range], limit: float, patience: int,
) -> tuple[list[np.ndarray], int]:  # fmt: skip
    """The entries [tok k] that go into products, call by call, with those that a side took at ties
    as far as what is seen of it says so: `got` is what the side has of that which `run` gives, each
    [tok ...] and in the order in which it is made. A row that is not judged is NaN.

    In each request rows that are more than `limit` off are settled one after the other, as later
    ones see the earlier. Some of a row's own ties must bring it within the limit, or `NEARER`, as
    other roundings may be amplified besides. Where none do, nothing is taken: they do not explain
    it. Of runs that looked for what was not found there are about `patience` at most; how many is
    told.
    """
    wasted = 0
    state = TriedInputs(share)
    right, taken = run(state), Ties()
    ahead = {rows: iter(rows) for rows in requests}
    searches: dict[range, _Search] = {}
    while True:
        for rows, left in ahead.items():
            if rows not in searches:
                seen = ((row, _seen(got, right, row, limit)) for row in left)
                first = next(((row, off) for row, off in seen if any(off)), None)
                if first is not None:
                    searches[rows] = _Search(*first, state.ties)
        nexts = ((rows, search.next()) for rows, search in searches.items())
        tries = {rows: ties for rows, ties in nexts if ties is not None}
        ended = searches.keys() - tries.keys()
        before = taken
        for search in (searches[rows] for rows in ended):
            taken += search.nearest
            wasted += 0 if search.nearest else search.runs
        if wasted > patience or not (tries or ended):
            return state.entries, wasted
        searches = {rows: searches[rows] for rows in tries}
        # Requests do not see each other, so one run tries something in each.
        tried = TriedInputs(share, (*taken, *(tie for ties in tries.values() for tie in ties)))
        found = run(tried) if tries else right
        for rows, ties in tries.items():
            search = searches[rows]
            search.tell(_seen(got, found, search.row, limit), ties, tried.ties)
            if search.answer is not None:
                taken += search.answer
                del searches[rows]
        if taken is not before:
            state = TriedInputs(share, taken)
            right = run(state)


class _Search:
    """Looks for ties of one row, the nearest first, that bring it within the limit."""

    def __init__(self, row: int, off: Seen, ties: Sequence[Tie]) -> None:
        self.row = row
        self.answer: Ties | None = None
        self.runs = 0
        self._start = self._best = max(off)
        self._taken = Ties()
        self._known = {frozenset[Tie]()}
        self._open: list[tuple[Seen, Ties, list[Tie]]] = []
        self._add(off, (), ties)

    @property
    def nearest(self) -> Ties:
        """What brings the row much nearer, if anything does."""
        return self._taken if self._best * NEARER <= self._start else ()

    def next(self) -> Ties | None:
        """What to try now; None: there is nothing more."""
        while self._open and self.runs < MOST:
            _, taken, more = self._open[0]
            while more:
                ties = (*taken, more.pop(0))
                if frozenset(ties) not in self._known:
                    self._known.add(frozenset(ties))
                    self.runs += 1
                    return ties
            self._open.pop(0)
        return None

    def tell(self, off: Seen, taken: Ties, ties: Sequence[Tie]) -> None:
        """How far the row is off with these, and the ties that there are then."""
        if max(off) < self._best:
            self._best, self._taken = max(off), taken
        if any(off):
            self._add(off, taken, ties)
        else:
            self.answer = taken

    def _add(self, off: Seen, taken: Ties, ties: Sequence[Tie]) -> None:
        at = {tie[:3] for tie in taken}
        more = [tie for tie in ties if tie.row == self.row and tie[:3] not in at]
        self._open.append((off, taken, more))
        self._open.sort(key=lambda state: state[0])


def _seen(got: Sequence[np.ndarray], right: Sequence[np.ndarray], row: int, limit: float) -> Seen:
    off = (float(off_by(x[[row]], y[[row]])[0]) for x, y in zip(got, right, strict=True))
    return tuple(x if x > limit else 0.0 for x in off)


def off_by(got: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The relative error of each row [row ...]."""
    got, right = (x.astype(np.float64).reshape(len(x), -1) for x in (got, right))
    error = np.linalg.norm(got - right, axis=1)
    found: np.ndarray = error / np.maximum(np.linalg.norm(right, axis=1), 1e-30)
    return found
