"""The text model of GLM-4.5V: a GLM-4.5 with the rotary embedding of `glm4v_text.py`."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..fields import Fields
from ..table import ParameterTable
from . import dense, glm4_moe, glm4v_text
from .family import Family

ROPE = replace(glm4v_text.ROPE, part=0.5)


def read(fields: Fields) -> ModelConfig:
    """q, k and v have biases, unless it says otherwise; heads of q and k have no norms."""
    fields.only("num_local_experts", fields.size("n_routed_experts"))
    config = dense.read(
        fields,
        eps=1e-5,
        rope=ROPE,
        qkv_bias=fields.boolean("attention_bias", True),
        **glm4_moe.mixture(fields, plain=1, per_token=8, renormalizes=True),
    )
    return glm4_moe.by_sigmoids(fields, config, shared=1)


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names."""
    return dense.parameters(config, glm4_moe.NAMES)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=glm4_moe.FAMILY.fields - {"use_qk_norm"} | {"num_local_experts"},
    fixed={"use_qk_norm": (False,)},
    harmless=glm4v_text.FAMILY.harmless | {"output_router_logits", "router_aux_loss_coef"},
)
