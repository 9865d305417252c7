"""Gemma 3: as Gemma 2, with norms of the heads of q and k, and a rotary embedding of its own for
layers with a window: five of six.
"""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeConfig, RopeRules, read_ropes
from . import dense, gemma2
from .family import Family

DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
"""Published files leave out what is as in transformers' `Gemma3TextConfig`."""
FULL, LOCAL = RopeRules(theta=1e6), RopeRules(theta=1e4)


def read(fields: Fields) -> ModelConfig:
    """`layer_types`, or every `sliding_window_pattern`-th layer sees everything. A soft cap of
    scores can be named, but the modeling code does not apply it.
    """
    fields.only("attn_logit_softcapping")
    fields = fields.defaulted(DEFAULTS)
    pattern = fields.size("sliding_window_pattern", 6)
    return dense.read(
        fields,
        windows=dense.windows_in_pattern(fields, 4096, pattern),
        ropes=_ropes,
        qk_norm=True,
        **gemma2.numbers(fields, 0.0, 0.0),
    )


def _ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    return read_ropes(fields, head_dim, FULL, LOCAL, "rope_local_base_freq")


FAMILY = Family(
    read=read,
    model=gemma2.model,
    parameters=gemma2.parameters,
    fields=gemma2.FIELDS | {"sliding_window_pattern", "rope_local_base_freq"},
    fixed=gemma2.FIXED,
    # transformers writes the pattern as `_sliding_window_pattern` too, and never reads that.
    harmless=frozenset({"cache_implementation", "_sliding_window_pattern"}),
)
