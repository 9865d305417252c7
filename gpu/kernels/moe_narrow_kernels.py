"""The products of a mixture of experts whose weights are narrow, or have biases: as those of
`moe_kernels.py`, with weights that are widened in registers.

CLAMPED: gate and up of an expert lie in turns and go through the clamped activation of gpt-oss
(`swigluoai_and_mul`); else gate stands in front of up, and it is silu, or with GELU that.
"""

import triton
import triton.language as tl

from .arithmetic import activated, dot, exp
from .moe_kernels import block_of_program, rows_of_block, sorted_choices
from .narrow_kernels import FP4_UNITS, INT4_ZERO, _entries, _spread, fp4_scaled
from .overlap import wait


@triton.jit
def _raw_rows(weight, row, real, start, K: tl.constexpr, KIND: tl.constexpr, BLOCK_K: tl.constexpr):
    """What rows [n] int64 of a weight hold from entry `start` on, for BLOCK_K entries."""
    packed: tl.constexpr = 2 if (KIND == "int4") | (KIND == "fp4") else 1
    width: tl.constexpr = K // packed
    j = start // packed + tl.arange(0, BLOCK_K // packed)
    nothing: tl.constexpr = 0.0 if weight.dtype.element_ty.is_floating() else 0
    place = weight + row[:, None] * width + j[None, :]
    if K % BLOCK_K == 0:
        return tl.load(place, mask=real[:, None], other=nothing)
    else:
        return tl.load(place, mask=real[:, None] & (j < width)[None, :], other=nothing)


@triton.jit
def _group_scales(scale, row, real, group, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """The scales [n COUNT] of rows from number `group` on.

    Those of 16 bits are read as words of two: the compiler asks for words ahead of use.
    """
    paired: tl.constexpr = (
        (scale.dtype.element_ty == tl.bfloat16) & (GROUPS % 2 == 0) & (COUNT % 2 == 0)
    )
    each: tl.constexpr = 2 if paired else 1
    place = scale.to(tl.pointer_type(tl.int32), bitcast=True) if paired else scale
    g = group // each + tl.arange(0, COUNT // each)
    inside = real[:, None] & (g < GROUPS // each)[None, :]
    found = tl.load(place + row[:, None] * (GROUPS // each) + g[None, :], mask=inside, other=0)
    if paired:
        first = (found << 16).to(tl.float32, bitcast=True)
        second = (found & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(first, second), [row.shape[0], COUNT])
    else:
        return found


@triton.jit
def _wide(
    raw, scale, zero, row, real, start, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What `_raw_rows` gave as entries [n BLOCK_K] float32; without their scale where a row has one
    (`_row_scales`).
    """
    packed: tl.constexpr = 2 if (KIND == "int4") | (KIND == "fp4") else 1
    groups: tl.constexpr = K // GROUP
    base = tl.full([1, 1], INT4_ZERO, tl.int32)
    if KIND == "plain":
        return raw.to(tl.float32)
    elif groups == 1:
        if HAS_ZERO:
            base = tl.load(zero + row, mask=real, other=0).to(tl.int32)[:, None]
        return _entries(raw, base, KIND, tl.float32)
    elif GROUP % BLOCK_K == 0:
        of = row * groups + start // GROUP
        share = tl.load(scale + of, mask=real, other=0.0)
        if HAS_ZERO:
            base = tl.load(zero + of, mask=real, other=0).to(tl.int32)[:, None]
        return _entries(raw, base, KIND, tl.float32) * share[:, None]
    else:
        each = _spread(
            _group_scales(scale, row, real, start // GROUP, groups, BLOCK_K // GROUP), GROUP
        )
        if HAS_ZERO:
            g = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
            inside = real[:, None] & (g < groups)[None, :]
            zeros = tl.load(zero + row[:, None] * groups + g[None, :], mask=inside, other=0)
            zeros = zeros.to(tl.int32)
            return _entries(raw, _spread(zeros, GROUP // packed), KIND, tl.float32) * each
        else:
            return _entries(raw, base, KIND, tl.float32) * each


@triton.jit
def _scaled_rows(
    weight, scale, row, real, start, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Entries [n BLOCK_K] bfloat16 of rows of a weight in mxfp4 in FP4_UNITS, eight from a word."""
    j = start // 8 + tl.arange(0, BLOCK_K // 8)
    of_row = weight.to(tl.pointer_type(tl.int32), bitcast=True) + row * (K // 8)
    place = of_row[:, None] + j[None, :]
    if K % BLOCK_K == 0:
        words = tl.load(place, mask=real[:, None], other=0)
    else:
        words = tl.load(place, mask=real[:, None] & (j < K // 8)[None, :], other=0)
    shares = _group_scales(scale, row, real, start // GROUP, K // GROUP, BLOCK_K // GROUP)
    a, b, c, d, e, f, g, h = fp4_scaled(words, _spread(shares, GROUP // 8))
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), [row.shape[0], BLOCK_K])


@triton.jit
def _product_rows(
    weight, scale, zero, row, real, start, K: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Entries [n BLOCK_K] of rows of a weight from `start` on, rounded to `dtype`: as `_wide` has
    them, or `_scaled_rows` if WORDS.
    """
    if WORDS:
        return _scaled_rows(weight, scale, row, real, start, K, GROUP, BLOCK_K)
    else:
        raw = _raw_rows(weight, row, real, start, K, KIND, BLOCK_K)
        wide = _wide(raw, scale, zero, row, real, start, K, KIND, GROUP, HAS_ZERO, BLOCK_K)
        return wide.to(dtype)


@triton.jit
def _row_scales(scale, row, real, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr):
    """What sums of `_product_rows` over k are multiplied by [n]."""
    if KIND == "plain" or GROUP < K:
        return tl.full(row.shape, 1.0, tl.float32)
    else:
        return tl.load(scale + row, mask=real, other=0.0)


@triton.jit
def _between(gate, up, alpha, limit, CLAMPED: tl.constexpr, GELU: tl.constexpr):
    """What is between gate and up, and down."""
    if CLAMPED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        half = exp(tl.abs(gate) * (-0.5 * alpha))
        over = 1.0 + half * half
        return tl.where(gate < 0, gate * half * (up + 1.0) * half, gate * (up + 1.0)) / over
    else:
        return activated(gate, up, GELU)


@triton.jit
def _halves(expert, n, N: tl.constexpr, CLAMPED: tl.constexpr):
    """The rows of gate and of up that results n of an expert need."""
    first = tl.cast(expert, tl.int64) * (2 * N)
    if CLAMPED:
        return first + 2 * n, first + 2 * n + 1
    else:
        return first + n, first + N + n


@triton.jit(do_not_specialize=["alpha", "limit"])
def narrow_few_gated_kernel(
    x, weight, scale, zero, bias, out, experts, alpha, limit, x_stride, N: tl.constexpr,
    K: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results, choice): gate and up of one token by one expert, and what is between
    them and down.
    """
    wait(OVERLAP)
    choice = tl.program_id(1)
    expert = tl.load(experts + choice)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row = x + tl.cast(choice // TOP_K, tl.int64) * x_stride
    y = tl.load(row + k, mask=k < K, other=0.0)
    if (expert >= 0) & (expert < EXPERTS):
        real = n < N
        of_gate, of_up = _halves(expert, n, N, CLAMPED)
        g = _raw_rows(weight, of_gate, real, 0, K, KIND, BLOCK_K)
        u = _raw_rows(weight, of_up, real, 0, K, KIND, BLOCK_K)
        gate_share = _row_scales(scale, of_gate, real, K, KIND, GROUP)
        up_share = _row_scales(scale, of_up, real, K, KIND, GROUP)
        a = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        b = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            now, raw_g, raw_u = y.to(tl.float32)[None, :], g, u
            if start + BLOCK_K < K:
                at = start + BLOCK_K + k
                g = _raw_rows(weight, of_gate, real, start + BLOCK_K, K, KIND, BLOCK_K)
                u = _raw_rows(weight, of_up, real, start + BLOCK_K, K, KIND, BLOCK_K)
                y = tl.load(row + at, mask=at < K, other=0.0)
            a += now * _wide(
                raw_g, scale, zero, of_gate, real, start, K, KIND, GROUP, HAS_ZERO, BLOCK_K
            )  # fmt: skip
            b += now * _wide(
                raw_u, scale, zero, of_up, real, start, K, KIND, GROUP, HAS_ZERO, BLOCK_K
            )  # fmt: skip
        gate, up = tl.sum(a, 1) * gate_share, tl.sum(b, 1) * up_share
        if HAS_BIAS:
            gate += tl.load(bias + of_gate, mask=real, other=0.0).to(tl.float32)
            up += tl.load(bias + of_up, mask=real, other=0.0).to(tl.float32)
        hidden = _between(gate, up, alpha, limit, CLAMPED, GELU)
        tl.store(out + choice.to(tl.int64) * N + n, hidden.to(out.dtype.element_ty), mask=real)


@triton.jit
def narrow_few_down_kernel(
    hidden, weight, scale, zero, bias, weights, experts, out, N: tl.constexpr, K: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results, token): the results of its choices by weight. All of them, at most
    BLOCK_C, are asked for at once, and AHEAD blocks of k before the first is used.

    Choices and the weights of their experts are read before the wait: the launch in front is LATE,
    so who chose had ended before this one came up.
    """
    t = tl.program_id(1).to(tl.int64)
    i, k = tl.arange(0, BLOCK_C * BLOCK_N), tl.arange(0, BLOCK_K)
    n, choice = tl.program_id(0) * BLOCK_N + i % BLOCK_N, t * TOP_K + i // BLOCK_N
    expert = tl.load(experts + choice, mask=i // BLOCK_N < TOP_K, other=-1)
    valid = (expert >= 0) & (expert < EXPERTS)
    share = tl.load(weights + choice, mask=valid, other=0.0)
    row, real = tl.cast(expert, tl.int64) * N + n, (n < N) & valid
    of_row = _row_scales(scale, row, real, K, KIND, GROUP)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    asked = ()
    for s in tl.static_range(AHEAD):
        if s < steps:
            w = _raw_rows(weight, row, real, s * BLOCK_K, K, KIND, BLOCK_K)
            asked += (w,)  # type: ignore[assignment]
    wait(OVERLAP)
    a = tl.zeros([BLOCK_C * BLOCK_N, BLOCK_K], tl.float32)
    for s in tl.static_range(steps):
        if s + AHEAD < steps:
            w = _raw_rows(weight, row, real, (s + AHEAD) * BLOCK_K, K, KIND, BLOCK_K)
            asked += (w,)  # type: ignore[assignment]
        at = s * BLOCK_K + k
        y = tl.load(
            hidden + choice[:, None] * K + at[None, :], mask=real[:, None] & (at < K)[None, :],
            other=0.0,
        )  # fmt: skip
        a += y.to(tl.float32) * _wide(
            asked[s], scale, zero, row, real, s * BLOCK_K, K, KIND, GROUP, HAS_ZERO, BLOCK_K
        )  # fmt: skip
    y = tl.sum(a, 1) * of_row
    if HAS_BIAS:
        y += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)
    total = tl.sum(tl.reshape(tl.where(valid, share * y, 0.0), [BLOCK_C, BLOCK_N]), 0)
    result = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + t * N + result, total.to(out.dtype.element_ty), mask=result < N)


@triton.jit(do_not_specialize=["alpha", "limit"])
def narrow_product_kernel(
    x, weight, scale, zero, bias, out, order, starts, alpha, limit, x_stride, N: tl.constexpr,
    K: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, GELU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, FOUND: tl.constexpr, DIRECT: tl.constexpr,
    STAGES: tl.constexpr, LEFT: tl.constexpr, WORDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results, block of rows, or if FOUND choice): see `product_kernel` of
    `moe_kernels.py`. LEFT: the weight is the left operand, which tensor cores take from registers.
    WORDS: it is mxfp4, whose scales are bfloat16, and is widened a word at a time.
    """
    wait(OVERLAP)
    expert, first, stop, found = block_of_program(
        order, starts, EXPERTS, BLOCK_M, BLOCK_E, FOUND, DIRECT
    )  # fmt: skip
    if expert < EXPERTS:
        m, choice, real = rows_of_block(order, first, stop, found, BLOCK_M, FOUND)
        n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        inside = n < N
        row = (choice // TOP_K if GATED else m).to(tl.int64)
        rows = x + row * x_stride
        dtype: tl.constexpr = x.dtype.element_ty
        if GATED:
            of_first, of_up = _halves(expert, n, N, CLAMPED)
        else:
            of_first = tl.cast(expert, tl.int64) * N + n
            of_up = of_first
        # Asked for with the weight: behind the sums they would be waited for once more.
        share = _row_scales(scale, of_first, inside, K, KIND, GROUP)[None, :]
        up_share = _row_scales(scale, of_up, inside, K, KIND, GROUP)[None, :] if GATED else share
        acc = tl.zeros([BLOCK_N, BLOCK_M] if LEFT else [BLOCK_M, BLOCK_N], tl.float32)
        up = acc
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            at = start + k
            if LEFT:
                a = tl.load(
                    rows[None, :] + at[:, None], mask=real[None, :] & (at < K)[:, None], other=0.0
                )
            else:
                a = tl.load(
                    rows[:, None] + at[None, :], mask=real[:, None] & (at < K)[None, :], other=0.0
                )
            w = _product_rows(
                weight, scale, zero, of_first, inside, start, K, KIND, GROUP, HAS_ZERO, BLOCK_K,
                WORDS, dtype,
            )  # fmt: skip
            acc = dot(w, a, acc) if LEFT else dot(a, tl.trans(w), acc)
            if GATED:
                u = _product_rows(
                    weight, scale, zero, of_up, inside, start, K, KIND, GROUP, HAS_ZERO, BLOCK_K,
                    WORDS, dtype,
                )  # fmt: skip
                up = dot(u, a, up) if LEFT else dot(a, tl.trans(u), up)
        if LEFT:
            acc, up = tl.trans(acc), tl.trans(up)
        if WORDS:
            acc, up = acc * FP4_UNITS, up * FP4_UNITS
        acc *= share
        if HAS_BIAS:
            acc += tl.load(bias + of_first, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up *= up_share
            if HAS_BIAS:
                up += tl.load(bias + of_up, mask=inside, other=0.0).to(tl.float32)[None, :]
            acc = _between(acc, up, alpha, limit, CLAMPED, GELU)
        target = (m if GATED else choice).to(tl.int64)
        place = out + target[:, None] * N + n[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def operand_place(k):
    """Where entry k of a row stands in the order in which operands of numbers of 4 bits have it: of
    eight neighbours the one that goes with the lower half of a register, then that of the upper.
    """
    return k // 8 * 8 + k % 4 * 2 + k % 8 // 4


@triton.jit(do_not_specialize=["choices"])
def sort_and_order_kernel(
    experts, order, starts, choices, x, out, x_stride, K: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (expert, then token): `sort_kernel`, and rows of x in the order of `operand_place`."""
    wait(OVERLAP)
    program = tl.program_id(0)
    if program < EXPERTS:
        sorted_choices(experts, order, starts, choices, program, EXPERTS, BLOCK)
    else:
        t, k = (program - EXPERTS).to(tl.int64), tl.arange(0, BLOCK_K)
        y = tl.load(x + t * x_stride + k, mask=k < K, other=0.0)
        tl.store(out + t * K + operand_place(k), y, mask=k < K)
