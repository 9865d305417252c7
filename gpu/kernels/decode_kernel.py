"""Paged attention of one query token a request: the slots of all requests are divided evenly.

All lengths are read on the device, and the grid depends on shapes alone, so a graph can capture a
launch. A program takes one KV head (all query heads of its group) and one part of a request's
slots. Which part follows from the lengths of all requests: each program works that out for itself,
so that one long request among short ones is split as finely as the GPU needs it. A request of one
part is written by its program. Else each leaves its sums behind, and the last to arrive adds them
up in their order, so results do not depend on who that was.

The grid has room for the longest requests, so with few short ones most programs have nothing to do.
They find that out from the lengths alone, and end while the launch before still runs. With AHEAD
the others ask for the first block of their part there: in a decode step all slots but a request's
last were written by steps before.
"""

import triton
import triton.language as tl

from .arithmetic import LOG2_E, dot, oldest_seen, squash, with_sinks
from .overlap import wait

WHOLE = tl.constexpr(0)
"""Each request is one part."""
EACH = tl.constexpr(1)
"""Each request may have as many parts, whatever the others have."""
ALL = tl.constexpr(2)
"""The slots of all requests are divided evenly."""
UNEVEN = tl.constexpr(8)
"""How much longer than the mean the longest request is where there are half as many parts again:
most programs take whole requests then, and those with parts of the long one would end last.
"""
ENOUGH = tl.constexpr(512)
"""Slots that half as many parts again have to have where lengths differ less, of at least half as
many requests as parts are wanted: whole requests that end early leave their place to others. Parts
that are shorter cost more than that gains, and fewer requests have few that stay whole.
"""


@triton.jit
def _page_of(page_table, start, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of the block of slots that begins at `start` if pages are made of blocks, else
    [BLOCK_N] those of its slots. From `high` on it is any.
    """
    slot = start
    if PAGE % BLOCK_N > 0:
        slot += tl.arange(0, BLOCK_N)
    return tl.load(page_table + tl.maximum(tl.minimum(slot, high - 1), 0) // PAGE)


@triton.jit
def _keys_of(
    kv, page, start, d, HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pointers [BLOCK_N BLOCK_D] to entries `d` of the K of the block of slots at `start`, which
    lies in `page`; `kv` points to the K of the head in slot 0.
    """
    ROW: tl.constexpr = 2 * HEADS * SIZE
    n = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N > 0:
        place = page.to(tl.int64) * PAGE + (start + n) % PAGE
        return kv + ((place * ROW)[:, None] + d[None, :])
    else:
        place = page.to(tl.int64) * PAGE + start % PAGE
        return kv + place * ROW + (n[:, None] * ROW + d[None, :])


@triton.jit
def _block(
    kv, page, start, low, high, d,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(K, V) of the slots in [low, high) of the block at `start`, zeros for others; see
    `_keys_of`.
    """
    slot = start + tl.arange(0, BLOCK_N)
    mask = ((slot >= low) & (slot < high))[:, None] & (d < SIZE)[None, :]
    keys = _keys_of(kv, page, start, d, HEADS, SIZE, PAGE, BLOCK_N)
    return tl.load(keys, mask=mask, other=0.0), tl.load(keys + SIZE, mask=mask, other=0.0)


@triton.jit
def _attend(
    acc, top, total, q, k, v, start, low, high, scale, soft_cap,
    BLOCK_N: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """(acc, top, total) after the slots in [low, high) of the block at `start`, of K and V."""
    slot = start + tl.arange(0, BLOCK_N)
    seen = (slot >= low) & (slot < high)
    k, v = k.to(q.dtype), v.to(q.dtype)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32)) * scale
    if CAPPED:
        scores = squash(scores, soft_cap)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    best = tl.maximum(top, tl.max(scores, 1))
    weight = tl.exp2(scores - best[:, None])
    shrink = tl.exp2(top - best)
    acc = dot(weight.to(q.dtype), v, acc * shrink[:, None])
    return acc, best, total * shrink + tl.sum(weight, 1)


@triton.jit
def _merge(
    sums, marks, out, sinks, parts, factor, GROUP: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write the mean of all parts, added up in their order: `sums` [part GROUP BLOCK_D], `marks`
    [part 2 GROUP]; `sinks` [GROUP]. `factor` is what V is to be multiplied with.

    The loads of PARTS parts of ROWS heads are in flight at once.
    """
    d, row = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    for first in tl.static_range(0, GROUP, ROWS):
        g = first + row
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, parts, PARTS):
            p = start + tl.arange(0, PARTS)
            real = (p < parts)[:, None] & (g < GROUP)[None, :]
            mark = marks + p[:, None] * (2 * GROUP) + g[None, :]
            tops = tl.load(mark, mask=real, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(mark + GROUP, mask=real, other=0.0, cache_modifier=".cg")
            place = (
                sums + (p[:, None] * GROUP + g[None, :])[:, :, None] * BLOCK_D + d[None, None, :]
            )
            each = tl.load(place, mask=real[:, :, None], other=0.0, cache_modifier=".cg")
            best = tl.maximum(top, tl.max(tops, 0))
            # heads beyond the group have no maximum
            base = tl.where(best == float("-inf"), 0.0, best)
            share, shrink = tl.exp2(tops - base[None, :]), tl.exp2(top - base)
            acc = acc * shrink[:, None] + tl.sum(each * share[:, :, None], 0)
            total = total * shrink + tl.sum(totals * share, 0)
            top = best
        total = with_sinks(total, top, sinks, g, g < GROUP, SINKS)
        mask = (g < GROUP)[:, None] & (d < SIZE)[None, :]
        mean = acc / total[:, None] * factor
        tl.store(out + g[:, None] * SIZE + d[None, :], mean.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _reach(length, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of requests of `length` slots, the first slot that their last token sees, the first of that
    block, and the number of blocks.
    """
    first = length * 0
    if WINDOW > 0 or CHUNK > 0:
        first = oldest_seen(length - 1, WINDOW, CHUNK)
    begin = first // BLOCK_N * BLOCK_N
    return first, begin, tl.cdiv(length - begin, BLOCK_N)


@triton.jit
def _sum_and_max(a, most, b, other):
    return a + b, tl.maximum(most, other)


@triton.jit
def _sums(a, b, other, another):
    return a + other, b + another


@triton.jit
def _evenly(blocks, size, most):
    """(number of parts, blocks of each but the last) of requests of `blocks`: parts of `size` or
    more, no more than `most`, and as even as whole blocks are.
    """
    size = tl.maximum(size, tl.cdiv(blocks, most))
    size = tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, size), 1))
    return tl.cdiv(blocks, tl.maximum(size, 1)), size


@triton.jit
def _part_of(
    item, lengths, live, requests, wanted, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Which part of which request is number `item`: (request, part, parts, blocks a part, number of
    the request's first part). First come the parts of requests that are split, which are the
    longest, then whole requests, then the rows of none, from `live` on.

    Parts have LEAST slots or more, as many that all requests have about `wanted` of them, or aim at
    half as many again if one request is UNEVEN times as long as the mean, or, of many, a quarter
    longer and parts have ENOUGH slots. A request has at most MOST. Where none has more than FEW
    slots, none is split, unless that leaves most of the GPU idle.
    """
    r = tl.arange(0, BLOCK_R)
    real = r < tl.minimum(live, requests)
    _first, _begin, blocks = _reach(
        tl.load(lengths + r, mask=real, other=0), WINDOW, CHUNK, BLOCK_N
    )
    blocks = tl.where(real, tl.maximum(blocks, 1), 0)
    total, longest = tl.reduce((blocks, blocks), 0, _sum_and_max)
    aimed, more = wanted, wanted + wanted // 2
    alike = longest * tl.minimum(live, requests)  # the total if all were as long
    enough = (live * 2 >= wanted) & (total >= more * (ENOUGH // BLOCK_N))
    if (alike > total * UNEVEN) | ((alike * 4 > total * 5) & enough):
        aimed = more
    size = tl.maximum(tl.cdiv(total, aimed), LEAST // BLOCK_N)
    t, split, begin = item, item * 0, item
    parts, part = split + 1, longest
    # Else each request is one part, and its number is known without the others.
    few = tl.where(live * 8 >= wanted, FEW // BLOCK_N, 0)
    if longest > tl.maximum(size, few):
        # Last parts that are not full make more than are wanted, and what does not run at once
        # has to wait for the longest. Whole requests leave room as soon as they are done: they
        # count for what they are of a part.
        all_parts, _size = _evenly(blocks, size, MOST)
        whole, split_parts = tl.reduce(
            (tl.where(all_parts == 1, blocks, 0), tl.where(all_parts > 1, all_parts, 0)), 0, _sums
        )
        room = tl.maximum(aimed - whole // size, 1)
        size = tl.maximum(size, tl.cdiv(size * split_parts, room))
        # The grid has `wanted` programs beside one for each request.
        size = tl.maximum(size, tl.cdiv(total - whole, wanted))
        all_parts, _size = _evenly(blocks, size, MOST)
        is_split = all_parts > 1
        of_split = tl.where(is_split, all_parts, 0)
        of_whole = (all_parts == 1).to(tl.int32)
        all_split, all_whole = tl.reduce((of_split, of_whole), 0, _sums)
        ends = tl.where(is_split, tl.cumsum(of_split, 0), all_split + tl.cumsum(of_whole, 0))
        own = real & (ends > item) & (ends - all_parts <= item)
        found, begin = tl.reduce(
            (tl.where(own, r + 1, 0), tl.where(own, ends - all_parts, 0)), 0, _sums
        )
        count = all_split + all_whole
        t = tl.where(found > 0, found - 1, live)
        begin = tl.where(found > 0, begin, count)
        split = item - begin
        own_length = tl.load(lengths + t, mask=t < tl.minimum(live, requests), other=1)
        _own_first, _own_begin, own_blocks = _reach(own_length, WINDOW, CHUNK, BLOCK_N)
        parts, part = _evenly(tl.maximum(own_blocks, 1), size, MOST)
        t = tl.where(found > 0, t, live + split)
        split = tl.where(found > 0, split, 0)
    return t, split, parts, part, begin


@triton.jit(
    do_not_specialize=["wanted", "tokens", "requests"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "counts", "k_scale", "v_scale"],
)
def decode_kernel(
    q, kv, page_table, kv_lens, counts, out, sinks, sums, marks, arrived, scale, soft_cap, k_scale,
    v_scale, q_token_stride, q_head_stride, table_stride, wanted, tokens, requests,
    MIXED: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    FEW: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (KV head, part). With SPLIT of ALL there are `wanted` + `tokens` parts, of EACH `wanted`
    of each token, else one of each. In a mixed step only the first counts[0] tokens are
    taken, else counts[1]. SCALED: K and V are multiplied with `k_scale` and `v_scale` [HEADS].

    The heads of a slot lie side by side, so those that read them run side by side.
    """
    h, item = tl.program_id(0), tl.program_id(1)
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = h * GROUP + g
    rows = (g < GROUP)[:, None] & (d < SIZE)[None, :]
    factor, v_factor = scale * LOG2_E, 1.0
    if SCALED:
        factor *= tl.load(k_scale + h)
        v_factor = tl.load(v_scale + h)
    live = tl.load(counts + (0 if MIXED else 1))
    t = tl.minimum(item, tokens - 1)
    if SPLIT == EACH:
        t = item % tokens
    split, parts, part, begun = item // tokens, item * 0 + 1, item, item
    if SPLIT == ALL:
        t, split, parts, part, begun = _part_of(
            item, kv_lens, live, requests, wanted, WINDOW, CHUNK, LEAST, MOST, FEW, BLOCK_R, BLOCK_N
        )  # fmt: skip
    length = tl.load(kv_lens + tl.minimum(t, requests - 1))
    first, low, blocks = _reach(length, WINDOW, CHUNK, BLOCK_N)
    high = length
    if SPLIT == EACH:
        parts, part = _evenly(tl.maximum(blocks, 1), LEAST // BLOCK_N, wanted)
        begun = t * wanted
    if SPLIT != WHOLE:
        low += split * part * BLOCK_N
        high = tl.minimum(low + part * BLOCK_N, length)
    # Programs without a part end before the wait, and leave their place to others. One in each
    # launch has to wait, or this launch would seem done before the one in front of it: with EACH
    # those of parts 0, with ALL the first; they have a part, or a row of padding.
    if SPLIT == EACH:  # noqa: SIM102 (only this one is known to the compiler)
        if (split > 0) & ((split >= parts) | (t >= live)):
            return
    if SPLIT == ALL:  # noqa: SIM102
        if (item > 0) & (t >= tokens):
            return
    page_table += tl.minimum(t, requests - 1).to(tl.int64) * table_stride
    kv += h * 2 * SIZE
    end, begin = tl.where(t < live, high, 0), low
    page = _page_of(page_table, low, end, PAGE, BLOCK_N)
    if AHEAD:
        # All but the slot that the launch before writes, the request's last.
        begin, first_page = low + BLOCK_N, page
        page = _page_of(page_table, begin, end, PAGE, BLOCK_N)
        old = tl.minimum(end, length - 1)
        k, v = _block(kv, first_page, low, first, old, d, HEADS, SIZE, PAGE, BLOCK_N)
    wait(OVERLAP)
    place = t.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    query = tl.load(q + place, mask=rows, other=0.0)
    result = out + t.to(tl.int64) * (HEADS * GROUP * SIZE) + head[:, None] * SIZE + d[None, :]
    if t >= live:
        if not MIXED and split == 0:
            tl.store(result, tl.zeros([BLOCK_G, BLOCK_D], out.dtype.element_ty), mask=rows)
        return
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    if AHEAD:
        if begin >= length:
            k, v = _block(kv, first_page, low, first, high, d, HEADS, SIZE, PAGE, BLOCK_N)
        acc, top, total = _attend(
            acc, top, total, query, k, v, low, first, high, factor, soft_cap, BLOCK_N, CAPPED
        )
    for start in tl.range(begin, high, BLOCK_N, num_stages=STAGES):
        # The next page is carried along, so that the K and V of blocks ahead do not wait for it:
        # with three stages those of two blocks are on their way. It is carried as it was loaded,
        # or the compiler would bring it by way of shared memory, and wait there for all.
        next_page = _page_of(page_table, start + BLOCK_N, high, PAGE, BLOCK_N)
        keys, values = _block(kv, page, start, first, high, d, HEADS, SIZE, PAGE, BLOCK_N)
        acc, top, total = _attend(
            acc, top, total, query, keys, values, start, first, high, factor, soft_cap,
            BLOCK_N, CAPPED,
        )  # fmt: skip
        page = next_page
    if SPLIT == WHOLE or parts == 1:
        total = with_sinks(total, top, sinks, head, g < GROUP, SINKS)
        tl.store(result, (acc / total[:, None] * v_factor).to(out.dtype.element_ty), mask=rows)
    else:
        own = h * tl.num_programs(1) + begun
        sums += own.to(tl.int64) * (GROUP * BLOCK_D)
        marks += own * (2 * GROUP)
        tl.store(
            sums + (split * GROUP + g[:, None]) * BLOCK_D + d[None, :],
            acc,
            mask=(g < GROUP)[:, None],
        )
        tl.store(marks + split * 2 * GROUP + g, top, mask=g < GROUP)
        tl.store(marks + (split * 2 + 1) * GROUP + g, total, mask=g < GROUP)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(arrived + t * HEADS + h, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + t * HEADS + h, 0)
            out += (t.to(tl.int64) * HEADS + h) * (GROUP * SIZE)
            _merge(
                sums,
                marks,
                out,
                sinks + h * GROUP,
                parts,
                v_factor,
                GROUP,
                SIZE,
                4 if GROUP > 2 else GROUP,
                16,
                BLOCK_D,
                SINKS,
            )
