"""The text model of Qwen2-VL and Qwen2.5-VL: a Qwen2 whose rotary embedding takes three positions
of each token, which of text are one (`qwen3_vl_text.py`).
"""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from . import dense
from .family import Family

ROPE = RopeRules(theta=1e6, extra=frozenset({"mrope_section"}))


def read(fields: Fields) -> ModelConfig:
    """q, k and v always have a bias, and nothing else has. Heads have the usual size."""
    fields.only("attention_bias", True)
    fields.only("mlp_bias", False)
    fields.only("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    fields = _with_usual_rope(fields).defaulted({"max_window_layers": 80})
    return dense.read(
        fields.replaced({"head_dim": None}),
        kv_heads=8,
        eps=1e-5,
        windows=dense.windows_by_layer(fields, 4096),
        rope=ROPE,
        qkv_bias=True,
    )


def _with_usual_rope(fields: Fields) -> Fields:
    """The same fields, in which a rotary embedding that is called `mrope` is called `default`."""
    found = {name: fields.get(name) for name in ("rope_parameters", "rope_scaling")}
    blocks = {name: block for name, block in found.items() if isinstance(block, dict)}
    kinds = ("rope_type", "type")
    return fields.replaced(
        {
            name: block | {kind: "default" for kind in kinds if block.get(kind) == "mrope"}
            for name, block in blocks.items()
        }
    )


# transformers 4 wrote these of the whole into its part.
FAMILY = Family(
    read=read,
    harmless=frozenset({"vision_start_token_id", "vision_end_token_id", "vision_token_id"}),
)
