"""Gemma 4 with images and sound: a Gemma 4 beside towers. The text model alone runs, on prompts of
text.
"""

from __future__ import annotations

from .nested import SPELLINGS, nested

LEFT_OUT = {
    "vision tower": ("model.vision_tower.*", "model.embed_vision.*"),
    "audio tower": ("model.audio_tower.*", "model.embed_audio.*"),
}
OUTER = frozenset(
    """vision_config audio_config boi_token_id eoi_token_id video_token_id boa_token_id
    eoa_token_index eoa_token_id audio_token_id vision_soft_tokens_per_image""".split()
)
IMAGE_TOKEN = 258_880

FAMILY = nested(
    "Gemma4ForCausalLM",
    spellings=SPELLINGS,
    left_out=LEFT_OUT,
    image_token=IMAGE_TOKEN,
    harmless=OUTER,
)
