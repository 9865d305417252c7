"""The text model of the Gemma 4 that takes pixels and sound without towers (12B): no embeddings of
layers by default.
"""

from __future__ import annotations

from .gemma4_text import family

FAMILY = family(0)
