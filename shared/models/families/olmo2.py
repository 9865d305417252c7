"""OLMo 2: norms behind each sublayer and none before, norms of q and k over all heads."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from ..spec import Model
from ..table import ParameterTable
from . import dense
from .family import Family

NORMS = dense.Norms(
    before_attention=None,
    behind_attention="post_attention_layernorm",
    before_mlp=None,
    behind_mlp="post_feedforward_layernorm",
)


def numbers(fields: Fields) -> dict[str, Any]:
    """What OLMo 2 and 3 read alike."""
    fields.only("mlp_bias", False)
    bias = fields.boolean("attention_bias", False)
    return {
        "kv_heads": fields.size("num_attention_heads"),
        "eps": 1e-5,
        "qkv_bias": bias,
        "o_bias": bias,
        "wide_qk_norm": True,
    }


def read(fields: Fields) -> ModelConfig:
    """No layer has a window."""
    return dense.read(fields, **numbers(fields))


def model(config: ModelConfig) -> Model:
    """Norms behind."""
    return dense.model(config, NORMS)


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names, and those of the norms."""
    return dense.parameters(config, norms=NORMS)


FAMILY = Family(read=read, model=model, parameters=parameters)
