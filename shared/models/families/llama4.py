"""Llama 4 Scout and Maverick: a Llama 4 beside a vision model. The text model alone runs, on
prompts of text.
"""

from __future__ import annotations

from .nested import nested

FAMILY = nested(
    "Llama4ForCausalLM",
    spellings=({"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},),
    left_out={
        "vision model": ("vision_model.*",),
        "multi-modal projector": ("multi_modal_projector.*",),
    },
    image_token=200_092,
    harmless=frozenset(
        "vision_config boi_token_index eoi_token_index boi_token_id eoi_token_id".split()
    ),
)
