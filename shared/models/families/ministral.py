"""Ministral 8B of 2024: a Mistral with windows by layer."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import PER_LAYER as LAYER_TYPES
from . import dense
from .family import Family

WINDOW = 4096


def read(fields: Fields) -> ModelConfig:
    """There are no biases. All layers have the window, unless `layer_types` says otherwise."""
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    usual = LAYER_TYPES[dense.window_size(fields, WINDOW) > 0]
    types = [usual] * fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    fields = fields.defaulted({"layer_types": types})
    return dense.read(fields, kv_heads=8, windows=dense.windows_in_pattern(fields, WINDOW, 1))


FAMILY = Family(read=read)
