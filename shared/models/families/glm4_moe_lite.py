"""GLM-4.7-Flash: the latent attention of DeepSeek-V3 and the experts of GLM-4.5."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from . import deepseek_v3, dense, glm4_moe, latent
from .family import Family

KINDS = ("dense", "sparse")


def read(fields: Fields) -> ModelConfig:
    """Layers with experts are listed, or are all but the first one."""
    given: dict[str, Any] = glm4_moe.mixture(fields, plain=1, per_token=4, renormalizes=True)
    dense_layers = _dense_layers(fields, given["dense_layers"])
    config = latent.read(
        fields,
        query_rank=768,
        plain=192,
        v_dim=256,
        eps=1e-5,
        rope=deepseek_v3.ROPE,
        **given | {"dense_layers": dense_layers},
    )
    return glm4_moe.by_sigmoids(fields, config, shared=1, scale=1.8)


def _dense_layers(fields: Fields, in_front: tuple[int, ...]) -> tuple[int, ...]:
    """What `mlp_layer_types` says, with which `first_k_dense_replace` has to agree."""
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        # Nothing else is read where the types are absent.
        fields.only("first_k_dense_replace", 1)
        return (0,)
    layers = fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(KINDS):
        fields.refuse("mlp_layer_types", kinds, f"{layers} of {' and '.join(KINDS)}")
    listed = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    if fields.get("first_k_dense_replace") is not None and listed != in_front:
        fields.refuse("first_k_dense_replace", len(in_front), "what mlp_layer_types says")
    return listed


FAMILY = Family(
    read=read,
    model=latent.model,
    parameters=deepseek_v3.parameters,
    fields=deepseek_v3.FIELDS | {"mlp_layer_types"},
    fixed=deepseek_v3.FAMILY.fixed,
    harmless=deepseek_v3.HARMLESS,
)
