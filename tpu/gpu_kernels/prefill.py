"""Paged attention of ragged queries: blocks of one request's query tokens against its slots, block
by block.

All lengths are read on the device and the grid depends on shapes alone: with blocks of B tokens,
request i begins at block query_start[i] // B + i, which never overlaps and needs at most tokens / B
+ requests blocks. A block holds the query heads of one KV head side by side, so its K and V are
read once for them all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .decode import squash
from .launch import LOG2_E, LOWEST, call, cdiv, config, power_of_2, product, zero_of


def prefill_attention(
    q: jax.Array, rows: jax.Array, page_table: jax.Array, query_start: jax.Array,
    kv_lens: jax.Array, counts: jax.Array,
    decoded: jax.Array, *, page: int, kv_heads: int, scale: float, window: int, soft_cap: float,
    scales: tuple[jax.Array, ...],
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """[tok head hdim]: `decoded` with all tokens but the first counts[0] written; rows of no
    request become 0. `scales`: those of K and V [kv_heads], or none.
    """
    tokens, heads, size = q.shape
    requests, group = page_table.shape[0], heads // kv_heads
    setting = config("prefill", q.dtype.name)
    # Small blocks where large ones would not fill the GPU.
    many = tokens * heads // setting["block_m"] >= setting["blocks"]
    block_m, block_n = (
        max(setting["block_m" if many else "few_m"], power_of_2(group, 16)),
        setting["block_n"],
    )
    block_q, block_d = block_m // group, power_of_2(size, 16)
    blocks = cdiv(tokens, block_q) + requests
    searches = requests.bit_length()

    def prefill_attention(q, rows, page_table, query_start, kv_lens, counts, decoded, *more):
        *by_head, out = more
        h = pl.program_id(0)
        factor = scale * LOG2_E * by_head[0][h] if by_head else scale * LOG2_E
        block = blocks - 1 - pl.program_id(1)  # late positions, which see most, first
        live = counts[1]

        def halve(_: Any, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = ends
            middle = jax.lax.div(low + high + 1, jnp.int32(2))
            ahead = jax.lax.div(query_start[middle], jnp.int32(block_q)) + middle <= block
            right = (low < high) & ahead
            return jnp.where(right, middle, low), jnp.where((low < high) & ~ahead, middle - 1, high)

        # The last request that begins at or before this block; `live` stands for the padding.
        request, _ = jax.lax.fori_loop(0, searches, halve, (jnp.int32(0), live))
        begin = query_start[request]
        stop = jnp.where(request < live, query_start[jnp.minimum(request + 1, live)], tokens)
        token = begin + (block - jax.lax.div(begin, jnp.int32(block_q)) - request) * block_q
        skipped = (request < counts[0]) | (token >= stop)
        padding = request >= live
        here = jnp.minimum(request, requests - 1)
        r, d = jnp.arange(block_m), jnp.arange(block_d)
        mine, head = (
            token + jax.lax.div(r, jnp.int32(group)),
            h * group + jax.lax.rem(r, jnp.int32(group)),
        )
        real = ((r < block_q * group) & (mine < stop) & ~skipped)[:, None] & (d < size)[None, :]
        place = (mine[:, None], head[:, None], d[None, :])
        past = kv_lens[here] - stop  # position - token
        position = past + mine
        end = past + jnp.minimum(token + block_q, stop)
        query = plgpu.load(q.at[place], mask=real, other=0.0)
        first = jnp.maximum(past + token - window + 1, 0) if window > 0 else jnp.int32(0)
        nothing = skipped | padding
        last = jnp.where(nothing, 0, cdiv(jnp.maximum(end, 0), block_n))
        # Blocks before `edge` are seen whole by every row.
        edge = jax.lax.div(
            first if window > 0 else jnp.maximum(past + token + 1, 0), jnp.int32(block_n)
        )
        edge = jnp.minimum(edge, last)

        def attend(
            i: jax.Array, state: tuple[jax.Array, ...], masked: bool
        ) -> tuple[jax.Array, ...]:
            acc, top, total = state
            slot = i * block_n + jnp.arange(block_n)
            lanes = {"mask": (d < size)[None, :], "other": zero_of(rows)} if size != block_d else {}
            if masked:
                used = (slot >= first) & (slot < end)
                number = plgpu.load(
                    page_table.at[here, jax.lax.div(slot, jnp.int32(page))], mask=used, other=0
                )
                lanes = {"mask": used[:, None] & (d < size)[None, :], "other": zero_of(rows)}
            else:
                number = plgpu.load(page_table.at[here, jax.lax.div(slot, jnp.int32(page))])
            row = (((number * page + jax.lax.rem(slot, jnp.int32(page))) * kv_heads + h) * 2)[
                :, None
            ]
            k = plgpu.load(rows.at[row, d[None, :]], **lanes).astype(query.dtype)
            v = plgpu.load(rows.at[row + 1, d[None, :]], **lanes).astype(query.dtype)
            scores = squash(product(query, k, 1), factor, soft_cap)
            base = best = jnp.maximum(top, scores.max(1))
            if masked:
                seen = slot[None, :] <= position[:, None]
                if window > 0:
                    seen &= slot[None, :] > position[:, None] - window
                scores = jnp.where(seen, scores, LOWEST)
                best = jnp.maximum(top, scores.max(1))
                # A row that has seen no slot yet (before its window) has no maximum.
                base = jnp.where(best == LOWEST, 0.0, best)
            weight = jnp.exp2(scores - base[:, None])
            shrink = jnp.exp2(top - base)
            acc = acc * shrink[:, None] + product(weight.astype(query.dtype), v, 0)
            return acc, best, total * shrink + weight.sum(1)

        state = (
            jnp.zeros((block_m, block_d), jnp.float32),
            jnp.full(block_m, LOWEST, jnp.float32),
            jnp.zeros(block_m, jnp.float32),
        )
        if window <= 0:
            state = jax.lax.fori_loop(0, edge, lambda i, state: attend(i, state, False), state)
        acc, _, total = jax.lax.fori_loop(
            edge, last, lambda i, state: attend(i, state, True), state
        )
        value = acc / jnp.where(total == 0, 1.0, total)[:, None]
        if by_head:
            value = value * by_head[1][h]
        plgpu.store(out.at[place], value.astype(out.dtype), mask=real)

    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    run = call(
        prefill_attention, (kv_heads, blocks), out, setting, interpret, input_output_aliases={6: 0}
    )
    return run(q, rows, page_table, query_start, kv_lens, counts, decoded, *scales)
