"""Gemma 4 12B: pixels and sound are projected into the text model, which alone runs, on prompts of
text.
"""

from __future__ import annotations

from .gemma4 import IMAGE_TOKEN, OUTER
from .nested import SPELLINGS, nested

LEFT_OUT = {
    "vision embedder": ("model.embed_vision.*",),
    "audio embedder": ("model.embed_audio.*",),
}
FAMILY = nested(
    "Gemma4UnifiedForCausalLM",
    spellings=SPELLINGS,
    left_out=LEFT_OUT,
    image_token=IMAGE_TOKEN,
    harmless=OUTER,
)
