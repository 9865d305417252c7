"""KV write and paged attention in plain XLA: no kernel, static shapes, work proportional to the
tokens in use.

Attention runs over blocks of the cache with an online softmax, in loops whose trip counts are read
on the device: the requests with one query token all at once, the others one after the other in
blocks of queries.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from ..namespaces.jax_ import with_float32_sums
from ..reference.paged import check_reach
from ..reference.quantization import stored

KV_BLOCK = 128
QUERY_BLOCK = 128
LOWEST = -1e30
EVERYTHING = 1 << 30
"""A window that no context fills."""


@implement("write_kv", provider="native", framework="jax", row_invariant=True)
def write_kv(
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    """Scatter the rows of K and V into their slots; rows with slot -1 are dropped."""
    heads, size = kv.shape[2:]
    xp = namespace("jax")
    rows = jnp.stack([stored(xp, k, kv, k_scale), stored(xp, v, kv, v_scale)], axis=2).reshape(
        k.shape[0], heads, size
    )
    return _with_rows(kv, rows, slots)


@implement("write_latents", provider="native", framework="jax", row_invariant=True)
def write_latents(cache: Array, latents: Array, rotated: Array, slots: Array) -> Array:
    """Scatter the rows into their slots; rows with slot -1 are dropped."""
    rows = jnp.concatenate([latents, rotated], axis=1)[:, None]
    rows = jnp.broadcast_to(rows, (rows.shape[0], *cache.shape[2:]))
    return _with_rows(cache, rows, slots)


def _with_rows(kv: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """The cache [page slot ...] with rows [tok ...] at `slots` [tok]."""
    slots_in_all = kv.shape[0] * kv.shape[1]
    target = jnp.where(slots < 0, slots_in_all, slots)

    def scatter(kv: jax.Array, rows: jax.Array) -> jax.Array:
        flat = kv.reshape(slots_in_all, *kv.shape[2:])
        return flat.at[target].set(rows, mode="drop").reshape(kv.shape)

    def scatter_bits(kv: jax.Array, rows: jax.Array) -> jax.Array:
        return _from_bits(scatter(_bits(kv), _bits(rows)), kv.dtype)

    return jax.lax.platform_dependent(kv, rows, cpu=scatter_bits, default=scatter)


def _bits(x: jax.Array) -> jax.Array:
    """The bits of a float of one or two bytes as an unsigned integer, anything else as it is.

    XLA's CPU compiler computes such floats in float32: to move some entries of a cache it would
    convert all of it.
    """
    if x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return x


def _from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _read_pages(kv: jax.Array, pages: jax.Array) -> jax.Array:
    """kv [page slot 2*kvhead hdim] at `pages` of any shape."""

    def gather(kv: jax.Array, pages: jax.Array) -> jax.Array:
        return kv[pages]

    def gather_bits(kv: jax.Array, pages: jax.Array) -> jax.Array:
        return _from_bits(_bits(kv)[pages], kv.dtype)

    return jax.lax.platform_dependent(kv, pages, cpu=gather_bits, default=gather)


class _Softmax(NamedTuple):
    """Running maximum, sum and weighted values of an online softmax: [..., 1], [..., 1], [...,
    hdim].
    """

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


@implement("paged_attention", provider="native", framework="jax")
def paged_attention(
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
    """See the op. Scores and softmax in float32, weights rounded to the storage dtype, one
    rounding at the end.
    """
    check_reach(window, chunk)
    tokens = q.shape[0]
    requests = page_table.shape[0]
    block_pages = max(1, KV_BLOCK // kv.shape[1])
    width = -(-page_table.shape[1] // block_pages) * block_pages
    page_table = jnp.pad(page_table, ((0, 0), (0, width - page_table.shape[1])))
    settings = kv, block_pages, scale, k_scale, v_scale, window, chunk, soft_cap, sinks
    attended = partial(attend, *settings)
    single = min(requests, tokens)
    lengths = jnp.where(jnp.arange(single, dtype=jnp.int32) < counts[0], kv_lens[:single], 0)
    out = attended(q[:single, None], page_table[:single], lengths[:, None] - 1, lengths)[:, 0]
    out = jnp.where((lengths > 0)[:, None, None], out, 0)
    out = jnp.pad(out, ((0, tokens - single), (0, 0), (0, 0)))
    if max_query_len == 1:
        return out
    block = min(QUERY_BLOCK, tokens)
    padded = jnp.pad(q, ((0, block), (0, 0), (0, 0)))

    def request(i: jax.Array, out: jax.Array) -> jax.Array:
        start, stop, length = query_start[i], query_start[i + 1], kv_lens[i]

        def queries(j: jax.Array, out: jax.Array) -> jax.Array:
            first = start + j * block
            index = first + jnp.arange(block, dtype=jnp.int32)
            real = index < stop
            position = jnp.where(real, length - stop + index, -1)
            part = jax.lax.dynamic_slice_in_dim(padded, first, block)
            last = jnp.minimum(length, length - stop + first + block)
            new = attended(part[None], page_table[i][None], position[None], last[None])[0]
            old = jax.lax.dynamic_slice_in_dim(out, first, block)
            return jax.lax.dynamic_update_slice_in_dim(
                out, jnp.where(real[:, None, None], new, old), first, 0
            )

        return jax.lax.fori_loop(0, (stop - start + block - 1) // block, queries, out)

    out = jnp.pad(out, ((0, block), (0, 0), (0, 0)))
    return jax.lax.fori_loop(counts[0], counts[1], request, out)[:tokens]


@implement("latent_attention", provider="native", framework="jax")
def latent_attention(
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
    """See the op: as `paged_attention` of one head, which is K and V."""
    batch = page_table, query_start, kv_lens, counts
    both = jnp.concatenate([q, rotated], -1)
    found: Array = paged_attention(both, by_slot(cache), *batch, scale, 0, 0.0, max_query_len)
    return found[..., : q.shape[-1]]


def by_slot(cache: jax.Array) -> jax.Array:
    """The cache of latents [page slot 1 entry] as [page slot entry], in that order. For loops XLA
    would choose another one on a TPU, and copy all of it.
    """
    whole = cache.reshape(*cache.shape[:2], cache.shape[-1])
    return with_layout_constraint(whole, Layout((0, 1, 2)))


def attend(
    kv: jax.Array,
    block_pages: int,
    scale: float,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    window: int,
    chunk: int,
    soft_cap: float,
    sinks: jax.Array | None,
    q: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """q [req n head hdim] at positions [req n] (-1: no query) over the first `lengths` [req]
    slots of their pages.
    """
    requests, n, heads, size = q.shape
    page_size, held = kv.shape[1], kv.size // (kv.shape[0] * kv.shape[1] * size)
    # The one row of a latent is K and V.
    kv_heads, sides = max(1, held // 2), min(2, held)
    if held == 1:
        kv = by_slot(kv)
    block = block_pages * page_size
    q = q.reshape(requests, n, kv_heads, heads // kv_heads, size)
    # The barrier hides the window's value, so layers that differ in it are one code to XLA, which
    # is compiled once.
    reach = jax.lax.optimization_barrier(jnp.asarray(chunk or window or EVERYTHING, jnp.int32))
    far = jnp.iinfo(jnp.int32).max
    begin = positions - positions % reach if chunk > 0 else positions - reach + 1
    # By KV head: scores are [req kvhead group n slot].
    factor = scale if k_scale is None else scale * k_scale[None, :, None, None, None]
    oldest = jnp.maximum(0, jnp.where(positions < 0, far, begin).min(1))
    products = partial(jnp.einsum, "rnkgd,rskd->rkgns"), partial(jnp.einsum, "rkgns,rskd->rkgnd")
    scored, weighted = (partial(with_float32_sums, product) for product in products)

    def step(j: jax.Array, state: _Softmax) -> _Softmax:
        pages = jax.lax.dynamic_slice_in_dim(page_table, j * block_pages, block_pages, axis=1)
        # XLA would choose another layout for what a loop reads, and copy the whole cache.
        cache = _read_pages(kv, pages)
        if held == 1:
            # Or what a product would rather read is made of all pages, before they are gathered.
            cache = with_layout_constraint(cache, Layout((0, 1, 2, 3)))
        cache = cache.reshape(requests, block, kv_heads, sides, size)
        cache = cache.astype(q.dtype)
        slot = j * block + jnp.arange(block, dtype=jnp.int32)
        scores = scored(q, cache[..., 0, :]) * factor
        if soft_cap > 0:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = slot[None, None, :] <= positions[:, :, None]
        seen &= slot[None, None, :] >= begin[:, :, None]
        seen = seen[:, None, None]
        scores = jnp.where(seen, scores, LOWEST)
        maximum = jnp.maximum(state.maximum, scores.max(-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - maximum), 0.0)
        # A slot that nobody may see can hold anything, NaN included, and 0 * NaN is NaN.
        used = ((slot[None, :] < lengths[:, None]) & (slot[None, :] >= oldest[:, None]))[
            :, :, None, None
        ]
        values = jnp.where(used, cache[..., sides - 1, :], jnp.zeros((), q.dtype))
        product = weighted(weights.astype(q.dtype), values)
        decay = jnp.exp(state.maximum - maximum)
        total = state.total * decay + weights.sum(-1, keepdims=True)
        return _Softmax(maximum, total, state.values * decay + product)

    shape = (requests, kv_heads, heads // kv_heads, n)
    zero = _Softmax(
        jnp.full((*shape, 1), LOWEST), jnp.zeros((*shape, 1)), jnp.zeros((*shape, size))
    )
    zero = jax.tree.map(lambda x: x.astype(jnp.float32), zero)
    state = jax.lax.fori_loop(
        oldest.min() // block, (lengths.max() + block - 1) // block, step, zero
    )
    total = state.total
    if sinks is not None:
        total = total + jnp.exp(sinks.reshape(1, kv_heads, -1, 1, 1) - state.maximum)
    out = state.values / jnp.where(total == 0, 1.0, total)
    if v_scale is not None:
        out = out * v_scale[None, :, None, None, None]
    return out.transpose(0, 3, 1, 2, 4).reshape(requests, n, heads, size).astype(q.dtype)
