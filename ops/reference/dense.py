"""Ops on rows of tokens: embedding, projections, norms, rotary embedding, gated MLP, logits.

Shapes: `tok` tokens of a step, `dim` model width, `head` heads, `hdim` head size, `inter` MLP
width, `vocab` words.
"""

from __future__ import annotations

from typing import Any

from ..declare import DOT, Array, Contract, define

PRODUCT = Contract(dot=DOT)
FUSED_ADD = Contract(
    rounds="the sum once, then the norm once; the norm reads the sum as it was rounded"
)
SANDWICH = Contract(
    rounds="the norm of x, the sum and its norm once each; what reads the first two reads them as "
    "they were rounded"
)
MLP = Contract(
    rounds="where its finer ops do: gate and up, their product, the output; an implementation may "
    "skip the first two",
    dot=DOT,
)


@define(
    shapes="ids [tok], table [vocab dim] -> [tok dim] table",
    contract=Contract(rounds="nowhere", accumulate="none", nan="copied"),
)
def embedding(xp: Any, ids: Array, table: Array) -> Array:
    """Rows `table[ids]`: ids [tok] int32, table [vocab dim] -> [tok dim]."""
    return xp.take(table, ids, axis=0)


@define(shapes="x [tok k], weight [n k], bias [n] -> [tok n] x", contract=PRODUCT)
def linear(xp: Any, x: Array, weight: Array, bias: Array | None) -> Array:
    """x [tok k] times weight [n k] transposed, plus bias [n] or None -> [tok n]. The weight lies
    as in checkpoints.
    """
    return xp.linear(x, weight, bias)


@define(
    shapes="x [row dim], weight [vocab dim] -> [row vocab] float32",
    contract=Contract(rounds="nowhere: the result keeps the accumulation dtype", dot=DOT),
)
def logits(xp: Any, x: Array, weight: Array) -> Array:
    """x [row dim] times weight [vocab dim] transposed -> [row vocab], not rounded: greedy
    decoding needs margins.
    """
    return xp.linear_accumulated(x, weight)


@define(shapes="x [... n], weight [n] -> [... n] x", shards=(), activations=("x",), sums=True)
def rms_norm(xp: Any, x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: x [... n], weight [n] -> [... n]."""
    y = xp.accumulate(x)
    scale = xp.rsqrt(xp.mean(y * y, axis=-1, keepdims=True) + eps)
    return xp.astype(y * scale * along(xp.accumulate(weight), y), x.dtype)


@define(
    shapes="x [tok dim], residual [tok dim] -> [tok dim] x",
    shards=(),
    activations=("x",),
    contract=Contract(accumulate="the storage dtype's own addition, rounded once"),
)
def add(xp: Any, x: Array, residual: Array) -> Array:
    """x + residual, both [tok dim]."""
    return x + residual


@define(
    shapes="x [tok dim], residual [tok dim], weight [dim] -> [tok dim] x, [tok dim] x",
    shards=(),
    level="coarse",
    activations=("x", "residual"),
    composition=("add", "rms_norm"),
    contract=FUSED_ADD,
)
def fused_add_rms_norm(
    ops: Any, x: Array, residual: Array, weight: Array, eps: float
) -> tuple[Array, Array]:
    """(rms_norm(s), s) with s = x + residual. The norm reads s as it was rounded, so both roads
    agree bitwise.
    """
    total = ops.add(x, residual)
    return ops.rms_norm(total, weight, eps), total


@define(
    shapes="x [tok dim], x_weight [dim], residual [tok dim], weight [dim] -> [tok dim] x, "
    "[tok dim] x",
    shards=(),
    level="coarse",
    activations=("x", "residual"),
    composition=("rms_norm", "fused_add_rms_norm"),
    contract=SANDWICH,
)
def norm_add_rms_norm(
    ops: Any,
    x: Array,
    x_weight: Array,
    residual: Array,
    weight: Array,
    x_eps: float,
    eps: float,
) -> tuple[Array, Array]:
    """(rms_norm(s), s) with s = rms_norm(x) + residual, each norm with its own weight [dim] and
    eps: what is between two sublayers if the result of the first is normed.
    """
    normed = ops.rms_norm(x, x_weight, x_eps)
    both: tuple[Array, Array] = ops.fused_add_rms_norm(normed, residual, weight, eps)
    return both


@define(
    shapes="x [tok dim], first [dim], second [dim] -> [tok dim] x, [tok dim] x",
    shards=(),
    level="coarse",
    composition=("rms_norm",),
)
def rms_norm_pair(
    ops: Any, x: Array, first: Array, second: Array, eps: float
) -> tuple[Array, Array]:
    """(rms_norm(x, first), rms_norm(x, second)): two norms of a stream that is read again behind
    them, so that none of them may take its memory.
    """
    return ops.rms_norm(x, first, eps), ops.rms_norm(x, second, eps)


@define(
    shapes="q [tok head hdim], k [tok kvhead hdim], cos [tok r], sin [tok r] -> [tok head "
    "hdim] q, "
    "[tok kvhead hdim] k",
    shards=("head", "kvhead"),
    activations=("q", "k"),
)
def rotary_embedding(xp: Any, q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Rotate the first 2r entries of each head, neox style: q [tok head hdim], k likewise, cos and
    sin [tok r] float32.

    The halves (a, b) of those entries become (a cos - b sin, b cos + a sin); the entries after them
    are copied.
    """
    return _rotate(xp, q, cos, sin), _rotate(xp, k, cos, sin)


def _rotate(xp: Any, x: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[-1]
    y = xp.accumulate(x)
    c, s = cos[:, None, :], sin[:, None, :]
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return xp.astype(xp.concat([a * c - b * s, b * c + a * s, rest], axis=-1), x.dtype)


@define(
    shapes="x [tok dim], gate_up [2*inter dim], gate_up_bias [2*inter], down [dim inter], "
    "down_bias [dim] "
    "-> [tok dim] x",
    level="coarse",
    activations=("x",),
    composition=("linear", "silu_and_mul", "linear"),
    contract=MLP,
)
def gated_mlp(
    ops: Any,
    x: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_bias: Array | None,
) -> Array:
    """down(silu(gate(x)) * up(x)): x [tok dim], gate_up [2 inter dim], down [dim inter], biases
    may be None.
    """
    return ops.linear(ops.silu_and_mul(ops.linear(x, gate_up, gate_up_bias)), down, down_bias)


@define(
    shapes="x [tok dim], gate_up [2*inter dim], gate_up_bias [2*inter], down [dim inter], "
    "down_bias [dim] "
    "-> [tok dim] x",
    level="coarse",
    activations=("x",),
    composition=("linear", "gelu_and_mul", "linear"),
    contract=MLP,
)
def gelu_gated_mlp(
    ops: Any,
    x: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    down_bias: Array | None,
) -> Array:
    """down(gelu(gate(x)) * up(x)) with the gelu of tanh, as Gemma has it; else `gated_mlp`.

    It is an op of its own, since what an op is composed of says what its plan and its fusion are.
    """
    gate = ops.linear(x, gate_up, gate_up_bias)
    return ops.linear(ops.gelu_and_mul(gate, "tanh"), down, down_bias)


def along(weight: Array, x: Array) -> Array:
    """weight with leading axes of 1 until it has as many as x, so that no framework has to
    promote ranks.
    """
    return weight[(None,) * (x.ndim - weight.ndim) + (Ellipsis,)]
