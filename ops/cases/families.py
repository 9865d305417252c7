"""Cases, bounds and mutants of the op families: activations, norms, rotary, parallel forms
(`quantized`: the others).

Cases are small. Rows hold tiny and large values, zeros and an outlier channel; sizes are odd where
an op allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..reference import activations as act
from ..reference import norms, parallel, rotary
from ..testing import DTYPES, Arguments, Bound, Case, Testing, judged_by
from .dense import silu_cases, silu_magnitude
from .generators import strided

Function = Callable[..., Any]
ONCE = Bound()
SUMS = Bound(accumulated=16.0)


def rows(seed: int, dtype: str, rows: int, *shape: int, scale: float = 2.0) -> np.ndarray:
    """Normal rows, but for a zero, a tiny and a large one, and an outlier channel."""
    x = np.random.default_rng(seed).normal(size=(rows, *shape)) * scale
    x[1] = 0.0
    x[2] *= 1e-3
    x[3] *= 30.0
    x[4, ..., 5] = 300.0
    return x.astype(DTYPES[dtype])


def normal(seed: int, dtype: str, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(DTYPES[dtype])


def _grid(seed: int, dtype: str, *shape: int) -> np.ndarray:
    """Multiples of 1/16 below 4: sums of two are exact in every dtype, so that only the norm
    rounds.
    """
    return (np.random.default_rng(seed).integers(-63, 64, shape) / 16.0).astype(DTYPES[dtype])


def scaled(reference: Function, factor: float) -> Function:
    """The first output times `factor`."""

    def mutant(ns: Any, **arguments: Any) -> Any:
        out = reference(ns, **arguments)
        return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

    return mutant


def altered(reference: Function, **changes: Callable[[Any], Any]) -> Function:
    """The reference with some of its arguments changed."""

    def mutant(ns: Any, **arguments: Any) -> Any:
        return reference(
            ns,
            **{**arguments, **{name: change(arguments[name]) for name, change in changes.items()}},
        )

    return mutant


def without_tail(x: np.ndarray) -> np.ndarray:
    """x with the last 8 entries of each row 0."""
    x = x.copy()
    x[..., -8:] = 0
    return x


def _half_swapped(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return np.concatenate([x[..., half:], x[..., :half]], axis=-1)


def judged(
    name: str,
    cases: Callable[[str], Mapping[str, Arguments]],
    mutants: Mapping[str, Function],
    **rest: Any,
) -> None:
    def make(dtype: str) -> Iterator[Case]:
        for case, arguments in cases(dtype).items():
            yield Case(case, arguments)

    judged_by(name, Testing(make, mutants=mutants, **rest))


# Activations


def _activation(
    name: str,
    magnitude: Callable[[Arguments], Any] | None,
    others: Mapping[str, Function],
    bound: Bound = ONCE,
) -> None:
    """An activation of x alone, with what it takes beside x in STATIC."""
    reference = getattr(act, name)

    def cases(dtype: str) -> dict[str, Arguments]:
        static = STATIC.get(name, [{}])
        heads = rows(11, dtype, 5, 3, 34)
        made = {f"rows {extra}": {"x": rows(10, dtype, 7, 106), **extra} for extra in static}
        view = strided(rows(12, dtype, 5, 66))
        return {**made, "heads": {"x": heads, **static[0]}, "strided": {"x": view, **static[0]}}

    judged(
        name,
        cases,
        {"scale 1.005": scaled(reference, 1.005), **others},
        magnitude=magnitude,
        bound=bound,
        rows=("x",),
    )


STATIC: dict[str, list[dict[str, Any]]] = {
    "gelu_and_mul": [{"approximate": "none"}, {"approximate": "tanh"}],
    "swigluoai_and_mul": [{"alpha": 1.702, "limit": 7.0}],
    "fatrelu_and_mul": [{"threshold": 0.25}, {"threshold": 0.0}],
    "xielu": [
        {
            "alpha_p": np.array([0.8], np.float32),
            "alpha_n": np.array([1.3], np.float32),
            "beta": 0.5,
            "eps": -1e-6,
        }
    ],
}


def _product(arguments: Arguments) -> Any:
    half = arguments["x"].shape[-1] // 2
    return np.abs(arguments["x"][..., :half] * arguments["x"][..., half:])


def _input(arguments: Arguments) -> Any:
    return np.abs(arguments["x"])


def _swigluoai(arguments: Arguments) -> Any:
    gate, up = np.abs(arguments["x"][..., 0::2]), np.abs(arguments["x"][..., 1::2])
    return (np.minimum(up, arguments["limit"]) + 1.0) * gate


def _xielu(arguments: Arguments) -> Any:
    x = np.abs(arguments["x"])
    return arguments["alpha_p"] * x * x + (2.0 * arguments["alpha_n"] + arguments["beta"]) * x


def _rescaled(name: str, factor: float) -> Function:
    """The activation of another steepness: f(factor x) / factor."""
    reference = getattr(act, name)
    return lambda xp, x: reference(xp, x * factor) / factor


def _other_gelu(approximate: str) -> Function:
    return altered(act.gelu_and_mul, approximate=lambda _: approximate)


judged(
    "mul_and_silu",
    lambda dtype: {
        **{
            case.name: {"x": _half_swapped(case.arguments["x"])}
            for case in silu_cases(dtype)
            if "ci" in case.tags
        },
        "heads": {"x": rows(11, dtype, 5, 3, 34)},
    },
    {
        "scale 1.005": scaled(act.mul_and_silu, 1.005),
        "halves swapped": altered(act.mul_and_silu, x=_half_swapped),
        "sigmoid for silu": lambda xp, x: (
            np.split(x, 2, -1)[0] / (1.0 + np.exp(-np.split(x, 2, -1)[1]))
        ),
        "gate clipped at 20": altered(
            act.mul_and_silu,
            x=lambda x: np.concatenate(
                [np.split(x, 2, -1)[0], np.split(x, 2, -1)[1].clip(-20, 20)], -1
            ),
        ),
    },
    magnitude=lambda arguments: silu_magnitude({"x": _half_swapped(arguments["x"])}),
    rows=("x",),
)
_activation("gelu_new", _input, {"steeper": _rescaled("gelu_new", 1.02), "quick": act.quick_gelu})
_activation("gelu_fast", _input, {"steeper": _rescaled("gelu_fast", 1.02), "quick": act.quick_gelu})
_activation(
    "quick_gelu",
    _input,
    {"1.6 for 1.702": _rescaled("quick_gelu", 1.6 / 1.702), "tanh": act.gelu_new},
)
_activation(
    "gelu_and_mul",
    _product,
    {
        "halves swapped": altered(act.gelu_and_mul, x=_half_swapped),
        "always tanh": _other_gelu("tanh"),
        "always erf": _other_gelu("none"),
    },
)
judged(
    "gelu_gate",
    lambda dtype: {
        name: dict(zip(("gate", "x"), np.split(x, 2, -1), strict=True))
        for name, x in (
            ("rows", rows(10, dtype, 7, 106)),
            ("heads", rows(11, dtype, 5, 3, 34)),
            ("strided", strided(rows(12, dtype, 5, 66))),
        )
    },
    {
        "scale 1.005": scaled(act.gelu_gate, 1.005),
        "swapped": lambda xp, gate, x: act.gelu_gate(xp, x, gate),
        "not gated": lambda xp, gate, x: x,
        "gelu of erf": lambda xp, gate, x: act.gelu_and_mul(
            xp, np.concatenate([gate, x], -1), "none"
        ),
    },
    magnitude=lambda a: np.abs(a["gate"] * a["x"]),
    rows=("gate", "x"),
)


def _gated_sums(dtype: str) -> Mapping[str, Arguments]:
    gate = np.array([0.0, 1.0, -1.0, 9.0, -9.0, 90.0, -90.0], np.float32)[:, None]
    x, y = rows(13, dtype, 7, 53), rows(14, dtype, 7, 53)[::-1].copy()
    return {
        "rows": {"x": x, "y": y, "gate": gate},
        "strided": {"x": strided(x), "y": strided(y), "gate": gate[::-1].copy()},
    }


judged(
    "add_gated",
    _gated_sums,
    {
        "scale 1.005": scaled(act.add_gated, 1.005),
        "not gated": lambda xp, x, y, gate: x + y,
        "gate negated": altered(act.add_gated, gate=lambda gate: -gate),
        "gate of the next token": altered(act.add_gated, gate=lambda x: np.roll(x, 1, axis=0)),
        "x left out": altered(act.add_gated, x=lambda x: x * 0.0),
        "tanh": lambda xp, x, y, gate: x + np.tanh(gate) * y,
    },
    magnitude=lambda a: np.abs(a["x"]) + np.abs(a["y"]),
    rows=("x", "y", "gate"),
)


def _gated_by_best(dtype: str) -> Mapping[str, Arguments]:
    logits = rows(15, dtype, 7, 19)
    logits[0], logits[1], logits[2] = 0.0, -9.0, -90.0
    logits[3, 18], logits[4, 0], logits[5] = 90.0, 1.0, -1.0
    x = rows(16, dtype, 7, 53)
    return {
        "rows": {"x": x, "logits": logits},
        "logits in float32": {"x": x, "logits": logits.astype(np.float32)},
        "strided": {"x": strided(x), "logits": strided(logits[::-1].copy())},
        "one expert": {"x": x, "logits": logits[:, :1]},
    }


judged(
    "gate_by_best",
    _gated_by_best,
    {
        "scale 1.005": scaled(act.gate_by_best, 1.005),
        "not gated": lambda xp, x, logits: x,
        "logits negated": altered(act.gate_by_best, logits=lambda x: -x),
        "the first logit": altered(act.gate_by_best, logits=lambda x: x[:, :1]),
        "the last logit lost": altered(
            act.gate_by_best, logits=lambda x: x[:, : -(-x.shape[1] // 2)]
        ),
        "logits of the next token": altered(
            act.gate_by_best, logits=lambda x: np.roll(x, 1, axis=0)
        ),
        "tanh": lambda xp, x, logits: x * np.tanh(np.max(logits, -1, keepdims=True)),
    },
    magnitude=lambda a: np.abs(a["x"]),
    rows=("x", "logits"),
)
_activation(
    "swigluoai_and_mul",
    _swigluoai,
    {
        "halves, not pairs": altered(
            act.swigluoai_and_mul, x=lambda x: np.stack(np.split(x, 2, -1), -1).reshape(x.shape)
        ),
        "no limit": altered(act.swigluoai_and_mul, limit=lambda _: 1e9),
        "alpha 1": altered(act.swigluoai_and_mul, alpha=lambda _: 1.0),
    },
)
_activation(
    "relu2",
    None,
    {"not squared": lambda xp, x: xp.where(x < 0, 0.0, x), "absolute": lambda xp, x: x * x},
)
_activation(
    "fatrelu_and_mul",
    None,
    {
        "threshold 0": altered(act.fatrelu_and_mul, threshold=lambda _: 0.0),
        "halves swapped": altered(act.fatrelu_and_mul, x=_half_swapped),
    },
)
_activation(
    "xielu",
    _xielu,
    {
        "softplus twice": altered(act.xielu, alpha_p=lambda a: np.log1p(np.exp(a))),
        "beta missing in alpha_n": altered(act.xielu, alpha_n=lambda a: a - 0.5),
    },
    # Near 0 the result is beta x (exact for beta 1/2) and a little of one sign: roundings all go
    # the same way.
    Bound(gain=False, reason="roundings of a tiny row are not independent"),
)


# Norms


def _norm_case(dtype: str, *names: str, grouped: bool = False) -> Arguments:
    n = (3, 34) if grouped else (102,)
    made: Arguments = {"x": rows(20, dtype, 7, *n), "gate": normal(21, dtype, 7, *n, scale=2.0)}
    made |= {"weight": normal(22, dtype, *n), "bias": normal(23, dtype, *n), "eps": 1e-5}
    return {name: made[name] for name in ("x", *names, "eps")}


def _gemma(arguments: Arguments) -> Any:
    x = arguments["x"] + arguments.get("residual", 0.0)
    scale = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + arguments["eps"])
    normed = np.abs(x) * scale * (1.0 + np.abs(arguments["weight"]))
    return (normed, np.abs(x)) if "residual" in arguments else normed


def _centred(arguments: Arguments) -> Any:
    x = arguments["x"] + arguments.get("residual", 0.0)
    scale = 1.0 / np.sqrt(x.var(-1, keepdims=True) + arguments["eps"])
    normed = (np.abs(x) + np.abs(x).mean(-1, keepdims=True)) * scale
    normed = normed if arguments["weight"] is None else normed * np.abs(arguments["weight"])
    normed = normed if arguments["bias"] is None else normed + np.abs(arguments["bias"])
    return (normed, np.abs(x)) if "residual" in arguments else normed


def _not_centred(xp: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return (y if weight is None else y * weight) + (0.0 if bias is None else bias)


def _norm_mutants(reference: Function, argument: str = "x") -> dict[str, Function]:
    return {
        "scale 1.005": scaled(reference, 1.005),
        "eps 1e-4": altered(reference, eps=lambda e: 10.0 * e),
        "tail skipped": altered(reference, **{argument: without_tail}),
    }


judged(
    "gemma_rms_norm",
    lambda dtype: {
        "rows": _norm_case(dtype, "weight"),
        "float32 weight": {**_norm_case(dtype, "weight"), "weight": normal(24, "float32", 102)},
    },
    {
        **_norm_mutants(norms.gemma_rms_norm),
        "weight for 1 + weight": altered(norms.gemma_rms_norm, weight=lambda w: w - 1.0),
    },
    bound=SUMS,
    magnitude=_gemma,
    rows=("x",),
)
judged(
    "gated_rms_norm",
    lambda dtype: {
        f"{'groups' if grouped else 'rows'} {first=}": {
            **_norm_case(dtype, "gate", "weight", grouped=grouped),
            "norm_before_gate": first,
        }
        for grouped in (False, True)
        for first in (False, True)
    },
    {
        **_norm_mutants(norms.gated_rms_norm),
        "other order": altered(norms.gated_rms_norm, norm_before_gate=lambda first: not first),
        "gate not activated": altered(norms.gated_rms_norm, gate=lambda z: z + 40.0),
    },
    bound=SUMS,
    rows=("x", "gate"),
)
judged(
    "layer_norm",
    lambda dtype: {
        "rows": _norm_case(dtype, "weight", "bias"),
        "far from zero": {
            **_norm_case(dtype, "weight", "bias"),
            "x": rows(25, dtype, 7, 102) + DTYPES[dtype](8.0),
        },
        "no bias": {**_norm_case(dtype, "weight"), "bias": None},
        "bare": {**_norm_case(dtype), "weight": None, "bias": None},
    },
    {
        **_norm_mutants(norms.layer_norm),
        "no bias": altered(norms.layer_norm, bias=lambda _: None),
        "not centred": _not_centred,
    },
    bound=SUMS,
    magnitude=_centred,
    rows=("x",),
)


def _fused_case(dtype: str, *names: str) -> Arguments:
    return {
        **_norm_case(dtype, *names),
        "x": _grid(26, dtype, 7, 102),
        "residual": _grid(27, dtype, 7, 102),
    }


def _returning(reference: Function, name: str) -> Function:
    """The norm is right, but an argument comes back instead of the sum."""
    return lambda ops, **arguments: (reference(ops, **arguments)[0], arguments[name])


judged(
    "fused_add_gemma_rms_norm",
    lambda dtype: {"rows": _fused_case(dtype, "weight")},
    {
        "scale 1.005": scaled(norms.fused_add_gemma_rms_norm, 1.005),
        "residual skipped": altered(norms.fused_add_gemma_rms_norm, residual=lambda r: r * 0.0),
        "residual returned": _returning(norms.fused_add_gemma_rms_norm, "residual"),
        "weight for 1 + weight": altered(norms.fused_add_gemma_rms_norm, weight=lambda w: w - 1.0),
        "eps 1e-2": altered(norms.fused_add_gemma_rms_norm, eps=lambda e: 1e-2),
    },
    bound=SUMS,
    magnitude=_gemma,
    rows=("x", "residual"),
)
judged(
    "fused_add_layer_norm",
    lambda dtype: {
        "rows": _fused_case(dtype, "weight", "bias"),
        "bare": {**_fused_case(dtype), "weight": None, "bias": None},
    },
    {
        "scale 1.005": scaled(norms.fused_add_layer_norm, 1.005),
        "tail skipped": altered(norms.fused_add_layer_norm, x=without_tail),
        "x returned": _returning(norms.fused_add_layer_norm, "x"),
        "no bias": altered(norms.fused_add_layer_norm, bias=lambda _: None),
    },
    bound=SUMS,
    magnitude=_centred,
    rows=("x", "residual"),
)


# Rotary embedding


def _rotary_case(dtype: str, pairs: int) -> Arguments:
    inverse = rotary.dynamic_ntk_inverse_frequencies(2 * pairs, 1e4, 4.0, 64, 200)
    cos, sin = (
        table[[0, 1, 63, 64, 199]].astype(np.float32) for table in rotary.rotary_table(inverse, 200)
    )
    return {"q": rows(30, dtype, 5, 4, 32), "k": rows(31, dtype, 5, 2, 32), "cos": cos, "sin": sin}


def _rotated(arguments: Arguments) -> Any:
    def one(x: np.ndarray) -> np.ndarray:
        x, n = np.abs(x), 2 * arguments["cos"].shape[-1]
        c, s = (np.abs(arguments[name])[:, None, :] for name in ("cos", "sin"))
        out = x.copy()
        out[..., 0:n:2] = x[..., 0:n:2] * c + x[..., 1:n:2] * s
        out[..., 1:n:2] = x[..., 1:n:2] * c + x[..., 0:n:2] * s
        return out

    return one(arguments["q"]), one(arguments["k"])


def _halves_rotated(xp: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    from ..reference.dense import rotary_embedding

    return rotary_embedding(xp, q, k, cos, sin)


judged(
    "rotary_embedding_gptj",
    lambda dtype: {"whole": _rotary_case(dtype, 16), "part": _rotary_case(dtype, 6)},
    {
        "other direction": altered(rotary.rotary_embedding_gptj, sin=lambda s: -s),
        "halves, not pairs": _halves_rotated,
        "position off by one": altered(
            rotary.rotary_embedding_gptj,
            cos=lambda c: np.roll(c, 1, 0),
            sin=lambda s: np.roll(s, 1, 0),
        ),
        "scale 1.005": scaled(rotary.rotary_embedding_gptj, 1.005),
    },
    magnitude=_rotated,
    rows=("q", "k", "cos", "sin"),
)


# Parallel forms


def _ids() -> np.ndarray:
    return np.array([0, 39, 40, 63, 64, -1, 47, 47], np.int32)


def _wrong_shard(xp: Any, ids: Any, table_shard: Any, start: int) -> Any:
    return np.take(table_shard, np.clip(ids - start, 0, table_shard.shape[0] - 1), axis=0)


judged(
    "vocab_parallel_embedding",
    lambda dtype: {
        f"shard at {start}": {
            "ids": _ids(),
            "table_shard": normal(40, dtype, 24, 32),
            "start": start,
        }
        for start in (0, 40)
    },
    {
        "clipped, not masked": _wrong_shard,
        "start off by one": altered(parallel.vocab_parallel_embedding, start=lambda n: n + 1),
        "last word of the shard lost": lambda xp, ids, table_shard, start: (
            parallel.vocab_parallel_embedding(
                xp, np.where(ids == start + len(table_shard) - 1, -1, ids), table_shard, start
            )
        ),
        "-1 is the last word": lambda xp, ids, table_shard, start: (
            parallel.vocab_parallel_embedding(
                xp, np.where(ids < 0, start + len(table_shard) - 1, ids), table_shard, start
            )
        ),
    },
    bitwise=True,
    rows=("ids",),
)


def _product_case(dtype: str, bias: bool, names: tuple[str, str, str]) -> Arguments:
    made = (
        rows(41, dtype, 7, 96, scale=1.0),
        normal(42, dtype, 33, 96),
        normal(43, dtype, 33) if bias else None,
    )
    return dict(zip(names, made, strict=True))


def _products(names: tuple[str, str, str]) -> Callable[[Arguments], Any]:
    def magnitude(arguments: Arguments) -> Any:
        x, weight, bias = (arguments[name] for name in names)
        size = np.abs(x) @ np.abs(weight).T
        return size if bias is None or arguments.get("shard", 0) else size + np.abs(bias)

    return magnitude


def _linear_form(reference: Function, names: tuple[str, str, str], *shards: int) -> None:
    def cases(dtype: str) -> dict[str, Arguments]:
        return {
            f"bias {bias} shard {shard}": _product_case(dtype, bias, names)
            | ({"shard": shard} if shards else {})
            for bias in (True, False)
            for shard in shards or (0,)
        }

    mutants = {
        "scale 1.005": scaled(reference, 1.005),
        "tail skipped": altered(reference, **{names[0]: without_tail}),
        "no bias": altered(reference, **{names[2]: lambda _: None}),
    }
    if shards:
        mutants["bias on every shard"] = altered(reference, shard=lambda _: 0)
    judged(
        reference.__name__, cases, mutants, bound=SUMS, magnitude=_products(names), rows=names[:1]
    )


judged(
    "all_reduce",
    lambda dtype: {"one shard": {"x": rows(45, dtype, 7, 96, scale=1.0)}},
    {
        "summed twice": lambda xp, x: x + x,
        "tail skipped": lambda xp, x: without_tail(x),
        "row lost": lambda xp, x: np.where(np.arange(len(x))[:, None] == 3, 0 * x, x),
    },
    bitwise=True,
    rows=("x",),
)
judged(
    "token_scales",
    lambda dtype: {
        f"{limit:.0f}": {"x": rows(46, dtype, 7, 96, scale=1.0), "limit": limit}
        for limit in (127.0, 448.0)
    },
    {
        "no magnitudes": altered(parallel.token_scales, x=lambda x: np.maximum(x, 0)),
        "tail skipped": altered(parallel.token_scales, x=without_tail),
        "the other limit": altered(parallel.token_scales, limit=lambda limit: 575.0 - limit),
        "one for all": lambda xp, x, limit: (
            0 * parallel.token_scales(xp, x, limit) + np.max(parallel.token_scales(xp, x, limit))
        ),
    },
    bitwise=True,
    rows=("x",),
)
_linear_form(parallel.column_linear, ("x", "weight_shard", "bias_shard"))
_linear_form(parallel.row_linear, ("x_shard", "weight_shard", "bias"), 0, 1)
_linear_form(parallel.replicated_linear, ("x", "weight", "bias"))
judged(
    "logits_processor",
    lambda dtype: {
        f"{scale=} {cap=}": {
            "logits": rows(44, dtype, 6, 101, scale=8.0),
            "scale": scale,
            "soft_cap": cap,
        }
        for scale, cap in ((1.0, 30.0), (0.0625, 0.0), (0.5, 50.0))
    },
    {
        "no cap": altered(parallel.logits_processor, soft_cap=lambda _: 0.0),
        "scale before the cap": lambda xp, logits, scale, soft_cap: parallel.logits_processor(
            xp, logits * scale, 1.0, soft_cap
        ),
        "scale 1.005": scaled(parallel.logits_processor, 1.005),
    },
    rows=("logits",),
)
