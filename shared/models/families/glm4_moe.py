"""GLM-4.5: experts that are chosen by sigmoids, one more that all tokens go through, and a few
layers without any in front. Layers behind the last one, which predict further tokens, do not run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from ..table import ParameterTable
from . import dense
from .family import Family
from .mixtral import experts

NAMES = dense.Names(shared_expert="mlp.shared_experts")
ROPE = RopeRules(partial=True, part=0.5)
PREDICTS = "num_nextn_predict_layers"


def read(fields: Fields) -> ModelConfig:
    """q, k and v may have biases, heads of q and k norms."""
    config = dense.read(
        fields,
        eps=1e-5,
        rope=ROPE,
        qkv_bias=fields.boolean("attention_bias", False),
        qk_norm=fields.boolean("use_qk_norm", False),
        **mixture(fields, plain=1, per_token=8, renormalizes=True),
    )
    return by_sigmoids(fields, config, shared=1)


def mixture(
    fields: Fields, plain: int, per_token: int | None, renormalizes: bool
) -> dict[str, Any]:
    """The experts, and which layers in front have none. What is given are defaults."""
    layers = fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    front = fields.size("first_k_dense_replace", plain, high=layers - 1, low=0)
    return experts(
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        per_token,
        fields.boolean("norm_topk_prob", renormalizes),
        tuple(range(front)),
    )


def by_sigmoids(
    fields: Fields,
    config: ModelConfig,
    shared: int | None,
    *,
    count: str = "n_shared_experts",
    scale: float = 1.0,
) -> ModelConfig:
    """The same model, whose experts are chosen by sigmoids, beside some that all tokens go through:
    the field `count` says how many. `shared` and `scale` are defaults.
    """
    return replace(
        config,
        shared_expert_size=fields.size(count, shared) * config.expert_size,
        expert_score="sigmoid",
        expert_groups=groups(fields, config),
        expert_scale=fields.number("routed_scaling_factor", scale, above=True),
    )


def groups(fields: Fields, config: ModelConfig) -> tuple[int, int]:
    """How many groups the experts stand in, and how many of them are chosen from."""
    count = fields.size("n_group", 1, high=config.num_experts)
    kept = fields.size("topk_group", 1, high=count)
    size = config.num_experts // count
    if config.num_experts % count or (count > 1 and size < 2):
        fields.fail(
            "n_group",
            f"is {count}: groups of {config.num_experts} experts must be equal, of 2 or more",
        )
    if kept * size < config.experts_per_token:
        fields.fail(
            "topk_group",
            f"is {kept}: {kept * size} experts are left, of which num_experts_per_tok "
            f"({config.experts_per_token}) are chosen",
        )
    return count, kept


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names. The layer that predicts further tokens is ignored by name: the one behind
    the last that has a norm for embeddings.
    """
    return replace(dense.parameters(config, NAMES), ignored_beside=parameters_behind(config))


def parameters_behind(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Patterns of the tensors behind the last layer, and what is there if they may be ignored."""
    layers = (f"{start}layers.{config.num_layers}." for start in ("model.", ""))
    return tuple((f"{layer}*", f"{layer}enorm.weight") for layer in layers)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset(
        """n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size
        norm_topk_prob first_k_dense_replace n_group topk_group routed_scaling_factor use_qk_norm
        partial_rotary_factor""".split()
    ),
    fixed={PREDICTS: (0, 1)},
    harmless=frozenset({"output_router_logits"}),
)
