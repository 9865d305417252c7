"""EXAONE 4: norms behind each sublayer and none before, norms of the heads of q and k. In a model
with a window, layers without it are not rotated.
"""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from . import dense, olmo2
from .family import Family

WINDOW = 4096
PATTERN = "sliding_window_pattern"


def read(fields: Fields) -> ModelConfig:
    """There are no biases. A model has a window if the file has one, even where all layers see
    everything.
    """
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    return dense.read(fields, kv_heads=32, eps=1e-5, qk_norm=True, **windows(fields))


def windows(fields: Fields) -> dict[str, Any]:
    """Which layers have a window, and which are not rotated."""
    found = dense.windows_in_pattern(fields, WINDOW, _pattern(fields))
    full = tuple(layer for layer, window in enumerate(found) if not window)
    return {
        "windows": found,
        "unrotated_layers": full if dense.window_size(fields, WINDOW) else (),
    }


def _pattern(fields: Fields) -> int:
    """Every layer of this number sees everything, where `layer_types` says nothing. Files that have
    letters here have `layer_types` too.
    """
    if fields.get("layer_types") is not None or not dense.window_size(fields, WINDOW):
        return 1
    return fields.size(PATTERN, None if PATTERN in fields.raw else 4)


FAMILY = Family(
    read=read,
    model=olmo2.model,
    parameters=olmo2.parameters,
    fields=frozenset({PATTERN}),
)
