"""Gemma 4: heads of two sizes, V without a weight in its norm, layers that read another one's cache,
per-layer embeddings, and experts beside the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinfer.ops.declare import Array

from .decoder import OPS
from .families_dense import sandwich_layers
from .spec import (
    Attention,
    Experts,
    Layer,
    Mlp,
    MlpAndExperts,
    Model,
    Norm,
    PerLayerInput,
    Route,
    Sublayer,
)
from .tensors import Built, Named, Tensors, angle_table, finish

FULL = "full_attention"


def gemma4(config: Any, tensors: Tensors) -> Built:
    """All sizes: which parts there are, the config says."""
    norm = Norm("rms", config.rms_norm_eps)
    layers = []
    for index in range(config.num_hidden_layers):
        sublayers = [
            Sublayer(attention(config, index), norm, norm),
            Sublayer(feedforward(config, norm), norm, norm),
        ]
        if config.hidden_size_per_layer_input:
            sublayers.append(Sublayer(PerLayerInput(), None, norm))
        layers.append(Layer(tuple(sublayers), scalar=True))
    model = Model(
        layers=tuple(layers),
        norm=norm,
        embedding_scale=config.hidden_size**0.5,
        logits_cap=config.final_logit_softcapping or 0.0,
    )
    return finish(
        model,
        tensors,
        weights_of_layers(config, tensors),
        angles_of(config),
        scalars=[tensors.layer(index)["layer_scalar"] for index in range(len(layers))],
        per_layer=per_layer_embedding(config, tensors),
    )


def feedforward(config: Any, norm: Norm) -> Mlp | MlpAndExperts:
    """The same in all layers."""
    mlp = Mlp("gelu_tanh")
    if not config.enable_moe_block:
        return mlp
    experts = Experts(route=Route(top_k=config.top_k_experts), activation="gelu_tanh")
    return MlpAndExperts(mlp, experts, norm)


def attention(config: Any, index: int) -> Attention:
    """Of one layer. The last ones read the cache of the last layer of their kind before them."""
    kind, sizes = config.layer_types[index], config.per_layer_config[index]
    norm, is_full = Norm("rms", config.rms_norm_eps), kind == FULL
    num_own = config.num_hidden_layers - config.num_kv_shared_layers
    shares = None
    if index >= num_own:
        shares = max(i for i in range(num_own) if config.layer_types[i] == kind)
    return Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        scale=1.0,
        window=0 if is_full else config.sliding_window,
        rope=0 if is_full else 1,
        qk_norm=norm,
        v_norm=Norm("unit", config.rms_norm_eps),
        v_is_k=config.attention_k_eq_v and is_full,
        shares=shares,
    )


def angles_of(config: Any) -> list[tuple[Array, Array]]:
    """Angles of full layers and of sliding ones, whose heads differ in size."""
    tables = []
    for kind in (FULL, "sliding_attention"):
        index = config.layer_types.index(kind)
        head_dim = config.per_layer_config[index].head_dim
        tables.append(angle_table(config.rope_parameters[kind], head_dim))
    return tables


def weights_of_layers(config: Any, tensors: Tensors) -> list[list[Named]]:
    """Of attention, of the MLP with its experts, and of the small embedding."""
    layers = sandwich_layers(tensors, config.num_hidden_layers)
    for index, sublayers in enumerate(layers):
        t = tensors.layer(index)
        if config.enable_moe_block:
            sublayers[1] |= t.some(
                router="router.proj.weight",
                router_scale="router.scale",
                expert_scale="router.per_expert_scale",
                experts_up="experts.gate_up_proj",
                experts_down="experts.down_proj",
            ) | t.norms(
                mlp_norm="post_feedforward_layernorm_1",
                experts_norm="post_feedforward_layernorm_2",
                experts_pre="pre_feedforward_layernorm_2",
            )
        if config.hidden_size_per_layer_input:
            projections = t.projections(gate="per_layer_input_gate", proj="per_layer_projection")
            sublayers.append(projections | t.norms(post="post_per_layer_input_norm"))
    return layers


def per_layer_embedding(config: Any, tensors: Tensors) -> Callable[[Array, Array], Array] | None:
    """(norm(x P / sqrt(dim)) + E[id] sqrt(size)) / sqrt(2), [tok layer size]; None for models
    without.
    """
    size, eps = config.hidden_size_per_layer_input, config.rms_norm_eps
    if not size:
        return None
    model = tensors.within("model")
    table, weight = (
        model["embed_tokens_per_layer.weight"],
        model["per_layer_projection_norm.weight"],
    )
    matrix = model["per_layer_model_projection.weight"]

    def embed(ids: Array, x: Array) -> Array:
        projected = OPS.linear(x, matrix, None) * config.hidden_size**-0.5
        projected = OPS.rms_norm(projected.reshape(len(ids), -1, size), weight, eps)
        own = table[ids].reshape(projected.shape) * size**0.5
        total = (projected + own) * 0.5**0.5
        return total

    return embed
