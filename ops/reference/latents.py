"""Ops of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), in its absorbed form.

All heads of a token share one latent and one rotated key. The cache of a layer is
`cache [page slot copy rank+turn]`: a latent of `rank` entries, behind it a key of `turn` entries,
as often as shards hold it. A head's part of q that is not rotated is projected to latents, so that
it is multiplied with them as they lie. What it reads is a mean of latents, which is projected to
values. The last slot of the last page is scratch, as in other caches (`paged.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..declare import DOT, Array, Contract, define

BY_HEAD = Contract(dot=DOT)


@define(
    shapes="q [tok head n], weight [head n rank] -> [tok head rank] q",
    shards=("head",),
    contract=BY_HEAD,
)
def to_latents(xp: Any, q: Array, weight: Array) -> Array:
    """Queries of latents: each head of q [tok head n] times its weight [head n rank] -> [tok head
    rank].
    """
    return xp.head_linear(q, xp.permute_dims(weight, (0, 2, 1)))


@define(
    shapes="y [tok head rank], weight [head v rank] -> [tok head v] y",
    shards=("head",),
    contract=BY_HEAD,
)
def from_latents(xp: Any, y: Array, weight: Array) -> Array:
    """Values of latents: each head of y [tok head rank] times its weight [head v rank] transposed
    -> [tok head v].
    """
    return xp.head_linear(y, weight)


@define(
    shapes="cache [page slot copy rank+turn], latents [tok rank], rotated [tok turn], slots [tok] "
    "-> cache",
    shards=("copy",),
    native="per framework",
    activations=("cache",),
    state=("cache",),
    contract=Contract(
        rounds="nowhere",
        accumulate="none",
        masked="rows with slot -1 may write the scratch slot only",
        nan="copied",
    ),
)
def write_latents(xp: Any, cache: Array, latents: Array, rotated: Array, slots: Array) -> Array:
    """The cache with latents [tok rank] and rotated keys [tok turn] written at slots [tok] = page *
    page_size + offset, -1 for none.
    """
    pages, page_size, copies, size = cache.shape
    out = cache.reshape(pages * page_size, copies, size).copy()
    real = slots >= 0
    out[slots[real]] = np.concatenate([latents, rotated], axis=1)[real][:, None]
    return out.reshape(cache.shape)


@define(
    shapes="latents [tok entry], cache [page slot copy entry], weight [rank], cos [tok r], "
    "sin [tok r], slots [tok] -> cache",
    shards=("copy",),
    level="coarse",
    activations=("cache",),
    state=("cache",),
    composition=("rms_norm", "rotary_embedding", "write_latents"),
    contract=Contract(
        rounds="where its finer ops do; an implementation may skip the roundings between them",
        masked="rows with slot -1 may write the scratch slot only",
    ),
)
def norm_rope_write_latents(
    ops: Any,
    latents: Array,
    cache: Array,
    weight: Array,
    cos: Array,
    sin: Array,
    slots: Array,
    eps: float,
) -> Array:
    """The cache with what latents [tok entry] give written at slots [tok]: the entries that weight
    [rank] has normed, those behind them rotated (cos, sin [tok r] float32).
    """
    rank = weight.shape[0]
    normed = ops.rms_norm(latents[:, :rank], weight, eps)
    key = latents[:, None, rank:]
    rotated = ops.rotary_embedding(key, key, cos, sin)[1]
    return ops.write_latents(cache, normed, rotated[:, 0], slots)


@define(
    shapes="q [tok head rank], rotated [tok head turn], cache [page slot copy rank+turn], "
    "page_table [req pages], query_start [req+1], kv_lens [req], counts [2] -> [tok head rank] q",
    shards=("head", "copy"),
    host=("query_start", "kv_lens", "counts"),
    native="per framework",
    contract=Contract(
        rounds="softmax weights, not normalised yet, to q's dtype before the product with the "
        "latents, but not in their own sum; the output once",
        dot=DOT,
        masked="rows of no request are 0; slots that no row of a request sees are not read into "
        "any result, and entries of the page table for pages of such slots may name any page",
        nan="NaN in a slot reaches each row that sees it, and may reach the other rows of that "
        "request in this step",
    ),
)
def latent_attention(
    xp: Any,
    q: Array,
    rotated: Array,
    cache: Array,
    page_table: Array,
    query_start: Array,
    kv_lens: Array,
    counts: Array,
    scale: float,
    max_query_len: int,
) -> Array:
    """Causal attention of ragged queries over latents -> means of latents [tok head rank].

    A score is (q . latent + rotated . key) * scale: q [tok head rank] and rotated [tok head turn]
    are a query's two parts. page_table [req page] int32, query_start [req+1], kv_lens [req], counts
    [2] and `max_query_len` are as in `paged_attention`.
    """
    _, page_size, _, size = cache.shape
    rank = q.shape[2]
    out = np.zeros_like(q)
    both = np.concatenate([q, rotated], axis=-1)
    for i in range(int(counts[1])):
        start, stop, length = int(query_start[i]), int(query_start[i + 1]), int(kv_lens[i])
        pages = page_table[i, : -(-length // page_size)]
        keys = xp.accumulate(cache[pages][:, :, 0].reshape(-1, size)[:length])
        scores = np.einsum("thd,sd->hts", xp.accumulate(both[start:stop]), keys) * scale
        position = np.arange(length - (stop - start), length)[:, None]
        seen = np.arange(length)[None, :] <= position
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        # 0 * NaN is NaN in a product. A row that sees NaN has a score that is NaN.
        values = np.where(np.isnan(keys), 0.0, keys)[:, :rank]
        out[start:stop] = np.einsum("hts,sd->thd", weights, values).astype(q.dtype)
    return out
