"""Products with numbers by Triton kernels, so that layers which have them are still made of kernels
alone.
"""

from __future__ import annotations

import torch
import triton

from ...ops.declare import Array, dtype_name
from .launch import FLOATS, overlap, triton_kernel
from .scaling_kernel import scale_kernel, scale_tokens_kernel

BLOCK = 1024
WARPS = 4


def _takes(x: Array, factor: float) -> bool:
    return dtype_name(x) in FLOATS


@triton_kernel("scale", supports_args=_takes, row_invariant=True)
def scale(x: Array, factor: float) -> Array:
    """See the op."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, n = rows.shape
    scale_kernel[(count, triton.cdiv(n, BLOCK))](
        rows, out, factor, rows.stride(0), N=n, BLOCK=BLOCK, num_warps=WARPS, **overlap(early=True)
    )
    return out


def _takes_tokens(x: Array, factor: Array) -> bool:
    return dtype_name(x) in FLOATS and dtype_name(factor) == "float32"


@triton_kernel("scale_tokens", supports_args=_takes_tokens, row_invariant=True)
def scale_tokens(x: Array, factor: Array) -> Array:
    """See the op."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(x.shape[0], -1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, n = rows.shape
    scale_tokens_kernel[(count, triton.cdiv(n, BLOCK))](
        rows, out, factor, rows.stride(0), factor.stride(0),
        N=n, BLOCK=BLOCK, num_warps=WARPS, **overlap(early=True),
    )  # fmt: skip
    return out


def _takes_weight(x: Array, factor: Array) -> bool:
    return dtype_name(x) in FLOATS and dtype_name(factor) in FLOATS


@triton_kernel("scale_by", supports_args=_takes_weight, row_invariant=True)
def scale_by(x: Array, factor: Array) -> Array:
    """See the op."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, n = rows.shape
    scale_tokens_kernel[(count, triton.cdiv(n, BLOCK))](
        rows, out, factor, rows.stride(0), 0,
        N=n, BLOCK=BLOCK, num_warps=WARPS, **overlap(early=True),
    )  # fmt: skip
    return out
