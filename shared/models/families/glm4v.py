"""GLM-4.1V: a GLM-4-0414 beside a vision tower. The text model alone runs, on prompts of text."""

from __future__ import annotations

from .family import Family
from .glm4v_text import BORDERS
from .nested import SPELLINGS, nested
from .qwen3_vl import LEFT_OUT, OUTER


def family(text: str, image_token: int) -> Family:
    """Of the models with this text model. The token of videos is the one behind that of images."""
    return nested(
        text,
        spellings=SPELLINGS[:1],
        left_out=LEFT_OUT,
        image_token=image_token,
        video_token=image_token + 1,
        harmless=OUTER | BORDERS,
    )


FAMILY = family("Glm4vTextModel", 151_343)
