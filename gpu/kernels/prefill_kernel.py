"""Paged attention of ragged queries: blocks of one request's query tokens against its slots, block
by block.

All lengths are read on the device and the grid depends on shapes alone, so a graph can capture a
launch: with blocks of B tokens, request i begins at block query_start[i] // B + i, which never
overlaps and needs at most tokens / B + requests blocks. A block holds the query heads of one KV
head side by side, so its K and V are read once for them all.

K and V lie in pages, which cost an address for each slot. Those of this step's own tokens can be
gathered first, in the order of the tokens (`gather_kernel`), and where there is room for them all
slots of requests with a past, in the order of the requests (`gather_past_kernel`): then the copy
engine brings a block at a time.
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
    do_not_specialize=["requests"],
    do_not_specialize_on_alignment=["page_table", "query_start", "kv_lens", "counts"],
)
def gather_kernel(
    kv, page_table, query_start, kv_lens, counts, own, requests, table_stride,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of tokens, block of a slot's WIDTH entries): `own` [tok 2*kvhead*hdim] is what
    the cache holds of the step's tokens. Tokens of no request and the first counts[0] have none.
    """
    wait(OVERLAP)
    t, i = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    live = tl.load(counts + 1)
    starts = tl.load(query_start + i, mask=i <= requests, other=0)
    request = tl.sum(((starts[None, :] <= t[:, None]) & (i < live)[None, :]).to(tl.int32), 1) - 1
    stop = tl.load(query_start + request + 1, mask=request >= 0, other=0)
    real = (t < stop) & (request >= tl.load(counts))
    slot = tl.load(kv_lens + request, mask=real, other=0) - stop + t
    page = tl.load(
        page_table + request.to(tl.int64) * table_stride + slot // PAGE, mask=real, other=0
    )
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = real[:, None] & (w < WIDTH)[None, :]
    row = tl.load(
        kv + ((page.to(tl.int64) * PAGE + slot % PAGE) * WIDTH)[:, None] + w[None, :], mask=mask
    )
    tl.store(own + t.to(tl.int64)[:, None] * WIDTH + w[None, :], row, mask=mask)


@triton.jit
def _ends(query_start, kv_lens, counts, requests, BLOCK_R: tl.constexpr):
    """Where the slots of each request with a past end, in the order of the requests, and how many
    they are, 0 of others: ([BLOCK_R], [BLOCK_R]).
    """
    i = tl.arange(0, BLOCK_R)
    real = (i >= tl.load(counts)) & (i < tl.load(counts + 1)) & (i < requests)
    length = tl.load(kv_lens + i, mask=real, other=0)
    start = tl.load(query_start + i, mask=real, other=0)
    queries = tl.load(query_start + i + 1, mask=real, other=0) - start
    slots = tl.where(length > queries, length, 0)
    return tl.cumsum(slots, 0), slots


@triton.jit(
    do_not_specialize=["requests", "tokens", "room"],
    do_not_specialize_on_alignment=["page_table", "query_start", "kv_lens", "counts"],
)
def gather_past_kernel(
    kv, page_table, query_start, kv_lens, counts, own, tokens, requests, room, table_stride,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of slots, block of a slot's WIDTH entries): behind the `tokens` rows of `own`
    come `room` rows for the slots of requests with a past. Those that do not fit stay away.
    """
    wait(OVERLAP)
    ends, slots = _ends(query_start, kv_lens, counts, requests, BLOCK_R)
    ends = tl.where(ends <= room, ends, 0)
    used = tl.max(ends, 0)
    if tl.program_id(0) * BLOCK_T >= used:
        return
    c, i = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    # The one request whose slots are around this row.
    mine = (ends > c[:, None]) & ((ends - slots) <= c[:, None]) & (slots > 0)
    request = tl.sum(tl.where(mine, i[None, :], 0), 1)
    slot = c - tl.sum(tl.where(mine, ends - slots, 0), 1)
    real = c < used
    page = tl.load(
        page_table + request.to(tl.int64) * table_stride + slot // PAGE, mask=real, other=0
    )
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = real[:, None] & (w < WIDTH)[None, :]
    row = tl.load(
        kv + ((page.to(tl.int64) * PAGE + slot % PAGE) * WIDTH)[:, None] + w[None, :], mask=mask
    )
    place = (tokens + c).to(tl.int64)
    tl.store(own + place[:, None] * WIDTH + w[None, :], row, mask=mask)


@triton.jit(
    do_not_specialize=["tokens", "requests", "room"],
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
    q, kv, own, own_blocks, page_table, query_start, kv_lens, counts, out, sinks, scale, soft_cap,
    k_scale, v_scale, tokens, requests, room,
    q_token_stride, q_head_stride, table_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr, OWN: tl.constexpr, PAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (KV head, block). Leaves the first counts[0] tokens to the decode kernel; rows of no
    request become 0.

    OWN: the step's own K and V are read from `own`, by its descriptor `own_blocks` where a block is
    one request's. PAST: all slots of requests for which there is room are. SCALED: K and V are
    multiplied with `k_scale` and `v_scale` [HEADS].
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
    # By pages: all slots that a row sees, or with OWN those before this step. Every row sees all
    # those from `whole` up to `edge`.
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
    elif OWN:
        end, place = past + begin, begin
        if PAST:
            ends, _ = _ends(query_start, kv_lens, counts, requests, BLOCK_R)
            stops = tl.sum(tl.where(i == request, ends, 0), 0)
            gathered = (end > 0) & (stops <= room)
            place = tl.where(gathered, tokens + stops - length, place)
            end = tl.where(gathered, 0, end)
        edge = end // BLOCK_N * BLOCK_N
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
    if OWN:
        # Slot s of the request, from `end` on, is row s + shift.
        shift = place - end
        last += past + shift
        edge = place + (past + token + 1 - end) // BLOCK_N * BLOCK_N
        # up to here blocks hold nothing of the next request
        whole = place + (length - end) // BLOCK_N * BLOCK_N
        for start in tl.range(place, edge, BLOCK_N, num_stages=STAGES):
            k, v = (
                own_blocks.load([start, h * 2 * SIZE]),
                own_blocks.load([start, h * 2 * SIZE + SIZE]),
            )
            acc, top, total = _attend(
                acc, top, total, query, k, v, True, factor, soft_cap, CAPPED, False
            )
        for start in tl.range(edge, tl.minimum(last, whole), BLOCK_N, num_stages=1):
            k, v = (
                own_blocks.load([start, h * 2 * SIZE]),
                own_blocks.load([start, h * 2 * SIZE + SIZE]),
            )
            seen = (start + n)[None, :] <= (position + shift)[:, None]
            acc, top, total = _attend(
                acc, top, total, query, k, v, seen, factor, soft_cap, CAPPED, True
            )
        own += h * 2 * SIZE
        for start in tl.range(tl.maximum(edge, whole), last, BLOCK_N, num_stages=1):
            other = start + n
            rows_of = own + other.to(tl.int64)[:, None] * (2 * HEADS * SIZE) + d[None, :]
            used = (other < last)[:, None]
            k = tl.load(rows_of, mask=used, other=0.0)
            v = tl.load(rows_of + SIZE, mask=used, other=0.0)
            seen = other[None, :] <= (position + shift)[:, None]
            acc, top, total = _attend(
                acc, top, total, query, k, v, seen, factor, soft_cap, CAPPED, True
            )
    total = with_sinks(total, top, sinks, head, r < BLOCK_Q * GROUP, SINKS)
    tl.store(result, (acc / total[:, None] * v_factor).to(out.dtype.element_ty), mask=rows)
