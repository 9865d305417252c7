"""Products of a few rows with a weight [n k] on tensor cores, where registers hold a good part of
the weight before the inputs are there.

The weight is the left operand, as in `tile_kernel`, but nothing goes through shared memory except
the sums of the warps, each of which has a slice of k. Of 16 rows and 16 entries of k a thread holds
two rows and four entries. Which entries these are is free, as long as both operands have the same
ones: a sum over k minds no order. So a thread takes 16 neighbouring bytes at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .arithmetic import activated
from .fragment_kernel import step_layout
from .overlap import wait

STEP = gl.constexpr(64)
"""Entries of k that a warp takes at a time."""


@gluon.jit
def _operand(y, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Entries [warp row STEP] in the order that operands have: entry 32 h + 8 t + 4 c + 2 o + p, of
    thread t of four, is at (h, c, o, t, p).
    """
    y = y.reshape([WARPS, ROWS, 2, 4, 2, 2, 2])
    return y.permute([0, 1, 2, 4, 5, 3, 6]).reshape([WARPS, ROWS, STEP])


@gluon.jit
def rows_of(r, first, N: gl.constexpr, GATED: gl.constexpr):
    """(result, row of the weight) that row r of a block of the left operand is for. If GATED, rows
    r and r + 8, which are one thread's, are of one result: its gate, and N rows on what goes with
    it.
    """
    if GATED:
        n = first + r // 16 * 8 + r % 8
        return n, n + r // 8 % 2 * N
    else:
        return first + r, first + r


@gluon.jit(do_not_specialize=["rows"])
def held_kernel(
    x, weight, bias, out, rows, x_stride, weight_stride, N: gl.constexpr, K: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr, M: gl.constexpr,
    BLOCK_N: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (block of results). M (8, 16 or 32) are all rows. A program has BLOCK_N rows of the
    weight, AHEAD steps of which it asks for before its inputs are there. K is a multiple of
    WARPS * STEP.

    GATED: N results of a weight [2N k], gate and up rounded as they are where they are stored.
    """
    WEIGHT: gl.constexpr = step_layout(WARPS, BLOCK_N, 3, True)
    TOKENS: gl.constexpr = step_layout(WARPS, M, 3, True)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    slice_: gl.constexpr = K // WARPS
    steps: gl.constexpr = slice_ // STEP
    results: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    even: gl.constexpr = N % results == 0
    first = gl.program_id(0) * results
    w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WEIGHT)))[:, None, None]
    r = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, WEIGHT)))[None, :, None]
    j = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, WEIGHT)))[None, None, :]
    n, row = rows_of(r, first, N, GATED)
    place = weight + row.to(gl.int64) * weight_stride + w * slice_ + j
    known = None if even else (n < N) & (w < WARPS) & (j < STEP)
    nothing = None if even else 0.0
    m = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, TOKENS)))[None, :, None]
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, TOKENS)))[:, None, None]
    i = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, TOKENS)))[None, None, :]
    of_x = x + m.to(gl.int64) * x_stride + x_w * slice_ + i
    real = (m < rows) & (x_w < WARPS) & (i < STEP)
    total = gl.zeros([WARPS, BLOCK_N, M], gl.float32, layout=mma)
    asked = ()
    for s in gl.static_range(steps + AHEAD):
        if s == AHEAD:
            wait(OVERLAP)
        if s < steps:
            # Past the L1 cache, which has x for the programs of a processor.
            asked += (gl.load(place + s * STEP, mask=known, other=nothing, cache_modifier=".cg"),)  # type: ignore[assignment]
        if s >= AHEAD:
            a = _operand(asked[s - AHEAD], BLOCK_N, WARPS)
            b = _operand(gl.load(of_x + (s - AHEAD) * STEP, mask=real, other=0.0), M, WARPS)
            a = gl.convert_layout(a, left, assert_trivial=True)
            b = gl.convert_layout(b.permute([0, 2, 1]), right, assert_trivial=True)
            total = mma_v2(a, b, total)
    y = gl.sum(total, 0)
    if HAS_BIAS:
        end: gl.constexpr = y.type.layout
        end_r = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, end))
        end_n, end_row = rows_of(end_r, first, N, GATED)
        added = gl.load(bias + end_row, mask=end_n < N, other=0.0)
        y = y + added.to(gl.float32)[:, None]
    if GATED:
        pairs = y.to(out.dtype.element_ty).to(gl.float32).reshape([BLOCK_N // 16, 2, 8, M])
        gate, up = gl.split(pairs.permute([0, 2, 3, 1]))
        y = activated(gate, up, GELU).reshape([results, M])
    put: gl.constexpr = y.type.layout
    to_n = first + gl.arange(0, results, layout=gl.SliceLayout(1, put))
    to_m = gl.arange(0, M, layout=gl.SliceLayout(0, put))
    to = out + to_m.to(gl.int64)[None, :] * N + to_n[:, None]
    gl.store(to, y.to(out.dtype.element_ty), mask=(to_m < rows)[None, :] & (to_n < N)[:, None])
