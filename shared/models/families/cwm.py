"""Code World Model: a Llama with a window in three of four layers, of which the first has none."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from ..rope import ORIGINAL, RopeRules
from . import dense
from .family import Family

ROPE = RopeRules(theta=1e6)
DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 8192,
}
"""Of a file that has neither `rope_parameters` nor `rope_scaling`."""


def read(fields: Fields) -> ModelConfig:
    """Attention has no biases. `layer_types`, or the first and every fourth layer behind it see
    everything.
    """
    fields.only("attention_bias", False)
    if not fields.get("rope_scaling"):
        fields = fields.defaulted({"rope_parameters": DEFAULT_ROPE})
    return dense.read(
        fields,
        kv_heads=8,
        head_dim=128,
        eps=1e-5,
        rope=ROPE,
        windows=dense.windows_in_pattern(fields, 8192, 4, first=0),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


FAMILY = Family(read=read)
