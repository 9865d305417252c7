"""Qwen1.5-MoE and Qwen2-MoE: a Qwen2 with experts in place of the MLP, and one more that all tokens
go through.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..fields import Fields
from ..rope import PER_LAYER as LAYER_TYPES
from . import dense, qwen3_moe
from .family import Family


def read(fields: Fields) -> ModelConfig:
    """q, k and v have biases, unless the file says otherwise. transformers writes a window of 0
    where none is used.
    """
    if not fields.boolean("use_sliding_window", False):
        fields = fields.replaced({"sliding_window": None})
    bias = fields.boolean("qkv_bias", True)
    fields.only("attention_bias", bias)
    config = dense.read(
        fields,
        windows=dense.windows_by_layer(_with_layer_types(fields), 4096),
        qkv_bias=bias,
        **qwen3_moe.sparse(fields, qwen3_moe.number_of_experts(fields), 4),
    )
    return replace(
        config,
        shared_expert_size=fields.size("shared_expert_intermediate_size"),
        gates_shared_expert=True,
    )


def _with_layer_types(fields: Fields) -> Fields:
    """The same fields, which say which layers have a window: of those before `max_window_layers`
    every other one, unless the file says otherwise. Qwen2's are the layers from there on.
    """
    if not fields.boolean("use_sliding_window", False):
        return fields
    first = dense.first_window(fields)
    layers = range(fields.size("num_hidden_layers", high=dense.MAX_LAYERS))
    types = [LAYER_TYPES[layer % 2 == 0 and layer < first] for layer in layers]
    return fields.defaulted({"layer_types": types})


FAMILY = Family(
    read=read,
    fields=qwen3_moe.FAMILY.fields | {"shared_expert_intermediate_size", "qkv_bias"},
    harmless=qwen3_moe.FAMILY.harmless,
)
