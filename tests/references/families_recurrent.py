"""Families with recurrent states: Qwen3-Next, Qwen3.5, Nemotron 3, Granite 4."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinfer.ops.declare import Array

from .families_experts import grouped_sigmoid
from .spec import (
    Attention,
    DeltaNet,
    Experts,
    Layer,
    Mamba2,
    Mixer,
    Mlp,
    Model,
    Norm,
    Route,
    Sublayer,
)
from .tensors import (
    Built,
    Named,
    Tensors,
    angle_table,
    attention_weights,
    expert_weights,
    finish,
    mlp_weights,
    shared_weights,
)

FULL = "full_attention"
LINEAR = "linear_attention"


def qwen_hybrid(config: Any, tensors: Tensors) -> Built:
    """Qwen3-Next and Qwen3.5, dense or with experts: three delta nets to one gated attention."""
    norm, sparse = Norm("gemma", config.rms_norm_eps), getattr(config, "num_experts", 0)
    mixers: dict[str, Mixer] = {FULL: gated_attention(config, norm), LINEAR: delta_net(config)}
    feedforward: Mlp | Experts = Mlp()
    if sparse:
        renormalize = getattr(config, "norm_topk_prob", True)
        route = Route(top_k=config.num_experts_per_tok, renormalize=renormalize)
        feedforward = Experts(route=route, shared="gated")
    layers, weights = [], []
    for index, kind in enumerate(config.layer_types):
        t = tensors.layer(index)
        if kind == FULL:
            mixer = gated_attention_weights(config, t.within("self_attn"))
        else:
            mixer = delta_net_weights(config, t.within("linear_attn"))
        named = expert_weights(t.within("mlp")) if sparse else mlp_weights(t.within("mlp"))
        if sparse:
            named |= shared_weights(t.within("mlp.shared_expert"))
            named |= t.projections(shared_gate="mlp.shared_expert_gate")
        layers.append(Layer((Sublayer(mixers[kind], norm), Sublayer(feedforward, norm))))
        norms = t.norms(mix="input_layernorm", mlp="post_attention_layernorm")
        weights.append([mixer | {"pre": norms["mix"]}, named | {"pre": norms["mlp"]}])
    angles = [angle_table(config.rope_parameters, config.head_dim)]
    return finish(Model(layers=tuple(layers), norm=norm), tensors, weights, angles)


def gated_attention(config: Any, norm: Norm) -> Attention:
    """Of a full layer."""
    return Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        qk_norm=norm,
        gated=True,
    )


def delta_net(config: Any) -> DeltaNet:
    """Of a linear layer. Its own norm has a plain weight."""
    return DeltaNet(
        k_heads=config.linear_num_key_heads,
        v_heads=config.linear_num_value_heads,
        k_dim=config.linear_key_head_dim,
        v_dim=config.linear_value_head_dim,
        norm=Norm("rms", config.rms_norm_eps),
    )


def gated_attention_weights(config: Any, tensors: Tensors) -> Named:
    """Rows of `q_proj` are, head by head, those of q and those of the gate."""
    named = attention_weights(tensors)
    heads, head_dim = config.num_attention_heads, config.head_dim
    both = named["q"].reshape(heads, 2, head_dim, -1)
    named["q"] = both[:, 0].reshape(heads * head_dim, -1)
    named["gate"] = both[:, 1].reshape(heads * head_dim, -1)
    return named


def delta_net_weights(config: Any, tensors: Tensors) -> Named:
    """Qwen3-Next deals the rows of its projections out to key heads, Qwen3.5 has one tensor each."""
    named = tensors.some(A_log="A_log", dt_bias="dt_bias", norm="norm.weight")
    named |= tensors.projections(out="out_proj") | {"conv": tensors["conv1d.weight"][:, 0]}
    if config.model_type == "qwen3_next":
        return named | rows_by_key_head(config, tensors)
    return named | tensors.projections(
        qkv="in_proj_qkv", z="in_proj_z", b="in_proj_b", a="in_proj_a"
    )


def rows_by_key_head(config: Any, tensors: Tensors) -> Named:
    """Of each key head: q, k, the v and the z of its value heads; their b and their a."""
    heads, k_dim = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // heads
    values = group * config.linear_value_head_dim
    qkvz = tensors["in_proj_qkvz.weight"].reshape(heads, 2 * k_dim + 2 * values, -1)
    q, k, v, z = np.split(qkvz, np.cumsum([k_dim, k_dim, values]), axis=1)
    b, a = np.split(tensors["in_proj_ba.weight"].reshape(heads, 2 * group, -1), 2, axis=1)

    def rows(x: Array) -> Array:
        return x.reshape(-1, x.shape[-1])

    qkv = np.concatenate([rows(q), rows(k), rows(v)])
    return {"qkv": qkv, "z": rows(z), "b": rows(b), "a": rows(a)}


def mamba_weights(tensors: Tensors) -> Named:
    """Of a Mamba-2 mixer."""
    named = tensors.projections(**{"in": "in_proj", "out": "out_proj"})
    named |= tensors.some(
        conv_bias="conv1d.bias", A_log="A_log", D="D", dt_bias="dt_bias", norm="norm.weight"
    )
    return named | {"conv": tensors["conv1d.weight"][:, 0]}


def nemotron_h(config: Any, tensors: Tensors) -> Built:
    """Nemotron 3: one mixer a layer, no positions, no gate in its MLPs.

    The step of its Mamba layers is not clamped from below (transformers clamps it in one of its
    two paths only, vLLM in none).
    """
    norm = Norm("rms", config.layer_norm_epsilon)
    layers, weights = [], []
    for index, kind in enumerate(config.layers_block_type):
        t = tensors.layer(index)
        mixer, named = nemotron_mixer(config, kind, norm), nemotron_weights(kind, t.within("mixer"))
        layers.append(Layer((Sublayer(mixer, norm),)))
        weights.append([named | t.norms(pre="norm")])
    model = Model(layers=tuple(layers), norm=norm)
    return finish(
        model, tensors, weights, norm="model.norm_f.weight", embedding="model.embeddings.weight"
    )


def nemotron_mixer(config: Any, kind: str, norm: Norm) -> Mixer:
    """Of a layer of this kind."""
    if kind == LINEAR:
        return Mamba2(
            num_heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            groups=config.n_groups,
            state=config.ssm_state_size,
            norm=norm,
        )
    if kind == FULL:
        return Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            rope=None,
        )
    if kind == "mlp":
        return Mlp("relu2")
    return Experts(
        route=grouped_sigmoid(config),
        activation="relu2",
        shared="plain",
        latent=config.moe_latent_size is not None,
    )


def nemotron_weights(kind: str, tensors: Tensors) -> Named:
    """Of a layer's mixer."""
    if kind == LINEAR:
        return mamba_weights(tensors)
    if kind == FULL:
        return attention_weights(tensors)
    if kind == "mlp":
        return tensors.projections(up="up_proj", down="down_proj")
    named = tensors.projections(
        router="gate",
        shared_up="shared_experts.up_proj",
        shared_down="shared_experts.down_proj",
        latent_in="fc1_latent_proj",
        latent_out="fc2_latent_proj",
    )
    return named | tensors.some(
        route_bias="gate.e_score_correction_bias",
        experts_up="experts.up_proj",
        experts_down="experts.down_proj",
    )


def granite_hybrid(config: Any, tensors: Tensors) -> Built:
    """Granite 4: what each sublayer adds is scaled, and so are embeddings and logits."""
    norm, scale = Norm("rms", config.rms_norm_eps), config.residual_multiplier
    route = Route(top_k=config.num_experts_per_tok, score="softmax of the chosen")
    experts = Sublayer(Experts(route=route, shared="plain"), norm, scale=scale)
    layers, weights = [], []
    for index, kind in enumerate(config.layers_block_type):
        t = tensors.layer(index)
        mixer = granite_mixer(config, kind, norm)
        if kind == LINEAR:
            named = mamba_weights(t.within("mamba"))
        else:
            named = attention_weights(t.within("self_attn"))
        layers.append(Layer((Sublayer(mixer, norm, scale=scale), experts)))
        weights.append(
            [
                named | t.norms(pre="input_layernorm"),
                granite_experts(t) | t.norms(pre="post_attention_layernorm"),
            ]
        )
    model = Model(
        layers=tuple(layers),
        norm=norm,
        embedding_scale=config.embedding_multiplier,
        logits_scale=1 / config.logits_scaling,
    )
    head_dim = config.hidden_size // config.num_attention_heads
    return finish(model, tensors, weights, [angle_table(config.rope_parameters, head_dim)])


def granite_mixer(config: Any, kind: str, norm: Norm) -> Mixer:
    """Of a layer of this kind."""
    if kind == LINEAR:
        return Mamba2(
            num_heads=config.mamba_n_heads,
            head_dim=config.mamba_d_head,
            groups=config.mamba_n_groups,
            state=config.mamba_d_state,
            norm=norm,
        )
    return Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        scale=config.attention_multiplier,
        rope=0 if config.position_embedding_type == "rope" else None,
    )


def granite_experts(tensors: Tensors) -> Named:
    """Of the experts and of the MLP beside them."""
    return tensors.some(
        router="block_sparse_moe.router.weight",
        experts_up="block_sparse_moe.experts.gate_up_proj",
        experts_down="block_sparse_moe.experts.down_proj",
        shared_up="shared_mlp.input_linear.weight",
        shared_down="shared_mlp.output_linear.weight",
    )
