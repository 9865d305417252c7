"""Products of few rows with a weight matrix [n k], bound by the time that its bytes take.

Two shapes of program, each for one block of the n results. `gemv_kernel`: multiply and add in
float32, for one or two rows; the first weights are read before the inputs are there, the next block
of k while one is multiplied, and they leave the L2 to what is read again. `skinny_kernel`: the
tensor cores, up to 64 rows; k may be split among programs, the last of which to arrive adds the
parts in their order.
"""

import triton
import triton.language as tl

from .arithmetic import activated, dot
from .overlap import wait


@triton.jit
def _block(weight, n, at, stride, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """A block of the weight: rows n, columns at."""
    place = weight + n.to(tl.int64)[:, None] * stride + at[None, :]
    if EVEN:
        return tl.load(place, eviction_policy="evict_first")
    else:
        return tl.load(
            place,
            mask=(n < N)[:, None] & (at < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )


@triton.jit
def gemv_kernel(
    x, weight, bias, out, x_stride, weight_stride, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results). ROWS is 1 or 2. GATED: silu(result n) * result N + n, of a weight
    [2N k], or with GELU gelu(result n) * result N + n.
    """
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    even: tl.constexpr = (K % BLOCK_K == 0) & (N % BLOCK_N == 0)
    up = weight + tl.cast(weight_stride, tl.int64) * N if GATED else weight
    added, added_up = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            added_up = tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    w = _block(weight, n, k, weight_stride, N, K, even)
    u = _block(up, n, k, weight_stride, N, K, even) if GATED else w
    wait(OVERLAP)
    a, b = tl.zeros([BLOCK_N, BLOCK_K], tl.float32), tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    c, d = tl.zeros([BLOCK_N, BLOCK_K], tl.float32), tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        at = start + k
        now, now_up = w.to(tl.float32), u.to(tl.float32)
        if start + BLOCK_K < K:
            w = _block(weight, n, at + BLOCK_K, weight_stride, N, K, even)
            u = _block(up, n, at + BLOCK_K, weight_stride, N, K, even) if GATED else w
        y = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
        a += now * y
        if GATED:
            c += now_up * y
        if ROWS > 1:
            y = tl.load(x + x_stride + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
            b += now * y
            if GATED:
                d += now_up * y
    _put(out + n, n < N, tl.sum(a, 1) + added, tl.sum(c, 1) + added_up, GATED, GELU)
    if ROWS > 1:
        _put(out + N + n, n < N, tl.sum(b, 1) + added, tl.sum(d, 1) + added_up, GATED, GELU)


@triton.jit
def _put(place, mask, y, up, GATED: tl.constexpr, GELU: tl.constexpr):
    if GATED:
        y = activated(y, up, GELU)
    tl.store(place, y.to(place.dtype.element_ty), mask=mask)


@triton.jit
def _parts(sums, place, mask, stride, PARTS: tl.constexpr):
    """The parts of a sum, added in their order; each lies `stride` behind the one before."""
    acc = tl.zeros(place.shape, tl.float32)
    for part in range(PARTS):
        acc += tl.load(sums + part * stride + place, mask=mask, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    x, weight, bias, out, sums, arrived, x_stride, weight_stride, rows, N: tl.constexpr,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results, part of k). PART is a multiple of BLOCK_K; BLOCK_M are all rows.
    GATED as in `gemv_kernel`, but gate and up are rounded, as they are where they are stored;
    `sums` [part rows N] takes those of gate, then those of up.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    even: tl.constexpr = (K % BLOCK_K == 0) & (N % BLOCK_N == 0)
    dtype: tl.constexpr = out.dtype.element_ty
    up = weight + tl.cast(weight_stride, tl.int64) * N if GATED else weight
    acc, acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    added, added_up = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            added_up = tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    wait(OVERLAP)
    for start in tl.range(part * PART, min(part * PART + PART, K), BLOCK_K, num_stages=STAGES):
        at = start + k
        a = tl.load(
            x + m[:, None] * x_stride + at[None, :],
            mask=(m < rows)[:, None] & (at < K)[None, :],
            other=0.0,
        )
        acc = dot(a, tl.trans(_block(weight, n, at, weight_stride, N, K, even)), acc)
        if GATED:
            acc_up = dot(a, tl.trans(_block(up, n, at, weight_stride, N, K, even)), acc_up)
    real = (m < rows)[:, None] & (n < N)[None, :]
    place = m[:, None] * N + n[None, :]
    last = True
    if PARTS > 1:
        tl.store(sums + part * rows * N + place, acc, mask=real)
        if GATED:
            tl.store(sums + (PARTS + part) * rows * N + place, acc_up, mask=real)
        tl.debug_barrier()  # all threads have written before one of them says so
        last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == PARTS - 1
        if last:
            tl.store(arrived + block, 0)
            acc = _parts(sums, place, real, rows * N, PARTS)
            if GATED:
                acc_up = _parts(sums + PARTS * rows * N, place, real, rows * N, PARTS)
    if last:
        y = acc + added[None, :]
        if GATED:
            y = activated(_rounded(y, dtype), _rounded(acc_up + added_up[None, :], dtype), GELU)
        tl.store(out + place, y.to(dtype), mask=real)
