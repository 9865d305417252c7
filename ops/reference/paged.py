"""Ops on the paged KV cache.

A cache may be narrower than the model's dtype: int8 and float8_e4m3fn hold `x / scale` for fixed
scales of K and V, one for each head.

The cache of a layer is `kv [page slot 2*kvhead hdim]`: the entries 2h and 2h+1 of a slot are K and
V of head h. The last slot of the last page is scratch: no page table names that page, and padding
rows may write there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..declare import Array, Contract, OpError, define
from .quantization import stored


def check_reach(window: int, chunk: int) -> None:
    """Raise OpError for a window or a chunk below 0, and for both at once."""
    for name, value in (("window", window), ("chunk", chunk)):
        if value < 0:
            raise OpError(f"paged_attention: {name}: got {value}, allowed are 0 (none) and more")
    if window > 0 and chunk > 0:
        raise OpError(
            f"paged_attention: chunk: got {chunk} beside window {window}, allowed is one of them"
        )


def oldest_seen(position: Any, window: int, chunk: int) -> Any:
    """The first position that a query at `position` sees; below 0 where its window is longer than
    what there is.

    `position` is a number or an array of any framework.
    """
    if chunk > 0:
        return position - position % chunk
    return position - (window - 1) if window > 0 else position * 0


@define(
    shapes="kv [page slot 2*kvhead hdim], k [tok kvhead hdim], v [tok kvhead hdim], slots [tok], "
    "k_scale [kvhead], v_scale [kvhead] -> kv",
    shards=("kvhead",),
    native="per framework",
    activations=("kv",),
    state=("kv",),
    contract=Contract(
        rounds="nowhere; x * float32(1 / scale) in float32, saturated, once to int8 or fp8 for a "
        "cache of those",
        accumulate="none",
        masked="rows with slot -1 may write the scratch slot only",
        nan="copied; 0 in an int8 cache",
    ),
)
def write_kv(
    xp: Any,
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    """The cache with k and v [tok kvhead hdim] written at slots [tok] = page * page_size + offset,
    -1 for none.

    `k_scale` and `v_scale` [kvhead] float32 (None: 1) divide what a cache of int8 or float8_e4m3fn
    holds; any other holds k and v themselves.
    """
    pages, page_size, heads, size = kv.shape
    out = kv.reshape(pages * page_size, heads, size).copy()
    real = slots >= 0
    out[slots[real], 0::2] = stored(xp, k[real], kv, k_scale)
    out[slots[real], 1::2] = stored(xp, v[real], kv, v_scale)
    return out.reshape(kv.shape)


@define(
    shapes="qkv [tok (head+2*kvhead)*hdim], kv [page slot 2*kvhead hdim], q_weight [hdim], "
    "k_weight [hdim], cos [tok r], sin [tok r], slots [tok], k_scale [kvhead], "
    "v_scale [kvhead] -> [tok head hdim] qkv, kv",
    shards=("head", "kvhead"),
    level="coarse",
    activations=("kv",),
    state=("kv",),
    composition=("rms_norm", "unit_rms_norm", "rotary_embedding", "write_kv"),
    contract=Contract(
        rounds="where its finer ops do; an implementation may skip the roundings between them",
        masked="rows with slot -1 may write the scratch slot only",
    ),
)
def norm_rope_write_kv(
    ops: Any,
    qkv: Array,
    kv: Array,
    q_weight: Array | None,
    k_weight: Array | None,
    cos: Array,
    sin: Array,
    slots: Array,
    eps: float,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    v_norm: bool = False,
    norm_behind: bool = False,
) -> tuple[Array, Array]:
    """(q [tok head hdim], the cache): q, k and v split from qkv [tok (head + 2 kvhead) hdim], q and
    k normed by head if there are weights [hdim], v without a weight if `v_norm`, q and k rotated
    (cos, sin [tok r] float32), k and v written at slots [tok] as `write_kv` does. `norm_behind`: q
    and k are rotated, then normed.
    """
    tokens, size, kv_heads = qkv.shape[0], kv.shape[3], kv.shape[2] // 2
    heads = qkv.shape[1] // size - 2 * kv_heads
    split = heads * size, (heads + kv_heads) * size
    q = qkv[:, : split[0]].reshape(tokens, heads, size)
    k = qkv[:, split[0] : split[1]].reshape(tokens, kv_heads, size)
    v = qkv[:, split[1] :].reshape(tokens, kv_heads, size)
    if norm_behind:
        q, k = ops.rotary_embedding(q, k, cos, sin)
    if q_weight is not None:
        q = ops.rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = ops.rms_norm(k, k_weight, eps)
    if v_norm:
        v = ops.unit_rms_norm(v, eps)
    if not norm_behind:
        q, k = ops.rotary_embedding(q, k, cos, sin)
    return q, ops.write_kv(kv, k, v, slots, k_scale, v_scale)


@define(
    shapes="q [tok head hdim], weight [hdim], cos [tok r], sin [tok r] -> [tok head hdim] q",
    shards=("head",),
    level="coarse",
    activations=("q",),
    composition=("rms_norm", "rotary_embedding"),
    contract=Contract(
        rounds="where its finer ops do; an implementation may skip the rounding between them"
    ),
)
def norm_rope(
    ops: Any, q: Array, weight: Array | None, cos: Array, sin: Array, eps: float
) -> Array:
    """q [tok head hdim] normed by head if there is a weight [hdim], and rotated (cos, sin [tok r]
    float32): what layers do that read another one's cache.
    """
    if weight is not None:
        q = ops.rms_norm(q, weight, eps)
    # The finer op rotates keys too: a head of q stands in for them.
    rotated: Array = ops.rotary_embedding(q, q[:, :1], cos, sin)[0]
    return rotated


@define(
    shapes="q [tok head hdim], kv [page slot 2*kvhead hdim], page_table [req pages], query_start "
    "[req+1], "
    "kv_lens [req], counts [2], k_scale [kvhead], v_scale [kvhead], sinks [head] "
    "-> [tok head hdim] q",
    shards=("head", "kvhead"),
    host=("query_start", "kv_lens", "counts"),
    native="per framework",
    contract=Contract(
        rounds="softmax weights, not normalised yet, to q's dtype before the product with V, but "
        "not in their own sum, nor a sink's share of it; "
        "the output once",
        dot="BF16_BF16_F32 for bfloat16, F32_F32_F32 for float32; int8 and fp8 entries are exact "
        "in q's dtype",
        masked="rows of no request are 0; slots that no row of a request sees are not read into "
        "any result, and entries of the page table for pages of such slots may name any page",
        nan="NaN in a slot reaches each row that sees it, and may reach the other rows of that "
        "request in this step",
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
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None,
    chunk: int = 0,
) -> Array:
    """Causal attention of ragged queries over the cache -> [tok head hdim].

    q [tok head hdim]; page_table [req page] int32; query_start [req+1]; kv_lens [req] counts the
    slots in use, this step's included: the queries of request i are its last positions. counts [2]:
    requests with one query token, which stand first, and requests. `max_query_len` bounds the query
    tokens of a request (1: a decode step). K and V are the cache's entries times `k_scale` and
    `v_scale` [kvhead] float32 (None: 1).

    `window` w > 0 lets a query at position p see positions above p - w; `chunk` c > 0 lets it see
    those of its own chunk, positions j with j // c == p // c; both at once are an error. `soft_cap`
    c > 0 squashes scores to c tanh(s / c). `sinks` [head] float32 adds exp(sink), which is not
    capped, to the sum of a row's weights, without a value.
    """
    check_reach(window, chunk)
    _, page_size, kv_heads, size = kv.shape
    group = q.shape[1] // (kv_heads // 2)
    out = np.zeros_like(q)
    for i in range(int(counts[1])):
        start, stop, length = int(query_start[i]), int(query_start[i + 1]), int(kv_lens[i])
        pages = page_table[i, : -(-length // page_size)]
        cache = xp.accumulate(kv[pages].reshape(-1, kv_heads, size)[:length])
        keys, values = (cache[:, j::2].repeat(group, axis=1) for j in (0, 1))
        scores = np.einsum("thd,shd->hts", xp.accumulate(q[start:stop]), keys) * scale
        if k_scale is not None:
            scores *= xp.accumulate(k_scale).repeat(group)[:, None, None]
        if soft_cap > 0:
            scores = soft_cap * np.tanh(scores / soft_cap)
        position = np.arange(length - (stop - start), length)[:, None]
        slot = np.arange(length)[None, :]
        seen = (slot <= position) & (slot >= oldest_seen(position, window, chunk))
        scores = np.where(seen, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        if sinks is not None:
            sink = xp.accumulate(sinks)[:, None, None]
            top = np.maximum(top, sink)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        weights /= total if sinks is None else total + np.exp(sink - top)
        missing = np.isnan(values)
        mean = np.einsum("hts,shd->thd", weights, np.where(missing, 0.0, values))
        if v_scale is not None:
            mean *= xp.accumulate(v_scale).repeat(group)[:, None]
        # 0 * NaN is NaN in a product: NaN is what a row gets that sees one, and no other.
        spoilt = np.einsum("ts,shd->thd", seen.astype(np.float64), missing.astype(np.float64)) > 0
        out[start:stop] = np.where(spoilt, np.nan, mean).astype(q.dtype)
    return out
