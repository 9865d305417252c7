"""The kernels of `scaling.py`."""

import triton
import triton.language as tl

from .overlap import wait


@triton.jit(do_not_specialize=["factor"])
def scale_kernel(
    x, out, factor, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Grid (row, block of entries): out = x * factor."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    wait(OVERLAP)
    y = tl.load(x + row * x_stride + n, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(out + row * N + n, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def scale_tokens_kernel(
    x, out, factor, x_stride, factor_stride, N: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token, block of entries): out = x * the token's factor. A stride of 0: one for all."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    wait(OVERLAP)
    y = tl.load(x + t * x_stride + n, mask=mask, other=0.0).to(tl.float32)
    y *= tl.load(factor + t * factor_stride).to(tl.float32)
    tl.store(out + t * N + n, y.to(out.dtype.element_ty), mask=mask)
