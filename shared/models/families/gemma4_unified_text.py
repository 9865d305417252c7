"""The text model of the Gemma 4 that takes pixels and sound without towers (12B): no embeddings of
layers by default, longer windows.
"""

from __future__ import annotations

from .gemma4_text import DEFAULTS, family

FAMILY = family(0, 1024, DEFAULTS | {"max_position_embeddings": 262_144})
