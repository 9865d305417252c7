"""EXAONE with experts: the attention of EXAONE 4 behind norms, and the experts of GLM-4.5. Layers
that predict further tokens do not run.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..fields import Fields, show
from ..table import Parameter, ParameterTable
from . import dense, exaone4, glm4_moe
from .family import Family
from .mixtral import experts

TYPES = "mlp_layer_types"
SORTS = ("dense", "sparse")
PUBLISHED_BIAS = "mlp.e_score_correction_bias"


def read(fields: Fields) -> ModelConfig:
    """There are no biases."""
    fields.only("attention_bias", False)
    renormalizes = fields.boolean("norm_topk_prob", True)
    config = dense.read(
        fields,
        kv_heads=32,
        eps=1e-5,
        qk_norm=True,
        **exaone4.windows(fields),
        **experts(
            fields, "num_experts", "moe_intermediate_size", 8, renormalizes, _dense_layers(fields)
        ),
    )
    return glm4_moe.by_sigmoids(fields, config, 1, count="num_shared_experts", scale=2.5)


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Layers without experts: those that `mlp_layer_types` says, or the first few. The first files
    have other names for both, which nothing reads: they have to agree.
    """
    layers = fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    front = fields.size("first_k_dense_replace", 1, high=layers - 1, low=0)
    fields.only("first_last_k_dense_replace", front)
    found = dense_by_types(fields, layers)
    found = tuple(range(front)) if found is None else found
    fields.only("is_moe_layer", [layer not in found for layer in range(layers)])
    return found


def dense_by_types(fields: Fields, layers: int) -> tuple[int, ...] | None:
    """Layers without experts, as `mlp_layer_types` says; None where it says nothing."""
    types = fields.get(TYPES)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or any(t not in SORTS for t in types):
        rule = f"must be a list of num_hidden_layers ({layers}) names: {' and '.join(SORTS)}"
        fields.fail(TYPES, f"is {show(types)}, {rule}")
    if "sparse" not in types:
        fields.refuse(TYPES, show(types), "a list that leaves layers with experts")
    return tuple(layer for layer, sort in enumerate(types) if sort == "dense")


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names. Published files have the bias of the router beside it, not in it."""
    table = dense.parameters(config, glm4_moe.NAMES)
    found = tuple(map(_or_beside, table))
    return replace(table, parameters=found, ignored=(*table.ignored, "mtp.*"))


def _or_beside(parameter: Parameter) -> Parameter:
    if parameter.name != "router_bias":
        return parameter
    (part,) = parameter.parts
    beside = replace(part, key=dense.LAYER + PUBLISHED_BIAS)
    return dense.or_without_model(replace(parameter, alternatives=((beside,),)))


FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset(
        """num_experts num_shared_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
        first_k_dense_replace mlp_layer_types first_last_k_dense_replace is_moe_layer n_group
        topk_group routed_scaling_factor""".split()
    )
    | {exaone4.PATTERN},
    fixed={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        glm4_moe.PREDICTS: (0, 1),
    },
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)
