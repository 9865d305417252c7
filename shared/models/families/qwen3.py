"""Qwen3: norms of the heads of q and k, and windows by layer."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from . import dense
from .family import Family

HEAD_DIM = 128
"""The default, which does not follow the width of the model."""


def read(fields: Fields) -> ModelConfig:
    """Attention may have biases."""
    fields.only("mlp_bias", False)
    bias = fields.boolean("attention_bias", False)
    windows = dense.windows_by_layer(fields, 4096)
    return dense.read(
        fields, head_dim=HEAD_DIM, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm=True
    )


FAMILY = Family(read=read)
