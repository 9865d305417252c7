"""Solar Open: the experts of GLM-4.5 in all layers of a Llama."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from ..table import ParameterTable
from . import dense, glm4_moe
from .family import Family
from .mixtral import experts

ROPE = RopeRules(theta=1e6, partial=True)


def read(fields: Fields) -> ModelConfig:
    """q, k and v may have biases. Files may have the width of an MLP, which no layer has."""
    renormalizes = fields.boolean("norm_topk_prob", True)
    size = fields.size("moe_intermediate_size")
    config = dense.read(
        fields.replaced({"intermediate_size": size}),
        kv_heads=8,
        head_dim=128,
        eps=1e-5,
        rope=ROPE,
        qkv_bias=fields.boolean("attention_bias", False),
        **experts(fields, "n_routed_experts", "moe_intermediate_size", 8, renormalizes),
    )
    return glm4_moe.by_sigmoids(fields, config, shared=1)


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names."""
    return dense.parameters(config, glm4_moe.NAMES)


UNREAD = frozenset({"first_k_dense_replace", "use_qk_norm"})
FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=glm4_moe.FAMILY.fields - UNREAD,
    fixed={"first_k_dense_replace": (0,), "use_qk_norm": (False,), glm4_moe.PREDICTS: (0,)},
    harmless=glm4_moe.FAMILY.harmless,
)
