"""Projections by weights of 8 or 4 bits an entry, and of quantised activations.

A weight is w[n, k] = (q[n, k] - zero[n, k // g]) * scale[n, k // g], whatever format a checkpoint
has it in: g entries along k share a scale, all of a row where the scales are [n 1]. `kind` says
what q is:

- int8, fp8: an array [n k] of int8 or float8_e4m3fn. They have no zeros.
- int4: integers from 0 to 15, two to a byte along k, the first in the low half: [n k/2] uint8.
  Without zeros the zero is 8.
- fp4: e2m1 numbers (a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, in four bits), packed
  likewise. They have no zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..declare import DOT, Array, Contract, OpError, define, dtype_name
from .quantization import quantize_fp8_dynamic, rounded

KINDS = ("int8", "fp8", "int4", "fp4")
FP8_UNITS = "E4M3_F32_13BIT_PER_128"
"""Products of e4m3 as the fp8 units of NVIDIA's Hopper add them up, if their sums go to float32
after every 128 entries of k: until then, each addend is cut at 13 bits below the largest. A sum
that stays in the units ("fast accumulation") does not keep this.
"""
PACKED = ("int4", "fp4")
"""Kinds with two entries in a byte."""
INT4_ZERO = 8.0
SCALED = "product and scales in float32, then bias, then once to the storage dtype"


@define(
    shapes="x [tok k], weight [n k], x_scale [s 1], weight_scale [t 1], bias [n] -> [tok n] dtype",
    contract=Contract(
        rounds=SCALED, accumulate="int32, exact, then float32", dot="int8 by int8 in int32"
    ),
)
def linear_int8(
    xp: Any,
    x: Array,
    weight: Array,
    x_scale: Array,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> Array:
    """x [tok k] int8 times weight [n k] int8 transposed, scaled, plus bias [n] or None -> [tok n]
    of `dtype`.

    x_scale [tok 1] or [1 1], weight_scale [n 1] or [1 1], as quantisation per row or tensor gives
    them. k < 2^17 keeps the sum within int32. Without a bias the float32 result is the same bits
    everywhere: (sum * x_scale) * weight_scale.
    """
    total = xp.astype(xp.linear_int32(x, weight), x_scale.dtype)
    return rounded(xp, _with_bias(xp, total * x_scale * _across(xp, weight_scale), bias), dtype)


@define(
    shapes="x [tok k], weight [n k], x_scale [s u], weight_scale [t v], bias [n] -> [tok n] dtype",
    contract=Contract(
        rounds=SCALED,
        dot="products of e4m3 (exact in bfloat16) in float32: BF16_BF16_F32; of blocks with scales "
        "of their own F32_F32_F32",
    ),
)
def linear_fp8(
    xp: Any,
    x: Array,
    weight: Array,
    x_scale: Array | None,
    weight_scale: Array,
    bias: Array | None,
    dtype: str,
) -> Array:
    """x [tok k] fp8 times weight [n k] fp8 transposed, scaled, plus bias [n] or None -> [tok n] of
    `dtype`.

    Without x_scale x is of a float dtype, and quantised as `quantize_fp8_dynamic` per row does: the
    same bits. A product of few rows can do so itself where another launch would cost more.

    x_scale [tok u] or [1 u], weight_scale [n v] or [1 v]: u and v equal blocks of k have scales of
    their own. Where these are 1, scales come behind the sum, else before it. Sums are float32: the
    14 bits that some fp8 units keep between their own steps do not meet the contract. What uses
    them keeps another one, `FP8_UNITS`, and says so (`Implementation.dot`).
    """
    if x_scale is None:
        x, x_scale = quantize_fp8_dynamic(xp, x, "row", 0)
    if x_scale.shape[1] == weight_scale.shape[1] == 1:
        total = xp.linear_accumulated(rounded(xp, x, "bfloat16"), rounded(xp, weight, "bfloat16"))
        total = total * x_scale * _across(xp, weight_scale)
    else:
        total = xp.linear_accumulated(_scaled(xp, x, x_scale), _scaled(xp, weight, weight_scale))
    return rounded(xp, _with_bias(xp, total, bias), dtype)


@define(
    shapes="x [tok dim], gate_up [2*inter dim], gate_up_scale [s u], gate_up_bias [2*inter], "
    "down [dim inter], down_scale [t v], down_bias [dim] -> [tok dim] x",
    level="coarse",
    composition=("linear_fp8", "silu_and_mul", "linear_fp8"),
    contract=Contract(
        rounds="where its finer ops do; what goes into a product is quantised as it was rounded",
        dot="as linear_fp8",
    ),
)
def gated_mlp_fp8(
    ops: Any,
    x: Array,
    gate_up: Array,
    gate_up_scale: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_scale: Array,
    down_bias: Array | None,
) -> Array:
    """down(silu(gate(x)) * up(x)) by weights of fp8, tokens quantised by row on the way: x [tok
    dim], gate_up [2 inter dim], down [dim inter], scales as `linear_fp8` has them, biases may be
    None.
    """
    dtype = dtype_name(x)
    both = ops.linear_fp8(x, gate_up, None, gate_up_scale, gate_up_bias, dtype)
    return ops.linear_fp8(ops.silu_and_mul(both), down, None, down_scale, down_bias, dtype)


@define(
    shapes="x [tok k], residual [tok k], norm [k], weight [n k], weight_scale [s u], bias [n] -> "
    "[tok n] x, [tok k] x",
    level="coarse",
    composition=("fused_add_rms_norm", "linear_fp8"),
    contract=Contract(
        rounds="where its finer ops do; the normed row is quantised as it was rounded",
        dot="as linear_fp8",
    ),
)
def add_norm_linear_fp8(
    ops: Any,
    x: Array,
    residual: Array,
    norm: Array,
    weight: Array,
    weight_scale: Array,
    bias: Array | None,
    eps: float,
) -> tuple[Array, Array]:
    """(linear_fp8(n, ...), s) with s = x + residual and n = rms_norm(s) by the weight `norm` [k]: a
    projection with the norm in front of it. x and residual [tok k].
    """
    normed, total = ops.fused_add_rms_norm(x, residual, norm, eps)
    return ops.linear_fp8(normed, weight, None, weight_scale, bias, dtype_name(x)), total


@define(
    shapes="x [tok dim], residual [tok dim], norm [dim], gate_up [2*inter dim], "
    "gate_up_scale [s u], gate_up_bias [2*inter], down [dim inter], down_scale [t v], "
    "down_bias [dim] -> [tok dim] x, [tok dim] x",
    level="coarse",
    composition=("fused_add_rms_norm", "gated_mlp_fp8"),
    contract=Contract(
        rounds="where its finer ops do; what goes into a product is quantised as it was rounded",
        dot="as linear_fp8",
    ),
)
def add_norm_gated_mlp_fp8(
    ops: Any,
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
    """(gated_mlp_fp8(n, ...), s) with s = x + residual and n = rms_norm(s) by the weight `norm`
    [dim]: a sublayer with the norm in front of it. x and residual [tok dim].
    """
    normed, total = ops.fused_add_rms_norm(x, residual, norm, eps)
    weights = gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias
    return ops.gated_mlp_fp8(normed, *weights), total


@define(
    shapes="x [tok k], weight [n m], scale [n t], zero [n t], bias [n] -> [tok n] x",
    contract=Contract(
        rounds="the weight once to the storage dtype, or not at all; the product once, after the "
        "bias",
        dot=DOT,
    ),
)
def linear_grouped(
    xp: Any,
    x: Array,
    weight: Array,
    scale: Array,
    zero: Array | None,
    bias: Array | None,
    kind: str,
) -> Array:
    """x [tok k] times the weight [n k] that (weight, scale, zero) stand for, transposed, plus bias
    -> [tok n]: only the weight is narrow.

    weight [n k] or packed [n k/2], scale [n t] float32, zero [n t] uint8 or None (see the module).
    """
    wide = widened_weight(xp, weight, scale, zero, kind)
    return xp.linear(x, xp.astype(wide, x.dtype), bias)


@define(
    shapes="x [tok dim], gate_up [2*inter m], gate_up_scale [2*inter t], "
    "gate_up_zero [2*inter t], gate_up_bias [2*inter], down [dim p], down_scale [dim u], "
    "down_zero [dim u], down_bias [dim] -> [tok dim] x",
    level="coarse",
    composition=("linear_grouped", "silu_and_mul", "linear_grouped"),
    contract=Contract(rounds="where its finer ops do", dot=DOT),
)
def gated_mlp_grouped(
    ops: Any,
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
    """down(silu(gate(x)) * up(x)) by weights that alone are narrow: x [tok dim], gate_up [2 inter
    dim], down [dim inter], as `linear_grouped` has them; zeros and biases may be None.
    """
    both = ops.linear_grouped(x, gate_up, gate_up_scale, gate_up_zero, gate_up_bias, kind)
    hidden = ops.silu_and_mul(both)
    return ops.linear_grouped(hidden, down, down_scale, down_zero, down_bias, kind)


def product_of_expert(
    xp: Any,
    x: Array,
    weight: Array,
    scale: Array | None,
    zero: Array | None,
    bias: Array | None,
    kind: str,
    own: Callable[[Array], Array],
) -> Array:
    """x [row k] by one expert's weight, plus its bias, accumulated: [row n]. Weights are those of
    `moe.grouped_linear`, of which `own` takes the expert's.
    """
    wide = own(weight)
    if scale is not None:
        of_expert = None if zero is None else own(zero)
        wide = xp.astype(widened_weight(xp, wide, own(scale), of_expert, kind), x.dtype)
    y = xp.linear_accumulated(x, wide)
    return y if bias is None else y + xp.accumulate(own(bias))[None, :]


def widened_weight(xp: Any, weight: Array, scale: Array, zero: Array | None, kind: str) -> Array:
    """The entries [n k] that a narrow weight stands for, in its scales' accumulation dtype."""
    scale = xp.accumulate(scale)
    if kind not in KINDS:
        raise OpError(f"kind: got {kind!r}, allowed are {', '.join(KINDS)}")
    if zero is not None and kind != "int4":
        raise OpError(f"zero: weights of kind {kind} have none")
    values = entries(xp, weight, kind, scale.dtype)
    if kind == "int4" and zero is None:
        values = values - INT4_ZERO
    elif zero is not None:
        rows, groups = zero.shape
        values = xp.reshape(values, (rows, groups, values.shape[1] // groups))
        values = xp.reshape(values - xp.astype(zero, scale.dtype)[:, :, None], (rows, -1))
    return _scaled(xp, values, scale)


def entries(xp: Any, weight: Array, kind: str, dtype: Any) -> Array:
    """q [n k] of a weight, as numbers of `dtype`."""
    if kind not in PACKED:
        return xp.astype(weight, dtype)
    both = xp.astype(weight, xp.int32)
    pairs = xp.stack([both & 15, (both >> 4) & 15], axis=-1)
    found = xp.reshape(pairs, (weight.shape[0], 2 * weight.shape[1]))
    if kind == "int4":
        return xp.astype(found, dtype)
    size = found & 7
    # Twice the magnitude: 0 to 3 as they are, then steps of 2, then of 4.
    twice = xp.where(size < 4, size, xp.where(size < 6, 2 * size - 4, 4 * size - 16))
    return xp.astype(xp.where(found > 7, -twice, twice), dtype) * 0.5


def _scaled(xp: Any, values: Array, scale: Array) -> Array:
    """values [row k] times scales [row or 1, t] of t equal blocks of k, in the dtype of scales."""
    row, k = values.shape
    wide = xp.reshape(xp.astype(values, scale.dtype), (row, scale.shape[1], k // scale.shape[1]))
    return xp.reshape(wide * scale[:, :, None], (row, k))


def _with_bias(xp: Any, y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + xp.accumulate(bias)[None, :]


def _across(xp: Any, scale: Array) -> Array:
    """Scales of a weight's rows [n 1] as those of the output's columns [1 n]."""
    return xp.permute_dims(xp.accumulate(scale), (1, 0))
