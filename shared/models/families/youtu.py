"""Youtu-LLM: a dense decoder with the latent attention of DeepSeek-V3."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from . import deepseek_v3, latent
from .family import Family


def read(fields: Fields) -> ModelConfig:
    """Embeddings are tied unless the config says otherwise."""
    fields.only("mlp_bias", False)
    fields = fields.defaulted({"tie_word_embeddings": True})
    return latent.read(fields, rope=deepseek_v3.ROPE)


FAMILY = Family(
    read=read,
    model=latent.model,
    parameters=latent.parameters,
    fields=latent.FIELDS,
    harmless=frozenset({"embedding_initializer_range"}),
)
