"""Attention of a decode step: one query for each request.

The work is a list of (request, block of its pages), taken in order; while one block is computed,
the next one, of this request or the following, is on its way from HBM. Heads whose queries do not
fill a register's 8 rows are computed together: each K is multiplied with the rows of all of them,
and each row keeps what is its own.
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

SUBLANES = 8


def head_groups(kv_heads: int, group: int) -> list[tuple[int, int]]:
    """(first, last + 1) KV heads that are computed together: as many as fill 8 rows with `group`
    queries each.
    """
    size = max(1, SUBLANES // group)
    return [(h, min(h + size, kv_heads)) for h in range(0, kv_heads, size)]


def decode_attention(
    q: jax.Array,
    kv: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *,
    cache: CacheShape,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
    by_head: Mapping[str, jax.Array],
    block_requests: int,
    step: int,
    vmem: int | None,
    interpret: Any,
) -> jax.Array:
    """q [req head hdim] over kv [page row lane] -> [req head hdim]; lengths [req] is 0 where there
    is no request.

    Requests with a length stand first. table [req page]. `step`: tokens of a block whose K and V
    are held at a time. `by_head`, where given: sinks [head] and the scales of K and V, k_scale and
    v_scale [kvhead].
    """
    requests, heads, hdim = q.shape
    padded = -(-requests // block_requests) * block_requests
    q = jnp.pad(q, ((0, padded - requests), (0, 0), (0, 0)))
    lengths = jnp.pad(lengths, (0, padded + 1 - requests))
    group = heads // cache.kv_heads
    groups = len(head_groups(cache.kv_heads, group))
    rows = -(-group // SUBLANES) * SUBLANES
    kernel = partial(
        taking(_kernel, 2, list(by_head)), cache=cache, width=table.shape[1], scale=scale,
        window=window, chunk=chunk, soft_cap=soft_cap, step=step,
    )  # fmt: skip
    scalars = [lengths, table.reshape(-1), *by_head.values()]
    spec = pl.BlockSpec((block_requests, heads, hdim), lambda i, *_: (i, 0, 0))
    seen = requests * typical_length(table.shape[1], cache.page, window or chunk)
    read = seen * cache.rows * cache.lanes * jnp.dtype(cache.dtype).itemsize
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(padded // block_requests,),
            in_specs=[spec, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=spec,
            scratch_shapes=[
                *cache.scratch(),
                pltpu.VMEM((groups, rows, LANES), jnp.float32),
                pltpu.VMEM((groups, rows, LANES), jnp.float32),
                pltpu.VMEM((groups, len(cache.chunks), rows, cache.lanes), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * seen * heads * hdim,
            bytes_accessed=read + 2 * q.size * q.dtype.itemsize + table.size * 4,
            transcendentals=seen * heads,
        ),
        interpret=interpret,
        name="decode_attention",
    )(*scalars, q, kv)
    return out[:requests]


def _kernel(
    lengths: Any,
    table: Any,
    q_ref: Any,
    kv_hbm: Any,
    o_ref: Any,
    buffer: Any,
    sems: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
    half_ref: Any,
    *,
    cache: CacheShape,
    width: int,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
    step: int,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    pages = Pages(cache, table, width, words_of(kv_hbm, cache), buffer, sems)
    block_requests, heads, _ = q_ref.shape
    group = heads // cache.kv_heads
    begin = pl.program_id(0) * block_requests
    # Heads that are computed together, and what each of their rows multiplies its scores with.
    together = [
        (n, h, stop, of_rows(k_scale, (h, stop), (stop - h) * group))
        for n, (h, stop) in enumerate(head_groups(cache.kv_heads, group))
    ]

    def oldest(length: Any) -> Any:
        return oldest_seen(length - 1, window, chunk)

    @pl.when(begin == 0)
    def _() -> None:
        half_ref[0] = 0
        first = oldest(lengths[0])
        pages.start(0, quotient(first, cache.block), pages.wanted(first, lengths[0]), 0, once=True)

    def request(r: Any, half: Any) -> Any:
        length = lengths[begin + r]
        first, last = oldest(length), quotient(length + cache.block - 1, cache.block)
        wanted = pages.wanted(first, length)
        following = lengths[begin + r + 1]
        next_first = oldest(following)
        next_wanted = pages.wanted(next_first, following)
        m_ref[...] = jnp.full_like(m_ref, START)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

        def block(j: Any, half: Any) -> Any:
            end = j + 1 == last
            next_j = jnp.where(end, quotient(next_first, cache.block), j + 1)
            pages.start(
                begin + r + end.astype(jnp.int32),
                next_j,
                either(end, next_wanted, wanted),
                1 - half,
            )
            pages.wait(j, wanted, half)
            low = since(first, j * cache.block)
            high = jnp.minimum(length - j * cache.block, cache.block)

            @pl.when((low > 0) | (high < cache.block))
            def _() -> None:
                pages.clear(half, low, high)

            for n, h, stop, k in together:
                rows = (stop - h) * group
                state = (
                    m_ref.at[n, pl.ds(0, rows)],
                    l_ref.at[n, pl.ds(0, rows)],
                    acc_ref.at[n, :, pl.ds(0, rows)],
                )
                q = q_ref[r, pl.ds(h * group, rows), :]
                for t in range(0, cache.block, step):
                    tokens = t, min(t + step, cache.block)
                    _attend(
                        pages, half, q, range(h, stop), tokens, low, high, scale, soft_cap, k,
                        *state,
                    )  # fmt: skip
            return 1 - half

        half = lax.fori_loop(quotient(first, cache.block), last, block, half)
        for n, h, stop, k in together:
            rows = (stop - h) * group
            total = with_sinks(
                l_ref[n, :rows, :], m_ref[n, :rows, :], weight_factor(scale, soft_cap, k),
                sinks, (h * group, stop * group),
            )  # fmt: skip
            factor = of_rows(v_scale, (h, stop), rows) / jnp.where(total == 0.0, 1.0, total)
            parts = [
                acc_ref[n, c, :rows, :] * repeat(factor, cache.lanes)
                for c in range(len(cache.chunks))
            ]
            out = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
            o_ref[r, pl.ds(h * group, rows), :] = out.astype(o_ref.dtype)
        return half

    half_ref[0] = lax.fori_loop(0, block_requests, request, half_ref[0])


def _attend(
    pages: Pages, half: Any, q: jax.Array, heads: range, tokens: tuple[int, int], low: Any,
    high: Any, scale: float,
    soft_cap: float, k_scale: Any, m_ref: Any, l_ref: Any, acc_ref: Any,
) -> None:  # fmt: skip
    """Take those of some tokens of a block that are in low..high into the state of heads with
    queries q [row hdim], whose scales of K are `k_scale` (see `of_rows`).
    """
    cache, rows = pages.cache, q.shape[0]
    pairs = [pages.head(half, h, tokens, q.dtype) for h in heads]

    def own(parts: list[jax.Array]) -> jax.Array:
        """Of each head's result for all rows, the rows of that head."""
        out = parts[0]
        head = lax.broadcasted_iota(jnp.int32, out.shape, 0) // (rows // len(heads))
        for n, part in enumerate(parts[1:], 1):
            out = jnp.where(head == n, part, out)
        return out

    def scores(keys: list[jax.Array]) -> jax.Array:
        places = zip(cache.chunks, keys, strict=True)
        parts = [dot(q[:, lane : lane + cache.lanes], k, (1, 1)) for lane, k in places]
        return sum(parts[1:], parts[0])

    s, factor = capped(own([scores(k) for k, _ in pairs]), scale, soft_cap, k_scale)
    token = token_order(cache, s.shape, tokens)
    s = jnp.where((token >= low) & (token < high), s, MASKED)
    weights, decay = update(s, factor, m_ref, l_ref)
    weights = weights.astype(q.dtype)
    for c in range(len(cache.chunks)):
        new = own([dot(weights, v[c], (1, 0)) for _, v in pairs])
        acc_ref[c] = acc_ref[c] * repeat(decay, cache.lanes) + new
