"""Qwen2 and Qwen2.5: biases of q, k and v, and windows by layer."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from . import dense
from .family import Family


def read(fields: Fields) -> ModelConfig:
    """q, k and v always have a bias, and nothing else has."""
    fields.only("attention_bias", True)
    fields.only("mlp_bias", False)
    return dense.read(fields, windows=dense.windows_by_layer(fields, 4096), qkv_bias=True)


FAMILY = Family(read=read)
