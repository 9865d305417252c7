"""Cases of the rotary embedding, and of it behind a norm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ..testing import Arguments, Bound, Case, Testing, judged_by
from .generators import generator, huge, normal, strided, to_bfloat16, weights


def _table(positions: np.ndarray, rotated: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    angles = positions[:, None].astype(np.float64) * theta ** -(np.arange(0, rotated, 2) / rotated)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _arguments(rng: np.random.Generator, dtype: str, tokens: int, heads: tuple[int, int], hdim: int,
    rotated: int,
               theta: float = 1e4) -> Arguments:  # fmt: skip
    # A decode row far out, a prompt from 0, and padding at position 0.
    positions = np.concatenate([[131071, 4095], np.arange(max(0, tokens - 3)), [0]])[:tokens]
    cos, sin = _table(positions, rotated, theta)
    q, k = (normal(rng, dtype, tokens, n, hdim) for n in heads)
    return {"q": q, "k": k, "cos": cos, "sin": sin}


def _cases(dtype: str) -> Iterator[Case]:
    rng = generator("rotary_embedding")
    full = _arguments(rng, dtype, 9, (4, 2), 64, 64)
    for i, scale in enumerate((huge(dtype), 1 / huge(dtype), 0.0)):
        full["q"][3 + i] = (full["q"][3 + i].astype(np.float64) * scale).astype(full["q"].dtype)
    full["q"][6, 1, 5] = 300.0
    yield Case("full heads", full)
    # Models make q and k as views of one product.
    yield Case("views", full | {"q": strided(full["q"]), "k": strided(full["k"], axis=1)})
    yield Case("a part of the head", _arguments(rng, dtype, 5, (3, 3), 80, 20))
    yield Case("an odd number of pairs", _arguments(rng, dtype, 6, (7, 1), 33, 22, theta=1e6))
    # Halves that cancel: the result is small against what it is made of.
    cancel = _arguments(rng, dtype, 9, (4, 2), 64, 64)
    cos, sin = np.float32(np.cos(0.6)), np.float32(np.sin(0.6))
    cancel["cos"][:], cancel["sin"][:] = cos, sin
    cancel["q"][..., :32] = cancel["q"][..., 32:] * (sin / cos).astype(cancel["q"].dtype)
    yield Case("halves that cancel", cancel)
    if dtype == "bfloat16":
        yield Case(
            "Qwen3-0.6B, 2048 tokens",
            _arguments(rng, dtype, 2048, (16, 8), 128, 128, 1e6),
            ("bench",),
        )


def _magnitude(a: Arguments) -> Any:
    return tuple(
        _rotate(np.abs(a[n]), np.abs(a["cos"]), -np.abs(a["sin"]), both=1.0) for n in ("q", "k")
    )


def _rotate(x: Any, cos: Any, sin: Any, both: float = -1.0, fault: str = "") -> Any:
    half = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    if both > 0:
        s = np.abs(s)
        return np.concatenate([a * c + b * s, b * c + a * s, rest], axis=-1)
    if fault == "neighbours paired":
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        pairs = np.stack([a * c - b * s, b * c + a * s], axis=-1)
        return np.concatenate([pairs.reshape(*x.shape[:-1], 2 * half), rest], axis=-1)
    first, second = a * c - b * s, b * c + a * s
    if fault == "halves swapped":
        first, second = second, first
    elif fault == "one half only":
        second = b
    elif fault == "products rounded":
        first, second = (
            to_bfloat16(a * c) - to_bfloat16(b * s),
            to_bfloat16(b * c) + to_bfloat16(a * s),
        )
    elif fault == "tail zeroed":
        rest = rest * 0.0
    elif fault == "tail scaled":
        rest = rest * 1.005
    return np.concatenate([first, second, rest], axis=-1)


def _wrong(xp: Any, q: Any, k: Any, cos: Any, sin: Any, fault: str) -> Any:
    if fault == "negative angle":
        sin = -sin
    elif fault == "cos and sin swapped":
        cos, sin = sin, cos
    elif fault == "position of the next row":
        cos, sin = np.roll(cos, -1, axis=0), np.roll(sin, -1, axis=0)
    elif fault == "position of the first row":
        cos, sin = cos[:1].repeat(len(cos), axis=0), sin[:1].repeat(len(sin), axis=0)
    elif fault == "table rounded to bfloat16":
        cos, sin = to_bfloat16(cos), to_bfloat16(sin)
    elif fault == "frequencies shifted":
        cos, sin = np.roll(cos, 1, axis=1), np.roll(sin, 1, axis=1)
    out_q, out_k = _rotate(q, cos, sin, fault=fault), _rotate(k, cos, sin, fault=fault)
    if fault == "k not rotated":
        out_k = k
    elif fault == "q scaled by 1.005":
        out_q = out_q * 1.005
    elif fault == "last head of q not rotated":
        out_q[:, -1] = q[:, -1]
    return out_q, out_k


FAULTS = (
    *(
        "negative angle",
        "cos and sin swapped",
        "position of the next row",
        "position of the first row",
    ),
    *("table rounded to bfloat16", "frequencies shifted", "k not rotated", "q scaled by 1.005"),
    *(
        "last head of q not rotated",
        "neighbours paired",
        "halves swapped",
        "one half only",
        "products rounded",
    ),
    *("tail zeroed", "tail scaled"),
)

judged_by(
    "rotary_embedding",
    Testing(
        _cases,
        magnitude=_magnitude,
        rows=("q", "k", "cos", "sin"),
        mutants={fault: partial(_wrong, fault=fault) for fault in FAULTS},
        truth=partial(_wrong, fault=""),
    ),
)


# --- norm_rope
# --------------------------------------------------------------------------------------------------


def _norm_cases(dtype: str) -> Iterator[Case]:
    rng = generator("norm_rope")

    def arguments(tokens: int, heads: int, hdim: int, rotated: int) -> Arguments:
        made = _arguments(rng, dtype, tokens, (heads, 1), hdim, rotated)
        del made["k"]
        made["q"][: tokens // 2] *= made["q"].dtype.type(20.0)
        made["q"][-1:] *= made["q"].dtype.type(1e-3)
        return made | {"weight": weights(rng, dtype, hdim), "eps": 1e-6}

    usual = arguments(9, 4, 32, 32)
    yield Case("norm", usual)
    yield Case("large eps", usual | {"eps": 0.5})
    yield Case("no norm", usual | {"weight": None})
    yield Case("views", usual | {name: strided(usual[name]) for name in ("q", "cos", "sin")})
    yield Case("odd head size, partly rotated", arguments(5, 3, 23, 10))
    yield Case("one token, wide heads", arguments(1, 2, 512, 512))
    if dtype != "float32":
        yield Case("weight in float32", usual | {"weight": weights(rng, "float32", 32)})


def _wrong_norm(
    ops: Any, q: Any, weight: Any, cos: Any, sin: Any, eps: float, fault: str = ""
) -> Any:
    eps = {"eps missing": 0.0, "eps of another model": eps * 10}.get(fault, eps)
    if weight is not None and fault == "weight dropped":
        weight = np.ones_like(weight)
    if weight is not None and fault != "not normed":
        q = ops.rms_norm(q, weight, eps)
    if fault == "rotated the other way":
        sin = -sin
    elif fault == "angles of the next token":
        cos, sin = np.roll(cos, -1, 0), np.roll(sin, -1, 0)
    if fault == "not rotated":
        return q
    out = ops.rotary_embedding(q, q[:, :1], cos, sin)[0]
    return out * 1.005 if fault == "scaled by 1.005" else out


def _normed_size(a: Arguments) -> Any:
    q = a["q"].astype(np.float64)
    if a["weight"] is not None:
        q = q / np.sqrt((q**2).mean(-1, keepdims=True) + a["eps"]) * a["weight"]
    return _rotate(np.abs(q), np.abs(a["cos"]), -np.abs(a["sin"]), both=1.0)


NORM_FAULTS = (
    *("eps missing", "eps of another model", "weight dropped", "not normed", "not rotated"),
    *("rotated the other way", "angles of the next token", "scaled by 1.005"),
)

judged_by(
    "norm_rope",
    Testing(
        _norm_cases,
        Bound(
            inner=1.0,
            ties=1.0,
            reason="as norm_rope_write_kv: the oracle rounds between norm and rotation, so that "
            "only what rounds differently there, or not at all, is left",
        ),
        magnitude=_normed_size,
        rounded=_normed_size,
        mutants={fault: partial(_wrong_norm, fault=fault) for fault in NORM_FAULTS},
        truth=partial(_wrong_norm, fault=""),
    ),
)
