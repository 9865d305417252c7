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


@triton.jit(do_not_specialize=["rows", "max_rows"])
def reduce_kernel(
    x, residual, weight, buffers, flags, counts, rows, eps, x_stride, residual_stride, max_rows,
    N: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (share of the rows): no more programs than run at once, as they wait for each other. x
    becomes the sum of x over all ranks; with NORM the residual becomes its sum with that, and x
    the norm of it.

    `buffers` and `flags` [rank] int64 are addresses on each rank: of [2 max_rows N], which takes
    what that rank adds, by turns, and of [rank] int32, the number of the last sum for which a
    peer's rows are there. Two turns are enough: who has begun the sum after the next one has heard
    from all that they have ended this one. `counts` [3] int32 are this rank's own: how many sums
    there were, which wraps; the programs that have put their rows there; and 1 once a peer did not
    come, after which all sums are NaN.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    n = tl.arange(0, BLOCK_N)
    mask = n < N
    if NORM:
        w = tl.load(weight + n, mask=mask, other=0.0).to(tl.float32)
    wait(OVERLAP)
    number = tl.load(counts) + 1
    late = tl.load(counts + 2)
    first = (number & 1) * max_rows
    mine = _rows_of(buffers, RANK, x.dtype.element_ty)
    for row in tl.range(program, rows, programs):
        own = tl.load(x + row.to(tl.int64) * x_stride + n, mask=mask)
        tl.store(mine + (first + row).to(tl.int64) * N + n, own, mask=mask)
    tl.debug_barrier()  # all threads have written before one of them says so
    if tl.atomic_add(counts + 1, 1, sem="acq_rel") == programs - 1:
        tl.store(counts + 1, 0)
        tl.store(counts, number)
        for peer in tl.static_range(WORLD):
            if peer != RANK:
                theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + RANK
                tl.atomic_xchg(theirs, number, sem="release", scope="sys")
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            ours = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + peer
            spins = 0
            # A peer that has heard from this rank may be one sum ahead.
            while (spins < SPINS) & (_told(ours) - number < 0):
                spins += 1
            late = tl.maximum(late, (spins >= SPINS).to(tl.int32))
    if late > 0:
        tl.store(counts + 2, 1)
    for row in tl.range(program, rows, programs):
        at_x = x + row.to(tl.int64) * x_stride + n
        place = (first + row).to(tl.int64) * N + n
        total = tl.zeros([BLOCK_N], tl.float32)
        for peer in tl.static_range(WORLD):
            if peer == RANK:
                total += tl.load(at_x, mask=mask, other=0.0).to(tl.float32)
            else:
                there = _rows_of(buffers, peer, x.dtype.element_ty)
                part = tl.load(there + place, mask=mask, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
        total = tl.where(late > 0, float("nan"), total)
        if NORM:
            at_residual = residual + row.to(tl.int64) * residual_stride + n
            # As the parts rounded to what a sum of its own would give.
            total = total.to(x.dtype.element_ty).to(tl.float32)
            total += tl.load(at_residual, mask=mask, other=0.0).to(tl.float32)
            rounded = total.to(residual.dtype.element_ty)
            tl.store(at_residual, rounded, mask=mask)
            y = tl.where(mask, rounded.to(tl.float32), 0.0)
            scale = tl.rsqrt(tl.sum(y * y, 0) / N + eps)
            total = y * scale * w
        tl.store(at_x, total.to(x.dtype.element_ty), mask=mask)
