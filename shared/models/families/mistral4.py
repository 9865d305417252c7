"""Mistral Small 4, on text: the latent attention of DeepSeek-V3, queries that grow with their
position, and experts whose weights are a softmax.
"""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from ..rope import ORIGINAL, PARTIAL
from ..table import ParameterTable
from . import deepseek_v2, deepseek_v3, dense, glm4_moe, latent, ministral3
from .family import Family

PLAIN, ROTATED = 64, 64
EXPERTS = {
    "experts_gate_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
}
"""What their tensors are called behind the layer."""


def read(fields: Fields) -> ModelConfig:
    """All of the rotated part is rotated: `partial_rotary_factor` says which part of q that is."""
    given = glm4_moe.mixture(fields, plain=0, per_token=4, renormalizes=True)
    plain = fields.size("qk_nope_head_dim", PLAIN)
    rotated = fields.size("qk_rope_head_dim", ROTATED)
    fields.only("rope_scaling")
    fields = fields.defaulted({"rope_parameters": _default_rope()})
    temper = ministral3.temper(fields)
    rope = dict(fields.get("rope_parameters"))
    part = rope.pop(PARTIAL, None)
    if part is not None and part != rotated / (plain + rotated):
        allowed = f"qk_rope_head_dim's part of a head, {rotated / (plain + rotated):g}"
        fields.refuse("rope_parameters", {PARTIAL: part}, allowed)
    config = latent.read(
        fields.replaced({"rope_parameters": rope}),
        rank=256,
        query_rank=1024,
        plain=PLAIN,
        rope=ministral3.ROPE,
        head_dim=(plain + rotated,),
        temper=temper,
        **given,
    )
    return deepseek_v2.with_shared(fields, config, 1)


def _default_rope() -> dict[str, Any]:
    given = {"rope_theta": 10_000.0, "factor": 128.0, ORIGINAL: 8192}
    return ministral3.DEFAULT_ROPE | given


def parameters(config: ModelConfig) -> ParameterTable:
    """The names of GLM-4.5, with those of latents; all experts of a layer are one tensor."""
    return dense.with_stacked_experts(deepseek_v2.parameters(config), config.num_experts, EXPERTS)


FAMILY = Family(
    read=read,
    model=latent.model,
    parameters=parameters,
    fields=deepseek_v3.FIELDS - {"n_group", "topk_group", "routed_scaling_factor"},
    fixed={
        "n_group": (1,),
        "topk_group": (1,),
        "routed_scaling_factor": (1.0,),
    },
    harmless=deepseek_v3.HARMLESS,
)
