"""Small random checkpoints of every supported architecture, written and read as transformers
does it (the oracle).
"""

import contextlib
import copy
import os
import warnings
from importlib.util import find_spec

import numpy as np
import pytest

from twinfer.shared.demand import Demand

GREEDY_ONLY = Demand(samplers=("greedy",), logprobs=False, prompt_logprobs=False)
"""For engines whose texts are greedy: on JAX, the other samplers compile for seconds in each, and
they have tests of their own.
"""

SMALL = dict(
    dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, page_size=16,
    num_pages=32,
)  # fmt: skip
"""Of engines in tests that are not about sizes. Those that run one checkpoint share the programs
that JAX has compiled, whatever file they are in.
"""


def small(backend: str) -> dict:
    """The options of a small engine. JAX compiles for seconds for each program: of each kind it has
    one.
    """
    return SMALL | (dict(decode_sizes=(4,), mixed_sizes=(32,)) if backend == "jax" else {})


BASE = dict(
    hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=997, max_position_embeddings=640, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
    rms_norm_eps=1e-3,  # large enough to show when it is not used
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
# Three quarters of each head of 16 are rotated, as in Phi-4-mini, whose short factors are 1.
LONGROPE = dict(
    partial_rotary_factor=0.75,
    rope_scaling=dict(
        rope_type="longrope",
        short_factor=[1.0, 1.02, 1.05, 1.1, 1.3, 1.9],
        long_factor=[1.0, 1.5, 3.0, 8.0, 20.0, 40.0],
    ),
)  # fmt: skip
# With Granite's own numbers a model this small attends to everything alike, and says its last token
# again.
GRANITE = dict(
    embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.7,
    logits_scaling=16.0,
    tie_word_embeddings=True,
)  # fmt: skip
GRANITE4 = dict(
    layer_types=["full_attention"] * 3, num_local_experts=0, shared_intermediate_size=72, position_embedding_type="rope",
)  # fmt: skip
YARN_ROPE = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=160)

STRETCHED = dict(rope_type="dynamic", rope_theta=1e4, alpha=50.0, factor=1.0)

GEMMA = dict(query_pre_attn_scalar=24, sliding_window=8, head_dim=24, vocab_size=1009)
GEMMA3 = GEMMA | dict(
    num_hidden_layers=4, layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
    rope_parameters=dict(
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ),
)  # fmt: skip
# Layers without a window have wider heads, and pages of twice the tokens.
GEMMA4 = dict(
    num_hidden_layers=6, layer_types=["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
    num_key_value_heads=4, head_dim=16, global_head_dim=32, num_global_key_value_heads=1,
    attention_k_eq_v=True, sliding_window=8, vocab_size=1009, final_logit_softcapping=3.0,
    hidden_size_per_layer_input=0, bos_token_id=1,
    rope_parameters=dict(
        full_attention=dict(
            rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6
        ),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ),
)  # fmt: skip
# The last two layers read the caches of the two before them.
GEMMA4_SMALL = GEMMA4 | dict(
    layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=2,
    num_key_value_heads=1, num_global_key_value_heads=None, attention_k_eq_v=False,
    use_double_wide_mlp=True, hidden_size_per_layer_input=8, vocab_size_per_layer_input=1009,
)  # fmt: skip
GEMMA4_EXPERTS = GEMMA4 | dict(
    enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=20,
)  # fmt: skip
GEMMA4_UNIFIED = {
    name: value
    for name, value in GEMMA4.items()
    if name not in ("hidden_size_per_layer_input", "attention_k_eq_v")
}
OLMO3 = dict(
    num_hidden_layers=4, sliding_window=8,
    rope_parameters=dict(
        full_attention=YARN_ROPE | dict(rope_theta=5e5, attention_factor=1.2),
        sliding_attention=dict(rope_type="default", rope_theta=5e5),
    ),
)  # fmt: skip
# The queries of a prompt of 100 tokens have four temperatures.
MINISTRAL3 = dict(
    head_dim=24, vocab_size=1009,
    rope_parameters=dict(
        rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=32,
        beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3,
    ),
)  # fmt: skip

# One layer is not rotated: neither the first nor the last.
SMOLLM3 = dict(no_rope_layers=[1, 0, 1], vocab_size=1009)

CWM = dict(num_hidden_layers=4, sliding_window=8, head_dim=16, bos_token_id=1)

# Chunks end within pages, and queries of a prompt of 100 tokens have several temperatures.
LLAMA4 = dict(
    num_hidden_layers=4, no_rope_layers=[1, 0, 1, 1], attention_chunk_size=24, floor_scale=9,
    attn_scale=0.7, num_local_experts=8, intermediate_size=40, intermediate_size_mlp=112,
    head_dim=16, vocab_size=1009, moe_layers=[0, 2, 3],
)  # fmt: skip

EXPERTS = dict(num_experts_per_tok=3, moe_intermediate_size=20)

LATENTS = dict(
    kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    num_key_value_heads=4,
)  # fmt: skip
LATENTS_AND_EXPERTS = LATENTS | EXPERTS | dict(n_routed_experts=8, first_k_dense_replace=1)
YARN_OF_LATENTS = YARN_ROPE | dict(mscale=0.707, mscale_all_dim=0.9)

# The pairs of a head are turned by three positions, which of text are one.
MROPE = dict(rope_type="default", rope_theta=5e4, mrope_section=[4, 2, 2], mrope_interleaved=True)
QWEN3_VL = dict(head_dim=16, vocab_size=1009, rope_parameters=MROPE)
MROPE_OF_TWO = dict(rope_type="default", rope_theta=5e4, mrope_section=[2, 3, 3])
HALF_MROPE = MROPE_OF_TWO | dict(mrope_section=[1, 2, 1], partial_rotary_factor=0.5)
QWEN2_VL = dict(vocab_size=1009, rope_parameters=MROPE_OF_TWO)
MROPE_YARN = MROPE | YARN_ROPE | dict(mrope_section=[4, 4, 4])

MODELS = {
    "llama-mha": ("Llama", dict(num_key_value_heads=4)),
    "llama3-scaled-tied": (
        "Llama",
        dict(rope_theta=5e5, rope_scaling=LLAMA3_ROPE, tie_word_embeddings=True),
    ),
    "llama-biases-head96": ("Llama", dict(attention_bias=True, mlp_bias=True, head_dim=96)),
    "llama-yarn": ("Llama", dict(rope_scaling=YARN_ROPE)),
    "mistral-window": ("Mistral", dict(sliding_window=8, vocab_size=1009)),
    "mistral-mqa": ("Mistral", dict(num_key_value_heads=1, sliding_window=None, head_dim=24)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True, rope_theta=1e6)),
    "qwen2-windows": (
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=11, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", dict(head_dim=32, vocab_size=1023)),
    "qwen3-tied-bias": ("Qwen3", dict(head_dim=16, attention_bias=True, tie_word_embeddings=True)),
    "phi3": ("Phi3", dict(num_key_value_heads=4, vocab_size=1007)),
    "phi3-window": (
        "Phi3",
        dict(sliding_window=9, partial_rotary_factor=0.5, tie_word_embeddings=True),
    ),
    "phi4-mini-short": ("Phi3", LONGROPE | dict(original_max_position_embeddings=600)),
    "phi4-mini-long": ("Phi3", LONGROPE | dict(original_max_position_embeddings=96)),
    "granite": ("Granite", GRANITE),
    "granite-odd": (
        "Granite",
        GRANITE | dict(logits_scaling=13.0, attention_bias=True, tie_word_embeddings=False),
    ),
    "mistral3": (
        "Mistral3",
        dict(head_dim=24, vocab_size=1009, sliding_window=None, rope_theta=1e9),
    ),
    "mistral3-tied-window": ("Mistral3", dict(tie_word_embeddings=True, sliding_window=8)),
    "gemma2": (
        "Gemma2",
        GEMMA | dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    ),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-images": ("Gemma3Images", GEMMA3),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-small": ("Gemma4", GEMMA4_SMALL),
    "gemma4-images": ("Gemma4Images", GEMMA4_SMALL),
    "gemma4-experts": ("Gemma4", GEMMA4_EXPERTS),
    "gemma4-experts-images": ("Gemma4Images", GEMMA4_EXPERTS),
    "gemma4-unified": ("Gemma4Unified", GEMMA4_UNIFIED),
    "glm4": ("Glm4", dict(head_dim=16)),
    "glm4-head24": ("Glm4", dict(head_dim=24, attention_bias=False, num_key_value_heads=4)),
    "olmo2": ("Olmo2", dict(attention_bias=True)),
    "olmo3": ("Olmo3", OLMO3),
    "seed-oss": ("SeedOss", dict(head_dim=24)),
    "seed-oss-biases": (
        "SeedOss",
        dict(attention_out_bias=True, mlp_bias=True, head_dim=16, tie_word_embeddings=True),
    ),
    "glm": ("Glm", dict(head_dim=16)),
    "glm-head24": (
        "Glm",
        dict(head_dim=24, attention_bias=False, tie_word_embeddings=True, num_key_value_heads=4),
    ),
    "ernie4-5": ("Ernie4_5", dict(head_dim=24)),
    "ernie4-5-biases": ("Ernie4_5", dict(head_dim=16, use_bias=True, tie_word_embeddings=False)),
    "gemma": ("Gemma", dict(head_dim=24, vocab_size=1009)),
    "gemma-biases": (
        "Gemma",
        dict(head_dim=16, attention_bias=True, tie_word_embeddings=False, num_key_value_heads=1),
    ),
    "smollm3": ("SmolLM3", SMOLLM3),
    "smollm3-windows": (
        "SmolLM3",
        SMOLLM3
        | dict(use_sliding_window=True, sliding_window=8, tie_word_embeddings=False)
        | dict(attention_bias=True, mlp_bias=True, head_dim=24),
    ),
    "exaone4": ("Exaone4", dict(num_hidden_layers=4, sliding_window=8, head_dim=24)),
    "exaone4-full": (
        "Exaone4",
        dict(sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True),
    ),
    "exaone-moe": (
        "ExaoneMoe",
        EXPERTS
        | dict(num_hidden_layers=4, sliding_window=8, head_dim=24, num_experts=8, n_group=4)
        | dict(topk_group=2),
    ),
    "exaone-moe-types": (
        "ExaoneMoe",
        EXPERTS
        | dict(sliding_window=8, num_experts=7)
        | dict(layer_types=["full_attention"] + ["sliding_attention"] * 2)
        | dict(mlp_layer_types=["sparse", "dense", "sparse"], tie_word_embeddings=True)
        | dict(num_shared_experts=2, norm_topk_prob=False, routed_scaling_factor=1.3),
    ),
    "solar-open": (
        "SolarOpen",
        EXPERTS
        | dict(n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=1.7)
        | dict(head_dim=24, vocab_size=1009),
    ),
    "solar-open-biases": (
        "SolarOpen",
        EXPERTS
        | dict(n_routed_experts=7, n_shared_experts=2, attention_bias=True, head_dim=16)
        | dict(norm_topk_prob=False, tie_word_embeddings=True),
    ),
    "hyperclovax": ("HyperCLOVAX", GRANITE | dict(logits_scaling=0.125, vocab_size=1009)),
    "hyperclovax-biases": (
        "HyperCLOVAX",
        dict(attention_bias=True, mlp_bias=True, logits_scaling=0.3, head_dim=24)
        | dict(residual_multiplier=0.7, embedding_multiplier=3.0),
    ),
    "vaultgemma": (
        "VaultGemma",
        GEMMA | dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    ),
    "arcee": ("Arcee", dict(rope_scaling=YARN_ROPE, vocab_size=1009)),
    "arcee-biases": (
        "Arcee",
        dict(attention_bias=True, mlp_bias=True, head_dim=24, tie_word_embeddings=True),
    ),
    "hunyuan": ("HunYuanDenseV1", dict(head_dim=24, vocab_size=1009)),
    "hunyuan-stretched": (
        "HunYuanDenseV1",
        dict(attention_bias=True, head_dim=16, tie_word_embeddings=True, rope_parameters=STRETCHED),
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        dict(num_experts=7, moe_topk=3, intermediate_size=40, head_dim=24, vocab_size=1009),
    ),
    "hunyuan-moe-stretched": (
        "HunYuanMoEV1",
        dict(num_experts=5, moe_topk=2, intermediate_size=40, head_dim=16, attention_bias=True)
        | dict(tie_word_embeddings=True, rope_parameters=STRETCHED),
    ),
    "ernie4-5-moe": (
        "Ernie4_5_Moe",
        dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=20, head_dim=24, vocab_size=1009)
        | dict(tie_word_embeddings=False),
    ),
    "ernie4-5-moe-few": (
        "Ernie4_5_Moe",
        dict(moe_num_experts=7, moe_k=2, moe_intermediate_size=20, moe_num_shared_experts=0)
        | dict(num_hidden_layers=5, moe_layer_interval=2, moe_layer_end_index=3),
    ),
    "llama4": ("Llama4", LLAMA4),
    "llama4-plain": (
        "Llama4",
        LLAMA4
        | dict(use_qk_norm=False, attn_temperature_tuning=False, attention_bias=True, head_dim=24)
        | dict(
            moe_layers=None,
            interleave_moe_layer_step=2,
            num_local_experts=5,
            tie_word_embeddings=True,
        )
        | dict(rope_scaling=LLAMA3_ROPE | dict(high_freq_factor=1.0)),
    ),
    "llama4-images": ("Llama4Images", LLAMA4),
    "helium": ("Helium", dict(head_dim=16, vocab_size=1009)),
    "helium-biases": (
        "Helium",
        dict(attention_bias=True, mlp_bias=True, head_dim=16, tie_word_embeddings=True),
    ),
    "ministral": (
        "Ministral",
        dict(sliding_window=8, head_dim=16)
        | dict(layer_types=["full_attention"] + ["sliding_attention"] * 2),
    ),
    "ministral-window": (
        "Ministral",
        dict(sliding_window=11, head_dim=24, tie_word_embeddings=True, vocab_size=1009),
    ),
    "cwm": ("Cwm", CWM | dict(rope_parameters=LLAMA3_ROPE | dict(rope_theta=1e6))),
    "cwm-biases": ("Cwm", CWM | dict(mlp_bias=True, head_dim=24, tie_word_embeddings=True)),
    "ministral3": ("Ministral3", MINISTRAL3),
    "ministral3-images": ("Ministral3Images", MINISTRAL3),
    "mixtral": ("Mixtral", dict(num_local_experts=6, num_experts_per_tok=2, intermediate_size=40)),
    "mixtral-window": (
        "Mixtral",
        dict(num_local_experts=3, num_experts_per_tok=3, intermediate_size=24, sliding_window=8),
    ),
    "minimax-m2": (
        "MiniMaxM2",
        dict(num_local_experts=6, num_experts_per_tok=3, intermediate_size=40, head_dim=32)
        | dict(
            rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5)
        ),
    ),
    "gpt-oss": (
        "GptOss",
        dict(num_local_experts=6, num_experts_per_tok=3, intermediate_size=64, head_dim=32)
        | dict(sliding_window=8, swiglu_limit=0.5),
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        EXPERTS
        | dict(num_experts=6, shared_expert_intermediate_size=24, decoder_sparse_step=2)
        | dict(num_hidden_layers=4, rope_theta=1e6),
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        EXPERTS | dict(num_experts=16, head_dim=32, norm_topk_prob=True, mlp_only_layers=[0]),
    ),
    "glm4-moe": (
        "Glm4Moe",
        EXPERTS
        | dict(n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=1.7)
        | dict(head_dim=16, use_qk_norm=True, first_k_dense_replace=1, num_hidden_layers=3),
    ),
    "glm4-moe-biases": (
        "Glm4Moe",
        # With 6 experts two of them tie within 4e-8 at one position of the prompt of 500 tokens.
        EXPERTS | dict(n_routed_experts=7, head_dim=24, attention_bias=True, n_shared_experts=2),
    ),
    "olmoe": ("Olmoe", dict(num_experts=7, num_experts_per_tok=3, intermediate_size=40)),
    "olmoe-biases": (
        "Olmoe",
        dict(num_experts=5, num_experts_per_tok=2, intermediate_size=40, norm_topk_prob=True)
        | dict(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=4),
    ),
    "dots1": (
        "Dots1",
        EXPERTS
        | dict(n_routed_experts=8, n_shared_experts=2, n_group=4, topk_group=2)
        | dict(routed_scaling_factor=1.7, norm_topk_prob=True, first_k_dense_replace=1),
    ),
    "dots1-windows": (
        "Dots1",
        EXPERTS
        | dict(n_routed_experts=7, n_shared_experts=1, attention_bias=True, head_dim=24)
        | dict(sliding_window=8, max_window_layers=1, tie_word_embeddings=True),
    ),
    "granitemoe": (
        "GraniteMoe",
        GRANITE | dict(num_local_experts=7, num_experts_per_tok=3, intermediate_size=40),
    ),
    "granitemoe-biases": (
        "GraniteMoe",
        GRANITE
        | dict(num_local_experts=5, num_experts_per_tok=2, intermediate_size=40, head_dim=24)
        | dict(attention_bias=True, tie_word_embeddings=False, logits_scaling=13.0),
    ),
    "granitemoehybrid": ("GraniteMoeHybrid", GRANITE | GRANITE4),
    "granitemoehybrid-still": (
        "GraniteMoeHybrid",
        GRANITE
        | GRANITE4
        | dict(position_embedding_type=None, tie_word_embeddings=False)
        | dict(attention_bias=True, logits_scaling=13.0),
    ),
    "flex-olmo": (
        "FlexOlmo",
        dict(num_experts=7, num_experts_per_tok=3, intermediate_size=40, vocab_size=1009),
    ),
    "flex-olmo-biases": (
        "FlexOlmo",
        dict(num_experts=5, num_experts_per_tok=2, intermediate_size=40, norm_topk_prob=True)
        | dict(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=4),
    ),
    "hy-v3": ("HYV3", EXPERTS | dict(num_experts=8, head_dim=24, vocab_size=1009)),
    "hy-v3-types": (
        "HYV3",
        EXPERTS
        | dict(num_experts=7, head_dim=16, attention_bias=True, num_shared_experts=2)
        | dict(mlp_layer_types=["sparse", "dense", "sparse"], router_scaling_factor=1.3)
        | dict(tie_word_embeddings=True),
    ),
    "deepseek-v2": (
        "DeepseekV2",
        # As in V2-Lite, q has no latent.
        LATENTS_AND_EXPERTS
        | dict(q_lora_rank=None, n_shared_experts=2, rope_scaling=YARN_OF_LATENTS),
    ),
    "deepseek-v2-plain": (
        "DeepseekV2",
        LATENTS_AND_EXPERTS
        | dict(first_k_dense_replace=0, n_routed_experts=7, tie_word_embeddings=True)
        | dict(vocab_size=1009),
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENTS_AND_EXPERTS
        | dict(n_group=4, topk_group=2, rope_scaling=YARN_OF_LATENTS, vocab_size=1009),
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        LATENTS_AND_EXPERTS
        | dict(n_group=1, topk_group=1, n_shared_experts=2, rope_interleave=False)
        | dict(first_k_dense_replace=2, norm_topk_prob=False, q_lora_rank=None)
        | dict(routed_scaling_factor=1.3, tie_word_embeddings=True),
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        LATENTS | EXPERTS | dict(n_routed_experts=8, n_group=4, topk_group=2, v_head_dim=24),
    ),
    "glm4-moe-lite-types": (
        "Glm4MoeLite",
        LATENTS
        | EXPERTS
        | dict(n_routed_experts=7, mlp_layer_types=["sparse", "dense", "sparse"])
        | dict(tie_word_embeddings=True, vocab_size=1009),
    ),
    "mistral4": (
        "Mistral4",
        LATENTS
        | EXPERTS
        | dict(n_routed_experts=7, vocab_size=1009)
        | dict(rope_parameters=MINISTRAL3["rope_parameters"] | dict(partial_rotary_factor=1 / 3)),
    ),
    "youtu": ("Youtu", LATENTS | dict(vocab_size=1009)),
    "youtu-yarn": (
        "Youtu",
        LATENTS | dict(q_lora_rank=None, tie_word_embeddings=False, rope_scaling=YARN_OF_LATENTS),
    ),
    "qwen3-moe-biases": (
        "Qwen3Moe",
        EXPERTS | dict(num_experts=5, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    ),
    "glm4v": ("Glm4v", dict(vocab_size=1009, rope_parameters=HALF_MROPE)),
    "glm4v-whole": (
        "Glm4v",
        dict(rope_parameters=MROPE_OF_TWO, tie_word_embeddings=True, num_key_value_heads=4),
    ),
    "glm4v-moe": (
        "Glm4vMoe",
        EXPERTS
        | dict(n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=1.7)
        | dict(head_dim=16, vocab_size=1009, rope_parameters=HALF_MROPE),
    ),
    "glm4v-moe-plain": (
        "Glm4vMoe",
        EXPERTS
        | dict(n_routed_experts=7, n_shared_experts=2, attention_bias=False, head_dim=24)
        | dict(norm_topk_prob=False, first_k_dense_replace=2, tie_word_embeddings=True)
        | dict(rope_parameters=HALF_MROPE | dict(mrope_section=[2, 3, 1])),
    ),
    "qwen2-vl": ("Qwen2VL", QWEN2_VL),
    "qwen2-5-vl": ("Qwen2_5_VL", QWEN2_VL | dict(tie_word_embeddings=True)),
    "qwen2-5-vl-windows": (
        "Qwen2_5_VL",
        dict(vocab_size=1009, use_sliding_window=True, sliding_window=11, max_window_layers=1)
        | dict(rope_parameters=YARN_ROPE | dict(rope_theta=1e5, mrope_section=[2, 3, 3])),
    ),
    "qwen3-vl": ("Qwen3VL", QWEN3_VL | dict(tie_word_embeddings=True)),
    "qwen3-vl-biases": (
        "Qwen3VL",
        QWEN3_VL | dict(head_dim=24, attention_bias=True, rope_parameters=MROPE_YARN),
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        QWEN3_VL | EXPERTS | dict(num_experts=7, mlp_only_layers=[1], tie_word_embeddings=False),
    ),
    "qwen3-vl-moe-biases": (
        "Qwen3VLMoe",
        QWEN3_VL
        | EXPERTS
        | dict(num_experts=5, head_dim=24, attention_bias=True, rope_parameters=MROPE_YARN),
    ),
}
CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Gemma4Unified": "Gemma4UnifiedTextConfig",
    "Llama4": "Llama4TextConfig",
}
"""Configs that have not the name of their model."""
PARTS = {
    "Mistral3": ("Mistral3", "mistral"),
    "Ministral3Images": ("Mistral3", "ministral3"),
    "Gemma3Images": ("Gemma3", "gemma3_text"),
    "Gemma4Images": ("Gemma4", "gemma4_text"),
    "Llama4Images": ("Llama4", "llama4_text"),
    "Glm4v": ("Glm4v", "glm4v_text"),
    "Glm4vMoe": ("Glm4vMoe", "glm4v_moe_text"),
    "Qwen2VL": ("Qwen2VL", "qwen2_vl_text"),
    "Qwen2_5_VL": ("Qwen2_5_VL", "qwen2_5_vl_text"),
    "Qwen3VL": ("Qwen3VL", "qwen3_vl_text"),
    "Qwen3VLMoe": ("Qwen3VLMoe", "qwen3_vl_moe_text"),
}
"""Families that have a text model as a part: what the whole is called, and the type of the text."""
OLD_NAMES = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""What tensors of Mistral3 are called by transformers 5 in memory -> in published files."""
SIGLIP = dict(
    model_type="siglip_vision_model", hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, image_size=64, patch_size=8,
)  # fmt: skip
VISION = dict(
    model_type="pixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16, patch_size=8,
)  # fmt: skip


def make_model(family: str, fields: dict):
    """The transformers model of a family, eager: a text model, or one that has a text model of
    `fields` as a part.
    """
    import transformers

    task, config_name = "ForCausalLM", CONFIGS.get(family, f"{family}Config")
    if family in PARTS:
        family, text = PARTS[family]
        task, config_name = "ForConditionalGeneration", f"{family}Config"
        # The last token stands for images; what transformers reads of tied embeddings is the outer
        # field.
        if family == "Gemma4":
            return _gemma4_of_parts(fields)
        if family == "Llama4":
            return _llama4_of_parts(fields)
        if family.startswith(("Qwen", "Glm")):
            return _beside_a_tower(family, text, fields)
        tied = fields.pop("tie_word_embeddings", family == "Gemma3")
        vision = dict(SIGLIP, vision_use_head=False) if family == "Gemma3" else dict(VISION)
        outer = {"tie_word_embeddings": tied, "image_token_index": fields["vocab_size"] - 1}
        outer |= {"mm_tokens_per_image": 4} if family == "Gemma3" else {}
        fields = outer | {"vision_config": vision, "text_config": fields | {"model_type": text}}
    config = getattr(transformers, config_name)(**fields)
    config.eos_token_id = None  # a default of GLM-4's that is no word of so small a vocabulary
    config._attn_implementation = "eager"
    return getattr(transformers, family + task)(config).eval()


def _gemma4_of_parts(fields: dict):
    """A Gemma 4 beside a vision tower."""
    import transformers

    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    fields = fields | {"pad_token_id": 0}  # what stands in for images in small embeddings
    config = transformers.Gemma4Config(
        text_config=fields, vision_config=vision, audio_config=None,
        image_token_id=fields["vocab_size"] - 1,
    )  # fmt: skip
    config.text_config.eos_token_id = None
    config._attn_implementation = "eager"
    return transformers.Gemma4ForConditionalGeneration(config).eval()


def _llama4_of_parts(fields: dict):
    """A Llama 4 beside a vision model."""
    import transformers

    vision = dict(
        hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        image_size=32, patch_size=8, vision_output_dim=16, projector_input_dim=16,
        projector_output_dim=16,
    )  # fmt: skip
    config = transformers.Llama4Config(
        text_config=fields, vision_config=vision, image_token_index=fields["vocab_size"] - 1,
        boi_token_index=1, eoi_token_index=2,
    )  # fmt: skip
    config.text_config.eos_token_id = None
    config._attn_implementation = "eager"
    return transformers.Llama4ForConditionalGeneration(config).eval()


def _beside_a_tower(family: str, text: str, fields: dict):
    """A Qwen or a GLM beside a vision tower. The last two tokens stand for videos and images."""
    import transformers

    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=8,
        out_hidden_size=fields["hidden_size"],
    )  # fmt: skip
    if family.startswith("Qwen3"):
        vision |= dict(deepstack_visual_indexes=[0], num_position_embeddings=16)
    if family == "Qwen2VL":
        vision = dict(depth=1, embed_dim=16, hidden_size=64, num_heads=2, patch_size=8)
    last = fields["vocab_size"] - 1
    config = getattr(transformers, f"{family}Config")(
        text_config=fields | {"model_type": text}, vision_config=vision, image_token_id=last,
        video_token_id=last - 1, tie_word_embeddings=fields.pop("tie_word_embeddings", False),
    )  # fmt: skip
    config._attn_implementation = "eager"
    return getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()


def rename_tensors(folder: str, old: bool):
    """Give the tensors of a saved Mistral3 their names in published files, or those in
    transformers' memory.
    """
    from safetensors.numpy import load_file, save_file

    path = f"{folder}/model.safetensors"
    names = OLD_NAMES if old else {published: ours for ours, published in OLD_NAMES.items()}

    def renamed(key):
        return next(
            (
                new + key.removeprefix(start)
                for start, new in names.items()
                if key.startswith(start)
            ),
            key,
        )

    save_file(
        {renamed(key): value for key, value in load_file(path).items()}, path, {"format": "pt"}
    )


def transpose_experts(folder: str):
    """Give a saved Qwen3VLMoe the experts of published files, which transformers transposes."""
    from safetensors.numpy import load_file, save_file

    path = f"{folder}/model.safetensors"
    tensors = {
        key: np.ascontiguousarray(x.swapaxes(1, 2)) if ".mlp.experts." in key else x
        for key, x in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


def flatten_qwen(folder: str):
    """Give a saved Qwen2_5_VL the config and the names of published files."""
    import json

    from safetensors.numpy import load_file, save_file

    path = f"{folder}/model.safetensors"
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    tensors = load_file(path)
    for new, old in names.items():
        tensors = {key.replace(new, old): x for key, x in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    with open(f"{folder}/config.json") as file:
        config = json.load(file)
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    old = text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    with open(f"{folder}/config.json", "w") as file:
        json.dump(old, file)


def build(name: str, folder: str, **overrides):
    """Write the random checkpoint `name` to `folder` and return the transformers model, float32
    and eager.
    """
    import torch

    family, changes = MODELS[name]
    shard_size = overrides.pop("max_shard_size", "1GB")
    torch.manual_seed(0)
    # A copy: configs keep and change the dictionaries that they are given.
    model = make_model(family, copy.deepcopy(BASE | changes | overrides))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norm weights and biases too: at their initial ones and zeros, half of the mistakes
            # would not show.
            parameter.copy_(1 + 0.2 * noise if "norm" in key else 0.1 * noise)
        if family.startswith("Gemma4"):
            # Scores have no scale of their own there: trained models have it in this weight.
            for key, parameter in model.named_parameters():
                if key.endswith("q_norm.weight"):
                    parameter *= len(parameter) ** -0.5
                # Multiplied into what is normed: as norms, and logits are divided by 8 behind it.
                if key.endswith("router.scale"):
                    parameter.copy_(8 * (1 + 2 * parameter))
                if key.endswith("per_expert_scale"):
                    parameter.copy_(1 + 4 * parameter)
        if family == "Gemma4Images":
            # transformers would take a sampled token that stands for images for one of those.
            model.model.language_model.embed_tokens.weight[-1] = 0.0
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if key.endswith("layer_scalar"):
                buffer.copy_(0.6 + 0.3 * torch.rand(1, generator=generator))
    model.save_pretrained(folder, max_shard_size=shard_size)
    if family == "Mistral3":  # which of both names are saved depends on the version of transformers
        rename_tensors(folder, old=name == "mistral3")
    if name == "qwen3-vl-moe":
        transpose_experts(folder)
    if name == "qwen2-5-vl":
        flatten_qwen(folder)
    return model


@pytest.fixture(autouse=True, scope="session")
def _programs_compiled_quickly(request):
    """Where slow tests are left out, XLA compiles the programs of engines on a CPU as in
    `interpreted.py`: else it takes longer than all that these tests do with them. In all other runs
    it compiles them as for users, and so for the slow tests that compare engines with transformers.
    """
    if request.config.getoption("markexpr") != "not slow" or find_spec("jax") is None:
        yield
        return
    from twinfer.tests.interpreted import fast_compile_options
    from twinfer.tpu import compilation, compile_options

    def options(platform):
        more = fast_compile_options() if platform == "cpu" else {}
        return compile_options.options_for(platform) | more

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "options_for", options)
        yield


@pytest.fixture
def compiled_as_for_users(monkeypatch):
    """In this process, for a test that looks at what XLA has made."""
    from twinfer.tpu import compilation, compile_options

    monkeypatch.setattr(compilation, "options_for", compile_options.options_for)


@pytest.fixture(scope="session")
def xla_flags(request):
    """What has a process that a test starts compile for CPUs as this one does."""
    if request.config.getoption("markexpr") != "not slow":
        return {}
    from twinfer.tests.interpreted import fast_compile_options

    flags = (f"--{name}={str(value).lower()}" for name, value in fast_compile_options().items())
    return {"XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """checkpoints(name) -> (folder, transformers model), made once."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = str(tmp_path_factory.mktemp("model") / name)
            made[name] = (folder, build(name, folder))
        return made[name]

    return get


def greedy(model, prompt, count, guess=()):
    """Tokens that transformers decodes greedily, and its logits at every position of prompt and
    output.

    `guess` are tokens that should be them: where each has the largest logit behind those before it,
    they are, and one call shows it. Else all are decoded, one call each.
    """
    import torch

    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        if len(guess) == count:
            logits = model(torch.tensor([[*prompt, *guess[:-1]]])).logits[0]
            if logits[len(prompt) - 1 :].argmax(-1).tolist() == list(guess):
                return list(guess), logits.numpy()
        # Without a mask, generate() takes every prompt token that equals the pad token for padding.
        mask = torch.ones_like(ids)
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        logits = model(out[:, :-1]).logits[0]
    return out[0, len(prompt) :].tolist(), logits.numpy()


@pytest.fixture(scope="session")
def oracle():
    """oracle(model, prompt, count, guess=()) -> (greedy tokens, logits)."""
    return greedy


@pytest.fixture(scope="session")
def prompts():
    """Random prompts by length."""

    def make(vocab, *lengths):
        rng = np.random.default_rng(11)
        return [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]

    return make


@pytest.fixture(scope="session")
def no_waits():
    """no_waits(): a context in which torch refuses calls that wait for the GPU."""
    import torch

    @contextlib.contextmanager
    def refuse():
        try:
            # torch says once in a process that this check is a prototype, after it has switched it
            # on. An error made of that would leave it on for all tests that follow.
            with warnings.catch_warnings(action="ignore"):
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return refuse
