"""The product with a number by a Triton kernel, so that layers which have one are still made of
kernels alone.
"""

from __future__ import annotations

import torch
import triton

from ...ops.declare import Array
from .launch import FLOATS, dtype_name, overlap, triton_kernel
from .scaling_kernel import scale_kernel

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
