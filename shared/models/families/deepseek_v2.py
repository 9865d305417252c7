"""DeepSeek-V2-Lite: latent attention, and experts whose weights are a softmax over all of them.

DeepSeek-V2, which chooses groups of experts first, is refused by its `topk_method`.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..fields import Fields
from ..table import ParameterTable
from . import deepseek_v3, glm4_moe, latent
from .family import Family


def read(fields: Fields) -> ModelConfig:
    """Weights of experts are not renormalised: transformers has it so whatever the config says."""
    fields.only("norm_topk_prob", False)
    given = glm4_moe.mixture(fields, plain=0, per_token=None, renormalizes=False)
    config = latent.read(fields, rope=deepseek_v3.ROPE, **given)
    return with_shared(fields, config, 2)


def with_shared(fields: Fields, config: ModelConfig, default: int) -> ModelConfig:
    """The same model with experts that all tokens go through."""
    count = fields.size("n_shared_experts", default)
    return replace(config, shared_expert_size=count * config.expert_size)


def parameters(config: ModelConfig) -> ParameterTable:
    """The names of GLM-4.5, with those of latents."""
    return latent.parameters(config, glm4_moe.NAMES)


FAMILY = Family(
    read=read,
    model=latent.model,
    parameters=parameters,
    fields=deepseek_v3.FIELDS - {"n_group", "topk_group", "routed_scaling_factor"},
    fixed={
        "scoring_func": ("softmax",),
        "topk_method": ("greedy",),
        "n_group": (1,),
        "topk_group": (1,),
        "moe_layer_freq": (1,),
        "routed_scaling_factor": (1.0,),
    },
    harmless=deepseek_v3.HARMLESS,
)
