"""Arcee: a Llama whose MLP has no gate, and squares what is above 0."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from . import dense
from .family import Family

ACT = "relu2"


def read(fields: Fields) -> ModelConfig:
    """One field says whether all projections of attention have biases."""
    fields.only("hidden_act", ACT)
    bias = fields.boolean("attention_bias", False)
    return dense.read(
        fields,
        kv_heads=fields.size("num_attention_heads"),
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        act=ACT,
    )


FAMILY = Family(read=read, fields=frozenset({"hidden_act"}))
