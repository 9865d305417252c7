"""ERNIE 4.5 with experts: chosen by a softmax plus a bias, beside some that all tokens go through.
Layers that predict further tokens do not run.
"""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint import STACKED
from ..config import ModelConfig
from ..fields import Fields
from ..table import ParameterTable
from . import dense, ernie4_5, glm4_moe
from .family import Family

NAMES = dense.Names(
    router_bias=f"mlp.moe_statics.e_score_correction_bias{STACKED}1",
    shared_expert="mlp.shared_experts",
)
"""The bias is a row of a matrix that has no other."""


def read(fields: Fields) -> ModelConfig:
    """There are no biases of projections. Weights of the chosen experts add up to 1."""
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    count, size = fields.size("moe_num_experts", 64), fields.size("moe_intermediate_size", 1536)
    return dense.read(
        fields.defaulted({"tie_word_embeddings": True}),
        kv_heads=4,
        eps=1e-5,
        rope=ernie4_5.ROPE,
        num_experts=count,
        experts_per_token=fields.size("moe_k", 6, high=count),
        expert_size=size,
        dense_layers=_dense_layers(fields),
        expert_score="biased",
        renormalizes_experts=True,
        shared_expert_size=fields.size("moe_num_shared_experts", 2, low=0) * size,
    )


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Layers without experts: those in front of the first that has some, behind the last one, and
    between them all but every `moe_layer_interval`-th.
    """
    layers = fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    step = fields.size("moe_layer_interval", 1)
    first = fields.size("moe_layer_start_index", 1, low=0)
    last = fields.size("moe_layer_end_index", -1, low=-1)
    last = layers - 1 if last == -1 else last
    found = tuple(
        layer for layer in range(layers) if (layer + 1) % step or not first <= layer <= last
    )
    if len(found) == layers:
        fields.refuse("moe_layer_start_index", first, "a number that leaves layers with experts")
    return found


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names. Rows of q and k are put where halves are turned, not pairs."""
    table = dense.parameters(config, NAMES, pairs=True)
    ignored = (*table.ignored, "mtp_*", "model.mtp_*")
    return replace(table, ignored=ignored)


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset(
        """moe_num_experts moe_k moe_intermediate_size moe_num_shared_experts moe_layer_interval
        moe_layer_start_index moe_layer_end_index""".split()
    ),
    fixed={
        "use_bias": (False,),
        "moe_norm_min": (1e-12,),
        "moe_use_aux_free": (True,),
        "moe_gate": ("topk", "top2_fused"),
        "compression_ratio": (1.0,),
        glm4_moe.PREDICTS: (0, 1),
    },
    harmless=frozenset({"moe_capacity", "output_router_logits", "router_aux_loss_coef"}),
)
