"""Helium: a Llama that rotates pairs."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from . import dense, ernie4_5
from .family import Family

ROPE = RopeRules(theta=100_000.0)


def read(fields: Fields) -> ModelConfig:
    """q, k and v may have biases, and o has none. Heads make up the stream."""
    heads = fields.size("num_attention_heads")
    config = dense.read(
        fields,
        kv_heads=20,
        head_dim=128,
        eps=1e-8,
        rope=ROPE,
        qkv_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )
    if config.head_dim * heads != config.hidden_size:
        fields.refuse("head_dim", config.head_dim, "hidden_size / num_attention_heads")
    return config


FAMILY = Family(read=read, parameters=ernie4_5.parameters)
