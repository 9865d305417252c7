"""HunYuan with experts: in all layers, and one more that all tokens go through."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields, show
from ..table import ParameterTable
from . import dense, hunyuan_v1_dense
from .family import Family

NAMES = dense.Names(
    qk_norms=hunyuan_v1_dense.NORMS, router="mlp.gate.wg", shared_expert="mlp.shared_mlp"
)


def read(fields: Fields) -> ModelConfig:
    """Experts are as wide as the MLP of all tokens. Weights of the chosen add up to 1."""
    size = fields.size("intermediate_size")
    count = _same(fields, "num_experts", 1)
    for other, one in (("num_local_experts", count), ("moe_intermediate_size", size)):
        fields.only(other, one, [one] * _layers(fields))
    fields.only("num_shared_expert", 1, [1] * _layers(fields))
    chosen = _same(fields, "moe_topk", 1)
    fields.only("num_experts_per_tok", chosen)
    if chosen > count:
        fields.fail("moe_topk", f"is {chosen}, must be at most num_experts ({count})")
    return hunyuan_v1_dense.numbers(
        fields,
        num_experts=count,
        experts_per_token=chosen,
        expert_size=size,
        renormalizes_experts=True,
        shared_expert_size=size,
    )


def _layers(fields: Fields) -> int:
    return fields.size("num_hidden_layers", high=dense.MAX_LAYERS)


def _same(fields: Fields, name: str, default: int) -> int:
    """A number of all layers: one, or a list that has it for each."""
    value: Any = fields.get(name)
    if not isinstance(value, list):
        return fields.size(name, default)
    if len(value) != _layers(fields) or len({repr(one) for one in value}) != 1:
        fields.refuse(name, show(value), "one number, or the same of each layer")
    return fields.replaced({name: value[0]}).size(name)


def parameters(config: ModelConfig) -> ParameterTable:
    """Norms of heads, the router and the shared expert under names of their own."""
    return dense.parameters(config, NAMES)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=hunyuan_v1_dense.FAMILY.fields
    | frozenset(
        """num_experts num_local_experts moe_topk num_experts_per_tok moe_intermediate_size
        num_shared_expert""".split()
    ),
    fixed={
        **hunyuan_v1_dense.FIXED,
        "use_mixed_mlp_moe": (True,),
        "moe_layer_num_skipped": (0,),
        "norm_topk_prob": (True,),
        "routed_scaling_factor": (1.0,),
        "group_limited_greedy": (False,),
        "moe_drop_tokens": (False,),
        "moe_random_routing_dropped_token": (False,),
    },
    harmless=hunyuan_v1_dense.FAMILY.harmless | {"output_router_logits", "capacity_factor"},
)
