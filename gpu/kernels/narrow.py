"""linear_grouped, linear_fp8, linear_int8 and the quantisation of tokens: kernels that read narrow
weights as they lie, and widen them in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from ...ops.declare import Array, dtype_name
from ...ops.implement import Refusal, implement
from ...ops.reference.narrow import FP8_UNITS
from .counters import COUNTERS, counters
from .gemv import block_columns, block_rows, by_cublas
from .launch import (
    FLOATS,
    capability,
    config,
    hopper,
    kind_of,
    overlap,
    power_of_2,
    processors,
    triton_kernel,
)
from .narrow_kernels import (
    fp8_gemv_kernel,
    narrow_gemv_kernel,
    narrow_kernel,
    quantize_by_kernel,
    quantize_by_largest_kernel,
    quantize_kernel,
    quantizing_gemv_kernel,
    widen_kernel,
)
from .rows import sum_and_norm, takes_add_norm

PACKED = ("int4", "fp4")
UNITS_CAPABILITY = (9, 0)
MOST_TILE_ROWS = 128
"""Of `narrow_tile_kernel`: more than that widen the weight for cuBLAS."""
UNITS_FROM = 16
"""Up to so many rows a product is bound by the reading of its weight."""
MOST_QUANTIZED = 1 << 16
"""Entries of a row that one program quantises."""


def _takes_quantized(x: Array, per: str, block: int) -> bool | Refusal:
    if per not in ("row", "block"):
        return Refusal(f"scales per {per}; these are per row or block")
    if per == "block" and power_of_2(block) != block:
        return Refusal(f"blocks of {block}, which is no power of 2")
    return dtype_name(x) in FLOATS and x.shape[1] <= MOST_QUANTIZED


@triton_kernel("quantize_fp8_dynamic", supports_args=_takes_quantized, row_invariant=True)
def quantize_fp8_dynamic(x: Array, per: str, block: int) -> tuple[Array, Array]:
    """See the op."""
    return _quantized(x, torch.float8_e4m3fn, block if per == "block" else 0)


@triton_kernel("quantize_int8_dynamic", supports_args=_takes_quantized, row_invariant=True)
def quantize_int8_dynamic(x: Array, per: str, block: int) -> tuple[Array, Array]:
    """See the op."""
    return _quantized(x, torch.int8, block if per == "block" else 0)


def _takes_given(x: Array, scale: Array) -> bool | Refusal:
    if scale.shape[1] > 1:
        return Refusal(f"{scale.shape[1]} scales a row; these have one")
    return dtype_name(x) in FLOATS and dtype_name(scale) == "float32"


@triton_kernel("quantize_fp8", supports_args=_takes_given, row_invariant=True)
def quantize_fp8(x: Array, scale: Array) -> Array:
    """See the op."""
    return _quantized_by(x, scale, torch.float8_e4m3fn)


@triton_kernel("quantize_int8", supports_args=_takes_given, row_invariant=True)
def quantize_int8(x: Array, scale: Array) -> Array:
    """See the op."""
    return _quantized_by(x, scale, torch.int8)


def _quantized_by(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, k = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty((rows, k), dtype=dtype, device=x.device)
    setting = config("quantize")
    block_k = min(power_of_2(k), setting["block"])
    if rows:
        quantize_by_kernel[(rows, triton.cdiv(k, block_k))](
            x, values, scale, x.stride(0), 0 if scale.shape[0] == 1 else scale.stride(0),
            K=k, FP8=dtype == torch.float8_e4m3fn, BLOCK_K=block_k,
            num_warps=setting["warps"], **overlap(early=True),
        )  # fmt: skip
    return values


def _in_words(x: torch.Tensor) -> torch.Tensor:
    """Rows whose entries are neighbours; those of whole words of e4m3 lie at multiples of 8 bytes,
    as `_fours` reads them.
    """
    aligned = x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0
    if x.stride(1) == 1 and (aligned or x.shape[1] % 4):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _quantized(
    x: torch.Tensor, dtype: torch.dtype, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, k = x.shape
    group = block or k
    x = _in_words(x)
    values = torch.empty((rows, k), dtype=dtype, device=x.device)
    scale = torch.empty((rows, k // group), dtype=torch.float32, device=x.device)
    setting = config("quantize")
    block_k = power_of_2(k) if group == k else max(group, min(power_of_2(k), setting["block"]))
    if rows:
        quantize_kernel[(rows, triton.cdiv(k, block_k))](
            x, values, scale, x.stride(0),
            K=k, GROUP=group, FP8=dtype == torch.float8_e4m3fn, BLOCK_K=block_k,
            num_warps=setting["warps"], **overlap(early=True),
        )  # fmt: skip
    return values, scale


def refused_groups(k: int, groups: int) -> Refusal | None:
    """Why a kernel does not take this many groups of k."""
    if groups > 1 and (power_of_2(k // groups) != k // groups or k // groups < 16):
        return Refusal(f"groups of {k // groups} entries; these are powers of 2 from 16 on")
    return None


def takes_grouped(
    x: Array,
    weight: Array,
    scale: Array,
    zero: Array | None,
    bias: Array | None,
    kind: str,
) -> bool | Refusal:
    refusal = refused_groups(x.shape[1], scale.shape[1])
    if refusal is not None:
        return refusal
    return dtype_name(x) in FLOATS and x.ndim == 2 and dtype_name(scale) == "float32"


@triton_kernel("linear_grouped", supports_args=takes_grouped)
def linear_grouped(
    x: Array,
    weight: Array,
    scale: Array,
    zero: Array | None,
    bias: Array | None,
    kind: str,
) -> Array:
    """See the op. Scales of 64 entries and more multiply sums, others the entries, which are
    rounded then.
    """
    return _product(x, weight, scale, zero, None, bias, kind, x.dtype)


def _takes_tokens(x: Array, x_scale: Array | None) -> bool | Refusal:
    """Whether tokens that come without a scale can be quantised here."""
    return x_scale is not None or _takes_quantized(x, "row", 0)


def takes_quantised(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> bool | Refusal:
    """Scales are of whole rows, or of blocks that are powers of 2."""
    taken = _takes_tokens(x, x_scale)
    if taken is not True:
        return taken
    for scale in (weight_scale, x_scale):
        if scale is None:
            continue
        refusal = refused_groups(x.shape[1], scale.shape[1])
        if refusal is not None:
            return refusal
        if dtype_name(scale) != "float32":
            return False
    return dtype in FLOATS


def takes_units(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> bool | Refusal:
    taken = _takes_tokens(x, x_scale)
    if taken is not True:
        return taken
    if (x_scale is not None and x_scale.shape[1] > 1) or weight_scale.shape[1] > 1:
        return Refusal("scales of blocks; these are of rows")
    if dtype != "bfloat16" or weight.shape[0] % 16 or weight.shape[1] % 16:
        return Refusal(f"{dtype} of {list(weight.shape)}; these are bfloat16 of multiples of 16")
    return bias is None


@implement(
    "linear_fp8",
    provider="scaled_mm",
    framework="torch",
    supported=lambda: capability() >= UNITS_CAPABILITY,
    supports_args=takes_units,
    opaque=True,
    preferred_on=("cuda",),
    dot=FP8_UNITS,
)
def linear_fp8_units(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> Array:
    """See the op: a few rows by the kernel, more by the chip's fp8 units."""
    if x.shape[0] <= UNITS_FROM:
        return linear_fp8(x, weight, x_scale, weight_scale, bias, dtype)
    if x_scale is None:
        x, x_scale = quantize_fp8_dynamic(x, "row", 0)
    rows, n = x.shape[0], weight.shape[0]
    return torch._scaled_mm(
        x,
        weight.t(),
        x_scale.expand(rows, 1).contiguous(),
        weight_scale.expand(n, 1).contiguous().t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


@triton_kernel("linear_fp8", supports_args=takes_quantised)
def linear_fp8(
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> Array:
    """See the op: products of e4m3 in bfloat16, sums in float32."""
    if x_scale is None and quantises(x, weight, weight_scale):
        return quantizing_gemv(x, weight, weight_scale, bias, getattr(torch, dtype))[0]
    if x_scale is None:
        x, x_scale = quantize_fp8_dynamic(x, "row", 0)
    return _product(x, weight, weight_scale, None, x_scale, bias, "fp8", getattr(torch, dtype))


def _takes_int8(
    x: Array, weight: Array, x_scale: Array, weight_scale: Array, bias: Array | None, dtype: str
) -> bool | Refusal:
    return takes_quantised(x, weight, x_scale, weight_scale, bias, dtype)


@triton_kernel("linear_int8", supports_args=_takes_int8, row_invariant=True)
def linear_int8(
    x: Array, weight: Array, x_scale: Array, weight_scale: Array, bias: Array | None, dtype: str
) -> Array:
    """See the op: sums in int32."""
    return _product(x, weight, weight_scale, None, x_scale, bias, "int8", getattr(torch, dtype))


def _takes_behind_norm(
    x: Array,
    residual: Array,
    norm: Array,
    weight: Array,
    weight_scale: Array,
    bias: Array | None,
    eps: float,
) -> bool | Refusal:
    if not takes_add_norm(x, residual, norm, eps):
        return False
    return takes_quantised(x, weight, None, weight_scale, bias, dtype_name(x))


def _units_take_behind_norm(
    x: Array,
    residual: Array,
    norm: Array,
    weight: Array,
    weight_scale: Array,
    bias: Array | None,
    eps: float,
) -> bool | Refusal:
    if not takes_add_norm(x, residual, norm, eps):
        return False
    return takes_units(x, weight, None, weight_scale, bias, dtype_name(x))


@implement(
    "add_norm_linear_fp8",
    provider="scaled_mm",
    framework="torch",
    supported=lambda: capability() >= UNITS_CAPABILITY,
    supports_args=_units_take_behind_norm,
    opaque=True,
    preferred_on=("cuda",),
    dot=FP8_UNITS,
)
def add_norm_linear_fp8_units(
    x: Array,
    residual: Array,
    norm: Array,
    weight: Array,
    weight_scale: Array,
    bias: Array | None,
    eps: float,
) -> tuple[Array, Array]:
    """See the op: many rows by the chip's fp8 units."""
    return _behind_norm(linear_fp8_units, x, residual, norm, weight, weight_scale, bias, eps)


@triton_kernel("add_norm_linear_fp8", supports_args=_takes_behind_norm)
def add_norm_linear_fp8(
    x: Array,
    residual: Array,
    norm: Array,
    weight: Array,
    weight_scale: Array,
    bias: Array | None,
    eps: float,
) -> tuple[Array, Array]:
    """See the op."""
    return _behind_norm(linear_fp8, x, residual, norm, weight, weight_scale, bias, eps)


def _behind_norm(
    linear: Callable[..., torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op, by an implementation of `linear_fp8`."""
    if norms(x, weight, scale):
        added = norm_of_sum(residual, norm, eps)
        return quantizing_gemv(x, weight, scale, bias, x.dtype, norm=added)[0], added.total
    normed, total = sum_and_norm(x, residual, norm, eps)
    return linear(normed, weight, None, scale, bias, dtype_name(x)), total


class Product(NamedTuple):
    """A product as kernels take it: x [row k], the weight and its scales [n k / group], zeros of
    these or None, scales of x or None, a bias [n] or None, and where it goes [row n].
    """

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    x_scale: torch.Tensor | None
    bias: torch.Tensor | None
    kind: str
    out: torch.Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, results of each, entries of k."""
        return self.x.shape[0], self.weight.shape[0], self.x.shape[1]

    @property
    def group(self) -> int:
        """Entries along k that share a scale of the weight."""
        return self.x.shape[1] // self.scale.shape[1]

    @property
    def x_group(self) -> int:
        """Entries along k that share a scale of x, 0 if it has none."""
        return 0 if self.x_scale is None else self.x.shape[1] // self.x_scale.shape[1]

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """Its arrays; what it does not have is stood in for."""
        return (
            self.x,
            self.weight,
            self.scale,
            self.weight if self.zero is None else self.zero,
            self.x if self.x_scale is None else self.x_scale,
            self.out if self.bias is None else self.bias,
            self.out,
        )

    @property
    def strides(self) -> tuple[int, int]:
        """From row to row of x, and of its scales."""
        if self.x_scale is None or self.x_scale.shape[0] == 1:
            return self.x.stride(0), 0
        return self.x.stride(0), self.x_scale.stride(0)

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        _, n, k = self.sizes
        return {
            "N": n,
            "K": k,
            "KIND": kind_of(self.kind),
            "GROUP": self.group,
            "X_GROUP": self.x_group,
            "HAS_ZERO": self.zero is not None,
            "HAS_BIAS": self.bias is not None,
        }


def prepared(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    out: torch.Tensor,
) -> Product:
    """A product whose arrays lie as kernels read them: a scale for each row of the weight, and
    neighbouring entries of each row.
    """
    n = weight.shape[0]
    return Product(
        x if x.stride(1) == 1 else x.contiguous(),
        weight.contiguous(),
        # One scale for all rows of the weight is that of each.
        (scale if scale.shape[0] == n else scale.expand(n, -1)).contiguous(),
        None if zero is None else zero.contiguous(),
        x_scale if x_scale is None or x_scale.stride(1) == 1 else x_scale.contiguous(),
        None if bias is None else bias.contiguous(),
        kind,
        out,
    )


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product by the kernel for so many rows."""
    rows, n = x.shape[0], weight.shape[0]
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    asked = prepared(x, weight, scale, zero, x_scale, bias, kind, out)
    if try_operand_kernels(asked):
        return out
    limit = config("narrow", kind)
    if rows <= min(2, limit["gemv_rows"]):
        _gemv(asked)
    elif x_scale is None and rows > limit["widened_from"] and dtype_name(x) != "float32":
        return by_cublas(asked.x, _widened(asked), asked.bias)
    else:
        _blocks(asked)
    return out


def quantises(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether `quantizing_gemv_kernel` takes these rows: it holds each as a whole."""
    setting, k = config("quantizing_gemv"), x.shape[1]
    few = x.shape[0] <= min(2, setting["rows"]) and scale.shape[1] == 1
    return few and k % 4 == 0 and power_of_2(k) <= min(setting["most_k"], 9 * k // 8)


def norms(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether `quantizing_gemv_kernel` takes the norm of these rows, and not a launch before it."""
    n, k = weight.shape
    return quantises(x, weight, scale) and bool(
        config("quantizing_gemv", f"{n}x{k}").get("norm", 1)
    )


def _programs(blocks: int, most: int) -> int:
    """How many programs, at most `most`, take as many blocks each as the busiest has to."""
    return triton.cdiv(blocks, triton.cdiv(blocks, most))


class NormOfSum(NamedTuple):
    """The norm of the sum of rows and a residual [row k], with a weight [k]; `total` [row k] gets
    the sum.
    """

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float
    total: torch.Tensor


def norm_of_sum(residual: torch.Tensor, weight: torch.Tensor, eps: float) -> NormOfSum:
    """With memory for the sum, which programs that still read the residual cannot write into."""
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    return NormOfSum(residual, weight, eps, total)


def quantizing_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    norm: NormOfSum | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The product of rows that `quantises` takes, or of their `norm`. If `gated`, silu(gate) * up
    of it, and the sizes of the largest entries of parts of each row [row part].
    """
    rows, (n, k) = x.shape[0], weight.shape
    setting, block_k = config("quantizing_gemv", f"{n}x{k}"), power_of_2(k)
    x = _in_words(x)
    residual, of_norm, eps, total = (x, x, 0.0, x)
    if norm is not None:
        residual, of_norm = _in_words(norm.residual), _in_words(norm.weight[None, :])
        eps, total = norm.eps, norm.total
    scale = (scale if scale.shape[0] == n else scale.expand(n, -1)).contiguous()
    n = n // 2 if gated else n
    out = torch.empty((rows, n), dtype=dtype, device=x.device)
    most = setting["programs"] * processors()
    held = block_k * (2 if gated else 1) * max(1, rows)
    block_n = setting.get("block_n") or block_rows(n, setting["entries"] // held, most)
    programs = _programs(triton.cdiv(n, block_n), most)
    largest = None
    if gated:
        largest = torch.empty((rows, programs), dtype=torch.float32, device=x.device)
    if rows == 0:
        return out, largest
    quantizing_gemv_kernel[(programs,)](
        x, residual, of_norm, total, weight.contiguous().view(torch.int32), scale,
        out if bias is None else bias.contiguous(), out, scale if largest is None else largest,
        eps, x.stride(0), residual.stride(0),
        N=n, K=k, ROWS=rows, NORMED=norm is not None, HAS_BIAS=bias is not None, GATED=gated,
        BLOCK_N=block_n, WORDS=block_k // 4, num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
    return out, largest


def quantized_by_largest(
    x: torch.Tensor, largest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_fp8_dynamic` by row, where the largest entry of a row [row k] is known to be one of
    `largest` [row part]: the same bits.
    """
    (rows, k), found = x.shape, largest.shape[1]
    values = torch.empty((rows, k), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    setting = config("quantize_by_largest")
    block_k = min(setting["block"], power_of_2(k))
    if rows:
        quantize_by_largest_kernel[(rows, triton.cdiv(k, block_k))](
            x, largest, values, scale,
            K=k, FOUND=found, BLOCK_F=power_of_2(found), BLOCK_K=block_k,
            num_warps=setting["warps"], **overlap(early=True),
        )  # fmt: skip
    return values, scale


def _widened(product: Product) -> torch.Tensor:
    """The weight in the dtype of x: what so many rows take makes up for writing it."""
    _, n, k = product.sizes
    out = torch.empty((n, k), dtype=product.x.dtype, device=product.x.device)
    setting = config("widen")
    block_k = min(setting["block"], power_of_2(k))
    widen_kernel[(n, triton.cdiv(k, block_k))](
        *product.arrays[1:4], out,
        K=k, KIND=kind_of(product.kind), GROUP=product.group, HAS_ZERO=product.zero is not None,
        BLOCK_K=block_k, num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
    return out


def _gemv(product: Product) -> None:
    rows, n, k = product.sizes
    if product.kind == "fp8" and rows == 1 and product.group == product.x_group == k and k % 4 == 0:
        _fp8_gemv(product)
        return
    setting = config("narrow_gemv", product.kind)
    most = max(2, min(setting["block_k"], setting["entries"] // rows))
    if product.group < k:
        most = max(most, product.group)
    block_k = block_columns(k, most)
    block_n = block_rows(
        n, setting["entries"] // (block_k * rows), setting["programs"] * processors()
    )
    narrow_gemv_kernel[(triton.cdiv(n, block_n),)](
        *product.arrays, *product.strides, **product.constants, ROWS=rows, BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip


def _fp8_gemv(product: Product) -> None:
    """Of one row of e4m3."""
    _, n, k = product.sizes
    setting = config("fp8_gemv")
    x, weight, scale, _, x_scale, bias, out = product.arrays
    block = block_columns(k, setting["block_k"])
    fp8_gemv_kernel[(triton.cdiv(n, setting["block_n"]),)](
        x.contiguous().view(torch.int32), weight.view(torch.int32), scale, x_scale, bias, out,
        N=n, K=k, HAS_BIAS=product.bias is not None, BLOCK_N=setting["block_n"],
        WORDS=max(1, block // 4), AHEAD=setting["ahead"], num_warps=setting["warps"],
        **overlap(early=True),
    )  # fmt: skip


def try_operand_kernels(product: Product, *, gated: bool = False) -> bool:
    """Whether a kernel that widens weights to operands of the tensor cores takes the product, which
    it has launched then, or silu(gate) * up of it if `gated`.
    """
    for takes, launch in ((fragments_take, fragments), (tiles_take, tiles)):
        if takes(product):
            launch(product, gated=gated)
            return True
    return False


def fragments_take(product: Product) -> bool:
    """Whether `fragment_kernel` takes so many rows of this kind."""
    rows, _, k = product.sizes
    if product.kind == "fp8":
        takes = product.x_scale is not None
    else:
        halves = dtype_name(product.x) in ("bfloat16", "float16")
        takes = product.kind == "int4" and product.x_scale is None and halves
    if not hopper() or not takes:
        return False
    setting = config("fragments", product.kind)
    groups = (product.group, product.x_group)
    fits = k % 128 == 0 and all(group % 128 == 0 for group in groups)
    return fits and setting["from_rows"] <= rows <= setting["rows"]


def fragments(product: Product, *, gated: bool = False) -> None:
    from .fragment_kernel import fragment_kernel  # in a language of its own

    rows, n, k = product.sizes
    n = n // 2 if gated else n
    few, kind = power_of_2(rows), product.kind
    variants = (f"{kind}/{k}/{few}", f"{kind}/{few}", f"{kind}/{k}", kind)
    setting = config("fragments", *([f"{variants[0]}/gated"] if gated else []), *variants)
    warps, block_n, pieces = setting["warps"], setting["block_n"], setting["pieces"]
    while k % (128 * pieces) or few * pieces > 16:
        pieces //= 2
    m = 8 if few * pieces <= 8 else 16
    while k % (128 * pieces * warps):
        warps //= 2
    results = block_n // pieces
    results = results // 2 if gated else results
    x = product.x
    x = x.contiguous().view(torch.int32) if product.kind == "fp8" else x
    words = product._replace(x=x, weight=product.weight.view(torch.int32))
    fragment_kernel[(triton.cdiv(n, results),)](
        *words.arrays, rows, *words.strides, **(product.constants | {"N": n}), GATED=gated, M=m,
        BLOCK_N=block_n, PIECES=pieces, WARPS=warps, AHEAD=setting["ahead"], num_warps=warps,
        maxnreg=setting.get("registers"), **overlap(early=True),
    )  # fmt: skip


def tiles_take(product: Product) -> bool:
    """Whether `narrow_tile_kernel` takes so many rows of this kind."""
    rows, _, k = product.sizes
    x, kind, group = product.x, product.kind, product.group
    if not hopper() or kind == "fp8" or product.x_scale is not None:
        return False
    long = kind != "fp4" and group % 128 == 0 and dtype_name(x) in ("bfloat16", "float16")
    # Scales of shorter groups multiply entries, for which float16 has too few powers of two.
    short = kind in PACKED and group in (16, 32, 64) and dtype_name(x) == "bfloat16"
    if not (long or short) or not 2 < rows <= MOST_TILE_ROWS:
        return False
    aligned = all(y.data_ptr() % 16 == 0 for y in (x, product.weight))
    return aligned and k % 128 == 0 and x.stride(0) % 8 == 0


def tiles(product: Product, *, gated: bool = False) -> None:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .narrow_tile_kernel import narrow_tile_kernel  # in a language of its own

    rows, n, k = product.sizes
    block_m = power_of_2(rows, 16)
    # Where there are programs enough without parts.
    wide = ["wide"] if n >= 128 * processors() else []
    setting = config("narrow_tiles", *wide, str(block_m))
    block_n, out = 16 * setting["warps"], product.out
    packed = product.kind in PACKED
    weight = product.weight.view(torch.int32 if packed else torch.int16)
    block = [block_n // 2 if gated else block_n, 16 if packed else 64]
    swizzled = NVMMASharedLayout(64, 32, 2) if packed else NVMMASharedLayout(128, 16, 2)
    blocks = triton.cdiv(n, block_n)
    n = n // 2 if gated else n
    most = max(1, setting["programs"] * processors() // blocks)
    parts = min(setting.get("parts", most), max(1, k // (128 * setting["steps"])))
    parts = parts if blocks <= COUNTERS else 1
    sums = arrived = out
    if parts > 1:
        size = parts * blocks * block_n * block_m
        sums = torch.empty(size, dtype=torch.float32, device=out.device)
        arrived = counters(out.device)
    _, _, scale, zero, _, bias, _ = product.arrays
    narrow_tile_kernel[(blocks, parts)](
        TensorDescriptor.from_tensor(weight, block, swizzled),
        TensorDescriptor.from_tensor(product.x, [block_m, 128], NVMMASharedLayout(128, 16, 2)),
        scale, zero, bias, out, sums, arrived, rows,
        N=n, K=k, KIND=kind_of(product.kind), GROUP=product.group,
        HAS_ZERO=product.zero is not None, HAS_BIAS=product.bias is not None, GATED=gated,
        PARTS=parts, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=setting["stages"],
        num_warps=setting["warps"], maxnreg=setting["registers"], **overlap(early=True),
    )  # fmt: skip


def _blocks(product: Product) -> None:
    rows, n, k = product.sizes
    few = next((str(most) for most in (16, 32, 64) if rows <= most), "128")
    setting = config("narrow", f"{product.kind}/{few}", few)
    group, x_group = product.group, product.x_group
    block_m, block_n = setting["block_m"], setting["block_n"]
    # Groups from 64 entries on have sums of their own; several smaller ones share a block.
    block_k = min(setting["block_k"], group) if 64 <= group < k else setting["block_k"]
    if x_group:
        # Products of two quantised arrays are exact, and so they stay.
        block_k = min(block_k, x_group, group) if min(x_group, group) < k else block_k
    blocks_m, blocks = triton.cdiv(rows, block_m), triton.cdiv(n, block_n)
    wanted = setting["programs"] * processors() // (blocks * blocks_m)
    parts = max(1, min(wanted, triton.cdiv(k, block_k * setting["steps"])))
    part = triton.cdiv(triton.cdiv(k, parts), block_k) * block_k
    parts = triton.cdiv(k, part) if blocks * blocks_m <= COUNTERS else 1
    part = part if parts > 1 else triton.cdiv(k, block_k) * block_k
    sums = arrived = product.out
    if parts > 1:
        exact = product.kind == "int8" and x_group > 0
        dtype, device = torch.int32 if exact else torch.float32, product.x.device
        sums = torch.empty(parts * rows * n, dtype=dtype, device=device)
        arrived = counters(device)
    narrow_kernel[(blocks_m, blocks, parts)](
        *product.arrays, sums, arrived, rows, *product.strides, **product.constants, PARTS=parts,
        PART=part, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=setting["stages"],
        num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
