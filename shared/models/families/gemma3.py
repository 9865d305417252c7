"""Gemma 3 of 4B and more: a Gemma 3 beside a vision tower. The text model alone runs, on prompts of
text.
"""

from __future__ import annotations

from .nested import LEFT_OUT, SPELLINGS, nested

FAMILY = nested(
    "Gemma3ForCausalLM",
    spellings=SPELLINGS,
    left_out=LEFT_OUT,
    image_token=262_144,
    unread=("final_logit_softcapping",),
    harmless=frozenset(
        """vision_config mm_tokens_per_image boi_token_index eoi_token_index boi_token_id
        eoi_token_id""".split()
    ),
)
