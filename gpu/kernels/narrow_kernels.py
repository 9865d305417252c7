"""Products with weights of 8 or 4 bits an entry, and the quantisation of what goes into them.

Shapes of programs, for blocks of the n results. `narrow_gemv_kernel`: multiply and add in float32
(int32 where both are int8), for one or two rows. `quantizing_gemv_kernel`: the same in fp8, of rows
that programs quantise, which are kept for many blocks. `fp8_gemv_kernel`: one row in fp8 that was
quantised before. These two keep weights that they have asked for as words: kept as numbers of 8
bits, each takes a register of 32. `narrow_kernel`: the tensor cores, whose left operand is the
weight as it was widened in registers, for any number of rows; k may be split among programs, the
last of which to arrive adds the parts in their order.

GROUP entries along k share a scale; K: all of a row. Values of 4 bits become numbers without a
table: an integer is put into the mantissa of a power of two and that is subtracted, a float e2m1
moves to where the exponent is.
"""

import triton
import triton.language as tl

from .arithmetic import FP8_MAX, INT8_MAX, NEAREST, dot, gated, scale_of, size_of
from .overlap import wait

ASSEMBLED = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter knows no instructions of a chip."""

INT4_ZERO = tl.constexpr(8)
# Numbers of e2m1, moved to where they are bfloat16 of 2^-126 their size (the least has no
# exponent), times a scale. The sign comes from a word with the signs of every other number alone:
# what else that has lies where the number is taken, so one choice of bits puts both together.
FP4_SCALED = tl.constexpr(
    """{ .reg .b32 a, b, c, d, t, even, odd;
    and.b32 even, $8, 0x08080808; and.b32 odd, $8, 0x80808080;
    shl.b32 a, $8, 6; shl.b32 t, even, 12; lop3.b32 a, a, t, 0x01C001C0, 0xE4;
    shl.b32 b, $8, 2; shl.b32 t, odd, 8; lop3.b32 b, b, t, 0x01C001C0, 0xE4;
    shr.u32 c, $8, 2; shl.b32 t, even, 4; lop3.b32 c, c, t, 0x01C001C0, 0xE4;
    shr.u32 d, $8, 6; lop3.b32 d, d, odd, 0x01C001C0, 0xE4;
    mul.rn.bf16x2 a, a, $9; mul.rn.bf16x2 b, b, $9;
    mul.rn.bf16x2 c, c, $9; mul.rn.bf16x2 d, d, $9;
    mov.b32 {$0, $4}, a; mov.b32 {$1, $5}, b; mov.b32 {$2, $6}, c; mov.b32 {$3, $7}, d; }"""
)
FP4_UNITS = tl.constexpr(2.0**62)
"""How many of an operand's units are 1 where numbers of e2m1 are scaled."""


@triton.jit
def _offset(q, dtype: tl.constexpr):
    """2^m + q of integers q from 0 to 31, exact: m is 7, 10 or 23 in bfloat16, float16, float32."""
    if dtype == tl.bfloat16:
        return (q.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (q.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return (q.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(q, dtype: tl.constexpr):
    """The numbers that four bits stand for: a sign, two bits of exponent, one of mantissa. In the
    place of float32's bits they are 2^-126 of their size, the smallest without an exponent too.
    """
    if dtype == tl.float32:
        wide = q.to(tl.uint32)
        small = ((wide & 8) << 28) | ((wide & 7) << 22)
        return small.to(tl.float32, bitcast=True) * 2.0**126
    else:
        # Not so here: the interpreter has no products of bfloat16.
        half: tl.constexpr = 0x3F00 if dtype == tl.bfloat16 else 0x3800
        shift: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
        wide = q.to(tl.uint16)
        sign = (wide & 8) << 12
        size = wide & 7
        some = tl.where(size < 2, size * half, half + (size << shift)).to(tl.uint16)
        return (sign | some).to(dtype, bitcast=True)


@triton.jit
def fp4_factor(scale):
    """What FP4_SCALED multiplies by for scales of bfloat16: 2^64 of them, twice in a word."""
    factor = (scale.to(tl.float32) * 2.0**64).to(tl.int32, bitcast=True)
    return (factor >> 16 & 0xFFFF) * 0x10001


@triton.jit
def fp4_scaled(words, scale):
    """The eight numbers of words, the first from the lowest bits, times scales of bfloat16 in
    FP4_UNITS, rounded once to bfloat16. Scales of 2^-64 to 2^63 leave them within its range.
    """
    if ASSEMBLED:
        return tl.inline_asm_elementwise(
            FP4_SCALED, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, fp4_factor(scale)],
            dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        share = scale.to(tl.float32) * 2.0**-62
        found = ()
        for i in tl.static_range(8):
            number = _e2m1(words >> 4 * i & 15, tl.float32) * share
            found += (number.to(tl.bfloat16),)  # type: ignore[assignment]
        return found


@triton.jit
def _both(low, high):
    """[n k/2] and [n k/2] as neighbours [n k]."""
    n: tl.constexpr = low.shape[0]
    half: tl.constexpr = low.shape[1]
    return tl.reshape(tl.join(low, high), [n, 2 * half])


@triton.jit
def _entries(raw, zero, KIND: tl.constexpr, dtype: tl.constexpr):
    """q - zero [n k] of a block of a weight, as numbers of `dtype`; `zero` [n 1 or k/2] int32 is
    that of int4.
    """
    if KIND == "int4":
        base = _offset(zero, dtype)
        return _both(_offset(raw & 15, dtype) - base, _offset(raw >> 4, dtype) - base)
    elif KIND == "fp4":
        return _both(_e2m1(raw & 15, dtype), _e2m1(raw >> 4, dtype))
    else:
        return raw.to(dtype)


@triton.jit
def _spread(of_groups, GROUP: tl.constexpr):
    """[n t] as [n t*GROUP], each for all of its group."""
    n: tl.constexpr = of_groups.shape[0]
    t: tl.constexpr = of_groups.shape[1]
    wide = tl.broadcast_to(of_groups[:, :, None], [n, t, GROUP])
    return tl.reshape(wide, [n, t * GROUP])


@triton.jit
def _block(weight, n, at, N: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """A block of what a weight's rows hold: rows n, columns at."""
    place = weight + n.to(tl.int64)[:, None] * WIDTH + at[None, :]
    if EVEN:
        return tl.load(place, eviction_policy="evict_first")
    else:
        nothing: tl.constexpr = 0.0 if weight.dtype.element_ty.is_floating() else 0
        return tl.load(place, mask=(n < N)[:, None] & (at < WIDTH)[None, :], other=nothing)


@triton.jit
def narrow_gemv_kernel(
    x, weight, scale, zero, x_scale, bias, out, x_stride, x_scale_stride, N: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    X_GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results). ROWS is 1 or 2. X_GROUP: entries of x that share a scale, 0 if it
    has none. Blocks of k hold whole groups, or all of k.
    """
    packed: tl.constexpr = 2 if (KIND == "int4") | (KIND == "fp4") else 1
    width: tl.constexpr = K // packed
    exact: tl.constexpr = (KIND == "int8s") & (X_GROUP > 0)
    kind: tl.constexpr = tl.int32 if exact else tl.float32
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j, k = tl.arange(0, BLOCK_K // packed), tl.arange(0, BLOCK_K)
    even: tl.constexpr = (K % BLOCK_K == 0) & (N % BLOCK_N == 0)
    added = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    groups: tl.constexpr = K // GROUP
    w = _block(weight, n, j, N, width, even)
    # Asked for with the weight: behind the sums they would be waited for once more.
    of_n = tl.full([BLOCK_N], 1.0, tl.float32)
    if groups == 1:
        of_n = tl.load(scale + n, mask=n < N, other=0.0)
    wait(OVERLAP)
    of_a, of_b = 1.0, 1.0
    if X_GROUP == K:
        of_a = tl.load(x_scale)
        if ROWS > 1:
            of_b = tl.load(x_scale + x_scale_stride)
    a, b = tl.zeros([BLOCK_N, BLOCK_K], kind), tl.zeros([BLOCK_N, BLOCK_K], kind)
    for start in tl.static_range(0, K, BLOCK_K):
        at = start + k
        raw = w
        if start + BLOCK_K < K:
            w = _block(weight, n, (start + BLOCK_K) // packed + j, N, width, even)
        base = tl.full([BLOCK_N, 1], INT4_ZERO, tl.int32)
        if groups == 1:
            if HAS_ZERO:
                base = tl.load(zero + n, mask=n < N, other=0).to(tl.int32)[:, None]
            q = _entries(raw, base, KIND, kind)
        else:
            g = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
            of = n.to(tl.int64)[:, None] * groups + g[None, :]
            inside = (n < N)[:, None] & (g < groups)[None, :]
            if HAS_ZERO:
                base = _spread(
                    tl.load(zero + of, mask=inside, other=0).to(tl.int32), GROUP // packed
                )
            q = _entries(raw, base, KIND, kind)
            q = q * _spread(tl.load(scale + of, mask=inside, other=0.0), GROUP)
        a += q * _tokens(x, x_scale, at, K, X_GROUP, kind)
        if ROWS > 1:
            b += q * _tokens(x + x_stride, x_scale + x_scale_stride, at, K, X_GROUP, kind)
    y = tl.sum(a, 1).to(tl.float32) * of_a * of_n + added
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)
    if ROWS > 1:
        y = tl.sum(b, 1).to(tl.float32) * of_b * of_n + added
        tl.store(out + N + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _as_e4m3(y):
    """A row of float32 as (values in e4m3, its scale): the bits of `quantize_kernel`."""
    of = scale_of(tl.max(size_of(y), 0), True)
    return _narrowed(y * tl.div_rn(1.0, of), True), of


@triton.jit
def _numbers(words):
    """Words of e4m3 as float32: entries 0, 1, 2 and 3 of each."""
    if ASSEMBLED:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b16 x, y; .reg .b32 a, b; mov.b32 {x, y}, $4; "
            "cvt.rn.f16x2.e4m3x2 a, x; cvt.rn.f16x2.e4m3x2 b, y; "
            "mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def _byte(words, i: tl.constexpr):
    return ((words >> 8 * i) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _words_of_rows(weight, scale, n, j, N: tl.constexpr, K: tl.constexpr):
    """(a block of whole rows of a weight, in words, their scales)."""
    place = weight + n.to(tl.int64)[:, None] * (K // 4) + j[None, :]
    mask = (n < N)[:, None] & (j < K // 4)[None, :]
    w = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
    return w, tl.load(scale + n, mask=n < N, other=0.0)


@triton.jit
def _larger(a, b):
    """The larger of two pairs of bfloat16, entry by entry; what is no number is left out."""
    return tl.inline_asm_elementwise(
        "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _fours(x, j, K: tl.constexpr):
    """Entries of a row of bfloat16, four at a time. The row lies at a multiple of 8 bytes."""
    return tl.load(x.to(tl.pointer_type(tl.int64)) + j, mask=j < K // 4, other=0)


@triton.jit
def _fours_in_words(y, of):
    """Fours of bfloat16 as words of e4m3 with this scale: the bits of `_narrowed`."""
    # Beyond the largest number of e4m3 the conversion gives that one.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d; .reg .b16 x, y; mov.b64 {a, c}, $1; "
        "and.b32 b, a, 0xFFFF0000; shl.b32 a, a, 16; "
        "and.b32 d, c, 0xFFFF0000; shl.b32 c, c, 16; "
        "mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2; mul.rn.f32 c, c, $2; mul.rn.f32 d, d, $2; "
        "cvt.rn.satfinite.e4m3x2.f32 x, b, a; cvt.rn.satfinite.e4m3x2.f32 y, d, c; "
        "mov.b32 $0, {x, y}; }",
        "=r,l,r",
        [y, tl.div_rn(1.0, of)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _of_fours(fours):
    """Entries 0, 1, 2 and 3 of fours of bfloat16, in float32."""
    low, high = fours.to(tl.int32), (fours >> 32).to(tl.int32)
    a, b = (low << 16).to(tl.float32, bitcast=True), (low & -65536).to(tl.float32, bitcast=True)
    c, d = (high << 16).to(tl.float32, bitcast=True), (high & -65536).to(tl.float32, bitcast=True)
    return a, b, c, d


@triton.jit
def _as_fours(a, b, c, d):
    """Numbers of float32 as fours of bfloat16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 x, y; cvt.rn.bf16x2.f32 x, $2, $1; cvt.rn.bf16x2.f32 y, $4, $3; "
        "mov.b64 $0, {x, y}; }",
        "=l,r,r,r,r",
        [a, b, c, d],
        dtype=tl.int64,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _normed_fours(x, residual, norm, eps, K: tl.constexpr):
    """(Fours of the norm of x + residual, fours of that sum), all given in fours: the sum is read
    as it was rounded, as by `add_rms_norm_kernel`.
    """
    a, b, c, d = _of_fours(x)
    e, f, g, h = _of_fours(residual)
    total = _as_fours(a + e, b + f, c + g, d + h)
    a, b, c, d = _of_fours(total)
    scale = tl.rsqrt(tl.sum(a * a + b * b + c * c + d * d, 0) / K + eps)
    e, f, g, h = _of_fours(norm)
    return _as_fours(a * scale * e, b * scale * f, c * scale * g, d * scale * h), total


@triton.jit
def _row_in_words(y):
    """(A row in fours of bfloat16 as words of e4m3, its scale): the bits of `_as_e4m3`, by
    instructions that take two entries.
    """
    sizes = tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; mov.b64 {a, b}, $1; "
        "and.b32 a, a, 0x7FFF7FFF; and.b32 b, b, 0x7FFF7FFF; max.bf16x2 $0, a, b; }",
        "=r,l",
        [y],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    both = tl.reduce(sizes, 0, _larger)
    high = (both & -65536).to(tl.float32, bitcast=True)
    low = (both << 16).to(tl.float32, bitcast=True)
    of = scale_of(tl.maximum(size_of(high), size_of(low)), True)
    return _fours_in_words(y, of), of


@triton.jit
def _quantised_row(x, residual, norm, total, eps, j, K: tl.constexpr, NORMED: tl.constexpr):
    """(A row as e4m3 in float32, entries 0, 1, 2 and 3 of words j; its scale). NORMED: the norm of
    its sum with the residual, which the first program leaves in `total`.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    same: tl.constexpr = (norm.dtype.element_ty == dtype) | (not NORMED)
    if ASSEMBLED & same & (dtype == tl.bfloat16):
        y = _fours(x, j, K)
        if NORMED:
            y, both = _normed_fours(y, _fours(residual, j, K), _fours(norm, j, K), eps, K)
            if tl.program_id(0) == 0:
                tl.store(total.to(tl.pointer_type(tl.int64)) + j, both, mask=j < K // 4)
        words, of = _row_in_words(y)
        a, b, c, d = _numbers(words)
    else:
        k = j[:, None] * 4 + tl.arange(0, 4)[None, :]
        y = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if NORMED:
            y = y + tl.load(residual + k, mask=k < K, other=0.0).to(tl.float32)
            if tl.program_id(0) == 0:
                tl.store(total + k, y.to(dtype), mask=k < K)
            y = y.to(dtype).to(tl.float32)
            y = y * tl.rsqrt(tl.sum(tl.sum(y * y, 1), 0) / K + eps)
            y = y * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
            y = y.to(dtype).to(tl.float32)
        of = scale_of(tl.max(tl.max(size_of(y), 1), 0), True)
        q = _narrowed(y * tl.div_rn(1.0, of), True).to(tl.float32)
        even, odd = tl.split(tl.reshape(q, [j.shape[0], 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    return a, b, c, d, of


@triton.jit
def _sum_of_words(words, a, b, c, d):
    """[n] of words [n j] of a weight and a row's entries [j]."""
    e, f, g, h = _numbers(words)
    y = e * a[None, :]
    y += f * b[None, :]
    y += g * c[None, :]
    y += h * d[None, :]
    return tl.sum(y, 1)


@triton.jit
def quantizing_gemv_kernel(
    x, residual, norm, total, weight, scale, bias, out, largest, eps, x_stride, residual_stride,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (program): each takes every num_programs-th block of the N results. Weights are words of
    e4m3 with a scale for each row. ROWS, 1 or 2, of x are quantised by each program, once. WORDS is
    at least K / 4. The next block is asked for while one is multiplied: as bytes, each would take a
    register meanwhile.

    NORMED: they are the norm of x + residual, with the weight `norm`, and the sum goes to `total`
    [row K].

    GATED: the weight has 2 N rows, of N gates and of what goes with them; its results are rounded
    to the dtype of `out` and go through silu(gate) * up. The size of the largest result that each
    program has of a row becomes largest [row program].
    """
    j = tl.arange(0, WORDS)
    up, up_scale, up_bias = weight + N * (K // 4), scale + N, bias + N
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w, of = _words_of_rows(weight, scale, n, j, N, K)
    u, of_u = w, of
    if GATED:
        u, of_u = _words_of_rows(up, up_scale, n, j, N, K)
    wait(OVERLAP)
    a0, a1, a2, a3, of_a = _quantised_row(x, residual, norm, total, eps, j, K, NORMED)
    b0, b1, b2, b3, of_b = a0, a1, a2, a3, of_a
    if ROWS > 1:
        b0, b1, b2, b3, of_b = _quantised_row(
            x + x_stride, residual + residual_stride, norm, total + K, eps, j, K, NORMED
        )
    most, most_b = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        y = _sum_of_words(w, a0, a1, a2, a3) * of_a * of
        z, v, t = y, y, y
        if GATED:
            v = _sum_of_words(u, a0, a1, a2, a3) * of_a * of_u
        if ROWS > 1:
            z = _sum_of_words(w, b0, b1, b2, b3) * of_b * of
            if GATED:
                t = _sum_of_words(u, b0, b1, b2, b3) * of_b * of_u
        following = n + tl.num_programs(0) * BLOCK_N
        w, of = _words_of_rows(weight, scale, following, j, N, K)
        if GATED:
            u, of_u = _words_of_rows(up, up_scale, following, j, N, K)
        size = _put_row(out, n, y, v, bias, up_bias, N, HAS_BIAS, GATED)
        if GATED:
            most = tl.maximum(most, size)
        if ROWS > 1:
            size = _put_row(out + N, n, z, t, bias, up_bias, N, HAS_BIAS, GATED)
            if GATED:
                most_b = tl.maximum(most_b, size)
    if GATED:
        tl.store(largest + tl.program_id(0), tl.max(most, 0))
        if ROWS > 1:
            tl.store(largest + tl.num_programs(0) + tl.program_id(0), tl.max(most_b, 0))


@triton.jit
def _put_row(
    out, n, y, up, bias, up_bias, N: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr
):
    """Results n, and those of what goes with them, to their place; their sizes."""
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(up_bias + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        y = gated(y.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32))
    tl.store(out + n, y.to(dtype), mask=n < N)
    return size_of(y.to(dtype).to(tl.float32))


@triton.jit
def fp8_gemv_kernel(
    x, weight, scale, x_scale, bias, out, N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results). One row of e4m3 and a weight of e4m3, both in words, with a scale
    for each row. Words are asked for AHEAD blocks of k before they are used.
    """
    n, j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WORDS)
    steps: tl.constexpr = (K // 4 + WORDS - 1) // WORDS
    even: tl.constexpr = (K // 4 % WORDS == 0) & (N % BLOCK_N == 0)
    place = weight + n.to(tl.int64)[:, None] * (K // 4) + j[None, :]
    of_n = tl.load(scale + n, mask=n < N, other=0.0)
    acc = tl.zeros([BLOCK_N, WORDS], tl.float32)
    asked = ()
    for s in tl.static_range(steps + AHEAD):
        if s == AHEAD:
            wait(OVERLAP)
        if s < steps:
            if even:
                asked += (tl.load(place + s * WORDS, eviction_policy="evict_first"),)  # type: ignore[assignment]
            else:
                mask = (n < N)[:, None] & (s * WORDS + j < K // 4)[None, :]
                asked += (tl.load(place + s * WORDS, mask=mask, other=0),)  # type: ignore[assignment]
        if s >= AHEAD:
            at = (s - AHEAD) * WORDS + j
            a, b, c, d = _numbers(tl.load(x + at, mask=at < K // 4, other=0))
            e, f, g, h = _numbers(asked[s - AHEAD])
            acc += e * a[None, :]
            acc += f * b[None, :]
            acc += g * c[None, :]
            acc += h * d[None, :]
    y = tl.sum(acc, 1) * tl.load(x_scale) * of_n
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def silu_quantize_kernel(
    x, values, scale, x_stride, INTER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row): silu(gate) * up of x = (gate, up), as it is rounded to the dtype of x, as e4m3 by
    a scale of the row. The bits of `act_and_mul_kernel` and `quantize_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    wait(OVERLAP)
    gate = tl.load(x + row * x_stride + n, mask=n < INTER, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + INTER + n, mask=n < INTER, other=0.0).to(tl.float32)
    found, of = _as_e4m3(gated(gate, up).to(x.dtype.element_ty).to(tl.float32))
    tl.store(scale + row, of)
    tl.store(values + row * INTER + n, found, mask=n < INTER)


@triton.jit
def widen_kernel(
    weight, scale, zero, out, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of k): a narrow weight as numbers of the dtype of `out`, rounded once."""
    packed: tl.constexpr = 2 if (KIND == "int4") | (KIND == "fp4") else 1
    groups: tl.constexpr = K // GROUP
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_K
    at = first + tl.arange(0, BLOCK_K)
    j = first // packed + tl.arange(0, BLOCK_K // packed)
    nothing: tl.constexpr = 0.0 if weight.dtype.element_ty.is_floating() else 0
    raw = tl.load(weight + row * (K // packed) + j, mask=j < K // packed, other=nothing)
    g = at // GROUP
    share = tl.load(scale + row * groups + g, mask=at < K, other=0.0)[None, :]
    base = tl.full([1, BLOCK_K // packed], INT4_ZERO, tl.int32)
    if HAS_ZERO:
        of = row * groups + j * packed // GROUP
        base = tl.load(zero + of, mask=j < K // packed, other=0).to(tl.int32)[None, :]
    y = _entries(raw[None, :], base, KIND, tl.float32) * share
    wait(OVERLAP)
    tl.store(out + row * K + at[None, :], y.to(out.dtype.element_ty), mask=(at < K)[None, :])


@triton.jit
def _tokens(x, x_scale, at, K: tl.constexpr, X_GROUP: tl.constexpr, kind: tl.constexpr):
    """A block of one row [1 k], times its scales where these are of blocks."""
    y = tl.load(x + at, mask=at < K, other=0.0 if x.dtype.element_ty.is_floating() else 0)
    y = y.to(kind)
    if (X_GROUP > 0) & (X_GROUP < K):
        y = y * tl.load(x_scale + at // X_GROUP, mask=at < K, other=0.0)
    return y[None, :]


@triton.jit
def _narrowed(y, FP8: tl.constexpr):
    """Scaled float32 as fp8 or int8: saturated, and rounded once."""
    if FP8:
        clipped = tl.minimum(tl.maximum(y, -FP8_MAX), FP8_MAX)
        return tl.where(y == y, clipped, y).to(tl.float8e4nv)
    else:
        clipped = tl.minimum(tl.maximum(y, -INT8_MAX), INT8_MAX)
        return tl.where(y == y, (clipped + NEAREST) - NEAREST, 0.0).to(tl.int8)


@triton.jit(do_not_specialize=["rows"])
def narrow_kernel(
    x, weight, scale, zero, x_scale, bias, out, sums, arrived, rows, x_stride, x_scale_stride,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    X_GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of rows, block of results, part of k). PART is a multiple of BLOCK_K. Where a
    weight has several groups along k, blocks of k are one of them or hold whole ones; blocks of x
    that have a scale of their own hold whole blocks of k.
    """
    packed: tl.constexpr = 2 if (KIND == "int4") | (KIND == "fp4") else 1
    width: tl.constexpr = K // packed
    exact: tl.constexpr = (KIND == "int8s") & (X_GROUP > 0)
    kind: tl.constexpr = tl.int32 if exact else tl.float32
    # Numbers of e4m3 are exact in float16, which takes one conversion; what is not quantised is
    # multiplied in its own dtype.
    fp8: tl.constexpr = (KIND == "fp8") & (X_GROUP > 0)
    unquantised: tl.constexpr = tl.float16 if fp8 else x.dtype.element_ty
    dtype: tl.constexpr = tl.int8 if exact else unquantised
    groups: tl.constexpr = K // GROUP
    in_parts: tl.constexpr = ((groups > 1) & (GROUP % BLOCK_K == 0)) | (
        (X_GROUP > 0) & (X_GROUP < K)
    )
    even: tl.constexpr = (K % BLOCK_K == 0) & (N % BLOCK_N == 0)
    block, part = tl.program_id(1), tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    j, k = tl.arange(0, BLOCK_K // packed), tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], kind)
    added = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    base = tl.full([BLOCK_N, 1], INT4_ZERO, tl.int32)
    if HAS_ZERO & (groups == 1):
        base = tl.load(zero + n, mask=n < N, other=0).to(tl.int32)[:, None]
    wait(OVERLAP)
    for start in tl.range(part * PART, min(part * PART + PART, K), BLOCK_K, num_stages=STAGES):
        at = start + k
        y = tl.load(
            x + m[None, :].to(tl.int64) * x_stride + at[:, None],
            mask=(m < rows)[None, :] & (at < K)[:, None],
            other=0 if exact else 0.0,
        ).to(dtype)
        raw = _block(weight, n, start // packed + j, N, width, even)
        if groups == 1:
            q = _entries(raw, base, KIND, dtype)
        elif GROUP % BLOCK_K == 0:
            of = n.to(tl.int64) * groups + start // GROUP
            share = tl.load(scale + of, mask=n < N, other=0.0)
            own = base
            if HAS_ZERO:
                own = tl.load(zero + of, mask=n < N, other=0).to(tl.int32)[:, None]
            q = _entries(raw, own, KIND, dtype)
        else:
            g = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
            of_each = n.to(tl.int64)[:, None] * groups + g[None, :]
            inside = (n < N)[:, None] & (g < groups)[None, :]
            each = _spread(tl.load(scale + of_each, mask=inside, other=0.0), GROUP)
            if HAS_ZERO:
                zeros = tl.load(zero + of_each, mask=inside, other=0).to(tl.int32)
                q = (_entries(raw, _spread(zeros, GROUP // packed), KIND, tl.float32) * each).to(
                    dtype
                )
            else:
                q = (_entries(raw, base, KIND, tl.float32) * each).to(dtype)
        if in_parts:
            now = dot(q, y, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
            if (groups > 1) & (GROUP % BLOCK_K == 0):
                now = now * share[:, None]
            if (X_GROUP > 0) & (X_GROUP < K):
                of_x = m.to(tl.int64) * x_scale_stride + start // X_GROUP
                now = now * tl.load(x_scale + of_x, mask=m < rows, other=0.0)[None, :]
            acc += now
        elif exact:
            acc = tl.dot(q, y, acc, out_dtype=tl.int32)
        else:
            acc = dot(q, y, acc)
    real = (n < N)[:, None] & (m < rows)[None, :]
    if PARTS == 1:
        _end(out, acc, m, n, rows, scale, x_scale, x_scale_stride, added, N, K, X_GROUP, groups)
    else:
        here = m[None, :] * N + n[:, None]
        tl.store(sums + part * rows * N + here, acc, mask=real)
        tl.debug_barrier()  # all threads have written before one of them says so
        spot = arrived + block * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(spot, 1, sem="acq_rel") == PARTS - 1:
            tl.store(spot, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], kind)
            for other in range(PARTS):
                total += tl.load(
                    sums + other * rows * N + here, mask=real, other=0, cache_modifier=".cg"
                )
            _end(
                out, total, m, n, rows, scale, x_scale, x_scale_stride, added, N, K, X_GROUP, groups
            )  # fmt: skip


@triton.jit
def _end(
    out, acc, m, n, rows, scale, x_scale, x_scale_stride, added, N: tl.constexpr, K: tl.constexpr,
    X_GROUP: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    """Sums [n m] times the scales of whole rows, plus the bias, to their place."""
    total = acc.to(tl.float32)
    if X_GROUP == K:
        of_m = tl.load(x_scale + m * x_scale_stride, mask=m < rows, other=0.0)
        total = total * of_m[None, :]
    if groups == 1:
        total = total * tl.load(scale + n, mask=n < N, other=0.0)[:, None]
    total = tl.trans(total + added[:, None])
    place = out + m[:, None].to(tl.int64) * N + n[None, :]
    mask = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def quantize_kernel(
    x, values, scale, x_stride, K: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of k): blocks hold whole groups of GROUP entries, each of which has a scale.
    See `ops/reference/quantization.py`.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_K
    groups: tl.constexpr = K // GROUP
    wait(OVERLAP)
    if ASSEMBLED & FP8 & (groups == 1) & (K % 4 == 0) & (x.dtype.element_ty == tl.bfloat16):
        j = tl.arange(0, BLOCK_K // 4)
        words, of_row = _row_in_words(_fours(x + row * x_stride, j, K))
        tl.store(scale + row, of_row)
        out = values.to(tl.pointer_type(tl.int32)) + row * (K // 4)
        tl.store(out + j, words, mask=j < K // 4)
    else:
        at = first + tl.arange(0, BLOCK_K)
        y = tl.load(x + row * x_stride + at, mask=at < K, other=0.0).to(tl.float32)
        size = size_of(y)
        if groups == 1:
            amax = tl.max(size, 0)
            of = scale_of(amax, FP8)
            tl.store(scale + row, of)
            y = y * tl.div_rn(1.0, of)
        else:
            each: tl.constexpr = BLOCK_K // GROUP
            amax = tl.max(tl.reshape(size, [each, GROUP]), 1)
            of_each = scale_of(amax, FP8)
            g = first // GROUP + tl.arange(0, each)
            tl.store(scale + row * groups + g, of_each, mask=g < groups)
            inverse = tl.div_rn(tl.full([each], 1.0, tl.float32), of_each)
            y = tl.reshape(tl.reshape(y, [each, GROUP]) * inverse[:, None], [BLOCK_K])
        found = _narrowed(y, FP8)
        tl.store(values + row * K + at, found, mask=at < K)


@triton.jit
def quantize_by_kernel(
    x, values, scale, x_stride, scale_stride, K: tl.constexpr, FP8: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of k): by the row's given scale. A `scale_stride` of 0: one for all rows."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    wait(OVERLAP)
    y = tl.load(x + row * x_stride + at, mask=at < K, other=0.0).to(tl.float32)
    of = tl.load(scale + row * scale_stride)
    found = _narrowed(y * tl.div_rn(1.0, of), FP8)
    tl.store(values + row * K + at, found, mask=at < K)


@triton.jit
def quantize_by_largest_kernel(
    x, largest, values, scale, K: tl.constexpr, FOUND: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of k): to e4m3 by the scale of the largest of FOUND sizes in largest
    [row FOUND], which becomes that of the row. The bits of `quantize_kernel`.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_K
    f = tl.arange(0, BLOCK_F)
    wait(OVERLAP)
    found = tl.load(largest + row * FOUND + f, mask=f < FOUND, other=0.0)
    if ASSEMBLED & (K % 4 == 0) & (x.dtype.element_ty == tl.bfloat16):
        j = first // 4 + tl.arange(0, BLOCK_K // 4)
        y = _fours(x + row * K, j, K)
        of = scale_of(tl.max(found, 0), True)
        out = values.to(tl.pointer_type(tl.int32)) + row * (K // 4)
        tl.store(out + j, _fours_in_words(y, of), mask=j < K // 4)
    else:
        at = first + tl.arange(0, BLOCK_K)
        y = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
        of = scale_of(tl.max(found, 0), True)
        tl.store(values + row * K + at, _narrowed(y * tl.div_rn(1.0, of), True), mask=at < K)
    if tl.program_id(1) == 0:
        tl.store(scale + row, of)
