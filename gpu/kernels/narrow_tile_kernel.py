"""Products of some rows with a weight [n k] of int4 on Hopper: warps that widen and multiply, and
one that fetches.

The weight is the left operand, which tensor cores take from registers; the rows are in shared
memory, for all warps of a program. A register of the operand has two neighbours of k, thread t of
four those that byte t of a word of eight stands for: so each reads all words, and takes its byte.
The copy engine brings blocks of the weight before the inputs are there. k may be split among
programs, the last of which to arrive adds the parts in their order.
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
"""Entries of k in a block: groups of the weight are of multiples of them."""
# Byte t of a word at the bytes 0 and 2: q and 16 q times the smallest number of the dtype, as it
# has no exponent. Times powers of two, less zero: (q - zero) units, exactly.
BYTE_BFLOAT16 = gl.constexpr(
    """{ .reg .b32 a, x;
    mov.b32 x, 0x7D007F00;
    prmt.b32 a, $2, 0, $3;
    and.b32 a, a, 0x00f0000f;
    fma.rn.bf16x2 a, a, x, $4;
    mov.b32 {$0, $1}, a; }"""
)
BYTE_FLOAT16 = gl.constexpr(
    BYTE_BFLOAT16.value.replace("bf16x2", "f16x2").replace("0x7D007F00", "0x68007800")
)


@gluon.constexpr_function
def words_layout(warps):
    """Which thread reads what of [rows, words, byte]: words of 8 entries, a byte of which is one of
    four threads'. A warp has 16 rows.
    """
    words = BLOCK_K.value // 8
    return DistributedLinearLayout(
        [*([0, 1 << i, 0] for i in range(words.bit_length() - 1)), [8, 0, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [16 * warps, words, 4],
    )


@gluon.constexpr_function
def half_layout(warps):
    """The same of [rows, words] where each warp has 8 rows; four threads read the same."""
    words = BLOCK_K.value // 8
    return DistributedLinearLayout(
        [[0, 1 << i] for i in range(words.bit_length() - 1)],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[8 << i, 0] for i in range(warps.bit_length() - 1)],
        [],
        [8 * warps, words],
    )


@gluon.jit
def _words(tiles, stage, BLOCK_N: gl.constexpr, GATED: gl.constexpr, WORDS: gl.constexpr):
    """The words [BLOCK_N BLOCK_K/8] of a block of the weight. With GATED the tile has gates, and
    then as many rows of what goes with them: rows r and r + 8, which are one thread's, are a pair.
    """
    if GATED:
        half: gl.constexpr = BLOCK_N // 2
        HALF: gl.constexpr = half_layout(gl.num_warps())
        gate = tiles.index(2 * stage).load(HALF)
        up = tiles.index(2 * stage + 1).load(HALF)
        pairs = gl.join(gate, up).reshape([half // 8, 8, BLOCK_K // 8, 2])
        words = pairs.permute([0, 3, 1, 2]).reshape([BLOCK_N, BLOCK_K // 8])
        return gl.convert_layout(words, gl.SliceLayout(2, WORDS), assert_trivial=True)
    else:
        return tiles.index(stage).load(gl.SliceLayout(2, WORDS))


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
def _operand(words, base, rows: gl.constexpr, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """q - zero units [rows BLOCK_K] of words [rows BLOCK_K/8]. `base` is -zero units twice."""
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    # Bytes 1 and 3 are masked.
    byte = t | (t << 8)
    words = gl.expand_dims(words, 2)
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            BYTE_BFLOAT16, "=h,=h,r,r,r", [words, byte, base], dtype=(gl.bfloat16,) * 2,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            BYTE_FLOAT16, "=h,=h,r,r,r", [words, byte, base], dtype=(gl.float16,) * 2,
            is_pure=True, pack=1,
        )  # fmt: skip
    return gl.join(low, high).reshape([rows, BLOCK_K])


@gluon.jit
def _fetch(
    weight, x, tiles, bars, first, steps, n, N: gl.constexpr, GATED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Bring `steps` blocks of k, from number `first` on."""
    ready, empty = bars
    w_tiles, x_tiles = tiles
    words: gl.constexpr = BLOCK_K // 8
    size: gl.constexpr = BLOCK_N * BLOCK_K // 2 + BLOCK_M * BLOCK_K * 2
    ahead = gl.minimum(steps, STAGES)
    for i in range(ahead):
        mbarrier.expect(ready.index(i), size)
        _ask(weight, w_tiles, ready.index(i), n, (first + i) * words, i, N, GATED)
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
        _ask(weight, w_tiles, bar, n, (first + i) * words, stage, N, GATED)
        tma.async_copy_global_to_shared(x, [0, (first + i) * BLOCK_K], bar, x_tiles.index(stage))


@gluon.jit
def _multiply(
    scale, zero, bias, out, sums, arrived, tiles, bars, block, part, first, steps, rows,
    N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, HAS_ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A block of results of all rows, or its sum over a part of k."""
    w_tiles, x_tiles = tiles
    ready, empty = bars
    dtype: gl.constexpr = out.dtype.element_ty
    units: gl.constexpr = UNITS_BFLOAT16 if dtype == gl.bfloat16 else UNITS_FLOAT16
    groups: gl.constexpr = K // GROUP
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = words_layout(gl.num_warps())
    results: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    i = gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC))
    n, row = rows_of(i, block * results, N, GATED)
    of_scale = scale + row.to(gl.int64) * groups
    r = gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    n_zero, row_zero = rows_of(r, block * results, N, GATED)
    of_zero = zero + row_zero.to(gl.int64) * groups
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    acc = nothing
    for step in range(steps):
        stage = step % STAGES
        group = (first + step) * BLOCK_K // GROUP
        share = gl.load(of_scale + group, mask=(n < N) & (group < groups), other=0.0)
        if HAS_ZERO:
            own = gl.load(of_zero + group, mask=(n_zero < N) & (group < groups), other=0)
            own = gl.expand_dims(gl.expand_dims(own.to(gl.float32), 1), 2)
            base = twice(own * (-1.0 / units), dtype)
        else:
            base = twice(gl.full([1, 1, 1], -8.0 / units, gl.float32, WORDS), dtype)
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        words = _words(w_tiles, stage, BLOCK_N, GATED, WORDS)
        a = gl.convert_layout(
            _operand(words, base, BLOCK_N, dtype, WORDS), LEFT, assert_trivial=True
        )
        x_tile = x_tiles.index(stage).permute((1, 0))
        now = warpgroup_mma(a, x_tile, nothing, use_acc=False, is_async=True)
        now = warpgroup_mma_wait(0, deps=(now,))
        if gl.num_warps() > 4:
            tl.debug_barrier()  # one thread says so for all groups of four warps
        mbarrier.arrive(empty.index(stage), count=1)
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
    GROUP: gl.constexpr, HAS_ZERO: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
    PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (block of results, part of k). Programs have BLOCK_N rows of the weight, 16 for each
    warp. `weight` describes blocks of words, of BLOCK_K entries of these rows or, with GATED, of
    half as many, and `x` blocks [BLOCK_M, BLOCK_K] of all rows. Scales [n k/GROUP], zeros likewise.
    `sums` takes [part, block, BLOCK_N, BLOCK_M].

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
    shape: gl.constexpr = [each * STAGES, BLOCK_N // each, BLOCK_K // 8]
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
                N, K, GROUP, HAS_ZERO, HAS_BIAS, GATED, PARTS, BLOCK_M, BLOCK_N, STAGES,
            )),
            (_fetch, (
                weight, x, tiles, bars, first, steps, block * (BLOCK_N // each), N, GATED, BLOCK_M,
                BLOCK_N, STAGES, OVERLAP,
            )),
        ],
        [1],
        [FETCH_REGISTERS],
    )  # fmt: skip
