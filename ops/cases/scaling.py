"""Cases of the product with a number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..testing import Case, Testing, judged_by
from .generators import generator, hostile_rows, normal, strided, to_bfloat16

FACTORS = {
    "Granite's residual multiplier": 0.22,
    "its embedding multiplier": 12.0,
    "a divisor": 1 / 13,
    "one half": 0.5,
}


def _cases(dtype: str) -> Iterator[Case]:
    rng = generator("scale")
    x = hostile_rows(rng, dtype, 9, 199, ("normal", "zero", "tiny", "outlier", "mean", "spread"))
    for name, factor in FACTORS.items():
        yield Case(name, {"x": x, "factor": factor})
    yield Case("strided", {"x": strided(x), "factor": 0.22})
    yield Case("several axes", {"x": normal(rng, dtype, 3, 5, 33), "factor": 0.22})
    if dtype == "bfloat16":
        yield Case(
            "Granite 3 8B, 2048 tokens",
            lambda: {"x": normal(rng, dtype, 2048, 4096), "factor": 0.22},
            ("bench",),
        )


def _tail_lost(xp: Any, x: Any, factor: float) -> Any:
    return np.where(np.arange(x.shape[-1]) < x.shape[-1] - 1, x * factor, x)


judged_by(
    "scale",
    Testing(
        _cases,
        magnitude=lambda a: np.abs(a["x"] * a["factor"]),
        rows=("x",),
        mutants={
            "factor ignored": lambda xp, x, factor: x,
            "factor rounded to bfloat16": lambda xp, x, factor: (
                x * float(to_bfloat16(np.float32(factor)))
            ),
            "divided": lambda xp, x, factor: x / factor,
            "scaled by 1.005": lambda xp, x, factor: x * factor * 1.005,
            "last channel left": _tail_lost,
        },
    ),
)
