"""Products of some rows with a weight [n k] of int4, fp4 or int8 on Hopper: warps that widen and
multiply, and one that fetches.

The weight is the left operand, which tensor cores take from registers; the rows are in shared
memory, for all warps of a program. A register of the operand has two neighbours of k: of four bits
a byte, where thread t of four has byte t of each word, which all four read; of int8 half a word.
The copy engine brings blocks of the weight before the inputs are there. k may be split among
programs, the last of which to arrive adds the parts in their order.

Scales of groups that are blocks of k or longer multiply sums. Those of shorter groups multiply the
entries, in bfloat16: each as two parts, of which the first is so short that its product is exact.
So an entry is rounded once, of a scale that has 12 or 14 bits.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import DistributedLinearLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .arithmetic import gated
from .fragment_kernel import UNITS_BFLOAT16, UNITS_FLOAT16, twice
from .held_kernel import rows_of
from .tile_kernel import FETCH_REGISTERS, put

BLOCK_K = gl.constexpr(128)
"""Entries of k in a block: groups of the weight hold whole ones, or it holds whole groups."""
# Byte t of a word at the bytes 0 and 2: q and 16 q times the smallest number of the dtype, as it
# has no exponent. Times powers of two, less zero: (q - zero) units, exactly.
INT4_BFLOAT16 = gl.constexpr(
    """{ .reg .b32 a, x;
    mov.b32 x, 0x7D007F00;
    prmt.b32 a, $2, 0, $3;
    and.b32 a, a, 0x00f0000f;
    fma.rn.bf16x2 a, a, x, $4;
    mov.b32 {$0, $1}, a; }"""
)
INT4_FLOAT16 = gl.constexpr(
    INT4_BFLOAT16.value.replace("bf16x2", "f16x2").replace("0x7D007F00", "0x68007800")
)
SCALED_INT4 = gl.constexpr(
    INT4_BFLOAT16.value.replace(
        "mov.b32 {$0",
        "mul.rn.bf16x2 x, a, $5; fma.rn.bf16x2 a, a, $6, x;\n    mov.b32 {$0",
    )
)
# e2m1 at its place in bfloat16: 2^-126 of its size, the least of which has no exponent.
SCALED_FP4 = gl.constexpr(
    """{ .reg .b32 a, b, x;
    mov.b32 x, 0x7E807E80;
    prmt.b32 b, $2, 0, $3;
    mul.lo.u32 a, b, 0x40040;
    and.b32 a, a, 0x01C001C0;
    mul.lo.u32 b, b, 0x1001000;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.rn.bf16x2 a, a, x;
    mul.rn.bf16x2 x, a, $4; fma.rn.bf16x2 a, a, $5, x;
    mov.b32 {$0, $1}, a; }"""
)
# q + 128 times the smallest number, which up to 255 has no exponent or the first one.
INT8_BFLOAT16 = gl.constexpr(
    """{ .reg .b32 a, x;
    mov.b32 x, 0x7F007F00;
    cvt.u32.u16 a, $2;
    xor.b32 a, a, 0x8080;
    prmt.b32 a, a, 0, 0x4140;
    fma.rn.bf16x2 a, a, x, $3;
    mov.b32 {$0, $1}, a; }"""
)
INT8_FLOAT16 = gl.constexpr(
    INT8_BFLOAT16.value.replace("bf16x2", "f16x2").replace("0x7F007F00", "0x78007800")
)


@gluon.constexpr_function
def stored(kind):
    """How many neighbours of k an element of the array has: int8 is in halves, others in words."""
    return 2 if kind == "int8s" else 8


@gluon.constexpr_function
def elements_layout(warps, of_warp, kind):
    """Which thread reads what of a block of k of [rows, elements]: a warp has 8 or 16 rows, and a
    thread each eighth. Of words, four threads read the same.
    """
    count = BLOCK_K.value // stored(kind)
    own = [[0, 1], [0, 2]] if kind == "int8s" else [[0, 0], [0, 0]]
    first = 4 if kind == "int8s" else 1
    places = [[0, first << i] for i in range((count // first).bit_length() - 1)]
    return DistributedLinearLayout(
        [*places, *([[8, 0]] if of_warp == 16 else [])],
        [*own, [1, 0], [2, 0], [4, 0]],
        [[of_warp << i, 0] for i in range(warps.bit_length() - 1)],
        [],
        [of_warp * warps, count],
    )


@gluon.constexpr_function
def groups_layout(warps, groups):
    """Which thread has what of [rows, groups of a block, words of a group]."""
    words = BLOCK_K.value // 8 // groups
    return DistributedLinearLayout(
        [
            *([0, 0, 1 << i] for i in range(words.bit_length() - 1)),
            *([0, 1 << i, 0] for i in range(groups.bit_length() - 1)),
            [8, 0, 0],
        ],
        [[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [16 * warps, groups, words],
    )


@gluon.constexpr_function
def bytes_layout(warps):
    """Which thread has what of [rows, words, byte]."""
    words = BLOCK_K.value // 8
    return DistributedLinearLayout(
        [*([0, 1 << i, 0] for i in range(words.bit_length() - 1)), [8, 0, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [16 * warps, words, 4],
    )


@gluon.jit
def _elements(tiles, stage, BLOCK_N: gl.constexpr, KIND: gl.constexpr, GATED: gl.constexpr):
    """A block [BLOCK_N, BLOCK_K] of the weight, as it is stored. With GATED the tile has gates, and
    then as many rows of what goes with them: rows r and r + 8, which are one thread's, are a pair.
    """
    ALL: gl.constexpr = elements_layout(gl.num_warps(), 16, KIND)
    count: gl.constexpr = BLOCK_K // stored(KIND)
    if GATED:
        HALF: gl.constexpr = elements_layout(gl.num_warps(), 8, KIND)
        gate = tiles.index(2 * stage).load(HALF)
        up = tiles.index(2 * stage + 1).load(HALF)
        pairs = gl.join(gate, up).reshape([BLOCK_N // 16, 8, count, 2])
        both = pairs.permute([0, 3, 1, 2]).reshape([BLOCK_N, count])
        return gl.convert_layout(both, ALL, assert_trivial=True)
    else:
        return tiles.index(stage).load(ALL)


@gluon.jit
def _ask(
    weight, tiles, bar, n, word, stage, N: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Ask for a block of the weight, and with GATED for that of what goes with the gates."""
    if GATED:
        tma.async_copy_global_to_shared(weight, [n, word], bar, tiles.index(2 * stage))
        tma.async_copy_global_to_shared(weight, [N + n, word], bar, tiles.index(2 * stage + 1))
    else:
        tma.async_copy_global_to_shared(weight, [n, word], bar, tiles.index(stage))


@gluon.jit
def _by_byte(elements):
    """Elements [rows words], or [rows 1], for each byte of words."""
    WORDS: gl.constexpr = gl.SliceLayout(2, bytes_layout(gl.num_warps()))
    return gl.expand_dims(gl.convert_layout(elements, WORDS, assert_trivial=True), 2)


@gluon.jit
def _of_words(of_groups, ALL: gl.constexpr, LAYOUT: gl.constexpr):
    """What groups [rows groups] of a block have, for each of its words [rows words]."""
    rows: gl.constexpr = of_groups.shape[0]
    words: gl.constexpr = BLOCK_K // 8
    one: gl.constexpr = words // of_groups.shape[1]
    each = gl.expand_dims(of_groups, 2) + gl.full([1, 1, one], 0, gl.int32, LAYOUT)
    return gl.convert_layout(each.reshape([rows, words]), ALL, assert_trivial=True)


@gluon.jit
def _of_groups(
    scale, zero, first, group, BLOCK_N: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """(scales, zeros) [BLOCK_N groups] of a block whose groups are from number `group` on."""
    groups: gl.constexpr = K // GROUP
    some: gl.constexpr = BLOCK_K // GROUP
    LAYOUT: gl.constexpr = gl.SliceLayout(2, groups_layout(gl.num_warps(), some))
    r = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    g = group + gl.arange(0, some, gl.SliceLayout(0, LAYOUT))
    n, row = rows_of(r, first, N, GATED)
    place = row.to(gl.int64)[:, None] * groups + g[None, :]
    real = (n < N)[:, None] & (g < groups)[None, :]
    own = gl.full([BLOCK_N, some], 8.0, gl.float32, LAYOUT)
    if HAS_ZERO:
        own = gl.load(zero + place, mask=real, other=0).to(gl.float32)
    return gl.load(scale + place, mask=real, other=0.0), own


@gluon.jit
def _scaled_operand(words, scale, zero, KIND: gl.constexpr):
    """(q - zero) scale [rows BLOCK_K] in bfloat16 of a block of words, of what its groups have."""
    rows: gl.constexpr = words.shape[0]
    LAYOUT: gl.constexpr = groups_layout(gl.num_warps(), scale.shape[1])
    BYTES: gl.constexpr = bytes_layout(gl.num_warps())
    ALL: gl.constexpr = words.type.layout
    of = scale * UNITS_BFLOAT16 if KIND == "int4" else scale
    # Of four significant bits, or six: the other factor has four, or two.
    kept: gl.constexpr = -0x100000 if KIND == "int4" else -0x40000
    high = of.to(gl.int32, bitcast=True) & kept
    low = twice(of - high.to(gl.float32, bitcast=True), gl.bfloat16)
    high = ((high >> 16) & 0xFFFF) * 0x00010001
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, BYTES)))[None, None, :]
    parts = _by_byte(_of_words(high, ALL, LAYOUT)), _by_byte(_of_words(low, ALL, LAYOUT))
    if KIND == "int4":
        base = _of_words(twice(zero * (-1.0 / UNITS_BFLOAT16), gl.bfloat16), ALL, LAYOUT)
        low, high = gl.inline_asm_elementwise(
            SCALED_INT4, "=h,=h,r,r,r,r,r",
            [_by_byte(words), t | (t << 8), _by_byte(base), parts[0], parts[1]],
            dtype=(gl.bfloat16,) * 2, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            SCALED_FP4, "=h,=h,r,r,r,r", [_by_byte(words), t | 0x4440, parts[0], parts[1]],
            dtype=(gl.bfloat16,) * 2, is_pure=True, pack=1,
        )  # fmt: skip
    return gl.join(low, high).reshape([rows, BLOCK_K])


@gluon.jit
def _operand(elements, base, rows: gl.constexpr, KIND: gl.constexpr, dtype: gl.constexpr):
    """q - zero units [rows BLOCK_K] of a block as it is stored. `base` [rows 1] is -zero units
    twice.
    """
    if KIND == "int4":
        BYTES: gl.constexpr = bytes_layout(gl.num_warps())
        t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, BYTES)))[None, None, :]
        arguments = [_by_byte(elements), t | (t << 8), _by_byte(base)]  # bytes 1 and 3 are masked
        if dtype == gl.bfloat16:
            low, high = gl.inline_asm_elementwise(
                INT4_BFLOAT16, "=h,=h,r,r,r", arguments, dtype=(gl.bfloat16,) * 2, is_pure=True,
                pack=1,
            )  # fmt: skip
        else:
            low, high = gl.inline_asm_elementwise(
                INT4_FLOAT16, "=h,=h,r,r,r", arguments, dtype=(gl.float16,) * 2, is_pure=True,
                pack=1,
            )  # fmt: skip
    elif dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            INT8_BFLOAT16, "=h,=h,h,r", [elements, base], dtype=(gl.bfloat16,) * 2, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            INT8_FLOAT16, "=h,=h,h,r", [elements, base], dtype=(gl.float16,) * 2, is_pure=True,
            pack=1,
        )  # fmt: skip
    return gl.join(low, high).reshape([rows, BLOCK_K])


@gluon.jit
def _fetch(
    weight, x, tiles, bars, first, steps, n, N: gl.constexpr, KIND: gl.constexpr,
    GATED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Bring `steps` blocks of k, from number `first` on."""
    ready, empty = bars
    w_tiles, x_tiles = tiles
    count: gl.constexpr = BLOCK_K // stored(KIND)
    size: gl.constexpr = (
        BLOCK_N * count * weight.dtype.primitive_bitwidth // 8 + BLOCK_M * BLOCK_K * 2
    )
    ahead = gl.minimum(steps, STAGES)
    for i in range(ahead):
        mbarrier.expect(ready.index(i), size)
        _ask(weight, w_tiles, ready.index(i), n, (first + i) * count, i, N, GATED)
    if OVERLAP:
        gdc_wait()
    for i in range(ahead):
        tma.async_copy_global_to_shared(
            x, [0, (first + i) * BLOCK_K], ready.index(i), x_tiles.index(i)
        )
    for i in range(ahead, steps):
        stage = i % STAGES
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        mbarrier.expect(bar, size)
        _ask(weight, w_tiles, bar, n, (first + i) * count, stage, N, GATED)
        tma.async_copy_global_to_shared(x, [0, (first + i) * BLOCK_K], bar, x_tiles.index(stage))


@gluon.jit
def _multiply(
    scale, zero, bias, out, sums, arrived, tiles, bars, block, part, first, steps, rows,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A block of results of all rows, or its sum over a part of k."""
    w_tiles, x_tiles = tiles
    ready, empty = bars
    dtype: gl.constexpr = out.dtype.element_ty
    units: gl.constexpr = UNITS_BFLOAT16 if dtype == gl.bfloat16 else UNITS_FLOAT16
    groups: gl.constexpr = K // GROUP
    SHORT: gl.constexpr = GROUP < BLOCK_K
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ALL: gl.constexpr = elements_layout(gl.num_warps(), 16, KIND)
    zero_of: gl.constexpr = 8.0 if KIND == "int4" else 128.0
    results: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    i = gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC))
    n, row = rows_of(i, block * results, N, GATED)
    of_scale = scale + row.to(gl.int64) * groups
    r = gl.arange(0, BLOCK_N, gl.SliceLayout(1, ALL))
    n_zero, row_zero = rows_of(r, block * results, N, GATED)
    of_zero = zero + row_zero.to(gl.int64) * groups
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    acc = nothing
    for step in range(steps):
        stage = step % STAGES
        group = (first + step) * BLOCK_K // GROUP
        if SHORT:
            scales, zeros = _of_groups(
                scale, zero, block * results, group, BLOCK_N, N, K, KIND, GROUP, HAS_ZERO, GATED
            )  # fmt: skip
        else:
            share = gl.load(of_scale + group, mask=(n < N) & (group < groups), other=0.0)
            if HAS_ZERO:
                own = gl.load(of_zero + group, mask=(n_zero < N) & (group < groups), other=0)
                base = twice(own[:, None].to(gl.float32) * (-1.0 / units), dtype)
            else:
                base = twice(gl.full([BLOCK_N, 1], -zero_of / units, gl.float32, ALL), dtype)
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        elements = _elements(w_tiles, stage, BLOCK_N, KIND, GATED)
        if SHORT:
            a = _scaled_operand(elements, scales, zeros, KIND)
        else:
            a = _operand(elements, base, BLOCK_N, KIND, dtype)
        a = gl.convert_layout(a, LEFT, assert_trivial=True)
        x_tile = x_tiles.index(stage).permute((1, 0))
        now = warpgroup_mma(a, x_tile, acc if SHORT else nothing, use_acc=SHORT, is_async=True)
        now = warpgroup_mma_wait(0, deps=(now,))
        if gl.num_warps() > 4:
            tl.debug_barrier()  # one thread says so for all groups of four warps
        mbarrier.arrive(empty.index(stage), count=1)
        if SHORT:
            acc = now
        else:
            acc += now * share[:, None]
    last = True
    if PARTS > 1:
        step = gl.num_programs(0) * (BLOCK_N * BLOCK_M)
        place = sums + block * (BLOCK_N * BLOCK_M) + i[:, None] * BLOCK_M + m[None, :]
        gl.store(place + part * step, acc)
        tl.debug_barrier()  # all threads have written before one of them says so
        last = gl.atomic_add(arrived + block, 1, sem="acq_rel") == PARTS - 1
        if last:
            gl.store(arrived + block, 0)
            acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
            for p in range(PARTS):
                acc += gl.load(place + p * step, cache_modifier=".cg")
    if last:
        if not SHORT:
            acc = acc * units
        if HAS_BIAS:
            acc += gl.load(bias + row, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if GATED:
            pairs = acc.to(dtype).to(gl.float32).reshape([BLOCK_N // 16, 2, 8, BLOCK_M])
            gate, up = gl.split(pairs.permute([0, 2, 3, 1]))
            y = gated(gate, up).reshape([results, BLOCK_M]).to(dtype)
            PAIRS: gl.constexpr = y.type.layout
            put(y, out, block, rows, N, PAIRS, BLOCK_M, results)
        else:
            put(acc.to(dtype), out, block, rows, N, ACC, BLOCK_M, BLOCK_N)


@gluon.jit(do_not_specialize=["rows"])
def narrow_tile_kernel(
    weight, x, scale, zero, bias, out, sums, arrived, rows, N: gl.constexpr, K: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (block of results, part of k). Programs have BLOCK_N rows of the weight, 16 for each
    warp. `weight` describes blocks of halves (int8) or words, of BLOCK_K entries of these rows or,
    with GATED, of half as many, and `x` blocks [BLOCK_M, BLOCK_K] of all rows. Scales
    [n k/GROUP], zeros likewise. `sums` takes [part, block, BLOCK_N, BLOCK_M].

    GATED: silu(result n) * result N + n, of a weight [2N k]; both are rounded as they are where
    they are stored.
    """
    if OVERLAP:
        gdc_launch_dependents()
    block, part = gl.program_id(0), gl.program_id(1)
    ALL: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first = part * ALL // PARTS
    steps = (part + 1) * ALL // PARTS - first
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    each: gl.constexpr = 2 if GATED else 1
    shape: gl.constexpr = [each * STAGES, BLOCK_N // each, BLOCK_K // stored(KIND)]
    w_tiles = gl.allocate_shared_memory(weight.dtype, shape, weight.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    tiles, bars = (w_tiles, x_tiles), (ready, empty)
    gl.warp_specialize(
        [
            (_multiply, (
                scale, zero, bias, out, sums, arrived, tiles, bars, block, part, first, steps, rows,
                N, K, KIND, GROUP, HAS_ZERO, HAS_BIAS, GATED, PARTS, BLOCK_M, BLOCK_N, STAGES,
            )),
            (_fetch, (
                weight, x, tiles, bars, first, steps, block * (BLOCK_N // each), N, KIND, GATED,
                BLOCK_M, BLOCK_N, STAGES, OVERLAP,
            )),
        ],
        [1],
        [FETCH_REGISTERS],
    )  # fmt: skip
