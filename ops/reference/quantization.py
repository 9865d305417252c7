"""Symmetric quantisation to int8, to fp8 (e4m3fn) and to int4.

Values and scales are the same bits in every framework, because nothing in them depends on how a
compiler divides:

- All arithmetic is float32, whatever the input dtype. NaN does not count towards a scale,
  infinities count as the largest float32.
- scale = amax * c with c = float32(1/127), float32(1/448) or float32(1/7): a product, because XLA
  turns a division by a constant into one and Triton's division is approximate. An amax below 2^-100
  (0 among them) gives scale 1: smaller scales would be subnormal, which some processors flush.
- inverse = 1 / scale, correctly rounded: any division that is within 4 units in the last place, put
  right by an exact integer remainder. One a scale, not one an element.
- value = x * inverse, clipped to +-127, +-448 or +-7, then rounded once, ties to even. NaN is 0 in
  int8 and int4, and NaN in fp8.

Shapes: x [row k], scale [s t] with s in (1, row) and t dividing k: entry j of row i has scale [i or
0, j // (k / t)]. That is [1 1] for a tensor, [row 1] for tokens (and for the output channels of a
weight [n k]), [1 k] for the channels of the last axis, [row k/block] for blocks. Scales are
float32, positive, in [2^-107, 2^122].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..declare import Array, Contract, OpError, define

INT8_MAX, FP8_MAX, INT4_MAX = 127.0, 448.0, 7.0
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-100
BITWISE = Contract(
    rounds="scale, inverse, x * inverse in float32 once each; the value once, ties to even, "
    "saturating",
    accumulate="float32 even for float64 inputs: results are equal bit for bit in all frameworks",
    masked="per row: each row depends on its own input row only",
    nan="NaN does not reach a scale; it is 0 in int8 and NaN in fp8",
)


def _scale_shape(per: str, block: int, row: int, k: int, **_: Any) -> dict[str, int]:
    """The sizes [s t] of the scales of x [row k]."""
    return {
        "s": 1 if per in ("tensor", "column") else row,
        "t": {"column": k, "block": k // max(block, 1)}.get(per, 1),
    }


@define(shapes="x [row k], scale [s t] -> [row k] int8", contract=BITWISE)
def quantize_int8(xp: Any, x: Array, scale: Array) -> Array:
    """x [row k] by given (static) scales -> [row k] int8 in [-127, 127]."""
    return _to_int8(xp, _scaled(xp, x, scale))


@define(shapes="x [row k] -> [row k] int8, [s t] float32", choose=_scale_shape, contract=BITWISE)
def quantize_int8_dynamic(xp: Any, x: Array, per: str, block: int) -> tuple[Array, Array]:
    """(values [row k] int8, scales) of x [row k]; `per`: tensor, row, column, or block (of
    `block` neighbours in k).
    """
    scale = _scales(xp, x, INT8_MAX, per, block)
    return _to_int8(xp, _scaled(xp, x, scale)), _as_wide(xp, scale, x)


@define(shapes="x [row k], scale [s t] -> [row k] float8_e4m3fn", contract=BITWISE)
def quantize_fp8(xp: Any, x: Array, scale: Array) -> Array:
    """x [row k] by given (static) scales -> [row k] float8_e4m3fn in [-448, 448]."""
    return _as_wide(xp, _to_fp8(xp, _scaled(xp, x, scale)), x)


@define(
    shapes="x [row k] -> [row k] float8_e4m3fn, [s t] float32",
    choose=_scale_shape,
    contract=BITWISE,
)
def quantize_fp8_dynamic(xp: Any, x: Array, per: str, block: int) -> tuple[Array, Array]:
    """(values [row k] float8_e4m3fn, scales) of x [row k]; `per`: tensor, row, column, or block
    (of `block` in k).
    """
    scale = _scales(xp, x, FP8_MAX, per, block)
    return _as_wide(xp, _to_fp8(xp, _scaled(xp, x, scale)), x), _as_wide(xp, scale, x)


@define(
    shapes="x [row k] -> [row half] uint8, [row t] float32",
    choose=lambda k, block, **_: {"half": k // 2, "t": k // max(block, 1)},
    contract=BITWISE,
)
def quantize_int4_dynamic(xp: Any, x: Array, block: int) -> tuple[Array, Array]:
    """(values [row k/2] uint8, scales [row k/block]) of x [row k], by blocks of `block` in k.

    A byte holds two neighbours, the first in its low half, each as its value from -7 to 7 plus 8:
    the form of `linear_grouped` without zeros.
    """
    scale = _scales(xp, x, INT4_MAX, "block", block)
    y = _scaled(xp, x, scale)
    y = xp.round(_saturated(xp, xp.where(xp.isnan(y), 0.0, y), INT4_MAX)) + 8.0
    pairs = xp.reshape(xp.astype(y, xp.int32), (x.shape[0], x.shape[1] // 2, 2))
    packed = pairs[:, :, 0] + 16 * pairs[:, :, 1]
    return xp.astype(packed, xp.uint8), _as_wide(xp, scale, x)


@define(
    shapes="values [row k], scale [s t] -> [row k] dtype",
    contract=Contract(rounds="value * scale in float32, then once to the storage dtype"),
)
def dequantize(xp: Any, values: Array, scale: Array, dtype: str) -> Array:
    """values [row k] int8 or fp8 times their scales -> [row k] of `dtype`: float32, bfloat16,
    float16.
    """
    blocks = _blocks(xp, xp.astype(values, scale.dtype), scale) * scale[..., None]
    return rounded(xp, xp.reshape(blocks, values.shape), dtype)


def stored(xp: Any, x: Array, cache: Array, scale: Array | None) -> Array:
    """x [tok kvhead hdim] as a KV cache of the dtype of `cache` holds it.

    int8 and float8_e4m3fn hold x * float32(1 / scale), saturated and rounded once, with scale
    [kvhead] float32 or None for 1; other dtypes hold x itself.
    """
    fp8 = cache.dtype == xp.float_dtype("float8_e4m3fn")
    if not fp8 and cache.dtype != xp.int8:
        return xp.astype(x, cache.dtype)
    y = xp.astype(x, xp.float32)
    if scale is not None:
        y = y * reciprocal(xp, xp.astype(scale, xp.float32))[None, :, None]
    return _to_fp8(xp, y) if fp8 else _to_int8(xp, y)


def _scales(xp: Any, x: Array, limit: float, per: str, block: int) -> Array:
    size = _sizes(xp, x)
    if per == "tensor":
        amax = xp.max(xp.max(size, axis=1, keepdims=True), axis=0, keepdims=True)
    elif per in ("row", "column"):
        amax = xp.max(size, axis=1 if per == "row" else 0, keepdims=True)
    elif per == "block" and block > 0 and x.shape[1] % block == 0:
        amax = xp.max(xp.reshape(size, (x.shape[0], x.shape[1] // block, block)), axis=2)
    else:
        wanted = f"tensor, row, column, or block with a size that divides {x.shape[1]}"
        raise OpError(f"quantise: per is {wanted}; got {per!r}, block={block}")
    return scale_of(xp, amax, limit)


def _sizes(xp: Any, x: Array) -> Array:
    """How large entries are, as far as scales go."""
    size = xp.abs(xp.astype(x, xp.float32))
    return xp.where(xp.isnan(size), 0.0, xp.where(size > LARGEST, LARGEST, size))


def largest_of_rows(xp: Any, x: Array) -> Array:
    """The size of the largest entry of each row of x [row k]: [row 1] float32."""
    return xp.max(_sizes(xp, x), axis=1, keepdims=True)


def scale_of(xp: Any, amax: Array, limit: float) -> Array:
    """The scale by which what is as large as `amax` becomes `limit`."""
    return xp.where(amax < SMALLEST, 1.0, amax * float(np.float32(1.0 / limit)))


def _scaled(xp: Any, x: Array, scale: Array) -> Array:
    inverse = reciprocal(xp, xp.astype(scale, xp.float32))
    blocks = _blocks(xp, xp.astype(x, xp.float32), scale) * inverse[..., None]
    return xp.reshape(blocks, x.shape)


def _blocks(xp: Any, x: Array, scale: Array) -> Array:
    return xp.reshape(x, (x.shape[0], scale.shape[1], x.shape[1] // scale.shape[1]))


def _to_int8(xp: Any, y: Array) -> Array:
    y = xp.where(xp.isnan(y), 0.0, y)
    return xp.astype(xp.round(_saturated(xp, y, INT8_MAX)), xp.int8)


def _to_fp8(xp: Any, y: Array) -> Array:
    return xp.astype(_saturated(xp, y, FP8_MAX), xp.float_dtype("float8_e4m3fn"))


def _saturated(xp: Any, y: Array, limit: float) -> Array:
    return xp.where(y > limit, limit, xp.where(y < -limit, -limit, y))


def _as_wide(xp: Any, y: Array, x: Array) -> Array:
    """y, or its exact float64 form if x is float64: the oracle has one floating dtype."""
    return xp.astype(y, xp.float64) if x.dtype == xp.float64 else y


def reciprocal(xp: Any, x: Array) -> Array:
    """1 / x correctly rounded, for float32 x in [2^-126, 2^126], however the framework divides."""
    pattern = xp.bits(x)
    mantissa = (pattern & 0x7FFFFF) | 0x800000
    quotient = exact_quotient(mantissa, xp.to_int(2.0**47 / xp.astype(mantissa, xp.float32)), xp)
    power = xp.from_bits((254 - ((pattern >> 23) & 0xFF)) << 23)
    return xp.astype(quotient, xp.float32) * 2.0**-24 * power


def exact_quotient(mantissa: Array, guess: Array, xp: Any) -> Array:
    """2^47 / mantissa to the nearest integer, from a guess that is off by at most a few tens.

    The remainder 2^47 - mantissa * guess fits 31 bits, so the wrapped int32 product holds it. No
    tie can happen.
    """
    remainder = -(mantissa * guess)
    quotient = remainder // mantissa
    rest = remainder - quotient * mantissa
    return guess + quotient + xp.astype(2 * rest > mantissa, xp.int32)


def rounded(xp: Any, y: Array, dtype: str) -> Array:
    """y in `dtype`; float64, which the oracle runs in, stays."""
    return y if y.dtype == xp.float64 else xp.astype(y, xp.float_dtype(dtype))
