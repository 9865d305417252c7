"""Activation functions, under the names that users of vLLM's CustomOp know.

Shapes: `n` entries, `inter` MLP width. Sources: "Gaussian Error Linear Units" (arXiv:1606.08415)
for the gelu family, `transformers.activations` for its constants; others are named where they
stand.

Tails that the storage dtype cannot tell from the cancellation in `1 + tanh` or `1 + erf` are noise:
the contract bounds the error by the operands |x| (and |x up| with a product), not by the result.
"""

from __future__ import annotations

import math
from typing import Any

from ..declare import Array, Contract, OpError, define
from .dense import along

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
ELEMENTWISE = Contract(
    accumulate="float32 (float64 for float64 inputs); errors are relative to the operands, not to "
    "a cancelled result",
    masked="each element depends on its own inputs only",
    nan="NaN in, NaN out, in the same element",
)
GATED = Contract(
    accumulate="float32 (float64 for float64 inputs), exact to it for every gate: exp neither "
    "overflows nor flushes",
    masked="each element depends on its own inputs only",
    nan="NaN in, NaN out, in the same element",
)


@define(
    shapes="x [... 2*inter] -> [... inter] x", shards=("inter",), activations=("x",), contract=GATED
)
def silu_and_mul(xp: Any, x: Array) -> Array:
    """silu(gate) * up for x [... 2 inter] = (gate, up) -> [... inter], silu(y) = y / (1 +
    exp(-y)).
    """
    gate, up = _halves(xp, x)
    return xp.astype(swish(xp, gate, up), x.dtype)


@define(
    shapes="x [... 2*inter] -> [... inter] x", shards=("inter",), activations=("x",), contract=GATED
)
def mul_and_silu(xp: Any, x: Array) -> Array:
    """up * silu(gate) for x [... 2 inter] = (up, gate) -> [... inter]: silu_and_mul with the
    halves swapped.
    """
    up, gate = _halves(xp, x)
    return xp.astype(swish(xp, gate, up), x.dtype)


@define(shapes="x [... n] -> [... n] x", activations=("x",), contract=ELEMENTWISE)
def gelu_new(xp: Any, x: Array) -> Array:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), elementwise: BERT's and GPT-2's gelu."""
    return xp.astype(_gelu_tanh(xp, xp.accumulate(x)), x.dtype)


@define(shapes="x [... n] -> [... n] x", activations=("x",), contract=ELEMENTWISE)
def gelu_fast(xp: Any, x: Array) -> Array:
    """x/2 (1 + tanh(0.7978845608 x (1 + 0.044715 x^2))), elementwise: gelu_new with its root
    written to 10 digits.
    """
    y = xp.accumulate(x)
    return xp.astype(
        0.5 * y * (1.0 + xp.tanh(0.7978845608 * y * (1.0 + 0.044715 * y * y))), x.dtype
    )


@define(shapes="x [... n] -> [... n] x", activations=("x",), contract=ELEMENTWISE)
def quick_gelu(xp: Any, x: Array) -> Array:
    """x sigmoid(1.702 x), elementwise: CLIP's gelu."""
    y = xp.accumulate(x)
    return xp.astype(swish(xp, y, 1.0, 1.702), x.dtype)


@define(
    shapes="x [... 2*inter] -> [... inter] x",
    shards=("inter",),
    activations=("x",),
    contract=ELEMENTWISE,
)
def gelu_and_mul(xp: Any, x: Array, approximate: str) -> Array:
    """gelu(gate) * up for x [... 2 inter] = (gate, up) -> [... inter]; `approximate`: none (erf)
    or tanh.
    """
    gate, up = _halves(xp, x)
    if approximate == "none":
        activated = 0.5 * gate * (1.0 + xp.erf(gate * math.sqrt(0.5)))
    elif approximate == "tanh":
        activated = _gelu_tanh(xp, gate)
    else:
        raise OpError(f"gelu_and_mul: approximate is 'none' or 'tanh', got {approximate!r}")
    return xp.astype(activated * up, x.dtype)


@define(
    shapes="gate [... n], x [... n] -> [... n] gate",
    shards=("n",),
    activations=("gate", "x"),
    contract=ELEMENTWISE,
)
def gelu_gate(xp: Any, gate: Array, x: Array) -> Array:
    """gelu(gate) * x with the gelu of tanh, elementwise: `gelu_and_mul` of two arrays."""
    return xp.astype(_gelu_tanh(xp, xp.accumulate(gate)) * xp.accumulate(x), gate.dtype)


@define(
    shapes="x [tok n], y [tok n], gate [tok 1] -> [tok n] x",
    activations=("x", "y"),
    contract=ELEMENTWISE,
)
def add_gated(xp: Any, x: Array, y: Array, gate: Array) -> Array:
    """x + sigmoid(gate) y, a gate for each token: what all tokens go through beside their experts
    (`Qwen2MoeSparseMoeBlock` of transformers).
    """
    g = xp.accumulate(gate)
    e = xp.exp(-xp.abs(g))
    share = xp.where(g < 0, e, xp.ones_like(e)) / (1.0 + e)
    return xp.astype(xp.accumulate(x) + share * xp.accumulate(y), x.dtype)


@define(
    shapes="x [tok n], logits [tok expert] -> [tok n] x", activations=("x",), contract=ELEMENTWISE
)
def gate_by_best(xp: Any, x: Array, logits: Array) -> Array:
    """x times the sigmoid of its token's largest logit: what the one expert of a token reads where
    its weight is on what goes in (`Llama4TextMoe` of transformers).
    """
    g = xp.max(xp.accumulate(logits), axis=-1, keepdims=True)
    e = xp.exp(-xp.abs(g))
    share = xp.where(g < 0, e, xp.ones_like(e)) / (1.0 + e)
    return xp.astype(share * xp.accumulate(x), x.dtype)


@define(shapes="x [... 2*inter] -> [... inter] x", activations=("x",), contract=ELEMENTWISE)
def swigluoai_and_mul(xp: Any, x: Array, alpha: float, limit: float) -> Array:
    """(up + 1) gate sigmoid(alpha gate) for x [... 2 inter], gate at even and up at odd places ->
    [... inter].

    The gate is cut from above at `limit`, up on both sides: gpt-oss (`GptOssExperts` of
    transformers).
    """
    y = xp.accumulate(x)
    gate, up = y[..., 0::2], y[..., 1::2]
    gate = xp.where(gate > limit, limit, gate)
    up = xp.where(up > limit, limit, xp.where(up < -limit, -limit, up))
    return xp.astype(swish(xp, gate, up + 1.0, alpha), x.dtype)


@define(shapes="x [... n] -> [... n] x", shards=("n",), activations=("x",), contract=ELEMENTWISE)
def relu2(xp: Any, x: Array) -> Array:
    """max(x, 0)^2, elementwise: Primer (arXiv:2109.08668)."""
    y = xp.accumulate(x)
    positive = xp.where(y < 0, 0.0, y)  # a comparison that keeps NaN
    return xp.astype(positive * positive, x.dtype)


@define(
    shapes="x [... 2*inter] -> [... inter] x",
    shards=("inter",),
    activations=("x",),
    contract=ELEMENTWISE,
)
def fatrelu_and_mul(xp: Any, x: Array, threshold: float) -> Array:
    """up * (gate if gate > threshold else 0) for x [... 2 inter] = (gate, up) -> [... inter]:
    FATReLU, MiniCPM-S.
    """
    gate, up = _halves(xp, x)
    return xp.astype(xp.where(gate <= threshold, 0.0, gate) * up, x.dtype)


@define(
    shapes="x [... n], alpha_p [p], alpha_n [q] -> [... n] x",
    activations=("x",),
    contract=ELEMENTWISE,
)
def xielu(xp: Any, x: Array, alpha_p: Array, alpha_n: Array, beta: float, eps: float) -> Array:
    """xIELU (arXiv:2411.13010), elementwise: x [... n]; alpha_p, alpha_n [1] or [n], what they are
    *after* softplus.

    x > 0: alpha_p x^2 + beta x. Else (expm1(min(x, eps)) - x) alpha_n + beta x, where `alpha_n`
    holds the published beta + softplus(a_n), made once when weights are loaded. `eps` is a tiny
    negative number.
    """
    y = xp.accumulate(x)
    p, n = (along(xp.accumulate(a), x) for a in (alpha_p, alpha_n))
    below = xp.where(y < eps, y, eps)
    curve = xp.where(y > 0, p * y * y, (xp.expm1(below) - y) * n)
    return xp.astype(curve + beta * y, x.dtype)


def _halves(xp: Any, x: Array) -> tuple[Array, Array]:
    y = xp.accumulate(x)
    half = x.shape[-1] // 2
    return y[..., :half], y[..., half:]


def _gelu_tanh(xp: Any, y: Array) -> Array:
    return 0.5 * y * (1.0 + xp.tanh(SQRT_2_OVER_PI * (y + 0.044715 * (y * y * y))))


def swish(xp: Any, gate: Array, up: Any, steepness: float = 1.0) -> Array:
    """gate * sigmoid(steepness * gate) * up, in the accumulation dtype.

    exp(-gate) overflows at a gate of -89, and exp(gate) is subnormal, so flushed to 0 by some
    processors, at -88; a large `up` can make a normal number of either. With e = exp(-|y| / 2), y =
    steepness * gate, sigmoid(y) is e e / (1 + e e) below 0 and 1 / (1 + e e) above; one e goes to
    each factor, so nothing is lost before the result is.
    """
    y = gate if steepness == 1.0 else steepness * gate
    half = xp.exp(-0.5 * xp.abs(y))
    # `half` below 0 and 1 above: in torch a comparison and a choice take longer on a CPU than all
    # the rest.
    share = xp.maximum(half, xp.sign(y))
    return (gate * share) * (up * share) / (1.0 + half * half)
