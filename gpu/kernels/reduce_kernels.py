"""The sum over ranks by reading what the others wrote, with the add and the norm behind it."""

import triton
import triton.language as tl

from .overlap import wait

SPINS = tl.constexpr(20_000_000)
"""How often a program looks for a peer that does not come: half a minute or more. Whoever started
the ranks has ended them by then.
"""


@triton.jit
def _told(flag):
    """What a peer has written at `flag`; what it wrote before can be read from here on."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [flag], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _rows_of(buffers, rank, dtype: tl.constexpr):
    """Where a rank's rows lie. The compiler has to be told that wide loads may read them."""
    return tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _signal(x):
    """What all threads of the program have written before the barrier in front of this can be read
    by all GPUs before what is written after it.
    """
    return tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows", "max_rows"])
def reduce_kernel(
    x, residual, weight, buffers, flags, counts, late, rows, eps, x_stride, residual_stride,
    max_rows, N: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    NORM: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (share of the rows): no more programs than run at once, as they wait for each other. x
    becomes the sum of x over all ranks; with NORM the residual becomes its sum with that, and x
    the norm of it. A program shows CHUNK of its rows to the peers, then the next ones, and adds
    up the ones before while those are on their way.

    `buffers` and `flags` [rank] int64 are addresses on each rank: of [2, max_rows, N], which takes
    what that rank adds, and of [rank, max_rows] int32, the number of the last sum for which a
    peer's row is there. `counts` [max_rows] int32: how many sums each row had, which wraps; its
    rows lie in one of two places by turns. Two are enough: who has begun the sum after the next one
    has heard from all that they have ended this one. `late` [1] int32 is 1 once a peer did not
    come, after which all sums are NaN.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    n, i = tl.arange(0, BLOCK_N), tl.arange(0, CHUNK)
    mask = n < N
    dtype: tl.constexpr = x.dtype.element_ty
    if NORM:
        w = tl.load(weight + n, mask=mask, other=0.0).to(tl.float32)
    mine = _rows_of(buffers, RANK, dtype)
    ours = tl.load(flags + RANK).to(tl.pointer_type(tl.int32))
    wait(OVERLAP)
    missing = tl.load(late)
    step = CHUNK * programs
    for begin in tl.range(program, rows + step, step):
        if begin < rows:
            for row in tl.range(begin, tl.minimum(begin + step, rows), programs):
                turn = ((tl.load(counts + row) + 1) & 1) * max_rows
                own = tl.load(x + row.to(tl.int64) * x_stride + n, mask=mask)
                tl.store(mine + (turn + row).to(tl.int64) * N + n, own, mask=mask)
            chunk = begin + programs * i
            numbers = tl.load(counts + chunk, mask=chunk < rows, other=0) + 1
            tl.debug_barrier()  # all threads have written before one of them says so
            _signal(program)
            for peer in tl.static_range(WORLD):
                if peer != RANK:
                    theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + RANK * max_rows
                    tl.store(theirs + chunk, numbers, mask=chunk < rows)
        if begin >= step:
            for row in tl.range(begin - step, tl.minimum(begin, rows), programs):
                number = tl.load(counts + row) + 1
                for peer in tl.static_range(WORLD):
                    if peer != RANK:
                        spins = 0
                        # A peer that has heard from this rank may be one sum ahead.
                        while (spins < SPINS) & (_told(ours + peer * max_rows + row) - number < 0):
                            spins += 1
                        missing = tl.maximum(missing, (spins >= SPINS).to(tl.int32))
                at_x = x + row.to(tl.int64) * x_stride + n
                place = ((number & 1) * max_rows + row).to(tl.int64) * N + n
                total = tl.zeros([BLOCK_N], tl.float32)
                for peer in tl.static_range(WORLD):
                    if peer == RANK:
                        total += tl.load(at_x, mask=mask, other=0.0).to(tl.float32)
                    else:
                        there = _rows_of(buffers, peer, dtype)
                        part = tl.load(there + place, mask=mask, other=0.0, cache_modifier=".cg")
                        total += part.to(tl.float32)
                total = tl.where(missing > 0, float("nan"), total)
                if NORM:
                    at_residual = residual + row.to(tl.int64) * residual_stride + n
                    # As the parts rounded to what a sum of its own would give.
                    total = total.to(dtype).to(tl.float32)
                    total += tl.load(at_residual, mask=mask, other=0.0).to(tl.float32)
                    rounded = total.to(residual.dtype.element_ty)
                    tl.store(at_residual, rounded, mask=mask)
                    y = tl.where(mask, rounded.to(tl.float32), 0.0)
                    scale = tl.rsqrt(tl.sum(y * y, 0) / N + eps)
                    total = y * scale * w
                tl.store(at_x, total.to(dtype), mask=mask)
    tl.debug_barrier()  # no thread reads a row's count behind this
    for begin in tl.range(program, rows, step):
        chunk = begin + programs * i
        numbers = tl.load(counts + chunk, mask=chunk < rows, other=0) + 1
        tl.debug_barrier()
        tl.store(counts + chunk, numbers, mask=chunk < rows)
    if missing > 0:
        tl.store(late, 1)
