"""Attention of a step whose requests have any number of queries: blocks of the token row by blocks
of the cache.

The work is a list of (block of tokens, request that has tokens in it, block of its pages), taken in
order; while one item is computed, the next one's pages are on their way. Rows of a token block that
belong to another request see nothing of this one, so the state of all its requests lies side by
side.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .cache import (
    LANES,
    CacheShape,
    Pages,
    either,
    oldest_seen,
    quotient,
    since,
    token_order,
    typical_length,
    words_of,
)
from .softmax import (
    MASKED,
    START,
    capped,
    dot,
    of_rows,
    repeat,
    taking,
    update,
    weight_factor,
    with_sinks,
)


def mixed_attention(
    q: jax.Array,
    kv: jax.Array,
    table: jax.Array,
    query_start: jax.Array,
    kv_lens: jax.Array,
    counts: jax.Array,
    *,
    cache: CacheShape,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
    by_head: Mapping[str, jax.Array],
    block_tokens: int,
    step: int,
    vmem: int | None,
    interpret: Any,
) -> jax.Array:
    """q [tok head hdim] over kv [page row lane] -> [tok head hdim]; 0 but for requests counts[0] <=
    i < counts[1].

    table [req page]; query_start [req+1]; kv_lens [req]. `step`: tokens of a block whose K and V
    are held at a time. `by_head`, where given: sinks [head] and the scales of K and V, k_scale and
    v_scale [kvhead].
    """
    tokens, heads, hdim = q.shape
    group, kv_heads = heads // cache.kv_heads, cache.kv_heads
    blocks = -(-tokens // block_tokens)
    q = jnp.pad(q, ((0, blocks * block_tokens - tokens), (0, 0), (0, 0)))
    # Queries that share a KV head become rows of one matrix.
    q = q.reshape(-1, kv_heads, group, hdim).transpose(1, 0, 2, 3).reshape(kv_heads, -1, hdim)
    edges = jnp.arange(blocks, dtype=jnp.int32) * block_tokens
    # The first request with a token in each block; requests with one query, which stand first, are
    # not done here. All are compared: a binary search is a loop, in each layer, of steps that wait.
    first = jnp.searchsorted(query_start[1:], edges, side="right", method="compare_all")
    first = first.astype(jnp.int32)
    first = jnp.maximum(first, counts[0])
    rows = block_tokens * group
    kernel = partial(
        taking(_kernel, 5, list(by_head)), cache=cache, width=table.shape[1], scale=scale,
        window=window, chunk=chunk, soft_cap=soft_cap, block_tokens=block_tokens, held=step,
    )  # fmt: skip
    first = jnp.minimum(first, table.shape[0])
    scalars = [query_start, kv_lens, first, counts, table.reshape(-1), *by_head.values()]
    spec = pl.BlockSpec((kv_heads, rows, hdim), lambda i, *_: (0, i, 0))
    length = typical_length(table.shape[1], cache.page, window or chunk)
    read = blocks * length * 2 * kv_heads * hdim * jnp.dtype(cache.dtype).itemsize
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(blocks,),
            in_specs=[spec, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=spec,
            scratch_shapes=[
                *cache.scratch(),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, hdim), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * tokens * length * heads * hdim,
            bytes_accessed=read + 2 * q.size * q.dtype.itemsize + table.size * 4,
            transcendentals=tokens * length * heads,
        ),
        interpret=interpret,
        name="mixed_attention",
    )(*scalars, q, kv)
    return (
        out.reshape(kv_heads, -1, group, hdim)
        .transpose(1, 0, 2, 3)
        .reshape(-1, heads, hdim)[:tokens]
    )


def _kernel(
    query_start: Any, kv_lens: Any, first_request: Any, counts: Any, table: Any, q_ref: Any,
    kv_hbm: Any, o_ref: Any,
    buffer: Any, sems: Any, m_ref: Any, l_ref: Any, acc_ref: Any, state_ref: Any, *,
    cache: CacheShape, width: int, scale: float, window: int, chunk: int, soft_cap: float,
    block_tokens: int, held: int, sinks: Any = None, k_scale: Any = None, v_scale: Any = None,
) -> None:  # fmt: skip
    pages = Pages(cache, table, width, words_of(kv_hbm, cache), buffer, sems)
    kv_heads, rows, _ = q_ref.shape
    group = rows // block_tokens
    k = [of_rows(k_scale, (h, h + 1), rows) for h in range(kv_heads)]
    step, steps, stop_request = pl.program_id(0), pl.num_programs(0), counts[1]

    def valid(i: Any, block: Any) -> Any:
        """Whether request i has queries in a token block."""
        inside = query_start[jnp.minimum(i, stop_request)] < (block + 1) * block_tokens
        return (i < stop_request) & inside & (block < steps)

    def span(i: Any, block: Any) -> tuple[Any, Any]:
        """The slots that the queries of request i in a token block see: first, last + 1."""
        start, stop = query_start[i], query_start[i + 1]
        base = kv_lens[i] - stop
        low = jnp.maximum(start, block * block_tokens) + base
        high = jnp.minimum(stop, (block + 1) * block_tokens) + base
        return oldest_seen(low, window, chunk), high

    def begin(i: Any, block: Any, half: Any) -> None:
        """Start the first block of pages of an item."""
        first, length = span(i, block)
        pages.start(i, quotient(first, cache.block), pages.wanted(first, length), half, once=True)

    @pl.when(step == 0)
    def _() -> None:
        state_ref[0] = 0  # the half of the buffer that is read next
        state_ref[1] = 0  # whether its copies have been started

    m_ref[...] = jnp.full_like(m_ref, START)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    head_request = first_request[step]
    any_request = valid(head_request, step)

    @pl.when(any_request & (state_ref[1] == 0))
    def _() -> None:
        begin(head_request, step, state_ref[0])
        state_ref[1] = 1

    def request(carry: Any) -> Any:
        _, i, half = carry
        first, length = span(i, step)
        last = quotient(length + cache.block - 1, cache.block)
        wanted = pages.wanted(first, length)
        # What follows this request: the next one in this block of tokens, or the first one of the
        # next block.
        here = valid(i + 1, step)
        next_step = jnp.where(here, step, step + 1)
        next_i = jnp.where(here, i + 1, first_request[jnp.minimum(step + 1, steps - 1)])
        following = valid(next_i, next_step)
        next_i = jnp.where(following, next_i, i)
        next_first, next_length = span(next_i, next_step)
        # At the very end nothing follows, and a length of 0 starts nothing.
        next_wanted = pages.wanted(next_first, jnp.where(following, next_length, 0))

        def block(j: Any, half: Any) -> Any:
            end = j + 1 == last
            next_j = jnp.where(end, quotient(next_first, cache.block), j + 1)
            pages.start(
                jnp.where(end, next_i, i), next_j, either(end, next_wanted, wanted), 1 - half
            )
            pages.wait(j, wanted, half)
            low = since(first, j * cache.block)
            high = jnp.minimum(length - j * cache.block, cache.block)

            @pl.when((low > 0) | (high < cache.block))
            def _() -> None:
                pages.clear(half, low, high)

            # The position of a row's query, counted from the block's first slot; rows of other
            # requests see nothing.
            token = step * block_tokens + lax.div(
                lax.broadcasted_iota(jnp.int32, (rows, 1), 0), group
            )
            mine = (token >= query_start[i]) & (token < query_start[i + 1])
            position = jnp.where(
                mine, token + (kv_lens[i] - query_start[i + 1] - j * cache.block), -1
            )
            oldest = None
            if window > 0:
                oldest = position - (window - 1)
            elif chunk > 0:
                oldest = oldest_seen(position + j * cache.block, 0, chunk) - j * cache.block
            for h in range(kv_heads):
                state = (m_ref.at[h], l_ref.at[h], acc_ref.at[h])
                for t in range(0, cache.block, held):
                    tokens = t, min(t + held, cache.block)
                    _attend(
                        pages, half, h, q_ref[h], tokens, position, oldest, scale, soft_cap, k[h],
                        *state,
                    )  # fmt: skip
            return 1 - half

        return here, i + 1, lax.fori_loop(quotient(first, cache.block), last, block, half)

    start = any_request, head_request, state_ref[0]
    state_ref[0] = lax.while_loop(lambda carry: carry[0], request, start)[2]
    for h in range(kv_heads):
        heads = h * group, (h + 1) * group
        total = with_sinks(l_ref[h], m_ref[h], weight_factor(scale, soft_cap, k[h]), sinks, heads)
        factor = of_rows(v_scale, (h, h + 1), rows) / jnp.where(total == 0.0, 1.0, total)
        o_ref[h] = (acc_ref[h] * repeat(factor, cache.hdim)).astype(o_ref.dtype)


def _attend(
    pages: Pages, half: Any, h: int, q: jax.Array, tokens: tuple[int, int], position: jax.Array,
    oldest: jax.Array | None, scale: float, soft_cap: float, k_scale: Any, m_ref: Any, l_ref: Any,
    acc_ref: Any,
) -> None:  # fmt: skip
    """Take tokens of a block into the state of KV head h, whose queries are q [row hdim] at
    position [row 1] and see what is not before `oldest` [row 1] (None: all). Its K have the scale
    `k_scale`.
    """
    cache = pages.cache
    keys, values = pages.head(half, h, tokens, q.dtype)
    places = zip(cache.chunks, keys, strict=True)
    parts = [dot(q[:, lane : lane + cache.lanes], k, (1, 1)) for lane, k in places]
    s, factor = capped(sum(parts[1:], parts[0]), scale, soft_cap, k_scale)
    slot = token_order(cache, s.shape, tokens)
    seen = slot <= position
    if oldest is not None:
        seen = seen & (slot >= oldest)
    weights, decay = update(jnp.where(seen, s, MASKED), factor, m_ref, l_ref)
    weights = weights.astype(q.dtype)
    for c, lane in enumerate(cache.chunks):
        new = dot(weights, values[c], (1, 0))
        # A slot may hold NaN, which a weight of 0 does not keep from the rows of another request.
        new = jnp.where(position >= 0, new, 0.0)
        place = slice(lane, lane + cache.lanes)
        acc_ref[:, place] = acc_ref[:, place] * repeat(decay, cache.lanes) + new
