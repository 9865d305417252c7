"""Qwen3-VL with experts: a Qwen3-MoE beside a vision tower. The text model alone runs, on prompts
of text.
"""

from __future__ import annotations

from .nested import SPELLINGS, nested
from .qwen3_vl import IMAGE_TOKEN, LEFT_OUT, OUTER, VIDEO_TOKEN

FAMILY = nested(
    "Qwen3VLMoeTextModel",
    spellings=SPELLINGS[:1],
    left_out=LEFT_OUT,
    image_token=IMAGE_TOKEN,
    video_token=VIDEO_TOKEN,
    harmless=OUTER,
    ties_outside=True,  # transformers writes the text model's default, true, and never reads it
)
