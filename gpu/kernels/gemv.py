"""linear and logits: kernels for a few rows, whose time is that of reading the weight, and cuBLAS for all others.

Which rows go where is fixed by shapes: `configs.json` says up to how many rows each kernel was faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from ...ops.declare import Array
from ...ops.implement import implement
from .gemv_kernels import gemv_kernel, skinny_kernel
from .launch import COUNTERS, config, counters, dtype_name, power_of_2, processors, supported

HALVES = ("bfloat16", "float16")
MAX_ROWS = 16


def _takes_linear(x: Array, weight: Array, bias: Array | None) -> bool:
    return dtype_name(x) in HALVES and dtype_name(weight) == dtype_name(x) and x.ndim == 2


@implement(
    "linear", provider="triton", framework="torch", supported=supported, supports_args=_takes_linear, opaque=True
)
def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """See the op."""
    few = _few(x, weight, bias, x.dtype)
    if few is not None:
        return few
    if bias is not None and (x.shape[1] % 8 or weight.shape[0] % 8):
        # For sizes that its fused epilogue does not take, cuBLAS was seen to round before the bias.
        return (_product(x, weight) + bias).to(x.dtype)
    return F.linear(x, weight, bias)


def _takes_logits(x: Array, weight: Array) -> bool:
    return dtype_name(x) in HALVES and dtype_name(weight) == dtype_name(x)


@implement(
    "logits", provider="triton", framework="torch", supported=supported, supports_args=_takes_logits, opaque=True
)
def logits(x: Array, weight: Array) -> Array:
    """See the op."""
    few = _few(x, weight, None, torch.float32)
    return _product(x, weight) if few is None else few


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in float32, not rounded."""
    if not x.is_cuda:
        return F.linear(x.to(torch.float32), weight.to(torch.float32))
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The product by a kernel, or None for more rows than they are good for."""
    rows, (n, k) = x.shape[0], weight.shape
    limit = config("linear", f"{n}x{k}")
    if rows > min(MAX_ROWS, limit["skinny_rows"]) or rows == 0:
        return None
    x, weight = (y if y.stride(1) == 1 else y.contiguous() for y in (x, weight))
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    given = x, weight, out if bias is None else bias.contiguous(), out
    if rows <= min(2, limit["gemv_rows"]):
        setting = config("gemv")
        block_k = min(setting["block_k"], power_of_2(k))
        block_n = block_rows(n, setting["entries"] // block_k // rows, setting["programs"] * processors())
        gemv_kernel[(triton.cdiv(n, block_n),)](
            *given, x.stride(0), weight.stride(0), N=n, K=k, ROWS=rows, HAS_BIAS=bias is not None, BLOCK_N=block_n,
            BLOCK_K=block_k, num_warps=setting["warps"],
        )  # fmt: skip
        return out
    setting = config("skinny")
    block_n, block_k = setting["block_n"], setting["block_k"]
    blocks = triton.cdiv(n, block_n)
    parts = max(1, min(setting["programs"] * processors() // blocks, triton.cdiv(k, block_k * setting["steps"])))
    part = triton.cdiv(triton.cdiv(k, parts), block_k) * block_k
    parts = triton.cdiv(k, part) if blocks <= COUNTERS else 1
    sums = arrived = out
    if parts > 1:
        sums = torch.empty(parts * rows * n, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
    else:
        part = triton.cdiv(k, block_k) * block_k
    skinny_kernel[(blocks, parts)](
        *given, sums, arrived, x.stride(0), weight.stride(0), rows, N=n, K=k, HAS_BIAS=bias is not None,
        PARTS=parts, PART=part, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=setting["stages"],
        num_warps=setting["warps"],
    )  # fmt: skip
    return out


def block_rows(n: int, most: int, programs: int) -> int:
    """Results of one program: at most `most`, fewer while there are fewer programs than wanted."""
    block = max(1, 1 << (max(1, most).bit_length() - 1))
    while block > 1 and triton.cdiv(n, block) < programs:
        block //= 2
    return block
