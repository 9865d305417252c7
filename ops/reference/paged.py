"""Ops on the paged KV cache.

The cache of a layer is `kv [page slot 2*kvhead hdim]`: the entries 2h and 2h+1 of a slot are K and V of head h. The
last slot of the last page is scratch: no page table names that page, and padding rows may write there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..declare import Array, Contract, define


@define(
    native="per framework",
    activations=("kv",),
    contract=Contract(rounds="nowhere", accumulate="none", masked="rows with slot -1 may write the scratch slot only"),
)
def write_kv(xp: Any, kv: Array, k: Array, v: Array, slots: Array) -> Array:
    """The cache with k and v [tok kvhead hdim] written at slots [tok] = page * page_size + offset, -1 for none."""
    pages, page_size, heads, size = kv.shape
    out = kv.reshape(pages * page_size, heads, size).copy()
    real = slots >= 0
    out[slots[real], 0::2] = k[real]
    out[slots[real], 1::2] = v[real]
    return out.reshape(kv.shape)


@define(
    native="per framework",
    contract=Contract(
        rounds="softmax weights (normalised or not) to the storage dtype before the product with V; the output once",
        dot="BF16_BF16_F32 for bfloat16, F32_F32_F32 for float32",
        masked="rows of no request are 0; slots past a request's length are not read into any result",
        nan="NaN in a slot that is masked for a row does not reach that row",
    ),
)
def paged_attention(
    xp: Any,
    q: Array,
    kv: Array,
    page_table: Array,
    query_start: Array,
    kv_lens: Array,
    counts: Array,
    scale: float,
    window: int,
    soft_cap: float,
    max_query_len: int,
) -> Array:
    """Causal attention of ragged queries over the cache -> [tok head hdim].

    q [tok head hdim]; page_table [req page] int32; query_start [req+1]; kv_lens [req] counts the slots in use, this
    step's included: the queries of request i are its last positions. counts [2]: requests with one query token, which
    stand first, and requests. `window` w > 0 lets a query at position p see positions above p - w; `soft_cap` c > 0
    squashes scores to c tanh(s / c). `max_query_len` bounds the query tokens of a request (1: a decode step).
    """
    _, page_size, kv_heads, size = kv.shape
    group = q.shape[1] // (kv_heads // 2)
    out = np.zeros_like(q)
    for i in range(int(counts[1])):
        start, stop, length = int(query_start[i]), int(query_start[i + 1]), int(kv_lens[i])
        pages = page_table[i, : -(-length // page_size)]
        cache = xp.accumulate(kv[pages].reshape(-1, kv_heads, size)[:length])
        keys, values = (cache[:, j::2].repeat(group, axis=1) for j in (0, 1))
        scores = np.einsum("thd,shd->hts", xp.accumulate(q[start:stop]), keys) * scale
        if soft_cap > 0:
            scores = soft_cap * np.tanh(scores / soft_cap)
        position = np.arange(length - (stop - start), length)[:, None]
        slot = np.arange(length)[None, :]
        seen = (slot <= position) & ((slot > position - window) if window > 0 else True)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[start:stop] = np.einsum("hts,shd->thd", weights, np.where(np.isnan(values), 0.0, values)).astype(q.dtype)
    return out
