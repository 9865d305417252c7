"""The rows of the harness: 26 configurations of 24 families, tiny, with every number at a value that
shows when it is ignored; and transformers' models of them with random weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinfer.ops.declare import Array

from . import families_dense as dense
from . import families_experts as experts
from .families_gemma4 import gemma4
from .families_latent import latent
from .families_recurrent import granite_hybrid, nemotron_h, qwen_hybrid
from .tensors import Built, Tensors

VOCAB = 160
EPS = 1e-3
"""Of norms: large enough to show when it is not used."""
SHORT = 0.5
"""Norms of q and k, where they would be 1: attention of tiny models is so sharp that float32 tells
little of it.
"""
BASE = dict(
    vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, rms_norm_eps=EPS,
)  # fmt: skip
THETA = 10_000.0
YARN = dict(
    rope_type="yarn", rope_theta=THETA, factor=8.0, original_max_position_embeddings=32,
    beta_fast=32.0, beta_slow=1.0,
)  # fmt: skip
YARN_MSCALE = YARN | dict(mscale=1.0, mscale_all_dim=1.0)
TWO_ROPES = dict(
    sliding_attention=dict(rope_type="default", rope_theta=THETA),
    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
)
EXPERTS = dict(num_experts_per_tok=3, moe_intermediate_size=32)
GROUPS = dict(n_group=4, topk_group=2)
LATENT = EXPERTS | dict(
    num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=16, n_shared_experts=1,
)  # fmt: skip
DELTA_NET = dict(
    num_hidden_layers=4, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip
DELTA_NET_EXPERTS = DELTA_NET | EXPERTS | dict(num_experts=8, shared_expert_intermediate_size=32)
GEMMA4 = dict(
    head_dim=32, num_hidden_layers=6, sliding_window=8, hidden_size_per_layer_input=0,
    final_logit_softcapping=30.0,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A configuration: transformers' model type, its fields beside BASE, and the reference."""

    model_type: str
    build: Callable[[Any, Tensors], Built]
    fields: Mapping[str, Any]


ROWS = {
    "gemma2": Row(
        "gemma2",
        dense.gemma,
        dict(head_dim=32, num_hidden_layers=4, sliding_window=8, query_pre_attn_scalar=24),
    ),
    "gemma3": Row(
        "gemma3_text",
        dense.gemma,
        dict(
            head_dim=32, num_hidden_layers=7, sliding_window=8, query_pre_attn_scalar=24,
            rope_parameters=TWO_ROPES,
        ),
    ),
    "gemma4-31b": Row(
        "gemma4_text",
        gemma4,
        GEMMA4
        | dict(global_head_dim=48, num_global_key_value_heads=1, attention_k_eq_v=True),
    ),
    "gemma4-e2b": Row(
        "gemma4_text",
        gemma4,
        GEMMA4
        | dict(
            global_head_dim=64, num_hidden_layers=10, num_kv_shared_layers=5,
            layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
            use_double_wide_mlp=True, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB,
        ),
    ),
    "gemma4-26b": Row(
        "gemma4_text",
        gemma4,
        GEMMA4
        | dict(
            global_head_dim=64, num_global_key_value_heads=1, attention_k_eq_v=True,
            enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=32,
        ),
    ),
    "phi3": Row("phi3", dense.phi3, dict(num_hidden_layers=2, sliding_window=16)),
    "glm4": Row("glm4", dense.glm4, dict(num_hidden_layers=2, head_dim=16, attention_bias=True)),
    "olmo2": Row("olmo2", dense.olmo, dict(num_hidden_layers=2)),
    "olmo3": Row("olmo3", dense.olmo, dict(num_hidden_layers=4, sliding_window=8)),
    "ministral3": Row(
        "ministral3",
        dense.ministral3,
        dict(
            num_hidden_layers=2, head_dim=32,
            rope_parameters=YARN_MSCALE | dict(llama_4_scaling_beta=0.1),
        ),
    ),
    "mixtral": Row(
        "mixtral",
        experts.mixture,
        dict(num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2),
    ),
    "qwen2-moe": Row(
        "qwen2_moe",
        experts.mixture,
        EXPERTS | dict(num_hidden_layers=2, num_experts=8, shared_expert_intermediate_size=48),
    ),
    "qwen3-moe": Row(
        "qwen3_moe",
        experts.mixture,
        EXPERTS
        | dict(num_hidden_layers=2, num_local_experts=16, head_dim=32, norm_topk_prob=True),
    ),
    "glm4-moe": Row(
        "glm4_moe",
        experts.mixture,
        EXPERTS
        | GROUPS
        | dict(
            num_hidden_layers=3, head_dim=32, use_qk_norm=True, n_routed_experts=16,
            routed_scaling_factor=1.7,
        ),
    ),
    "minimax-m2": Row(
        "minimax_m2",
        experts.mixture,
        dict(num_hidden_layers=2, head_dim=32, num_local_experts=8, num_experts_per_tok=3),
    ),
    "gpt-oss": Row(
        "gpt_oss",
        experts.gpt_oss,
        dict(
            num_hidden_layers=4, head_dim=16, sliding_window=8, num_local_experts=8,
            num_experts_per_tok=2, rope_parameters=YARN | dict(truncate=False),
        ),
    ),
    "llama4": Row(
        "llama4_text",
        experts.llama4,
        dict(
            num_hidden_layers=8, head_dim=16, attention_chunk_size=8, floor_scale=8,
            intermediate_size=48, intermediate_size_mlp=96, num_local_experts=4,
            num_experts_per_tok=1, interleave_moe_layer_step=2,
        ),
    ),
    "deepseek-v2": Row(
        "deepseek_v2",
        latent,
        LATENT
        | GROUPS
        | dict(
            num_hidden_layers=3, first_k_dense_replace=1, topk_method="group_limited_greedy",
            routed_scaling_factor=2.0,
            rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707),
        ),
    ),
    "deepseek-v3": Row(
        "deepseek_v3",
        latent,
        LATENT
        | GROUPS
        | dict(num_hidden_layers=3, first_k_dense_replace=1, rope_parameters=YARN_MSCALE),
    ),
    "glm4-moe-lite": Row("glm4_moe_lite", latent, LATENT | dict(num_hidden_layers=3)),
    "mistral4": Row(
        "mistral4",
        latent,
        LATENT
        | dict(
            num_hidden_layers=2,
            rope_parameters=YARN_MSCALE
            | dict(llama_4_scaling_beta=0.1, partial_rotary_factor=1 / 3),
        ),
    ),
    "qwen3-next": Row("qwen3_next", qwen_hybrid, DELTA_NET_EXPERTS),
    "qwen3.5": Row("qwen3_5_text", qwen_hybrid, DELTA_NET),
    "qwen3.5-moe": Row("qwen3_5_moe_text", qwen_hybrid, DELTA_NET_EXPERTS),
    "nemotron-h": Row(
        "nemotron_h",
        nemotron_h,
        dict(
            layers_block_type=[
                "linear_attention", "moe", "full_attention", "mlp", "linear_attention",
            ],
            head_dim=32, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16,
            chunk_size=16, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=48, moe_latent_size=32,
            layer_norm_epsilon=EPS,
        ),
    ),
    "granite-hybrid": Row(
        "granitemoehybrid",
        granite_hybrid,
        dict(
            num_hidden_layers=4,
            layer_types=[
                "linear_attention", "linear_attention", "full_attention", "linear_attention",
            ],
            mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16,
            mamba_chunk_size=16, num_local_experts=8, num_experts_per_tok=2,
            shared_intermediate_size=48, embedding_multiplier=3.0, logits_scaling=2.0,
            residual_multiplier=0.3, attention_multiplier=0.2,
        ),
    ),
}  # fmt: skip


def transformers_model(row: Row) -> Any:
    """transformers' model of a row in float32, eager, with random weights."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    # A copy: configs keep and change the dictionaries that they are given.
    config = CONFIG_MAPPING[row.model_type](**copy.deepcopy({**BASE, **row.fields}))
    config._attn_implementation = config._experts_implementation = "eager"
    model_class: Any
    if row.model_type == "mistral4":  # not among the automatic ones of text models
        from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

        model_class = Mistral4ForCausalLM
    else:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):  # of Nemotron's Mamba layers: no clamp
            module.time_step_limit = (0.0, float("inf"))
    randomize(model)
    return model


def randomize(model: Any) -> None:
    """Random matrices, and norms, biases and buffers away from their ones and zeros. Decays stay
    as they are: others forget everything.
    """
    import torch

    buffers = [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if "correction" in name or "scalar" in name
    ]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *buffers]:
            if "A_log" in name:
                continue
            noise = torch.randn(parameter.shape)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(SHORT)
            if parameter.ndim < 2:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def transformers_logits(model: Any, ids: Array) -> Array:
    """[tok vocab] of one sequence."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor(ids)[None]).logits[0].float().numpy()
    return logits


def prompt(length: int) -> Array:
    """Token ids [length], none of them special."""
    return np.random.default_rng(1).integers(3, VOCAB, length)
