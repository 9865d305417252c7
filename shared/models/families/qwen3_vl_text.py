"""The text model of Qwen3-VL: a Qwen3 without windows.

Its rotary embedding turns some pairs of a head by a token's place in time, and some by its row and
its column in an image. Of text all three are the position, so that all pairs turn by it, whatever
`mrope_section` and `mrope_interleaved` say of which is which.
"""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from . import dense, qwen3
from .family import Family

ROPE = RopeRules(theta=500_000.0, extra=frozenset({"mrope_section", "mrope_interleaved"}))


def read(fields: Fields) -> ModelConfig:
    """Attention may have biases."""
    fields.only("mlp_bias", False)
    bias = fields.boolean("attention_bias", False)
    return dense.read(
        fields,
        kv_heads=32,
        head_dim=qwen3.HEAD_DIM,
        rope=ROPE,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


FAMILY = Family(read=read)
