"""Mistral Small 3.1 and 3.2: a Mistral beside a vision tower. The Mistral alone runs, on prompts
of text.
"""

from __future__ import annotations

from .nested import nested

FAMILY = nested(
    "MistralForCausalLM",
    spellings=(
        {"model.": "model.language_model.", "lm_head.": "lm_head."},
        # published files
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    ),
    left_out={
        "vision tower": ("model.vision_tower.*", "vision_tower.*"),
        "multi-modal projector": ("model.multi_modal_projector.*", "multi_modal_projector.*"),
    },
    image_token=10,
    harmless=frozenset(
        """vision_config vision_feature_layer spatial_merge_size projector_hidden_act
        multimodal_projector_bias""".split()
    ),
)
