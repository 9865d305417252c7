"""How much an op or a layer amplifies errors of its inputs, found by trying.

A sum that cancels, or a softmax whose scores are large, makes a large relative error of roundings
that are all right. Its exact reference, run again on inputs that are off by at most half a float32
ulp each (`sides/jitter.py`), says how large. Several tries are needed: the one order of sums that a
faithful reference has may be exact by luck. Only what exceeds the fixed limits of mode S is tried,
so that a run in which nothing does costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .gates import Amplified, Gate
from .metrics import Metrics, independent

TRIES = 8, 32
"""So many say whether a result is beyond all chance; what is not is judged by more of them, which
leave less to chance.
"""


HOPELESS = 1000.0
"""So many times over a limit, amplification is not asked for: a float32 result of which three
digits are left says nothing, and a broken backend would make a run many times as long.
"""


def worth_trying(gate: Gate, m: Metrics) -> bool:
    """Whether a result fails, and may do so by amplified rounding."""
    over = max(gate.shares(m).values(), default=0.0)
    return not m.special and 1.0 < over < HOPELESS


def amplification(
    run: Callable[[np.random.Generator], Sequence[np.ndarray]], exact: Sequence[np.ndarray],
    tries: int,
) -> list[Amplified]:  # fmt: skip
    """For each output, what `run` makes of inputs that are off, beside `exact`, what it makes of
    the inputs themselves. Rows are the first axis.
    """
    sums = [_Sums(right) for right in exact]
    for number in range(tries):
        for output, of_output in zip(run(np.random.default_rng(number)), sums, strict=True):
            of_output.add(output)
    return [of_output.result(tries) for of_output in sums]


class _Sums:
    """Sums over the tries of one output."""

    def __init__(self, exact: np.ndarray) -> None:
        self._finite = np.isfinite(exact)
        self._right = np.where(self._finite, exact, 0.0).astype(np.float64)
        self._power = float((self._right * self._right).sum())
        self._squares = np.zeros(self._right.shape)
        self._slope = 0.0

    def add(self, got: np.ndarray) -> None:
        both = self._finite & np.isfinite(got)
        error = np.where(both, got, self._right) - self._right
        self._squares += error * error
        if self._power:
            self._slope += (float((error * self._right).sum()) / self._power) ** 2

    def result(self, tries: int) -> Amplified:
        squares = self._squares / tries
        # A row moves as one where what all its elements are made of does.
        rows = squares.reshape(len(squares), -1).sum(1) if squares.ndim else squares[None]
        return Amplified(
            rel_l2=float(squares.sum() / self._power) ** 0.5 if self._power else 0.0,
            slope=(self._slope / tries) ** 0.5,
            numbers=independent(rows),
            tries=tries,
            elements=np.sqrt(squares),
        )
