"""ERNIE 4.5 without experts: a Llama that rotates pairs."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from ..table import ParameterTable
from . import dense
from .family import Family

ROPE = RopeRules(theta=500_000.0)


def read(fields: Fields) -> ModelConfig:
    """One field says whether all projections have biases."""
    bias = fields.boolean("use_bias", False)
    fields.only("attention_bias", bias)
    fields.only("mlp_bias", bias)
    fields = fields.defaulted({"tie_word_embeddings": True})
    return dense.read(
        fields,
        kv_heads=2,
        head_dim=128,
        eps=1e-5,
        rope=ROPE,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names. Rows of q and k are put where halves are turned, not pairs."""
    return dense.parameters(config, pairs=True)


FAMILY = Family(read=read, parameters=parameters, fields=frozenset({"use_bias"}))
