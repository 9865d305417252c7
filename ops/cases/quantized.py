"""Cases, bounds and mutants of quantisation, of projections of quantised arrays, and of
adapters.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..namespaces import namespace
from ..reference import lora, quantization
from ..testing import Arguments, Bound
from .families import SUMS, Function, altered, judged, normal, rows, scaled, without_tail

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


def _linear_case(kind: str, dtype: str, bias: bool, x_per: str) -> Arguments:
    x, x_scale = quantized(kind, rows(53, "float32", 7, 96, scale=1.0), x_per)
    weight, weight_scale = quantized(kind, normal(54, "float32", 33, 96), "row")
    arguments = {"x": x, "weight": weight, "x_scale": x_scale, "weight_scale": weight_scale}
    return {**arguments, "bias": normal(55, dtype, 33) if bias else None, "dtype": dtype}


def _products(arguments: Arguments) -> Any:
    x, weight = (np.abs(arguments[name].astype(np.float64)) for name in ("x", "weight"))
    size = x @ weight.T * arguments.get("x_scale", 1.0) * arguments["weight_scale"].T
    return size if arguments["bias"] is None else size + np.abs(arguments["bias"])


def _product_mutants(reference: Function) -> dict[str, Function]:
    return {
        "scale 1.005": scaled(reference, 1.005),
        "tail skipped": altered(reference, x=without_tail),
        "scale of another channel": altered(reference, weight_scale=lambda s: np.roll(s, 1, 0)),
        "no bias": altered(reference, bias=lambda _: None),
    }


def _quantized_linear(reference: Function, kind: str) -> None:
    judged(
        reference.__name__,
        lambda dtype: {
            f"bias {bias}, scale per {per}": _linear_case(kind, dtype, bias, per)
            for bias in (True, False)
            for per in ("row", "tensor")
        },
        _product_mutants(reference),
        bound=SUMS,
        magnitude=_products,
    )


_quantized_linear(quantization.linear_int8, "int8")
_quantized_linear(quantization.linear_fp8, "fp8")


def _weight_only_cases(dtype: str) -> dict[str, Arguments]:
    cases = {}
    for kind in ("int8", "fp8"):
        for bias in (True, False):
            case = _linear_case(kind, dtype, bias, "row")
            arguments = {name: case[name] for name in ("weight", "weight_scale", "bias")}
            cases[f"{kind} bias {bias}"] = {"x": rows(56, dtype, 7, 96, scale=1.0), **arguments}
    return cases


judged(
    "linear_weight_only",
    _weight_only_cases,
    _product_mutants(quantization.linear_weight_only),
    bound=SUMS,
    magnitude=_products,
    rows=("x",),
)


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
