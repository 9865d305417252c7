"""Products of few rows with a weight matrix [n k], bound by the time that its bytes take.

Two shapes of program, each for one block of the n results. `gemv_kernel`: multiply and add in float32, for one or two
rows; the loads of a whole block of k are in flight at once. `skinny_kernel`: the tensor cores, up to 16 rows; k may be
split among programs, the last of which to arrive adds the parts in their order.
"""

import triton
import triton.language as tl

from .arithmetic import dot


@triton.jit
def gemv_kernel(
    x, weight, bias, out, x_stride, weight_stride, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (block of results). ROWS is 1 or 2."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            w = tl.load(weight + n.to(tl.int64)[:, None] * weight_stride + at[None, :]).to(tl.float32)
        else:
            mask = (n < N)[:, None] & (at < K)[None, :]
            w = tl.load(weight + n.to(tl.int64)[:, None] * weight_stride + at[None, :], mask=mask, other=0.0)
            w = w.to(tl.float32)
        first += w * tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
        if ROWS > 1:
            second += w * tl.load(x + x_stride + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
    added = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, (tl.sum(first, 1) + added).to(out.dtype.element_ty), mask=n < N)
    if ROWS > 1:
        tl.store(out + N + n, (tl.sum(second, 1) + added).to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    x, weight, bias, out, sums, arrived, x_stride, weight_stride, rows, N: tl.constexpr, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (block of results, part of k). PART is a multiple of BLOCK_K."""
    block, part = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, 16), block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros([16, BLOCK_N], tl.float32)
    for start in tl.range(part * PART, min(part * PART + PART, K), BLOCK_K, num_stages=STAGES):
        at = start + k
        a = tl.load(x + m[:, None] * x_stride + at[None, :], mask=(m < rows)[:, None] & (at < K)[None, :], other=0.0)
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            w = tl.load(weight + n.to(tl.int64)[:, None] * weight_stride + at[None, :])
        else:
            mask = (n < N)[:, None] & (at < K)[None, :]
            w = tl.load(weight + n.to(tl.int64)[:, None] * weight_stride + at[None, :], mask=mask, other=0.0)
        acc = dot(a, tl.trans(w), acc)
    real = (m < rows)[:, None] & (n < N)[None, :]
    added = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    place = m[:, None] * N + n[None, :]
    if PARTS == 1:
        tl.store(out + place, (acc + added[None, :]).to(out.dtype.element_ty), mask=real)
    else:
        tl.store(sums + part * rows * N + place, acc, mask=real)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrived + block, 0)
            acc = tl.zeros([16, BLOCK_N], tl.float32)
            for other in range(PARTS):
                acc += tl.load(sums + other * rows * N + place, mask=real, other=0.0, cache_modifier=".cg")
            tl.store(out + place, (acc + added[None, :]).to(out.dtype.element_ty), mask=real)
