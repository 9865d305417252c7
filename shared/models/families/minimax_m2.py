"""MiniMax M2: experts in all layers, chosen by sigmoids plus a bias; norms of q and k over all
heads; a part of each head rotated. Modules that predict further tokens do not run.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..fields import Fields, show
from ..rope import RopeRules
from ..table import ParameterTable
from . import dense
from .family import Family
from .mixtral import experts

NAMES = dense.Names(
    router="block_sparse_moe.gate",
    router_bias="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts",
    expert=("w1", "w3", "w2"),
)
ROPE = RopeRules(partial=True, part=1.0, theta=5e6)
TYPES = "attn_type_list"


def read(fields: Fields) -> ModelConfig:
    """Published files say of rotary embeddings how many entries of a head are rotated."""
    types = fields.get(TYPES)
    if types is not None and (not isinstance(types, list) or any(kind != 1 for kind in types)):
        fields.refuse(TYPES, show(types), "1 for every layer: attention to everything")
    fields.only("attention_bias", False)
    if fields.get("rotary_dim") is not None:
        size = fields.size("head_dim", 128)
        part = fields.size("rotary_dim", high=size) / size
        fields = fields.defaulted({"partial_rotary_factor": part})
    config = dense.read(
        fields,
        kv_heads=8,
        head_dim=128,
        rope=ROPE,
        wide_qk_norm=True,
        **experts(fields, "num_local_experts", "intermediate_size", 8, True),
    )
    return replace(config, expert_score="sigmoid")


def parameters(config: ModelConfig) -> ParameterTable:
    """Experts under names of their own. What predicts further tokens is ignored by name."""
    table = dense.parameters(config, NAMES)
    return replace(table, ignored=(*table.ignored, "model.mtp.*", "mtp.*"))


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset(
        {"num_local_experts", "num_experts_per_tok", "rotary_dim", "partial_rotary_factor", TYPES}
    ),
    fixed={
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
    },
    harmless=frozenset(
        """output_router_logits router_aux_loss_coef router_jitter_noise use_mtp num_mtp_modules
        mtp_transformer_layers mlp_intermediate_size layernorm_full_attention_beta
        layernorm_linear_attention_beta layernorm_mlp_beta""".split()
    ),
)
