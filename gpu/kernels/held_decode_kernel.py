"""Paged attention of one query token a request, for few requests: registers hold K and V before the
query is there.

Of few requests it is not bytes that take time but what waits for something else. So with AHEAD a
program asks for the first block of its part, all slots but the request's last, while the launch
before still runs: in a decode step, where steps before wrote them. Each of its warps has some of
the slots, and each thread just what its own part of both products on tensor cores needs, in 16
neighbouring bytes at a time: of K any order of the entries of a head will do, as long as the query
has the same one, and of V any order of the results. Nothing goes through shared memory but the sums
of the warps.

The slots of all requests are divided evenly, as in `decode_kernel.py`, but each program goes
through the requests one after the other: there are few. How the sums of parts meet is as there.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .arithmetic import LOG2_E, oldest_seen, squash, with_sinks
from .overlap import wait

COLUMNS = gl.constexpr(8)
"""Of the right operand of a tensor core: heads of a group, `MOST_HELD_GROUP` of `launch.py`, which
imports torch.
"""
MOST_AT_ONCE = gl.constexpr(1 << 14)
"""Sums of parts that are on their way at the same time: registers hold them."""


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _warps(warps):
    return [[1 << i, 0, 0] for i in range(_log2(warps))]


@gluon.constexpr_function
def _key_layout(warps, rows, size):
    """Which thread reads what of K [warp, slot, entry]: four of a warp share a slot, and each has
    eight neighbours of every 32 entries.
    """
    near = [[0, 0, 1 << i] for i in range(3)]
    slots = [[0, 8 << i, 0] for i in range(_log2(rows // 8))]
    far = [[0, 0, 32 << i] for i in range(_log2(size // 32))]
    threads = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        [*near, *slots, *far], threads, _warps(warps), [], [warps, rows, size]
    )


@gluon.constexpr_function
def _value_layout(warps, rows, size):
    """And of V: eight of a warp share a slot, and each has eight neighbours of every 64 entries."""
    near = [[0, 0, 1 << i] for i in range(3)]
    slots = [[0, 1, 0], *([0, 8 << i, 0] for i in range(_log2(rows // 8)))]
    far = [[0, 0, 64 << i] for i in range(_log2(size // 64))]
    threads = [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    return gl.DistributedLinearLayout(
        [*near, *slots, *far], threads, _warps(warps), [], [warps, rows, size]
    )


@gluon.constexpr_function
def _sums_layout(several, warps, size):
    """Of [several, head, entry]: a thread has all of the first dimension, and four neighbours."""
    lanes = min(32, size // 4)
    of_row = max(1, size // 128)
    return gl.BlockedLayout(
        [several, 1, 4], [1, 32 // lanes, lanes], [1, max(1, warps // of_row), min(warps, of_row)],
        [2, 1, 0],
    )  # fmt: skip


@gluon.jit
def _slots_of(first, L: gl.constexpr, WARPS: gl.constexpr, SLOTS: gl.constexpr):
    """[warp, slot, 1]: which slots those of a block at `first` are. The first unit of it has 16 of
    each warp, so that a part of fewer units than a block keeps all warps busy.
    """
    w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    r = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    return first + (r // 16 * (16 * WARPS) + w * 16 + r % 16)


@gluon.jit
def _reach(length, WINDOW: gl.constexpr, CHUNK: gl.constexpr, UNIT: gl.constexpr):
    """(The first slot that the last token of `length` sees, units of slots from there on)."""
    first = length * 0
    if WINDOW > 0 or CHUNK > 0:
        first = oldest_seen(length - 1, WINDOW, CHUNK)
    return first, gl.maximum(gl.cdiv(length - first, UNIT), 1)


@gluon.jit
def _part_of(
    item, lengths, live, requests, wanted, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    UNIT: gl.constexpr, WHOLE: gl.constexpr, REQUESTS: gl.constexpr,
):  # fmt: skip
    """Which part of which request is number `item`: (request, its length, part, parts, number of
    the request's first part). All REQUESTS have about `wanted` parts; those of up to WHOLE units
    have one. Behind them come the rows of none, from `live` on.
    """
    given, total = (), item * 0
    for r in gl.static_range(REQUESTS):
        # Asked for whether there is such a request or not: no load waits for another.
        length = gl.load(lengths + gl.minimum(r, requests - 1))
        _first, units = _reach(length, WINDOW, CHUNK, UNIT)
        units = gl.where(r < live, units, 0)
        total += units
        given += ((length, units),)  # type: ignore[assignment]
    size = gl.maximum(gl.cdiv(total, wanted), 1)
    t, count, begin, split = item, item * 0, item, item * 0
    own_length, parts = item * 0 + 1, item * 0 + 1
    for r in gl.static_range(REQUESTS):
        length, units = given[r]
        of_r = gl.where(units <= WHOLE, gl.minimum(units, 1), gl.cdiv(units, size))
        own = (item >= count) & (item < count + of_r)
        t, own_length = gl.where(own, r, t), gl.where(own, length, own_length)
        begin, split = gl.where(own, count, begin), gl.where(own, item - count, split)
        parts = gl.where(own, of_r, parts)
        count += of_r
    return gl.where(item < count, t, live + item - count), own_length, split, parts, begin


@gluon.jit
def _pages_of(page_table, slot, high, PAGE: gl.constexpr):
    """The pages of slots; those of slots from `high` on are any."""
    return gl.load(page_table + gl.maximum(gl.minimum(slot, high - 1), 0) // PAGE)


@gluon.jit
def _places(
    kv, page, slot, L: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """Pointers [warp, slot, entry] to slots [warp, slot, 1] in their pages."""
    d = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    return kv + (page.to(gl.int64) * PAGE + slot % PAGE) * (2 * HEADS * SIZE) + d


@gluon.jit
def _key_operand(y, WARPS: gl.constexpr, SLOTS: gl.constexpr, SIZE: gl.constexpr):
    """K, or queries, in the order that operands have: entry 32 h + 8 t + 4 c + 2 o + p, of thread t
    of four, is at (h, c, o, t, p).
    """
    y = y.reshape([WARPS, SLOTS, SIZE // 32, 4, 2, 2, 2])
    return y.permute([0, 1, 2, 4, 5, 3, 6]).reshape([WARPS, SLOTS, SIZE])


@gluon.jit
def _value_operand(y, WARPS: gl.constexpr, SLOTS: gl.constexpr, SIZE: gl.constexpr):
    """V with entry 64 i + 8 c + e, of thread c of eight, at (i, e, c)."""
    y = y.reshape([WARPS, SLOTS, SIZE // 64, 8, 8])
    return y.permute([0, 1, 2, 4, 3]).reshape([WARPS, SLOTS, SIZE])


@gluon.jit
def _scores(
    q, k, start, high, factor, soft_cap, MMA: gl.constexpr, WARPS: gl.constexpr,
    SLOTS: gl.constexpr, SIZE: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """[warp, slot, head] in units of log2 e, -inf for slots from `high` on."""
    left: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    k = gl.convert_layout(_key_operand(k, WARPS, SLOTS, SIZE), left, assert_trivial=True)
    scores = mma_v2(k, q, gl.zeros([WARPS, SLOTS, COLUMNS], gl.float32, layout=MMA)) * factor
    if CAPPED:
        scores = squash(scores, soft_cap)
    return gl.where(_slots_of(start, MMA, WARPS, SLOTS) < high, scores, float("-inf"))


@gluon.jit
def _sum_of_values(
    p, v, MMA: gl.constexpr, WARPS: gl.constexpr, SLOTS: gl.constexpr, SIZE: gl.constexpr
):  # fmt: skip
    """[warp, entry, head] of V by weights [warp, slot, head]; entries in V's order as operands."""
    left: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    p = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(1, MMA, 2))
    v = _value_operand(v, WARPS, SLOTS, SIZE).permute([0, 2, 1])
    v = gl.convert_layout(v, left, assert_trivial=True)
    return mma_v2(v, p, gl.zeros([WARPS, SIZE, COLUMNS], gl.float32, layout=MMA))


@gluon.jit
def _finite(top):
    """What is subtracted where nothing has been seen: anything that is a number."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon.jit
def _as_rows(x, y):
    """x [head] as [head, 1] beside y [head, entry]."""
    return gl.convert_layout(x, gl.SliceLayout(1, y.type.layout))[:, None]


@gluon.jit
def _meet(acc, top, total):
    """(acc [head, entry], top, total [head]) of those of several, which a thread has all of."""
    best = gl.max(top, 0)
    share = gl.exp2(top - _finite(best)[None, :])
    return gl.sum(acc * share[:, :, None], 0), best, gl.sum(total * share, 0)


@gluon.jit
def _put(
    out, acc, top, total, sinks, GROUP: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """Write the mean of ROWS heads, GROUP of which there are."""
    L: gl.constexpr = acc.type.layout
    g = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, SIZE, layout=gl.SliceLayout(0, L))
    top = gl.convert_layout(top, gl.SliceLayout(1, L))
    total = gl.convert_layout(total, gl.SliceLayout(1, L))
    total = with_sinks(total, top, sinks, g, g < GROUP, SINKS)
    mean = (acc / total[:, None]).to(out.dtype.element_ty)
    gl.store(out + g[:, None] * SIZE + d[None, :], mean, mask=(g < GROUP)[:, None])


@gluon.jit
def _merge(
    sums, marks, out, sinks, parts, GROUP: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """Write the mean of all parts, added up in their order: `sums` [part GROUP SIZE], `marks`
    [part 2 GROUP].
    """
    PARTS: gl.constexpr = min(16, MOST_AT_ONCE // (ROWS * SIZE))
    L: gl.constexpr = _sums_layout(PARTS, gl.num_warps(), SIZE)
    HEAD: gl.constexpr = gl.SliceLayout(2, L)
    p = gl.arange(0, PARTS, layout=gl.SliceLayout(1, HEAD))[:, None]
    g = gl.arange(0, ROWS, layout=gl.SliceLayout(0, HEAD))[None, :]
    p3 = gl.arange(0, PARTS, layout=gl.SliceLayout(1, HEAD))[:, None][:, :, None]
    g3 = g[:, :, None]
    d = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    acc = gl.zeros([ROWS, SIZE], gl.float32, layout=gl.SliceLayout(0, L))
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, HEAD))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(0, HEAD))
    for start in range(0, parts, PARTS):
        real = (start + p < parts) & (g < GROUP)
        mark = marks + (start + p) * (2 * GROUP) + g
        tops = gl.load(mark, mask=real, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(mark + GROUP, mask=real, other=0.0, cache_modifier=".cg")
        place = sums + ((start + p3) * GROUP + g3) * SIZE + d
        real3 = (start + p3 < parts) & (g3 < GROUP)
        each = gl.load(place, mask=real3, other=0.0, cache_modifier=".cg")
        now, best, of_parts = _meet(each, tops, totals)
        newest = gl.maximum(top, best)
        share, shrink = gl.exp2(best - _finite(newest)), gl.exp2(top - _finite(newest))
        acc = acc * _as_rows(shrink, acc) + now * _as_rows(share, acc)
        total = total * shrink + of_parts * share
        top = newest
    _put(out, acc, top, total, sinks, GROUP, ROWS, SIZE, SINKS)


@gluon.jit(
    do_not_specialize=["wanted", "tokens", "requests"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "counts"],
)
def held_decode_kernel(
    q, kv, page_table, kv_lens, counts, out, sinks, sums, marks, arrived, scale, soft_cap,
    q_token_stride, q_head_stride, table_stride, wanted, tokens, requests,
    MIXED: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr,
    PAGE: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, CAPPED: gl.constexpr,
    SINKS: gl.constexpr, SPLIT: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
    SLOTS: gl.constexpr, ROWS: gl.constexpr, REQUESTS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (KV head, part): `wanted` parts and one more for each of `tokens`, or if not SPLIT one
    for each, where no request has more slots than a block. A block is of SLOTS slots for each of
    WARPS warps, a unit of 16. GROUP is at most 8, ROWS its power of 2, REQUESTS at least `tokens`.
    In a mixed step only the first counts[0] tokens are taken, else counts[1].
    """
    BLOCK: gl.constexpr = WARPS * SLOTS
    UNIT: gl.constexpr = WARPS * 16
    KEYS: gl.constexpr = _key_layout(WARPS, SLOTS, SIZE)
    VALUES: gl.constexpr = _value_layout(WARPS, SLOTS, SIZE)
    QUERY: gl.constexpr = _key_layout(WARPS, COLUMNS, SIZE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    right: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    h, item = gl.program_id(0), gl.program_id(1)
    live = gl.load(counts + (0 if MIXED else 1))
    if SPLIT:
        t, length, split, parts, begun = _part_of(
            item, kv_lens, live, requests, wanted, WINDOW, CHUNK, UNIT, SLOTS // 16, REQUESTS
        )
    else:
        t, split, parts, begun = item, item * 0, item * 0 + 1, item
        length = gl.load(kv_lens + gl.minimum(t, requests - 1))
    # Who has no part ends before the wait; one in each launch has to wait, or this launch would
    # seem done before the one in front of it.
    if (item > 0) & (t >= tokens):
        return
    first, units = _reach(length, WINDOW, CHUNK, UNIT)
    part = gl.cdiv(units, parts) * UNIT
    low = first + split * part
    high = gl.minimum(low + part, length)
    page_table += gl.minimum(t, requests - 1).to(gl.int64) * table_stride
    kv += h * 2 * SIZE
    end = gl.where(t < live, high, 0)
    slot, v_slot = _slots_of(low, KEYS, WARPS, SLOTS), _slots_of(low, VALUES, WARPS, SLOTS)
    page, v_page = _pages_of(page_table, slot, end, PAGE), _pages_of(page_table, v_slot, end, PAGE)
    place = _places(kv, page, slot, KEYS, HEADS, SIZE, PAGE)
    v_place = _places(kv + SIZE, v_page, v_slot, VALUES, HEADS, SIZE, PAGE)
    # Those of the next block, so that its K and V will not wait for them.
    page = _pages_of(page_table, slot + BLOCK, end, PAGE)
    v_page = _pages_of(page_table, v_slot + BLOCK, end, PAGE)
    last = length - 1
    if AHEAD:
        old = gl.minimum(end, last)
        k = gl.load(place, mask=slot < old, other=0.0)
        v = gl.load(v_place, mask=v_slot < old, other=0.0)
    wait(OVERLAP)
    if t >= live:
        if not MIXED and t < tokens:
            L: gl.constexpr = gl.SliceLayout(0, _sums_layout(1, WARPS, SIZE))
            no_g = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))[:, None]
            no_d = gl.arange(0, SIZE, layout=gl.SliceLayout(0, L))[None, :]
            none = gl.zeros([ROWS, SIZE], out.dtype.element_ty, layout=L)
            to = out + (t.to(gl.int64) * HEADS + h) * (GROUP * SIZE)
            gl.store(to + no_g * SIZE + no_d, none, mask=no_g < GROUP)
        return
    g = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, QUERY)))[None, :, None]
    i = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUERY)))[None, None, :]
    q_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUERY)))[:, None, None]
    of_q = q + t.to(gl.int64) * q_token_stride + (h * GROUP + g) * q_head_stride + i
    # All warps have the same.
    query = gl.load(of_q + q_w * 0, mask=(g < GROUP) & (q_w < WARPS), other=0.0)
    if AHEAD:
        k = gl.load(place, mask=(slot == last) & (slot < high), other=k)
        v = gl.load(v_place, mask=(v_slot == last) & (v_slot < high), other=v)
    else:
        k = gl.load(place, mask=slot < high, other=0.0)
        v = gl.load(v_place, mask=v_slot < high, other=0.0)
    query = _key_operand(query, WARPS, COLUMNS, SIZE).permute([0, 2, 1])
    query = gl.convert_layout(query, right, assert_trivial=True)
    factor = scale * LOG2_E
    scores = _scores(query, k, low, high, factor, soft_cap, MMA, WARPS, SLOTS, SIZE, CAPPED)
    top = gl.max(scores, 1)
    weight = gl.exp2(scores - _finite(top)[:, None, :])
    total = gl.sum(weight, 1)
    acc = _sum_of_values(weight, v, MMA, WARPS, SLOTS, SIZE)
    for start in range(low + BLOCK, high, BLOCK):
        slot += BLOCK
        v_slot += BLOCK
        place = _places(kv, page, slot, KEYS, HEADS, SIZE, PAGE)
        v_place = _places(kv + SIZE, v_page, v_slot, VALUES, HEADS, SIZE, PAGE)
        k = gl.load(place, mask=slot < high, other=0.0)
        v = gl.load(v_place, mask=v_slot < high, other=0.0)
        page = _pages_of(page_table, slot + BLOCK, high, PAGE)
        v_page = _pages_of(page_table, v_slot + BLOCK, high, PAGE)
        scores = _scores(query, k, start, high, factor, soft_cap, MMA, WARPS, SLOTS, SIZE, CAPPED)
        best = gl.maximum(top, gl.max(scores, 1))
        weight = gl.exp2(scores - _finite(best)[:, None, :])
        shrink = gl.exp2(top - _finite(best))
        total = total * shrink + gl.sum(weight, 1)
        acc = acc * shrink[:, None, :] + _sum_of_values(weight, v, MMA, WARPS, SLOTS, SIZE)
        top = best
    # The sums of all warps, entries in their own order again.
    acc = acc.reshape([WARPS, SIZE // 64, 8, 8, COLUMNS]).permute([0, 4, 1, 3, 2])
    SUMS: gl.constexpr = _sums_layout(WARPS, WARPS, SIZE)
    acc = gl.convert_layout(acc.reshape([WARPS, COLUMNS, SIZE]), SUMS)
    top = gl.convert_layout(top, gl.SliceLayout(2, SUMS))
    total = gl.convert_layout(total, gl.SliceLayout(2, SUMS))
    sum_, best, total = _meet(acc, top, total)
    sinks += h * GROUP
    result = out + (t.to(gl.int64) * HEADS + h) * (GROUP * SIZE)
    if not SPLIT or parts == 1:
        _put(result, sum_, best, total, sinks, GROUP, COLUMNS, SIZE, SINKS)
    else:
        own = h * gl.num_programs(1) + begun
        sums += own.to(gl.int64) * (GROUP * SIZE)
        marks += own * (2 * GROUP)
        ROW: gl.constexpr = sum_.type.layout
        to_g = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, ROW))
        to_d = gl.arange(0, SIZE, layout=gl.SliceLayout(0, ROW))
        to = sums + (split * GROUP + to_g[:, None]) * SIZE + to_d[None, :]
        gl.store(to, sum_, mask=(to_g < GROUP)[:, None])
        mark_g = gl.arange(0, COLUMNS, layout=best.type.layout)
        gl.store(marks + split * 2 * GROUP + mark_g, best, mask=mark_g < GROUP)
        gl.store(marks + (split * 2 + 1) * GROUP + mark_g, total, mask=mark_g < GROUP)
        tl.debug_barrier()  # all threads have written before one of them says so
        if gl.atomic_add(arrived + t * HEADS + h, 1, sem="acq_rel") == parts - 1:
            gl.store(arrived + t * HEADS + h, 0)
            _merge(sums, marks, result, sinks, parts, GROUP, ROWS, SIZE, SINKS)
