"""Cases of the mixture of experts: empty experts, one that takes all, ties, choices of no
expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ..namespaces import namespace
from ..reference.narrow import KINDS, widened_weight
from ..testing import DTYPES, Arguments, Bound, Case, Testing, judged_by
from .dense import COARSE, FLUSHED, GELU, SILU, Gate, chain, mlp_sizes
from .generators import generator, hostile_rows, normal, strided, to_bfloat16

ROWS = ("normal", "zero", "tiny", "outlier", "mean", "spread")


def _experts(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Weights [expert n k], made expert by expert: whole models would not fit as float64."""
    made = np.empty(shape, DTYPES[dtype])
    for expert in made:
        expert[:] = rng.normal(size=shape[1:]) * shape[-1] ** -0.5
    return made


# --- moe_route
# --------------------------------------------------------------------------------------------------


def _route_cases(dtype: str) -> Iterator[Case]:
    rng = generator("moe_route")
    x = hostile_rows(rng, dtype, 12, 33)
    x[7, 3:30:9] = x[7].max()  # three are best
    x[8] = -1.0
    x[8, [4, 20, 21]] = 2.0, 1.0, 1.0  # the second is a tie
    x[9, [0, 5, 32]] = -np.inf
    x[10, 7] = np.nan
    x[11] = np.linspace(0, -120, 33).astype(x.dtype)  # weights down to the smallest numbers
    for top_k in (1, 2, 8, 33):
        for renormalize in (False, True):
            name = f"{top_k} of 33, {renormalize=}"
            yield Case(name, _routing(x, top_k, renormalize))
    yield Case("strided", _routing(strided(x), 4, True))
    rng = generator("moe_route shift")
    shift = normal(rng, dtype, 33, scale=3.0)
    yield Case("shifted", _routing(normal(rng, dtype, 12, 33), 4, True) | {"shift": shift})
    rng = generator("moe_route factor")
    factor = rng.uniform(0.3, 2.0, 33).astype(np.float32)
    by_expert = _routing(normal(rng, dtype, 12, 33), 4, True, np.arange(12) % 4 - 1)
    yield Case("a factor of each expert", by_expert | {"factor": factor})
    padded = x.copy()
    padded[5:] = x[:7]
    yield Case("rows of padding", _routing(padded, 3, True, np.arange(12) % 5 - 1))
    yield Case("all rows are padding", _routing(padded, 3, False, np.full(12, -1)))
    if dtype == "bfloat16":
        for name, tokens, experts, k in (
            ("Qwen3-30B-A3B", 2048, 128, 8),
            ("Mixtral-8x7B", 2048, 8, 2),
        ):
            logits = normal(generator("bench moe_route"), dtype, tokens, experts)
            yield Case(f"{name}, {tokens} tokens", _routing(logits, k, True), ("bench",))


def _routing(
    logits: np.ndarray, top_k: int, renormalize: bool, slots: np.ndarray | None = None
) -> Arguments:
    """Arguments of `moe_route`, no row of which is padding unless `slots` says it."""
    slots = np.arange(len(logits)) if slots is None else slots
    given = {"logits": logits, "slots": slots.astype(np.int32)}
    return given | {"top_k": top_k, "renormalize": renormalize}


def _route_magnitude(a: Arguments) -> Any:
    """An error e of a distance to the best logit is a factor exp(e) of the weight."""
    weights, experts = _route(None, **a)
    logits = a["logits"] + (0.0 if a.get("shift") is None else a["shift"])
    chosen = np.take_along_axis(logits, np.maximum(experts, 0), -1)
    gap = np.max(logits, axis=-1, keepdims=True) - chosen
    return weights * (1.0 + np.where(np.isfinite(gap), gap, 0.0)) + FLUSHED, None


def _route(
    xp: Any,
    logits: Any,
    slots: Any,
    top_k: int,
    renormalize: bool,
    shift: Any = None,
    factor: Any = None,
    fault: str = "",
) -> Any:
    if shift is not None and fault != "shift left out":
        logits = logits + shift
    keys = np.where(np.isnan(logits), -np.inf, logits)
    if fault == "chosen by rounded logits":
        keys = to_bfloat16(keys)
    elif fault == "last expert never chosen":
        keys[:, -1] = -np.inf
    elif fault == "NaN chosen first":
        keys = np.where(np.isnan(logits), np.inf, logits)
    ids = np.argsort(-keys, axis=-1, kind="stable")[:, :top_k]
    if fault == "ties to the higher id":
        ids = keys.shape[1] - 1 - np.argsort(-keys[:, ::-1], axis=-1, kind="stable")[:, :top_k]
    elif fault == "ordered by id":
        ids = np.sort(ids, axis=-1)
    power = np.exp(logits - logits.max(-1, keepdims=True))
    if fault == "sigmoid":
        power = 1.0 / (1.0 + np.exp(-logits))
    chosen = np.take_along_axis(power, ids, -1)
    flag = {"always renormalised": True, "never renormalised": False}.get(fault, renormalize)
    weights = chosen / (chosen if flag else power).sum(-1, keepdims=True)
    if factor is not None and fault != "factor left out":
        weights = weights * factor[np.arange(top_k) if fault == "factor by rank" else ids]
        if fault == "renormalised behind the factor":
            weights = weights / weights.sum(-1, keepdims=True)
    if fault == "rounded to bfloat16":
        weights = to_bfloat16(weights)
    elif fault == "weights shifted":
        weights = np.roll(weights, 1, axis=-1)
    elif fault == "scaled by 1.005":
        weights = weights * 1.005
    real = (slots > 0 if fault == "slot 0 is padding" else slots >= 0)[:, None]
    if fault == "padding chooses expert 0":
        return np.where(real, weights, 0.0), np.where(real, ids, 0).astype(np.int32)
    return np.where(real, weights, 0.0), np.where(real, ids, -1).astype(np.int32)


ROUTE_FAULTS = (
    *(
        "chosen by rounded logits",
        "last expert never chosen",
        "NaN chosen first",
        "ties to the higher id",
    ),
    *(
        "ordered by id",
        "sigmoid",
        "always renormalised",
        "never renormalised",
        "rounded to bfloat16",
    ),
    *("weights shifted", "scaled by 1.005", "slot 0 is padding", "padding chooses expert 0"),
    *("shift left out", "factor left out", "factor by rank", "renormalised behind the factor"),
)

judged_by(
    "moe_route",
    Testing(
        _route_cases,
        magnitude=_route_magnitude,
        rows=("logits", "slots"),
        mutants={fault: partial(_route, fault=fault) for fault in ROUTE_FAULTS},
        truth=_route,
    ),
)


# --- moe_route_sigmoid
# --------------------------------------------------------------------------------------------------


def _sigmoid_cases(dtype: str) -> Iterator[Case]:
    rng = generator("moe_route_sigmoid")
    x = normal(rng, dtype, 12, 24)
    x[3] *= 8.0
    x[4] = 0.0  # the biases alone decide
    x[5] -= x.dtype.type(9.0)
    x[10, 7] = np.nan
    bias = (rng.permutation(24) / 40.0).astype(np.float32)
    for top_k, renormalize, groups, kept, scale in (
        (1, True, 1, 1, 1.0),
        (4, True, 1, 1, 2.5),
        (4, False, 1, 1, 1.0),
        (6, True, 4, 2, 1.7),
        (3, False, 8, 1, 1.0),
    ):
        given: Arguments = {"top_k": top_k, "renormalize": renormalize, "groups": groups}
        given |= {"groups_kept": kept, "scale": scale, "slots": np.arange(12, dtype=np.int32)}
        name = f"{top_k} of 24, {kept} of {groups} groups, {renormalize=}"
        yield Case(name, {"logits": x, "bias": bias} | given)
    padding = (np.arange(12) % 4 - 1).astype(np.int32)
    yield Case("strided", {"logits": strided(x), "bias": bias} | given | {"slots": padding})


def _route_sigmoid(
    xp: Any,
    logits: Any,
    bias: Any,
    slots: Any,
    top_k: int,
    renormalize: bool,
    groups: int,
    groups_kept: int,
    scale: float,
    fault: str = "",
) -> Any:
    scores = 1.0 / (1.0 + np.exp(-logits))
    if fault == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
    choice = scores + (0.0 if fault == "no bias" else bias)
    choice = np.where(np.isnan(choice), -np.inf, choice)
    apart = choice.reshape(len(logits), groups, -1)
    best = np.sort(apart, -1)[:, :, -1 if fault == "groups by their best" else -2 :].sum(-1)
    keep = np.argsort(-best, axis=-1, kind="stable")[:, :groups_kept]
    kept = (keep[:, :, None] == np.arange(groups)).any(1)
    if fault == "all groups":
        kept[:] = True
    choice = np.where(kept[:, :, None], apart, -np.inf).reshape(choice.shape)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores + (bias if fault == "biased weights" else 0.0), ids, -1)
    weights = np.where(np.isnan(logits).any(-1, keepdims=True), np.nan, weights)
    if {"always renormalised": True, "never renormalised": False}.get(fault, renormalize):
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    weights = weights * (1.0 if fault == "no scale" else scale)
    if fault == "scaled by 1.005":
        weights = weights * 1.005
    elif fault == "rounded to bfloat16":
        weights = to_bfloat16(weights)
    real = (slots >= 0)[:, None] | (fault == "padding chooses")
    return np.where(real, weights, 0.0), np.where(real, ids, -1).astype(np.int32)


SIGMOID_FAULTS = (
    *("softmax", "no bias", "groups by their best", "all groups", "biased weights", "no scale"),
    *("always renormalised", "never renormalised", "scaled by 1.005", "rounded to bfloat16"),
    "padding chooses",
)

judged_by(
    "moe_route_sigmoid",
    Testing(
        _sigmoid_cases,
        magnitude=lambda a: (4.0 * _route_sigmoid(None, **a)[0], None),
        rows=("logits", "slots"),
        mutants={fault: partial(_route_sigmoid, fault=fault) for fault in SIGMOID_FAULTS},
        truth=_route_sigmoid,
    ),
)


# --- moe_route_biased
# --------------------------------------------------------------------------------------------------


def _biased_cases(dtype: str) -> Iterator[Case]:
    rng = generator("moe_route_biased")
    x = normal(rng, dtype, 12, 24)
    x[3] *= 8.0
    x[4] = 0.0  # the biases alone decide
    x[5] -= x.dtype.type(200.0)  # the softmax does not see it
    x[6, 2] += x.dtype.type(60.0)  # shares of all others are next to nothing
    x[10, 7] = np.nan
    bias = (rng.permutation(24) / 60.0).astype(np.float32)
    slots = np.arange(12, dtype=np.int32)
    for top_k in (1, 4, 24):
        for renormalize in (True, False):
            given: Arguments = {"slots": slots, "top_k": top_k, "renormalize": renormalize}
            name = f"{top_k} of 24, {renormalize=}"
            yield Case(name, {"logits": x, "bias": bias} | given)
    # Those chosen have so small a share that it is not divided by their sum.
    far = x.copy()
    far[:, 0] = x.dtype.type(45.0)
    shunned = np.where(np.arange(24) == 0, np.float32(-9.0), bias)
    given = {"logits": far, "bias": shunned, "slots": slots, "top_k": 3, "renormalize": True}
    yield Case("shares of nothing", given)
    padding = (np.arange(12) % 4 - 1).astype(np.int32)
    given = {"slots": padding, "top_k": 4, "renormalize": True}
    yield Case("strided", {"logits": strided(x), "bias": bias} | given)
    if dtype == "bfloat16":
        wide = normal(generator("bench moe_route_biased"), dtype, 2048, 64)
        given = {"slots": np.arange(2048, dtype=np.int32), "top_k": 6, "renormalize": True}
        zeros = np.zeros(64, np.float32)
        yield Case("ERNIE-4.5-21B-A3B", {"logits": wide, "bias": zeros} | given, ("bench",))


def _route_biased(
    xp: Any,
    logits: Any,
    bias: Any,
    slots: Any,
    top_k: int,
    renormalize: bool,
    fault: str = "",
) -> Any:
    spoiled = np.isnan(logits)
    known = np.where(spoiled, -np.inf, logits)
    power = np.exp(known - known.max(-1, keepdims=True))
    scores = power / power.sum(-1, keepdims=True)
    if fault == "sigmoid":
        scores = 1.0 / (1.0 + np.exp(-known))
    choice = scores + (0.0 if fault == "no bias" else bias)
    if fault == "bias on logits":
        choice = known + bias
    choice = np.where(spoiled, np.inf if fault == "NaN chosen first" else -np.inf, choice)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores + (bias if fault == "biased weights" else 0.0), ids, -1)
    if {"always renormalised": True, "never renormalised": False}.get(fault, renormalize):
        least = 0.0 if fault == "divided by any sum" else 1e-12
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), least)
    weights = np.where(spoiled.any(-1, keepdims=True), np.nan, weights)
    if fault == "scaled by 1.005":
        weights = weights * 1.005
    elif fault == "rounded to bfloat16":
        weights = to_bfloat16(weights)
    elif fault == "weights shifted":
        weights = np.roll(weights, 1, axis=-1)
    real = (slots >= 0)[:, None] | (fault == "padding chooses")
    return np.where(real, weights, 0.0), np.where(real, ids, -1).astype(np.int32)


def _biased_magnitude(a: Arguments) -> Any:
    """An error e of a distance to the best logit is a factor exp(e) of the share."""
    weights, experts = _route_biased(None, **a)
    chosen = np.take_along_axis(a["logits"], np.maximum(experts, 0), -1)
    gap = np.nanmax(a["logits"], axis=-1, keepdims=True) - chosen
    return weights * (4.0 + np.where(np.isfinite(gap), gap, 0.0)) + FLUSHED, None


BIASED_FAULTS = (
    *("sigmoid", "no bias", "bias on logits", "biased weights", "NaN chosen first"),
    *("always renormalised", "never renormalised", "divided by any sum", "weights shifted"),
    *("scaled by 1.005", "rounded to bfloat16", "padding chooses"),
)

judged_by(
    "moe_route_biased",
    Testing(
        _biased_cases,
        magnitude=_biased_magnitude,
        rows=("logits", "slots"),
        mutants={fault: partial(_route_biased, fault=fault) for fault in BIASED_FAULTS},
        truth=_route_biased,
    ),
)


# --- moe_permute and moe_unpermute
# -----------------------------------------------------------------------------------


def _choices(rng: np.random.Generator, tokens: int, k: int, experts: int) -> np.ndarray:
    """k different experts for each token."""
    return np.argsort(rng.random((tokens, experts)), axis=-1)[:, :k].astype(np.int32)


def _permute_cases(dtype: str) -> Iterator[Case]:
    rng = generator("moe_permute")
    x = hostile_rows(rng, dtype, 9, 35)
    x[8] = np.nan
    some = _choices(rng, 9, 3, 5)
    # expert 1 has no token, some token chooses 4 twice
    some = np.where(some == 1, 4, some).astype(np.int32)
    yield Case("an empty expert", {"x": x, "experts": some, "num_experts": 5})
    away = some.copy()
    away[::2, 1], away[3] = -1, 5  # no expert, and one of another process
    yield Case("choices of no expert", {"x": x, "experts": away, "num_experts": 5})
    yield Case(
        "one takes all",
        {"x": strided(x), "experts": np.full((9, 1), 2, np.int32), "num_experts": 4},
    )
    yield Case("no choice", {"x": x, "experts": np.full((9, 2), -1, np.int32), "num_experts": 3})
    if dtype == "bfloat16":
        yield Case("Qwen3-30B-A3B, 2048 tokens", _big_permute, ("bench",))


def _big_permute() -> Arguments:
    rng = generator("bench moe_permute")
    return {
        "x": normal(rng, "bfloat16", 2048, 2048),
        "experts": _choices(rng, 2048, 8, 128),
        "num_experts": 128,
    }


def _wrong_permute(xp: Any, x: Any, experts: Any, num_experts: int, fault: str) -> Any:
    flat, k = experts.reshape(-1), experts.shape[1]
    real = (flat >= 0) & (flat < num_experts)
    keys = np.where(real, flat, 0 if fault == "no expert is expert 0" else num_experts)
    order = np.argsort(keys, kind="stable")
    if fault == "later tokens first":
        order = len(keys) - 1 - np.argsort(keys[::-1], kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    counted = np.maximum(flat, 0) if fault == "no expert is expert 0" else flat
    sizes = np.array([(counted == e).sum() for e in range(num_experts)], np.int32)
    if fault == "order, not its inverse":
        place = order
    elif fault == "starts, not sizes":
        sizes = (np.cumsum(sizes) - sizes).astype(np.int32)
    elif fault == "sizes in tokens":
        sizes = np.array([(experts == e).any(-1).sum() for e in range(num_experts)], np.int32)
    token = order % len(x) if fault == "choices outermost" else order // k
    return x[token], place.reshape(experts.shape).astype(np.int32), sizes


PERMUTE_FAULTS = (
    *("no expert is expert 0", "later tokens first", "order, not its inverse", "starts, not sizes"),
    *("sizes in tokens", "choices outermost"),
)

judged_by(
    "moe_permute",
    Testing(
        _permute_cases,
        bitwise=True,
        mutants={fault: partial(_wrong_permute, fault=fault) for fault in PERMUTE_FAULTS},
        truth=partial(_wrong_permute, fault=""),
    ),
)


def _unpermute_cases(dtype: str) -> Iterator[Case]:
    rng = generator("moe_unpermute")
    for name, tokens, k, dim in (
        ("three choices", 9, 3, 35),
        ("one choice", 7, 1, 66),
        ("eight choices", 5, 8, 130),
    ):
        # Not the kind with a large mean: its few values times one weight round alike, which is no
        # random walk.
        rows = hostile_rows(
            rng, dtype, tokens * k, dim, ("normal", "zero", "tiny", "outlier", "huge", "spread")
        )
        place = rng.permutation(tokens * k).reshape(tokens, k).astype(np.int32)
        weights = rng.random((tokens, k)).astype(np.float32)
        weights[-1, -1] = 0.0
        arguments: Arguments = {"rows": rows, "place": place, "weights": weights}
        yield Case(name, arguments)
    # Choices that cancel: a product that is rounded before the sum shows.
    rows = rows.copy()
    rows[place[:, 1::2]] = -rows[place[:, 0::2]]
    yield Case("choices that cancel", arguments | {"rows": strided(rows)})
    if dtype == "bfloat16":
        yield Case("Qwen3-30B-A3B, 2048 tokens", _big_unpermute, ("bench",))


def _big_unpermute() -> Arguments:
    rng = generator("bench moe_unpermute")
    place = rng.permutation(2048 * 8).reshape(2048, 8).astype(np.int32)
    weights = rng.random((2048, 8)).astype(np.float32)
    return {"rows": normal(rng, "bfloat16", 2048 * 8, 2048), "place": place, "weights": weights}


def _wrong_unpermute(xp: Any, rows: Any, place: Any, weights: Any, fault: str) -> Any:
    if fault == "weights ignored":
        weights = np.ones_like(weights) / weights.shape[1]
    elif fault == "weights shifted":
        weights = np.roll(weights, 1, axis=1 if weights.shape[1] > 1 else 0)
    elif fault == "weights rounded to bfloat16":
        weights = to_bfloat16(weights)
    elif fault == "last choice lost":
        weights = np.where(np.arange(weights.shape[1]) < weights.shape[1] - 1, weights, 0.0)
    elif fault == "order, not its inverse":
        place = np.argsort(place.reshape(-1)).reshape(place.shape)
    elif fault == "rows in order":
        place = np.arange(place.size).reshape(place.shape)
    products = rows[place] * weights[:, :, None]
    if fault == "products rounded":
        products = to_bfloat16(products)
    return products.sum(1) * (1.005 if fault == "scaled by 1.005" else 1.0)


UNPERMUTE_FAULTS = (
    *("weights ignored", "weights shifted", "weights rounded to bfloat16", "last choice lost"),
    *("order, not its inverse", "rows in order", "products rounded", "scaled by 1.005"),
)

judged_by(
    "moe_unpermute",
    Testing(
        _unpermute_cases,
        magnitude=lambda a: (np.abs(a["rows"][a["place"]]) * a["weights"][:, :, None]).sum(1),
        rows=("place", "weights"),
        mutants={fault: partial(_wrong_unpermute, fault=fault) for fault in UNPERMUTE_FAULTS},
        truth=partial(_wrong_unpermute, fault=""),
    ),
)


# --- grouped_matmul
# --------------------------------------------------------------------------------------------------


def _grouped_cases(dtype: str) -> Iterator[Case]:
    rng = generator("grouped_matmul")
    x = hostile_rows(rng, dtype, 13, 133)
    weight = _experts(rng, dtype, 5, 35, 133)
    for name, sizes in (
        ("empty experts, rows of none", [4, 0, 5, 2, 0]),
        ("one takes all", [0, 13, 0, 0, 0]),
        ("all rows used", [1, 3, 3, 3, 3]),
        ("no rows", [0, 0, 0, 0, 0]),
    ):
        arguments: Arguments = {
            "x": x.copy(),
            "weight": weight.copy(),
            "group_sizes": np.array(sizes, np.int32),
        }
        # What no row may see: rows past the last group, and experts without rows.
        arguments["x"][sum(sizes) :] = np.nan
        arguments["weight"][[i for i, size in enumerate(sizes) if size == 0]] = np.nan
        yield Case(name, arguments)
    yield Case(
        "strided",
        arguments
        | {"x": strided(x), "weight": strided(weight), "group_sizes": np.full(5, 2, np.int32)},
    )
    deep = _experts(rng, dtype, 3, 33, 768)
    yield Case(
        "k of a real expert",
        {
            "x": normal(rng, dtype, 9, 768),
            "weight": deep,
            "group_sizes": np.array([3, 3, 3], np.int32),
        },
    )
    if dtype == "bfloat16":
        yield Case(
            "Qwen3-30B-A3B gate and up, 64 tokens",
            partial(_big_grouped, 128, 8, 2048, 1536),
            ("bench",),
        )
        yield Case(
            "Mixtral-8x7B gate and up, 1 of 8 shards, 64 tokens",
            partial(_big_grouped, 8, 2, 4096, 3584),
            ("bench",),
        )


def _big_grouped(experts: int, k: int, dim: int, n: int, tokens: int = 64) -> Arguments:
    rng = generator("bench grouped_matmul")
    sizes = np.bincount(_choices(rng, tokens, k, experts).reshape(-1), minlength=experts).astype(
        np.int32
    )
    x = normal(rng, "bfloat16", tokens * k, dim)
    return {"x": x, "weight": _experts(rng, "bfloat16", experts, n, dim), "group_sizes": sizes}


def _grouped(xp: Any, x: Any, weight: Any, group_sizes: Any, fault: str = "") -> Any:
    out = np.zeros((len(x), weight.shape[1]))
    if fault == "empty experts not counted":
        used = group_sizes > 0
        weight = np.concatenate([weight[: used.sum()], weight[~used]])[
            np.argsort(np.argsort(~used, kind="stable"))
        ]
    ends = np.cumsum(group_sizes)
    for e, (start, end) in enumerate(zip(ends - group_sizes, ends, strict=True)):
        if fault == "boundaries off by one" and end > start:
            start, end = start + 1, min(end + 1, len(x))
        own = weight[e - 1] if fault == "expert before" else weight[e]
        rows, own = (
            (to_bfloat16(x[start:end]), to_bfloat16(own))
            if fault == "bfloat16"
            else (x[start:end], own)
        )
        if fault == "last 64 of k skipped":
            rows, own = rows[:, :-64], own[:, :-64]
        out[start:end] = rows @ own.T
    if fault == "rest through the last expert":
        out[ends[-1] :] = x[ends[-1] :] @ weight[-1].T
    elif fault == "masked by a product with 0":
        out += (x @ weight.transpose(2, 0, 1).reshape(x.shape[1], -1)).reshape(
            len(x), len(weight), -1
        ).sum(1) * 0.0
    return out * 1.005 if fault == "scaled by 1.005" else out


def _grouped_magnitude(a: Arguments) -> Any:
    size = _grouped(None, np.abs(a["x"]), np.abs(a["weight"]), a["group_sizes"])
    return size * chain(a["x"].shape[1])


GROUPED_FAULTS = (
    *(
        "empty experts not counted",
        "boundaries off by one",
        "expert before",
        "bfloat16",
        "last 64 of k skipped",
    ),
    *("rest through the last expert", "masked by a product with 0", "scaled by 1.005"),
)

judged_by(
    "grouped_matmul",
    Testing(
        _grouped_cases,
        magnitude=_grouped_magnitude,
        rows=("x",),
        mutants={fault: partial(_grouped, fault=fault) for fault in GROUPED_FAULTS},
        truth=_grouped,
    ),
)


# --- moe_experts
# --------------------------------------------------------------------------------------------------


def _expert_cases(dtype: str) -> Iterator[Case]:
    rng = generator("moe_experts")
    x, logits = hostile_rows(rng, dtype, 7, 67, ROWS), rng.normal(size=(7, 5))
    logits[:, 1] = -9.0
    gate_up, down = _experts(rng, dtype, 5, 2 * 45, 67), _experts(rng, dtype, 5, 67, 45)
    gate_up[1], down[1] = np.nan, np.nan  # nobody chooses it
    arguments: Arguments = {"x": x, "gate_up": gate_up, "down": down}
    for top_k, renormalize in ((2, True), (2, False), (4, True)):
        name = f"{top_k} of 5, {renormalize=}"
        yield Case(name, arguments | _chosen(logits, top_k, renormalize))
    one = np.where(np.arange(5) == 3, 7.0, logits)
    yield Case("one takes all", arguments | _chosen(one, 1, False))
    some = _chosen(logits, 3, True)
    some["experts"][::2, 1] = -1
    some["experts"][3], some["weights"][3] = 5, 0.0
    some["experts"][5:], some["weights"][5:] = -1, 0.0
    yield Case("choices of no expert, strided", arguments | {"x": strided(x)} | some)
    for top_k in (2, 4):
        given = arguments | _chosen(logits, top_k, True) | {"gelu": True}
        yield Case(f"gelu, {top_k} of 5", given)
    yield Case("5 of 11, from the fourth on", arguments | _of_a_shard(rng, 7, 11, 4, 3, nobody=1))
    if dtype == "bfloat16":
        yield Case("Qwen3-30B-A3B, 64 tokens", partial(_big_experts, 128, 8, 2048, 768), ("bench",))
        yield Case(
            "Mixtral-8x7B, 1 of 8 shards, 64 tokens",
            partial(_big_experts, 8, 2, 4096, 1792),
            ("bench",),
        )


def _chosen(logits: np.ndarray, top_k: int, renormalize: bool) -> Arguments:
    """Weights and experts by router logits."""
    weights, experts = _route(None, **_routing(logits, top_k, renormalize))
    return {"weights": weights.astype(np.float32), "experts": experts}


def _of_a_shard(
    rng: np.random.Generator, tokens: int, experts: int, top_k: int, first: int, nobody: int = -1
) -> Arguments:
    """What a shard gets of choices among all `experts`, which it counts from its own `first`: those
    of others are below 0 or more than it has, and their weights are not 0. `nobody`: an expert of
    the shard that is not chosen.
    """
    logits = rng.normal(size=(tokens, experts))
    if nobody >= 0:
        logits[:, first + nobody] = -9.0
    chosen = _chosen(logits, top_k, True)
    return chosen | {"experts": (chosen["experts"] - first).astype(np.int32)}


def mixture(
    rng: np.random.Generator, dtype: str, tokens: int, experts: int, k: int, dim: int, inter: int
) -> Arguments:
    """Arguments of `moe_experts` whose tokens choose evenly."""
    gate_up, down = (_experts(rng, dtype, experts, *s) for s in ((2 * inter, dim), (dim, inter)))
    x = normal(rng, dtype, tokens, dim)
    chosen = _chosen(rng.normal(size=(tokens, experts)), k, True)
    return {"x": x, "gate_up": gate_up, "down": down} | chosen


def _big_experts(experts: int, k: int, dim: int, inter: int, tokens: int = 64) -> Arguments:
    return mixture(generator("bench moe_experts"), "bfloat16", tokens, experts, k, dim, inter)


def _expert_sizes(a: Arguments, accumulated: bool) -> Any:
    """What relative errors of 1 in each expert's MLP and its result do to the output."""
    total = np.zeros_like(a["x"])
    for e in range(len(a["gate_up"])):
        if not (a["experts"] == e).any():
            continue
        mlp = {
            "x": a["x"],
            "gate_up": a["gate_up"][e],
            "down": a["down"][e],
            "gate_up_bias": None,
            "down_bias": None,
        }
        act = GELU if a.get("gelu") else SILU
        result = np.abs(_mlp(a["x"], a["gate_up"][e], a["down"][e], act))
        weight = np.where(a["experts"] == e, a["weights"], 0.0).sum(-1, keepdims=True)
        size = mlp_sizes(mlp, accumulated, act=act)
        total += weight * (size + (2.0 if accumulated else 1.0) * result)
    return total


def _mlp(x: Any, gate_up: Any, down: Any, act: Gate, rounded: Any = lambda x: x) -> Any:
    gate, up = np.split(rounded(x @ gate_up.T), 2, axis=-1)
    return rounded(rounded(act(gate) * up) @ down.T)


def _wrong_experts(
    ops: Any,
    x: Any,
    weights: Any,
    experts: Any,
    gate_up: Any,
    down: Any,
    gelu: bool = False,
    fault: str = "",
) -> Any:
    act = GELU if gelu != (fault == "the other activation") else SILU
    weights, top_k = weights.copy(), weights.shape[1]
    if fault == "weights shifted":
        weights = np.roll(weights, 1, axis=1 if top_k > 1 else 0)
    elif fault == "weights rounded to bfloat16":
        weights = to_bfloat16(weights)
    elif fault == "all weights equal":
        weights = np.full_like(weights, 1.0 / top_k)
    elif fault == "last choice lost":
        weights[:, -1] = 0.0 if top_k > 1 else weights[:, -1]
    elif fault == "at most two rows an expert":
        for e in np.unique(experts):
            weights[tuple(np.argwhere(experts == e)[2:].T)] = 0.0
    elif fault == "no expert is expert 0":
        experts = np.where(experts < 0, 0, experts)
    elif fault == "experts beyond are the last":
        experts = np.minimum(experts, len(gate_up) - 1)
    out = np.zeros_like(x)
    for e in np.unique(experts[(experts >= 0) & (experts < len(gate_up))]):
        weight = np.where(experts == e, weights, 0.0).sum(-1, keepdims=True)
        halves = (
            np.roll(gate_up[e], len(gate_up[e]) // 2, axis=0)
            if fault == "gate and up swapped"
            else gate_up[e]
        )
        other = down[(e + 2) % 5] if fault == "down of another expert" else down[e]
        out += weight * _mlp(x, halves, np.nan_to_num(other), act, ops.rounded)
    if fault == "scaled by 1.005":
        return out * 1.005
    return out + x if fault == "residual added" else out


EXPERT_FAULTS = (
    *("weights shifted", "weights rounded to bfloat16", "all weights equal", "last choice lost"),
    *("at most two rows an expert", "no expert is expert 0", "gate and up swapped"),
    *("down of another expert", "scaled by 1.005", "residual added", "the other activation"),
    "experts beyond are the last",
)

judged_by(
    "moe_experts",
    Testing(
        _expert_cases,
        COARSE,
        magnitude=partial(_expert_sizes, accumulated=True),
        rounded=partial(_expert_sizes, accumulated=False),
        rows=("x", "weights", "experts"),
        mutants={fault: partial(_wrong_experts, fault=fault) for fault in EXPERT_FAULTS},
        truth=partial(_wrong_experts, fault=""),
    ),
)


# --- grouped_linear and moe_experts_narrow: the same with narrow weights and biases
# --------------------------------------------------------------------------------------------------


def _narrow(rng: np.random.Generator, kind: str, dtype: str, groups: int, *shape: int) -> Arguments:
    """(weight, scale, zero) of all experts [expert n k], whose scales differ."""
    experts, n, k = shape
    if kind == "plain":
        return {"weight": _experts(rng, dtype, *shape), "scale": None, "zero": None}
    if kind == "int8":
        weight: np.ndarray = rng.integers(-127, 128, shape).astype(np.int8)
    elif kind == "fp8":
        weight = (rng.normal(size=shape) * 40.0).astype(DTYPES["float8_e4m3fn"])
    else:
        weight = rng.integers(0, 256, (experts, n, k // 2)).astype(np.uint8)
    size = {"int8": 64.0, "fp8": 40.0}.get(kind, 4.0)
    scale = 2.0 ** rng.uniform(-1.0, 1.0, (experts, n, groups)) / (size * k**0.5)
    zeros = kind == "int4" and groups > 1
    zero = rng.integers(0, 17, (experts, n, groups)).astype(np.uint8) if zeros else None
    return {"weight": weight, "scale": scale.astype(np.float32), "zero": zero}


def _mxfp4(rng: np.random.Generator, *shape: int) -> Arguments:
    """The same as mxfp4 has it: e2m1 by groups of 32, and powers of two in bfloat16 as scales."""
    experts, n, k = shape
    found = _narrow(rng, "fp4", "bfloat16", k // 32, experts, n, k)
    scale = 2.0 ** np.rint(np.log2(found["scale"]) + rng.integers(-2, 3, found["scale"].shape))
    return found | {"scale": scale.astype(DTYPES["bfloat16"])}


def _wide(weight: Any, scale: Any, zero: Any, kind: str) -> np.ndarray:
    """All experts' weights [expert n k] as float64."""
    if scale is None:
        return np.asarray(weight, np.float64)
    every = range(len(weight))
    zeros = [None] * len(weight) if zero is None else zero
    return np.stack(
        [
            widened_weight(
                namespace("numpy"), weight[e], scale[e].astype(np.float64), zeros[e], kind
            )
            for e in every
        ]
    )


def _grouped_linear_cases(dtype: str) -> Iterator[Case]:
    rng = generator("grouped_linear")
    x = normal(rng, dtype, 13, 96)
    x[11:] = np.nan
    sizes = {"group_sizes": np.array([4, 0, 5, 2, 0], np.int32)}
    for kind in ("plain", *KINDS):
        for groups in (1, 3):
            bias = normal(rng, dtype, 5, 35) if groups == 3 else None
            narrow = _narrow(rng, kind, dtype, groups, 5, 35, 96)
            given = {"x": x, "bias": bias, "kind": kind} | sizes
            yield Case(f"{kind}, {groups} groups", given | narrow)
    beside = {"bias": normal(rng, dtype, 5, 35), "kind": "fp4"} | sizes
    yield Case("mxfp4", {"x": x} | beside | _mxfp4(rng, 5, 35, 96))


def _grouped_linear(
    xp: Any, x: Any, weight: Any, scale: Any, zero: Any, bias: Any, group_sizes: Any, kind: str,
    fault: str = "",
) -> Any:  # fmt: skip
    if fault == "scale of another row" and scale is not None:
        scale = np.roll(scale, 1, 1)
    elif fault == "scale of another expert" and scale is not None:
        scale = np.roll(scale, 1, 0)
    elif fault == "scale of another group" and scale is not None:
        scale = np.roll(scale, 1, 2)
    elif fault == "zero off by one" and zero is not None:
        zero = zero + 1
    elif fault == "halves of a byte swapped" and weight.dtype == np.uint8:
        weight = (weight >> 4) | (weight << 4)
    out = _grouped(xp, x, _wide(weight, scale, zero, kind), group_sizes, fault)
    if bias is not None and fault != "no bias":
        ends = np.cumsum(group_sizes)
        for e, (start, end) in enumerate(zip(ends - group_sizes, ends, strict=True)):
            out[start:end] += bias[e - 1 if fault == "bias of another expert" else e]
    return out


def _grouped_linear_magnitude(a: Arguments) -> Any:
    wide = np.abs(_wide(a["weight"], a["scale"], a["zero"], a["kind"]))
    bias = None if a["bias"] is None else np.abs(a["bias"])
    sizes = a["group_sizes"]
    return _grouped_linear(None, np.abs(a["x"]), wide, None, None, bias, sizes, "plain")


GROUPED_LINEAR_FAULTS = (
    *("scale of another row", "scale of another expert", "scale of another group"),
    *("zero off by one", "halves of a byte swapped", "no bias", "bias of another expert"),
    *("expert before", "rest through the last expert", "scaled by 1.005"),
)
WEIGHT_ROUNDED = Bound(
    accumulated=16.0, inner=1.0, reason="the weight may be rounded to the dtype of x"
)

judged_by(
    "grouped_linear",
    Testing(
        _grouped_linear_cases,
        WEIGHT_ROUNDED,
        magnitude=_grouped_linear_magnitude,
        rows=("x",),
        mutants={fault: partial(_grouped_linear, fault=fault) for fault in GROUPED_LINEAR_FAULTS},
        truth=_grouped_linear,
    ),
)


def _narrow_expert_cases(dtype: str) -> Iterator[Case]:
    rng = generator("moe_experts_narrow")
    dim, inter = 96, 64
    x, logits = normal(rng, dtype, 7, dim), rng.normal(size=(7, 5))
    for kind in ("plain", *KINDS):
        for groups, alpha in ((1, 0.0), (2, 1.702)):
            up = _narrow(rng, kind, dtype, groups + (groups > 1), 5, 2 * inter, dim)
            down = _narrow(rng, kind, dtype, groups, 5, dim, inter)
            biases = [normal(rng, dtype, 5, n) if alpha else None for n in (2 * inter, dim)]
            given: Arguments = {
                "x": x,
                "kind": kind,
                "alpha": alpha,
                "limit": 0.9 if alpha else 0.0,
            }
            given |= _named("gate_up", up, biases[0]) | _named("down", down, biases[1])
            name = f"{kind}, {groups} groups, " + ("in turns, biases" if alpha else "silu")
            yield Case(name, given | _chosen(logits, 2, True))
            if not alpha:
                with_gelu = given | _chosen(logits, 3, True) | {"gelu": True}
                yield Case(f"{kind}, {groups} groups, gelu", with_gelu)
    some = _chosen(logits, 3, True)
    some["experts"][::2, 1] = -1
    some["experts"][5:], some["weights"][5:] = -1, 0.0
    yield Case("choices of no expert", given | some)
    for name, alpha in (("plain", 1.702), ("fp4", 0.0)):
        shard: Arguments = {"x": x, "kind": name, "alpha": alpha, "limit": 0.9 if alpha else 0.0}
        for weight, n, k in (("gate_up", 2 * inter, dim), ("down", dim, inter)):
            bias = normal(rng, dtype, 5, n) if alpha else None
            shard |= _named(weight, _narrow(rng, name, dtype, k // 32, 5, n, k), bias)
        yield Case(f"{name}, 5 of 11, from the fourth on", shard | _of_a_shard(rng, 7, 11, 4, 3))
    # Magnitudes add up over all entries, what tells one activation from the other does not: with
    # few of them it is seen in float16 too.
    few = {"x": normal(rng, dtype, 7, 16), "kind": "fp8", "alpha": 0.0, "limit": 0.0, "gelu": True}
    for name, n in (("gate_up", 32), ("down", 16)):
        few |= _named(name, _narrow(rng, "fp8", dtype, 1, 5, n, 16), None)
    yield Case("few entries", few | _chosen(logits, 1, True))
    for alpha in (0.0, 1.702):
        small = {"x": x, "kind": "fp4", "alpha": alpha, "limit": 0.9 if alpha else 0.0}
        for name, n, k in (("gate_up", 2 * inter, dim), ("down", dim, inter)):
            bias = normal(rng, dtype, 5, n) if alpha else None
            small |= _named(name, _mxfp4(rng, 5, n, k), bias)
        name = "mxfp4, " + ("in turns, biases" if alpha else "silu")
        yield Case(name, small | _chosen(logits, 2, True))


def _named(name: str, narrow: Arguments, bias: Any) -> Arguments:
    """The pieces of a weight by the names that `moe_experts_narrow` has for them."""
    pieces = {name: narrow["weight"], f"{name}_bias": bias}
    return pieces | {f"{name}_{piece}": narrow[piece] for piece in ("scale", "zero")}


def _widened(a: Arguments) -> tuple[np.ndarray, np.ndarray]:
    return (
        _wide(a["gate_up"], a["gate_up_scale"], a["gate_up_zero"], a["kind"]),
        _wide(a["down"], a["down_scale"], a["down_zero"], a["kind"]),
    )


def _clamped(both: Any, alpha: float, limit: float, gelu: bool, fault: str) -> Any:
    """What is between gate and up, and down."""
    if not alpha:
        gate, up = np.split(both, 2, axis=-1)
        act = GELU if gelu != (fault == "the other activation") else SILU
        return act(gate) * up
    gate, up = both[..., 0::2], both[..., 1::2]
    if fault == "gate and up swapped":
        gate, up = up, gate
    if fault != "no limit":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    share = 0.0 if fault == "up without one" else 1.0
    return (up + share) * gate / (1.0 + np.exp(-(1.0 if fault == "alpha 1" else alpha) * gate))


def _narrow_experts(ops: Any, fault: str = "", **a: Any) -> Any:
    gate_up, down = _widened(a)
    weights, experts, out = a["weights"], a["experts"], np.zeros_like(a["x"])
    if fault == "weights shifted":
        weights = np.roll(weights, 1, axis=1)
    elif fault == "no expert is expert 0":
        experts = np.maximum(experts, 0)
    elif fault == "experts beyond are the last":
        experts = np.minimum(experts, len(gate_up) - 1)
    for e in np.unique(experts[(experts >= 0) & (experts < len(gate_up))]):
        weight = np.where(experts == e, weights, 0.0).sum(-1, keepdims=True)
        both = a["x"] @ gate_up[e].T
        if a["gate_up_bias"] is not None and fault != "no bias behind gate and up":
            both = both + a["gate_up_bias"][e]
        how = a["alpha"], a["limit"], bool(a.get("gelu")), fault
        hidden = ops.rounded(_clamped(ops.rounded(both), *how))
        result = hidden @ down[(e + 1) % 5 if fault == "down of another expert" else e].T
        if a["down_bias"] is not None and fault != "no bias behind down":
            result = result + a["down_bias"][e]
        out += weight * ops.rounded(result)
    return out * (1.005 if fault == "scaled by 1.005" else 1.0)


def _narrow_sizes(a: Arguments) -> Any:
    """What relative errors of 1 in products, their halves' product and results do to the output."""
    gate_up, down = (np.abs(wide) for wide in _widened(a))
    total = np.zeros_like(a["x"])
    for e in range(len(gate_up)):
        both = np.abs(a["x"]) @ gate_up[e].T
        if a["gate_up_bias"] is not None:
            both = both + np.abs(a["gate_up_bias"][e])
        if a["alpha"]:
            gate, up = both[..., 0::2], both[..., 1::2]
            # The slope of the gate's part is below 1.1, up is clamped.
            hidden = 1.1 * gate * (np.minimum(up, a["limit"]) + 1.0) + up * np.minimum(
                gate, a["limit"]
            )
        else:
            gate, up = np.split(both, 2, axis=-1)
            hidden = 2.1 * gate * up
        result = hidden @ down[e].T
        if a["down_bias"] is not None:
            result = result + np.abs(a["down_bias"][e])
        weight = np.where(a["experts"] == e, a["weights"], 0.0).sum(-1, keepdims=True)
        total += weight * result
    return total


NARROW_EXPERT_FAULTS = (
    *("weights shifted", "down of another expert", "no bias behind gate and up"),
    *("no bias behind down", "gate and up swapped", "no limit", "up without one", "alpha 1"),
    *("the other activation", "no expert is expert 0", "experts beyond are the last"),
)

judged_by(
    "moe_experts_narrow",
    Testing(
        _narrow_expert_cases,
        Bound(
            accumulated=16.0, inner=2.0, gain=False, reason="magnitudes add up over both products"
        ),
        magnitude=_narrow_sizes,
        rows=("x", "weights", "experts"),
        mutants={fault: partial(_narrow_experts, fault=fault) for fault in NARROW_EXPERT_FAULTS},
        truth=_narrow_experts,
    ),
)
