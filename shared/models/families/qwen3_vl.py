"""Qwen3-VL: a Qwen3 beside a vision tower. The text model alone runs, on prompts of text.

What the tower adds to the stream behind the first layers, it adds where images are.
"""

from __future__ import annotations

from .nested import SPELLINGS, nested

LEFT_OUT = {"vision tower": ("model.visual.*",)}
OUTER = frozenset({"vision_config", "vision_start_token_id", "vision_end_token_id"})
IMAGE_TOKEN, VIDEO_TOKEN = 151_655, 151_656

FAMILY = nested(
    "Qwen3VLTextModel",
    spellings=SPELLINGS[:1],
    left_out=LEFT_OUT,
    image_token=IMAGE_TOKEN,
    video_token=VIDEO_TOKEN,
    harmless=OUTER,
)
