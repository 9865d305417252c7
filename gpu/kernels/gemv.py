"""linear, logits, the gated MLPs: kernels for a few rows, whose time is that of reading the weight,
else cuBLAS.

Which rows go where is fixed by shapes: `configs.json` says up to how many rows each kernel was
faster, and which blocks `tile_kernel` and `held_kernel` have where one of them was.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from ...ops.declare import Array, dtype_name
from .counters import COUNTERS, counters
from .gemv_kernels import gemv_kernel, skinny_kernel
from .launch import (
    carve_out,
    config,
    hopper,
    overlap,
    power_of_2,
    processors,
    triton_kernel,
)
from .rows import gelu_and_mul, silu_and_mul

HALVES = ("bfloat16", "float16")
MAX_ROWS = 64
"""Of `skinny_kernel`."""
MAX_TILE_ROWS = 256
MAX_HELD_ROWS = 32
TILE_K = 64
"""Entries of k in a block of `tile_kernel`: 128 bytes, which the copy engine swizzles at once."""


def _takes_linear(x: Array, weight: Array, bias: Array | None) -> bool:
    return dtype_name(x) in HALVES and dtype_name(weight) == dtype_name(x) and x.ndim == 2


@triton_kernel("linear", supports_args=_takes_linear)
def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """See the op."""
    few = _few(x, weight, bias, x.dtype)
    return by_cublas(x, weight, bias) if few is None else few


def by_cublas(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See the op: also of a weight that the launch before writes, as nothing is read early."""
    if bias is not None and (x.shape[1] % 8 or weight.shape[0] % 8):
        # For sizes that its fused epilogue does not take, cuBLAS was seen to round before the bias.
        return (_product(x, weight) + bias).to(x.dtype)
    return F.linear(x, weight, bias)


def _takes_logits(x: Array, weight: Array) -> bool:
    return dtype_name(x) in HALVES and dtype_name(weight) == dtype_name(x)


@triton_kernel("logits", supports_args=_takes_logits)
def logits(x: Array, weight: Array) -> Array:
    """See the op."""
    few = _few(x, weight, None, torch.float32)
    return _product(x, weight) if few is None else few


def _takes_mlp(
    x: Array, gate_up: Array, gate_up_bias: Array | None, down: Array, down_bias: Array | None
) -> bool:
    return _takes_linear(x, gate_up, gate_up_bias) and _takes_linear(x, down, down_bias)


@triton_kernel("gated_mlp", supports_args=_takes_mlp)
def gated_mlp(
    x: Array, gate_up: Array, gate_up_bias: Array | None, down: Array, down_bias: Array | None
) -> Array:
    """See the op. For one or two rows gate and up are not rounded; else it is the composition of
    the ops here, though up to some rows in one launch.
    """
    y = _few(x, gate_up, gate_up_bias, x.dtype, act="silu")
    if y is None:
        y = silu_and_mul(linear(x, gate_up, gate_up_bias))
    return linear(y, down, down_bias)


@triton_kernel("gelu_gated_mlp", supports_args=_takes_mlp)
def gelu_gated_mlp(
    x: Array, gate_up: Array, gate_up_bias: Array | None, down: Array, down_bias: Array | None
) -> Array:
    """See the op, and `gated_mlp` here."""
    y = _few(x, gate_up, gate_up_bias, x.dtype, act="gelu")
    if y is None:
        y = gelu_and_mul(linear(x, gate_up, gate_up_bias), "tanh")
    return linear(y, down, down_bias)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in float32, not rounded."""
    if not x.is_cuda:
        return F.linear(x.to(torch.float32), weight.to(torch.float32))
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    act: str = "",
) -> torch.Tensor | None:
    """The product by a kernel, or with `act`, silu or gelu, that of a gate and of up in one launch;
    None for more rows than kernels are good for.
    """
    rows, (n, k) = x.shape[0], weight.shape
    limit = config("linear", f"{n}x{k}")
    if 0 < rows <= min(2, limit["gemv_rows"]):
        return _gemv(x, weight, bias, dtype, act=act)
    held = _measured("held", x, weight, MAX_HELD_ROWS, 8, act)
    if held:
        return _held(x, weight, bias, dtype, held, act=act)
    tiles = _measured("tiles", x, weight, MAX_TILE_ROWS, 16, act)
    if tiles:
        return _tiled(x, weight, bias, dtype, tiles, act=act)
    if 0 < rows <= min(MAX_ROWS, limit["gated_rows" if act else "skinny_rows"]):
        return _skinny(x, weight, bias, dtype, act=act)
    return None


def _gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    act: str = "",
) -> torch.Tensor:
    """The product, or with `act` that of a gate and of up: weight and bias are those of both."""
    gated = act != ""
    rows, (n, k) = x.shape[0], weight.shape
    # What was measured for a shape was measured with one row.
    setting = config("gemv", f"{n}x{k}") if rows == 1 else config("gemv")
    x, weight = (y if y.stride(1) == 1 else y.contiguous() for y in (x, weight))
    n = n // 2 if gated else n
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    if "block_n" in setting:
        block_n, block_k = setting["block_n"], setting["block_k"]
    else:
        sums = 2 * rows if gated else rows
        block_n = block_rows(
            n, max(2, setting["entries"] // k) // sums, setting["programs"] * processors()
        )
        block_k = block_columns(k, min(setting["block_k"], setting["entries"] // (block_n * sums)))
    gemv_kernel[(triton.cdiv(n, block_n),)](
        x, weight, out if bias is None else bias.contiguous(), out, x.stride(0), weight.stride(0),
        N=n, K=k, ROWS=rows, HAS_BIAS=bias is not None, GATED=gated, GELU=act == "gelu",
        BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
    return out


def _skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    act: str = "",
) -> torch.Tensor:
    """See `_gemv`."""
    gated = act != ""
    rows, (n, k) = x.shape[0], weight.shape
    block_m = power_of_2(rows, 16)
    what = "gated" if gated else "skinny"
    setting = config(what, f"{n}x{k}/{block_m}", str(block_m))
    # Measured: what comes up behind it slows the reading of a large weight by more than it gains.
    overlapping = overlap(early=True) if n * k <= setting["overlap"] else {"OVERLAP": 0}
    x, weight = (y if y.stride(1) == 1 else y.contiguous() for y in (x, weight))
    n = n // 2 if gated else n
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    block_n, block_k = setting["block_n"], setting["block_k"]
    blocks = triton.cdiv(n, block_n)
    parts = setting.get("parts") or max(
        1,
        min(
            setting["programs"] * processors() // blocks, triton.cdiv(k, block_k * setting["steps"])
        ),
    )
    part = triton.cdiv(triton.cdiv(k, parts), block_k) * block_k
    parts = triton.cdiv(k, part) if blocks <= COUNTERS else 1
    sums = arrived = out
    if parts > 1:
        sums = torch.empty((1 + gated) * parts * rows * n, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
    else:
        part = triton.cdiv(k, block_k) * block_k
    skinny_kernel[(blocks, parts)](
        x, weight, out if bias is None else bias.contiguous(), out, sums, arrived, x.stride(0),
        weight.stride(0), rows,
        N=n, K=k, HAS_BIAS=bias is not None, GATED=gated, GELU=act == "gelu", PARTS=parts,
        PART=part, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        STAGES=setting["stages"], num_warps=setting["warps"], **overlapping,
    )  # fmt: skip
    return out


def _measured(
    kernel: str, x: torch.Tensor, weight: torch.Tensor, most: int, least: int, act: str
) -> dict[str, int]:
    """The blocks of a kernel for Hopper alone that takes up to `most` rows, for these rows and this
    weight; {} where it was not the fastest. They are noted by powers of 2 from `least` on.
    """
    rows, (n, k) = x.shape[0], weight.shape
    if not 0 < rows <= most or not hopper():
        return {}
    aligned = all(
        y.stride(1) == 1 and y.stride(0) % 8 == 0 and y.data_ptr() % 16 == 0 for y in (x, weight)
    )
    what = f"gated_{kernel}" if act else kernel
    return config(what, f"{n}x{k}/{power_of_2(rows, least)}") if aligned else {}


def _held(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    setting: dict[str, int],
    *,
    act: str = "",
) -> torch.Tensor:
    """See `_gemv`."""
    from .held_kernel import held_kernel  # in a language of its own

    gated = act != ""
    rows, (n, k) = x.shape[0], weight.shape
    n = n // 2 if gated else n
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    results = setting["block_n"] // 2 if gated else setting["block_n"]
    launched = held_kernel[(triton.cdiv(n, results),)](
        x, weight, out if bias is None else bias.contiguous(), out, rows, x.stride(0),
        weight.stride(0),
        N=n, K=k, HAS_BIAS=bias is not None, GATED=gated, GELU=act == "gelu",
        M=power_of_2(rows, 8), BLOCK_N=setting["block_n"], WARPS=setting["warps"],
        AHEAD=setting["ahead"], num_warps=setting["warps"], maxnreg=setting.get("registers"),
        **overlap(early=True),
    )  # fmt: skip
    carve_out(launched, setting)
    return out


def _tiled(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    setting: dict[str, int],
    *,
    act: str = "",
) -> torch.Tensor:
    """See `_gemv`."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .tile_kernel import tile_kernel

    gated = act != ""
    rows, (n, k) = x.shape[0], weight.shape
    n = n // 2 if gated else n
    block_m, block_n, parts = power_of_2(rows, 16), setting["block_n"], setting["parts"]
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    blocks = triton.cdiv(n, block_n)
    sums = arrived = out
    if parts > 1:
        size = (1 + gated) * parts * blocks * block_n * block_m
        sums = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
    swizzled = NVMMASharedLayout(128, 16, 2)
    tile_kernel[(blocks, parts)](
        TensorDescriptor.from_tensor(weight, [block_n, TILE_K], swizzled),
        TensorDescriptor.from_tensor(x, [block_m, TILE_K], swizzled),
        out if bias is None else bias.contiguous(), out, sums, arrived, rows,
        N=n, K=k, HAS_BIAS=bias is not None, GATED=gated, GELU=act == "gelu", PARTS=parts,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=TILE_K, STAGES=setting["stages"],
        num_warps=setting["warps"], maxnreg=setting["registers"], **overlap(early=True),
    )  # fmt: skip
    return out


def block_columns(k: int, most: int) -> int:
    """Entries of k that a program takes at a time: at most `most`, fewer if those divide k."""
    block = min(power_of_2(k), 1 << (most.bit_length() - 1))
    while k % block and block > 1024:
        block //= 2
    return block


def block_rows(n: int, most: int, programs: int) -> int:
    """Results of one program: at most `most`, fewer while there are fewer programs than wanted."""
    block = max(1, 1 << (max(1, most).bit_length() - 1))
    while block > 1 and triton.cdiv(n, block) < programs:
        block //= 2
    return block
