"""Paged attention of ragged queries: blocks of one request's query tokens against its slots, block by block.

All lengths are read on the device and the grid depends on shapes alone, so a graph can capture a launch: with blocks
of B tokens, request i begins at block query_start[i] // B + i, which never overlaps and needs at most tokens / B +
requests blocks. A block holds the query heads of one KV head side by side, so its K and V are read once for them all.
"""

import triton
import triton.language as tl

from .arithmetic import LOG2_E, dot, squash


@triton.jit
def _request_of(query_start, block, live, BLOCK_Q: tl.constexpr):
    """The last request that begins at or before `block`; `live`, the number of requests, stands for the padding."""
    low, high = 0, live
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _attend(
    acc, top, total, q, kv, page_table, start, position, first, end, d, scale, soft_cap,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(acc, top, total) after one block of slots. Not MASKED: every row sees all of them."""
    slot = start + tl.arange(0, BLOCK_N)
    if MASKED:
        used = (slot >= first) & (slot < end)
        page = tl.load(page_table + slot // PAGE, mask=used, other=0)
    else:
        page = tl.load(page_table + slot // PAGE)
    row = (page.to(tl.int64) * PAGE + slot % PAGE) * (2 * HEADS * SIZE)
    place = row[:, None] + d[None, :]
    if MASKED:
        mask = used[:, None] & (d < SIZE)[None, :]
        k = tl.load(kv + place, mask=mask, other=0.0).to(q.dtype)
        v = tl.load(kv + SIZE + place, mask=mask, other=0.0).to(q.dtype)
    elif d.shape[0] != SIZE:
        k = tl.load(kv + place, mask=(d < SIZE)[None, :], other=0.0).to(q.dtype)
        v = tl.load(kv + SIZE + place, mask=(d < SIZE)[None, :], other=0.0).to(q.dtype)
    else:
        k = tl.load(kv + place).to(q.dtype)
        v = tl.load(kv + SIZE + place).to(q.dtype)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
    if CAPPED:
        scores = squash(scores * scale, soft_cap)
    else:
        scores = scores * scale
    if MASKED:
        seen = slot[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (slot[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    best = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no slot yet (before its window) has no maximum.
    base = tl.where(best == float("-inf"), 0.0, best) if MASKED else best
    weight = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    acc = dot(weight.to(q.dtype), v, acc * shrink[:, None])
    return acc, best, total * shrink + tl.sum(weight, 1)


@triton.jit(
    do_not_specialize=["tokens"], do_not_specialize_on_alignment=["page_table", "query_start", "kv_lens", "counts"]
)
def prefill_kernel(
    q, kv, page_table, query_start, kv_lens, counts, out, scale, soft_cap, v_scale, tokens,
    q_token_stride, q_head_stride, table_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (KV head, block). Leaves the first counts[0] tokens to the decode kernel; rows of no request become 0."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    h = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # late positions, which see most, first
    live = tl.load(counts + 1)
    request = _request_of(query_start, block, live, BLOCK_Q)
    begin = tl.load(query_start + request)
    stop = tokens
    if request < live:
        stop = tl.load(query_start + request + 1)
    token = begin + (block - begin // BLOCK_Q - request) * BLOCK_Q
    if (request < tl.load(counts)) | (token >= stop):
        return
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    mine, head = token + r // GROUP, h * GROUP + r % GROUP
    rows = ((r < BLOCK_Q * GROUP) & (mine < stop))[:, None] & (d < SIZE)[None, :]
    result = out + mine.to(tl.int64)[:, None] * (HEADS * GROUP * SIZE) + head[:, None] * SIZE + d[None, :]
    if request == live:
        tl.store(result, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=rows)
        return
    past = tl.load(kv_lens + request) - stop  # position - token
    position = past + mine
    end = past + tl.minimum(token + BLOCK_Q, stop)
    place = mine.to(tl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    query = tl.load(q + place, mask=rows, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    kv += h * 2 * SIZE
    page_table += request.to(tl.int64) * table_stride
    first = 0
    edge = (past + token + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        first = tl.maximum(past + token - WINDOW + 1, 0)
        edge = first // BLOCK_N * BLOCK_N
    else:
        for start in tl.range(0, edge, BLOCK_N, num_stages=STAGES):
            acc, top, total = _attend(
                acc, top, total, query, kv, page_table, start, position, first, end, d, scale * LOG2_E, soft_cap,
                HEADS, SIZE, PAGE, WINDOW, CAPPED, False, BLOCK_N,
            )  # fmt: skip
    for start in tl.range(edge, end, BLOCK_N, num_stages=STAGES):
        acc, top, total = _attend(
            acc, top, total, query, kv, page_table, start, position, first, end, d, scale * LOG2_E, soft_cap,
            HEADS, SIZE, PAGE, WINDOW, CAPPED, True, BLOCK_N,
        )  # fmt: skip
    tl.store(result, (acc / total[:, None] * v_scale).to(out.dtype.element_ty), mask=rows)
