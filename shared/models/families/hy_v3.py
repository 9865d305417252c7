"""Hy3: the attention of Qwen3 and the experts of GLM-4.5, which do not stand in groups. Layers
that predict further tokens do not run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from ..table import ParameterTable
from . import dense, exaone_moe, glm4_moe
from .family import Family
from .mixtral import experts

NAMES = dense.Names(
    router="mlp.router.gate", router_bias="mlp.expert_bias", shared_expert="mlp.shared_mlp"
)
ROPE = RopeRules(theta=11_158_840.0)
SCALE = "router_scaling_factor"


def read(fields: Fields) -> ModelConfig:
    """Attention may have biases. Weights of the chosen experts add up to their scale."""
    bias = fields.boolean("attention_bias", False)
    config = dense.read(
        fields,
        kv_heads=8,
        head_dim=128,
        eps=1e-5,
        rope=ROPE,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        **_mixture(fields),
    )
    scale = fields.number(SCALE, 2.826, above=True)
    named = fields.replaced({"routed_scaling_factor": scale})
    return glm4_moe.by_sigmoids(named, config, 1, count="num_shared_experts")


def _mixture(fields: Fields) -> dict[str, Any]:
    """The first layer has no experts, unless the file says otherwise."""
    layers = fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    found = exaone_moe.dense_by_types(fields, layers)
    found = (0,) if found is None else found
    fields.only("first_k_dense_replace", len(found))
    return experts(fields, "num_experts", "moe_intermediate_size", 8, True, found)


def parameters(config: ModelConfig) -> ParameterTable:
    """Names of their own for the router and what goes with it. The layer behind the last one is
    ignored by name.
    """
    table = dense.parameters(config, NAMES)
    behind = tuple(f"{start}layers.{config.num_layers}.*" for start in ("model.", ""))
    return replace(table, ignored=(*table.ignored, *behind))


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset(
        """num_experts num_shared_experts num_experts_per_tok moe_intermediate_size
        mlp_layer_types first_k_dense_replace""".split()
    )
    | {SCALE},
    fixed={"enable_moe_fp32_combine": (True, False), glm4_moe.PREDICTS: (0, 1)},
    harmless=frozenset({"output_router_logits"}),
)
