"""Families with multi-head latent attention: DeepSeek-V2 and V3, GLM-4.7-Flash, Mistral 4."""

from __future__ import annotations

import math
from typing import Any

from .families_experts import SIGMOID_EPS, grouped_sigmoid
from .spec import Experts, LatentAttention, Layer, Mlp, Model, Norm, Route, Sublayer, Temperature
from .tensors import (
    Built,
    Named,
    Tensors,
    angle_table,
    expert_weights,
    finish,
    mlp_weights,
    shared_weights,
)

LATENT_EPS = 1e-6
"""Of the norms of latents: transformers takes this one, whatever `rms_norm_eps` is."""


def latent(config: Any, tensors: Tensors) -> Built:
    """Dense layers first, then experts with a shared MLP."""
    norm = Norm("rms", config.rms_norm_eps)
    attention = Sublayer(latent_attention(config), norm)
    experts = Sublayer(Experts(route=route_of(config), shared="plain"), norm)
    layers, weights = [], []
    for index, kind in enumerate(kinds_of_mlps(config)):
        t = tensors.layer(index)
        if kind == "sparse":
            feedforward, named = experts, expert_weights(t.within("mlp"))
            named |= shared_weights(t.within("mlp.shared_experts"))
        else:
            feedforward, named = Sublayer(Mlp(), norm), mlp_weights(t.within("mlp"))
        layers.append(Layer((attention, feedforward)))
        norms = t.norms(mix="input_layernorm", mlp="post_attention_layernorm")
        latents = latent_weights(t.within("self_attn"))
        weights.append([latents | {"pre": norms["mix"]}, named | {"pre": norms["mlp"]}])
    # All of the rotated part is rotated, also where a config says it is a part of a head.
    rope = {**config.rope_parameters, "partial_rotary_factor": 1.0}
    angles = [angle_table(rope, config.qk_rope_head_dim)]
    return finish(Model(layers=tuple(layers), norm=norm), tensors, weights, angles)


def latent_attention(config: Any) -> LatentAttention:
    """With yarn, the scale grows with the logarithm of its factor, squared."""
    rope, scale = config.rope_parameters, config.qk_head_dim**-0.5
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim"):
        scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2
    temperature = None
    if rope.get("llama_4_scaling_beta"):
        length = rope["original_max_position_embeddings"]
        temperature = Temperature(rope["llama_4_scaling_beta"], length)
    return LatentAttention(
        num_heads=config.num_attention_heads,
        plain=config.qk_nope_head_dim,
        rotated=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        rank=config.kv_lora_rank,
        scale=scale,
        norm=Norm("rms", LATENT_EPS),
        query_rank=config.q_lora_rank,
        temperature=temperature,
    )


def route_of(config: Any) -> Route:
    """A softmax without a bias in V2 and Mistral 4, a sigmoid with one elsewhere."""
    route = grouped_sigmoid(config)
    if config.model_type not in ("deepseek_v2", "mistral4"):
        return route
    return Route(
        top_k=route.top_k,
        renormalize=route.renormalize,
        groups=route.groups,
        groups_kept=route.groups_kept,
        scale=route.scale,
        eps=SIGMOID_EPS,
    )


def kinds_of_mlps(config: Any) -> list[str]:
    """dense or sparse, for each layer."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:
        return list(kinds)
    dense = config.first_k_dense_replace
    return ["dense" if index < dense else "sparse" for index in range(config.num_hidden_layers)]


def latent_weights(tensors: Tensors) -> Named:
    """Projections and norms of latents; q has one of its own where it is compressed too."""
    named = tensors.projections(
        q_a="q_a_proj", q_b="q_b_proj", kv_a="kv_a_proj_with_mqa", kv_b="kv_b_proj", o="o_proj"
    )
    named |= tensors.some(q_a_norm="q_a_layernorm.weight", kv_a_norm="kv_a_layernorm.weight")
    if "q_proj.weight" in tensors:
        named |= tensors.projections(q_b="q_proj")
    return named
