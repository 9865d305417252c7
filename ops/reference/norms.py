"""Norms over the last axis beside `rms_norm`, and their sums with the residual.

Shapes: x [... n], weight and bias [n], or [group n] for x [... group n]. Weights are float32 or the
storage dtype.
"""

from __future__ import annotations

from typing import Any

from ..declare import Array, Contract, define
from .activations import swish
from .dense import FUSED_ADD, along

GATED = Contract(
    rounds="once, at the output: neither the gated input nor the normed value is rounded before"
)
CENTRED = Contract(
    accumulate="float32 (float64 for float64 inputs), any order; the variance from centred values"
)


@define(shapes="x [... n], weight [n] -> [... n] x", shards=(), activations=("x",), sums=True)
def gemma_rms_norm(xp: Any, x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * (1 + weight); the sum is made before rounding (`GemmaRMSNorm`
    of transformers).
    """
    y = xp.accumulate(x)
    return xp.astype(_rms(xp, y, eps) * (1.0 + along(xp.accumulate(weight), y)), x.dtype)


@define(shapes="x [... n] -> [... n] x", shards=(), activations=("x",), sums=True)
def unit_rms_norm(xp: Any, x: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, without a weight: x [... n] -> [... n]."""
    return xp.astype(_rms(xp, xp.accumulate(x), eps), x.dtype)


@define(
    shapes="qkv [tok q+2*kv], q_weight [q], k_weight [kv] -> [tok q+2*kv] qkv",
    activations=("qkv",),
    contract=Contract(rounds="q and k once, at the output; v is copied"),
    sums=True,
)
def wide_qk_norm(xp: Any, qkv: Array, q_weight: Array, k_weight: Array, eps: float) -> Array:
    """qkv with rms_norm over all of q and over all of k, not head by head: OLMo 2 and 3.

    qkv [tok q+2*kv] is q, k and v side by side, with weights [q] and [kv].
    """
    y = xp.accumulate(qkv)
    q, kv = q_weight.shape[0], k_weight.shape[0]
    query = _rms(xp, y[:, :q], eps) * along(xp.accumulate(q_weight), y)
    key = _rms(xp, y[:, q : q + kv], eps) * along(xp.accumulate(k_weight), y)
    return xp.astype(xp.concat([query, key, y[:, q + kv :]], axis=-1), qkv.dtype)


@define(
    shapes="x [... n], gate [... n], weight [... n] -> [... n] x",
    activations=("x",),
    contract=GATED,
    sums=True,
)
def gated_rms_norm(
    xp: Any, x: Array, gate: Array, weight: Array, eps: float, norm_before_gate: bool
) -> Array:
    """norm(x) silu(gate), or norm(x silu(gate)) unless `norm_before_gate`, with norm(y) = y /
    rms(y) * weight.

    x and gate [... n]. Mamba-2 (`RMSNormGated`) gates first, Qwen3-Next norms first; groups of a
    row are an axis of their own, with weight [group n].
    """
    y, z = xp.accumulate(x), xp.accumulate(gate)
    w = along(xp.accumulate(weight), y)
    silu = swish(xp, z, 1.0)
    out = _rms(xp, y, eps) * w * silu if norm_before_gate else _rms(xp, y * silu, eps) * w
    return xp.astype(out, x.dtype)


@define(
    shapes="x [... n], weight [n], bias [n] -> [... n] x",
    shards=(),
    activations=("x",),
    contract=CENTRED,
    sums=True,
)
def layer_norm(xp: Any, x: Array, weight: Array | None, bias: Array | None, eps: float) -> Array:
    """(x - mean) / sqrt(var + eps) * weight + bias with the biased variance (arXiv:1607.06450).

    weight and bias may each be None.
    """
    y = xp.accumulate(x)
    centred = y - xp.mean(y, axis=-1, keepdims=True)
    out = _rms(xp, centred, eps)
    if weight is not None:
        out = out * along(xp.accumulate(weight), y)
    if bias is not None:
        out = out + along(xp.accumulate(bias), y)
    return xp.astype(out, x.dtype)


@define(
    shapes="x [tok dim], residual [tok dim], weight [dim] -> [tok dim] x, [tok dim] x",
    shards=(),
    level="coarse",
    activations=("x", "residual"),
    composition=("add", "gemma_rms_norm"),
    contract=FUSED_ADD,
)
def fused_add_gemma_rms_norm(
    ops: Any, x: Array, residual: Array, weight: Array, eps: float
) -> tuple[Array, Array]:
    """(gemma_rms_norm(s), s) with s = x + residual, read as it was rounded."""
    total = ops.add(x, residual)
    return ops.gemma_rms_norm(total, weight, eps), total


@define(
    shapes="x [tok dim], residual [tok dim], weight [dim], bias [dim] -> [tok dim] x, [tok dim] x",
    shards=(),
    level="coarse",
    activations=("x", "residual"),
    composition=("add", "layer_norm"),
    contract=FUSED_ADD,
)
def fused_add_layer_norm(
    ops: Any, x: Array, residual: Array, weight: Array, bias: Array | None, eps: float
) -> tuple[Array, Array]:
    """(layer_norm(s), s) with s = x + residual, read as it was rounded. weight and bias may each
    be None.
    """
    total = ops.add(x, residual)
    return ops.layer_norm(total, weight, bias, eps), total


def _rms(xp: Any, y: Array, eps: float) -> Array:
    return y * xp.rsqrt(xp.mean(y * y, axis=-1, keepdims=True) + eps)
