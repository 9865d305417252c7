"""OLMoE: experts in all layers, and norms of q and k over all heads."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from . import dense, qwen3_moe
from .family import Family
from .mixtral import experts


def read(fields: Fields) -> ModelConfig:
    """Attention may have biases. Norms of q have as many entries as the stream."""
    heads = fields.size("num_attention_heads")
    fields.only("head_dim", fields.size("hidden_size") // heads)
    bias = fields.boolean("attention_bias", False)
    renormalizes = fields.boolean("norm_topk_prob", False)
    count = qwen3_moe.number_of_experts(fields)
    return dense.read(
        fields,
        kv_heads=heads,
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        wide_qk_norm=True,
        **experts(fields, count, "intermediate_size", 8, renormalizes),
    )


FAMILY = Family(
    read=read,
    fields=frozenset({"num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"}),
    fixed={"clip_qkv": ()},
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)
