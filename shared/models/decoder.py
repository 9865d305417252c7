"""The dense decoder, written once over ops: Llama 2 and 3, Mistral, Qwen2, Qwen3.

What differs between them (biases, q/k norm, rope scaling, windows, tied embeddings) is data in `ModelConfig`.
`layer` knows nothing of how layers are repeated: JAX scans it over stacked weights, torch calls it layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from .config import MODEL_TYPES, ModelConfig, rope_inverse_frequencies
from .table import Parameter, ParameterTable, Part

Array = Any
Weights = Mapping[str, Array]


class Batch(NamedTuple):
    """What every layer of a step reads; the fields are those of `batch_layout`, and cos, sin [tok r] float32."""

    cos: Array
    sin: Array
    slots: Array
    page_table: Array
    query_start: Array
    kv_lens: Array
    counts: Array


def abstract(config: ModelConfig) -> ParameterTable:
    """The parameter table of a dense decoder."""
    c, p = config, "model.layers.{layer}."
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = (("q", q, "heads"), ("k", kv, "kv_heads"), ("v", kv, "kv_heads"))
    gate_up = (("gate", c.intermediate_size, "mlp"), ("up", c.intermediate_size, "mlp"))
    table: list[Parameter] = [
        _matrix("embed", c.vocab_size, c.hidden_size, ("vocab", "embed"), "model.embed_tokens.weight", layered=False),
        _vector("input_norm", c.hidden_size, "embed", p + "input_layernorm.weight"),
        Parameter(
            "qkv",
            (q + 2 * kv, c.hidden_size),
            ("qkv", "embed"),
            tuple(Part(f"{p}self_attn.{name}_proj.weight", rows, axis) for name, rows, axis in qkv),
        ),
        _matrix("o", c.hidden_size, q, ("embed", "heads"), p + "self_attn.o_proj.weight"),
        _vector("post_norm", c.hidden_size, "embed", p + "post_attention_layernorm.weight"),
        Parameter(
            "gate_up",
            (2 * c.intermediate_size, c.hidden_size),
            ("mlp", "embed"),
            tuple(Part(f"{p}mlp.{name}_proj.weight", rows, axis) for name, rows, axis in gate_up),
        ),
        _matrix("down", c.hidden_size, c.intermediate_size, ("embed", "mlp"), p + "mlp.down_proj.weight"),
        _vector("norm", c.hidden_size, "embed", "model.norm.weight", layered=False),
    ]
    if not c.tie_embeddings:
        table.append(_matrix("head", c.vocab_size, c.hidden_size, ("vocab", "embed"), "lm_head.weight", layered=False))
    if c.qk_norm:
        table += [_vector(f"{x}_norm", c.head_dim, "head_dim", f"{p}self_attn.{x}_norm.weight") for x in ("q", "k")]
    if c.qkv_bias:
        parts = tuple(Part(f"{p}self_attn.{name}_proj.bias", rows, axis) for name, rows, axis in qkv)
        table.append(Parameter("qkv_bias", (q + 2 * kv,), ("qkv",), parts))
    if c.o_bias:
        table.append(_bias("o_bias", c.hidden_size, "embed", p + "self_attn.o_proj.bias"))
    if c.mlp_bias:
        parts = tuple(Part(f"{p}mlp.{name}_proj.bias", rows, axis) for name, rows, axis in gate_up)
        table.append(Parameter("gate_up_bias", (2 * c.intermediate_size,), ("mlp",), parts))
        table.append(_bias("down_bias", c.hidden_size, "embed", p + "mlp.down_proj.bias"))
    return {parameter.name: parameter for parameter in table}


def rotary_tables(config: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [positions r] float32, r = half of the rotated entries, computed in float64."""
    inverse, scaling = rope_inverse_frequencies(config.rope, config.head_dim)
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse[None, :]
    return (np.cos(angles) * scaling).astype(np.float32), (np.sin(angles) * scaling).astype(np.float32)


def embed(ops: Any, weights: Weights, token_ids: Array) -> Array:
    """Hidden states [tok dim] of token ids [tok]."""
    return ops.embedding(token_ids, weights["embed"])


def layer(
    ops: Any,
    config: ModelConfig,
    weights: Weights,
    hidden: Array,
    residual: Array,
    kv: Array,
    batch: Batch,
    window: int,
    max_query_len: int,
    rows: Array | None = None,
) -> tuple[Array, Array, Array]:
    """One decoder layer: (hidden, residual [tok dim], its cache) -> the same. The sum of both is the layer's state.

    `rows` [row]: the only tokens whose state is wanted, in the last layer; results are then [row dim].
    """
    c, w = config, weights
    hidden, residual = ops.fused_add_rms_norm(hidden, residual, w["input_norm"], c.rms_norm_eps)
    qkv = ops.linear(hidden, w["qkv"], w.get("qkv_bias"))
    norms = w.get("q_norm"), w.get("k_norm")
    scales = () if c.kv_scales == (1.0, 1.0) else c.kv_scales
    q, kv = ops.norm_rope_write_kv(qkv, kv, *norms, batch.cos, batch.sin, batch.slots, c.rms_norm_eps, *scales)
    attention = ops.paged_attention(
        q, kv, batch.page_table, batch.query_start, batch.kv_lens, batch.counts,
        c.head_dim**-0.5, window, 0.0, max_query_len, *scales,
    )  # fmt: skip
    if rows is not None:  # from here on tokens do not see each other
        attention, residual = attention[rows], residual[rows]
    hidden = ops.linear(attention.reshape(attention.shape[0], c.num_heads * c.head_dim), w["o"], w.get("o_bias"))
    hidden, residual = ops.fused_add_rms_norm(hidden, residual, w["post_norm"], c.rms_norm_eps)
    hidden = ops.gated_mlp(hidden, w["gate_up"], w.get("gate_up_bias"), w["down"], w.get("down_bias"))
    return hidden, residual, kv


LayerFunction = Callable[..., tuple[Array, Array, Array]]
_replaced: dict[str, LayerFunction] = {}


def replace_layer(architecture: str, function: LayerFunction) -> None:
    """Run `function`, with the signature of `layer`, for a model whose config names `architecture`: for packages that
    are not part of this one. It must write the cache and keep the sum of hidden and residual as `layer` does. Raises
    ConfigError for an architecture that no model has.
    """
    if architecture not in MODEL_TYPES:
        raise ConfigError(f"architecture: got {architecture!r}, allowed are {', '.join(MODEL_TYPES)}")
    _replaced[architecture] = function


def layer_function(config: ModelConfig) -> LayerFunction:
    """The layer of a model: `layer`, or what replaced it."""
    return _replaced.get(config.architecture, layer)


def finish(ops: Any, config: ModelConfig, weights: Weights, hidden: Array, residual: Array) -> Array:
    """The final norm: [tok dim]."""
    return ops.fused_add_rms_norm(hidden, residual, weights["norm"], config.rms_norm_eps)[0]


def head(ops: Any, weights: Weights, rows: Array) -> Array:
    """Logits [row vocab] of finished hidden states [row dim]."""
    return ops.logits(rows, weights["head"] if "head" in weights else weights["embed"])


def layer_segments(config: ModelConfig) -> list[tuple[int, int, int]]:
    """Runs of layers with the same window: (first, last + 1, window). A scan needs the window fixed."""
    segments: list[tuple[int, int, int]] = []
    for index, window in enumerate(config.layer_windows):
        if segments and segments[-1][2] == window:
            segments[-1] = (segments[-1][0], index + 1, window)
        else:
            segments.append((index, index + 1, window))
    return segments


def _matrix(name: str, rows: int, columns: int, axes: tuple[str, str], key: str, layered: bool = True) -> Parameter:
    return Parameter(name, (rows, columns), axes, (Part(key, rows, axes[0]),), layered)


def _vector(name: str, size: int, axis: str, key: str, layered: bool = True) -> Parameter:
    return Parameter(name, (size,), (axis,), (Part(key, size, axis),), layered, "ones")


def _bias(name: str, size: int, axis: str, key: str) -> Parameter:
    return Parameter(name, (size,), (axis,), (Part(key, size, axis),))
