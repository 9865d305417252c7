"""Cases of products with a number of the model or of a checkpoint, and with one for each token."""

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


def _token_cases(dtype: str) -> Iterator[Case]:
    rng = generator("scale_tokens")
    x = normal(rng, dtype, 9, 3, 37)
    x[4], x[5, 1, 2] = 0.0, 300.0
    # As Ministral 3 has them, from the first token to one far out.
    factor = (1.0 + 0.1 * np.log1p(np.arange(9.0))).astype(np.float32)
    yield Case("a factor for each token", {"x": x, "factor": factor})
    table = np.stack([np.full(9, np.nan, np.float32), factor], axis=1)
    yield Case("a column of a table", {"x": strided(x), "factor": table[:, 1]})
    yield Case("one token", {"x": x[:1], "factor": factor[3:4]})
    if dtype == "bfloat16":
        yield Case(
            "Ministral 3 8B, 2048 tokens",
            lambda: {
                "x": normal(rng, dtype, 2048, 32, 128),
                "factor": rng.uniform(1.0, 1.3, 2048).astype(np.float32),
            },
            ("bench",),
        )


judged_by(
    "scale_tokens",
    Testing(
        _token_cases,
        magnitude=lambda a: np.abs(a["x"] * a["factor"][:, None, None]),
        rows=("x", "factor"),
        mutants={
            "factor ignored": lambda xp, x, factor: x,
            "factor rounded to bfloat16": lambda xp, x, factor: (
                x * to_bfloat16(factor)[:, None, None]
            ),
            "factor of the next token": lambda xp, x, factor: (
                x * (np.roll(factor, -1) + 0.001)[:, None, None]
            ),
            "factor of the first token": lambda xp, x, factor: (
                x * (factor[0] + 0.001 * (len(factor) == 1))
            ),
            "scaled by 1.005": lambda xp, x, factor: x * factor[:, None, None] * 1.005,
            "last head left": lambda xp, x, factor: np.where(
                np.arange(x.shape[1])[:, None] < x.shape[1] - 1, x * factor[:, None, None], x
            ),
        },
    ),
)


def _by_cases(dtype: str) -> Iterator[Case]:
    rng = generator("scale_by")
    x = hostile_rows(rng, dtype, 9, 199, ("normal", "zero", "tiny", "outlier", "mean", "spread"))
    for value in (0.0173, 0.7071, 3.3):
        yield Case(f"factor {value}", {"x": x, "factor": np.array([value]).astype(x.dtype)})
    yield Case("factor in float32", {"x": x, "factor": np.array([0.7071], np.float32)})
    yield Case("strided", {"x": strided(x), "factor": np.array([0.22], np.float32)})
    yield Case("one token", {"x": x[:1], "factor": np.array([0.5], np.float32)})
    if dtype == "bfloat16":
        yield Case(
            "Gemma 4 31B, 2048 tokens",
            lambda: {
                "x": normal(rng, dtype, 2048, 5376),
                "factor": np.array([0.71]).astype(x.dtype),
            },
            ("bench",),
        )


judged_by(
    "scale_by",
    Testing(
        _by_cases,
        magnitude=lambda a: np.abs(a["x"] * a["factor"]),
        rows=("x",),
        mutants={
            "factor dropped": lambda xp, x, factor: x,
            "divided": lambda xp, x, factor: x / factor,
            "added": lambda xp, x, factor: x + factor,
            "scaled by 1.005": lambda xp, x, factor: x * factor * 1.005,
            "last channel left": lambda xp, x, factor: np.where(
                np.arange(x.shape[-1]) < x.shape[-1] - 1, x * factor, x
            ),
        },
    ),
)
