"""DeepSeek-V3 and R1: latent attention, and the experts of GLM-4.5. Layers behind the last one,
which predict further tokens, do not run.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..fields import Fields
from ..rope import RopeRules
from ..table import ParameterTable
from . import glm4_moe, latent
from .family import Family

ROPE = RopeRules()
PREDICTS = ("num_nextn_predict_layers", "num_mtp_layers")


def read(fields: Fields) -> ModelConfig:
    """Experts in groups, chosen by sigmoids, in all layers but some in front."""
    given = glm4_moe.mixture(fields, plain=3, per_token=8, renormalizes=True)
    config = latent.read(fields, rope=ROPE, **given)
    groups = fields.defaulted({"n_group": 8, "topk_group": 4})
    return glm4_moe.by_sigmoids(groups, config, shared=1, scale=2.5)


def parameters(config: ModelConfig) -> ParameterTable:
    """The names of GLM-4.5, with those of latents."""
    return with_prediction_ignored(config, latent.parameters(config, glm4_moe.NAMES))


def with_prediction_ignored(config: ModelConfig, table: ParameterTable) -> ParameterTable:
    """Tensors of the layer that predicts further tokens are ignored by name."""
    return replace(table, ignored_beside=glm4_moe.parameters_behind(config))


FIELDS = latent.FIELDS | frozenset(
    """n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size
    norm_topk_prob first_k_dense_replace n_group topk_group routed_scaling_factor""".split()
)
HARMLESS = frozenset(
    "output_router_logits aux_loss_alpha seq_aux ep_size router_aux_loss_coef".split()
)
"""Of training, and of how it was dealt out."""

FAMILY = Family(
    read=read,
    model=latent.model,
    parameters=parameters,
    fields=FIELDS,
    fixed={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        **{name: (0, 1) for name in PREDICTS},
    },
    harmless=HARMLESS,
)
