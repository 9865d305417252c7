"""Cases of rms_norm, add, both in one, and of the norms of all heads, on one shard or several."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ..testing import Arguments, Bound, Case, Testing, judged_by, limits
from .generators import generator, hostile_rows, normal, strided, to_bfloat16, weights

EPS = 1e-6


def _inputs(name: str, dtype: str) -> Iterator[tuple[str, np.ndarray, tuple[str, ...]]]:
    """(name, x, tags): the last axis is normed."""
    rng = generator(name)
    # 200 channels: a tail of 64 is a third, and a vector width that does not divide it shows.
    hostile = hostile_rows(rng, dtype, 9, 200)
    # the variance is of the size of eps
    hostile[7] = (rng.normal(size=200) * 1e-3).astype(hostile.dtype)
    hostile[8] = (rng.normal(size=200) * 1e-4).astype(hostile.dtype)
    yield "hostile rows", hostile, ("ci",)
    yield "strided", strided(hostile), ("ci",)
    # The mean is of positive numbers only, so a lost tail is seen at any width.
    yield "real width", normal(rng, dtype, 3, 4096), ("ci",)
    yield "heads", normal(rng, dtype, 5, 3, 33), ("ci",)
    if dtype == "bfloat16":
        yield "2048 tokens of 1024", normal(rng, dtype, 2048, 1024), ("bench",)
        yield "64 tokens of 4096", normal(rng, dtype, 64, 4096), ("bench",)


def _rms_cases(dtype: str) -> Iterator[Case]:
    rng = generator("rms_norm weight")
    for name, x, tags in _inputs("rms_norm", dtype):
        yield Case(name, {"x": x, "weight": weights(rng, dtype, x.shape[-1]), "eps": EPS}, tags)

    if dtype != "float32":
        # More digits than the storage dtype has: 1 + weight of Gemma.
        x, weight = normal(rng, dtype, 9, 200), weights(rng, "float32", 200)
        yield Case("weight in float32", {"x": x, "weight": weight, "eps": EPS})


def _norm(y: Any, weight: Any, eps: float, fault: str = "", source: Any = None) -> Any:
    """rms_norm with a fault; the variance is that of `source`."""
    source = y if source is None else source
    if fault.startswith("last 64"):
        square = (
            (source[..., :-64] ** 2).mean(-1, keepdims=True)
            if source.shape[-1] > 64
            else np.ones_like(y)
        )
    elif fault == "last channel skipped":
        square = (source[..., :-1] ** 2).mean(-1, keepdims=True)
    elif fault == "mean over n - 1":
        square = (source**2).sum(-1, keepdims=True) / (source.shape[-1] - 1)
    elif fault == "variance, not mean square":
        square = source.var(-1, keepdims=True)
    elif fault == "squares rounded to bfloat16":
        square = to_bfloat16(source**2).mean(-1, keepdims=True)
    else:
        square = (source**2).mean(-1, keepdims=True)
    eps = {"eps ten times": 10 * eps, "eps ignored": 0.0, "eps 1e-5": 1e-5}.get(fault, eps)
    root = np.sqrt(square) + eps if fault == "eps outside the root" else np.sqrt(square + eps)
    if fault == "rounded before the weight":
        return to_bfloat16(y / root) * weight
    if fault == "centred":
        return (y - y.mean(-1, keepdims=True)) / root * weight
    scale = {"scaled by 1.005": 1.005, "scaled by 1.001": 1.001}.get(fault, 1.0)
    return y / root * (1.0 + weight if fault == "1 + weight" else weight) * scale


NORM_FAULTS = (
    *(
        "last 64 channels skipped in the variance",
        "last channel skipped",
        "mean over n - 1",
        "centred",
    ),
    *("variance, not mean square", "squares rounded to bfloat16", "eps ten times", "eps ignored"),
    *(
        "eps outside the root",
        "rounded before the weight",
        "scaled by 1.005",
        "scaled by 1.001",
        "1 + weight",
    ),
)


UNWEIGHTED = ("rounded before the weight", "1 + weight")
"""Faults that a norm without a weight cannot have, or that are none there."""


def _wrong_rms_norm(xp: Any, x: Any, weight: Any, eps: float, fault: str) -> Any:
    return _norm(x, weight, eps, fault)


def _all_rows(xp: Any, x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x**2).mean() + eps) * weight


judged_by(
    "rms_norm",
    Testing(
        _rms_cases,
        rows=("x",),
        mutants={
            **{fault: partial(_wrong_rms_norm, fault=fault) for fault in NORM_FAULTS},
            "weight ignored": lambda xp, x, weight, eps: _norm(x, np.ones_like(weight), eps),
            "weight shifted": lambda xp, x, weight, eps: _norm(x, np.roll(weight, 1), eps),
            "one variance for all rows": _all_rows,
        },
        truth=partial(_wrong_rms_norm, fault=""),
    ),
)


# --- unit_rms_norm
# ----------------------------------------------------------------------------------------------


def _unit_cases(dtype: str) -> Iterator[Case]:
    for name, x, tags in _inputs("unit_rms_norm", dtype):
        yield Case(name, {"x": x, "eps": EPS}, tags)


judged_by(
    "unit_rms_norm",
    Testing(
        _unit_cases,
        rows=("x",),
        mutants={
            **{
                fault: partial(lambda xp, x, eps, fault: _norm(x, 1.0, eps, fault), fault=fault)
                for fault in NORM_FAULTS
                if fault not in UNWEIGHTED
            },
            "a weight": lambda xp, x, eps: _norm(x, 1.0 + 0.01 * (np.arange(x.shape[-1]) % 3), eps),
            "one variance for all rows": lambda xp, x, eps: _all_rows(xp, x, 1.0, eps),
        },
        truth=lambda xp, x, eps: _norm(x, 1.0, eps),
    ),
)


# --- add
# --------------------------------------------------------------------------------------------------


def _residual(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """A residual beside x: of its size in each row, cancelling it in the first, with an outlier
    like trained models.
    """
    size = np.abs(x.astype(np.float64)).max(-1, keepdims=True)
    largest = limits(x.dtype).largest
    residual = (
        (rng.normal(size=x.shape) * np.where(size == 0, 1.0, size))
        .clip(-largest, largest)
        .astype(x.dtype)
    )
    residual[0] = -x[0] * x.dtype.type(1.0)
    return residual


def _add_cases(dtype: str) -> Iterator[Case]:
    rng = generator("residual")
    for name, x, tags in _inputs("add", dtype):
        if x.ndim == 2:
            yield Case(name, {"x": x, "residual": _residual(rng, x)}, tags)


judged_by(
    "add",
    Testing(
        _add_cases,
        bitwise=True,
        rows=("x", "residual"),
        mutants={
            "residual ignored": lambda xp, x, residual: x,
            "residual subtracted": lambda xp, x, residual: x - residual,
            "residual rounded to bfloat16": lambda xp, x, residual: (
                x + to_bfloat16(residual).astype(x.dtype)
            ),
            "cut, not rounded": lambda xp, x, residual: _cut(x, residual),
            "last channel copied": lambda xp, x, residual: np.where(
                np.arange(x.shape[-1]) < x.shape[-1] - 1, x + residual, x
            ),
        },
    ),
)


def _cut(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """x + residual rounded towards 0."""
    exact = x.astype(np.float64) + residual.astype(np.float64)
    total = exact.astype(x.dtype)
    over = np.abs(total.astype(np.float64)) > np.abs(exact)
    return np.where(over, np.nextafter(total, np.zeros_like(total)), total)


# --- fused_add_rms_norm
# ----------------------------------------------------------------------------------------------


def _fused_cases(dtype: str) -> Iterator[Case]:
    rng = generator("fused_add_rms_norm")
    for name, x, tags in _inputs("fused_add_rms_norm", dtype):
        if x.ndim == 2:
            arguments: Arguments = {
                "x": x,
                "residual": _residual(rng, x),
                "weight": weights(rng, dtype, x.shape[-1]),
            }
            yield Case(name, arguments | {"eps": EPS}, tags)
    # One channel holds the variance, and its sum lies just below the middle of two bfloat16
    # numbers: whoever takes the variance of the sum before it was rounded is off by half a unit in
    # every channel.
    x, residual = normal(rng, dtype, 9, 200), normal(rng, dtype, 9, 200)
    x[:, 7], residual[:, 7] = 4096.0, 15.75
    yield Case(
        "the outlier is rounded far",
        {"x": x, "residual": residual, "weight": weights(rng, dtype, 200), "eps": EPS},
    )


def _wrong_fused(ops: Any, x: Any, residual: Any, weight: Any, eps: float, fault: str) -> Any:
    total = ops.rounded(x + residual)
    if fault == "variance of the unrounded sum":
        return _norm(total, weight, eps, source=x + residual), total
    if fault == "norm of the unrounded sum":
        return _norm(x + residual, weight, eps), x + residual
    if fault == "norm of x only":
        return _norm(x, weight, eps), total
    if fault == "residual returned":
        return _norm(total, weight, eps), residual
    if fault == "norm returned twice":
        return _norm(total, weight, eps), _norm(total, weight, eps)
    if fault == "residual twice":
        return _norm(total + residual, weight, eps), total + residual
    return _norm(total, weight, eps, fault), total


FUSED_FAULTS = (
    *(
        "variance of the unrounded sum",
        "norm of the unrounded sum",
        "norm of x only",
        "residual returned",
    ),
    *("norm returned twice", "residual twice"),
)

FUSED = Testing(
    _fused_cases,
    rows=("x", "residual"),
    mutants={fault: partial(_wrong_fused, fault=fault) for fault in (*FUSED_FAULTS, *NORM_FAULTS)},
    truth=partial(_wrong_fused, fault=""),
)
# Over one shard the sum is what it is of.
for _op in ("fused_add_rms_norm", "reduce_add_rms_norm"):
    judged_by(_op, FUSED)


# --- norm_add_rms_norm
# ----------------------------------------------------------------------------------------------


def _sandwich_cases(dtype: str) -> Iterator[Case]:
    """Those of fused_add_rms_norm, whose second norm has the smaller eps."""
    rng = generator("norm_add_rms_norm")
    for case in _fused_cases(dtype):
        width = case.arguments["x"].shape[-1]
        more = {"x_weight": weights(rng, dtype, width), "x_eps": 10 * EPS}
        yield Case(case.name, case.arguments | more, case.tags)
    wide = {name: weights(rng, "float32", width) for name in ("x_weight", "weight")}
    yield Case("weights in float32", case.arguments | more | wide)


def _wrong_sandwich(
    ops: Any, x: Any, x_weight: Any, residual: Any, weight: Any, x_eps: float, eps: float,
    fault: str,
) -> Any:  # fmt: skip
    if fault == "weights swapped":
        x_weight, weight = weight, x_weight
    if fault == "eps swapped":
        x_eps, eps = eps, x_eps
    if fault.startswith("first norm: "):
        normed = ops.rounded(_norm(x, x_weight, x_eps, fault.removeprefix("first norm: ")))
    else:
        normed = x if fault == "x not normed" else ops.rounded(_norm(x, x_weight, x_eps))
    if fault == "sum normed twice":
        total = ops.rounded(_norm(x + residual, x_weight, x_eps))
        return _norm(total, weight, eps), total
    return _wrong_fused(ops, normed, residual, weight, eps, fault)


def _sandwich_sizes(a: Arguments) -> Any:
    """What relative errors of 1 in the first norm and in the sum do to the norm of the sum, and
    to the sum.
    """
    normed = _norm(a["x"], a["x_weight"], a["x_eps"])
    total = normed + a["residual"]
    sizes = np.abs(normed) + np.abs(total)
    scale = np.abs(a["weight"]) / np.sqrt((total**2).mean(-1, keepdims=True) + a["eps"])
    return sizes * scale, sizes


SANDWICH_FAULTS = (
    *("weights swapped", "eps swapped", "x not normed", "sum normed twice"),
    *(f"first norm: {fault}" for fault in NORM_FAULTS),
    *("norm of x only", "residual returned", "norm returned twice", "residual twice"),
    *NORM_FAULTS,
)
"""Not that the sum is rounded before it is normed: that the first norm is hides it."""

judged_by(
    "norm_add_rms_norm",
    Testing(
        _sandwich_cases,
        Bound(
            inner=1.0,
            ties=1.0,
            reason="the first norm and the sum are rounded on the way, by the oracle too",
        ),
        magnitude=_sandwich_sizes,
        rows=("x", "residual"),
        mutants={fault: partial(_wrong_sandwich, fault=fault) for fault in SANDWICH_FAULTS},
        truth=partial(_wrong_sandwich, fault=""),
    ),
)


# --- rms_norm_pair
# ----------------------------------------------------------------------------------------------


def _pair_cases(dtype: str) -> Iterator[Case]:
    """Those of rms_norm, of rows."""
    rng = generator("rms_norm_pair")
    for case in _rms_cases(dtype):
        x, weight = case.arguments["x"], case.arguments["weight"]
        if x.ndim == 2:
            second = weights(rng, str(weight.dtype), x.shape[-1])
            given = {"x": x, "first": weight, "second": second, "eps": EPS}
            yield Case(case.name, given, case.tags)


def _wrong_pair(xp: Any, x: Any, first: Any, second: Any, eps: float, fault: str = "") -> Any:
    if fault == "weights swapped":
        first, second = second, first
    normed = _norm(x, first, eps, fault)
    if fault == "second of the first":
        return normed, _norm(normed, second, eps)
    if fault == "first twice":
        return normed, normed
    return normed, _norm(x, second, eps, fault)


PAIR_FAULTS = ("weights swapped", "second of the first", "first twice", *NORM_FAULTS)

judged_by(
    "rms_norm_pair",
    Testing(
        _pair_cases,
        rows=("x",),
        mutants={fault: partial(_wrong_pair, fault=fault) for fault in PAIR_FAULTS},
        truth=_wrong_pair,
    ),
)


# --- wide_qk_norm
# ----------------------------------------------------------------------------------------------


def _wide_cases(dtype: str) -> Iterator[Case]:
    rng = generator("wide_qk_norm")
    for name, tokens, q, kv in (
        ("q wider than k", 9, 96, 48),
        ("odd sizes", 5, 35, 7),
        ("one token", 1, 64, 64),
    ):
        qkv = normal(rng, dtype, tokens, q + 2 * kv)
        qkv[: tokens // 2] *= qkv.dtype.type(30.0)
        if tokens > 1:
            # What is small beside eps.
            qkv[-1] = (rng.normal(size=q + 2 * kv) * 1e-3).astype(qkv.dtype)
        arguments: Arguments = {
            "qkv": qkv, "q_weight": weights(rng, dtype, q), "k_weight": weights(rng, dtype, kv),
            "eps": EPS,
        }  # fmt: skip
        yield Case(name, arguments)
    wide = {name: weights(rng, "float32", 64) for name in ("q_weight", "k_weight")}
    yield Case("weights in float32", arguments | wide)
    yield Case("strided", arguments | {"qkv": strided(qkv)})
    if dtype == "bfloat16":
        yield Case("OLMo 2 7B, 2048 tokens", _big_wide, ("bench",))


def _big_wide() -> Arguments:
    rng = generator("bench wide_qk_norm")
    made = {name: weights(rng, "bfloat16", 4096) for name in ("q_weight", "k_weight")}
    return {"qkv": normal(rng, "bfloat16", 2048, 3 * 4096), **made, "eps": EPS}


def _wrong_wide(xp: Any, qkv: Any, q_weight: Any, k_weight: Any, eps: float, fault: str) -> Any:
    q, kv = len(q_weight), len(k_weight)
    query, key, value = qkv[:, :q], qkv[:, q : q + kv], qkv[:, q + kv :]
    eps = {"eps ignored": 0.0, "eps ten times": 10 * eps}.get(fault, eps)
    if fault == "k with the variance of q":
        key = _norm(key, k_weight, eps, source=query)
    elif fault != "k not normed":
        key = _norm(key, k_weight, eps)
    if fault == "v normed":
        value = _norm(value, k_weight, eps)
    if fault == "last channel skipped":
        query = _norm(query, q_weight, eps, fault)
    else:
        query = _norm(query, q_weight, eps)
    out = np.concatenate([query, key, value], axis=-1)
    return out * 1.005 if fault == "scaled by 1.005" else out


WIDE_FAULTS = (
    *("k with the variance of q", "k not normed", "v normed", "last channel skipped"),
    *("eps ignored", "eps ten times", "scaled by 1.005"),
)

judged_by(
    "wide_qk_norm",
    Testing(
        _wide_cases,
        rows=("qkv",),
        mutants={fault: partial(_wrong_wide, fault=fault) for fault in WIDE_FAULTS},
        truth=partial(_wrong_wide, fault=""),
    ),
)


# --- qk_mean_squares, norm_qk_by_means
# ----------------------------------------------------------------------------------------------


def _squares(qkv: Any, q_weight: Any, k_weight: Any) -> tuple[Any, Any]:
    q, kv = len(q_weight), len(k_weight)
    y = np.asarray(qkv, np.float64) ** 2
    return y[:, :q], y[:, q : q + kv]


def _dealt_cases(dtype: str, means: bool) -> Iterator[Case]:
    """Those of `wide_qk_norm`, as of one of several shards."""
    rng = generator("wide norms of a shard")
    for case in _wide_cases(dtype):
        # What no test runs is large, and made where it is asked for.
        ci = "ci" in case.tags
        source = _dealt(case, means, rng) if ci else partial(_dealt, case, means)
        yield Case(case.name, source, case.tags)


def _dealt(case: Case, means: bool, rng: np.random.Generator | None = None) -> Arguments:
    """What a shard is given of a case: the means of all shards, or how many entries they have."""
    given, names = case.arguments, ("qkv", "q_weight", "k_weight")
    if means:
        rng = rng or generator("bench wide norms of a shard")
        q, k = (s.mean(-1, keepdims=True) for s in _squares(*(given[name] for name in names)))
        others = rng.uniform(0.3, 1.7, size=(2, len(q), 1))
        found = np.concatenate([q * others[0], k * others[1]], -1).astype(np.float32)
        return given | {"means": found}
    entries = {"q_entries": 3 * len(given["q_weight"]), "k_entries": 2 * len(given["k_weight"])}
    return {name: given[name] for name in names} | entries


def _wrong_means(
    xp: Any, qkv: Any, q_weight: Any, k_weight: Any, q_entries: int, k_entries: int, fault: str
) -> Any:
    query, key = _squares(qkv, q_weight, k_weight)
    if fault == "of this shard's entries":
        q_entries, k_entries = len(q_weight), len(k_weight)
    elif fault == "entries swapped":
        q_entries, k_entries = k_entries, q_entries
    elif fault == "last channel skipped":
        query = query[:, :-1]
    elif fault == "v beside k":
        key = np.asarray(qkv, np.float64)[:, len(q_weight) :] ** 2
    sums = query.sum(-1) / q_entries, key.sum(-1) / k_entries
    out = np.stack(sums[::-1] if fault == "swapped" else sums, -1)
    return out * 1.005 if fault == "scaled by 1.005" else out


MEANS_FAULTS = (
    *("of this shard's entries", "entries swapped", "last channel skipped", "v beside k"),
    *("swapped", "scaled by 1.005"),
)

judged_by(
    "qk_mean_squares",
    Testing(
        partial(_dealt_cases, means=False),
        Bound(accumulated=16.0),
        rows=("qkv",),
        mutants={fault: partial(_wrong_means, fault=fault) for fault in MEANS_FAULTS},
        truth=partial(_wrong_means, fault=""),
    ),
)


def _wrong_by_means(
    xp: Any, qkv: Any, means: Any, q_weight: Any, k_weight: Any, eps: float, fault: str
) -> Any:
    if fault == "of this shard's entries":
        return _wrong_wide(xp, qkv, q_weight, k_weight, eps, "")
    q, kv = len(q_weight), len(k_weight)
    eps = {"eps ignored": 0.0, "eps ten times": 10 * eps}.get(fault, eps)
    means = means[:, ::-1] if fault == "means swapped" else means
    scales = 1 / np.sqrt(means.astype(np.float64) + eps)
    query, key = qkv[:, :q] * scales[:, :1] * q_weight, qkv[:, q : q + kv] * scales[:, 1:]
    out = np.concatenate([query, key * k_weight, qkv[:, q + kv :]], -1)
    if fault == "k not normed":
        out[:, q : q + kv] = qkv[:, q : q + kv]
    elif fault == "v normed":
        out[:, q + kv :] *= scales[:, 1:]
    return out * 1.005 if fault == "scaled by 1.005" else out


BY_MEANS_FAULTS = (
    *("of this shard's entries", "means swapped", "k not normed", "v normed"),
    *("eps ignored", "eps ten times", "scaled by 1.005"),
)

judged_by(
    "norm_qk_by_means",
    Testing(
        partial(_dealt_cases, means=True),
        rows=("qkv", "means"),
        mutants={fault: partial(_wrong_by_means, fault=fault) for fault in BY_MEANS_FAULTS},
        truth=partial(_wrong_by_means, fault=""),
    ),
)
