"""Qwen3-MoE: a Qwen3 with experts in place of the MLP, in all layers or some."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..fields import Fields, show
from . import dense
from .family import Family
from .mixtral import experts


def sparse(fields: Fields, count: str, per_token: int) -> dict[str, Any]:
    """The experts of Qwen's mixtures, and which layers have none."""
    layers = fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    step = fields.size("decoder_sparse_step", 1)
    plain = fields.need("mlp_only_layers", [])
    if not isinstance(plain, list) or not all(
        type(layer) is int and 0 <= layer < layers for layer in plain
    ):
        fields.fail(
            "mlp_only_layers", f"is {show(plain)}, must be a list of layers from 0 to {layers - 1}"
        )
    without = tuple(i for i in range(layers) if i in plain or (i + 1) % step)
    if len(without) == layers:
        fields.refuse("mlp_only_layers", plain, "a list that leaves layers with experts")
    renormalizes = fields.boolean("norm_topk_prob", False)
    return experts(fields, count, "moe_intermediate_size", per_token, renormalizes, without)


def number_of_experts(fields: Fields) -> str:
    """The field that says how many experts there are: files have either name."""
    if fields.get("num_local_experts") is None:
        return "num_experts"
    if fields.get("num_experts") is not None:
        fields.only("num_local_experts", fields.size("num_experts"))
    return "num_local_experts"


def read(fields: Fields) -> ModelConfig:
    """Attention may have biases, and one window for all layers."""
    bias = fields.boolean("attention_bias", False)
    if not fields.boolean("use_sliding_window", False):
        fields = fields.replaced({"sliding_window": None})
    return dense.read(
        fields,
        windows=dense.one_window(fields, 4096),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        **sparse(fields, number_of_experts(fields), 8),
    )


FAMILY = Family(
    read=read,
    fields=frozenset(
        """num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
        decoder_sparse_step mlp_only_layers""".split()
    ),
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)
