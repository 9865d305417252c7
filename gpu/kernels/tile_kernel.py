"""Products of some rows with a weight matrix [n k] on Hopper: warps that multiply, and one that
fetches.

The weight is the left operand, so that few rows fill an instruction of the tensor cores. One warp
asks the copy engine for STAGES blocks of k of the weight before the inputs are there: they arrive
while the launch before, a sum over ranks for instance, still runs. k may be split among programs,
the last of which to arrive adds the parts in their order.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .arithmetic import activated

FETCH_REGISTERS = gl.constexpr(24)
"""Registers of a thread that fetches."""


@gluon.jit
def _ask(weight, tiles, ready, n, k, stage, N: gl.constexpr, GATED: gl.constexpr):
    """Ask for a block of k of the weight, and with GATED for that of up."""
    w_tiles, up_tiles, _x_tiles = tiles
    bar = ready.index(stage)
    tma.async_copy_global_to_shared(weight, [n, k], bar, w_tiles.index(stage))
    if GATED:
        tma.async_copy_global_to_shared(weight, [N + n, k], bar, up_tiles.index(stage))


@gluon.jit
def _fetch(
    weight, x, tiles, bars, first, steps, n, N: gl.constexpr, GATED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Bring `steps` blocks of k, from number `first` on."""
    ready, empty = bars
    _w_tiles, _up_tiles, x_tiles = tiles
    size: gl.constexpr = ((2 if GATED else 1) * BLOCK_N + BLOCK_M) * BLOCK_K * 2
    ahead = gl.minimum(steps, STAGES)
    for i in range(ahead):
        mbarrier.expect(ready.index(i), size)
        _ask(weight, tiles, ready, n, (first + i) * BLOCK_K, i, N, GATED)
    if OVERLAP:
        gdc_wait()
    for i in range(ahead):
        k = (first + i) * BLOCK_K
        tma.async_copy_global_to_shared(x, [0, k], ready.index(i), x_tiles.index(i))
    for i in range(ahead, steps):
        stage, k = i % STAGES, (first + i) * BLOCK_K
        mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(stage), size)
        _ask(weight, tiles, ready, n, k, stage, N, GATED)
        tma.async_copy_global_to_shared(x, [0, k], ready.index(stage), x_tiles.index(stage))


@gluon.jit
def put(
    y, out, block, rows, N: gl.constexpr, ACC: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Write a block of results. Those of 16 bits are moved so that a thread has eight of a row,
    where it would write them one by one, half a sector at a time.
    """
    LANES: gl.constexpr = min(32, BLOCK_N // 8)
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, gl.num_warps()], [0, 1])
    LAYOUT: gl.constexpr = WIDE if y.dtype.primitive_bitwidth == 16 else ACC
    n = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    real = (n < N)[:, None] & (m < rows)[None, :]
    gl.store(out + m[None, :] * N + n[:, None], gl.convert_layout(y, LAYOUT), mask=real)


@gluon.jit
def _multiply(
    bias, out, sums, arrived, tiles, bars, block, part, steps, rows, N: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A block of results of all rows, or its sum over a part of k."""
    w_tiles, up_tiles, x_tiles = tiles
    ready, empty = bars
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    dtype: gl.constexpr = out.dtype.element_ty
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    acc_up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    for i in range(steps):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        x_tile = x_tiles.index(stage).permute((1, 0))
        acc = warpgroup_mma(w_tiles.index(stage), x_tile, acc, is_async=True)
        # The product before this one has read its tiles.
        if GATED:
            acc_up = warpgroup_mma(up_tiles.index(stage), x_tile, acc_up, is_async=True)
            acc, acc_up = warpgroup_mma_wait(2, deps=(acc, acc_up))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    if GATED:
        acc, acc_up = warpgroup_mma_wait(0, deps=(acc, acc_up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    i = gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC))
    n = block * BLOCK_N + i
    last = True
    if PARTS > 1:
        step = gl.num_programs(0) * (BLOCK_N * BLOCK_M)
        place = sums + block * (BLOCK_N * BLOCK_M) + i[:, None] * BLOCK_M + m[None, :]
        gl.store(place + part * step, acc)
        if GATED:
            gl.store(place + (PARTS + part) * step, acc_up)
        tl.debug_barrier()  # all threads have written before one of them says so
        last = gl.atomic_add(arrived + block, 1, sem="acq_rel") == PARTS - 1
        if last:
            gl.store(arrived + block, 0)
            acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
            acc_up = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
            for p in range(PARTS):
                acc += gl.load(place + p * step, cache_modifier=".cg")
                if GATED:
                    acc_up += gl.load(place + (PARTS + p) * step, cache_modifier=".cg")
    if last:
        if HAS_BIAS:
            acc += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
        if GATED:
            if HAS_BIAS:
                acc_up += gl.load(bias + N + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
            gate, up = acc.to(dtype).to(gl.float32), acc_up.to(dtype).to(gl.float32)
            acc = activated(gate, up, GELU)
        put(acc.to(dtype), out, block, rows, N, ACC, BLOCK_M, BLOCK_N)


@gluon.jit(do_not_specialize=["rows"])
def tile_kernel(
    weight, x, bias, out, sums, arrived, rows, N: gl.constexpr, K: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (block of results, part of k). `weight` and `x` describe blocks [BLOCK_N, BLOCK_K] of
    the weight and [BLOCK_M, BLOCK_K] of all rows. GATED: N results of a weight [2N k], gate and up
    rounded as they are where they are stored. `sums` takes [part, block, BLOCK_N, BLOCK_M], of gate
    and then of up.
    """
    if OVERLAP:
        gdc_launch_dependents()
    block, part = gl.program_id(0), gl.program_id(1)
    ALL: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first = part * ALL // PARTS
    steps = (part + 1) * ALL // PARTS - first
    BARS: gl.constexpr = mbarrier.MBarrierLayout()
    shape: gl.constexpr = [STAGES, BLOCK_N, BLOCK_K]
    w_tiles = gl.allocate_shared_memory(weight.dtype, shape, weight.layout)
    up_tiles = w_tiles
    if GATED:
        up_tiles = gl.allocate_shared_memory(weight.dtype, shape, weight.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    tiles, bars = (w_tiles, up_tiles, x_tiles), (ready, empty)
    gl.warp_specialize(
        [
            (_multiply, (
                bias, out, sums, arrived, tiles, bars, block, part, steps, rows, N, HAS_BIAS, GATED,
                GELU, PARTS, BLOCK_M, BLOCK_N, STAGES,
            )),
            (_fetch, (
                weight, x, tiles, bars, first, steps, block * BLOCK_N, N, GATED, BLOCK_M, BLOCK_N,
                BLOCK_K, STAGES, OVERLAP,
            )),
        ],
        [1],
        [FETCH_REGISTERS],
    )  # fmt: skip
