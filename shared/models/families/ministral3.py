"""Ministral 3: a Mistral whose queries grow with their position, beyond the original context."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields, show
from ..rope import ORIGINAL, RopeRules
from . import dense
from .family import Family

BETA = "llama_4_scaling_beta"
ROPE = RopeRules(extra=frozenset({BETA, "max_position_embeddings"}))
DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}


def read(fields: Fields) -> ModelConfig:
    """There are no biases; one sliding window for all layers, or none."""
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("rope_scaling")
    fields = fields.defaulted({"rope_parameters": DEFAULT_ROPE})
    return dense.read(
        fields,
        kv_heads=8,
        head_dim=128,
        eps=1e-5,
        windows=dense.one_window(fields, None),
        rope=ROPE,
        temper=temper(fields),
    )


def temper(fields: Fields) -> tuple[float, int]:
    """What q grows by, and the positions after which it grows again."""
    block = fields.get("rope_parameters")
    if not isinstance(block, dict):
        fields.fail("rope_parameters", f"is {show(block)}, must be an object")
    where = f"{fields.where}: {fields.path('rope_parameters')}"
    inside = Fields(block, where, fields.family)
    return inside.number(BETA), inside.size(ORIGINAL)


FAMILY = Family(read=read)
