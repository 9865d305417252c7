"""GLM-4-0414: norms on both sides of each sublayer; half of each head is rotated, in pairs."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from ..spec import Model
from ..table import ParameterTable
from . import dense
from .family import Family

HEAD_DIM = 128
"""The default, which does not follow the width of the model."""
NAMES = dense.Names(gate_up=("mlp.gate_up_proj",))
NORMS = dense.Norms(
    behind_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    behind_mlp="post_mlp_layernorm",
)
ROPE = RopeRules(partial=True, part=0.5)


def read(fields: Fields) -> ModelConfig:
    """q, k and v have biases, unless it says otherwise; o has none."""
    fields.only("mlp_bias", False)
    bias = fields.boolean("attention_bias", True)
    return dense.read(
        fields, kv_heads=2, head_dim=HEAD_DIM, eps=1.5625e-7, rope=ROPE, qkv_bias=bias
    )


def model(config: ModelConfig) -> Model:
    """Norms before and behind."""
    return dense.model(config, NORMS)


def parameters(config: ModelConfig) -> ParameterTable:
    """Gate and up are one tensor. Rows of q and k are put where halves are turned, not pairs."""
    return dense.parameters(config, NAMES, NORMS, pairs=True)


FAMILY = Family(
    read=read, model=model, parameters=parameters, fields=frozenset({"partial_rotary_factor"})
)
