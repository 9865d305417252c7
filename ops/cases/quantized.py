"""Cases, bounds and mutants of quantisation, of projections of quantised arrays, and of
adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from ..namespaces import namespace
from ..reference import lora, narrow, quantization
from ..testing import TESTING, Arguments, Bound
from .dense import chain
from .families import SUMS, Function, altered, judged, normal, rows, scaled, without_tail

ACCUMULATED = 16.0
"""Operations in float32 in a chain, of products of fp8 and what is made of them."""

# Quantisation: values and scales are bitwise what the reference gives


def _values(seed: int, dtype: str, *shape: int) -> np.ndarray:
    """A row whose largest magnitude is 127 holds exact ties; others an outlier, NaN, zeros, tiny
    and huge values.
    """
    x = rows(seed, dtype, *shape)
    tiny, large = (2.0**-10, 2.0**8) if dtype == "float16" else (2.0**-120, 2.0**110)
    x[0] = (np.arange(shape[1]) - 40.5).astype(x.dtype)
    x[0, 0], x[2] = 127.0, x[2] * x.dtype.type(tiny)
    x[5] = x[5] * x.dtype.type(large)
    x[6, 3] = np.nan
    return x


def _static_scales(k: int) -> dict[str, np.ndarray]:
    scales = {"tensor": np.full((1, 1), 1.0), "row": np.linspace(0.01, 3.0, 7)[:, None]}
    scales |= {
        "column": np.geomspace(0.01, 3.0, k)[None, :],
        "block": np.geomspace(0.01, 3.0, 21).reshape(7, 3),
    }
    return {name: scale.astype(np.float32) for name, scale in scales.items()}


def _floored(limit: float, dtype: str) -> Function:
    """Values rounded down, from the reference's own scales."""

    def mutant(xp: Any, x: Any, scale: Any = None, per: str = "", block: int = 0) -> Any:
        reference = (
            quantization.quantize_int8_dynamic
            if dtype == "int8"
            else quantization.quantize_fp8_dynamic
        )
        scales = reference(xp, x, per, block)[1] if scale is None else scale
        share = np.repeat(scales, x.shape[1] // scales.shape[1], axis=1)
        step = 1.0 if dtype == "int8" else 0.125
        values = np.clip(np.floor(x / share / step) * step, -limit, limit).astype(
            xp.float_dtype(dtype)
        )
        return values if scale is not None else (values, scales)

    return mutant


def _quantizers(dtype: str, static: Function, dynamic: Function, limit: float) -> None:
    judged(
        static.__name__,
        lambda storage: {
            name: {"x": _values(50, storage, 7, 96), "scale": scale}
            for name, scale in _static_scales(96).items()
        },
        {
            "rounded down": _floored(limit, dtype),
            "scale 1.005": altered(static, scale=lambda s: s * 1.005),
            "tail skipped": altered(static, x=without_tail),
        },
        bitwise=True,
    )

    def one_more(xp: Any, x: Any, per: str, block: int) -> Any:
        values, scale = dynamic(xp, x, per, block)
        return values, scale * np.float32(limit / (limit + 1.0))

    judged(
        dynamic.__name__,
        lambda storage: {
            per: {"x": _values(51, storage, 7, 96), "per": per, "block": 32}
            for per in ("tensor", "row", "column", "block")
        },
        {
            "rounded down": _floored(limit, dtype),
            "another denominator": one_more,
            "tail skipped": altered(dynamic, x=without_tail),
        },
        bitwise=True,
    )


_quantizers(
    "int8", quantization.quantize_int8, quantization.quantize_int8_dynamic, quantization.INT8_MAX
)
_quantizers(
    "float8_e4m3fn",
    quantization.quantize_fp8,
    quantization.quantize_fp8_dynamic,
    quantization.FP8_MAX,
)


def _halves_swapped(xp: Any, x: Any, block: int) -> Any:
    packed, scale = quantization.quantize_int4_dynamic(xp, x, block)
    return (packed >> 4) | (packed << 4), scale


def _not_offset(xp: Any, x: Any, block: int) -> Any:
    packed, scale = quantization.quantize_int4_dynamic(xp, x, block)
    return packed ^ 0x88, scale


judged(
    "quantize_int4_dynamic",
    lambda storage: {
        f"blocks of {block}": {"x": _values(51, storage, 7, 96), "block": block}
        for block in (32, 96)
    },
    {
        "halves swapped": _halves_swapped,
        "two's complement": _not_offset,
        "tail skipped": altered(quantization.quantize_int4_dynamic, x=without_tail),
    },
    bitwise=True,
)


# Dequantisation and products


def quantized(kind: str, x: np.ndarray, per: str, block: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales) of x as the reference makes them; `kind`: int8 or fp8."""
    result: tuple[np.ndarray, np.ndarray] = {
        "int8": quantization.quantize_int8_dynamic,
        "fp8": quantization.quantize_fp8_dynamic,
    }[kind](namespace("numpy"), x, per, block)
    return result


def _dequantize_cases(dtype: str) -> dict[str, Arguments]:
    cases = {}
    for kind in ("int8", "fp8"):
        for per in ("tensor", "row", "column", "block"):
            values, scale = quantized(kind, rows(52, "float32", 7, 96), per, 32)
            cases[f"{kind} {per}"] = {"values": values, "scale": scale, "dtype": dtype}
    return cases


judged(
    "dequantize",
    _dequantize_cases,
    {
        "scale 1.005": scaled(quantization.dequantize, 1.005),
        "scales reversed": altered(quantization.dequantize, scale=lambda s: s[:, ::-1] * 1.01),
        "scale of another row": altered(quantization.dequantize, scale=lambda s: np.roll(s, 1, 0)),
        "magnitudes": lambda xp, **a: np.abs(quantization.dequantize(xp, **a)),
    },
    # Values of few bits times one scale: the same roundings come again and again, they are not
    # independent.
    bound=Bound(accumulated=4.0, gain=False, reason="roundings repeat with the few values"),
)


def _linear_case(
    kind: str, dtype: str, bias: bool, x_per: str, tokens: int = 7, n: int = 33, k: int = 96
) -> Arguments:
    x, x_scale = quantized(kind, rows(53, "float32", tokens, k, scale=1.0), x_per)
    weight, weight_scale = quantized(kind, normal(54, "float32", n, k), "row")
    arguments = {"x": x, "weight": weight, "x_scale": x_scale, "weight_scale": weight_scale}
    return {**arguments, "bias": normal(55, dtype, n) if bias else None, "dtype": dtype}


def _wide(arguments: Arguments) -> tuple[np.ndarray, np.ndarray]:
    """(x [tok k], weight [n k]) of a product as they are multiplied, in float64."""
    x, x_scale = arguments["x"], arguments["x_scale"]
    if x_scale is None:
        x, x_scale = quantized("fp8", x, "row")
    numpy, weight_scale = namespace("numpy"), arguments["weight_scale"]
    return (
        quantization.dequantize(numpy, x, x_scale.astype(np.float64), "float64"),
        quantization.dequantize(
            numpy, arguments["weight"], weight_scale.astype(np.float64), "float64"
        ),
    )


def _products(arguments: Arguments) -> Any:
    x, weight = _wide(arguments)
    size = np.abs(x) @ np.abs(weight).T
    return size if arguments["bias"] is None else size + np.abs(arguments["bias"])


def _product_mutants(reference: Function) -> dict[str, Function]:
    return {
        "scale 1.005": scaled(reference, 1.005),
        "tail skipped": altered(reference, x=without_tail),
        "scale of another channel": altered(reference, weight_scale=lambda s: np.roll(s, 1, 0)),
        "no bias": altered(reference, bias=lambda _: None),
    }


def cut_sums(arguments: Arguments) -> Any:
    """How far products may be off that keep `narrow.FP8_UNITS` [tok n]: 4 times 2^-13 of the
    largest sum on the way, for each 128 entries.
    """
    x, weight = _wide(arguments)
    total = np.zeros((len(x), len(weight)))
    for first in range(0, x.shape[1], 128):
        products = x[:, None, first : first + 128] * weight[None, :, first : first + 128]
        sums = np.abs(np.cumsum(products, -1)).max(-1)
        total += np.maximum(sums, np.abs(products).max(-1))
    return 4.0 * 2.0**-13 * total


def _quantized_linear(
    reference: Function,
    kind: str,
    more: Callable[[str], dict[str, Arguments]] = lambda _: {},
    mutants: Mapping[str, Function] = MappingProxyType({}),
) -> None:
    judged(
        reference.__name__,
        lambda dtype: (
            {
                f"bias {bias}, scale per {per}": _linear_case(kind, dtype, bias, per)
                for bias in (True, False)
                for per in ("row", "tensor")
            }
            # Kernels for tensor cores refuse other sizes, or take other roads for them.
            | {
                f"{tokens} rows of 256": _linear_case(kind, dtype, False, "row", tokens, 48, 256)
                for tokens in (5, 20)
            }
            | more(dtype)
        ),
        {
            **_product_mutants(reference),
            "scale of another block": altered(reference, weight_scale=lambda s: np.roll(s, 1, 1)),
            **mutants,
        }
        if kind == "fp8"
        else _product_mutants(reference),
        bound=SUMS,
        magnitude=_products,
        dots={narrow.FP8_UNITS: cut_sums} if kind == "fp8" else {},
        rows=("x",),
    )


_quantized_linear(narrow.linear_int8, "int8")


def _unquantised(dtype: str, tokens: int, bias: bool) -> Arguments:
    """fp8 of tokens as they come: rows of 256 whose largest entry is in one half or the other."""
    arguments = _linear_case("fp8", dtype, bias, "row", n=48, k=256)
    x = normal(58, dtype, tokens, 256)
    x[:, 200] = 30.0
    x[1::2] = x[1::2, ::-1]
    return {**arguments, "x": x, "x_scale": None}


def _fp8_cases(dtype: str) -> dict[str, Arguments]:
    """fp8 by blocks of 32 along k, of the weight and of both; and of tokens that are not
    quantised.
    """
    cases = {
        f"{tokens} tokens as they come": _unquantised(dtype, tokens, tokens > 2)
        for tokens in (1, 2, 20)
    }
    weight, of_blocks = quantized("fp8", normal(54, "float32", 33, 96), "block", 32)
    for per in ("row", "block"):
        x, x_scale = quantized("fp8", rows(53, "float32", 7, 96, scale=1.0), per, 32)
        cases[f"x per {per}"] = {
            "x": x, "weight": weight, "x_scale": x_scale, "weight_scale": of_blocks,
            "bias": normal(55, dtype, 33), "dtype": dtype,
        }  # fmt: skip
    return cases


def _scales_of_halves(xp: Any, x: Any, x_scale: Any, weight_scale: Any, **rest: Any) -> Any:
    """Each half of a row that comes unquantised has a scale of its own."""
    if x_scale is None:
        x, x_scale = quantization.quantize_fp8_dynamic(xp, x, "block", x.shape[1] // 2)
        weight_scale = np.repeat(weight_scale, 2, axis=1)
    return narrow.linear_fp8(xp, x, x_scale=x_scale, weight_scale=weight_scale, **rest)


def _not_rounded(xp: Any, x: Any, x_scale: Any, **rest: Any) -> Any:
    """Rows that come unquantised are multiplied as they are."""
    scale = np.ones((1, 1)) if x_scale is None else x_scale
    return narrow.linear_fp8(xp, x, x_scale=scale, **rest)


_quantized_linear(
    narrow.linear_fp8,
    "fp8",
    _fp8_cases,
    {"scales of halves of a row": _scales_of_halves, "tokens not quantised": _not_rounded},
)


def _mlp_case(dtype: str, tokens: int, dim: int, inter: int, bias: bool) -> Arguments:
    gate_up, gate_up_scale = quantized("fp8", normal(64, "float32", 2 * inter, dim), "row")
    down, down_scale = quantized("fp8", normal(65, "float32", dim, inter), "row")
    return {
        "x": normal(66, dtype, tokens, dim),
        "gate_up": gate_up, "gate_up_scale": gate_up_scale * np.float32(dim**-0.5),
        "gate_up_bias": normal(67, dtype, 2 * inter) if bias else None,
        "down": down, "down_scale": down_scale * np.float32(inter**-0.5),
        "down_bias": normal(68, dtype, dim) if bias else None,
    }  # fmt: skip


def _mlp_sides(a: Arguments) -> tuple[Arguments, Arguments, np.ndarray, np.ndarray]:
    """(arguments of the first product, of the second, gate, up)."""
    first = {
        "x": a["x"], "weight": a["gate_up"], "x_scale": None, "weight_scale": a["gate_up_scale"],
        "bias": a["gate_up_bias"],
    }  # fmt: skip
    x, weight = _wide(first)
    both = x @ weight.T + (0.0 if a["gate_up_bias"] is None else a["gate_up_bias"])
    gate, up = np.split(both, 2, axis=1)
    second = {
        "x": gate / (1.0 + np.exp(-gate)) * up, "weight": a["down"], "x_scale": None,
        "weight_scale": a["down_scale"], "bias": a["down_bias"],
    }  # fmt: skip
    return first, second, gate, up


def _mlp_products(a: Arguments) -> Any:
    return _products(_mlp_sides(a)[1])


def _mlp_cut_sums(a: Arguments) -> Any:
    """What cut sums of the first product do to the second, and those of the second. An entry that
    is off by less than a step of e4m3 may be a step off after it was rounded: as often as its
    error is of a step. So errors count twice.
    """
    first, second, gate, up = _mlp_sides(a)
    of_gate, of_up = np.split(cut_sums(first), 2, axis=1)
    sigmoid = 1.0 / (1.0 + np.exp(-gate))
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    off = np.abs(slope * up) * of_gate + np.abs(gate * sigmoid) * of_up
    return 2.0 * off @ np.abs(_wide(second)[1]).T + cut_sums(second)


SIDES = (0.0, -1.0, 1.0)


def _stored(x: np.ndarray, off: np.ndarray, storage: Any) -> list[np.ndarray]:
    """x as it is rounded to the storage dtype, and as it is where it is off by so much."""
    return [(x + side * off).astype(storage).astype(np.float64) for side in SIDES]


def _quantised_otherwise(rows: np.ndarray) -> np.ndarray:
    """How far entries of rows, of which all candidates are given [candidate tok k], may be off once
    they are quantised, the first candidate's from another's: an entry, or the largest of a row,
    which its scale is made of, may be another one.
    """
    own, size = rows[0], np.abs(rows)
    scales = [
        quantized("fp8", largest, "row")[1].astype(np.float64)
        for largest in (own, size.min(0), size.max(0))
    ]

    def entries(x: np.ndarray, scale: np.ndarray, side: float) -> np.ndarray:
        units = x / scale * (1.0 + side * 2.0**-22)
        kept = units.clip(-448.0, 448.0).astype(ml_dtypes.float8_e4m3fn)
        found: np.ndarray = kept.astype(np.float64) * scale
        return found

    others = [
        entries(x, scale, side)
        for x in (own, rows.min(0), rows.max(0))
        for scale in scales
        for side in SIDES
    ]
    step: np.ndarray = np.max([np.abs(x - others[0]) for x in others], axis=0)
    return step


def _mlp_flips(a: Arguments, storage: Any, off: np.ndarray | float = 0.0) -> Any:
    """What entries between the products do that may be others: where float32 sums decide how gate,
    up or what is made of them is rounded. `off`: how far these sums may be off besides.
    """
    first, second, gate, up = _mlp_sides(a)
    sums = np.split(ACCUMULATED * 2.0**-24 * _products(first) + off, 2, axis=1)
    gates, ups = (_stored(*both, storage) for both in zip((gate, up), sums, strict=True))
    made = [g / (1.0 + np.exp(-g)) * u for g in gates for u in ups]
    hidden = [h for x in made for h in _stored(x, ACCUMULATED * 2.0**-24 * np.abs(x), storage)]
    return _quantised_otherwise(np.stack(hidden)) @ np.abs(_wide(second)[1]).T


def _mlp_with(change: Callable[[Any, Any], Any]) -> Function:
    """The op with what goes into its second product changed: (ops, hidden) -> (values, scales)."""

    def mutant(ops: Any, **a: Any) -> Any:
        both = ops.linear_fp8(
            a["x"], a["gate_up"], None, a["gate_up_scale"], a["gate_up_bias"], "float64"
        )
        hidden, scale = change(ops, ops.silu_and_mul(both))
        return ops.linear_fp8(hidden, a["down"], scale, a["down_scale"], a["down_bias"], "float64")

    return mutant


def _swapped(x: Any) -> Any:
    return None if x is None else np.roll(x, len(x) // 2, 0)


judged(
    "gated_mlp_fp8",
    lambda dtype: {
        "odd sizes, biases": _mlp_case(dtype, 6, 67, 45, True),
        **{
            f"{tokens} tokens of 64": _mlp_case(dtype, tokens, 64, 48, False)
            for tokens in (1, 2, 20)
        },
    },
    {
        "scale 1.005": scaled(narrow.gated_mlp_fp8, 1.005),
        "tail skipped": altered(narrow.gated_mlp_fp8, x=without_tail),
        "gate and up swapped": altered(
            narrow.gated_mlp_fp8, gate_up=_swapped, gate_up_scale=_swapped, gate_up_bias=_swapped
        ),
        "scale of another channel": altered(
            narrow.gated_mlp_fp8, down_scale=lambda s: np.roll(s, 1, 0)
        ),
        "no biases": altered(
            narrow.gated_mlp_fp8, gate_up_bias=lambda _: None, down_bias=lambda _: None
        ),
        "not quantised between": _mlp_with(lambda ops, h: (ops.rounded(h), np.ones((1, 1)))),
        "scale of the first half of a row": _mlp_with(
            lambda ops, h: (
                h,
                np.abs(ops.rounded(h)[:, : h.shape[1] // 2]).max(1, keepdims=True) / 448.0,
            )
        ),
    },
    bound=Bound(
        accumulated=ACCUMULATED,
        inner=1.0,
        ties=1.0,
        reason="an entry beside a tie of e4m3 may fall to its other side",
    ),
    magnitude=_mlp_products,
    flips=_mlp_flips,
    dots={narrow.FP8_UNITS: _mlp_cut_sums},
)


def _with_norm(a: Arguments) -> Arguments:
    """Arguments of an op with those of the norm in front of it, whose root is not 1."""
    x = a["x"]
    dtype = str(x.dtype)
    residual = normal(69, dtype, *x.shape) * x.dtype.type(3.0)
    return {"x": x, "residual": residual, "norm": normal(70, dtype, x.shape[1]), **a, "eps": 1e-5}


def _summed(a: Arguments, storage: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """(the norm of x + residual, the sum), in float64."""
    total = (a["x"] + a["residual"]).astype(storage).astype(np.float64)
    root = np.sqrt((total * total).mean(1, keepdims=True) + a["eps"])
    return total / root * a["norm"], total


def _norm_flips(
    a: Arguments, storage: Any, weight: str, scale: str
) -> tuple[np.ndarray, np.ndarray]:
    """(The normed row as it is rounded, how far its product may be off by entries of it that may be
    others).
    """
    x, _ = _summed(a, storage)
    rows = np.stack(_stored(x, ACCUMULATED * 2.0**-24 * np.abs(x), storage))
    sizes = np.abs(a[weight].astype(np.float64) * a[scale])
    return rows[0], _quantised_otherwise(rows) @ sizes.T


def _behind_norm(change: Callable[..., Any], finish: Callable[..., Any]) -> Function:
    """An op with another norm: `change(ops, x, residual, norm, eps)` gives (normed, sum), and
    `finish(ops, normed, ...)` what the op makes of it.
    """

    def mutant(
        ops: Any, x: Any, residual: Any, norm: Any, eps: float, **weights: Any
    ) -> tuple[Any, Any]:
        normed, total = change(ops, x, residual, norm, eps)
        return finish(ops, normed, **weights), total

    return mutant


def _normed(ops: Any, total: Any, norm: Any, eps: float) -> Any:
    return ops.rms_norm(ops.rounded(total), norm, eps)


def _without_root(ops: Any, x: Any, residual: Any, norm: Any, eps: float) -> tuple[Any, Any]:
    return (x + residual) * norm, x + residual


def _root_of_half(ops: Any, x: Any, residual: Any, norm: Any, eps: float) -> tuple[Any, Any]:
    total = x + residual
    root = np.sqrt((total[:, ::2] ** 2).mean(1, keepdims=True) + eps)
    return total / root * norm, total


WRONG_NORMS: dict[str, Callable[..., Any]] = {
    "residual ignored": lambda ops, x, residual, norm, eps: (
        _normed(ops, x, norm, eps),
        x + residual,
    ),
    "sum without the residual": lambda ops, x, residual, norm, eps: (
        _normed(ops, x + residual, norm, eps),
        x,
    ),
    "no norm": _without_root,
    "no weight": lambda ops, x, residual, norm, eps: (
        _normed(ops, x + residual, np.ones_like(norm), eps),
        x + residual,
    ),
    "the norm returned": lambda ops, x, residual, norm, eps: (
        _normed(ops, x + residual, norm, eps),
        _normed(ops, x + residual, norm, eps),
    ),
    "norm of half of a row": _root_of_half,
}


def _linear_behind_norm(a: Arguments) -> Arguments:
    """Those of `linear_fp8`, of the normed row."""
    return {**a, "x": _summed(a)[0], "x_scale": None}


judged(
    "add_norm_linear_fp8",
    lambda dtype: {
        f"{tokens} tokens, bias {bias}": _with_norm(
            {
                name: value
                for name, value in _linear_case("fp8", dtype, bias, "row", n=48, k=k).items()
                if name not in ("x", "x_scale", "dtype")
            }
            | {"x": normal(58, dtype, tokens, k)}
        )
        for tokens, k, bias in ((1, 64, False), (2, 256, True), (20, 67, True))
    },
    {
        name: _behind_norm(
            change,
            lambda ops, x, weight, weight_scale, bias: ops.linear_fp8(
                x, weight, None, weight_scale, bias, "float64"
            ),
        )
        for name, change in WRONG_NORMS.items()
    },
    bound=Bound(
        accumulated=ACCUMULATED,
        inner=1.0,
        ties=1.0,
        reason="an entry beside a tie of e4m3 may fall to its other side",
    ),
    magnitude=lambda a: (_products(_linear_behind_norm(a)), np.abs(_summed(a)[1])),
    flips=lambda a, storage: (
        _norm_flips(a, storage, "weight", "weight_scale")[1],
        np.zeros_like(a["residual"]),
    ),
    dots={
        narrow.FP8_UNITS: lambda a: (
            cut_sums(_linear_behind_norm(a)),
            np.zeros_like(a["residual"]),
        )
    },
)


def _mlp_behind_norm_flips(a: Arguments, storage: Any) -> Any:
    """The MLP's, and what entries of the normed row do that may be others."""
    x, off = _norm_flips(a, storage, "gate_up", "gate_up_scale")
    return _mlp_flips({**a, "x": x}, storage, off), np.zeros_like(a["residual"])


judged(
    "add_norm_gated_mlp_fp8",
    lambda dtype: {
        "odd sizes, biases": _with_norm(_mlp_case(dtype, 6, 67, 45, True)),
        **{
            f"{tokens} tokens of 64": _with_norm(_mlp_case(dtype, tokens, 64, 48, False))
            for tokens in (1, 2, 20)
        },
    },
    {
        name: _behind_norm(change, lambda ops, x, **weights: ops.gated_mlp_fp8(x, **weights))
        for name, change in WRONG_NORMS.items()
    },
    bound=TESTING["gated_mlp_fp8"].bound,
    magnitude=lambda a: (_mlp_products({**a, "x": _summed(a)[0]}), np.abs(_summed(a)[1])),
    flips=_mlp_behind_norm_flips,
    dots={
        narrow.FP8_UNITS: lambda a: (
            _mlp_cut_sums({**a, "x": _summed(a)[0]}),
            np.zeros_like(a["residual"]),
        )
    },
)


def _grouped_case(kind: str, dtype: str, groups: int, zeros: bool, k: int = 96) -> Arguments:
    """Every value of each kind occurs; neighbouring rows and groups have scales that differ."""
    rng = np.random.default_rng(57)
    n = 33
    if kind == "fp8":
        weight = quantized("fp8", normal(54, "float32", n, k), "row")[0]
    elif kind == "int8":
        weight = rng.integers(-127, 128, (n, k)).astype(np.int8)
    else:
        weight = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    scale = (2.0 ** rng.uniform(-6, -3, (n, groups))).astype(np.float32)
    zero = rng.integers(0, 17, (n, groups)).astype(np.uint8) if zeros else None
    return {"weight": weight, "scale": scale, "zero": zero, "kind": kind}


def _grouped_cases(dtype: str) -> dict[str, Arguments]:
    cases = {}
    sorts = [(kind, zeros) for kind in narrow.KINDS for zeros in (False, True)]
    for kind, zeros in (sort for sort in sorts if sort[0] == "int4" or not sort[1]):
        for groups in (1, 3):
            made = _grouped_case(kind, dtype, groups, zeros)
            x = rows(56, dtype, 7, 96, scale=1.0)
            bias = normal(55, dtype, 33) if groups == 3 else None
            name = f"{kind}, {groups} groups" + ", zeros" * zeros
            cases[name] = {"x": x, **made, "bias": bias}
    # Kernels may divide k among warps: not always where groups end.
    for kind, k, groups, zeros in (
        ("int4", 256, 2, False),
        ("int4", 256, 2, True),
        ("int4", 768, 3, True),
        ("int4", 256, 8, True),
        ("int4", 256, 4, False),
        ("fp4", 256, 16, False),
        ("int8", 256, 1, False),
    ):
        made = _grouped_case(kind, dtype, groups, zeros, k)
        x = rows(56, dtype, 11, k, scale=1.0)
        name = f"{kind}, {groups} groups of {k // groups}" + ", zeros" * zeros
        cases[name] = {"x": x, **made, "bias": None}
    return cases


def _grouped_products(arguments: Arguments, chained: bool = True) -> Any:
    wide = narrow.widened_weight(
        namespace("numpy"), arguments["weight"], arguments["scale"].astype(np.float64),
        arguments["zero"], arguments["kind"],
    )  # fmt: skip
    size = np.abs(arguments["x"].astype(np.float64)) @ np.abs(wide).T
    if chained:
        size = size * chain(arguments["x"].shape[1])
    return size if arguments["bias"] is None else size + np.abs(arguments["bias"])


def _packed_only(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda weight: change(weight) if weight.dtype == np.uint8 else weight


def _with_zero(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda zero: None if zero is None else change(zero)


judged(
    "linear_grouped",
    _grouped_cases,
    {
        "scale 1.005": scaled(narrow.linear_grouped, 1.005),
        "tail skipped": altered(narrow.linear_grouped, x=without_tail),
        "scale of another row": altered(narrow.linear_grouped, scale=lambda s: np.roll(s, 1, 0)),
        "scale of another group": altered(narrow.linear_grouped, scale=lambda s: np.roll(s, 1, 1)),
        "divided by the scale": altered(narrow.linear_grouped, scale=lambda s: 1.0 / s),
        "halves of a byte swapped": altered(
            narrow.linear_grouped, weight=_packed_only(lambda w: (w >> 4) | (w << 4))
        ),
        "zero off by one": altered(narrow.linear_grouped, zero=_with_zero(lambda z: z + 1)),
        "zero of another group": altered(
            narrow.linear_grouped, zero=_with_zero(lambda z: np.roll(z, 1, 1))
        ),
        "zeros ignored": altered(narrow.linear_grouped, zero=lambda _: None),
        "int4 for fp4": altered(
            narrow.linear_grouped, kind=lambda kind: "int4" if kind == "fp4" else kind
        ),
        "no bias": altered(narrow.linear_grouped, bias=lambda _: None),
    },
    bound=Bound(inner=1.0, reason="the weight may be rounded to the dtype of x"),
    magnitude=_grouped_products,
    rounded=partial(_grouped_products, chained=False),
    rows=("x",),
)


def _grouped_mlp_case(
    dtype: str, kind: str, groups: int, zeros: bool, biases: bool, dim: int = 96, tokens: int = 7
) -> Arguments:
    inter = dim // 2
    arguments: Arguments = {"x": normal(66, dtype, tokens, dim), "kind": kind}
    for seed, name, n, k in ((64, "gate_up", 2 * inter, dim), (65, "down", dim, inter)):
        rng = np.random.default_rng(seed)
        size = {"fp8": 150.0, "int8": 64.0, "int4": 4.0, "fp4": 2.0}[kind] * k**0.5
        scale = (2.0 ** rng.uniform(-1, 1, (n, groups)) / size).astype(np.float32)
        if kind == "fp8":
            weight = quantized("fp8", normal(seed, "float32", n, k), "row")[0]
        elif kind == "int8":
            weight = rng.integers(-127, 128, (n, k)).astype(np.int8)
        else:
            weight = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
        arguments |= {name: weight, f"{name}_scale": scale}
        zero = rng.integers(4, 13, (n, groups)).astype(np.uint8)
        arguments[f"{name}_zero"] = zero if zeros else None
        arguments[f"{name}_bias"] = normal(67, dtype, n) if biases else None
    return arguments


def _grouped_mlp_cases(dtype: str) -> dict[str, Arguments]:
    cases = {
        "int4, 3 groups, zeros, biases": _grouped_mlp_case(dtype, "int4", 3, True, True),
        "int4, 1 group": _grouped_mlp_case(dtype, "int4", 1, False, False),
        "fp8": _grouped_mlp_case(dtype, "fp8", 1, False, False),
        "int8, 3 groups": _grouped_mlp_case(dtype, "int8", 3, False, False),
        "fp4, 3 groups, biases": _grouped_mlp_case(dtype, "fp4", 3, False, True),
    }
    for tokens in (1, 2, 9, 20):
        name = f"int4, {tokens} tokens of 512"
        cases[name] = _grouped_mlp_case(dtype, "int4", 2, True, False, 512, tokens)
    return cases


def _grouped_mlp_sizes(a: Arguments, chained: bool) -> Any:
    """What relative errors of 1 in all that the products add up do to the result; `chained`: as
    they grow along a sum.
    """
    first, second = (
        narrow.widened_weight(
            namespace("numpy"), a[name], a[f"{name}_scale"].astype(np.float64), a[f"{name}_zero"],
            a["kind"],
        )
        for name in ("gate_up", "down")
    )  # fmt: skip
    none = np.zeros(1)
    gate_up_bias = none if a["gate_up_bias"] is None else a["gate_up_bias"].astype(np.float64)
    down_bias = none if a["down_bias"] is None else a["down_bias"].astype(np.float64)
    x = a["x"].astype(np.float64)
    gate, up = np.split(x @ first.T + gate_up_bias, 2, axis=1)
    grown = chain(first.shape[1]) if chained else 1.0
    sums = (np.abs(x) @ np.abs(first).T + np.abs(gate_up_bias)) * grown
    of_gate, of_up = np.split(sums, 2, axis=1)
    sigmoid = 1.0 / (1.0 + np.exp(-gate))
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    off = (
        np.abs(slope * up) * of_gate + np.abs(gate * sigmoid) * of_up + np.abs(gate * sigmoid * up)
    )
    grown = chain(second.shape[1]) if chained else 1.0
    return (off @ np.abs(second).T + np.abs(down_bias)) * grown


def _up_ignored(ops: Any, **a: Any) -> Any:
    pieces = [a[f"gate_up{piece}"] for piece in ("", "_scale", "_zero", "_bias")]
    gate, _ = np.split(ops.linear_grouped(a["x"], *pieces, a["kind"]), 2, axis=1)
    hidden = ops.silu_and_mul(np.concatenate([gate, np.ones_like(gate)], axis=1))
    pieces = [a[f"down{piece}"] for piece in ("", "_scale", "_zero", "_bias")]
    return ops.linear_grouped(hidden, *pieces, a["kind"])


judged(
    "gated_mlp_grouped",
    _grouped_mlp_cases,
    {
        "scale 1.005": scaled(narrow.gated_mlp_grouped, 1.005),
        "tail skipped": altered(narrow.gated_mlp_grouped, x=without_tail),
        "up ignored": _up_ignored,
        "gate and up swapped": altered(
            narrow.gated_mlp_grouped, gate_up=_swapped, gate_up_scale=_swapped,
            gate_up_zero=_swapped, gate_up_bias=_swapped,
        ),
        "scale of another row": altered(
            narrow.gated_mlp_grouped, down_scale=lambda s: np.roll(s, 1, 0)
        ),
        "scale of another group": altered(
            narrow.gated_mlp_grouped, gate_up_scale=lambda s: np.roll(s, 1, 1)
        ),
        "zeros ignored": altered(
            narrow.gated_mlp_grouped, gate_up_zero=lambda _: None, down_zero=lambda _: None
        ),
        "no biases": altered(
            narrow.gated_mlp_grouped, gate_up_bias=lambda _: None, down_bias=lambda _: None
        ),
    },
    bound=Bound(
        inner=3.0,
        reason="as of the finer ops: the weight may be rounded to the dtype of x, and what is "
        "between the products may be or not",
    ),
    magnitude=lambda a: _grouped_mlp_sizes(a, True),
    rounded=lambda a: _grouped_mlp_sizes(a, False),
    rows=("x",),
)  # fmt: skip


# Adapters


def _adapters(dtype: str, n: int, k: int) -> np.ndarray:
    """Four adapters; no row of a case uses the last, which is NaN."""
    weights = normal(60, dtype, 4, n, k)
    weights[3] = np.nan
    return weights


INDEX = np.array([2, -1, 0, 0, 1, -1, 2], np.int32)


def _chosen(w: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.where((index < 0)[:, None, None], 0.0, np.abs(w[np.maximum(index, 0)]))


def _shrunk(arguments: Arguments) -> Any:
    return np.einsum(
        "tk,tnk->tn", np.abs(arguments["x"]), _chosen(arguments["a"], arguments["index"])
    )


def _expanded(arguments: Arguments) -> Any:
    product = np.einsum(
        "tk,tnk->tn", np.abs(arguments["x"]), _chosen(arguments["b"], arguments["index"])
    )
    scale = np.abs(arguments["scale"][np.maximum(arguments["index"], 0)])
    return np.abs(arguments["y"]) + scale[:, None] * product


def _next(index: np.ndarray) -> np.ndarray:
    """Every adapter taken for another one."""
    return np.where(index < 0, index, (index + 1) % 3)


judged(
    "lora_shrink",
    lambda dtype: {
        f"rank {rank}": {
            "x": rows(61, dtype, 7, 70, scale=1.0),
            "a": _adapters(dtype, rank, 70),
            "index": INDEX,
        }
        for rank in (1, 16)
    },
    {
        "another adapter": altered(lora.lora_shrink, index=_next),
        "no adapter is adapter 0": altered(lora.lora_shrink, index=lambda i: np.maximum(i, 0)),
        "scale 1.005": scaled(lora.lora_shrink, 1.005),
    },
    bound=SUMS,
    magnitude=_shrunk,
    rows=("x", "index"),
)
judged(
    "lora_expand",
    lambda dtype: {
        f"rank {rank}": {
            "y": rows(62, dtype, 7, 66),
            "x": normal(63, dtype, 7, rank),
            "b": _adapters(dtype, 66, rank),
            "index": INDEX,
            "scale": np.array([2.0, 0.5, -1.0, 1.0], np.float32),
        }
        for rank in (1, 16)
    },
    {
        "another adapter": altered(lora.lora_expand, index=_next),
        "no adapter is adapter 0": altered(lora.lora_expand, index=lambda i: np.maximum(i, 0)),
        "not accumulated": altered(lora.lora_expand, y=lambda y: y * 0.0),
        "scale 1": altered(lora.lora_expand, scale=lambda s: s * 0.0 + 1.0),
    },
    bound=SUMS,
    magnitude=_expanded,
    rows=("y", "x", "index"),
)
