"""How much an op or a layer amplifies errors of its inputs, found by trying.

A sum that cancels, or a softmax whose scores are large, makes a large relative error of roundings
that are all right. Its exact reference, run again on inputs that are off by at most half a float32
ulp each (`sides/jitter.py`), says how large. Several tries are needed: the one order of sums that a
faithful reference has may be exact by luck. Only what exceeds the fixed limits of mode S is tried,
so that a run in which nothing does costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .gates import Amplified, Gate
from .metrics import Metrics

TRIES = 8
"""Their root mean square is within 30 % or so of what many would give, where limits have room for
a multiple.
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
    run: Callable[[np.random.Generator], Sequence[np.ndarray]], exact: Sequence[np.ndarray]
) -> list[Amplified]:
    """For each output, what `run` makes of inputs that are off, beside `exact`, what it makes of
    the inputs themselves.
    """
    tries = [run(np.random.default_rng(number)) for number in range(TRIES)]
    return [
        _pooled(right, [outputs[index] for outputs in tries]) for index, right in enumerate(exact)
    ]


def _pooled(exact: np.ndarray, outputs: Sequence[np.ndarray]) -> Amplified:
    right = np.where(np.isfinite(exact), exact, 0.0).astype(np.float64)
    power = float((right * right).sum())
    found = list(_errors(exact, right, outputs))
    if not power:
        return Amplified(0.0, 0.0)
    rel_l2 = np.mean([(error * error).sum() for error in found]) / power
    slope = np.mean([((error * right).sum() / power) ** 2 for error in found])
    return Amplified(float(rel_l2) ** 0.5, float(slope) ** 0.5)


def _errors(
    exact: np.ndarray, right: np.ndarray, outputs: Sequence[np.ndarray]
) -> Iterator[np.ndarray]:
    for got in outputs:
        both = np.isfinite(exact) & np.isfinite(got)
        yield np.where(both, got, right) - right
