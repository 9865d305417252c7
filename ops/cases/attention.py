"""Cases of the KV write, alone and with norm and rotation before it, and of paged attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ..testing import DTYPES, Arguments, Bound, Case, Testing, judged_by
from .generators import generator, normal, strided, to_bfloat16, weights

NARROW: dict[str, tuple[Any, float]] = {
    "fp8": (ml_dtypes.float8_e4m3fn, 448.0),
    "int8": (np.int8, 127.0),
}


def by_head(scale: float, heads: int) -> np.ndarray:
    """Scales around `scale` [heads] float32, of which neighbours differ."""
    scales: np.ndarray = scale * (1.0 + 0.3 * np.cos(2.0 * np.arange(heads)))
    return scales.astype(np.float32)


def narrow(x: np.ndarray, kind: str, scale: Any = None) -> np.ndarray:
    """x [... kvhead hdim] / scale [kvhead] as a cache of fp8 or int8 holds it; NaN is 0 in int8."""
    dtype, limit = NARROW[kind]
    y = x.astype(np.float32)
    if scale is not None:
        y = y * (1.0 / scale.astype(np.float64)).astype(np.float32)[:, None]
    y = np.clip(y, -limit, limit)
    return np.asarray((np.nan_to_num(np.rint(y)) if kind == "int8" else y).astype(dtype))


# --- write_kv
# --------------------------------------------------------------------------------------------------


def _write_cases(dtype: str) -> Iterator[Case]:
    rng = generator("write_kv")
    for name, pages, page, heads, hdim in (
        ("pages of 4", 5, 4, 3, 24),
        ("pages of 16, one head", 3, 16, 1, 7),
    ):
        kv = normal(rng, dtype, pages, page, 2 * heads, hdim)
        kv[1, 2] = np.nan  # what lies in a slot is copied or overwritten, not read
        slots = rng.permutation(pages * page - 1)[:9].astype(np.int32)
        slots[[2, 5]] = -1
        k, v = normal(rng, dtype, 9, heads, hdim), normal(rng, dtype, 9, heads, hdim)
        k[2], v[5] = np.nan, np.nan  # rows of no slot
        arguments: Arguments = {"kv": kv, "k": k, "v": v, "slots": slots}
        yield Case(name, arguments)
        if heads > 1:
            yield from _narrow_writes(arguments)
    yield Case("no row has a slot", arguments | {"slots": np.full(9, -1, np.int32)})
    yield Case("views", arguments | {"k": strided(k), "v": strided(v)})
    yield Case("slots behind 2^15", partial(_far_write, arguments))
    if dtype == "bfloat16":
        yield Case("Qwen3-0.6B, 2048 tokens", _big_write, ("bench",))


FAR = 2**15 // 16 + 4
"""Pages of 16 slots that reach behind what 16 bits with a sign can count."""


def _far_write(a: Arguments) -> Arguments:
    """The same rows, in the last pages of a cache of many."""
    _, _, *entry = a["kv"].shape
    kv = np.zeros((FAR, 16, *entry), a["kv"].dtype)
    kv[-4:] = 1.0
    # Slots below 48, so that they lie in the last three pages.
    slots = np.where(a["slots"] < 0, -1, a["slots"] + (FAR - 3) * 16)
    return a | {"kv": kv, "slots": slots.astype(np.int32)}


def _narrow_writes(a: Arguments) -> Iterator[Case]:
    """The same writes into caches of fp8 and int8; some entries saturate."""
    k, v, heads = a["k"], a["v"], a["k"].shape[1]
    large = {"k": k * k.dtype.type(2.0), "v": v * v.dtype.type(200.0)}
    for kind, k_scale, v_scale in (("fp8", 0.8, 0.37), ("int8", 0.02, 0.05)):
        cache = a | large | {"kv": narrow(a["kv"], kind)}
        scales = {"k_scale": by_head(k_scale, heads), "v_scale": by_head(v_scale, heads)}
        yield Case(f"{kind} cache", cache | scales)
        yield Case(f"{kind} cache, no scales", cache)
        yield Case(f"{kind} cache, scales of V alone", cache | {"v_scale": scales["v_scale"]})


def _big_write() -> Arguments:
    rng = generator("bench write_kv")
    big: Arguments = {"kv": normal(rng, "bfloat16", 1024, 16, 16, 128)}
    big |= {name: normal(rng, "bfloat16", 2048, 8, 128) for name in ("k", "v")}
    return big | {"slots": rng.permutation(1024 * 16 - 1)[:2048].astype(np.int32)}


def _scratch(a: Arguments) -> np.ndarray:
    free = np.zeros((*a["kv"].shape[:2], 1, 1), bool)
    free[-1, -1] = bool((a["slots"] < 0).any())
    return free


def _wrong_write(
    xp: Any,
    kv: Any,
    k: Any,
    v: Any,
    slots: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    fault: str = "",
) -> Any:
    out = kv.reshape(-1, *kv.shape[2:]).copy()
    real = slots >= 0
    kind = {1: "int8" if kv.dtype == np.int8 else "fp8"}.get(kv.dtype.itemsize)
    k_scale, v_scale = _wrong_scales(k_scale, v_scale, fault)
    if fault == "multiplied by the scale":
        k_scale, v_scale = (None if s is None else 1.0 / s for s in (k_scale, v_scale))
    if fault == "truncated" and kind == "int8":
        k, v = (_truncated(x, s) for x, s in ((k, k_scale), (v, v_scale)))
    elif kind:
        k, v = narrow(k, kind, k_scale), narrow(v, kind, v_scale)
    if fault == "padding written to slot 0":
        out[np.maximum(slots, 0)[~real], 0::2] = 0
    elif fault == "padding written to the last real slot":
        out[-2] = k[0].repeat(2, axis=0)
    elif fault == "page and offset swapped":
        slots = np.where(real, slots % kv.shape[0] * kv.shape[1] + slots // kv.shape[0], -1)
        slots = np.minimum(slots, len(out) - 1)
    elif fault == "next slot":
        slots = slots + 1
    elif fault == "last row lost":
        real = real & (np.arange(len(slots)) < len(slots) - 1)
    if fault == "K and V swapped":
        k, v = v, k
    if fault == "halves, not interleaved":
        out[slots[real]] = np.concatenate([k, v], axis=1)[real]
    else:
        out[slots[real], 0::2] = k[real]
        if fault != "V not written":
            out[slots[real], 1::2] = v[real]
    return out.reshape(kv.shape)


def _wrong_scales(k_scale: Any, v_scale: Any, fault: str) -> tuple[Any, Any]:
    """The scales [kvhead] of K and V, or None, as a faulty write takes them."""
    if fault == "scales ignored":
        return None, None
    if fault == "scales swapped":
        return v_scale, k_scale
    if fault == "scales of the neighbouring head":
        k_scale, v_scale = (None if s is None else np.roll(s, 1) for s in (k_scale, v_scale))
    elif fault == "scales of the first head":
        k_scale, v_scale = (
            None if s is None else np.full_like(s, s[0]) for s in (k_scale, v_scale)
        )
    return k_scale, v_scale


def _truncated(x: Any, scale: Any) -> Any:
    y = x.astype(np.float32) * (1.0 if scale is None else np.float32(1.0) / scale[:, None])
    return np.trunc(np.nan_to_num(np.clip(y, -127, 127))).astype(np.int8)


SCALE_FAULTS = (
    *("scales ignored", "scales swapped", "scales of the neighbouring head"),
    "scales of the first head",
)
WRITE_FAULTS = (
    *(
        "padding written to slot 0",
        "padding written to the last real slot",
        "page and offset swapped",
        "next slot",
    ),
    *("last row lost", "K and V swapped", "halves, not interleaved", "V not written"),
    *(*SCALE_FAULTS, "multiplied by the scale", "truncated"),
)

judged_by(
    "write_kv",
    Testing(
        _write_cases,
        bitwise=True,
        free=_scratch,
        mutants={fault: partial(_wrong_write, fault=fault) for fault in WRITE_FAULTS},
        truth=partial(_wrong_write, fault=""),
    ),
)


# --- norm_rope_write_kv
# ----------------------------------------------------------------------------------------------


def _fused_arguments(
    rng: np.random.Generator, dtype: str, tokens: int, heads: tuple[int, int], hdim: int,
    pages: tuple[int, int],
    rotated: int = 0, norms: bool = True,
) -> Arguments:  # fmt: skip
    """A step of `tokens` rows, the second of which has no slot; pages: (how many, slots in
    each).
    """
    kv = normal(rng, dtype, *pages, 2 * heads[1], hdim)
    kv[0] = np.nan  # what lies in a slot is copied or overwritten, not read
    slots = rng.permutation(pages[0] * pages[1] - 1)[:tokens].astype(np.int32)
    slots[1:2] = -1
    qkv = normal(rng, dtype, tokens, (heads[0] + 2 * heads[1]) * hdim)
    qkv[: tokens // 2] *= qkv.dtype.type(20.0)
    qkv[-1] = 0.0
    angles = rng.uniform(0.0, 2e3, (tokens, (rotated or hdim) // 2))
    return {
        "qkv": qkv, "kv": kv, "q_weight": weights(rng, dtype, hdim) if norms else None,
        "k_weight": weights(rng, dtype, hdim) if norms else None,
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32), "slots": slots, "eps": 1e-6,
    }  # fmt: skip


def _fused_cases(dtype: str) -> Iterator[Case]:
    rng = generator("norm_rope_write_kv")
    arguments = _fused_arguments(rng, dtype, 9, (4, 2), 32, (5, 4))
    yield Case("norms", arguments)
    yield Case("large eps", arguments | {"eps": 0.5})
    yield Case("no norms", arguments | {"q_weight": None, "k_weight": None})
    yield Case("view of a wider array", arguments | {"qkv": strided(arguments["qkv"])})
    # One rope of several: columns of a table.
    columns = {name: strided(arguments[name]) for name in ("cos", "sin")}
    yield Case("angles out of a wider table", arguments | columns)
    yield Case("v normed", arguments | {"v_norm": True})
    yield Case("v normed alone", arguments | {"q_weight": None, "k_weight": None, "v_norm": True})
    # Gemma 4: most of a head is not rotated, by angles of 0.
    still = np.arange(arguments["cos"].shape[1]) >= 4
    turned = {
        "cos": np.where(still, np.float32(1), arguments["cos"]),
        "sin": np.where(still, np.float32(0), arguments["sin"]),
    }
    yield Case("angles of 0", arguments | turned | {"v_norm": True})
    yield Case("norms behind", arguments | {"norm_behind": True})
    yield Case("q normed behind", arguments | {"k_weight": None, "norm_behind": True, "eps": 0.5})
    if dtype != "float32":
        # Gemma: 1 + weight.
        wide = {name: weights(rng, "float32", 32) for name in ("q_weight", "k_weight")}
        yield Case("weights in float32", arguments | wide)
    yield Case(
        "odd head size, partly rotated",
        _fused_arguments(rng, dtype, 5, (3, 1), 23, (3, 16), rotated=10),
    )
    yield Case(
        "norms behind, partly rotated, v normed",
        _fused_arguments(rng, dtype, 5, (3, 1), 23, (3, 16), rotated=10)
        | {"norm_behind": True, "v_norm": True},
    )
    yield Case("one token", _fused_arguments(rng, dtype, 1, (16, 8), 64, (2, 16)))
    # some entries of V saturate
    for kind, k_scale, v_scale in (("fp8", 0.9, 0.37), ("int8", 0.31, 0.05)):
        narrowed = _fused_narrow(arguments, kind, k_scale, v_scale)
        yield Case(f"{kind} cache", narrowed)
        yield Case(f"{kind} cache, no scales", narrowed | {"k_scale": None, "v_scale": None})
        yield Case(f"{kind} cache, scales of K alone", narrowed | {"v_scale": None})
    if dtype == "bfloat16":
        for tokens in (64, 2048):
            source = partial(_fused_arguments, rng, dtype, tokens, (16, 8), 128, (1024, 16))
            yield Case(f"Qwen3-0.6B, {tokens} tokens", source, ("bench",))


def _fused_narrow(a: Arguments, kind: str, k_scale: float, v_scale: float) -> Arguments:
    """The same step over a cache of fp8 or int8, which must be equal: so what is stored is exact
    until it is scaled.

    K has no norm, and it is turned by quarter turns. V is never rounded on the way.
    """
    quarter = np.random.default_rng(4).integers(0, 4, a["cos"].shape)
    turns = {
        "cos": np.array([1, 0, -1, 0], np.float32)[quarter],
        "sin": np.array([0, 1, 0, -1], np.float32)[quarter],
    }
    qkv = a["qkv"].copy()
    values = a["kv"].shape[2] // 2 * a["kv"].shape[3]
    qkv[0, -values:] *= qkv.dtype.type(200.0 * v_scale)
    heads = a["kv"].shape[2] // 2
    scales = {"k_scale": by_head(k_scale, heads), "v_scale": by_head(v_scale, heads)}
    cache = {"kv": narrow(a["kv"], kind)} | scales
    return a | turns | cache | {"qkv": qkv, "k_weight": None}


def _wrong_fused(
    ops: Any, qkv: Any, kv: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, slots: Any,
    eps: float,
    k_scale: Any = None, v_scale: Any = None, v_norm: bool = False, norm_behind: bool = False,
    fault: str = "",
) -> Any:  # fmt: skip
    size, kv_heads = kv.shape[3], kv.shape[2] // 2
    x = qkv.reshape(len(qkv), -1, size)
    heads = x.shape[1] - 2 * kv_heads
    q, k, v = x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    if fault == "K and V swapped":
        k, v = v, k
    elif fault == "weights of q and k swapped":
        q_weight, k_weight = k_weight, q_weight
    eps = {"eps missing": 0.0, "eps of another model": eps * 10}.get(fault, eps)
    if fault == "rotated the other way":
        sin = -sin
    elif fault == "angles of the next token":
        cos, sin = np.roll(cos, -1, 0), np.roll(sin, -1, 0)
    behind = norm_behind != (fault == "norms on the other side")
    if behind:
        q, k = _wrong_turn(ops, q, k, cos, sin, fault)
    if q_weight is not None and fault != "q not normed":
        q = ops.rms_norm(q, q_weight, eps)
    if k_weight is not None and fault != "k not normed":
        k = ops.rms_norm(k, k_weight, eps)
    if k_weight is not None and fault == "v normed":
        v = ops.rms_norm(v, k_weight, eps)
    if v_norm and fault == "v normed with the weight of k":
        v = ops.rms_norm(v, v[0, 0] * 0 + 1.01 if k_weight is None else k_weight, eps)
    elif v_norm and fault != "v not normed":
        v = ops.unit_rms_norm(v, eps)
    if not behind:
        q, k = _wrong_turn(ops, q, k, cos, sin, fault)
    if fault == "v rotated":
        v = ops.rotary_embedding(v, v, cos, sin)[0]
    elif fault == "q scaled by 1.005":
        q = q * 1.005
    if fault == "next slot":
        slots = np.where(slots < 0, slots, slots + 1)
    k_scale, v_scale = _wrong_scales(k_scale, v_scale, fault)
    return q, ops.write_kv(kv, k, v, slots, k_scale, v_scale)


def _wrong_turn(ops: Any, q: Any, k: Any, cos: Any, sin: Any, fault: str) -> tuple[Any, Any]:
    turned, keys = ops.rotary_embedding(q, k, cos, sin)
    return turned, k if fault == "k not rotated" else keys


def _fused_sizes(a: Arguments) -> Any:
    """What is added up in each rotated entry, or the entry itself; the cache likewise."""
    size, kv_heads = a["kv"].shape[3], a["kv"].shape[2] // 2
    x = a["qkv"].reshape(len(a["qkv"]), -1, size).astype(np.float64)
    heads, half = x.shape[1] - 2 * kv_heads, a["cos"].shape[1]
    turned, sizes, behind = slice(0, heads + kv_heads), np.abs(x), a.get("norm_behind", False)
    cos, sin = a["cos"][:, None].astype(np.float64), a["sin"][:, None].astype(np.float64)
    if behind:
        x[:, turned] = turned_heads(x[:, turned], cos, sin, half, -1.0)
        sizes[:, turned] = turned_heads(sizes[:, turned], np.abs(cos), np.abs(sin), half)
    norms = [
        (slice(0, heads), a["q_weight"]),
        (slice(heads, heads + kv_heads), a["k_weight"]),
        (slice(heads + kv_heads, None), np.ones(size) if a.get("v_norm") else None),
    ]
    for part, weight in norms:
        if weight is not None:
            mean = (x[:, part] ** 2).mean(-1, keepdims=True)
            sizes[:, part] *= np.abs(weight) / np.sqrt(mean + a["eps"])
    if not behind:
        sizes[:, turned] = turned_heads(sizes[:, turned], np.abs(cos), np.abs(sin), half)
    cache = np.abs(a["kv"]).reshape(-1, 2 * kv_heads, size).astype(np.float64)
    real = a["slots"] >= 0
    cache[a["slots"][real], 0::2] = sizes[real, heads : heads + kv_heads]
    cache[a["slots"][real], 1::2] = sizes[real, heads + kv_heads :]
    return sizes[:, :heads], cache.reshape(a["kv"].shape)


def turned_heads(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, half: int, sign: float = 1.0
) -> np.ndarray:
    """Heads that are rotated, with sign -1; with 1 the sums of the sizes of what is added up."""
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos + sign * b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


FUSED_FAULTS = (
    *(
        "K and V swapped",
        "weights of q and k swapped",
        "eps missing",
        "eps of another model",
        "q not normed",
    ),
    *(
        "k not normed",
        "v normed",
        "rotated the other way",
        "angles of the next token",
        "k not rotated",
        "v rotated",
    ),
    *("q scaled by 1.005", "next slot", *SCALE_FAULTS),
    *("v not normed", "v normed with the weight of k", "norms on the other side"),
)

judged_by(
    "norm_rope_write_kv",
    Testing(
        _fused_cases,
        Bound(
            inner=1.0,
            ties=1.0,
            reason="the norm, which it is composed of, rounds before the rotation; the oracle "
            "rounds there too, so "
            "that only what rounds differently, or not at all, is left",
        ),
        magnitude=_fused_sizes,
        rounded=_fused_sizes,
        free=lambda a: (None, _scratch(a)),
        mutants={fault: partial(_wrong_fused, fault=fault) for fault in FUSED_FAULTS},
        truth=partial(_wrong_fused, fault=""),
    ),
)


# --- paged_attention
# -------------------------------------------------------------------------------------------------


def _paged_cache(
    rng: np.random.Generator,
    lengths: Sequence[int],
    requests: int,
    kv_heads: int,
    hdim: int,
    page: int,
    shared: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(KV cache, page table of `requests` rows) with `lengths` slots written; see `paged`."""
    num_pages = [-(-n // page) for n in lengths]
    total = sum(num_pages) + 3
    free = [int(p) for p in rng.permutation(total - 1)]
    prefix = [free.pop() for _ in range(shared)]
    kv = np.full((total, page, 2 * kv_heads, hdim), np.nan)
    table = np.zeros((requests, max(num_pages) + 1), np.int32)
    for i, n in enumerate(lengths):
        pages = [*prefix[: num_pages[i]], *(free.pop() for _ in range(num_pages[i] - len(prefix)))]
        table[i, : num_pages[i]] = pages
        for j, number in enumerate(pages):
            used = min(page, n - j * page)
            kv[number, :used] = rng.normal(size=(used, 2 * kv_heads, hdim))
    kv[..., 1::2, :] += 0.5  # values with a mean: what is wrong with the weights adds up
    return kv, table


def paged(
    rng: np.random.Generator,
    dtype: str,
    lengths: Sequence[int],
    queries: Sequence[int],
    heads: tuple[int, int],
    hdim: int,
    page: int,
    requests: int = 0,
    tokens: int = 0,
    shared: int = 0,
) -> Arguments:
    """Arguments of a step: requests of `lengths` slots, of which the last `queries` are asked for;
    decodes first.

    Pages are permuted. Every slot that no request holds is NaN, and so are queries of padding rows;
    the first `shared` pages are the same in all requests. `requests` and `tokens`: padded sizes.
    """
    order = sorted(range(len(lengths)), key=lambda i: queries[i] != 1)
    lengths, queries = [lengths[i] for i in order], [queries[i] for i in order]
    requests, tokens = requests or len(lengths), tokens or sum(queries)
    kv, table = _paged_cache(rng, lengths, requests, heads[1], hdim, page, shared)
    start = np.full(requests + 1, sum(queries), np.int32)
    start[: len(queries)] = np.cumsum([0, *queries])[:-1]
    lens = np.zeros(requests, np.int32)
    lens[: len(lengths)] = lengths
    q = np.full((tokens, heads[0], hdim), np.nan)
    q[: sum(queries)] = rng.normal(size=(sum(queries), heads[0], hdim))
    return {
        "q": q.astype(DTYPES[dtype]), "kv": kv.astype(DTYPES[dtype]), "page_table": table,
        "query_start": start,
        "kv_lens": lens, "counts": np.array([queries.count(1), len(lengths)], np.int32),
        "scale": 1.3 / math.sqrt(hdim), "window": 0, "soft_cap": 0.0, "max_query_len": max(queries),
    }  # fmt: skip


def _far_pages(a: Arguments) -> Arguments:
    """The same pages, the last ones of a cache of many."""
    kv, table = a["kv"], a["page_table"]
    before = np.full((FAR - len(kv), *kv.shape[1:]), np.nan, kv.dtype)
    # Entries of the table that no request uses stay 0.
    used = np.arange(table.shape[1])[None] * kv.shape[1] < a["kv_lens"][:, None]
    moved = np.where(used, table + len(before), table).astype(np.int32)
    return a | {"kv": np.concatenate([before, kv]), "page_table": moved}


BELOW_ONE = 1.0 - 2.0**-8
"""The bfloat16 before 1."""


def equal_values(queries: int) -> Arguments:
    """Attention over values of 1, in bfloat16. Of 16 keys one has the weight 1, the others 0.5 and
    nearly half a unit.

    The exact mean is 1. If weights are rounded for the product and not in their sum, as the
    contract says, the last 16 rows are about (3 + 45 / 2) / (3 + 45 weight) = 0.9968, which rounds
    to `BELOW_ONE`. No bound can tell, as it allows for roundings wherever they are. The first key
    of every 16 has the largest score: blocks and parts change nothing.
    """
    length, size, page = 48, 64, 16
    weight = 0.5 + 0.48 * 2.0**-8
    kv = np.zeros((length // page + 1, page, 2, size))
    kv[:, :, 1] = 1.0
    kv[:, 1:, 0, 0] = -1.0
    q = np.zeros((queries, 1, size))
    q[..., 0] = 1.0
    return {
        "q": q.astype(DTYPES["bfloat16"]),
        "kv": kv.astype(DTYPES["bfloat16"]),
        "page_table": np.arange(3, dtype=np.int32)[None],
        "query_start": np.array([0, queries], np.int32),
        "kv_lens": np.array([length], np.int32),
        "counts": np.array([queries == 1, 1], np.int32),
        "scale": -math.log(weight),
        "window": 0,
        "soft_cap": 0.0,
        "max_query_len": queries,
    }


def _small_weights() -> Arguments:
    """Attention in float16 whose result comes from weights below its smallest normal number, each
    167.45 times its smallest: of 16 slots one has nearly all the weight, and values of 0.
    """
    arguments = equal_values(1)
    q, kv = arguments["q"], arguments["kv"].copy()
    kv[:, :, 1] = 4.0
    kv[:, 0, 1] = 0.0
    given = {"q": q.astype(np.float16), "kv": kv.astype(np.float16)}
    return arguments | given | {"kv_lens": np.array([16], np.int32), "scale": SMALL}


SMALL = -math.log(167.45 * 2.0**-24)
"""How far the scores of `_small_weights` are below the largest."""


def _attention_cases(dtype: str) -> Iterator[Case]:
    rng = generator("paged_attention")
    decode = paged(rng, dtype, [1, 16, 17, 61, 33], [1] * 5, (4, 2), 32, 16, requests=8, tokens=8)
    yield Case("decode, padded", decode)
    yield Case("decode, window", decode | {"window": 5})
    yield Case("decode, soft cap", decode | {"soft_cap": 1.5})
    mixed = paged(
        rng, dtype, [9, 50, 23, 31, 7], [1, 50, 2, 1, 5], (6, 2), 24, 4, requests=8, tokens=72
    )
    yield Case("mixed, padded", mixed)
    yield Case("mixed, window and soft cap", mixed | {"window": 11, "soft_cap": 3.0})
    yield Case("mixed, window of a page", mixed | {"window": 4})
    alike = paged(np.random.default_rng(10), dtype, [33] * 3, [1] * 3, (4, 2), 32, 16)
    yield Case("decode, equal lengths", alike)
    yield Case("decode, equal lengths, window", alike | {"window": 20})
    prefix = paged(rng, dtype, [40, 37, 33], [1, 5, 1], (3, 1), 33, 8, shared=4)
    yield Case("shared prefix, odd head size", prefix)
    # Longer than the blocks in which implementations take queries (256) and slots (128).
    blocks = paged(rng, dtype, [300, 140, 290], [290, 1, 20], (2, 1), 16, 16)
    yield Case("several blocks", blocks)
    yield Case("several blocks, window", blocks | {"window": 131})
    near = paged(np.random.default_rng(11), dtype, [40, 17, 5], [1, 1, 5], (2, 1), 16, 16)
    yield Case("slots behind 2^15", partial(_far_pages, near))
    # The oldest slot that the query sees is 127: the last one of a block of 128, which must not be
    # skipped.
    edge = paged(np.random.default_rng(9), dtype, [167], [1], (2, 1), 16, 16)
    yield Case("window that ends with a block", edge | {"window": 40})
    few = paged(rng, dtype, [9, 5], [1, 5], (4, 2), 32, 16, requests=32, tokens=16)
    yield Case("more requests than tokens", few)
    if dtype == "float16":
        yield Case("weights below the smallest normal number", _small_weights)
    sharp = {
        name: value.copy() if isinstance(value, np.ndarray) else value
        for name, value in decode.items()
    }
    # scores in the hundreds: a softmax without its maximum overflows
    sharp["q"] *= sharp["q"].dtype.type(30.0)
    sharp["q"][1] *= sharp["q"].dtype.type(0.0)  # a mean of the values
    yield Case("decode, sharp and flat", sharp)
    for kind, k_scale, v_scale in (("fp8", 0.9, 0.6), ("int8", 0.031, 0.037)):
        for name, arguments in (("decode, padded", decode), ("mixed, window and soft cap", mixed)):
            yield Case(f"{name}, {kind} cache", _narrowed(arguments, kind, k_scale, v_scale))
    cache = _narrowed(mixed, "fp8", 0.9, 0.6)
    yield Case("mixed, fp8 cache, no scales", cache | {"k_scale": None, "v_scale": None})
    yield Case("mixed, fp8 cache, scales of K alone", cache | {"v_scale": None})
    yield Case("several blocks, int8 cache", _narrowed(blocks, "int8", 0.031, 0.037))
    whole = paged(np.random.default_rng(12), dtype, [70, 40, 9], [40, 1, 1], (4, 2), 64, 16)
    scales = {"k_scale": by_head(0.9, 2), "v_scale": by_head(0.6, 2)}
    yield Case("mixed, scales of a cache that is not narrow", whole | scales)
    for name, arguments, fill in (
        ("decode, NaN below the window", decode | {"window": 5}, _spoil_below_reach),
        ("mixed, NaN below the window", mixed | {"window": 4}, _spoil_below_reach),
        ("mixed, NaN in the last slot of a prompt", mixed, _spoil_last),
    ):
        yield Case(name, arguments | {"kv": fill(arguments)})
    yield from _sink_cases(decode, mixed, sharp, blocks)
    yield from _chunk_cases(decode, mixed, blocks)
    for name, arguments in (
        ("decode, window, released pages", decode | {"window": 5}),
        ("mixed, window, released pages", mixed | {"window": 4}),
        ("several blocks, window, released pages", edge | {"window": 40}),
        ("decode, chunk, released pages", decode | {"chunk": 16}),
        ("mixed, chunk, released pages", mixed | {"chunk": 8}),
    ):
        yield Case(name, released(arguments))
    if dtype == "bfloat16":
        bench = generator("bench paged_attention")
        lengths = [int(n) for n in bench.integers(200, 2000, 64)]
        for name, n, m in (
            ("decode, 64 requests", lengths, [1] * 64),
            ("prefill of 1024", [1024], [1024]),
        ):
            yield Case(name, partial(paged, bench, dtype, n, m, (16, 8), 128, 16), ("bench",))


def _sinks(heads: int) -> np.ndarray:
    """A sink for each head, all different: of scores near 1, so that each takes its share."""
    return np.linspace(-1.5, 3.5, heads).astype(np.float32)


def _sink_cases(
    decode: Arguments, mixed: Arguments, sharp: Arguments, blocks: Arguments
) -> Iterator[Case]:
    heads = {"sinks": _sinks(decode["q"].shape[1])}
    yield Case("decode, sinks", decode | heads)
    yield Case("decode, sinks, window", decode | heads | {"window": 5})
    # Scores in the hundreds beside sinks near 1, and rows of equal scores beside a sink of 16,
    # which leaves them next to nothing. With a larger one float32 exponents alone, whose rounding
    # grows with them, would be most of the bound.
    yield Case("decode, sinks, sharp and flat", sharp | heads)
    yield Case("decode, a sink that takes all", sharp | {"sinks": heads["sinks"] * 0 + 16})
    yield Case("mixed, sinks", mixed | {"sinks": _sinks(6)})
    both = {"sinks": _sinks(6), "window": 11, "soft_cap": 3.0}
    yield Case("mixed, sinks, window and soft cap", mixed | both)
    yield Case("mixed, sinks, fp8 cache", _narrowed(mixed, "fp8", 0.9, 0.6) | {"sinks": _sinks(6)})
    yield Case("several blocks, sinks", blocks | {"sinks": _sinks(2)})


def _chunk_cases(decode: Arguments, mixed: Arguments, blocks: Arguments) -> Iterator[Case]:
    """Chunks of a page, of parts of pages, and longer than a block; a query at the begin of a chunk
    sees itself only.
    """
    yield Case("decode, chunk of a page", decode | {"chunk": 16})
    yield Case("decode, chunk", decode | {"chunk": 12})
    yield Case("mixed, chunk", mixed | {"chunk": 10})
    both = {"chunk": 7, "soft_cap": 3.0, "sinks": _sinks(6)}
    yield Case("mixed, chunk, soft cap and sinks", mixed | both)
    yield Case("several blocks, chunk", blocks | {"chunk": 140})


def _narrowed(a: Arguments, kind: str, k_size: float, v_size: float) -> Arguments:
    """The same step over a cache of fp8 or int8, with scales around these sizes. What no request
    holds is large in int8, which has no NaN.
    """
    heads = a["kv"].shape[2] // 2
    k_scale, v_scale = by_head(k_size, heads), by_head(v_size, heads)
    unused = np.isnan(a["kv"].astype(np.float32)).all((2, 3))
    kv = np.empty(a["kv"].shape, NARROW[kind][0])
    kv[..., 0::2, :] = narrow(a["kv"][..., 0::2, :], kind, k_scale)
    kv[..., 1::2, :] = narrow(a["kv"][..., 1::2, :], kind, v_scale)
    if kind == "int8":
        kv[unused] = 127
    return a | {"kv": kv, "k_scale": k_scale, "v_scale": v_scale}


def open_rows(a: Arguments) -> np.ndarray:
    """Rows of a request in which another row sees NaN: the contract leaves them open."""
    free = np.zeros((len(a["q"]), 1, 1), bool)
    for i in range(a["counts"][1]):
        start, stop, length = (
            int(a["query_start"][i]),
            int(a["query_start"][i + 1]),
            int(a["kv_lens"][i]),
        )
        pages = a["page_table"][i, : -(-length // a["kv"].shape[1])]
        slots = a["kv"][pages].reshape(-1, *a["kv"].shape[2:])[:length].astype(np.float32)
        spoilt = np.isnan(slots).any((1, 2))
        position, slot = (
            np.arange(length - (stop - start), length)[:, None],
            np.arange(length)[None, :],
        )
        visible = (slot <= position) & (slot >= _oldest(position, a["window"], a.get("chunk", 0)))
        hit = (visible & spoilt).any(1)
        free[start:stop, 0, 0] = hit.any() & ~hit
    return free


def _oldest(position: Any, window: int, chunk: int) -> Any:
    """The first position that a query sees: what the reference says, in other words."""
    if chunk > 0:
        return position // chunk * chunk
    return np.maximum(0, position - window + 1 if window > 0 else 0)


def _lowest_seen(a: Arguments, i: int) -> int:
    """The first slot that any query of request i sees in this step."""
    first = a["kv_lens"][i] - (a["query_start"][i + 1] - a["query_start"][i])
    return int(_oldest(int(first), a["window"], a.get("chunk", 0)))


def _spoil_below_reach(a: Arguments) -> np.ndarray:
    """NaN in the slots that no query of this step sees any more."""
    kv = a["kv"].copy()
    for i in range(a["counts"][1]):
        for slot in range(_lowest_seen(a, i)):
            kv[a["page_table"][i, slot // kv.shape[1]], slot % kv.shape[1]] = np.nan
    return np.asarray(kv)


def released(a: Arguments) -> Arguments:
    """The same step after its pages that no query sees were released: their entries are 0, and
    page 0, NaN throughout, is nobody's.
    """
    kv, table, page = _spoil_below_reach(a), a["page_table"].copy(), a["kv"].shape[1]
    used = [-(-int(n) // page) for n in a["kv_lens"][: a["counts"][1]]]
    taken = {int(table[i, j]) for i, n in enumerate(used) for j in range(n)}
    free = min(set(range(len(kv) - 1)) - taken)
    for i, n in enumerate(used):
        table[i, :n][table[i, :n] == 0] = free
        table[i, : _lowest_seen(a, i) // page] = 0
    kv[free] = kv[0] if 0 in taken else np.nan
    kv[0] = np.nan
    return a | {"kv": kv, "page_table": table}


def _spoil_last(a: Arguments) -> np.ndarray:
    """NaN in the last slot of each request with several queries: it reaches the last of them
    only.
    """
    kv = a["kv"].copy()
    for i in range(a["counts"][0], a["counts"][1]):
        slot = a["kv_lens"][i] - 1
        kv[a["page_table"][i, slot // kv.shape[1]], slot % kv.shape[1]] = np.nan
    return np.asarray(kv)


class Fault:
    """paged_attention with one thing wrong; "" is the plain truth. `sizes` gives magnitudes
    instead of results, of weights that count as `least` at most.
    """

    def __init__(self, fault: str = "", sizes: str = "", least: float = math.inf) -> None:
        self.fault, self.sizes, self.least = fault, sizes, least

    def __call__(
        self, xp: Any, q: Any, kv: Any, page_table: Any, query_start: Any, kv_lens: Any,
        counts: Any, scale: float,
        window: int, soft_cap: float, max_query_len: int, k_scale: Any = None,
        v_scale: Any = None, sinks: Any = None, chunk: int = 0,
    ) -> Any:  # fmt: skip
        out = np.zeros_like(q)
        kv = kv.astype(np.float64)
        for first, name, scale_of in ((0, "K", k_scale), (1, "V", v_scale)):
            if scale_of is None or self.fault == f"scale of {name} ignored":
                continue
            if self.fault == f"scale of {name} of the neighbouring head":
                scale_of = np.roll(scale_of, 1)
            kv[..., first::2, :] *= scale_of[:, None]
        if self.fault == "padding not zeroed":
            out += 1.0
        scale = {"scale missing": 1.0, "scale off by 1.005": scale * 1.005}.get(self.fault, scale)
        if self.fault == "chunk taken for a window" and chunk > 0:
            window, chunk = chunk, 0
        if sinks is not None and self.fault == "sink of the head before":
            sinks = np.roll(sinks, 1)
        elif self.fault == "sinks dropped":
            sinks = None
        for i in range(int(counts[1])):
            start, stop, length = int(query_start[i]), int(query_start[i + 1]), int(kv_lens[i])
            if self.fault == "length of the request before":
                length = max(stop - start, min(length, int(kv_lens[i - 1])))
            cache = self._cache(kv, page_table[i], length)
            keys, values = self._heads(cache, q.shape[1])
            scores, size = self._scores(q[start:stop], keys, scale, soft_cap)
            visible = self._visible(length, stop - start, window, chunk)
            out[start:stop] = self._weighted(scores, size, visible, values, soft_cap, sinks)
        return out * 1.005 if self.fault == "scaled by 1.005" else out

    def _cache(self, kv: Any, table: Any, length: int) -> Any:
        page = kv.shape[1]
        pages = table[: -(-length // page)].copy()
        if self.fault == "stale last page":
            pages[-1] = table[0] if len(pages) > 1 else pages[-1]
        elif self.fault == "pages in order":
            pages = np.sort(pages)
        elif self.fault == "first pages swapped":
            pages[:2] = pages[:2][::-1]
        cache = kv[pages].reshape(-1, *kv.shape[2:])[:length].copy()
        if self.fault == "last partial page lost" and length > page:
            cache[length - (length % page) :] = 0.0
        return cache

    def _heads(self, cache: Any, heads: int) -> tuple[Any, Any]:
        kv_heads = cache.shape[1] // 2
        own = np.arange(heads) // (heads // kv_heads)
        if self.fault == "heads mapped modulo":
            own = np.arange(heads) % kv_heads
        elif self.fault == "heads mapped reversed":
            own = own[::-1]
        keys, values = cache[:, 0::2], cache[:, 1::2]
        if self.fault == "halves, not interleaved":
            keys, values = cache[:, :kv_heads], cache[:, kv_heads:]
        elif self.fault == "K and V swapped":
            keys, values = values, keys
        return keys[:, own], values[:, own]

    def _scores(self, q: Any, keys: Any, scale: float, soft_cap: float) -> tuple[Any, Any]:
        """Scores, and for magnitudes what is added up in them: [heads queries slots]."""
        if self.fault == "last 8 of hdim skipped":
            q = np.where(np.arange(q.shape[-1]) < q.shape[-1] - 8, q, 0.0)
        q, keys = q.swapaxes(0, 1), keys.transpose(1, 2, 0)
        scores = q @ keys * scale
        size = np.abs(q) @ np.abs(keys) * scale if self.sizes else None
        if self.fault == "scores rounded to bfloat16":
            scores = to_bfloat16(scores)
        if soft_cap > 0 and self.fault != "soft cap ignored":
            scores = soft_cap * np.tanh(
                scores if self.fault == "soft cap without division" else scores / soft_cap
            )
        return scores, size

    def _visible(self, length: int, queries: int, window: int, chunk: int) -> Any:
        position, slot = np.arange(length - queries, length)[:, None], np.arange(length)[None, :]
        if self.fault == "positions from 0":
            position = np.arange(queries)[:, None]
        visible = slot <= position
        if self.fault == "mask off by one, future seen":
            visible = slot <= position + 1
        elif self.fault == "mask off by one, self unseen":
            visible = (slot < position) | (slot == 0)
        elif self.fault == "not causal":
            visible = slot < length + 0 * position
        off = {"window one longer": 1, "window one shorter": -1}.get(self.fault, 0)
        if window > 0 and self.fault != "window ignored":
            visible = visible & (slot > position - max(1, window + off))
        if chunk > 0 and self.fault != "chunk ignored":
            # A query whose chunk begins one later sees itself at least.
            late = int(self.fault == "chunks begin one later")
            visible = visible & (slot >= _oldest(np.maximum(position - late, 0), 0, chunk) + late)
            visible = visible | (slot == position)
        return visible

    def _weighted(
        self, scores: Any, size: Any, visible: Any, values: Any, soft_cap: float, sinks: Any
    ) -> Any:
        if soft_cap > 0 and self.fault == "soft cap of the mask":
            scores, visible = np.where(visible, scores, -soft_cap), np.ones_like(visible)
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        if self.fault == "maximum not taken off":
            weights = np.exp(scores).astype(np.float32)
        total = weights.sum(-1, keepdims=True)
        if self.fault == "one more in the sum":
            total = total + 1.0
        elif self.fault == "softmax of base 2":
            weights = np.exp2(scores - top)
            total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            sink = sinks.astype(np.float64)[:, None, None]
            if self.fault == "sinks scaled by 0.99":
                sink = sink * 0.99
            total = total + np.exp(sink - top)
        weights = weights / total
        values, lost = values.swapaxes(0, 1), np.isnan(values)
        if lost.any():
            values = np.where(lost.swapaxes(0, 1), 0.0, values)
        if self.sizes:
            # An error e of a score moves its weight by the factor e, and those of all others by
            # their share in it.
            spread = np.where(visible, 1.0 + size, 0.0) * (
                math.sqrt(size.shape[-1]) / 4.0 if self.sizes == "sums" else 0.0
            )
            spread = spread + 1.0 + (weights * spread).sum(-1, keepdims=True)
            return (np.minimum(weights, self.least) * spread @ np.abs(values)).swapaxes(0, 1)
        mean = (weights @ values).swapaxes(0, 1)
        if lost.any():
            mean = np.where(np.einsum("ts,shd->thd", 1.0 * visible, 1.0 * lost) > 0, np.nan, mean)
        return mean


def _sizes(a: Arguments, which: str) -> Any:
    return Fault(sizes=which)(None, **a)


def _small(a: Arguments, least: float) -> Any:
    """What weights do that are off by `least`, or by all that they are."""
    return Fault(sizes="weights", least=least)(None, **a)


ATTENTION_FAULTS = (
    *(
        "mask off by one, future seen",
        "mask off by one, self unseen",
        "not causal",
        "positions from 0",
    ),
    *(
        "window one longer",
        "window one shorter",
        "window ignored",
        "stale last page",
        "pages in order",
    ),
    *(
        "first pages swapped",
        "last partial page lost",
        "length of the request before",
        "K and V swapped",
    ),
    *(
        "halves, not interleaved",
        "heads mapped modulo",
        "heads mapped reversed",
        "soft cap ignored",
    ),
    *(
        "soft cap without division",
        "soft cap of the mask",
        "scale missing",
        "scale off by 1.005",
        "scaled by 1.005",
    ),
    *(
        "last 8 of hdim skipped",
        "scores rounded to bfloat16",
        "one more in the sum",
        "softmax of base 2",
    ),
    *("maximum not taken off", "padding not zeroed", "scale of K ignored", "scale of V ignored"),
    *("scale of K of the neighbouring head", "scale of V of the neighbouring head"),
    *("sinks dropped", "sink of the head before", "sinks scaled by 0.99"),
    *("chunk taken for a window", "chunk ignored", "chunks begin one later"),
)

judged_by(
    "paged_attention",
    Testing(
        _attention_cases,
        Bound(
            inner=1.0,
            reason="the contract rounds the softmax weights before the product with V",
        ),
        magnitude=partial(_sizes, which="sums"),
        rounded=partial(_sizes, which="weights"),
        small=_small,
        free=open_rows,
        rows=("q",),
        mutants={fault: Fault(fault) for fault in ATTENTION_FAULTS},
        truth=Fault(),
    ),
)
