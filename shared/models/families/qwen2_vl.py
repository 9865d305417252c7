"""Qwen2-VL: a Qwen2 beside a vision tower. The text model alone runs, on prompts of text."""

from __future__ import annotations

from .family import Family
from .nested import SPELLINGS, nested
from .qwen3_vl import IMAGE_TOKEN, OUTER, VIDEO_TOKEN

# In published files the text model has the names that it would have alone.
NAMES = (SPELLINGS[0], {"model.": "model.", "lm_head.": "lm_head."})
LEFT_OUT = {"vision tower": ("model.visual.*", "visual.*")}


def family(text: str) -> Family:
    """Of the models with this text model. Published files have no object for its config."""
    return nested(
        text,
        spellings=NAMES,
        left_out=LEFT_OUT,
        image_token=IMAGE_TOKEN,
        video_token=VIDEO_TOKEN,
        harmless=OUTER | {"vision_token_id"},
        flat=True,
    )


FAMILY = family("Qwen2VLTextModel")
