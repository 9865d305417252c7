"""Llama 2 and 3, and what has its architecture."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from . import dense
from .family import Family


def read(fields: Fields) -> ModelConfig:
    """Biases are optional."""
    bias = fields.boolean("attention_bias", False)
    heads = fields.size("num_attention_heads")
    mlp_bias = fields.boolean("mlp_bias", False)
    return dense.read(fields, kv_heads=heads, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


FAMILY = Family(read=read)
