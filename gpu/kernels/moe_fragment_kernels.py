"""The products of a mixture of experts whose weights are e2m1 with a scale for each 32 entries of k
(mxfp4), on tensor cores: as those of `moe_narrow_kernels.py`, by the means of `fragment_kernel`.

A thread's 16 neighbouring bytes of a row are 32 entries, which share a scale. A step of a program
is STEP entries of k for each of its warps, next to each other; k may end within a step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import DistributedLinearLayout
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .fragment_kernel import (
    STEP,
    fp4_operand,
    masked_load,
    step_layout,
    tokens_operand,
)
from .moe_narrow_kernels import _between, operand_place
from .narrow_kernels import FP4_UNITS
from .overlap import wait

WORDS = gl.constexpr(16)
"""32-bit words of a step of a row."""
GROUP = gl.constexpr(32)


@gluon.constexpr_function
def _words(warps, rows):
    """Which thread reads what of a step [warps, rows, 4 threads, 4 words]."""
    return DistributedLinearLayout(
        [
            [0, 0, 0, 1],
            [0, 0, 0, 2],
            *([0, 8 << i, 0, 0] for i in range((rows // 8).bit_length() - 1)),
        ],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [warps, rows, 4, 4],
    )


@gluon.jit
def _both(mask, other):
    """Where both masks hold; None holds everywhere."""
    if mask is None:
        return other
    else:
        return mask & other


@gluon.jit
def _ordered_operand(place, mask, M: gl.constexpr, WARPS: gl.constexpr):
    """`tokens_operand` of rows that stand in the order of `operand_place`."""
    y = masked_load(place, mask, "").reshape([WARPS, M, 4, 4, 2, 2, 2])
    return y.permute([0, 1, 3, 4, 5, 2, 6]).reshape([WARPS, M, STEP]).permute([0, 2, 1])


@gluon.jit
def _sums(
    weight, scale, of_weight, real, x, of_x, x_real, K: gl.constexpr, PARTS: gl.constexpr,
    ORDERED: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
    AHEAD: gl.constexpr, LAYOUT: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Sums [warp n m] float32 of each warp over its part of k: of rows `of_weight` [warp n 1 1]
    of the weight by rows at `of_x` [warp m 1] of x, where the masks `real` and `x_real` hold or are
    None. Warp w takes the steps w % PARTS, then every PARTS-th. ORDERED: rows of x stand in the
    order of `operand_place`.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    steps: gl.constexpr = (K + PARTS * STEP - 1) // (PARTS * STEP)
    w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    part = w[:, None, None, None] % PARTS
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    g = part * 4 + t[None, None, :, None]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    words = weight + of_weight * (K // 8) + g * 4 + j[None, None, None, :]
    scales = scale + of_weight * (K // GROUP) + g
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, TOKENS)))[:, None, None]
    i = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, TOKENS)))[None, None, :]
    at = x_w % PARTS * STEP + i
    total = gl.zeros([WARPS, BLOCK_N, M], gl.float32, layout=mma)
    asked, shares = (), ()
    # Only the last step may go beyond k: where nothing is left out, no zeros are put in its place.
    whole: gl.constexpr = K // (PARTS * STEP)
    for s in gl.static_range(steps + AHEAD):
        if s < steps:
            inside = real if s < whole else _both(real, g + s * (PARTS * 4) < K // GROUP)
            here = words + s * (PARTS * WORDS)
            asked += (masked_load(here, inside, ".cg"),)  # type: ignore[assignment]
            share = masked_load(scales + s * (PARTS * 4), inside, "")
            shares += (share,)  # type: ignore[assignment]
        if s >= AHEAD:
            a = fp4_operand(asked[s - AHEAD], shares[s - AHEAD], BLOCK_N, WARPS)
            a = gl.convert_layout(a, left, assert_trivial=True)
            k = at + (s - AHEAD) * (PARTS * STEP)
            known = x_real if s - AHEAD < whole else _both(x_real, k < K)
            if ORDERED:
                b = _ordered_operand(x + of_x + k, known, M, WARPS)
            else:
                b = tokens_operand(x + of_x + k, known, "fp4", M, WARPS)
            b = gl.convert_layout(b, right, assert_trivial=True)
            total = mma_v2(a, b, total)
    return total * FP4_UNITS


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit(do_not_specialize=["alpha", "limit"])
def expert_kernel(
    x, weight, scale, bias, out, experts, order, starts, alpha, limit, x_stride, N: gl.constexpr,
    K: gl.constexpr, EXPERTS: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr,
    SORTED: gl.constexpr, HAS_BIAS: gl.constexpr, CLAMPED: gl.constexpr, M: gl.constexpr,
    BLOCK_N: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, BLOCK_E: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (block of rows of an expert's weight, block of rows of x if SORTED, else choice).

    N results of K entries. If GATED a block of the weight has gate and up of BLOCK_N / 2 of them,
    in turns. Rows of x are those of choices if GATED, else the choices themselves, sorted; blocks
    of M of them are one expert's. Not SORTED, a choice is a block. Rows of x stand in the order of
    `operand_place`, but not tokens that were not SORTED; results of GATED do too.
    """
    wait(OVERLAP)
    LAYOUT: gl.constexpr = _words(WARPS, BLOCK_N)
    TOKENS: gl.constexpr = step_layout(WARPS, M, 5, False)
    block = gl.program_id(1)
    if SORTED:
        line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        e = gl.arange(0, BLOCK_E, layout=line)
        begin = gl.load(starts + e, mask=e < EXPERTS, other=0)
        end = gl.load(starts + 1 + e, mask=e < EXPERTS, other=0)
        blocks = (end - begin + M - 1) // M
        last = gl.associative_scan(blocks, 0, _plus)
        expert = gl.sum(((last <= block) & (e < EXPERTS)).to(gl.int32), 0)
        own = e == expert
        first = gl.sum(gl.where(own, begin + (block - last + blocks) * M, 0), 0)
        stop = gl.sum(gl.where(own, end, 0), 0)
    else:
        expert = gl.load(experts + block)
        first = block
        stop = block + 1
    if (expert >= 0) & (expert < EXPERTS):
        # The rows of the weight: of gate and up in turns, or in two halves.
        of_n: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
        n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=of_n)
        rows: gl.constexpr = 2 * N if GATED else N
        row = n // 2 + n % 2 * N if GATED and not CLAMPED else n
        row = expert.to(gl.int64) * rows + row
        of_weight = row[None, :, None, None]
        real = None if rows % BLOCK_N == 0 else (n < rows)[None, :, None, None]
        column = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, TOKENS)))
        # Columns beyond the last row of x are any, or zeros: nothing is made of their sums.
        x_real = None if SORTED else (column == 0)[None, :, None]
        if SORTED:
            m = gl.minimum(first + column, stop - 1)
            own_rows = gl.load(order + m) // TOP_K if GATED else m
            of_x = (own_rows.to(gl.int64) * x_stride)[None, :, None]
        else:
            of_x = (block // TOP_K if GATED else block).to(gl.int64) * x_stride
        total = _sums(
            weight, scale, of_weight, real, x, of_x, x_real, K, WARPS, SORTED or not GATED, M,
            BLOCK_N, WARPS, AHEAD, LAYOUT, TOKENS,
        )  # fmt: skip
        # Two rows of the weight, gate and up, are one thread's.
        results: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
        columns: gl.constexpr = M if SORTED else 1
        end_layout: gl.constexpr = gl.BlockedLayout([2, 1], [4, 8], [WARPS, 1], [0, 1])
        if not SORTED:
            total = gl.expand_dims(gl.sum(total, 2), 2)
        y = gl.convert_layout(gl.sum(total, 0), end_layout)
        line_n = gl.program_id(0) * BLOCK_N + gl.arange(
            0, BLOCK_N, layout=gl.SliceLayout(1, end_layout)
        )
        if HAS_BIAS:
            at = line_n // 2 + line_n % 2 * N if GATED and not CLAMPED else line_n
            of_bias = bias + expert.to(gl.int64) * rows + at
            y += gl.load(of_bias, mask=line_n < rows, other=0.0).to(gl.float32)[:, None]
        if GATED:
            pairs = y.reshape([results, 2, columns]).permute([0, 2, 1])
            gate, up = gl.split(pairs)
            y = _between(gate, up, alpha, limit, CLAMPED, False)
        to: gl.constexpr = y.type.layout
        out_m = first + gl.arange(0, columns, layout=gl.SliceLayout(0, to))
        out_n = gl.program_id(0) * results + gl.arange(0, results, layout=gl.SliceLayout(1, to))
        target = out_m
        if SORTED and not GATED:
            target = gl.load(order + out_m, mask=out_m < stop, other=0)
        # What is between the two products stands in the order in which the second reads it.
        column_n = operand_place(out_n) if GATED else out_n
        place = out + target.to(gl.int64)[None, :] * N + column_n[:, None]
        mask = (out_m < stop)[None, :] & (out_n < N)[:, None]
        gl.store(place, y.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _chosen(experts, t, choice, TOP_K: gl.constexpr):
    """The experts of choices of token t, -1 where it has no such choice."""
    return gl.load(experts + t * TOP_K + choice, mask=choice < TOP_K, other=-1)


@gluon.jit
def token_down_kernel(
    hidden, weight, scale, bias, weights, experts, out, N: gl.constexpr, K: gl.constexpr,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, HAS_BIAS: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (block of results, token): the results of its choices, each of which is PARTS warps',
    by weight. WARPS / PARTS is at least TOP_K.
    """
    wait(OVERLAP)
    M: gl.constexpr = 8
    LAYOUT: gl.constexpr = _words(WARPS, BLOCK_N)
    TOKENS: gl.constexpr = step_layout(WARPS, M, 5, False)
    t = gl.program_id(1)
    of_w: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    of_n: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    w = gl.arange(0, WARPS, layout=of_w)
    n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=of_n)
    expert = _chosen(experts, t, w // PARTS, TOP_K)[:, None, None, None]
    row = expert.to(gl.int64) * N + n[None, :, None, None]
    real = (n < N)[None, :, None, None] & (expert >= 0) & (expert < EXPERTS)
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, TOKENS)))[:, None, None]
    of_x = (t * TOP_K + x_w // PARTS).to(gl.int64) * K
    own = _chosen(experts, t, x_w // PARTS, TOP_K)
    column = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, TOKENS)))[None, :, None]
    x_real = (own >= 0) & (own < EXPERTS) & (column == 0)
    sums = _sums(
        weight, scale, row, real, hidden, of_x, x_real, K, PARTS, True, M, BLOCK_N, WARPS, AHEAD,
        LAYOUT, TOKENS,
    )  # fmt: skip
    total = gl.sum(sums, 2)
    of_total: gl.constexpr = total.type.layout
    sum_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_total))[:, None]
    sum_n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, of_total))
    of = _chosen(experts, t, sum_w // PARTS, TOP_K)
    valid = (of >= 0) & (of < EXPERTS)
    if HAS_BIAS:
        # One warp of each choice adds it.
        has = valid & (sum_w % PARTS == 0) & (sum_n < N)[None, :]
        added = gl.load(bias + of.to(gl.int64) * N + sum_n[None, :], mask=has, other=0.0)
        total += added.to(gl.float32)
    share = gl.load(weights + t * TOP_K + sum_w // PARTS, mask=valid, other=0.0)
    y = gl.sum(gl.where(valid, total * share, 0.0), 0)
    out_n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, layout=y.type.layout)
    gl.store(out + t.to(gl.int64) * N + out_n, y.to(out.dtype.element_ty), mask=out_n < N)
