"""Dense families: from transformers' config and tensors to a reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from .decoder import Angles
from .spec import Attention, Layer, Mlp, Model, Norm, Sublayer, Temperature
from .tensors import (
    Built,
    Named,
    Tensors,
    angle_table,
    attention_weights,
    finish,
    mlp_weights,
)


def windows(config: Any) -> list[int]:
    """The window of each layer."""
    kinds = config.layer_types
    return [config.sliding_window if kind == "sliding_attention" else 0 for kind in kinds]


def two_tables(config: Any, head_dim: int) -> list[Angles]:
    """Angles of full layers and of sliding ones."""
    kinds = "full_attention", "sliding_attention"
    return [angle_table(config.rope_parameters[kind], head_dim) for kind in kinds]


def usual_layers(tensors: Tensors, count: int) -> list[list[Named]]:
    """Attention and a gated MLP, each behind a norm."""
    layers = []
    for index in range(count):
        t = tensors.layer(index)
        norms = t.norms(mix="input_layernorm", mlp="post_attention_layernorm")
        layers.append(
            [
                attention_weights(t.within("self_attn")) | {"pre": norms["mix"]},
                mlp_weights(t.within("mlp")) | {"pre": norms["mlp"]},
            ]
        )
    return layers


def sandwich_layers(
    tensors: Tensors,
    count: int,
    attention_post: str = "post_attention_layernorm",
    mlp_pre: str = "pre_feedforward_layernorm",
    mlp_post: str = "post_feedforward_layernorm",
) -> list[list[Named]]:
    """Attention and a gated MLP, each between two norms."""
    layers = []
    for index in range(count):
        t = tensors.layer(index)
        attention = attention_weights(t.within("self_attn"))
        mlp = mlp_weights(t.within("mlp"))
        attention |= t.norms(pre="input_layernorm", post=attention_post)
        mlp |= t.norms(pre=mlp_pre, post=mlp_post)
        layers.append([attention, mlp])
    return layers


def gemma(config: Any, tensors: Tensors) -> Built:
    """Gemma 2, and the text part of Gemma 3, which has norms of q and k and two tables of angles."""
    norm, is_third = Norm("gemma", config.rms_norm_eps), config.model_type == "gemma3_text"
    mlp = Sublayer(Mlp("gelu_tanh"), norm, norm)
    layers = []
    for window in windows(config):
        attention = Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.query_pre_attn_scalar**-0.5,
            window=window,
            soft_cap=config.attn_logit_softcapping or 0.0,
            rope=1 if is_third and window else 0,
            qk_norm=norm if is_third else None,
        )
        layers.append(Layer((Sublayer(attention, norm, norm), mlp)))
    if is_third:
        angles = two_tables(config, config.head_dim)
    else:
        angles = [angle_table(config.rope_parameters, config.head_dim)]
    model = Model(
        layers=tuple(layers),
        norm=norm,
        embedding_scale=config.hidden_size**0.5,
        logits_cap=config.final_logit_softcapping or 0.0,
    )
    return finish(model, tensors, sandwich_layers(tensors, len(layers)), angles)


def phi3(config: Any, tensors: Tensors) -> Built:
    """Phi-3 and Phi-4: q, k and v are one tensor."""
    norm = Norm("rms", config.rms_norm_eps)
    head_dim = config.hidden_size // config.num_attention_heads
    attention = Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=config.sliding_window or 0,
    )
    layers = usual_layers(tensors, config.num_hidden_layers)
    heads = attention.num_heads, attention.num_kv_heads
    for index, weights in enumerate(layers):
        qkv = tensors.layer(index)["self_attn.qkv_proj.weight"]
        parts = np.split(qkv, np.cumsum(heads) * head_dim)
        weights[0] |= dict(zip("qkv", parts, strict=True))
    layer = Layer((Sublayer(attention, norm), Sublayer(Mlp(), norm)))
    model = Model(layers=(layer,) * len(layers), norm=norm)
    return finish(model, tensors, layers, [angle_table(config.rope_parameters, head_dim)])


def glm4(config: Any, tensors: Tensors) -> Built:
    """GLM-4-0414: pairs, half of the head, norms around attention and MLP."""
    norm = Norm("rms", config.rms_norm_eps)
    attention = Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        pairs=True,
    )
    layer = Layer((Sublayer(attention, norm, norm), Sublayer(Mlp(), norm, norm)))
    names = "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    layers = sandwich_layers(tensors, config.num_hidden_layers, *names)
    angles = [angle_table(config.rope_parameters, config.head_dim)]
    return finish(Model(layers=(layer,) * len(layers), norm=norm), tensors, layers, angles)


def olmo(config: Any, tensors: Tensors) -> Built:
    """OLMo 2 and 3: norms behind attention and MLP, none before; norms of whole rows of q and k."""
    norm, is_third = Norm("rms", config.rms_norm_eps), config.model_type == "olmo3"
    head_dim = config.hidden_size // config.num_attention_heads
    kinds, layers = [], []
    for index, window in enumerate(windows(config) if is_third else [0] * config.num_hidden_layers):
        attention = Attention(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            window=window,
            rope=1 if is_third and window else 0,
            qk_norm=norm,
            norm_rows=True,
        )
        kinds.append(Layer((Sublayer(attention, None, norm), Sublayer(Mlp(), None, norm))))
        t = tensors.layer(index)
        norms = t.norms(mix="post_attention_layernorm", mlp="post_feedforward_layernorm")
        weights = attention_weights(t.within("self_attn")), mlp_weights(t.within("mlp"))
        layers.append([weights[0] | {"post": norms["mix"]}, weights[1] | {"post": norms["mlp"]}])
    if is_third:
        angles = two_tables(config, head_dim)
    else:
        angles = [angle_table(config.rope_parameters, head_dim)]
    return finish(Model(layers=tuple(kinds), norm=norm), tensors, layers, angles)


def ministral3(config: Any, tensors: Tensors) -> Built:
    """Ministral 3: queries grow with their position."""
    norm, rope = Norm("rms", config.rms_norm_eps), config.rope_parameters
    length = rope["original_max_position_embeddings"]
    attention = Attention(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.sliding_window or 0,
        temperature=Temperature(rope["llama_4_scaling_beta"], length),
    )
    layer = Layer((Sublayer(attention, norm), Sublayer(Mlp(), norm)))
    layers = usual_layers(tensors, config.num_hidden_layers)
    angles = [angle_table(rope, config.head_dim)]
    return finish(Model(layers=(layer,) * len(layers), norm=norm), tensors, layers, angles)
