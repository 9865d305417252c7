"""Granite 3 with experts: a Granite whose layers have experts in place of the MLP."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..table import ParameterTable
from . import dense, granite
from .family import Family
from .mixtral import experts

NAMES = dense.Names(router="block_sparse_moe.router.layer")
STACKS = {
    "experts_gate_up": "block_sparse_moe.input_linear.weight",
    "experts_down": "block_sparse_moe.output_linear.weight",
}


def read(fields: Fields) -> ModelConfig:
    """Weights of the chosen experts add up to 1. Attention may have biases."""
    bias = fields.boolean("attention_bias", False)
    config = dense.read(
        fields,
        kv_heads=fields.size("num_attention_heads"),
        qkv_bias=bias,
        o_bias=bias,
        **experts(fields, "num_local_experts", "intermediate_size", 2, True),
    )
    return granite.multiplied(fields, config)


def parameters(config: ModelConfig) -> ParameterTable:
    """The experts of a layer are one tensor."""
    table = dense.parameters(config, NAMES)
    return dense.with_stacked_experts(table, config.num_experts, STACKS)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=granite.FAMILY.fields | {"num_local_experts", "num_experts_per_tok"},
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)
