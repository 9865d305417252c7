"""The sum over ranks, with the add and the norm behind it, of rows that ranks send into each
other's memory.

That memory is empty until they come: all bits are set there, which is a NaN that nobody sends. A
reader looks at its own memory until nothing of a row is empty, then empties it for the sum after
the next one. So there is no flag, nothing that waits for writes to have arrived before a flag may
say so, no way back over the link, and no more bytes than the rows have.

Each row has a count of its sums, which all ranks keep alike, as they make the same calls. It lies
in one of two places by turns. Two are enough: who sends for the sum after the next one has heard
from all that they have ended this one, and so that they have emptied its place.
"""

import triton
import triton.language as tl

from .exchange_kernels import SPINS, memory_of
from .overlap import wait


@triton.jit
def _places(x, counts, row, n, x_stride, N: tl.constexpr, WORLD: tl.constexpr):
    """Of a row: the number of its sum, the first of the boxes whose turn it is, its places in a box
    and in x.
    """
    number = tl.load(counts + row) + 1
    at = row.to(tl.int64) * N + n
    at_x = x + row.to(tl.int64) * x_stride + n
    return number, (number & 1) * (WORLD - 1), at, at_x


@triton.jit
def _send(
    at_x, mask, boxes, turn, at, step, RANK: tl.constexpr, WORLD: tl.constexpr, word: tl.constexpr
):  # fmt: skip
    """Send a row to all peers: the row."""
    empty: tl.constexpr = (1 << word.primitive_bitwidth) - 1
    own = tl.load(at_x, mask=mask, other=0.0)
    words = own.to(word, bitcast=True)
    words = tl.where(words == empty, empty - 1, words).to(word)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            box = turn + RANK - (peer < RANK)  # no rank has one of its own
            place = memory_of(boxes, peer, word) + box * step + at
            tl.store(place, words, mask=mask)
    return own


@triton.jit
def _awaited(place, mask, dtype: tl.constexpr, word: tl.constexpr):
    """(the row at `place`, 1 if it never came, else 0); the place is empty behind it."""
    empty: tl.constexpr = (1 << word.primitive_bitwidth) - 1
    words = tl.load(place, mask=mask, other=0, volatile=True)
    behind = tl.max((words == empty).to(tl.int32), 0)
    spins = 0
    while (behind > 0) & (spins < SPINS):
        words = tl.load(place, mask=mask, other=0, volatile=True)
        behind = tl.max((words == empty).to(tl.int32), 0)
        spins += 1
    tl.store(place, tl.full(place.shape, empty, word), mask=mask)
    return words.to(dtype, bitcast=True), behind


@triton.jit
def _add_up(
    own, at_x, residual, row, n, mask, w, mine, turn, at, step, missing, eps, residual_stride,
    N: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, NORM: tl.constexpr,
    word: tl.constexpr,
):  # fmt: skip
    """Add the parts of a row in the order of ranks, and the norm behind them: `missing`, or 1 if
    one did not come.
    """
    dtype: tl.constexpr = at_x.dtype.element_ty
    at_residual = residual + row.to(tl.int64) * residual_stride + n
    before = tl.zeros(n.shape, tl.float32)
    if NORM:
        before = tl.load(at_residual, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros(n.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            box = turn + peer - (peer > RANK)
            part, never = _awaited(mine + box * step + at, mask, dtype, word)
            missing = tl.maximum(missing, never)
            total += part.to(tl.float32)
    total = tl.where(missing > 0, float("nan"), total)
    if NORM:
        # As the parts rounded to what a sum of its own would give.
        total = total.to(dtype).to(tl.float32) + before
        rounded = total.to(residual.dtype.element_ty)
        tl.store(at_residual, rounded, mask=mask)
        y = tl.where(mask, rounded.to(tl.float32), 0.0)
        scale = tl.rsqrt(tl.sum(y * y, 0) / N + eps)
        total = y * scale * w
    tl.store(at_x, total.to(dtype), mask=mask)
    return missing


@triton.jit(do_not_specialize=["rows", "max_rows"])
def reduce_kernel(
    x, residual, weight, boxes, counts, late, rows, eps, x_stride, residual_stride, max_rows,
    N: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    NORM: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (share of the rows): no more programs than run at once, as they wait for each other. x
    becomes the sum of x over all ranks, in their order; with NORM the residual becomes its sum with
    that, and x the norm of it. A program sends AHEAD of its rows before it adds up the first; 0: it
    has one row.

    `boxes` [rank] int64 are addresses on each rank, of [2, peer, max_rows, N]. `counts` [max_rows]
    int32: how many sums each row had, which wraps. `late` [1] int32 is 1 once a peer did not come,
    after which all sums are NaN.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    n = tl.arange(0, BLOCK_N)
    mask = n < N
    small: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    word: tl.constexpr = tl.uint16 if small else tl.uint32
    w = tl.zeros([BLOCK_N], tl.float32)
    if NORM:
        w = tl.load(weight + n, mask=mask, other=0.0).to(tl.float32)
    mine = memory_of(boxes, RANK, word)
    step = max_rows.to(tl.int64) * N
    wait(OVERLAP)
    missing = tl.load(late)
    if AHEAD == 0:
        number, turn, at, at_x = _places(x, counts, program, n, x_stride, N, WORLD)
        own = _send(at_x, mask, boxes, turn, at, step, RANK, WORLD, word)
        missing = _add_up(
            own, at_x, residual, program, n, mask, w, mine, turn, at, step, missing, eps,
            residual_stride, N, RANK, WORLD, NORM, word,
        )  # fmt: skip
        tl.store(counts + program, number)
    else:
        for i in tl.range(tl.cdiv(rows - program, programs) + AHEAD):
            begin = program + i * programs
            if begin < rows:
                _, turn, at, at_x = _places(x, counts, begin, n, x_stride, N, WORLD)
                _send(at_x, mask, boxes, turn, at, step, RANK, WORLD, word)
            row = begin - AHEAD * programs
            if row >= 0:
                number, turn, at, at_x = _places(x, counts, row, n, x_stride, N, WORLD)
                own = tl.load(at_x, mask=mask, other=0.0)
                missing = _add_up(
                    own, at_x, residual, row, n, mask, w, mine, turn, at, step, missing, eps,
                    residual_stride, N, RANK, WORLD, NORM, word,
                )  # fmt: skip
                tl.debug_barrier()  # no thread reads the row's count behind this
                tl.store(counts + row, number)
    if missing > 0:
        tl.store(late, 1)
