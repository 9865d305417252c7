"""Kernels of multi-head latent attention: what writes a layer's cache `[page slot copy rank+turn]`,
and attention of decodes and of prompts that reads it.

All heads of a token read the same slots, and a latent is K and V at once: a block of slots is
loaded once, multiplied with the queries, and multiplied with the weights that come of it. Lengths
are read on the device, and grids depend on shapes alone, so a graph can capture a launch.

They have run in Triton's interpreter and were compiled for NVIDIA chips, but on no GPU yet.
"""

import triton
import triton.language as tl

from .arithmetic import LOG2_E, dot
from .decode_kernel import ALL, EACH, WHOLE, _evenly, _page_of, _part_of
from .overlap import wait


@triton.jit
def _entries(
    cache, page, start, high, d, turn, RANK: tl.constexpr, TURN: tl.constexpr, ROW: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(latents [BLOCK_N BLOCK_D], keys [BLOCK_N BLOCK_T]) of the block of slots at `start`, which
    lies in `page` (see `_page_of`); zeros for slots from `high` on.
    """
    n = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N > 0:
        place = cache + ((page.to(tl.int64) * PAGE + (start + n) % PAGE) * ROW)[:, None]
    else:
        place = cache + (page.to(tl.int64) * PAGE + start % PAGE) * ROW + (n * ROW)[:, None]
    used = (start + n < high)[:, None]
    latent = tl.load(place + d[None, :], mask=used & (d < RANK)[None, :], other=0.0)
    key = tl.load(place + RANK + turn[None, :], mask=used & (turn < TURN)[None, :], other=0.0)
    return latent, key


@triton.jit
def _query(q, places, turned, turns, real, d, turn, RANK: tl.constexpr, TURN: tl.constexpr):
    """Both parts of queries, [row BLOCK_D] and [row BLOCK_T], which begin at `places` and `turns`;
    zeros for rows that are not `real`.
    """
    latent = tl.load(
        q + places[:, None] + d[None, :], mask=real[:, None] & (d < RANK)[None, :], other=0.0
    )
    key = tl.load(
        turned + turns[:, None] + turn[None, :],
        mask=real[:, None] & (turn < TURN)[None, :],
        other=0.0,
    )
    return latent, key


@triton.jit
def _attend(acc, top, total, query, rotated, latent, key, seen, scale):
    """(acc, top, total) after a block of slots, of queries [row BLOCK_D] and [row BLOCK_T]; each
    row sees a slot of the first block.
    """
    scores = tl.zeros([query.shape[0], latent.shape[0]], tl.float32)
    scores = dot(rotated, tl.trans(key), dot(query, tl.trans(latent), scores)) * scale
    scores = tl.where(seen, scores, float("-inf"))
    best = tl.maximum(top, tl.max(scores, 1))
    weight = tl.exp2(scores - best[:, None])
    shrink = tl.exp2(top - best)
    acc = dot(weight.to(latent.dtype), latent, acc * shrink[:, None])
    return acc, best, total * shrink + tl.sum(weight, 1)


@triton.jit
def _put(x, place, rows, SIZE: tl.constexpr):
    """Write the first `rows` of x [row ...] as rows of SIZE entries that follow one another from
    `place` on.
    """
    r, d = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    mask = (r < rows)[:, None] & (d < SIZE)[None, :]
    tl.store(place + r[:, None] * SIZE + d[None, :], x.to(place.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["wanted", "tokens", "requests"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "counts"],
)
def latent_decode_kernel(
    q, rotated, cache, page_table, kv_lens, counts, out, sums, marks, splits, scale,
    q_token_stride, q_head_stride, rotated_token_stride, rotated_head_stride, table_stride, wanted,
    tokens, requests,
    MIXED: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, TURN: tl.constexpr,
    ROW: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of heads, part); parts are those of `decode_kernel`, which says how requests are
    split. A request of one part is written by its program. Those of others leave their sums
    [part HEADS BLOCK_D] and marks [part 2 HEADS] for `latent_merge_kernel`, and `splits` [tok 2]
    tells it how many parts a token has, and which is its first.
    """
    h, item = tl.program_id(0), tl.program_id(1)
    d, turn, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
    head = h * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < HEADS
    live = tl.load(counts + (0 if MIXED else 1))
    t = tl.minimum(item, tokens - 1)
    if SPLIT == EACH:
        t = item % tokens
    split, parts, part, begun = item // tokens, item * 0 + 1, item, item
    if SPLIT == ALL:
        t, split, parts, part, begun = _part_of(
            item, kv_lens, live, requests, wanted, 0, 0, LEAST, MOST, 0, BLOCK_R, BLOCK_N
        )  # fmt: skip
    length = tl.load(kv_lens + tl.minimum(t, requests - 1))
    low, high = length * 0, length
    if SPLIT == EACH:
        blocks = tl.maximum(tl.cdiv(length, BLOCK_N), 1)
        parts, part = _evenly(blocks, LEAST // BLOCK_N, wanted)
        begun = t * wanted
    if SPLIT != WHOLE:
        low = split * part * BLOCK_N
        high = tl.minimum(low + part * BLOCK_N, length)
    # As in `decode_kernel`, programs without a part end before the wait, but for one at least.
    if SPLIT == EACH:  # noqa: SIM102 (only this one is known to the compiler)
        if (split > 0) & ((split >= parts) | (t >= live)):
            return
    if SPLIT == ALL:  # noqa: SIM102
        if (item > 0) & (t >= tokens):
            return
    page_table += tl.minimum(t, requests - 1).to(tl.int64) * table_stride
    page = _page_of(page_table, low, tl.where(t < live, high, 0), PAGE, BLOCK_N)
    wait(OVERLAP)
    row = t.to(tl.int64)
    result = out + (row * HEADS + h * BLOCK_H) * RANK
    rows = HEADS - h * BLOCK_H  # or more than a block has
    if t >= live:
        if not MIXED and split == 0:
            empty = tl.zeros([BLOCK_H, BLOCK_D], out.dtype.element_ty)
            _put(empty, result, rows, RANK)
        return
    if SPLIT != WHOLE:  # noqa: SIM102
        if (split == 0) & (h == 0):
            tl.store(splits + 2 * t, parts)
            tl.store(splits + 2 * t + 1, begun)
    own = head.to(tl.int64)
    query, turned = _query(
        q, row * q_token_stride + own * q_head_stride, rotated,
        row * rotated_token_stride + own * rotated_head_stride, real, d, turn, RANK, TURN,
    )  # fmt: skip
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        # Carried along as in `decode_kernel`, so that blocks ahead do not wait for their page.
        next_page = _page_of(page_table, start + BLOCK_N, high, PAGE, BLOCK_N)
        latent, key = _entries(cache, page, start, high, d, turn, RANK, TURN, ROW, PAGE, BLOCK_N)
        seen = (start + n < high)[None, :]
        acc, top, total = _attend(acc, top, total, query, turned, latent, key, seen, scale * LOG2_E)
        page = next_page
    if SPLIT == WHOLE or parts == 1:
        _put(acc / total[:, None], result, rows, RANK)
    else:
        place = (begun + split).to(tl.int64)
        _put(acc, sums + (place * HEADS + h * BLOCK_H) * BLOCK_D, rows, BLOCK_D)
        tl.store(marks + place * (2 * HEADS) + head, top, mask=real)
        tl.store(marks + place * (2 * HEADS) + HEADS + head, total, mask=real)


@triton.jit(do_not_specialize_on_alignment=["counts"])
def latent_merge_kernel(
    sums, marks, splits, counts, out, MIXED: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token, block of ROWS heads): the mean of all parts of a token that has several, added
    up in their order. The loads of PARTS parts are in flight at once.
    """
    t = tl.program_id(0)
    wait(OVERLAP)
    if t >= tl.load(counts + (0 if MIXED else 1)):
        return
    parts, begun = tl.load(splits + 2 * t), tl.load(splits + 2 * t + 1)
    if parts <= 1:
        return
    head, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, parts, PARTS):
        p = start + tl.arange(0, PARTS)
        real = (p < parts)[:, None] & (head < HEADS)[None, :]
        place = (begun + p).to(tl.int64)[:, None]
        mark = marks + place * (2 * HEADS) + head[None, :]
        tops = tl.load(mark, mask=real, other=float("-inf"))
        totals = tl.load(mark + HEADS, mask=real, other=0.0)
        each = tl.load(
            sums + (place * HEADS + head[None, :])[:, :, None] * BLOCK_D + d[None, None, :],
            mask=real[:, :, None],
            other=0.0,
        )
        best = tl.maximum(top, tl.max(tops, 0))
        # heads beyond the last have no maximum
        base = tl.where(best == float("-inf"), 0.0, best)
        share, shrink = tl.exp2(tops - base[None, :]), tl.exp2(top - base)
        acc = acc * shrink[:, None] + tl.sum(each * share[:, :, None], 0)
        total = total * shrink + tl.sum(totals * share, 0)
        top = best
    first = tl.program_id(1) * ROWS
    place = out + (t.to(tl.int64) * HEADS + first) * RANK
    _put(acc / total[:, None], place, HEADS - first, RANK)


@triton.jit(
    do_not_specialize=["tokens", "requests"],
    do_not_specialize_on_alignment=["page_table", "query_start", "kv_lens", "counts"],
)
def latent_prefill_kernel(
    q, rotated, cache, page_table, query_start, kv_lens, counts, out, scale,
    q_token_stride, q_head_stride, rotated_token_stride, rotated_head_stride, table_stride, tokens,
    requests,
    HEADS: tl.constexpr, RANK: tl.constexpr, TURN: tl.constexpr, ROW: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block,). A block is BLOCK_M rows of one request, which are the heads of its first
    token, then those of the next one. Leaves the first counts[0] tokens to the decode kernel; rows
    of no request become 0.

    Request i begins at block query_start[i] * HEADS // BLOCK_M + i: as in `prefill_kernel`.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late positions, which see most, first
    i, n = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    wait(OVERLAP)
    live = tl.load(counts + 1)
    starts = tl.load(query_start + i, mask=i <= requests, other=0)
    # The last request that begins at or before the block; number `live` stands for the padding.
    begun = (starts * HEADS // BLOCK_M + i <= block) & (i <= live)
    request = tl.sum(begun.to(tl.int32), 0) - 1
    begin = tl.load(query_start + request)
    stop = tl.load(query_start + request + 1, mask=request < live, other=tokens)
    length = tl.load(kv_lens + request, mask=request < live, other=0)
    first = (block - begin * HEADS // BLOCK_M - request) * BLOCK_M
    if (request < tl.load(counts)) | (first >= (stop - begin) * HEADS):
        return
    d, turn, row = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T), first + tl.arange(0, BLOCK_M)
    token, head = begin + row // HEADS, (row % HEADS).to(tl.int64)
    real, mine = token < stop, token.to(tl.int64)
    # Rows of a block follow one another in the result too.
    result, rows = out + (begin.to(tl.int64) * HEADS + first) * RANK, (stop - begin) * HEADS - first
    if request == live:
        empty = tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty)
        _put(empty, result, rows, RANK)
        return
    past = length - stop  # position - token
    query, turned = _query(
        q, mine * q_token_stride + head * q_head_stride, rotated,
        mine * rotated_token_stride + head * rotated_head_stride, real, d, turn, RANK, TURN,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    page_table += request.to(tl.int64) * table_stride
    # What the last token of the block sees.
    end = past + tl.minimum(begin + (first + BLOCK_M - 1) // HEADS + 1, stop)
    page = _page_of(page_table, 0, end, PAGE, BLOCK_N)
    # One loop for all slots: another one for those that each row sees, without masks, would need
    # more registers than there are.
    for start in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        next_page = _page_of(page_table, start + BLOCK_N, end, PAGE, BLOCK_N)
        latent, key = _entries(cache, page, start, end, d, turn, RANK, TURN, ROW, PAGE, BLOCK_N)
        slot = (start + n)[None, :]
        seen = (slot < end) & (slot <= past + token[:, None])
        acc, top, total = _attend(acc, top, total, query, turned, latent, key, seen, scale * LOG2_E)
        page = next_page
    _put(acc / total[:, None], result, rows, RANK)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def norm_rope_write_latents_kernel(
    latents, cache, weight, cos, sin, slots, eps, token_stride, cos_stride, sin_stride,
    RANK: tl.constexpr, TURN: tl.constexpr, HALF: tl.constexpr, COPIES: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token,). RANK entries are normed; of the TURN behind them the first 2 * HALF are
    rotated, in halves, and the rest is copied. Tokens with slot -1 write nothing.
    """
    t = tl.program_id(0).to(tl.int64)
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    factor = tl.load(weight + d, mask=d < RANK, other=0.0).to(tl.float32)
    wait(OVERLAP)
    slot = tl.load(slots + t)
    if slot < 0:
        return
    source = latents + t * token_stride
    x = tl.load(source + d, mask=d < RANK, other=0.0).to(tl.float32)
    a = tl.load(source + RANK + r, mask=r < HALF, other=0.0).to(tl.float32)
    b = tl.load(source + RANK + HALF + r, mask=r < HALF, other=0.0).to(tl.float32)
    u = tl.load(cos + t * cos_stride + r, mask=r < HALF, other=0.0)
    v = tl.load(sin + t * sin_stride + r, mask=r < HALF, other=0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * factor
    first, second = a * u - b * v, b * u + a * v
    dtype: tl.constexpr = cache.dtype.element_ty
    for copy in tl.static_range(COPIES):
        place = cache + (slot.to(tl.int64) * COPIES + copy) * (RANK + TURN)
        tl.store(place + d, x.to(dtype), mask=d < RANK)
        tl.store(place + RANK + r, first.to(dtype), mask=r < HALF)
        tl.store(place + RANK + HALF + r, second.to(dtype), mask=r < HALF)
        if 2 * HALF < TURN:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)
            same = tl.load(source + RANK + rest, mask=rest < TURN, other=0.0)
            tl.store(place + RANK + rest, same.to(dtype), mask=rest < TURN)
