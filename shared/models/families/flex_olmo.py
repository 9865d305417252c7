"""FlexOlmo: an OLMo 2 with experts in place of the MLP."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from . import dense, olmo2, olmoe, qwen3_moe
from .family import Family
from .mixtral import experts

ROPE = RopeRules(theta=500_000.0)


def read(fields: Fields) -> ModelConfig:
    """Attention may have biases."""
    renormalizes = fields.boolean("norm_topk_prob", False)
    given = olmo2.numbers(fields) | {"eps": 1e-6, "rope": ROPE}
    count = qwen3_moe.number_of_experts(fields)
    return dense.read(
        fields, **given, **experts(fields, count, "intermediate_size", 5, renormalizes)
    )


FAMILY = Family(
    read=read,
    model=olmo2.model,
    parameters=olmo2.parameters,
    fields=olmoe.FAMILY.fields,
    harmless=olmoe.FAMILY.harmless,
)
