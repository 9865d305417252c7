"""Cases of embedding, products, and the gated MLP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..testing import Arguments, Bound, Case, Testing, judged_by
from .generators import generator, hostile_rows, normal, strided, to_bfloat16, to_tf32


def chain(k: int) -> float:
    """Growth of the error of a float32 sum of k numbers in any order, over that of a few:
    roundings walk randomly.
    """
    return max(1.0, math.sqrt(k) / 4.0)


COARSE = Bound(
    roundings=1.0,
    inner=2.0,
    reason="the contract lets an implementation make or skip the inner roundings, and the oracle "
    "makes them: who skips "
    "one is off by half a unit in the last place of that value, who makes it next to a tie by a "
    "whole one",
)
"""Of coarse ops whose finer ones round on the way. `rounded` has to count each inner rounding
once.
"""
FLUSHED = 2.0**-104
"""A magnitude that allows 2^-125 in a default bound: what is below the smallest normal number
may be flushed to 0.
"""


# --- embedding
# --------------------------------------------------------------------------------------------------


def _embedding_cases(dtype: str) -> Iterator[Case]:
    rng = generator("embedding")
    table = hostile_rows(rng, dtype, 131, 70)
    table[130] = np.nan  # the last word: only who reads it gets it
    ids = rng.integers(0, 130, 37).astype(np.int32)
    ids[:4] = 0, 129, 5, 5
    yield Case("hostile table", {"ids": ids, "table": table})
    yield Case("a row of NaN", {"ids": np.array([130, 0, 130, 129], np.int32), "table": table})
    yield Case("strided table", {"ids": ids, "table": strided(table)})
    if dtype == "bfloat16":
        yield Case("Qwen3-0.6B, 2048 tokens", _big_embedding, ("bench",))


def _big_embedding() -> Arguments:
    rng = generator("bench embedding")
    ids = rng.integers(0, 151936, 2048).astype(np.int32)
    return {"ids": ids, "table": normal(rng, "bfloat16", 151936, 1024)}


judged_by(
    "embedding",
    Testing(
        _embedding_cases,
        bitwise=True,
        rows=("ids",),
        mutants={
            "next word": lambda xp, ids, table: table[(ids + 1) % len(table)],
            "scaled by sqrt(dim)": lambda xp, ids, table: (table[ids] * np.float32(70**0.5)).astype(
                table.dtype
            ),
            "last word unreachable": lambda xp, ids, table: table[np.minimum(ids, len(table) - 3)],
            "last channel lost": lambda xp, ids, table: np.where(
                np.arange(70) < 69, table[ids], table[ids] * 0
            ),
            "NaN cleaned": lambda xp, ids, table: np.nan_to_num(
                table[ids].astype(np.float32)
            ).astype(table.dtype),
        },
    ),
)


# --- linear and logits
# -----------------------------------------------------------------------------------------------


def _product(rng: np.random.Generator, dtype: str, rows: int, k: int, n: int) -> Arguments:
    return {
        "x": hostile_rows(rng, dtype, rows, k),
        "weight": normal(rng, dtype, n, k, scale=k**-0.5),
        "bias": normal(rng, dtype, n),
    }


def _linear_cases(dtype: str) -> Iterator[Case]:
    rng = generator("linear")
    odd = _product(rng, dtype, 7, 133, 35)
    yield Case("odd sizes", odd)
    yield Case(
        "strided x and weight", odd | {"x": strided(odd["x"]), "weight": strided(odd["weight"])}
    )
    yield Case("no bias", odd | {"bias": None})
    real = _product(rng, dtype, 9, 1024, 96)
    yield Case("k of a real layer", real | {"bias": None})
    # The bias takes almost all of the sum away: a product that is rounded before it shows.
    row = normal(rng, dtype, 1, 133)
    exact = row.astype(np.float64) @ odd["weight"].astype(np.float64).T
    bias = (-exact[0] * (1 + rng.uniform(-0.02, 0.02, 35))).astype(row.dtype)
    yield Case("the bias cancels the product", odd | {"x": np.repeat(row, 7, axis=0), "bias": bias})
    if dtype == "bfloat16":
        for tokens in (1, 64, 2048):
            make = partial(_product, generator("bench linear"), dtype, tokens, 1024, 4096)
            yield Case(f"Qwen3-0.6B qkv, {tokens} tokens", make, ("bench",))


def _linear_magnitude(a: Arguments) -> Any:
    size = np.abs(a["x"]) @ np.abs(a["weight"]).T * chain(a["x"].shape[-1])
    return size if a["bias"] is None else size + np.abs(a["bias"])


def _wrong_linear(xp: Any, x: Any, weight: Any, bias: Any, fault: str) -> Any:
    bias = 0.0 if bias is None else bias
    if fault == "rounded before the bias":
        return to_bfloat16(x @ weight.T) + bias
    if fault == "tf32":
        return to_tf32(x) @ to_tf32(weight).T + bias
    if fault == "bfloat16":
        return to_bfloat16(x) @ to_bfloat16(weight).T + bias
    return x @ weight.T + bias


judged_by(
    "linear",
    Testing(
        _linear_cases,
        magnitude=_linear_magnitude,
        rows=("x",),
        mutants={
            "bias dropped": lambda xp, x, weight, bias: x @ weight.T,
            "bias twice": lambda xp, x, weight, bias: (
                x @ weight.T + (0.0 if bias is None else 2 * bias)
            ),
            "last 64 of k skipped": lambda xp, x, weight, bias: xp.linear(
                x[:, :-64], weight[:, :-64], bias
            ),
            "last of k skipped": lambda xp, x, weight, bias: xp.linear(
                x[:, :-1], weight[:, :-1], bias
            ),
            "scaled by 1.005": lambda xp, x, weight, bias: xp.linear(x, weight, bias) * 1.005,
            "rows shifted": lambda xp, x, weight, bias: xp.linear(
                np.roll(x, 1, axis=0), weight, bias
            ),
            "columns shifted": lambda xp, x, weight, bias: xp.linear(
                x, np.roll(weight, 1, axis=0), bias
            ),
            "rounded before the bias": partial(_wrong_linear, fault="rounded before the bias"),
            "tf32 product": partial(_wrong_linear, fault="tf32"),
            "bfloat16 product": partial(_wrong_linear, fault="bfloat16"),
        },
        truth=partial(_wrong_linear, fault=""),
    ),
)


def _logits_cases(dtype: str) -> Iterator[Case]:
    rng = generator("logits")
    for name, (rows, k, vocab) in {
        "odd sizes": (8, 133, 257),
        "k of a real model": (3, 1024, 65),
    }.items():
        arguments = _product(rng, dtype, rows, k, vocab)
        arguments.pop("bias")
        yield Case(name, arguments)
    yield Case("strided x", arguments | {"x": strided(arguments["x"])})
    if dtype == "bfloat16":
        yield Case("Qwen3-0.6B, 64 rows", _big_logits, ("bench",))


def _big_logits() -> Arguments:
    rng = generator("bench logits")
    weight = normal(rng, "bfloat16", 151936, 1024, scale=1 / 32)
    return {"x": normal(rng, "bfloat16", 64, 1024), "weight": weight}


judged_by(
    "logits",
    Testing(
        _logits_cases,
        magnitude=lambda a: np.abs(a["x"]) @ np.abs(a["weight"]).T * chain(a["x"].shape[-1]),
        rows=("x",),
        mutants={
            "rounded to bfloat16": lambda xp, x, weight: to_bfloat16(x @ weight.T),
            "last 64 of k skipped": lambda xp, x, weight: x[:, :-64] @ weight[:, :-64].T,
            "scaled by 1.005": lambda xp, x, weight: x @ weight.T * 1.005,
            "words shifted": lambda xp, x, weight: x @ np.roll(weight, 1, axis=0).T,
            "tf32 product": lambda xp, x, weight: to_tf32(x) @ to_tf32(weight).T,
            "last word lost": lambda xp, x, weight: (
                x @ np.where(np.arange(len(weight)) < len(weight) - 1, weight.T, 0)
            ),
        },
    ),
)


# --- silu_and_mul and the gated MLP
# ----------------------------------------------------------------------------------


def silu_cases(dtype: str) -> Iterator[Case]:
    """x = (gate, up)."""
    rng = generator("silu_and_mul")
    x = hostile_rows(rng, dtype, 8, 2 * 99)
    x[7] = np.linspace(-87, 87, 198).astype(x.dtype)  # both tails of exp
    yield Case("hostile rows", {"x": x})
    if dtype != "float16":  # which holds no such up
        # Where exp(-gate) overflows and exp(gate) is below the smallest float32, but the product
        # with up is not.
        gates, up = np.linspace(-140, -80, 99), np.geomspace(1e36, 1e15, 99)
        yield Case(
            "deep gates", {"x": np.tile(np.concatenate([gates, up]), (8, 1)).astype(x.dtype)}
        )
    yield Case("strided", {"x": strided(normal(rng, dtype, 8, 198, scale=3.0))})
    yield Case("real width", {"x": normal(rng, dtype, 3, 2 * 3072, scale=2.0)})
    if dtype == "bfloat16":
        bench = generator("bench silu_and_mul")
        yield Case(
            "Qwen3-0.6B, 2048 tokens",
            lambda: {"x": normal(bench, dtype, 2048, 2 * 3072)},
            ("bench",),
        )


def _halves(x: Any) -> tuple[Any, Any]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _silu(x: Any) -> Any:
    return x / (1.0 + np.exp(-x))


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu_magnitude(a: Arguments) -> Any:
    """The result itself: nothing cancels, and nothing may be flushed before the result is."""
    gate, up = _halves(a["x"])
    return np.abs(_silu(gate) * up) + FLUSHED


def _wrong_silu_and_mul(xp: Any, x: Any, fault: str) -> Any:
    gate, up = _halves(x)
    if fault == "rounded between":
        return to_bfloat16(_silu(gate)) * up
    if fault == "interleaved":
        return _silu(x[..., 0::2]) * x[..., 1::2]
    if fault == "sigmoid":
        return up / (1.0 + np.exp(-gate))
    return _silu(np.clip(gate, -20.0, 20.0) if fault == "clipped" else gate) * up


judged_by(
    "silu_and_mul",
    Testing(
        silu_cases,
        magnitude=silu_magnitude,
        rows=("x",),
        mutants={
            "gelu": lambda xp, x: _gelu(_halves(x)[0]) * _halves(x)[1],
            "gate and up swapped": lambda xp, x: _halves(x)[0] * _silu(_halves(x)[1]),
            "scaled by 1.005": lambda xp, x: _silu(_halves(x)[0]) * _halves(x)[1] * 1.005,
            "up ignored": lambda xp, x: _silu(_halves(x)[0]),
            "beta 1.01": lambda xp, x: _silu(_halves(x)[0] * 1.01) / 1.01 * _halves(x)[1],
            **{
                name: partial(_wrong_silu_and_mul, fault=fault)
                for name, fault in {
                    "silu rounded before the product": "rounded between",
                    "halves interleaved": "interleaved",
                    "sigmoid for silu": "sigmoid",
                    "gate clipped at 20": "clipped",
                }.items()
            },
        },
        truth=partial(_wrong_silu_and_mul, fault=""),
    ),
)


@dataclass(frozen=True)
class Gate:
    """What an MLP's gate goes through: its name, the function, its slope, and how large errors
    relative to its operands are.
    """

    name: str
    function: Any
    slope: Any
    noise: Any

    def __call__(self, x: Any) -> Any:
        return self.function(x)


def _silu_slope(x: Any) -> Any:
    sigmoid = 1.0 / (1.0 + np.exp(-x))
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


def _gelu_slope(x: Any) -> Any:
    root = math.sqrt(2 / math.pi)
    t = np.tanh(root * (x + 0.044715 * x**3))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3 * 0.044715 * x**2)


SILU = Gate("silu", _silu, _silu_slope, _silu)
# 1 + tanh cancels where the gate is far below 0: there the error is that of the operands.
GELU = Gate("gelu", _gelu, _gelu_slope, lambda x: x)


def _mlp_cases(dtype: str, op: str) -> Iterator[Case]:
    rng = generator(op)
    x = hostile_rows(rng, dtype, 6, 67, ("normal", "zero", "tiny", "outlier", "mean", "spread"))
    arguments: Arguments = {
        "x": x,
        "gate_up": normal(rng, dtype, 2 * 45, 67, scale=67**-0.5),
        "gate_up_bias": normal(rng, dtype, 2 * 45),
        "down": normal(rng, dtype, 67, 45, scale=45**-0.5),
        "down_bias": normal(rng, dtype, 67),
    }
    yield Case("odd sizes, biases", arguments)
    yield Case("no biases", arguments | {"gate_up_bias": None, "down_bias": None})
    yield Case("strided x", arguments | {"x": strided(x), "gate_up_bias": None, "down_bias": None})
    if dtype == "bfloat16":
        yield Case("Qwen3-0.6B, 2048 tokens", _big_mlp, ("bench",))


def _big_mlp() -> Arguments:
    rng = generator("bench gated_mlp")
    gate_up = normal(rng, "bfloat16", 6144, 1024, scale=1 / 32)
    down = normal(rng, "bfloat16", 1024, 3072, scale=1 / 55)
    x = normal(rng, "bfloat16", 2048, 1024)
    return {"x": x, "gate_up": gate_up, "gate_up_bias": None, "down": down, "down_bias": None}


def mlp_sizes(a: Arguments, accumulated: bool, act: Gate = SILU) -> Any:
    """What relative errors of 1 in gate, up and their product, or in all that these are sums of,
    do to the output.
    """
    gate, up = _halves(
        a["x"] @ a["gate_up"].T + (0.0 if a["gate_up_bias"] is None else a["gate_up_bias"])
    )
    gate_size, up_size, noise = np.abs(gate), np.abs(up), np.abs(act(gate) * up)
    if accumulated:
        noise = np.abs(act.noise(gate) * up)
        gate_size, up_size = _halves(
            _added(a["x"], a["gate_up"], a["gate_up_bias"]) * chain(a["x"].shape[-1])
        )
    hidden = np.abs(act.slope(gate) * up) * gate_size + np.abs(act(gate)) * up_size + noise
    return _added(hidden, a["down"], a["down_bias"]) * (
        chain(a["down"].shape[-1]) if accumulated else 1.0
    )


def _added(x: Any, weight: Any, bias: Any) -> Any:
    return np.abs(x) @ np.abs(weight).T + (0.0 if bias is None else np.abs(bias))


def _wrong_mlp(
    ops: Any,
    x: Any,
    gate_up: Any,
    gate_up_bias: Any,
    down: Any,
    down_bias: Any,
    fault: str,
    act: Gate = SILU,
) -> Any:
    if fault == "gate_up bias dropped":
        gate_up_bias = None
    hidden = ops.rounded(ops.linear(x, gate_up, gate_up_bias))
    gate, up = _halves(hidden)
    if fault == "the other activation":
        hidden = (_gelu(gate) if act is SILU else _silu(gate)) * up
    elif fault == "gate and up swapped":
        hidden = act(up) * gate
    elif fault == "up ignored":
        hidden = act(gate)
    else:
        hidden = act(gate) * up
    if fault == "last 8 of inter skipped":
        hidden = np.where(np.arange(hidden.shape[-1]) < hidden.shape[-1] - 8, hidden, 0.0)
    if fault == "down bias dropped":
        down_bias = None
    out = ops.linear(ops.rounded(hidden), down, down_bias)
    if fault == "scaled by 1.005":
        return out * 1.005
    return out + x if fault == "residual added" else out


MLP_FAULTS = (
    *("gate_up bias dropped", "down bias dropped", "the other activation", "gate and up swapped"),
    *("up ignored", "last 8 of inter skipped", "scaled by 1.005", "residual added"),
)

for _op, _act in {"gated_mlp": SILU, "gelu_gated_mlp": GELU}.items():
    judged_by(
        _op,
        Testing(
            partial(_mlp_cases, op=_op),
            COARSE,
            magnitude=partial(mlp_sizes, accumulated=True, act=_act),
            rounded=partial(mlp_sizes, accumulated=False, act=_act),
            rows=("x",),
            mutants={fault: partial(_wrong_mlp, fault=fault, act=_act) for fault in MLP_FAULTS},
            truth=partial(_wrong_mlp, fault="", act=_act),
        ),
    )
