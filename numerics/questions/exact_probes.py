"""Exact probes: arguments for which every correct implementation of an op gives the same bits, in
any order of sums.

A probe has the shapes, dtypes and tables of given arguments and other values: integers whose sums
float32 holds exactly; attention in which one key takes all weight, whose value comes out as it went
in; rows of one magnitude, whose norm is their sign times the weight; rotations by quarter turns;
gates at which silu and gelu are the identity or 0; scales that are powers of two. What remains is
one rounding at the end, which has no order. So a probe tests indices, masks, tables and where
roundings are, and it cannot see what is wrong at other values: an epsilon, another activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from ...ops.cases import load_all
from ...ops.reference.paged import oldest_seen
from ...ops.reference.quantization import FP8_MAX
from ...ops.testing import TESTING, Arguments, Case, limits

Probes = Iterator[tuple[str, Arguments]]
SMALL = 8
"""Integers up to this are exact in every dtype, and sums of 2^17 products of two are exact in
float32.
"""
MAGNITUDE = 4096.0
"""Of a row before a norm: its square is so large that float32 drops the epsilon."""
GATE = 256.0
"""silu and gelu are the identity at this, and 0 at its negative."""


def probes(op: str, arguments: Arguments, seed: int = 0) -> list[Case]:
    """Probes of an op, shaped like `arguments`; none if there are none for these. An op that is
    judged bitwise is probed by the arguments themselves.
    """
    load_all()  # it says which ops are judged bitwise
    made = PROBES.get(op)
    if made is not None:
        rng = np.random.default_rng([seed, len(op), *op.encode()])
        return [Case(name, arguments | changed) for name, changed in made(rng, arguments)]
    return [Case("as given", arguments)] if op in TESTING and TESTING[op].bitwise else []


def integers(rng: np.random.Generator, like: np.ndarray, largest: int = SMALL) -> np.ndarray:
    """Integers up to `largest` in the shape and dtype of `like`."""
    return rng.integers(-largest, largest + 1, like.shape).astype(like.dtype)


def _or_none(rng: np.random.Generator, like: np.ndarray | None) -> np.ndarray | None:
    return None if like is None else integers(rng, like)


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice([-1.0, 1.0], shape)


def _powers(rng: np.random.Generator, like: np.ndarray, largest: int = 3) -> np.ndarray:
    """Powers of two from 2^-3 to 2^largest, in the shape and dtype of `like`."""
    return np.ldexp(1.0, rng.integers(-3, largest + 1, like.shape)).astype(like.dtype)


# --- products
# --------------------------------------------------------------------------------------------------


def _product(x: str, weight: str, bias: str | None = None) -> Callable[..., Probes]:
    """Integers; in float32 also wide ones, of which a product in TF32 or bfloat16 loses bits."""

    def made(rng: np.random.Generator, a: Arguments) -> Probes:
        rest = {bias: _or_none(rng, a[bias])} if bias is not None else {}
        yield "integers", {x: integers(rng, a[x]), weight: integers(rng, a[weight]), **rest}
        widest = min(4095, 2**23 // a[x].shape[-1])
        if a[x].dtype == np.float32 and widest > 1024:
            yield (
                "wide integers",
                {x: integers(rng, a[x], widest), weight: integers(rng, a[weight], 1), **rest},
            )

    return made


def _quantised_product(rng: np.random.Generator, a: Arguments) -> Probes:
    # Up to 1: greater ones would make sums over k that float16 cannot hold.
    scales = {n: _powers(rng, a[n], 0) for n in ("x_scale", "weight_scale") if a.get(n) is not None}
    values = {n: integers(rng, a[n]) for n in ("x", "weight")}
    if a["x_scale"] is None:
        # So that a row is quantised by a scale of 1.
        values["x"][:, 0] = FP8_MAX
    yield "integers, scales of powers of two", values | scales | {"bias": _or_none(rng, a["bias"])}


def _grouped_product(rng: np.random.Generator, a: Arguments) -> Probes:
    values = {"x": integers(rng, a["x"]), "scale": _powers(rng, a["scale"])}
    if a["weight"].dtype != np.uint8:
        values["weight"] = integers(rng, a["weight"])
    yield "integers, scales of powers of two", values | {"bias": _or_none(rng, a["bias"])}


def _scaled(scale: str, *whole: str) -> Callable[..., Probes]:
    """Integers, and a scale of powers of two."""

    def made(rng: np.random.Generator, a: Arguments) -> Probes:
        values = {name: integers(rng, a[name]) for name in whole}
        yield "integers, scales of powers of two", values | {scale: _powers(rng, a[scale])}

    return made


# --- MLP
# --------------------------------------------------------------------------------------------------


def _gates(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return GATE * rng.integers(-2, 3, shape)


def _silu_and_mul(rng: np.random.Generator, a: Arguments) -> Probes:
    half = (*a["x"].shape[:-1], a["x"].shape[-1] // 2)
    x = np.concatenate([_gates(rng, half), rng.integers(-31, 32, half)], axis=-1)
    yield "open and closed gates", {"x": x.astype(a["x"].dtype)}


def _two_a_row(rng: np.random.Generator, shape: tuple[int, ...], largest: int) -> np.ndarray:
    """Weights with two integers in each row: row i has them at i and a random place, so that all
    columns are used.
    """
    out = np.zeros(shape)
    row = np.arange(shape[-2])
    for column in (row % shape[-1], rng.integers(0, shape[-1], shape[-2])):
        out[..., row, column] = rng.integers(-largest, largest + 1, out.shape[:-1])
    return out


def _mlp_weights(rng: np.random.Generator, gate_up: np.ndarray, down: np.ndarray) -> Arguments:
    """For x of signs: gates of -1024 to 1024 in steps of 256, up and their products integers of
    at most 8 bits.
    """
    half = (*gate_up.shape[:-2], gate_up.shape[-2] // 2, gate_up.shape[-1])
    both = [GATE * _two_a_row(rng, half, 2), _two_a_row(rng, half, 15)]
    return {
        "gate_up": np.concatenate(both, axis=-2).astype(gate_up.dtype),
        "down": integers(rng, down, 3),
    }


def _holds_mlp(x: np.ndarray) -> bool:
    """Whether a dtype holds the sums of these products; float16 ends before."""
    return x.dtype != np.float16


def _gated_mlp(rng: np.random.Generator, a: Arguments) -> Probes:
    if not _holds_mlp(a["x"]):
        return
    made = _mlp_weights(rng, a["gate_up"], a["down"]) | {
        "x": _signs(rng, a["x"].shape).astype(a["x"].dtype)
    }
    if a["gate_up_bias"] is not None:
        half = (len(a["gate_up_bias"]) // 2,)
        bias = np.concatenate([np.zeros(half), rng.integers(-1, 2, half)])
        made["gate_up_bias"] = bias.astype(a["gate_up_bias"].dtype)
    yield "integers, open and closed gates", made | {"down_bias": _or_none(rng, a["down_bias"])}


# --- norms and rotary embedding
# --------------------------------------------------------------------------------------


def exact_norm(x: np.ndarray) -> bool:
    """Whether a norm of rows like `x` is exact: 16 bits hide what the mean and the root may be off
    by in float32; in float32 itself neither is promised exactly.
    """
    return x.dtype.itemsize == 2


def _rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of one magnitude; every other one has it in a quarter of the places, where 4 divides
    the length.
    """
    x = MAGNITUDE * _signs(rng, shape)
    if shape[-1] % 4 == 0 and x.size:
        rows = x.reshape(-1, shape[-1])
        for row in rows[1::2]:
            row[rng.permutation(shape[-1])[shape[-1] // 4 :]] = 0.0
    return x


def _norm_weight(rng: np.random.Generator, like: np.ndarray | None) -> np.ndarray | None:
    return None if like is None else (rng.integers(64, 128, like.shape) / 64.0).astype(like.dtype)


def _rms_norm(rng: np.random.Generator, a: Arguments) -> Probes:
    if exact_norm(a["x"]):
        x = {"x": _rows(rng, a["x"].shape).astype(a["x"].dtype)}
        weight = {"weight": _norm_weight(rng, a["weight"])} if "weight" in a else {}
        yield "rows of one magnitude", x | weight


def _fused_norm(rng: np.random.Generator, a: Arguments) -> Probes:
    """The sum is exact in one probe; in the other it must be rounded before the norm reads it."""
    dtype = a["x"].dtype
    if not exact_norm(a["x"]):
        return
    weight = _norm_weight(rng, a["weight"])
    total = _rows(rng, a["x"].shape)
    part = 32.0 * rng.integers(-60, 61, total.shape)
    yield (
        "sums of one magnitude",
        {"x": (total - part).astype(dtype), "residual": part.astype(dtype), "weight": weight},
    )
    total = MAGNITUDE * _signs(rng, a["x"].shape)
    # 0.46 of a unit in the last place, at few places, so that the mean square stays: who keeps it
    # shows it.
    unit = MAGNITUDE * 2.0 * limits(dtype).half_ulp
    part = np.sign(total) * np.floor(unit * 0.46) * (rng.random(total.shape) < 1 / 16)
    yield (
        "sums that are rounded",
        {"x": total.astype(dtype), "residual": part.astype(dtype), "weight": weight},
    )


def _quarter_turns(rng: np.random.Generator, like: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    turn = rng.integers(0, 4, like.shape)
    return (np.array([1, 0, -1, 0], like.dtype)[turn], np.array([0, 1, 0, -1], like.dtype)[turn])


def _rotary(rng: np.random.Generator, a: Arguments) -> Probes:
    cos, sin = _quarter_turns(rng, a["cos"])
    values = {"q": integers(rng, a["q"], 127), "k": integers(rng, a["k"], 127)}
    yield "quarter turns", values | {"cos": cos, "sin": sin}


def _norm_rope(rng: np.random.Generator, a: Arguments) -> Probes:
    normed = a["weight"] is not None
    if normed and not exact_norm(a["q"]):
        return
    cos, sin = _quarter_turns(rng, a["cos"])
    shape = a["q"].shape
    q = _rows(rng, shape) if normed else rng.integers(-127, 128, shape)
    given = {"q": q.astype(a["q"].dtype), "weight": _norm_weight(rng, a["weight"])}
    yield "quarter turns", given | {"cos": cos, "sin": sin}


def _norm_rope_write(rng: np.random.Generator, a: Arguments) -> Probes:
    v_norm = a.get("v_norm", False)
    normed = a["q_weight"] is not None or a["k_weight"] is not None or v_norm
    if normed and not exact_norm(a["qkv"]):
        return
    cos, sin = _quarter_turns(rng, a["cos"])
    size = a["kv"].shape[3]
    rows = (len(a["qkv"]), a["qkv"].shape[1] // size, size)
    values = _rows(rng, rows) if normed else rng.integers(-127, 128, rows)
    if not v_norm:
        values[:, -(a["kv"].shape[2] // 2) :] = rng.integers(
            -127, 128, (rows[0], a["kv"].shape[2] // 2, size)
        )
    yield (
        "quarter turns",
        {
            "qkv": values.reshape(a["qkv"].shape).astype(a["qkv"].dtype), "cos": cos, "sin": sin,
            "q_weight": _norm_weight(rng, a["q_weight"]),
            "k_weight": _norm_weight(rng, a["k_weight"]),
            "k_scale": _nearest_powers(a.get("k_scale")),
            "v_scale": _nearest_powers(a.get("v_scale")),
        },
    )  # fmt: skip


def _norm_rope_write_latents(rng: np.random.Generator, a: Arguments) -> Probes:
    latents, rank = a["latents"], len(a["weight"])
    if not exact_norm(latents[:, :rank]):
        return
    cos, sin = _quarter_turns(rng, a["cos"])
    parts = _rows(rng, (len(latents), rank)), rng.integers(-127, 128, latents[:, rank:].shape)
    values = np.concatenate(parts, axis=1).astype(latents.dtype)
    weight = _norm_weight(rng, a["weight"])
    yield "quarter turns", {"latents": values, "cos": cos, "sin": sin, "weight": weight}


def _nearest_powers(scales: np.ndarray | None) -> np.ndarray | None:
    return None if scales is None else np.exp2(np.round(np.log2(scales))).astype(np.float32)


# --- attention
# --------------------------------------------------------------------------------------------------

LONGEST = 2048
"""Slots of a request up to which scores are exact in float32."""
GAP = 64.0
"""Between the best score and the next one: e^-64 is nothing beside an integer, in float32 too."""
WIDE_GAP = 128.0
"""e^-128 is nothing beside 0 either: less than float32 holds."""


def _attention(rng: np.random.Generator, a: Arguments, gap: float = GAP) -> Probes:
    """Queries that want one position: score (winner - wanted)^2 - (slot - wanted)^2, times what
    makes 1 worth `gap`.

    Wanted are positions that a query may see, and ones just outside of what it may: then the
    nearest one inside wins, and if the mask is off by one, the one outside. The winner's score is
    0, so that no scaling rounds it. Positions count from another number in each head, so that no
    head can stand in for another.
    """
    q, kv, lens = a["q"], a["kv"], a["kv_lens"]
    count, (_, page, entries, size) = int(a["counts"][1]), kv.shape
    longest = int(lens[:count].max(initial=0))
    heads, kv_heads = q.shape[1], entries // 2
    shifts = 2 + 3 * (np.arange(kv_heads) % 16)
    # What bfloat16 holds exactly, or fp8.
    base, digits = (256 if kv.dtype.itemsize > 1 else 16), 1
    while base**digits <= longest + int(shifts.max()):
        digits += 1
    features = digits * digits + 4 * digits
    if features > size or longest > LONGEST or q.dtype == np.float16 or 0 < a["soft_cap"] < gap / 2:
        return
    k_scale, v_scale = (_nearest_powers(a.get(name)) for name in ("k_scale", "v_scale"))
    smallest = 1.0 if k_scale is None else float(k_scale.min())
    factor = 2.0 ** math.ceil(math.log2(gap / (a["scale"] * smallest)))
    places = rng.permutation(size)[:features]
    cache = np.full(kv.shape, np.nan)
    real = int(a["query_start"][count])
    wanted = np.zeros((2, real, heads), np.int64)
    for i in range(count):
        start, stop, length = int(a["query_start"][i]), int(a["query_start"][i + 1]), int(lens[i])
        slots = np.arange(length)
        pages, offsets = a["page_table"][i, slots // page], slots % page
        new = np.isnan(cache[pages, offsets, 1, 0])
        shape = (int(new.sum()), kv_heads, size)
        cache[pages[new], offsets[new], 1::2] = rng.integers(1, 16, shape) * _signs(rng, shape)
        for head in range(kv_heads):
            cache[pages, offsets, 2 * head] = 0.0
            keys = _key_features(slots + shifts[head], base, digits)
            cache[pages[:, None], offsets[:, None], 2 * head, places[None]] = keys
        wanted[:, start:stop] = _wanted(
            rng, np.arange(length - (stop - start), length), heads, a["window"], a.get("chunk", 0)
        )
    wanted += shifts[np.arange(heads) // (heads // kv_heads)]
    queries = np.full(q.shape, np.nan)
    queries[:real] = 0.0
    queries[:real, :, places] = factor * _query_features(wanted[0], wanted[1], base, digits)
    if kv.dtype == np.int8:
        cache = np.nan_to_num(cache)
    changed = {
        "q": queries.astype(q.dtype), "kv": cache.astype(kv.dtype), "k_scale": k_scale,
        "v_scale": v_scale,
    }  # fmt: skip
    if a.get("sinks") is not None:
        changed["sinks"] = np.full_like(a["sinks"], -GAP)  # as far below the winner as other keys
    yield "one key takes all", changed


def _latent_attention(rng: np.random.Generator, a: Arguments) -> Probes:
    """As of one head, whose values are what no query asks for among the entries of its keys."""
    rank, cache = a["q"].shape[2], a["cache"]
    kv = cache[:, :, :1].repeat(2, axis=2)
    both = np.concatenate([a["q"], a["rotated"]], axis=-1)
    step = a | {"q": both, "kv": kv, "window": 0, "soft_cap": 0.0}
    for name, changed in _attention(rng, step, WIDE_GAP):
        q, kv = changed["q"], changed["kv"]
        asked = (np.nan_to_num(q.astype(np.float32)) != 0).any((0, 1))
        own = np.where(asked, kv[:, :, :1], kv[:, :, 1:]).repeat(cache.shape[2], axis=2)
        yield name, {"q": q[..., :rank], "rotated": q[..., rank:], "cache": own}


def _wanted(
    rng: np.random.Generator, positions: np.ndarray, heads: int, window: int, chunk: int
) -> np.ndarray:
    """What queries want and which position wins, [2 query head]: wanted are their own, the oldest
    visible, a random one, the next one, or the last one before the window or the chunk.
    """
    p = positions[:, None].repeat(heads, axis=1)
    oldest = np.maximum(0, oldest_seen(p, window, chunk))
    choices = [
        p,
        oldest,
        rng.integers(oldest, p + 1),
        rng.integers(oldest, p + 1),
        p + 1,
        oldest - 1,
    ]
    wanted = np.choose(rng.integers(0, len(choices), p.shape), choices)
    return np.stack([wanted, np.clip(wanted, oldest, p)])


def _digits(x: np.ndarray, base: int, count: int) -> list[np.ndarray]:
    return [x // base**i % base for i in range(count)]


def _key_features(position: np.ndarray, base: int, digits: int) -> np.ndarray:
    """[... feature]: with `_query_features` the product is 2 position wanted - position^2, and a
    number of the query's own that makes it 0 at the winner.
    """
    own = [d for d in _digits(position, base, digits) for _ in range(digits)]
    ones = [np.ones_like(position)] * (2 * digits)
    return np.stack([*own, *_digits(position * position, base, 2 * digits), *ones], axis=-1)


def _query_features(wanted: np.ndarray, winner: np.ndarray, base: int, digits: int) -> np.ndarray:
    parts = _digits(wanted, base, digits)
    cross = [2.0 * parts[j] * base ** (i + j) for i in range(digits) for j in range(digits)]
    squares = [np.full(wanted.shape, -float(base**m)) for m in range(2 * digits)]
    own = _digits(wanted * wanted - (wanted - winner) ** 2, base, 2 * digits)
    return np.stack([*cross, *squares, *(-1.0 * d * base**m for m, d in enumerate(own))], axis=-1)


# --- experts
# --------------------------------------------------------------------------------------------------


def _can_decide(like: np.ndarray) -> bool:
    """Whether the dtype holds such logits of all experts, and no two of them alike."""
    logits = GATE * np.arange(like.shape[1], dtype=np.float64)
    with np.errstate(over="ignore"):
        return bool((logits.astype(like.dtype).astype(np.float64) == logits).all())


def _decided(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Router logits so far apart that the best expert has all weight."""
    order = rng.permuted(np.tile(np.arange(like.shape[1]), (len(like), 1)), axis=1)
    return (GATE * order).astype(like.dtype)


def _route(rng: np.random.Generator, a: Arguments) -> Probes:
    if _can_decide(a["logits"]):
        yield "decided rows", {"logits": _decided(rng, a["logits"])}


def _moe_experts(rng: np.random.Generator, a: Arguments) -> Probes:
    if _holds_mlp(a["x"]):
        # One expert of each token has all weight: its sums have one term.
        weights = np.zeros_like(a["weights"])
        weights[:, 0] = 1.0
        x = _signs(rng, a["x"].shape).astype(a["x"].dtype)
        yield (
            "decided rows",
            {"x": x, "weights": weights} | _mlp_weights(rng, a["gate_up"], a["down"]),
        )


PROBES: dict[str, Callable[[np.random.Generator, Arguments], Probes]] = {
    "linear": _product("x", "weight", "bias"),
    "column_linear": _product("x", "weight_shard", "bias_shard"),
    "row_linear": _product("x_shard", "weight_shard", "bias"),
    "replicated_linear": _product("x", "weight", "bias"),
    "logits": _product("x", "weight"),
    "grouped_matmul": _product("x", "weight"),
    "lora_shrink": _product("x", "a"),
    "lora_expand": _scaled("scale", "y", "x", "b"),
    "linear_int8": _quantised_product,
    "linear_fp8": _quantised_product,
    "linear_grouped": _grouped_product,
    "dequantize": _scaled("scale", "values"),
    "silu_and_mul": _silu_and_mul,
    "gated_mlp": _gated_mlp,
    "gelu_gated_mlp": _gated_mlp,
    "rms_norm": _rms_norm,
    "unit_rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_norm,
    "rotary_embedding": _rotary,
    "rotary_embedding_gptj": _rotary,
    "norm_rope": _norm_rope,
    "norm_rope_write_kv": _norm_rope_write,
    "paged_attention": _attention,
    "to_latents": _product("q", "weight"),
    "from_latents": _product("y", "weight"),
    "norm_rope_write_latents": _norm_rope_write_latents,
    "latent_attention": _latent_attention,
    "moe_route": _route,
    "moe_unpermute": _scaled("weights", "rows"),
    "moe_experts": _moe_experts,
}
