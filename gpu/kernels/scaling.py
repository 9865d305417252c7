"""The product with a number by a Triton kernel, so that layers which have one are still made of kernels alone."""

from __future__ import annotations

import torch
import triton

from ...ops.declare import Array
from ...ops.implement import implement
from .launch import FLOATS, dtype_name, overlap, supported
from .scaling_kernel import scale_kernel

BLOCK = 1024
WARPS = 4


def _takes(x: Array, factor: float) -> bool:
    return dtype_name(x) in FLOATS and x.ndim == 2


@implement(
    "scale", provider="triton", framework="torch", supported=supported, supports_args=_takes, opaque=True,
    row_invariant=True,
)  # fmt: skip
def scale(x: Array, factor: float) -> Array:
    """See the op."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, n = x.shape
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    scale_kernel[(rows, triton.cdiv(n, BLOCK))](
        x, out, factor, x.stride(0), N=n, BLOCK=BLOCK, num_warps=WARPS, **overlap(early=True)
    )
    return out
