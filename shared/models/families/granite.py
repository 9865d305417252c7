"""Granite 3: a Llama whose embeddings, attention scores, sublayers and logits are multiplied by
numbers of its own.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..fields import Fields
from . import llama
from .family import Family


def read(fields: Fields) -> ModelConfig:
    """A Llama but for the multipliers."""
    return multiplied(fields, llama.read(fields))


def multiplied(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The same model with multipliers. All are 1 where they are absent, that of attention too.
    Logits are divided by theirs.
    """
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", 1.0, above=True),
        attention_scale=fields.number("attention_multiplier", 1.0, above=True),
        residual_scale=fields.number("residual_multiplier", 1.0, above=True),
        logits_scale=1 / fields.number("logits_scaling", 1.0, above=True),
    )


MULTIPLIERS = "embedding_multiplier attention_multiplier residual_multiplier logits_scaling"
FAMILY = Family(read=read, fields=frozenset(MULTIPLIERS.split()))
