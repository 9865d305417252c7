"""Paged attention of one query token a request: the slots of a request are split among programs.

All lengths are read on the device and the grid depends on shapes alone. A program takes one
request, one KV head (all query heads of its group) and one part of the slots; where there are
several, a second kernel adds them up in order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .launch import LOG2_E, LOWEST, PROCESSORS, call, cdiv, config, power_of_2, product, zero_of


def splits(requests: int, heads: int, slots: int, window: int, setting: dict[str, int]) -> int:
    """Into how many parts the slots of a request may be split, from shapes alone."""
    longest = min(slots, window + setting["block_n"]) if window > 0 else slots
    wanted = min(
        setting["programs"] * PROCESSORS // (requests * heads), cdiv(longest, setting["chunk"])
    )
    return max(1, min(wanted, setting["parts"]))


def decode_attention(
    q: jax.Array, rows: jax.Array, page_table: jax.Array, kv_lens: jax.Array, counts: jax.Array, *,
    page: int, kv_heads: int, scale: float, window: int, soft_cap: float,
    scales: tuple[jax.Array, ...], mixed: bool, interpret: bool,
) -> jax.Array:  # fmt: skip
    """[tok head hdim]. `rows` [slot * 2 * kv_heads, hdim] is the cache. In a mixed step the first
    counts[0] tokens are computed and the others left undefined, else counts[1] are and the others
    are 0. `scales`: those of K and V [kv_heads], or none.
    """
    tokens, heads, size = q.shape
    requests = page_table.shape[0]
    setting = config("decode", q.dtype.name)
    grid_tokens = min(tokens, requests) if mixed else tokens
    parts = splits(grid_tokens, kv_heads, page_table.shape[1] * page, window, setting)
    group = heads // kv_heads
    block_g, block_d = power_of_2(group, 16), power_of_2(size, 16)
    shape = _Shape(
        page,
        kv_heads,
        group,
        size,
        block_g,
        block_d,
        window,
        parts,
        setting["block_n"],
        setting["chunk"],
    )
    kernel = partial(_attend_part, shape, 0 if mixed else 1, scale * LOG2_E, soft_cap, len(scales))
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    arguments = q, rows, page_table, kv_lens, counts, *scales
    if parts == 1:
        return call(
            _named("decode_attention", kernel), (grid_tokens, kv_heads), out, setting, interpret
        )(*arguments)
    sums = jax.ShapeDtypeStruct((grid_tokens, kv_heads, parts, block_g, block_d), jnp.float32)
    marks = jax.ShapeDtypeStruct((grid_tokens, kv_heads, parts, 2, block_g), jnp.float32)
    grid = (grid_tokens, kv_heads, parts)
    found = call(_named("decode_attention_part", kernel), grid, (sums, marks), setting, interpret)(
        *arguments
    )
    merge = partial(_merge_parts, shape, 0 if mixed else 1)
    merged = call(
        _named("decode_attention_merge", merge), grid[:2], out, setting | {"stages": 1}, interpret
    )
    return merged(*found, kv_lens, counts, *scales[1:])


class _Shape:
    """What the kernels know when they are compiled."""

    def __init__(self, *values: int) -> None:
        (self.page, self.kv_heads, self.group, self.size, self.block_g, self.block_d) = values[:6]
        (self.window, self.parts, self.block_n, self.chunk) = values[6:]


def _named(name: str, kernel: Any) -> Any:
    def run(*refs: Any) -> None:
        kernel(*refs)

    run.__name__ = name
    return run


def _range(s: _Shape, length: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first slot that is seen, start of the first part, slots of a part) of a request."""
    first = jnp.maximum(length - s.window, 0) if s.window > 0 else jnp.int32(0)
    begin = jax.lax.div(first, jnp.int32(s.block_n)) * s.block_n
    part = cdiv(cdiv(length - begin, s.parts), s.block_n) * s.block_n
    return first, begin, jnp.maximum(part, s.chunk)


def _length(kv_lens: Any, counts: Any, which: int, token: jax.Array) -> jax.Array:
    return jnp.where(token < counts[which], kv_lens[jnp.minimum(token, kv_lens.shape[0] - 1)], 0)


def _attend_part(
    s: _Shape, which: int, scale: Any, soft_cap: float, num_scales: int,
    q: Any, rows: Any, page_table: Any, kv_lens: Any, counts: Any, *more: Any,
) -> None:  # fmt: skip
    scales, results = more[:num_scales], more[num_scales:]
    t, h = pl.program_id(0), pl.program_id(1)
    split = pl.program_id(2) if s.parts > 1 else jnp.int32(0)
    g, d = jnp.arange(s.block_g), jnp.arange(s.block_d)
    real = (g < s.group)[:, None] & (d < s.size)[None, :]
    place = (t, (h * s.group + g)[:, None], d[None, :])
    length = _length(kv_lens, counts, which, t)
    if scales:
        scale = scale * scales[0][h]
    query = plgpu.load(q.at[place], mask=real, other=0.0)
    first, begin, part = _range(s, length)
    low = begin + split * part
    high = jnp.minimum(low + part, length)

    def block(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, top, total = state
        slot = low + i * s.block_n + jnp.arange(s.block_n)
        seen = (slot >= first) & (slot < high)
        number = plgpu.load(
            page_table.at[t, jax.lax.div(slot, jnp.int32(s.page))], mask=seen, other=0
        )
        row = (((number * s.page + jax.lax.rem(slot, jnp.int32(s.page))) * s.kv_heads + h) * 2)[
            :, None
        ]
        mask = seen[:, None] & (d < s.size)[None, :]
        k = plgpu.load(rows.at[row, d[None, :]], mask=mask, other=zero_of(rows)).astype(query.dtype)
        v = plgpu.load(rows.at[row + 1, d[None, :]], mask=mask, other=zero_of(rows)).astype(
            query.dtype
        )
        scores = squash(product(query, k, 1), scale, soft_cap)
        scores = jnp.where(seen[None, :], scores, LOWEST)
        best = jnp.maximum(top, scores.max(1))
        weight = jnp.exp2(scores - best[:, None])
        shrink = jnp.exp2(top - best)
        acc = acc * shrink[:, None] + product(weight.astype(query.dtype), v, 0)
        return acc, best, total * shrink + weight.sum(1)

    # The first block of a part has a slot that is seen, so the maximum is finite from then on.
    zero = (
        jnp.zeros((s.block_g, s.block_d), jnp.float32),
        jnp.full(s.block_g, LOWEST, jnp.float32),
        jnp.zeros(s.block_g, jnp.float32),
    )
    acc, top, total = jax.lax.fori_loop(0, cdiv(jnp.maximum(high - low, 0), s.block_n), block, zero)
    if s.parts == 1:
        (out,) = results
        value = acc / jnp.where(total == 0, 1.0, total)[:, None]
        if scales:
            value = value * scales[1][h]
        plgpu.store(out.at[place], value.astype(out.dtype), mask=real)
        return
    sums, marks = results
    live = low < high
    plgpu.store(
        sums.at[t, h, split, g[:, None], d[None, :]], acc, mask=jnp.broadcast_to(live, acc.shape)
    )
    plgpu.store(marks.at[t, h, split, 0, g], top, mask=jnp.broadcast_to(live, top.shape))
    plgpu.store(marks.at[t, h, split, 1, g], total, mask=jnp.broadcast_to(live, total.shape))


def squash(scores: jax.Array, scale: Any, soft_cap: float) -> jax.Array:
    """Scores in log2 units, `scale` being that of the op times log2(e)."""
    if soft_cap > 0:
        return jnp.tanh(scores * (scale / LOG2_E / soft_cap)) * (soft_cap * LOG2_E)
    return scores * scale


def _merge_parts(
    s: _Shape,
    which: int,
    sums: Any,
    marks: Any,
    kv_lens: Any,
    counts: Any,
    *more: Any,
) -> None:
    *scales, out = more
    t, h = pl.program_id(0), pl.program_id(1)
    g, d = jnp.arange(s.block_g), jnp.arange(s.block_d)
    length = _length(kv_lens, counts, which, t)
    _, begin, part = _range(s, length)

    def add(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, top, total = state
        other, other_total = marks[t, h, i, 0, g], marks[t, h, i, 1, g]
        best = jnp.maximum(top, other)
        mine, its = jnp.exp2(top - best), jnp.exp2(other - best)
        acc = acc * mine[:, None] + sums[t, h, i, g[:, None], d[None, :]] * its[:, None]
        return acc, best, total * mine + other_total * its

    zero = (
        jnp.zeros((s.block_g, s.block_d), jnp.float32),
        jnp.full(s.block_g, LOWEST, jnp.float32),
        jnp.zeros(s.block_g, jnp.float32),
    )
    used = jax.lax.div(length - begin + part - 1, part)
    acc, _, total = jax.lax.fori_loop(0, jnp.where(length > 0, used, 0), add, zero)
    value = acc / jnp.where(total == 0, 1.0, total)[:, None]
    for v_scale in scales:
        value = value * v_scale[h]
    real = (g < s.group)[:, None] & (d < s.size)[None, :]
    place = (t, (h * s.group + g)[:, None], d[None, :])
    plgpu.store(out.at[place], value.astype(out.dtype), mask=real)
