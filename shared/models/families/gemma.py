"""The first Gemma: a Llama with norms of 1 + weight, a gelu, and embeddings that are multiplied."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..table import ParameterTable
from . import dense, gemma2
from .family import Family

NORMS = dense.Norms(offset=1.0)


def read(fields: Fields) -> ModelConfig:
    """The first files say `gelu` and mean its approximation, as transformers takes it."""
    fields.only("mlp_bias", False)
    fields.only("hidden_act", gemma2.ACT, "gelu")
    fields.only("hidden_activation", gemma2.ACT)
    bias = fields.boolean("attention_bias", False)
    return dense.read(
        fields.defaulted({"tie_word_embeddings": True}),
        kv_heads=16,
        head_dim=gemma2.HEAD_DIM,
        qkv_bias=bias,
        o_bias=bias,
        act="gelu_tanh",
        embedding_scale=fields.size("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
    )


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names."""
    return dense.parameters(config, norms=NORMS)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset({"hidden_act", "hidden_activation"}),
    fixed=gemma2.FIXED,
)
