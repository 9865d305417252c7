"""SmolLM3: a Llama with layers that do not know positions: q and k are not rotated there."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields, show
from ..rope import PER_LAYER as LAYER_TYPES
from ..rope import RopeRules
from . import dense
from .family import Family

ROPE = RopeRules(theta=2e6)
ROTATED = "no_rope_layers"
"""Of each layer 1 if it is rotated, in spite of the name, and 0 if it is not."""


def read(fields: Fields) -> ModelConfig:
    """Layers have a window, if there is one, where they are not rotated, or where `layer_types`
    says. Published files have a `pretraining_tp` of 2, which nothing in this family follows.
    """
    fields.size("pretraining_tp", 1)
    bias, rotated = fields.boolean("attention_bias", False), rotated_layers(fields)
    has_window = fields.boolean("use_sliding_window", False) and fields.get("sliding_window")
    types = [LAYER_TYPES[bool(has_window) and not turns] for turns in rotated]
    fields = fields.defaulted({"layer_types": types, "tie_word_embeddings": True})
    return dense.read(
        fields,
        kv_heads=4,
        rope=ROPE,
        windows=dense.windows_by_layer(fields, 0),
        unrotated_layers=tuple(layer for layer, turns in enumerate(rotated) if not turns),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def rotated_layers(fields: Fields) -> list[bool]:
    """Whether each layer is rotated: all but every fourth one, unless the file says otherwise."""
    layers = fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    step, given = fields.size("no_rope_layer_interval", 4), fields.get(ROTATED)
    if given is None:
        return [(layer + 1) % step > 0 for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers:
        fields.fail(ROTATED, f"is {show(given)}, must be a list of num_hidden_layers ({layers})")
    if any(type(turns) is not int or turns not in (0, 1) for turns in given):
        fields.fail(ROTATED, f"is {show(given)}, must be a list of 1 and 0")
    return [turns == 1 for turns in given[:layers]]


FAMILY = Family(read=read, fields=frozenset({ROTATED, "no_rope_layer_interval", "pretraining_tp"}))
