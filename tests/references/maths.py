"""Reference mathematics of ops that the product does not have yet, in float64 over numpy.

One request, whose cache lies in one piece. Shapes: `tok` tokens at positions from `start` on, `slot`
tokens in the cache, `ch` channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twinfer.ops.declare import Array

from .spec import Route

L2_EPS = 1e-6
"""Of the L2 norms of the gated delta rule: `use_qk_l2norm_in_kernel` of transformers."""


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-wide(x)))


def softplus(x: Array) -> Array:
    """log(1 + exp(x))."""
    return np.logaddexp(0, x)


def softmax(x: Array) -> Array:
    """Over the last axis, float64."""
    e = np.exp(wide(x) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def wide(x: Array) -> Array:
    """x in float64."""
    return np.asarray(x, np.float64)


def visible(tokens: int, slots: int, start: int, window: int = 0, chunk: int = 0) -> Array:
    """Which slots each token sees: [tok slot] bool."""
    position = start + np.arange(tokens)[:, None]
    slot = np.arange(slots)[None, :]
    seen = slot <= position
    if window:
        seen &= slot > position - window
    if chunk:
        seen &= slot // chunk == position // chunk
    return seen


def attention(
    q: Array,
    k: Array,
    v: Array,
    start: int,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
    sinks: Array | None,
) -> Array:
    """q [tok head hdim] over k and v [slot kvhead hdim] -> [tok head hdim]. `sinks` [head] are
    logits of no token.
    """
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(wide(k), group, axis=1), np.repeat(wide(v), group, axis=1)
    logits = np.einsum("thd,shd->ths", wide(q), k) * scale
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
    seen = visible(len(q), len(k), start, window, chunk)
    logits = np.where(seen[:, None, :], logits, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(wide(sinks)[None, :, None], (*logits.shape[:2], 1))
        logits = np.concatenate([logits, column], axis=-1)
    weights = softmax(logits)[..., : len(k)]
    return np.einsum("ths,shd->thd", weights, v)


def latent_attention(q: Array, rows: Array, start: int, scale: float, v_dim: int) -> Array:
    """q [tok head rank+rotated] over rows [slot rank+rotated] -> [tok head v_dim]. All heads have
    the same K, and its first `v_dim` entries are V.
    """
    logits = np.einsum("thd,sd->ths", wide(q), wide(rows)) * scale
    seen = visible(len(q), len(rows), start)
    weights = softmax(np.where(seen[:, None, :], logits, -np.inf))
    return np.einsum("ths,sd->thd", weights, wide(rows)[:, :v_dim])


def causal_conv(x: Array, weight: Array, bias: Array | None, state: Array) -> tuple[Array, Array]:
    """silu of the convolution of x [tok ch] by weight [ch width], and the next state. `state`
    [width-1 ch] is what came before x.
    """
    width = weight.shape[1]
    padded = np.concatenate([wide(state), wide(x)])
    taps = [padded[i : i + len(x)] * wide(weight)[:, i] for i in range(width)]
    y = np.sum(taps, axis=0)
    if bias is not None:
        y = y + wide(bias)
    return y * sigmoid(y), padded[-(width - 1) :]


def gated_delta_rule(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """Results [tok head vdim] and the next state [head kdim vdim], token by token:

    S = exp(log_decay) S;  S += k (beta (v - k S))^T;  out = q S.  q and k [tok head kdim] are
    normed, v [tok head vdim], log_decay and beta [tok head].
    """
    q, k = _l2_norm(q) * q.shape[-1] ** -0.5, _l2_norm(k)
    v, beta, state = wide(v), wide(beta), wide(state)
    out = np.empty(v.shape)
    for t in range(len(q)):
        state = state * np.exp(wide(log_decay[t]))[:, None, None]
        error = v[t] - np.einsum("hk,hkv->hv", k[t], state)
        state = state + k[t][:, :, None] * (beta[t][:, None] * error)[:, None, :]
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
    return out, state


def _l2_norm(x: Array) -> Array:
    x = wide(x)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + L2_EPS)


def ssd(
    x: Array, dt: Array, decay: Array, b: Array, c: Array, skip: Array, state: Array
) -> tuple[Array, Array]:
    """Results [tok head hdim] and the next state [head hdim n], token by token:

    S = exp(dt decay) S + dt x b^T;  out = S c + skip x.  x [tok head hdim], dt [tok head] behind
    its softplus, decay (negative) and skip [head], b and c [tok group n].
    """
    group = x.shape[1] // b.shape[1]
    x, state = wide(x), wide(state)
    b, c = np.repeat(wide(b), group, axis=1), np.repeat(wide(c), group, axis=1)
    out = np.empty(x.shape)
    for t in range(len(x)):
        step = (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        state = state * np.exp(dt[t] * decay)[:, None, None] + step
        out[t] = np.einsum("hdn,hn->hd", state, c[t]) + skip[:, None] * x[t]
    return out, state


def route(logits: Array, bias: Array | None, how: Route) -> tuple[Array, Array]:
    """(weights, experts) [tok top_k] of the router's logits [tok expert], best first; ties go to
    the lower id. `bias` [expert] takes part in the choice alone.
    """
    scores = wide(logits)
    if how.score == "sigmoid":
        scores = sigmoid(scores)
    elif how.score == "softmax":
        scores = softmax(scores)
    choice = scores if bias is None else scores + wide(bias)
    if how.groups > 1:
        choice = _in_best_groups(choice, how)
    experts = np.argsort(-choice, axis=-1, kind="stable")[:, : how.top_k]
    weights = np.take_along_axis(scores, experts, axis=1)
    if how.score == "softmax of the chosen":
        weights = softmax(weights)
    elif how.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + how.eps)
    return weights * how.scale, experts.astype(np.int32)


def _in_best_groups(choice: Array, how: Route) -> Array:
    """`choice` [tok expert] in the best groups, minus infinity elsewhere. A group is as good as
    its best expert (DeepSeek-V2), or as its best two together where there is a bias (V3).
    """
    tokens, experts = choice.shape
    grouped = np.sort(choice.reshape(tokens, how.groups, -1), axis=-1)
    best = grouped[..., -2:].sum(-1) if how.biased else grouped[..., -1]
    kept = np.argsort(-best, axis=-1, kind="stable")[:, : how.groups_kept]
    in_kept = np.zeros((tokens, how.groups), bool)
    np.put_along_axis(in_kept, kept, True, axis=1)
    return np.where(np.repeat(in_kept, experts // how.groups, axis=1), choice, -np.inf)


@dataclass(frozen=True)
class Maths:
    """The functions of this module that the decoder calls. Mutants replace some of them."""

    attention: Callable[..., Array] = attention
    latent_attention: Callable[..., Array] = latent_attention
    causal_conv: Callable[..., tuple[Array, Array]] = causal_conv
    gated_delta_rule: Callable[..., tuple[Array, Array]] = gated_delta_rule
    ssd: Callable[..., tuple[Array, Array]] = ssd
    route: Callable[..., tuple[Array, Array]] = route
