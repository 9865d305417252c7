"""The config.json of well-known checkpoints is read, and its model has as many parameters as they
have.

All are from memory, with every field that the published files are known to have. The numbers of
parameters are the published ones; of EXAONE 4.0 32B, K-EXAONE, CWM, Granite, Solar Open, HyperCLOVA
and Helium they are ours, which agree with what is said of them to three digits.
"""

import pytest

from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.decoder import parameters_of
from twinfer.shared.models.table import parameter_count

PUBLISHED = {
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (
        {
            "architectures": ["SeedOssForCausalLM"], "attention_bias": True,
            "attention_dropout": 0.1, "attention_out_bias": False, "bos_token_id": 0,
            "pad_token_id": 1, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648,
            "max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss",
            "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8,
            "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.55.0", "use_cache": True, "vocab_size": 155136,
        },
        36_151_104_512,
    ),
    "zai-org/glm-4-9b-chat-hf": (
        {
            "architectures": ["GlmForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696,
            "max_position_embeddings": 131072, "model_type": "glm", "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.46.0.dev0", "use_cache": True, "vocab_size": 151552,
        },
        9_399_951_360,
    ),
    "baidu/ERNIE-4.5-0.3B-PT": (
        {
            "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
            "max_position_embeddings": 131072, "model_type": "ernie4_5", "num_attention_heads": 16,
            "num_hidden_layers": 18, "num_key_value_heads": 2, "pad_token_id": 0,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False,
            "use_cache": False, "vocab_size": 103424,
        },
        360_748_032,
    ),
    "google/gemma-2b": (
        {
            "architectures": ["GemmaForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256,
            "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 8192,
            "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18,
            "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
            "transformers_version": "4.38.0.dev0", "use_cache": True, "vocab_size": 256000,
        },
        2_506_172_416,
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 128012,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
            "model_type": "smollm3", "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
            "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
            "sliding_window": None, "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0.dev0", "use_cache": False,
            "use_sliding_window": False, "vocab_size": 128256,
        },
        3_075_098_624,
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": (
        {
            "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 361, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "initializer_range": 0.02, "intermediate_size": 27392,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
            "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0.dev0", "use_cache": True, "vocab_size": 102400,
        },
        32_003_216_384,
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": (
        {
            "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 361, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 4096,
            "layer_types": ["full_attention"] * 30, "max_position_embeddings": 65536,
            "model_type": "exaone4", "num_attention_heads": 32, "num_hidden_layers": 30,
            "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 1000000, "sliding_window": None, "sliding_window_pattern": None,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0.dev0", "use_cache": True, "vocab_size": 102400,
        },
        1_279_391_488,
    ),
    "mistralai/Ministral-8B-Instruct-2410": (
        {
            "architectures": ["MinistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 12288,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9,
            "max_position_embeddings": 32768, "model_type": "ministral", "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 100000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.46.0.dev0", "use_cache": True,
            "vocab_size": 131072,
        },
        8_019_808_256,
    ),
    "facebook/cwm": (
        {
            "architectures": ["CwmForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 21504,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 16,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "cwm",
            "num_attention_heads": 48, "num_hidden_layers": 64, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 1000000.0, "sliding_window": 8192, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True,
            "vocab_size": 128256,
        },
        32_581_097_472,
    ),
    "allenai/OLMoE-1B-7B-0924": (
        {
            "architectures": ["OlmoeForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "clip_qkv": None, "eos_token_id": 50279,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe",
            "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
        },
        6_919_161_856,
    ),
    "rednote-hilab/dots.llm1.inst": (
        {
            "architectures": ["Dots1ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "eos_token_id": 151649, "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 10944, "max_position_embeddings": 32768, "max_window_layers": 62,
            "model_type": "dots1", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
            "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62,
            "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 10000000, "routed_scaling_factor": 2.5,
            "scoring_func": "noaux_tc", "sliding_window": None, "tie_word_embeddings": False,
            "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
            "transformers_version": "4.46.3", "use_cache": True, "use_sliding_window": False,
            "vocab_size": 152064,
        },
        142_774_381_696,
    ),
    "ibm-granite/granite-3.0-1b-a400m-instruct": (
        {
            "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.1, "attention_multiplier": 0.015625, "bos_token_id": 0,
            "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu",
            "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 512,
            "logits_scaling": 6.0, "max_position_embeddings": 4096, "model_type": "granitemoe",
            "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
            "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 10000, "router_aux_loss_coef": 0.0,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.46.0.dev0", "use_cache": True, "vocab_size": 49155,
        },
        1_334_628_352,
    ),
    "LGAI-EXAONE/K-EXAONE-236B-A23B": (
        {
            "architectures": ["ExaoneMoEForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "dtype": "bfloat16", "eos_token_id": 53, "first_last_k_dense_replace": 1,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02,
            "intermediate_size": 18432, "is_moe_layer": [False] + [True] * 47,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12,
            "max_position_embeddings": 262144, "model_type": "exaone_moe",
            "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True,
            "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
            "num_shared_experts": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer", "topk_group": 1,
            "topk_method": "noaux_tc", "transformers_version": "5.0.0.dev0", "use_cache": True,
            "vocab_size": 153600,
        },
        236_571_156_352,
    ),
    "upstage/Solar-Open-100B": (
        {
            "architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open",
            "partial_rotary_factor": 1.0, "hidden_size": 4096, "num_hidden_layers": 48,
            "num_attention_heads": 64, "head_dim": 128, "num_key_value_heads": 8,
            "vocab_size": 196608, "intermediate_size": 10240, "moe_intermediate_size": 1280,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000, "max_position_embeddings": 131072,
            "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "tie_word_embeddings": False,
            "first_k_dense_replace": 0, "hidden_act": "silu", "torch_dtype": "bfloat16",
            "rope_scaling": {
                "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536,
            },
        },
        102_651_799_552,
    ),
    "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B": (
        {
            "architectures": ["HyperCLOVAXForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "attn_pdrop": 0.0,
            "bos_token_id": 100257, "embd_pdrop": 0.0, "embedding_multiplier": 10.0,
            "eos_token_id": 100257, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
            "initializer_range": 0.012727922061357854, "intermediate_size": 14336,
            "logits_scaling": 0.125, "max_position_embeddings": 131072, "mlp_bias": False,
            "model_type": "hyperclovax", "num_attention_heads": 48, "num_hidden_layers": 38,
            "num_key_value_heads": 8, "pad_token_id": 100257, "pretraining_tp": 1,
            "resid_pdrop": 0.0, "residual_multiplier": 1.0, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 100000000, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.52.4", "use_cache": False,
            "use_post_norm": True, "vocab_size": 110592,
        },
        14_748_112_896,
    ),
    "kyutai/helium-1-preview-2b": (
        {
            "architectures": ["HeliumForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
            "intermediate_size": 7040, "max_position_embeddings": 4096, "mlp_bias": False,
            "model_type": "helium", "num_attention_heads": 20, "num_hidden_layers": 24,
            "num_key_value_heads": 20, "pad_token_id": 3, "rms_norm_eps": 1e-08,
            "rope_theta": 100000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.48.0.dev0", "use_cache": True, "vocab_size": 48000,
        },
        2_172_643_840,
    ),
    "zai-org/GLM-4.1V-9B-Thinking": (
        {
            "architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v",
            "image_start_token_id": 151339, "image_end_token_id": 151340,
            "video_start_token_id": 151341, "video_end_token_id": 151342, "image_token_id": 151343,
            "video_token_id": 151344, "tie_word_embeddings": False,
            "transformers_version": "4.57.1",
            "text_config": {
                "model_type": "glm4v_text", "attention_bias": True, "attention_dropout": 0.0,
                "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338, 151348],
                "image_token_id": 151343, "video_token_id": 151344, "hidden_act": "silu",
                "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696,
                "max_position_embeddings": 65536, "num_attention_heads": 32,
                "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
                "dtype": "bfloat16",
                "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
                "rope_theta": 10000.0, "use_cache": True, "vocab_size": 151552,
                "partial_rotary_factor": 0.5,
            },
            "vision_config": {"model_type": "glm4v"},
        },
        9_400_279_040,  # that of GLM-4-9B-0414
    ),
    "zai-org/GLM-4.5V": (
        {
            "architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe",
            "image_start_token_id": 151339, "image_end_token_id": 151340,
            "video_start_token_id": 151341, "video_end_token_id": 151342, "image_token_id": 151363,
            "video_token_id": 151364, "tie_word_embeddings": False,
            "transformers_version": "4.55.0.dev0",
            "text_config": {
                "pad_token_id": 151329, "vocab_size": 151552,
                "eos_token_id": [151329, 151336, 151338], "image_end_token_id": 151340,
                "image_start_token_id": 151339, "image_token_id": 151363, "head_dim": 128,
                "attention_bias": True, "attention_dropout": 0.0, "first_k_dense_replace": 1,
                "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
                "intermediate_size": 10944, "max_position_embeddings": 65536,
                "model_type": "glm4v_moe_text", "moe_intermediate_size": 1408, "n_group": 1,
                "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
                "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
                "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
                "dtype": "bfloat16",
                "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
                "rope_theta": 10000.0, "routed_scaling_factor": 1.0, "topk_group": 1,
                "use_cache": True, "use_qk_norm": False,
            },
            "vision_config": {"model_type": "glm4v_moe"},
        },
        106_852_251_264,  # that of GLM-4.5-Air
    ),
    "Qwen/Qwen2-VL-2B-Instruct": (
        {
            "architectures": ["Qwen2VLForConditionalGeneration"], "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652,
            "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655,
            "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 1536,
            "initializer_range": 0.02, "intermediate_size": 8960, "max_position_embeddings": 32768,
            "max_window_layers": 28, "model_type": "qwen2_vl", "num_attention_heads": 12,
            "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True,
            "use_sliding_window": False,
            "vision_config": {
                "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3,
                "hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2,
                "spatial_patch_size": 14, "temporal_patch_size": 2,
            },
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936,
        },
        1_543_714_304,  # that of Qwen2-1.5B
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652,
            "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655,
            "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 3584,
            "initializer_range": 0.02, "intermediate_size": 18944,
            "max_position_embeddings": 128000, "max_window_layers": 28, "model_type": "qwen2_5_vl",
            "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False,
            "vision_config": {
                "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
                "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14,
                "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
                "temporal_patch_size": 2,
            },
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
        },
        7_615_616_512,  # that of Qwen2.5-7B
    ),
    "Qwen/Qwen3-VL-4B-Instruct": (
        {
            "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655,
            "model_type": "qwen3_vl",
            "text_config": {
                "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
                "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
                "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 9728,
                "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
                "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
                "rms_norm_eps": 1e-06,
                "rope_scaling": {
                    "mrope_interleaved": True, "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
                "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True,
                "vocab_size": 151936,
            },
            "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0",
            "video_token_id": 151656,
            "vision_config": {
                "deepstack_visual_indexes": [5, 11, 17], "depth": 24,
                "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1024, "in_channels": 3,
                "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "qwen3_vl",
                "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2560,
                "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            },
            "vision_end_token_id": 151653, "vision_start_token_id": 151652,
        },
        4_022_468_096,  # that of Qwen3-4B, which is the text
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        {
            "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655,
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
                "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": 151645,
                "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
                "initializer_range": 0.02, "intermediate_size": 6144,
                "max_position_embeddings": 262144, "mlp_only_layers": [],
                "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768,
                "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
                "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
                "rms_norm_eps": 1e-06,
                "rope_scaling": {
                    "mrope_interleaved": True, "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
                "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
            },
            "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0",
            "video_token_id": 151656, "vision_config": {"model_type": "qwen3_vl_moe"},
            "vision_end_token_id": 151653, "vision_start_token_id": 151652,
        },
        30_532_122_624,  # that of Qwen3-30B-A3B
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    raw, count = PUBLISHED[name]
    assert parameter_count(parameters_of(parse_config(raw))) == count
