"""Cases of the ops of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..testing import Arguments, Bound, Case, Testing, judged_by
from .attention import ATTENTION_FAULTS, FAR, Fault, open_rows, paged, turned_heads
from .dense import chain
from .generators import generator, hostile_rows, normal, strided, to_bfloat16, to_tf32, weights

# --- to_latents and from_latents
# --------------------------------------------------------------------------------------------------


def _by_head(
    rng: np.random.Generator, dtype: str, rows: int, heads: int, k: int, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """(x [rows heads k], weight [heads n k])."""
    x = hostile_rows(rng, dtype, rows, heads * k).reshape(rows, heads, k)
    return x, normal(rng, dtype, heads, n, k, scale=k**-0.5)


def _product_cases(dtype: str, given: str) -> Iterator[Case]:
    """`given` names what is multiplied: q, whose weight is the other way round, or y."""
    rng = generator(f"{given} by head")

    def arguments(*sizes: int) -> Arguments:
        x, weight = _by_head(rng, dtype, *sizes)
        if given == "q":
            weight = np.ascontiguousarray(weight.swapaxes(1, 2))
        return {given: x, "weight": weight}

    odd = arguments(7, 3, 37, 21)
    yield Case("odd sizes", odd)
    # A part of each head of q, and of the rows of each head's weight, as layers have them.
    views = {given: strided(odd[given]), "weight": strided(odd["weight"], axis=1)}
    yield Case("views", odd | views)
    yield Case("one token", arguments(1, 5, 48, 64))
    yield Case("more rows than a block", arguments(70, 2, 16, 8))
    if dtype == "bfloat16":
        for tokens in (1, 64, 1024):
            make = partial(arguments, tokens, 20, *((192, 512) if given == "q" else (512, 256)))
            yield Case(f"GLM-4.7-Flash, {tokens} tokens", make, ("bench",))


def _per_head(x: Any, weight: Any, fault: str = "") -> Any:
    """x [tok head k] by weight [head n k], one head after the other."""
    if fault == "tf32 product":
        x, weight = to_tf32(x), to_tf32(weight)
    elif fault == "bfloat16 product":
        x, weight = to_bfloat16(x), to_bfloat16(weight)
    elif fault == "weight of the neighbouring head":
        weight = np.roll(weight, 1, axis=0)
    elif fault == "weight of the first head":
        weight = np.repeat(weight[:1], len(weight), axis=0)
    elif fault == "last of k skipped":
        x = np.where(np.arange(x.shape[2]) < x.shape[2] - 1, x, 0.0)
    elif fault == "columns shifted":
        weight = np.roll(weight, 1, axis=1)
    elif fault == "rows shifted":
        x = np.roll(x, 1, axis=0)
    out = np.stack([x[:, head] @ weight[head].T for head in range(len(weight))], axis=1)
    return out * 1.005 if fault == "scaled by 1.005" else out


def _wrong_to(xp: Any, q: Any, weight: Any, fault: str = "") -> Any:
    return _per_head(q, weight.swapaxes(1, 2), fault)


def _wrong_from(xp: Any, y: Any, weight: Any, fault: str = "") -> Any:
    return _per_head(y, weight, fault)


PRODUCT_FAULTS = (
    *("tf32 product", "bfloat16 product", "weight of the neighbouring head"),
    *("weight of the first head", "last of k skipped", "columns shifted", "rows shifted"),
    "scaled by 1.005",
)

for _op, _given, _truth in (("to_latents", "q", _wrong_to), ("from_latents", "y", _wrong_from)):

    def _magnitude(a: Arguments, given: str, truth: Any) -> Any:
        sizes: Any = truth(None, np.abs(a[given]), np.abs(a["weight"]))
        return sizes * chain(a[given].shape[2])

    judged_by(
        _op,
        Testing(
            partial(_product_cases, given=_given),
            magnitude=partial(_magnitude, given=_given, truth=_truth),
            rows=(_given,),
            mutants={fault: partial(_truth, fault=fault) for fault in PRODUCT_FAULTS},
            truth=_truth,
        ),
    )


# --- write_latents
# --------------------------------------------------------------------------------------------------


def _write_cases(dtype: str) -> Iterator[Case]:
    rng = generator("write_latents")
    for name, pages, page, copies, rank, turn in (
        ("pages of 4", 5, 4, 1, 24, 8),
        ("pages of 16, odd sizes", 3, 16, 1, 7, 3),
        ("held twice", 3, 8, 2, 12, 4),
    ):
        cache = normal(rng, dtype, pages, page, copies, rank + turn)
        cache[1, 2] = np.nan  # what lies in a slot is copied or overwritten, not read
        slots = rng.permutation(pages * page - 1)[:9].astype(np.int32)
        slots[[2, 5]] = -1
        latents, rotated = normal(rng, dtype, 9, rank), normal(rng, dtype, 9, turn)
        latents[2], rotated[5] = np.nan, np.nan  # rows of no slot
        arguments: Arguments = {
            "cache": cache, "latents": latents, "rotated": rotated, "slots": slots,
        }  # fmt: skip
        yield Case(name, arguments)
    yield Case("no row has a slot", arguments | {"slots": np.full(9, -1, np.int32)})
    yield Case("views", arguments | {"latents": strided(latents), "rotated": strided(rotated)})
    yield Case("slots behind 2^15", partial(_far_write, arguments))


def _far_write(a: Arguments) -> Arguments:
    """The same rows, in the last pages of a cache of many."""
    cache = np.zeros((FAR, 16, *a["cache"].shape[2:]), a["cache"].dtype)
    cache[-4:] = 1.0
    # Slots below 48, so that they lie in the last three pages.
    slots = np.where(a["slots"] < 0, -1, a["slots"] + (FAR - 3) * 16)
    return a | {"cache": cache, "slots": slots.astype(np.int32)}


def _scratch(a: Arguments) -> np.ndarray:
    free = np.zeros((*a["cache"].shape[:2], 1, 1), bool)
    free[-1, -1] = bool((a["slots"] < 0).any())
    return free


def _wrong_write(
    xp: Any, cache: Any, latents: Any, rotated: Any, slots: Any, fault: str = ""
) -> Any:
    pages, page, copies, size = cache.shape
    out, rank = cache.reshape(-1, copies, size).copy(), latents.shape[1]
    for row, slot in enumerate(slots):
        if slot < 0 and fault != "padding written to the last real slot":
            continue
        if fault == "next slot":
            slot += 1
        elif fault == "page and offset swapped":
            slot = min(slot % pages * page + slot // pages, len(out) - 1)
        elif slot < 0:
            slot = len(out) - 2
        if fault == "key in front":
            out[slot, :, -rank:], out[slot, :, :-rank] = latents[row], rotated[row]
            continue
        held = slice(0, 1) if fault == "first copy alone" else slice(None)
        out[slot, held, :rank] = latents[row]
        if fault != "key not written":
            out[slot, held, rank:] = rotated[row]
    return out.reshape(cache.shape)


WRITE_FAULTS = (
    *("padding written to the last real slot", "next slot", "page and offset swapped"),
    *("key in front", "key not written", "first copy alone"),
)

judged_by(
    "write_latents",
    Testing(
        _write_cases,
        bitwise=True,
        free=_scratch,
        mutants={fault: partial(_wrong_write, fault=fault) for fault in WRITE_FAULTS},
        truth=_wrong_write,
    ),
)


# --- norm_rope_write_latents
# --------------------------------------------------------------------------------------------------


def _fused_arguments(
    rng: np.random.Generator, dtype: str, tokens: int, rank: int, turn: int, pages: tuple[int, int]
) -> Arguments:
    """A step of `tokens` rows, the second of which has no slot."""
    cache = normal(rng, dtype, *pages, 1, rank + turn)
    cache[0] = np.nan  # what lies in a slot is copied or overwritten, not read
    slots = rng.permutation(pages[0] * pages[1] - 1)[:tokens].astype(np.int32)
    slots[1:2] = -1
    latents = normal(rng, dtype, tokens, rank + turn)
    latents[: tokens // 2] *= latents.dtype.type(20.0)
    latents[-1] = 0.0
    angles = rng.uniform(0.0, 2e3, (tokens, turn // 2))
    return {
        "latents": latents, "cache": cache, "weight": weights(rng, dtype, rank),
        "cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32),
        "slots": slots, "eps": 1e-6,
    }  # fmt: skip


def _fused_cases(dtype: str) -> Iterator[Case]:
    rng = generator("norm_rope_write_latents")
    arguments = _fused_arguments(rng, dtype, 9, 32, 8, (5, 4))
    yield Case("latents", arguments)
    yield Case("large eps", arguments | {"eps": 0.5})
    yield Case("view of a wider array", arguments | {"latents": strided(arguments["latents"])})
    # Beside the temperature of q: columns of a table.
    columns = {name: strided(arguments[name]) for name in ("cos", "sin")}
    yield Case("angles out of a wider table", arguments | columns)
    yield Case("odd sizes", _fused_arguments(rng, dtype, 5, 23, 6, (3, 16)))
    yield Case("one token", _fused_arguments(rng, dtype, 1, 512, 64, (2, 16)))
    if dtype == "bfloat16":
        for tokens in (64, 2048):
            source = partial(_fused_arguments, rng, dtype, tokens, 512, 64, (1024, 64))
            yield Case(f"GLM-4.7-Flash, {tokens} tokens", source, ("bench",))


def _wrong_fused(
    ops: Any, latents: Any, cache: Any, weight: Any, cos: Any, sin: Any, slots: Any, eps: float,
    fault: str = "",
) -> Any:  # fmt: skip
    rank = len(weight)
    latent, key = latents[:, :rank], latents[:, rank:]
    eps = {"eps missing": 0.0, "eps of another model": eps * 10}.get(fault, eps)
    if fault == "rotated the other way":
        sin = -sin
    elif fault == "angles of the next token":
        cos, sin = np.roll(cos, -1, 0), np.roll(sin, -1, 0)
    if fault == "norm over the key too":
        size = latents.shape[1]
        whole = np.concatenate([weight, np.ones(size - rank, weight.dtype)])
        latent = ops.rms_norm(latents, whole, eps)[:, :rank]
    elif fault != "not normed":
        latent = ops.rms_norm(latent, weight, eps)
    if fault != "not rotated":
        key = ops.rotary_embedding(key[:, None], key[:, None], cos, sin)[0][:, 0]
    if fault == "scaled by 1.005":
        latent = latent * 1.005
    if fault == "next slot":
        slots = np.where(slots < 0, slots, slots + 1)
    return ops.write_latents(cache, latent, key, slots)


def _fused_sizes(a: Arguments) -> Any:
    """What is added up in each rotated entry, or the entry itself."""
    rank, half = len(a["weight"]), a["cos"].shape[1]
    x = a["latents"].astype(np.float64)
    mean = (x[:, :rank] ** 2).mean(-1, keepdims=True)
    latent = np.abs(x[:, :rank] * a["weight"]) / np.sqrt(mean + a["eps"])
    cos, sin = (np.abs(a[name]).astype(np.float64) for name in ("cos", "sin"))
    key = turned_heads(np.abs(x[:, rank:]), cos, sin, half)
    cache = np.abs(a["cache"]).reshape(-1, 1, x.shape[1]).astype(np.float64)
    real = a["slots"] >= 0
    cache[a["slots"][real], 0] = np.concatenate([latent, key], 1)[real]
    return cache.reshape(a["cache"].shape)


FUSED_FAULTS = (
    *("eps missing", "eps of another model", "rotated the other way", "angles of the next token"),
    *("norm over the key too", "not normed", "not rotated", "scaled by 1.005", "next slot"),
)

judged_by(
    "norm_rope_write_latents",
    Testing(
        _fused_cases,
        Bound(),
        magnitude=_fused_sizes,
        free=_scratch,
        mutants={fault: partial(_wrong_fused, fault=fault) for fault in FUSED_FAULTS},
        truth=_wrong_fused,
    ),
)


# --- latent_attention
# --------------------------------------------------------------------------------------------------


def of_latents(
    rng: np.random.Generator,
    dtype: str,
    lengths: Sequence[int],
    queries: Sequence[int],
    heads: int,
    sizes: tuple[int, int],
    page: int,
    requests: int = 0,
    tokens: int = 0,
    shared: int = 0,
) -> Arguments:
    """Arguments of a step, as of `paged`; sizes: (rank, turn)."""
    rank, size = sizes[0], sum(sizes)
    a = paged(
        rng, dtype, lengths, queries, (heads, 1), size, page, requests, tokens, shared
    )  # fmt: skip
    # V's rows, which have a mean.
    cache = np.ascontiguousarray(a["kv"][:, :, 1:])
    names = ("page_table", "query_start", "kv_lens", "counts", "scale", "max_query_len")
    q = a["q"]
    given = {"q": q[..., :rank].copy(), "rotated": q[..., rank:].copy(), "cache": cache}
    return given | {name: a[name] for name in names}


def _as_paged(a: Arguments) -> Arguments:
    """The same step as attention of one head, whose K and V are the whole entries."""
    names = ("page_table", "query_start", "kv_lens", "counts", "scale", "max_query_len")
    kv = a["cache"][:, :, :1].repeat(2, axis=2)
    q = np.concatenate([a["q"], a["rotated"]], axis=-1)
    rest = {name: a[name] for name in names}
    return {"q": q, "kv": kv, "window": 0, "soft_cap": 0.0} | rest


def _attention_cases(dtype: str) -> Iterator[Case]:
    rng = generator("latent_attention")
    decode = of_latents(
        rng, dtype, [1, 16, 17, 61, 33], [1] * 5, 4, (32, 8), 16, requests=8, tokens=8
    )
    yield Case("decode, padded", decode)
    mixed = of_latents(
        rng, dtype, [9, 50, 23, 31, 7], [1, 50, 2, 1, 5], 5, (24, 10), 4, requests=8, tokens=72
    )
    yield Case("mixed, padded", mixed)
    alike = of_latents(np.random.default_rng(10), dtype, [33] * 3, [1] * 3, 20, (32, 8), 16)
    yield Case("decode, 20 heads, equal lengths", alike)
    prefix = of_latents(rng, dtype, [40, 37, 33], [1, 5, 1], 3, (33, 6), 8, shared=4)
    yield Case("shared prefix, odd sizes", prefix)
    # Longer than the blocks in which implementations take queries (256) and slots (128).
    yield Case(
        "several blocks", of_latents(rng, dtype, [300, 140, 290], [290, 1, 20], 2, (16, 8), 16)
    )
    near = of_latents(np.random.default_rng(11), dtype, [40, 17, 5], [1, 1, 5], 2, (16, 8), 16)
    yield Case("slots behind 2^15", partial(_far_pages, near))
    few = of_latents(rng, dtype, [9, 5], [1, 5], 4, (32, 8), 16, requests=32, tokens=16)
    yield Case("more requests than tokens", few)
    sharp = decode | {name: decode[name].copy() for name in ("q", "rotated")}
    # scores in the hundreds: a softmax without its maximum overflows
    for name in ("q", "rotated"):
        sharp[name] *= sharp[name].dtype.type(30.0)
        sharp[name][1] *= sharp[name].dtype.type(0.0)  # a mean of the latents
    yield Case("decode, sharp and flat", sharp)
    yield Case("mixed, views", mixed | {name: strided(mixed[name]) for name in ("q", "rotated")})
    yield Case("mixed, NaN in the last slot of a prompt", mixed | {"cache": _spoil_last(mixed)})
    real = of_latents(rng, dtype, [70, 40, 9], [40, 1, 1], 16, (512, 64), 16)
    yield Case("mixed, sizes of DeepSeek-V3", real)
    if dtype == "bfloat16":
        bench = generator("bench latent_attention")
        lengths = [int(n) for n in bench.integers(200, 2000, 64)]
        for name, n, m in (
            ("decode, 64 requests", lengths, [1] * 64),
            ("prefill of 1024", [1024], [1024]),
        ):
            make = partial(of_latents, bench, dtype, n, m, 20, (512, 64), 64)
            yield Case(name, make, ("bench",))


def _far_pages(a: Arguments) -> Arguments:
    """The same pages, the last ones of a cache of many."""
    cache, table = a["cache"], a["page_table"]
    before = np.full((FAR - len(cache), *cache.shape[1:]), np.nan, cache.dtype)
    # Entries of the table that no request uses stay 0.
    used = np.arange(table.shape[1])[None] * cache.shape[1] < a["kv_lens"][:, None]
    moved = np.where(used, table + len(before), table).astype(np.int32)
    return a | {"cache": np.concatenate([before, cache]), "page_table": moved}


def _spoil_last(a: Arguments) -> np.ndarray:
    """NaN in the last slot of each request with several queries: it reaches the last of them
    only.
    """
    cache = a["cache"].copy()
    for i in range(a["counts"][0], a["counts"][1]):
        slot = a["kv_lens"][i] - 1
        cache[a["page_table"][i, slot // cache.shape[1]], slot % cache.shape[1]] = np.nan
    return np.asarray(cache)


OWN_FAULTS = ("key ignored", "latent ignored", "values behind the first ones")


def _wrong_attention(xp: Any, fault: str = "", sizes: str = "", **a: Any) -> Any:
    """As attention of one head (see `Fault`), of whose values the first entries are read."""
    rank = a["q"].shape[2]
    step = _as_paged(a)
    if fault == "key ignored":
        step["q"][..., rank:] = 0.0
    elif fault == "latent ignored":
        step["q"][..., :rank] = 0.0
    wrong = Fault("" if fault in OWN_FAULTS else fault, sizes=sizes)
    found = wrong(xp, **step)
    if fault == "values behind the first ones":
        return found[..., -rank:]
    return found[..., :rank]


def _attention_fault(
    xp: Any, q: Any, rotated: Any, cache: Any, page_table: Any, query_start: Any, kv_lens: Any,
    counts: Any, scale: float, max_query_len: int, fault: str = "",
) -> Any:  # fmt: skip
    return _wrong_attention(
        xp, fault, q=q, rotated=rotated, cache=cache, page_table=page_table,
        query_start=query_start, kv_lens=kv_lens, counts=counts, scale=scale,
        max_query_len=max_query_len,
    )  # fmt: skip


LEFT_OUT = ("window", "chunk", "cap", "sink", "heads", "halves", "K and V", "scale of")
"""Faults of what there is none of here, by words in their names."""
FAULTS = tuple(fault for fault in ATTENTION_FAULTS if not any(word in fault for word in LEFT_OUT))

judged_by(
    "latent_attention",
    Testing(
        _attention_cases,
        Bound(
            inner=1.0,
            reason="the contract rounds the softmax weights before the product with the latents",
        ),
        magnitude=lambda a: _wrong_attention(None, sizes="sums", **a),
        rounded=lambda a: _wrong_attention(None, sizes="weights", **a),
        free=lambda a: open_rows(_as_paged(a)),
        rows=("q", "rotated"),
        mutants={fault: partial(_attention_fault, fault=fault) for fault in (*FAULTS, *OWN_FAULTS)},
        truth=_attention_fault,
    ),
)
