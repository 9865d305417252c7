"""gated_mlp_fp8: the activation and the quantisation of what it gives are one launch; for few
tokens the activation is part of the first product.
add_norm_gated_mlp_fp8: for one token the norm is part of the first product too.
gated_mlp_grouped: for few tokens and weights of int4 the activation is part of the product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...ops.declare import Array, dtype_name
from ...ops.implement import Refusal, implement
from ...ops.reference.narrow import FP8_UNITS
from .launch import capability, config, overlap, power_of_2, triton_kernel
from .narrow import (
    UNITS_CAPABILITY,
    NormOfSum,
    fragments,
    fragments_take,
    linear_fp8,
    linear_fp8_units,
    linear_grouped,
    norm_of_sum,
    norms,
    prepared,
    quantises,
    quantize_fp8_dynamic,
    quantized_by_largest,
    quantizing_gemv,
    refused_groups,
    takes_grouped,
    takes_quantised,
    takes_units,
    try_operand_kernels,
)
from .narrow_kernels import silu_quantize_kernel
from .rows import silu_and_mul, sum_and_norm, takes_add_norm

MOST_GATED = 1 << 15
"""Entries of a row that one program takes through the activation."""

Linear = Callable[..., torch.Tensor]
Weights = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None
]
"""Both weights of an MLP, each with its scales and its bias."""


def _takes(
    x: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
) -> bool | Refusal:
    return _both_take(takes_quantised, x, gate_up, gate_up_scale, gate_up_bias, down, down_scale,
                      down_bias)  # fmt: skip


def _units_take(
    x: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
) -> bool | Refusal:
    return _both_take(takes_units, x, gate_up, gate_up_scale, gate_up_bias, down, down_scale,
                      down_bias)  # fmt: skip


def _both_take(
    takes: Callable[..., bool | Refusal],
    x: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
) -> bool | Refusal:
    """Whether a predicate of `linear_fp8` takes both products, of tokens that come unquantised."""
    if down.shape[1] > MOST_GATED:
        return Refusal(f"{down.shape[1]} entries between the products; these take {MOST_GATED}")
    dtype = dtype_name(x)
    taken = takes(x, gate_up, None, gate_up_scale, gate_up_bias, dtype)
    # What goes into the second has the dtype of x; its width has been looked at.
    return takes(x, down, None, down_scale, down_bias, dtype) if taken is True else taken


@implement(
    "gated_mlp_fp8",
    provider="scaled_mm",
    framework="torch",
    supported=lambda: capability() >= UNITS_CAPABILITY,
    supports_args=_units_take,
    opaque=True,
    preferred_on=("cuda",),
    dot=FP8_UNITS,
)
def gated_mlp_fp8_units(
    x: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
) -> Array:
    """See the op: many rows by the chip's fp8 units."""
    weights = (gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias)
    return _mlp(linear_fp8_units, x, *weights)


@triton_kernel("gated_mlp_fp8", supports_args=_takes)
def gated_mlp_fp8(
    x: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
) -> Array:
    """See the op."""
    weights = (gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias)
    return _mlp(linear_fp8, x, *weights)


def _takes_behind_norm(
    x: Array,
    residual: Array,
    norm: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
    eps: float,
) -> bool | Refusal:
    if not takes_add_norm(x, residual, norm, eps):
        return False
    return _takes(x, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias)


def _units_take_behind_norm(
    x: Array,
    residual: Array,
    norm: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
    eps: float,
) -> bool | Refusal:
    if not takes_add_norm(x, residual, norm, eps):
        return False
    return _units_take(x, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias)


@implement(
    "add_norm_gated_mlp_fp8",
    provider="scaled_mm",
    framework="torch",
    supported=lambda: capability() >= UNITS_CAPABILITY,
    supports_args=_units_take_behind_norm,
    opaque=True,
    preferred_on=("cuda",),
    dot=FP8_UNITS,
)
def add_norm_gated_mlp_fp8_units(
    x: Array,
    residual: Array,
    norm: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
    eps: float,
) -> tuple[Array, Array]:
    """See the op: many rows by the chip's fp8 units."""
    weights = (gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias)
    return _behind_norm(linear_fp8_units, x, residual, norm, eps, weights)


@triton_kernel("add_norm_gated_mlp_fp8", supports_args=_takes_behind_norm)
def add_norm_gated_mlp_fp8(
    x: Array,
    residual: Array,
    norm: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
    eps: float,
) -> tuple[Array, Array]:
    """See the op."""
    weights = (gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias)
    return _behind_norm(linear_fp8, x, residual, norm, eps, weights)


def _behind_norm(
    linear: Linear,
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weights: Weights,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The MLP of the norm of x + residual, by an implementation of `linear_fp8`, and that sum."""
    gate_up, gate_up_scale, *_ = weights
    if norms(x, gate_up, gate_up_scale):
        added = norm_of_sum(residual, norm, eps)
        return _mlp(linear, x, *weights, added), added.total
    normed, total = sum_and_norm(x, residual, norm, eps)
    return _mlp(linear, normed, *weights), total


def _mlp(
    linear: Linear,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor | None,
    norm: NormOfSum | None = None,
) -> torch.Tensor:
    """The MLP, by an implementation of `linear_fp8`. With `norm` of a row that `quantises` takes:
    of that.
    """
    dtype = dtype_name(x)
    weights = (gate_up, gate_up_scale, gate_up_bias)
    # One program would take a row through the activation: longer than the quantisation alone.
    if quantises(x, gate_up, gate_up_scale):
        hidden, largest = quantizing_gemv(x, *weights, x.dtype, gated=True, norm=norm)
        values, scale = quantized_by_largest(hidden, largest)
    else:
        tokens, of = quantize_fp8_dynamic(x, "row", 0)
        hidden = _few_gated(tokens, of, *weights, x.dtype)
        if hidden is not None:
            values, scale = quantize_fp8_dynamic(hidden, "row", 0)
        else:
            both = linear(tokens, gate_up, of, gate_up_scale, gate_up_bias, dtype)
            values, scale = _silu_quantised(both)
    return linear(values, down, scale, down_scale, down_bias, dtype)


def _few_gated(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """silu(gate) * up [row inter] of (gate, up), the product of quantised tokens with a weight
    [2 inter k]; None for more rows than one launch is good for.
    """
    asked = prepared(x, weight, scale, None, x_scale, bias, "fp8", x)
    if not len(x) or not fragments_take(asked):
        return None
    out = torch.empty((len(x), weight.shape[0] // 2), dtype=dtype, device=x.device)
    fragments(asked._replace(out=out), gated=True)
    return out


def _silu_quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of x = (gate, up) [row 2 inter], as fp8 [row inter] and scales [row 1]."""
    rows, inter = x.shape[0], x.shape[1] // 2
    values = torch.empty((rows, inter), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        silu_quantize_kernel[(rows,)](
            x, values, scale, x.stride(0),
            INTER=inter, BLOCK=power_of_2(inter), num_warps=config("silu_quantize")["warps"],
            **overlap(early=True),
        )  # fmt: skip
    return values, scale


def _takes_both_grouped(
    x: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_zero: Array | None,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_zero: Array | None,
    down_bias: Array | None,
    kind: str,
) -> bool | Refusal:
    taken = takes_grouped(x, gate_up, gate_up_scale, gate_up_zero, gate_up_bias, kind)
    inter = gate_up.shape[0] // 2
    refusal = refused_groups(inter, down_scale.shape[1])
    return taken if refusal is None else refusal


@triton_kernel("gated_mlp_grouped", supports_args=_takes_both_grouped)
def gated_mlp_grouped(
    x: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_zero: Array | None,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_zero: Array | None,
    down_bias: Array | None,
    kind: str,
) -> Array:
    """See the op. The bits of its finer ops' kernels, where these divide k alike."""
    hidden = _gated(x, gate_up, gate_up_scale, gate_up_zero, gate_up_bias, kind)
    return linear_grouped(hidden, down, down_scale, down_zero, down_bias, kind)


def _gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
) -> torch.Tensor:
    """silu(gate) * up [row inter] of (gate, up), the product of x with a weight [2 inter k]."""
    rows, inter = x.shape[0], weight.shape[0] // 2
    out = torch.empty((rows, inter), dtype=x.dtype, device=x.device)
    asked = prepared(x, weight, scale, zero, None, bias, kind, out)
    if try_operand_kernels(asked, gated=True):
        return out
    return silu_and_mul(linear_grouped(x, weight, scale, zero, bias, kind))
