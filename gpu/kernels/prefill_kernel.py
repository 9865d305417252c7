"""Paged attention of ragged queries: blocks of one request's query tokens against its slots, block
by block.

All lengths are read on the device and the grid depends on shapes alone, so a graph can capture a
launch: with blocks of B tokens, request i begins at block query_start[i] // B + i, which never
overlaps and needs at most tokens / B + requests blocks. A block holds the query heads of one KV
head side by side, so its K and V are read once for them all.
"""

import triton
import triton.language as tl

from .arithmetic import LOG2_E, dot, oldest_seen, squash, with_sinks
from .overlap import wait


@triton.jit
def _attend(
    acc, top, total, q, k, v, seen, scale, soft_cap, CAPPED: tl.constexpr, MASKED: tl.constexpr
):
    """(acc, top, total) after one block of slots. Not MASKED: every row sees all of them."""
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    if CAPPED:
        scores = squash(scores * scale, soft_cap)
    else:
        scores = scores * scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    best = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no slot yet (before its window) has no maximum.
    base = tl.where(best == float("-inf"), 0.0, best) if MASKED else best
    weight = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    acc = dot(weight.to(q.dtype), v, acc * shrink[:, None])
    return acc, best, total * shrink + tl.sum(weight, 1)


@triton.jit
def _paged(
    kv, page_table, slot, used, d, dtype: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """K and V in some slots of a request; `kv` points to the K of the head in slot 0. MASKED: 0
    in those not used.
    """
    if MASKED:
        page = tl.load(page_table + slot // PAGE, mask=used, other=0)
    else:
        page = tl.load(page_table + slot // PAGE)
    place = (
        kv + ((page.to(tl.int64) * PAGE + slot % PAGE) * (2 * HEADS * SIZE))[:, None] + d[None, :]
    )
    if MASKED:
        mask = used[:, None] & (d < SIZE)[None, :]
        return tl.load(place, mask=mask, other=0.0).to(dtype), tl.load(
            place + SIZE, mask=mask, other=0.0
        ).to(dtype)
    elif d.shape[0] != SIZE:
        mask = (d < SIZE)[None, :]
        return tl.load(place, mask=mask, other=0.0).to(dtype), tl.load(
            place + SIZE, mask=mask, other=0.0
        ).to(dtype)
    else:
        return tl.load(place).to(dtype), tl.load(place + SIZE).to(dtype)


@triton.jit(
    do_not_specialize=["tokens", "requests"],
    do_not_specialize_on_alignment=[
        "page_table",
        "query_start",
        "kv_lens",
        "counts",
        "k_scale",
        "v_scale",
    ],
)
def prefill_kernel(
    q, kv, page_table, query_start, kv_lens, counts, out, sinks, scale, soft_cap,
    k_scale, v_scale, tokens, requests,
    q_token_stride, q_head_stride, table_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (KV head, block). Leaves the first counts[0] tokens to the decode kernel; rows of no
    request become 0.

    SCALED: K and V are multiplied with `k_scale` and `v_scale` [HEADS].
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    h = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # late positions, which see most, first
    i, n = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    factor, v_factor = scale * LOG2_E, 1.0
    if SCALED:
        factor *= tl.load(k_scale + h)
        v_factor = tl.load(v_scale + h)
    wait(OVERLAP)
    live = tl.load(counts + 1)
    starts = tl.load(query_start + i, mask=i <= requests, other=0)
    # The last request that begins at or before the block; number `live` stands for the padding.
    request = tl.sum(((starts // BLOCK_Q + i <= block) & (i <= live)).to(tl.int32), 0) - 1
    begin = tl.load(query_start + request)
    stop = tl.load(query_start + request + 1, mask=request < live, other=tokens)
    length = tl.load(kv_lens + request, mask=request < live, other=0)
    token = begin + (block - begin // BLOCK_Q - request) * BLOCK_Q
    if (request < tl.load(counts)) | (token >= stop):
        return
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    mine, head = token + r // GROUP, h * GROUP + r % GROUP
    rows = ((r < BLOCK_Q * GROUP) & (mine < stop))[:, None] & (d < SIZE)[None, :]
    result = (
        out
        + mine.to(tl.int64)[:, None] * (HEADS * GROUP * SIZE)
        + head[:, None] * SIZE
        + d[None, :]
    )
    if request == live:
        tl.store(result, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=rows)
        return
    past = length - stop  # position - token
    q += mine.to(tl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    query = tl.load(q, mask=rows, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    kv += h * 2 * SIZE
    page_table += request.to(tl.int64) * table_stride
    position, last = past + mine, tl.minimum(token + BLOCK_Q, stop)
    # Every row sees all slots from `whole` up to `edge`.
    first, whole, end = 0, 0, past + last
    edge = (past + token + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0 or CHUNK > 0:
        first = oldest_seen(past + token, WINDOW, CHUNK)
        whole = tl.cdiv(oldest_seen(past + last - 1, WINDOW, CHUNK), BLOCK_N) * BLOCK_N
        whole = tl.minimum(whole, edge)
        for start in tl.range(first // BLOCK_N * BLOCK_N, whole, BLOCK_N, num_stages=STAGES):
            slot = start + n
            used = slot >= first
            k, v = _paged(kv, page_table, slot, used, d, query.dtype, HEADS, SIZE, PAGE, True)
            seen = slot[None, :] >= oldest_seen(position, WINDOW, CHUNK)[:, None]
            seen = seen & used[None, :] & (slot[None, :] <= position[:, None])
            acc, top, total = _attend(
                acc, top, total, query, k, v, seen, factor, soft_cap, CAPPED, True
            )
    for start in tl.range(whole, edge, BLOCK_N, num_stages=STAGES):
        k, v = _paged(kv, page_table, start + n, True, d, query.dtype, HEADS, SIZE, PAGE, False)
        acc, top, total = _attend(
            acc, top, total, query, k, v, True, factor, soft_cap, CAPPED, False
        )
    for start in tl.range(edge, end, BLOCK_N, num_stages=STAGES):
        slot = start + n
        used = (slot >= first) & (slot < end)
        k, v = _paged(kv, page_table, slot, used, d, query.dtype, HEADS, SIZE, PAGE, True)
        seen = used[None, :] & (slot[None, :] <= position[:, None])
        if WINDOW > 0 or CHUNK > 0:
            seen = seen & (slot[None, :] >= oldest_seen(position, WINDOW, CHUNK)[:, None])
        acc, top, total = _attend(
            acc, top, total, query, k, v, seen, factor, soft_cap, CAPPED, True
        )
    total = with_sinks(total, top, sinks, head, r < BLOCK_Q * GROUP, SINKS)
    tl.store(result, (acc / total[:, None] * v_factor).to(out.dtype.element_ty), mask=rows)
