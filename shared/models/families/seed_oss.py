"""Seed-OSS: a Llama with biases of q, k and v."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from . import dense
from .family import Family


def read(fields: Fields) -> ModelConfig:
    """o has a field of its own for its bias."""
    return dense.read(
        fields,
        kv_heads=8,
        head_dim=128,
        qkv_bias=fields.boolean("attention_bias", True),
        o_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


FAMILY = Family(
    read=read,
    fields=frozenset({"attention_out_bias"}),
    harmless=frozenset({"residual_dropout"}),
)
