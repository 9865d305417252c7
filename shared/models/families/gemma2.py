"""Gemma 2: norms of 1 + weight on both sides of each sublayer, soft caps, every other layer with a
window.
"""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from ..spec import Model
from ..table import ParameterTable
from . import dense
from .family import Family

HEAD_DIM = 256
"""The default, which does not follow the width of the model."""
NORMS = dense.Norms(
    behind_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    behind_mlp="post_feedforward_layernorm",
    offset=1.0,
)
ACT = "gelu_pytorch_tanh"
FIXED: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False,)}
FIELDS = frozenset(
    """query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping hidden_act
    hidden_activation""".split()
)


def numbers(fields: Fields, attention_cap: float, logits_cap: float) -> dict[str, Any]:
    """What Gemma 2 and 3 read alike. The caps are defaults, 0 for none."""
    fields.only("mlp_bias", False)
    for name in ("hidden_act", "hidden_activation"):
        fields.only(name, ACT)
    bias = fields.boolean("attention_bias", False)
    return {
        "head_dim": HEAD_DIM,
        "qkv_bias": bias,
        "o_bias": bias,
        "act": "gelu_tanh",
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "rounds_embedding_scale": True,
        "attention_scale": fields.number("query_pre_attn_scalar", 256.0, above=True) ** -0.5,
        "attention_cap": dense.cap(fields, "attn_logit_softcapping", attention_cap),
        "logits_cap": dense.cap(fields, "final_logit_softcapping", logits_cap),
    }


def read(fields: Fields) -> ModelConfig:
    """Layers with a window come first."""
    fields = fields.defaulted({"tie_word_embeddings": True})
    windows = dense.windows_in_pattern(fields, 4096, 2)
    if fields.get("sliding_window_size") is not None:
        # In the first files it stands beside the other name.
        fields.only("sliding_window_size", fields.size("sliding_window", 4096))
    return dense.read(fields, kv_heads=4, windows=windows, **numbers(fields, 50.0, 30.0))


def model(config: ModelConfig) -> Model:
    """Norms before and behind."""
    return dense.model(config, NORMS)


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names, and those of the norms."""
    return dense.parameters(config, norms=NORMS)


FAMILY = Family(
    read=read,
    model=model,
    parameters=parameters,
    fields=FIELDS | {"sliding_window_size"},
    fixed=FIXED,
    harmless=frozenset({"cache_implementation"}),
)
