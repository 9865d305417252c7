"""Families with mixtures of experts over usual attention."""

from __future__ import annotations

from typing import Any

from .families_dense import windows
from .spec import Attention, Experts, Layer, Mlp, Model, Norm, Route, Sublayer, Temperature
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

SIGMOID_EPS = 1e-20
"""What is added to the sum of sigmoids that weights are divided by."""


def mixture(config: Any, tensors: Tensors) -> Built:
    """Mixtral, Qwen2-MoE, Qwen3-MoE, GLM-4.5 and MiniMax M2."""
    norm, family = Norm("rms", config.rms_norm_eps), config.model_type
    attention = usual_attention(config, norm)
    experts = mixture_experts(config)
    dense = getattr(config, "first_k_dense_replace", 0)
    layers, weights = [], []
    for index in range(config.num_hidden_layers):
        t = tensors.layer(index)
        feedforward: Mlp | Experts = Mlp()
        named = None
        if index >= dense:
            feedforward, named = experts, expert_weights(t.within("mlp"))
        if named is None:
            named = mlp_weights(t.within("mlp"))
        elif family == "qwen2_moe":
            named |= shared_weights(t.within("mlp.shared_expert"))
            named |= t.projections(shared_gate="mlp.shared_expert_gate")
        elif family == "glm4_moe":
            named |= shared_weights(t.within("mlp.shared_experts"))
        layers.append(Layer((Sublayer(attention, norm), Sublayer(feedforward, norm))))
        weights.append(usual_weights(t, named))
    angles = [angle_table(config.rope_parameters, attention.head_dim)]
    return finish(Model(layers=tuple(layers), norm=norm), tensors, weights, angles)


def usual_attention(config: Any, norm: Norm) -> Attention:
    """Of the mixtures: with norms of q and k where the family has them."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    has_norms = config.model_type in ("qwen3_moe", "minimax_m2")
    has_norms = has_norms or getattr(config, "use_qk_norm", False)
    return Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qk_norm=norm if has_norms else None,
        norm_rows=config.model_type == "minimax_m2",
    )


def mixture_experts(config: Any) -> Experts:
    """How each of the mixtures routes, and whether an MLP is shared."""
    family, top_k = config.model_type, config.num_experts_per_tok
    if family == "glm4_moe":
        return Experts(route=grouped_sigmoid(config), shared="plain")
    if family == "minimax_m2":
        return Experts(route=Route(top_k=top_k, score="sigmoid", biased=True))
    route = Route(top_k=top_k, renormalize=getattr(config, "norm_topk_prob", True))
    return Experts(route=route, shared="gated" if family == "qwen2_moe" else None)


def grouped_sigmoid(config: Any) -> Route:
    """DeepSeek-V3's way, which GLM and Nemotron took."""
    return Route(
        top_k=config.num_experts_per_tok,
        score="sigmoid",
        renormalize=config.norm_topk_prob,
        biased=True,
        groups=config.n_group or 1,
        groups_kept=config.topk_group or 1,
        scale=config.routed_scaling_factor,
        eps=SIGMOID_EPS,
    )


def usual_weights(tensors: Tensors, feedforward: Named) -> list[Named]:
    """Of attention and of what follows it, each behind its norm."""
    norms = tensors.norms(mix="input_layernorm", mlp="post_attention_layernorm")
    attention = attention_weights(tensors.within("self_attn"))
    return [attention | {"pre": norms["mix"]}, feedforward | {"pre": norms["mlp"]}]


def gpt_oss(config: Any, tensors: Tensors) -> Built:
    """gpt-oss: sinks, windows in every second layer, biases everywhere."""
    norm = Norm("rms", config.rms_norm_eps)
    route = Route(top_k=config.num_experts_per_tok, score="softmax of the chosen")
    experts = Sublayer(Experts(route=route, activation="swigluoai"), norm)
    layers, weights = [], []
    for index, window in enumerate(windows(config)):
        attention = Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=window,
            sinks=True,
        )
        layers.append(Layer((Sublayer(attention, norm), experts)))
        mlp = tensors.layer(index).within("mlp")
        named = mlp.projections(router="router")
        named |= mlp.some(
            experts_up_bias="experts.gate_up_proj_bias",
            experts_down_bias="experts.down_proj_bias",
        )
        named |= transposed_experts(mlp)
        weights.append(usual_weights(tensors.layer(index), named))
    angles = [angle_table(config.rope_parameters, config.head_dim)]
    return finish(Model(layers=tuple(layers), norm=norm), tensors, weights, angles)


def transposed_experts(tensors: Tensors) -> Named:
    """Experts that are held as [expert in out]."""
    named = tensors.some(experts_up="experts.gate_up_proj", experts_down="experts.down_proj")
    return {name: weight.transpose(0, 2, 1) for name, weight in named.items()}


def llama4(config: Any, tensors: Tensors) -> Built:
    """Llama 4's text part: chunks where there are positions, temperature where there are none."""
    norm = Norm("rms", config.rms_norm_eps)
    route = Route(top_k=config.num_experts_per_tok, score="sigmoid", renormalize=False)
    experts = Experts(route=route, shared="plain", scale_input=True)
    layers, weights = [], []
    for index in range(config.num_hidden_layers):
        part = tensors.layer(index).within("feed_forward")
        feedforward: Mlp | Experts = Mlp()
        if index in config.moe_layers:
            feedforward = experts
            named = part.projections(router="router") | transposed_experts(part)
            named |= shared_weights(part.within("shared_expert"))
        else:
            named = mlp_weights(part)
        attention = llama4_attention(config, rotates=bool(config.no_rope_layers[index]))
        layers.append(Layer((Sublayer(attention, norm), Sublayer(feedforward, norm))))
        weights.append(usual_weights(tensors.layer(index), named))
    angles = [angle_table(config.rope_parameters, config.head_dim)]
    return finish(Model(layers=tuple(layers), norm=norm), tensors, weights, angles)


def llama4_attention(config: Any, rotates: bool) -> Attention:
    """Of a layer with rotary embedding, or of one without."""
    unit = Norm("unit", config.rms_norm_eps)
    temperature = None
    if config.attn_temperature_tuning and not rotates:
        temperature = Temperature(config.attn_scale, config.floor_scale, 1.0)
    return Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        chunk=config.attention_chunk_size if rotates else 0,
        rope=0 if rotates else None,
        pairs=True,
        qk_norm=unit if rotates and config.use_qk_norm else None,
        norm_after_rope=True,
        temperature=temperature,
    )
