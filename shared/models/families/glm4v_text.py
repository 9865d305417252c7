"""The text model of GLM-4.1V: a GLM-4-0414 whose rotary embedding takes three positions of each
token, which of text are one (`qwen3_vl_text.py`).
"""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from . import dense, glm4
from .family import Family

ROPE = RopeRules(partial=True, extra=frozenset({"mrope_section"}))


def read(fields: Fields) -> ModelConfig:
    """q, k and v always have a bias, and nothing else has. Heads have the usual size."""
    fields.only("attention_bias", True)
    fields.only("mlp_bias", False)
    fields.only("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    return dense.read(
        fields.replaced({"head_dim": None}), kv_heads=2, eps=1e-5, rope=ROPE, qkv_bias=True
    )


# Published files repeat these of the whole in its part.
TOKENS = frozenset({"image_token_id", "video_token_id"})
BORDERS = frozenset(
    "image_start_token_id image_end_token_id video_start_token_id video_end_token_id".split()
)
FAMILY = Family(
    read=read,
    model=glm4.model,
    parameters=glm4.parameters,
    fields=frozenset({"partial_rotary_factor"}),
    harmless=TOKENS | BORDERS,
)
