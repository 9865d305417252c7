"""Mistral Small 3.1 and 3.2, Ministral 3: a Mistral or a Ministral 3 beside a vision tower. That
alone runs, on prompts of text.
"""

from __future__ import annotations

from .nested import LEFT_OUT, SPELLINGS, nested

FAMILY = nested(
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    spellings=SPELLINGS,
    left_out=LEFT_OUT,
    image_token=10,
    harmless=frozenset(
        """vision_config vision_feature_layer spatial_merge_size projector_hidden_act
        multimodal_projector_bias""".split()
    ),
)
