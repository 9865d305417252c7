"""The text model of Qwen3-VL with experts: a Qwen3-MoE without windows, whose rotary embedding is
that of `qwen3_vl_text.py`.
"""

from __future__ import annotations

from ...checkpoint import STACKED, TRANSPOSED
from ..config import ModelConfig
from ..fields import Fields
from ..table import ParameterTable
from . import dense, qwen3_moe
from .family import Family
from .qwen3_vl_text import ROPE

STACKS = {
    "experts_gate_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
}


def read(fields: Fields) -> ModelConfig:
    """Attention may have biases. Weights of the chosen experts always add up to 1."""
    fields.only("norm_topk_prob", True)
    bias = fields.boolean("attention_bias", False)
    size, width = fields.size("moe_intermediate_size"), fields.size("hidden_size")
    if width in (size, 2 * size):
        # Whether experts are transposed is seen by their shape.
        fields.refuse("moe_intermediate_size", size, "neither hidden_size nor a half of it")
    return dense.read(
        fields,
        kv_heads=16,
        rope=ROPE,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        **qwen3_moe.sparse(
            fields.replaced({"norm_topk_prob": True}), qwen3_moe.number_of_experts(fields), 4
        ),
    )


def parameters(config: ModelConfig) -> ParameterTable:
    """The experts of a layer are one tensor: transposed in published files, and not in those that
    transformers 5 writes.
    """
    table = dense.parameters(config)
    return dense.with_stacked_experts(table, config.num_experts, STACKS, (STACKED, TRANSPOSED))


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=qwen3_moe.FAMILY.fields,
    harmless=qwen3_moe.FAMILY.harmless,
)
