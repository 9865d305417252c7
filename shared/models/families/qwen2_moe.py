"""Qwen1.5-MoE and Qwen2-MoE: a Qwen2 with experts in place of the MLP, and one more that all tokens
go through.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..fields import Fields
from . import dense, qwen3_moe
from .family import Family


def read(fields: Fields) -> ModelConfig:
    """q, k and v have biases, unless the file says otherwise. transformers writes a window of 0
    where none is used.
    """
    if not fields.boolean("use_sliding_window", False):
        fields = fields.replaced({"sliding_window": None})
    config = dense.read(
        fields,
        windows=dense.windows_by_layer(fields, 4096),
        qkv_bias=fields.boolean("qkv_bias", True),
        **qwen3_moe.sparse(fields, qwen3_moe.number_of_experts(fields), 4),
    )
    return replace(
        config,
        shared_expert_size=fields.size("shared_expert_intermediate_size"),
        gates_shared_expert=True,
    )


FAMILY = Family(
    read=read,
    fields=qwen3_moe.FAMILY.fields | {"shared_expert_intermediate_size", "qkv_bias"},
    harmless=qwen3_moe.FAMILY.harmless,
)
