"""Paged attention of prompts on Hopper: warps that fetch, and two groups of warps that multiply.

The blocks of query tokens are those of `prefill_kernel`: all lengths are read on the device, and
the grid depends on shapes alone. In a block of 128 rows each of two warp groups has 64. One more
warp asks the copy engine for K and V, a page or a block at a time, and runs STAGES blocks ahead.
While a group takes the softmax of one block of slots, its tensor cores multiply the weights of the
block before with V: `_step` has both products in flight.

Slots are taken from the last block to the first: the blocks that not every row sees come first.

Few tokens behind many slots would fill few processors. Their slots are split: each part leaves its
sums behind, and `merge_kernel` adds them up in their order.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .arithmetic import LOG2_E, oldest_seen, squash, with_sinks
from .overlap import wait

GROUPS = gl.constexpr(2)
GROUP_ROWS = gl.constexpr(64)
BLOCK_M = gl.constexpr(128)
"""Rows of a program: query heads of a KV head, of some tokens."""
FETCH_REGISTERS = gl.constexpr(24)
GROUP_REGISTERS = gl.constexpr(240)
"""Registers of a thread that fetches, and of one that multiplies."""
REGISTERS = 168
"""Of a thread on average: the chip's 65 536 over twelve warps."""


@gluon.jit
def _row_of(page_table, part, pages, first, rows, PAGE: gl.constexpr, PART: gl.constexpr):
    """Row of the cache at which part number `part` of a request's slots begins, PART slots of a
    page: `rows`, behind the cache, if its page is none of the request's or it is not seen.
    """
    page = part // (PAGE // PART)
    number = gl.load(page_table + gl.minimum(page, pages - 1))
    seen = (page < pages) & ((part + 1) * PART > first)
    return gl.where(seen, number * PAGE + part % (PAGE // PART) * PART, rows)


@gluon.jit
def _fetch(
    kv, tiles, bars, page_table, h, first, last, blocks, length, rows, SIZE: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring K and V of the blocks `last`, `last` - 1 ..., a page or a block at a time. What has no
    slot that is seen becomes 0: what it holds is of nobody, or of another request.
    """
    k_tiles, v_tiles = tiles
    k_ready, k_empty, v_ready, v_empty, _clean = bars
    PART: gl.constexpr = PAGE if PAGE < BLOCK_N else BLOCK_N
    PARTS: gl.constexpr = BLOCK_N // PART
    pages = gl.cdiv(length, PAGE)
    for i in range(blocks):
        stage = i % STAGES
        free = (i // STAGES & 1) ^ 1
        begin = (last - i) * PARTS
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_ready.index(stage), BLOCK_N * SIZE * 2)
        for p in gl.static_range(PARTS):
            row = _row_of(page_table, begin + p, pages, first, rows, PAGE, PART)
            tma.async_copy_global_to_shared(
                kv,
                [row, h * 2 * SIZE],
                k_ready.index(stage),
                k_tiles.index(stage).slice(p * PART, PART, 0),
            )
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_ready.index(stage), BLOCK_N * SIZE * 2)
        for p in gl.static_range(PARTS):
            row = _row_of(page_table, begin + p, pages, first, rows, PAGE, PART)
            tma.async_copy_global_to_shared(
                kv,
                [row, h * 2 * SIZE + SIZE],
                v_ready.index(stage),
                v_tiles.index(stage).slice(p * PART, PART, 0),
            )


@gluon.jit
def _clean(
    WHO: gl.constexpr, v_tile, clean, phase, begin, low, high, IO: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Each group clears the slots outside of [low, high) in its half of a block of V that begins
    at `begin`: nobody sees them, but they may hold NaN, and 0 * NaN is no 0.
    """
    HALF: gl.constexpr = BLOCK_N // GROUPS
    part = v_tile.slice(WHO * HALF, HALF, 0)
    slots = begin + WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(1, IO))
    part.store(gl.where(((slots >= low) & (slots < high))[:, None], part.load(IO), 0.0))
    fence_async_shared()
    mbarrier.arrive(clean, count=1)
    mbarrier.wait(clean, phase)


@gluon.jit
def _scores(
    s, block, position, factor, soft_cap, S: gl.constexpr, BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr, CAPPED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of a block of slots, capped and masked."""
    if CAPPED:
        s = squash(s * factor, soft_cap)
    if MASKED:
        slot = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        seen = slot[None, :] <= position[:, None]
        if WINDOW > 0 or CHUNK > 0:
            seen = seen & (slot[None, :] >= oldest_seen(position, WINDOW, CHUNK)[:, None])
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _step(
    i, acc, weight, shrink, top, total, position, tile, tiles, bars, last, blocks, factor, soft_cap,
    S: gl.constexpr, OUT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr, CAPPED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and weights of the i-th block, beside the product of the weights before with V.

    The K of the block is there already. What was summed shrinks to the last maximum while the
    scores are on their way, so that the product has not to wait for that.
    """
    k_tiles, v_tiles = tiles
    k_ready, k_empty, v_ready, v_empty, _clean = bars
    stage = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(v_ready.index(before), (i - 1) // STAGES & 1)
    zero = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, S)
    k = k_tiles.index(stage).permute((1, 0))
    s = warpgroup_mma(tile, k, zero, use_acc=False, is_async=True)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    acc = warpgroup_mma(weight, v_tiles.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = _scores(s, last - i, position, factor, soft_cap, S, BLOCK_N, WINDOW, CHUNK, CAPPED, MASKED)
    unit = 1.0 if CAPPED else factor
    best = gl.maximum(top, gl.max(s, 1))
    base = best * unit
    if MASKED:  # a row that has seen no slot yet has no maximum
        base = gl.where(best == float("-inf"), 0.0, base)
    shrink = gl.exp2(top * unit - base)
    p = gl.exp2(s * unit - base[:, None])
    total = total * shrink + gl.sum(p, 1)
    following = gl.convert_layout(p.to(tile.dtype), gl.DotOperandLayout(0, OUT, 2))
    # The compiler moves what is above behind a wait for the product, unless something divides
    # them: the wait for the next K does.
    coming = i + 1
    mbarrier.wait(k_ready.index(coming % STAGES), coming // STAGES & 1, pred=coming < blocks)
    acc, weight, following, total = warpgroup_mma_wait(0, deps=(acc, weight, following, total))
    mbarrier.arrive(v_empty.index(before), count=1)
    return acc, following, shrink, best, total


@gluon.jit
def _attend(
    WHO: gl.constexpr, q, out, sinks, sums, marks, tiles, q_tiles, bars, h, token, stop, length,
    past, first, last, blocks, masked, whole, part, parts, tokens, factor, soft_cap, q_token_stride,
    q_head_stride, GROUP: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    CAPPED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """The rows of one group of warps. Of its blocks the first `masked` and those from `whole` on
    hold slots that not every row sees. One of several parts leaves its sums in `sums`
    [part tok head SIZE] and their maxima and weights in `marks` [part tok head 2].
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    BLOCK_Q: gl.constexpr = BLOCK_M // GROUP
    k_tiles, v_tiles = tiles
    k_ready, k_empty, v_ready, _v_empty, clean = bars

    r = WHO * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, IO))
    d = gl.arange(0, SIZE, gl.SliceLayout(0, IO))
    mine = token + r // GROUP
    head = h * GROUP + r % GROUP
    rows = ((r < BLOCK_Q * GROUP) & (mine < stop))[:, None]
    place = mine.to(gl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    tile = q_tiles.index(WHO)
    tile.store(gl.load(q + place, mask=rows, other=0.0))
    fence_async_shared()
    behind = ((last + 1) * BLOCK_N > length).to(gl.int32)
    if behind > 0:
        mbarrier.wait(v_ready.index(0), 0)
        _clean(WHO, v_tiles.index(0), clean, 0, last * BLOCK_N, 0, length, IO, BLOCK_N)

    own = WHO * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, S))
    position = past + token + own // GROUP
    zero = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, S)
    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma(tile, k_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    s = _scores(s, last, position, factor, soft_cap, S, BLOCK_N, WINDOW, CHUNK, CAPPED, True)
    unit = 1.0 if CAPPED else factor
    top = gl.max(s, 1)
    base = gl.where(top == float("-inf"), 0.0, top * unit)
    p = gl.exp2(s * unit - base[:, None])
    total = gl.sum(p, 1)
    shrink = gl.full_like(total, 1.0)
    weight = gl.convert_layout(p.to(tile.dtype), gl.DotOperandLayout(0, OUT, 2))
    acc = gl.zeros([GROUP_ROWS, SIZE], gl.float32, OUT)

    mbarrier.wait(k_ready.index(1), 0, pred=blocks > 1)
    masked = gl.minimum(gl.maximum(masked, 1), blocks)
    whole = gl.maximum(gl.minimum(whole, blocks), masked)
    for i in range(1, masked):
        acc, weight, shrink, top, total = _step(
            i, acc, weight, shrink, top, total, position, tile, tiles, bars, last, blocks, factor,
            soft_cap, S, OUT, BLOCK_N, STAGES, WINDOW, CHUNK, CAPPED, True,
        )  # fmt: skip
    for i in range(masked, whole):
        acc, weight, shrink, top, total = _step(
            i, acc, weight, shrink, top, total, position, tile, tiles, bars, last, blocks, factor,
            soft_cap, S, OUT, BLOCK_N, STAGES, WINDOW, CHUNK, CAPPED, False,
        )  # fmt: skip
    if WINDOW > 0 or CHUNK > 0:
        for i in range(whole, blocks):
            acc, weight, shrink, top, total = _step(
                i, acc, weight, shrink, top, total, position, tile, tiles, bars, last, blocks,
                factor, soft_cap, S, OUT, BLOCK_N, STAGES, WINDOW, CHUNK, CAPPED, True,
            )  # fmt: skip

    before = (blocks - 1) % STAGES
    mbarrier.wait(v_ready.index(before), (blocks - 1) // STAGES & 1)
    if WINDOW > 0 or CHUNK > 0:
        lowest = (last + 1 - blocks) * BLOCK_N
        if lowest < first:
            _clean(WHO, v_tiles.index(before), clean, behind, lowest, first, length, IO, BLOCK_N)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    acc = warpgroup_mma(weight, v_tiles.index(before), acc, is_async=True)
    acc, weight = warpgroup_mma_wait(0, deps=(acc, weight))
    real = own < BLOCK_Q * GROUP
    if parts > 1:
        left = real & (token + own // GROUP < stop)
        mark = (part * tokens + token + own // GROUP) * (HEADS * GROUP) + h * GROUP + own % GROUP
        gl.store(marks + 2 * mark, top * unit, mask=left)
        gl.store(marks + 2 * mark + 1, total, mask=left)
        sum_row = gl.convert_layout(mark, gl.SliceLayout(1, OUT)).to(gl.int64) * SIZE
        sum_left = gl.convert_layout(left, gl.SliceLayout(1, OUT))
        column = gl.arange(0, SIZE, gl.SliceLayout(0, OUT))
        gl.store(sums + sum_row[:, None] + column[None, :], acc, mask=sum_left[:, None])
    else:
        weights = with_sinks(total, top * unit, sinks, h * GROUP + own % GROUP, real, SINKS)
        mean = acc / gl.convert_layout(weights, gl.SliceLayout(1, OUT))[:, None]
        tile.store(mean.to(tile.dtype))
        row = mine.to(gl.int64) * (HEADS * GROUP * SIZE) + head * SIZE
        gl.store(out + row[:, None] + d[None, :], tile.load(IO), mask=rows)


@gluon.jit
def _order(number, blocks, mixed, HEADS: gl.constexpr):
    """KV head and block of the program `number`. Late positions, which see most, come first.

    One head after the other goes through its blocks, so that programs that run at the same time
    read the same slots: a long cache does not fit the L2 for all heads. The last `mixed` blocks
    come for all heads together, so that the last programs to begin are the shortest of all.
    """
    alone = gl.maximum(blocks - mixed, 0)
    rest = number - alone * HEADS
    turn = gl.where(rest < 0, number % gl.maximum(alone, 1), alone + rest // HEADS)
    h = gl.where(rest < 0, number // gl.maximum(alone, 1), rest % HEADS)
    return h, blocks - 1 - turn


@gluon.jit(
    do_not_specialize=["tokens", "requests", "rows", "mixed"],
    do_not_specialize_on_alignment=["page_table", "query_start", "kv_lens", "counts"],
)
def hopper_kernel(
    kv, q, page_table, query_start, kv_lens, counts, out, sinks, sums, marks, splits, scale,
    soft_cap, tokens, requests, rows, mixed, q_token_stride, q_head_stride, table_stride,
    GROUP: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr, SINKS: gl.constexpr, CAPPED: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_R: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    LEAST: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (HEADS, blocks, parts). `kv` describes the cache as [rows, 2*HEADS*SIZE]. Leaves the
    first counts[0] tokens to the decode kernel; rows of no request become 0.

    A part has LEAST blocks of slots or more. SPLITS: there may be several parts, and `splits`
    [tok HEADS] becomes their number, of which two and more are left to `merge_kernel`.
    """
    BLOCK_Q: gl.constexpr = BLOCK_M // GROUP
    number = gl.program_id(0) + gl.program_id(1) * HEADS
    i = gl.arange(0, BLOCK_R, gl.BlockedLayout([1], [32], [4], [0]))
    wait(OVERLAP)
    decodes, live = gl.load(counts), gl.load(counts + 1)
    # The blocks of decodes, which begin each request anew, have nothing to do.
    h, block = _order(number, gl.num_programs(1), mixed + decodes, HEADS)
    starts = gl.load(query_start + i, mask=i <= requests, other=0)
    # The last request that begins at or before the block; number `live` stands for the padding.
    begun = (starts // BLOCK_Q + i <= block) & (i <= live)
    request = gl.sum(begun.to(gl.int32), 0) - 1
    begin = gl.load(query_start + request)
    stop = gl.load(query_start + request + 1, mask=request < live, other=tokens)
    length = gl.load(kv_lens + request, mask=request < live, other=0)
    token = begin + (block - begin // BLOCK_Q - request) * BLOCK_Q
    if (request < decodes) | (token >= stop):
        return
    part = gl.program_id(2)
    if request == live:
        if part > 0:
            return
        IO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
        r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, IO))
        d = gl.arange(0, SIZE, gl.SliceLayout(0, IO))
        mine = token + r // GROUP
        row = mine.to(gl.int64) * (HEADS * GROUP * SIZE) + (h * GROUP + r % GROUP) * SIZE
        zeros = gl.zeros([BLOCK_M, SIZE], out.dtype.element_ty, IO)
        none = (r < BLOCK_Q * GROUP) & (mine < stop)
        gl.store(out + row[:, None] + d[None, :], zeros, mask=none[:, None])
        if SPLITS:
            gl.store(splits + mine * HEADS + h, gl.full_like(mine, 1), mask=none)
        return
    past = length - stop  # position - token
    final = past + gl.minimum(token + BLOCK_Q, stop)
    last = (final - 1) // BLOCK_N
    masked = last + 1 - (past + token + 1) // BLOCK_N
    first, whole = 0, last + 1
    if WINDOW > 0 or CHUNK > 0:
        first = oldest_seen(past + token, WINDOW, CHUNK)
        whole = last + 1 - gl.cdiv(oldest_seen(final - 1, WINDOW, CHUNK), BLOCK_N)
    blocks = last + 1 - first // BLOCK_N
    parts = gl.num_programs(2)  # a constant would drop what is handed on, which Triton 3.6 fails at
    if SPLITS:
        each = gl.maximum(gl.cdiv(blocks, gl.num_programs(2)), LEAST)
        parts = gl.cdiv(blocks, each)
        if part >= parts:
            return
        if part == 0:
            mine = token + gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
            own = mine < gl.minimum(token + BLOCK_Q, stop)
            gl.store(splits + mine * HEADS + h, gl.zeros_like(mine) + parts, mask=own)
        last -= part * each
        masked -= part * each
        whole -= part * each
        blocks = gl.minimum(each, blocks - part * each)
    page_table += request.to(gl.int64) * table_stride

    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [GROUPS, GROUP_ROWS, SIZE], TILE)
    k_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, BLOCK_N, SIZE], TILE)
    v_tiles = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, BLOCK_N, SIZE], TILE)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    clean = gl.allocate_shared_memory(gl.int64, [1], BARS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    mbarrier.init(clean, count=GROUPS)
    tiles = (k_tiles, v_tiles)
    bars = (k_ready, k_empty, v_ready, v_empty, clean)
    factor = scale * LOG2_E
    gl.warp_specialize(
        [
            (_attend, (
                0, q, out, sinks, sums, marks, tiles, q_tiles, bars, h, token, stop, length,
                past, first, last, blocks, masked, whole, part, parts, tokens, factor, soft_cap,
                q_token_stride, q_head_stride, GROUP, HEADS, SIZE, BLOCK_N, STAGES, WINDOW, CHUNK,
                CAPPED, SINKS,
            )),
            (_attend, (
                1, q, out, sinks, sums, marks, tiles, q_tiles, bars, h, token, stop, length,
                past, first, last, blocks, masked, whole, part, parts, tokens, factor, soft_cap,
                q_token_stride, q_head_stride, GROUP, HEADS, SIZE, BLOCK_N, STAGES, WINDOW, CHUNK,
                CAPPED, SINKS,
            )),
            (_fetch, (
                kv, tiles, bars, page_table, h, first, last, blocks, length, rows, SIZE, PAGE,
                BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [GROUP_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["counts"])
def merge_kernel(
    sums, marks, splits, counts, sinks, out, tokens, GROUP: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, SINKS: tl.constexpr, BLOCK_G: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token, KV head): what `hopper_kernel` left of tokens of several parts."""
    t, h = tl.program_id(0), tl.program_id(1)
    wait(OVERLAP)
    if t < tl.load(counts):
        return
    parts = tl.load(splits + t * HEADS + h)
    if parts < 2:
        return
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, SIZE)
    real = g < GROUP
    acc = tl.zeros([BLOCK_G, SIZE], tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for part in range(parts):
        row = (part * tokens + t) * (HEADS * GROUP) + h * GROUP + g
        own_top = tl.load(marks + 2 * row, mask=real, other=float("-inf"))
        own_total = tl.load(marks + 2 * row + 1, mask=real, other=0.0)
        place = sums + row.to(tl.int64)[:, None] * SIZE + d[None, :]
        own = tl.load(place, mask=real[:, None], other=0.0)
        best = tl.maximum(top, own_top)
        base = tl.where(best == float("-inf"), 0.0, best)
        shrink, share = tl.exp2(top - base), tl.exp2(own_top - base)
        acc = acc * shrink[:, None] + own * share[:, None]
        total = total * shrink + own_total * share
        top = best
    total = with_sinks(total, top, sinks, h * GROUP + g, real, SINKS)
    place = out + (t.to(tl.int64) * HEADS + h) * (GROUP * SIZE) + g[:, None] * SIZE + d[None, :]
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
