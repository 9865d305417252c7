"""A gated MLP of fp8 for one token in two launches. Its hidden row is quantised by the largest of
all its entries: the first launch leaves that of each program, and programs of the second take the
largest of these. Nothing is added up on the way, so no order matters.
"""

import triton
import triton.language as tl

from .arithmetic import gated
from .narrow_kernels import FP8_SHARE, SMALLEST, _as_e4m3, _block, _kept_block, _narrowed, _size
from .overlap import wait


@triton.jit
def gated_gemv_kernel(
    x, weight, scale, bias, out, largest, N: tl.constexpr, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (program): as `quantizing_gemv_kernel` for one row, by a weight [2 N k] of gates and of
    what goes with them. Both are rounded to the dtype of `out`, which is silu(gate) * up; `largest`
    [program] is how large a program's results are at most.
    """
    k = tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w, of_w = _kept_block(weight, scale, n, k, N, K)
    u, of_u = _kept_block(weight + N * K, scale + N, n, k, N, K)
    wait(OVERLAP)
    row, of_x = _as_e4m3(tl.load(x + k, mask=k < K, other=0.0).to(tl.float32))
    row = row.to(tl.float32)[None, :]
    most = _put_gated(w, of_w, u, of_u, n, row, of_x, bias, out, N, HAS_BIAS)
    for block in range(
        tl.program_id(0) + tl.num_programs(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)
    ):
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        w, of_w = _kept_block(weight, scale, n, k, N, K)
        u, of_u = _kept_block(weight + N * K, scale + N, n, k, N, K)
        most = tl.maximum(most, _put_gated(w, of_w, u, of_u, n, row, of_x, bias, out, N, HAS_BIAS))
    tl.store(largest + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _put_gated(w, of_w, u, of_u, n, x, of_x, bias, out, N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Results of a block, to their place; how large each of them is."""
    dtype = out.dtype.element_ty
    gate = tl.sum(w.to(tl.float32) * x, 1) * of_x * of_w
    up = tl.sum(u.to(tl.float32) * x, 1) * of_x * of_u
    if HAS_BIAS:
        gate += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    y = gated(gate, up).to(dtype)
    tl.store(out + n, y, mask=n < N)
    return tl.where(n < N, _size(y.to(tl.float32)), 0.0)


@triton.jit
def scaling_gemv_kernel(
    x, largest, weight, scale, bias, out, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of results): as `narrow_gemv_kernel` for one row of fp8, which each program
    quantises as it reads it, by the largest of `largest` [PARTS]. A weight's row has one scale.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k, p = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P)
    even: tl.constexpr = (K % BLOCK_K == 0) & (N % BLOCK_N == 0)
    added = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    w = _block(weight, n, k, N, K, even)
    of_n = tl.load(scale + n, mask=n < N, other=0.0)
    wait(OVERLAP)
    amax = tl.max(tl.load(largest + p, mask=p < PARTS, other=0.0), 0)
    of_x = tl.where(amax < SMALLEST, 1.0, amax * FP8_SHARE)
    inverse = tl.div_rn(1.0, of_x)
    a = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        at = start + k
        now = w
        if start + BLOCK_K < K:
            w = _block(weight, n, at + BLOCK_K, N, K, even)
        y = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32) * inverse
        a += now.to(tl.float32) * _narrowed(y, True).to(tl.float32)[None, :]
    y = tl.sum(a, 1) * of_x * of_n + added
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)
