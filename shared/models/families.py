"""The families: from a config to the layers of the model, as data.

Llama, Mistral, Qwen2 and Qwen3 are one dense decoder with other numbers.
"""

from __future__ import annotations

from functools import cache

from .config import ModelConfig
from .spec import Attention, Layer, Mlp, Model, Norm, Sublayer


@cache
def model_of(config: ModelConfig) -> Model:
    """The model that a config describes."""
    # Equal layers are one object: comparing them is then quick.
    kinds = {window: _dense_layer(config, window) for window in config.layer_windows}
    layers = tuple(kinds[window] for window in config.layer_windows)
    return Model(layers, Norm("norm", config.rms_norm_eps))


def _dense_layer(config: ModelConfig, window: int) -> Layer:
    """A layer of a dense decoder: attention, then a gated MLP, each behind a norm."""
    eps = config.rms_norm_eps
    attention = Attention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=window,
        qk_norm=config.qk_norm,
        norm_eps=eps,
        kv_scales=config.kv_scales,
    )
    return Sublayer(attention, Norm("input_norm", eps)), Sublayer(Mlp(), Norm("post_norm", eps))
