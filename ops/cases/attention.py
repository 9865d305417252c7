"""Cases of the KV write and of paged attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..testing import DTYPES, Arguments, Bound, Case, Testing, judged_by
from .generators import generator, normal, strided, to_bfloat16

# --- write_kv --------------------------------------------------------------------------------------------------------


def _write_cases(dtype: str) -> Iterator[Case]:
    rng = generator("write_kv")
    for name, pages, page, heads, hdim in (("pages of 4", 5, 4, 3, 24), ("pages of 16, one head", 3, 16, 1, 7)):
        kv = normal(rng, dtype, pages, page, 2 * heads, hdim)
        kv[1, 2] = np.nan  # what lies in a slot is copied or overwritten, not read
        slots = rng.permutation(pages * page - 1)[:9].astype(np.int32)
        slots[[2, 5]] = -1
        k, v = normal(rng, dtype, 9, heads, hdim), normal(rng, dtype, 9, heads, hdim)
        k[2], v[5] = np.nan, np.nan  # rows of no slot
        arguments: Arguments = {"kv": kv, "k": k, "v": v, "slots": slots}
        yield Case(name, arguments)
    yield Case("no row has a slot", arguments | {"slots": np.full(9, -1, np.int32)})
    yield Case("views", arguments | {"k": strided(k), "v": strided(v)})
    if dtype == "bfloat16":
        yield Case("Qwen3-0.6B, 2048 tokens", _big_write, ("bench",))


def _big_write() -> Arguments:
    rng = generator("bench write_kv")
    big: Arguments = {"kv": normal(rng, "bfloat16", 1024, 16, 16, 128)}
    big |= {name: normal(rng, "bfloat16", 2048, 8, 128) for name in ("k", "v")}
    return big | {"slots": rng.permutation(1024 * 16 - 1)[:2048].astype(np.int32)}


def _scratch(a: Arguments) -> np.ndarray:
    free = np.zeros((*a["kv"].shape[:2], 1, 1), bool)
    free[-1, -1] = bool((a["slots"] < 0).any())
    return free


def _wrong_write(xp: Any, kv: Any, k: Any, v: Any, slots: Any, fault: str) -> Any:
    out = kv.reshape(-1, *kv.shape[2:]).copy()
    real = slots >= 0
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


WRITE_FAULTS = (
    *("padding written to slot 0", "padding written to the last real slot", "page and offset swapped", "next slot"),
    *("last row lost", "K and V swapped", "halves, not interleaved", "V not written"),
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


# --- paged_attention -------------------------------------------------------------------------------------------------


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
    """Arguments of a step: requests of `lengths` slots, of which the last `queries` are asked for; decodes first.

    Pages are permuted. Every slot that no request holds is NaN, and so are queries of padding rows; the first `shared`
    pages are the same in all requests. `requests` and `tokens`: padded sizes.
    """
    order = sorted(range(len(lengths)), key=lambda i: queries[i] != 1)
    lengths, queries = [lengths[i] for i in order], [queries[i] for i in order]
    requests, tokens = requests or len(lengths), tokens or sum(queries)
    need = [-(-n // page) for n in lengths]
    pages = sum(need) + 3
    free = [int(p) for p in rng.permutation(pages - 1)]
    common = [free.pop() for _ in range(shared)]
    kv = np.full((pages, page, 2 * heads[1], hdim), np.nan)
    table = np.zeros((requests, max(need) + 1), np.int32)
    for i, n in enumerate(lengths):
        mine = [*common[: need[i]], *(free.pop() for _ in range(need[i] - len(common)))]
        table[i, : need[i]] = mine
        for j, number in enumerate(mine):
            used = min(page, n - j * page)
            kv[number, :used] = rng.normal(size=(used, 2 * heads[1], hdim))
    kv[..., 1::2, :] += 0.5  # values with a mean: what is wrong with the weights adds up
    start = np.full(requests + 1, sum(queries), np.int32)
    start[: len(queries)] = np.cumsum([0, *queries])[:-1]
    lens = np.zeros(requests, np.int32)
    lens[: len(lengths)] = lengths
    q = np.full((tokens, heads[0], hdim), np.nan)
    q[: sum(queries)] = rng.normal(size=(sum(queries), heads[0], hdim))
    return {
        "q": q.astype(DTYPES[dtype]), "kv": kv.astype(DTYPES[dtype]), "page_table": table, "query_start": start,
        "kv_lens": lens, "counts": np.array([queries.count(1), len(lengths)], np.int32),
        "scale": 1.3 / math.sqrt(hdim), "window": 0, "soft_cap": 0.0, "max_query_len": max(queries),
    }  # fmt: skip


def _attention_cases(dtype: str) -> Iterator[Case]:
    rng = generator("paged_attention")
    decode = paged(rng, dtype, [1, 16, 17, 61, 33], [1] * 5, (4, 2), 32, 16, requests=8, tokens=8)
    yield Case("decode, padded", decode)
    yield Case("decode, window", decode | {"window": 5})
    yield Case("decode, soft cap", decode | {"soft_cap": 1.5})
    mixed = paged(rng, dtype, [9, 50, 23, 31, 7], [1, 50, 2, 1, 5], (6, 2), 24, 4, requests=8, tokens=72)
    yield Case("mixed, padded", mixed)
    yield Case("mixed, window and soft cap", mixed | {"window": 11, "soft_cap": 3.0})
    yield Case("mixed, window of a page", mixed | {"window": 4})
    prefix = paged(rng, dtype, [40, 37, 33], [1, 5, 1], (3, 1), 33, 8, shared=4)
    yield Case("shared prefix, odd head size", prefix)
    # Longer than the blocks in which implementations take queries (256) and slots (128).
    blocks = paged(rng, dtype, [300, 140, 290], [290, 1, 20], (2, 1), 16, 16)
    yield Case("several blocks", blocks)
    yield Case("several blocks, window", blocks | {"window": 131})
    # The oldest slot that the query sees is 127: the last one of a block of 128, which must not be skipped.
    edge = paged(np.random.default_rng(9), dtype, [167], [1], (2, 1), 16, 16)
    yield Case("window that ends with a block", edge | {"window": 40})
    few = paged(rng, dtype, [9, 5], [1, 5], (4, 2), 32, 16, requests=32, tokens=16)
    yield Case("more requests than tokens", few)
    sharp = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in decode.items()}
    sharp["q"] *= sharp["q"].dtype.type(30.0)  # scores in the hundreds: a softmax without its maximum overflows
    sharp["q"][1] *= sharp["q"].dtype.type(0.0)  # a mean of the values
    yield Case("decode, sharp and flat", sharp)
    for name, arguments, fill in (
        ("decode, NaN below the window", decode | {"window": 5}, _spoil_below_window),
        ("mixed, NaN below the window", mixed | {"window": 4}, _spoil_below_window),
        ("mixed, NaN in the last slot of a prompt", mixed, _spoil_last),
    ):
        yield Case(name, arguments | {"kv": fill(arguments)})
    if dtype == "bfloat16":
        bench = generator("bench paged_attention")
        lengths = [int(n) for n in bench.integers(200, 2000, 64)]
        for name, n, m in (("decode, 64 requests", lengths, [1] * 64), ("prefill of 1024", [1024], [1024])):
            yield Case(name, partial(paged, bench, dtype, n, m, (16, 8), 128, 16), ("bench",))


def _spoil_below_window(a: Arguments) -> np.ndarray:
    """NaN in the slots that no query of this step sees any more."""
    kv = a["kv"].copy()
    for i in range(a["counts"][1]):
        first = a["kv_lens"][i] - (a["query_start"][i + 1] - a["query_start"][i]) - a["window"] + 1
        for slot in range(max(0, first)):
            kv[a["page_table"][i, slot // kv.shape[1]], slot % kv.shape[1]] = np.nan
    return np.asarray(kv)


def _spoil_last(a: Arguments) -> np.ndarray:
    """NaN in the last slot of each request with several queries: it reaches the last of them only."""
    kv = a["kv"].copy()
    for i in range(a["counts"][0], a["counts"][1]):
        slot = a["kv_lens"][i] - 1
        kv[a["page_table"][i, slot // kv.shape[1]], slot % kv.shape[1]] = np.nan
    return np.asarray(kv)


class _Fault:
    """paged_attention with one thing wrong; "" is the plain truth. `sizes` gives magnitudes instead of results."""

    def __init__(self, fault: str = "", sizes: str = "") -> None:
        self.fault, self.sizes = fault, sizes

    def __call__(
        self, xp: Any, q: Any, kv: Any, page_table: Any, query_start: Any, kv_lens: Any, counts: Any, scale: float,
        window: int, soft_cap: float, max_query_len: int,
    ) -> Any:  # fmt: skip
        out = np.zeros_like(q)
        if self.fault == "padding not zeroed":
            out += 1.0
        scale = {"scale missing": 1.0, "scale off by 1.005": scale * 1.005}.get(self.fault, scale)
        for i in range(int(counts[1])):
            start, stop, length = int(query_start[i]), int(query_start[i + 1]), int(kv_lens[i])
            if self.fault == "length of the request before":
                length = max(stop - start, min(length, int(kv_lens[i - 1])))
            cache = self._cache(kv, page_table[i], length)
            keys, values = self._heads(cache, q.shape[1])
            scores, size = self._scores(q[start:stop], keys, scale, soft_cap)
            seen = self._seen(length, stop - start, window)
            out[start:stop] = self._weighted(scores, size, seen, values, soft_cap)
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
        """Scores, and what is added up in them."""
        if self.fault == "last 8 of hdim skipped":
            q = np.where(np.arange(q.shape[-1]) < q.shape[-1] - 8, q, 0.0)
        scores = np.einsum("thd,shd->hts", q, keys) * scale
        size = np.einsum("thd,shd->hts", np.abs(q), np.abs(keys)) * scale
        if self.fault == "scores rounded to bfloat16":
            scores = to_bfloat16(scores)
        if soft_cap > 0 and self.fault != "soft cap ignored":
            scores = soft_cap * np.tanh(scores if self.fault == "soft cap without division" else scores / soft_cap)
        return scores, size

    def _seen(self, length: int, queries: int, window: int) -> Any:
        position, slot = np.arange(length - queries, length)[:, None], np.arange(length)[None, :]
        if self.fault == "positions from 0":
            position = np.arange(queries)[:, None]
        seen = slot <= position
        if self.fault == "mask off by one, future seen":
            seen = slot <= position + 1
        elif self.fault == "mask off by one, self unseen":
            seen = (slot < position) | (slot == 0)
        elif self.fault == "not causal":
            seen = slot < length + 0 * position
        off = {"window one longer": 1, "window one shorter": -1}.get(self.fault, 0)
        if window > 0 and self.fault != "window ignored":
            seen = seen & (slot > position - max(1, window + off))
        return seen

    def _weighted(self, scores: Any, size: Any, seen: Any, values: Any, soft_cap: float) -> Any:
        if soft_cap > 0 and self.fault == "soft cap of the mask":
            scores, seen = np.where(seen, scores, -soft_cap), np.ones_like(seen)
        scores = np.where(seen, scores, -np.inf)
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
        weights = weights / total
        if self.sizes:
            # An error e of a score moves its weight by the factor e, and those of all others by their share in it.
            spread = np.where(seen, 1.0 + size, 0.0) * (
                math.sqrt(size.shape[-1]) / 4.0 if self.sizes == "sums" else 0.0
            )
            spread = spread + 1.0 + (weights * spread).sum(-1, keepdims=True)
            return np.einsum("hts,shd->thd", weights * spread, np.abs(np.where(np.isnan(values), 0.0, values)))
        return np.einsum("hts,shd->thd", weights, np.where(np.isnan(values), 0.0, values))


def _sizes(a: Arguments, which: str) -> Any:
    return _Fault(sizes=which)(None, **a)


ATTENTION_FAULTS = (
    *("mask off by one, future seen", "mask off by one, self unseen", "not causal", "positions from 0"),
    *("window one longer", "window one shorter", "window ignored", "stale last page", "pages in order"),
    *("first pages swapped", "last partial page lost", "length of the request before", "K and V swapped"),
    *("halves, not interleaved", "heads mapped modulo", "heads mapped reversed", "soft cap ignored"),
    *("soft cap without division", "soft cap of the mask", "scale missing", "scale off by 1.005", "scaled by 1.005"),
    *("last 8 of hdim skipped", "scores rounded to bfloat16", "one more in the sum", "softmax of base 2"),
    *("maximum not taken off", "padding not zeroed"),
)

judged_by(
    "paged_attention",
    Testing(
        _attention_cases,
        Bound(
            inner=1.0,
            reason="the contract rounds the softmax weights, normalised or not, before the product with V",
        ),
        magnitude=partial(_sizes, which="sums"),
        rounded=partial(_sizes, which="weights"),
        rows=("q",),
        mutants={fault: _Fault(fault) for fault in ATTENTION_FAULTS},
        truth=_Fault(),
    ),
)
