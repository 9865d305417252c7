"""Products of a few rows with a narrow weight, on tensor cores: each thread reads the words of the
weight that its own part of the product needs, and widens them in its registers.

A tensor core's operand is spread over a warp: of 16 rows and 16 entries of k a thread holds two
rows and four entries. Which entries these are is free, as long as the other operand has the same
ones: a sum over k minds no order. So a thread takes 16 neighbouring bytes of a row at a time, and
nothing goes through shared memory but the sums of the warps, each of which has a slice of k.

Registers hold words that were asked for, and little else: what a launch has asked for before its
inputs are there is a good part of the weight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import DistributedLinearLayout
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .arithmetic import gated
from .narrow_kernels import fp4_scaled
from .overlap import wait

STEP = gl.constexpr(128)
"""Entries of k that a warp takes at a time."""
# Two integers of 4 bits, where they lie in a word's bytes, are q and 16 q times the smallest number
# of the dtype, as it has no exponent. Times powers of two, less zero: (q - zero) units, exactly.
INT4_BFLOAT16 = gl.constexpr(
    """{ .reg .b32 a, b, c, d, t, x, y;
    mov.b32 x, 0x7F007F00; mov.b32 y, 0x7D007D00;
    shr.u32 t, $8, 8;
    and.b32 a, $8, 0x000f000f; and.b32 b, $8, 0x00f000f0;
    and.b32 c, t, 0x000f000f; and.b32 d, t, 0x00f000f0;
    fma.rn.bf16x2 a, a, x, $9; fma.rn.bf16x2 b, b, y, $9;
    fma.rn.bf16x2 c, c, x, $9; fma.rn.bf16x2 d, d, y, $9;
    mov.b32 {$0, $4}, a; mov.b32 {$1, $5}, b; mov.b32 {$2, $6}, c; mov.b32 {$3, $7}, d; }"""
)
INT4_FLOAT16 = gl.constexpr(
    INT4_BFLOAT16.value.replace("bf16x2", "f16x2")
    .replace("0x7F007F00", "0x78007800")
    .replace("0x7D007D00", "0x68006800")
)
UNITS_BFLOAT16 = gl.constexpr(64)
UNITS_FLOAT16 = gl.constexpr(512)
"""How many of an operand's units are 1: it has (q - zero) of them."""
FP8_FLOAT16 = gl.constexpr(
    """{ .reg .b16 x, y; .reg .b32 a, b;
    mov.b32 {x, y}, $4;
    cvt.rn.f16x2.e4m3x2 a, x; cvt.rn.f16x2.e4m3x2 b, y;
    mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"""
)


@gluon.constexpr_function
def step_layout(warps, rows, run, twice):
    """Which thread reads what of a step [warps, rows, k]: four of a warp share a row, and each has
    2^run neighbours of it; `twice`, once more behind those of all four.

    Here and not an argument: a launch is noted as text (`precompile.py`), which layouts have none.
    """
    neighbours = [[0, 0, 1 << i] for i in range(run)]
    threads = [[0, 0, 1 << run], [0, 0, 2 << run]]
    more = [[0, 0, 4 << run]] if twice else []
    blocks = [[0, 8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    return DistributedLinearLayout(
        [*neighbours, *blocks, *more],
        [*threads, [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [warps, rows, 1 << run + 2 + len(more)],
    )


@gluon.jit
def twice(x, dtype: gl.constexpr):
    """Numbers that `dtype` has, as words of two of each."""
    return (x.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x00010001


@gluon.jit
def _int4_operand(words, base, ROWS: gl.constexpr, WARPS: gl.constexpr, dtype: gl.constexpr):
    """q - zero units of words [warp row 16] as [warp row STEP] in the order that operands have:
    entry 32 t + 8 c + 4 e + 2 o + p, where thread t of four holds the two e side by side, is at
    (c, o, p, t, e). `base` is -zero units twice.
    """
    places: gl.constexpr = "=h,=h,=h,=h,=h,=h,=h,=h,r,r"
    if dtype == gl.bfloat16:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            INT4_BFLOAT16, places, [words, base], dtype=(gl.bfloat16,) * 8, is_pure=True, pack=1
        )
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            INT4_FLOAT16, places, [words, base], dtype=(gl.float16,) * 8, is_pure=True, pack=1
        )
    return _by_word(a, b, c, d, e, f, g, h, ROWS, WARPS)


@gluon.jit
def _by_word(a, b, c, d, e, f, g, h, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Entries 0 to 7 of words, in the order that operands have."""
    low = gl.join(gl.join(a, e), gl.join(b, f))
    high = gl.join(gl.join(c, g), gl.join(d, h))
    y = gl.join(low, high).reshape([WARPS, ROWS, 4, 4, 2, 2, 2])
    return y.permute([0, 1, 3, 6, 5, 2, 4]).reshape([WARPS, ROWS, STEP])


@gluon.jit
def fp4_operand(words, scale, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Numbers of words [warp row 4 4] times scales [warp row 4 1] bfloat16, one for a thread's 32
    entries, in FP4_UNITS and rounded once, in the order of `_int4_operand`. Scales of 2^-64 to 2^63
    leave them within the range of bfloat16.
    """
    a, b, c, d, e, f, g, h = fp4_scaled(words, scale)
    return _by_word(a, b, c, d, e, f, g, h, ROWS, WARPS)


@gluon.jit
def _fp8_operand(words, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Words [warp row 32] as float16, which holds them exactly, in the order that operands have:
    entry 64 h + 16 t + 4 c + 2 p + e is at (h, c, p, t, e).
    """
    a, b, c, d = gl.inline_asm_elementwise(
        FP8_FLOAT16, "=h,=h,=h,=h,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=1
    )
    y = gl.join(gl.join(a, b), gl.join(c, d)).reshape([WARPS, ROWS, 2, 4, 4, 2, 2])
    return y.permute([0, 1, 2, 4, 6, 3, 5]).reshape([WARPS, ROWS, STEP])


@gluon.jit
def masked_load(place, mask, CACHE: gl.constexpr):
    """What is at `place`, 0 where the mask does not hold; None holds everywhere."""
    if mask is None:
        return gl.load(place, cache_modifier=CACHE)
    else:
        return gl.load(place, mask=mask, other=0, cache_modifier=CACHE)


@gluon.jit
def tokens_operand(place, mask, KIND: gl.constexpr, M: gl.constexpr, WARPS: gl.constexpr):
    """A step of x as the right operand [warp STEP M]."""
    if KIND == "fp8":
        y = _fp8_operand(masked_load(place, mask, ""), M, WARPS)
    else:
        y = masked_load(place, mask, "").reshape([WARPS, M, 4, 4, 2, 2, 2])
        y = y.permute([0, 1, 3, 5, 6, 2, 4]).reshape([WARPS, M, STEP])
    return y.permute([0, 2, 1])


@gluon.jit
def _result(r, GATED: gl.constexpr):
    """Which of a block's results row r of its part of a weight is for: two rows are, if GATED."""
    return r // 2 if GATED else r


@gluon.jit
def _group_of(k, more: gl.constexpr, GROUP: gl.constexpr):
    """The group of entry k + more."""
    if more % GROUP == 0:
        return k // GROUP + more // GROUP
    else:
        return (k + more) // GROUP


@gluon.jit
def _half(r, N: gl.constexpr, GATED: gl.constexpr):
    """How far behind the first N rows of a weight row r of a block is."""
    return r % 2 * N if GATED else r * 0


@gluon.jit(do_not_specialize=["rows"])
def fragment_kernel(
    x, weight, scale, zero, x_scale, bias, out, rows, x_stride, x_scale_stride, N: gl.constexpr,
    K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, X_GROUP: gl.constexpr,
    HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, M: gl.constexpr,
    BLOCK_N: gl.constexpr, PIECES: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (block of results). KIND is int4, or fp8 with x of fp8 too. Weights are words, and so
    are tokens of fp8; `x_stride` counts what x has. Groups, of the weight and of x, are of
    multiples of STEP; X_GROUP is 0 where x has no scales. Words are asked for AHEAD steps before
    they are used.

    The BLOCK_N rows of the left operand are PIECES neighbouring pieces along k of BLOCK_N / PIECES
    results, and the M (8 or 16) columns of the right one are as many pieces of up to M / PIECES
    tokens. What a warp reads of one row of the weight is so much longer; sums of a piece of the
    weight and another of a token are left out. K is a multiple of WARPS * PIECES * STEP.

    GATED: the weight has 2 N rows, of N gates and of what goes with them; its results are rounded
    to the dtype of `out` and go through silu(gate) * up.
    """
    fp8: gl.constexpr = KIND == "fp8"
    WEIGHT: gl.constexpr = step_layout(WARPS, BLOCK_N, 2, fp8)
    TOKENS: gl.constexpr = step_layout(WARPS, M, 2 if fp8 else 5, fp8)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    dtype: gl.constexpr = gl.float16 if fp8 else x.dtype.element_ty
    words: gl.constexpr = 32 if fp8 else 16
    entries: gl.constexpr = 32 if fp8 else STEP
    slice_: gl.constexpr = K // WARPS
    stride: gl.constexpr = PIECES * STEP
    steps: gl.constexpr = slice_ // stride
    rows_n: gl.constexpr = BLOCK_N // PIECES
    results: gl.constexpr = rows_n // 2 if GATED else rows_n
    groups: gl.constexpr = K // GROUP
    in_parts: gl.constexpr = (groups > 1) | ((X_GROUP > 0) & (X_GROUP < K))
    # Loads that need no mask need no zeros in its place either. Those of fp8 keep theirs: steps of
    # eight rows took longer without.
    even: gl.constexpr = (N % results == 0) & (KIND == "int4")
    first = gl.program_id(0) * results
    # Where the words are that a thread reads.
    w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WEIGHT)))[:, None, None]
    r = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, WEIGHT)))[None, :, None]
    n, piece = first + _result(r // PIECES, GATED), r % PIECES
    j = gl.arange(0, words, layout=gl.SliceLayout(0, gl.SliceLayout(1, WEIGHT)))[None, None, :]
    # Places of small weights are counted with 32 bits.
    small: gl.constexpr = N * K * (2 if GATED else 1) < 2**31
    index: gl.constexpr = gl.int32 if small else gl.int64
    row = n.to(index) + _half(r // PIECES, N, GATED)
    place = weight + row * (K // STEP * words) + (w * (steps * PIECES) + piece) * words + j
    # Where its scales are: those of the sums that it has.
    sum_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None]
    sum_r = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))
    sum_n = first + _result(sum_r // PIECES, GATED)
    sum_k = sum_w * slice_ + sum_r[None, :] % PIECES * STEP
    sum_row = sum_n.to(index) + _half(sum_r // PIECES, N, GATED)
    of_scale = scale + sum_row[None, :] * groups
    known = None if even else n < N
    known_w = None if even else (n < N) & (w < WARPS)
    real = None if even else (sum_n < N)[None, :] & (sum_w < WARPS)
    nothing = None if even else 0
    # Where its part of x is, and the scales of that.
    c = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(2, TOKENS)))[None, :, None]
    m = c // PIECES
    x_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, TOKENS)))[:, None, None]
    i = gl.arange(0, entries, layout=gl.SliceLayout(0, gl.SliceLayout(1, TOKENS)))[None, None, :]
    of_x = x + m.to(gl.int64) * x_stride + (x_w * (steps * PIECES) + c % PIECES) * entries + i
    token_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, mma)))[:, None]
    column = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, :]
    token, token_k = column // PIECES, token_w * slice_ + column % PIECES * STEP
    if KIND == "int4":
        units: gl.constexpr = UNITS_BFLOAT16 if dtype == gl.bfloat16 else UNITS_FLOAT16
        base = twice(gl.full([1, 1, 1], -8.0 / units, gl.float32, layout=WEIGHT), dtype)
    total = gl.zeros([WARPS, BLOCK_N, M], gl.float32, layout=mma)
    asked, shares, zeros = (), (), ()
    for s in gl.static_range(steps + AHEAD):
        if s == AHEAD:
            wait(OVERLAP)
        if s < steps:
            # Past the L1 cache, which has x for the programs of a processor.
            asked += (
                gl.load(
                    place + s * (PIECES * words), mask=known, other=nothing, cache_modifier=".cg"
                ),
            )  # type: ignore[assignment]
            if groups > 1:
                of_share = of_scale + _group_of(sum_k, s * stride, GROUP)
                shares += (gl.load(of_share, mask=real, other=nothing),)  # type: ignore[assignment]
            if HAS_ZERO:
                of_zero = zero + row * groups + (w * slice_ + piece * STEP + s * stride) // GROUP
                zeros += (gl.load(of_zero, mask=known_w, other=nothing),)  # type: ignore[assignment]
        if s >= AHEAD:
            if fp8:
                a = _fp8_operand(asked[s - AHEAD], BLOCK_N, WARPS)
            else:
                if HAS_ZERO:
                    base = twice(zeros[s - AHEAD].to(gl.float32) * (-1.0 / units), dtype)
                a = _int4_operand(asked[s - AHEAD], base, BLOCK_N, WARPS, dtype)
            a = gl.convert_layout(a, left, assert_trivial=True)
            of_step = of_x + (s - AHEAD) * (PIECES * entries)
            b = tokens_operand(of_step, m < rows, KIND, M, WARPS)
            b = gl.convert_layout(b, right, assert_trivial=True)
            if in_parts:
                now = mma_v2(a, b, gl.zeros([WARPS, BLOCK_N, M], gl.float32, layout=mma))
                if groups > 1:
                    now = now * shares[s - AHEAD][:, :, None]
                if (X_GROUP > 0) & (X_GROUP < K):
                    of = token * x_scale_stride + (token_k + (s - AHEAD) * stride) // X_GROUP
                    own = gl.load(x_scale + of, mask=token < rows, other=0.0)
                    now = now * own[:, None, :]
                total += now
            else:
                total = mma_v2(a, b, total)
    if PIECES > 1:
        # Within a thread and a warp first: few sums are left that go through shared memory.
        of_c = gl.arange(0, M, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))
        same_piece = sum_r[None, :, None] % PIECES == of_c[None, None, :] % PIECES
        y = gl.where(same_piece, total, 0.0)
        y = gl.sum(y.reshape([WARPS, rows_n, PIECES, M // PIECES, PIECES]), 4)
        y = gl.sum(gl.sum(y, 2), 0)
    else:
        y = gl.sum(total, 0)
    if KIND == "int4":
        y = y * units
    if GATED:
        # A gate and what goes with it are one thread's.
        y = gl.convert_layout(y, gl.BlockedLayout([2, 1], [4, 8], [WARPS, 1], [0, 1]))
    end: gl.constexpr = y.type.layout
    end_r = gl.arange(0, rows_n, layout=gl.SliceLayout(1, end))
    end_n = first + _result(end_r, GATED)
    end_row = end_n.to(gl.int64) + _half(end_r, N, GATED)
    end_m = gl.arange(0, M // PIECES, layout=gl.SliceLayout(0, end))
    if X_GROUP == K:
        y = y * gl.load(x_scale + end_m * x_scale_stride, mask=end_m < rows, other=0.0)[None, :]
    if groups == 1:
        y = y * gl.load(scale + end_row, mask=end_n < N, other=0.0)[:, None]
    if HAS_BIAS:
        y = y + gl.load(bias + end_row, mask=end_n < N, other=0.0).to(gl.float32)[:, None]
    y = y.to(out.dtype.element_ty)
    if GATED:
        pairs = y.to(gl.float32).reshape([results, 2, M // PIECES]).permute([0, 2, 1])
        gate, up = gl.split(pairs)
        y = gated(gate, up).to(out.dtype.element_ty)
    put: gl.constexpr = y.type.layout
    to_n = first + gl.arange(0, results, layout=gl.SliceLayout(1, put))
    to_m = gl.arange(0, M // PIECES, layout=gl.SliceLayout(0, put))
    to = out + to_m.to(gl.int64)[None, :] * N + to_n[:, None]
    gl.store(to, y, mask=(to_m < rows)[None, :] & (to_n < N)[:, None])
