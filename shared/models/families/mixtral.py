"""Mixtral: a Mistral with experts in place of the MLP."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from ..table import ParameterTable
from . import dense
from .family import Family

NAMES = dense.Names(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert=("w1", "w3", "w2"),
)
ROPE = RopeRules(theta=1e6)


def experts(
    fields: Fields,
    count: str,
    size: str,
    per_token: int | None,
    renormalizes: bool,
    layers: tuple[int, ...] = (),
) -> dict[str, Any]:
    """What mixtures read alike: `count` and `size` are the fields of how many experts there are
    and of their width, `per_token` how many are chosen by default, `layers` those without experts.
    """
    fields.only("mlp_bias", False)
    number = fields.size(count)
    chosen = fields.size("num_experts_per_tok", per_token, high=number)
    return {
        "num_experts": number,
        "experts_per_token": chosen,
        "expert_size": fields.size(size),
        "renormalizes_experts": renormalizes,
        "dense_layers": layers,
    }


def read(fields: Fields) -> ModelConfig:
    """One window for all layers, or none. Weights of the chosen experts add up to 1."""
    fields.only("attention_bias", False)
    return dense.read(
        fields,
        kv_heads=8,
        windows=dense.one_window(fields, None),
        eps=1e-5,
        rope=ROPE,
        **experts(fields, "num_local_experts", "intermediate_size", 2, True),
    )


def parameters(config: ModelConfig) -> ParameterTable:
    """Experts under names of their own."""
    return dense.parameters(config, NAMES)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset({"num_local_experts", "num_experts_per_tok"}),
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"}),
)
