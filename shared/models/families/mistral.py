"""Mistral: one sliding window for all layers, or none."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from . import dense
from .family import Family


def read(fields: Fields) -> ModelConfig:
    """There are no biases."""
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    return dense.read(fields, windows=dense.one_window(fields, 4096))


FAMILY = Family(read=read)
