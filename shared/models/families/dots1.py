"""dots.llm1: the experts of GLM-4.5 with the attention of Qwen3."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import PER_LAYER as LAYER_TYPES
from ..table import ParameterTable
from . import dense, glm4_moe
from .family import Family

WINDOW = 4096


def read(fields: Fields) -> ModelConfig:
    """Attention may have biases, and windows by layer."""
    bias = fields.boolean("attention_bias", False)
    given = glm4_moe.mixture(fields, plain=0, per_token=None, renormalizes=False)
    config = dense.read(
        fields,
        kv_heads=32,
        windows=_windows(fields),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        **given,
    )
    return glm4_moe.by_sigmoids(fields, config, shared=None)


def _windows(fields: Fields) -> list[int]:
    """Windows from layer `max_window_layers` on, or where `layer_types` says. Unlike Qwen's they
    need no `use_sliding_window`, so that has to agree.
    """
    first, window = fields.size("max_window_layers", 62, low=0), dense.window_size(fields, WINDOW)
    layers = range(fields.size("num_hidden_layers", high=dense.MAX_LAYERS))
    types = [LAYER_TYPES[window > 0 and layer >= first] for layer in layers]
    used = fields.defaulted({"layer_types": types}).replaced({"use_sliding_window": True})
    windows = dense.windows_by_layer(used, WINDOW)
    if any(windows):
        fields.only("use_sliding_window", True)
    return windows


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names."""
    return dense.parameters(config, glm4_moe.NAMES)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=glm4_moe.FAMILY.fields - {"use_qk_norm", "partial_rotary_factor"},
    fixed={
        "scoring_func": ("sigmoid", "noaux_tc"),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    harmless=glm4_moe.FAMILY.harmless,
)
