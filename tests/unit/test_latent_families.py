"""Families with latent attention: which configs they take, what they refuse, and how large the
published models are.
"""

import copy

import numpy as np
import pytest
import torch
import transformers

from twinfer.shared.errors import ConfigError, ModelError, UnsupportedModel
from twinfer.shared.kv_scales import scaled_model
from twinfer.shared.models.caches import CacheSpec, cache_layout, cache_of
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.families import model_of, parameters_of
from twinfer.shared.models.placement import local_config, place
from twinfer.shared.models.spec import Experts, LatentAttention, Mlp
from twinfer.shared.models.table import PairsToHalves, parameter_count

YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1}
# As they are published, but for fields of training.
PUBLISHED = {
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "rope_scaling": YARN
        | {"mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
        "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400, "ep_size": 1,
        "aux_loss_alpha": 0.001, "pretraining_tp": 1,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "attention_bias": False, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": YARN
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "v_head_dim": 128, "vocab_size": 129280, "ep_size": 1,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10240, "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "num_attention_heads": 20,
        "n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
        "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
        "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 1_000_000, "tie_word_embeddings": False, "dtype": "bfloat16",
        "topk_method": "noaux_tc", "q_lora_rank": 768, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "Youtu-LLM-2B": {
        "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 131072, "rope_theta": 1_600_000, "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "Mistral-Small-4": {
        "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "vocab_size": 131072,
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 32,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "max_position_embeddings": 1_048_576, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    """transformers makes models of as many weights, and a layer keeps one latent of a token."""
    config = parse_config(PUBLISHED[name])
    raw = copy.deepcopy(PUBLISHED[name])
    theirs = getattr(transformers, raw["architectures"][0].replace("ForCausalLM", "Config"))(**raw)
    with torch.device("meta"):
        model = getattr(transformers, raw["architectures"][0])(theirs)
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    wanted = sum(weight.numel() for weight in [*model.parameters(), *biases])
    assert parameter_count(parameters_of(config)) == wanted
    entries = theirs.kv_lora_rank + theirs.qk_rope_head_dim
    assert {cache_of(layer).entries for layer in model_of(config).kinds} == {entries}
    assert attention(config).scale == pytest.approx(model.model.layers[0].self_attn.scaling)


def test_the_weights_that_are_published():
    counts = {"DeepSeek-V2-Lite": 15_706_484_224, "DeepSeek-V3": 671_026_419_200}
    for name, count in counts.items():
        assert parameter_count(parameters_of(parse_config(PUBLISHED[name]))) == count


SMALL = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 40, "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def small(**fields):
    return parse_config(SMALL | fields)


def attention(config):
    return model_of(config).layers[0][0].mixer


def test_the_layers():
    config = small()
    first, second, _ = model_of(config).layers
    assert isinstance(first[1].mixer, Mlp)
    assert isinstance(second[1].mixer, Experts)
    assert first[0] == second[0]
    wanted = LatentAttention(4, 4, 2, 3, 6, 5, 6**-0.5, 1e-6)
    assert attention(config) == wanted
    assert attention(small(q_lora_rank=None)).query_rank == 0
    # A field that is not there is the family's default.
    absent = {name: value for name, value in SMALL.items() if name != "q_lora_rank"}
    assert attention(parse_config(absent)).query_rank == 1536


def test_yarn_makes_scores_larger():
    yarn = YARN | {"original_max_position_embeddings": 16}
    grown = 0.1 * 0.5 * np.log(40) + 1
    for fields, factor in (({"mscale_all_dim": 0.5, "mscale": 0.5}, grown**2), ({}, 1.0)):
        mixer = attention(small(rope_scaling=yarn | fields, max_position_embeddings=640))
        assert mixer.scale == pytest.approx(6**-0.5 * factor, rel=1e-15)


def test_the_order_of_what_is_rotated():
    """Pairs of the file lie as halves here, behind what is not rotated."""
    order = PairsToHalves(10, 6, 4)
    rows = order.tensor_rows(np.arange(20))
    assert rows[:10].tolist() == [0, 1, 2, 3, 4, 6, 8, 5, 7, 9]
    assert rows[10:].tolist() == [10, 11, 12, 13, 14, 16, 18, 15, 17, 19]
    table = parameters_of(small()).layer(0)
    assert table["q"].parts[0].order == PairsToHalves(6, 2, 4)
    assert table["qkv_a"].parts[1].order == PairsToHalves(8, 2, 6)
    halves = parameters_of(small(rope_interleave=False)).layer(0)
    assert halves["q"].parts[0].order is None


def test_the_cache():
    spec = cache_of(model_of(small()).layers[0])
    assert spec == CacheSpec(1, 8, latent=True)
    assert (spec.rows, spec.entries) == (1, 8)
    layout = cache_layout(model_of(small()), 16, 64)
    assert layout.page_shape(1) == (16, 1, 8)
    assert layout.page_entries == 128


def test_on_shards():
    """Heads are dealt out, latents are not: each shard holds them all."""
    config = small()
    mine = local_config(config, 2)
    assert attention(mine).num_heads == 2
    assert cache_of(model_of(mine).layers[0]) == CacheSpec(1, 8, latent=True)
    table = parameters_of(config).layer(0)
    assert {name: place(table[name], config, 2).axis for name in ("q", "kv_b", "o", "qkv_a")} == {
        "q": 0, "kv_b": 0, "o": 1, "qkv_a": None,
    }  # fmt: skip
    # Whole heads: the first of two shards has those of the first two heads.
    assert place(table["kv_b"], config, 2).source[:14].tolist() == [*range(14)]


@pytest.mark.parametrize(
    ("error", "words", "fields"),
    [
        (ModelError, "qk_rope_head_dim is 3, must be even", {"qk_rope_head_dim": 3}),
        (ModelError, 'kv_lora_rank is "6"', {"kv_lora_rank": "6"}),
        (ModelError, "q_lora_rank is 0", {"q_lora_rank": 0}),
        (UnsupportedModel, "num_key_value_heads is 2, allowed: 4", {"num_key_value_heads": 2}),
        (UnsupportedModel, "head_dim is 7, allowed: 2", {"head_dim": 7}),
        (UnsupportedModel, "qk_head_dim is 7, allowed: 6", {"qk_head_dim": 7}),
        (UnsupportedModel, "attention_bias is True", {"attention_bias": True}),
        (UnsupportedModel, "scoring_func is softmax", {"scoring_func": "softmax"}),
        (UnsupportedModel, "index_topk", {"index_topk": 2048}),
        (ModelError, "n_group is 3", {"n_group": 3}),
    ],
)
def test_what_is_refused(error, words, fields):
    with pytest.raises(error, match=words):
        small(**fields)


@pytest.mark.parametrize(
    ("architecture", "words", "fields"),
    [
        ("DeepseekV2", "topk_method is group_limited_greedy", {"topk_method": "group_limited_greedy"}),
        ("DeepseekV2", "routed_scaling_factor is 16", {"routed_scaling_factor": 16.0}),
        ("DeepseekV2", "norm_topk_prob is True", {"norm_topk_prob": True}),
        ("Glm4MoeLite", "mlp_layer_types is", {"mlp_layer_types": ["dense", "some", "sparse"]}),
        ("Glm4MoeLite", "mlp_layer_types is", {"mlp_layer_types": ["dense"]}),
        (
            "Glm4MoeLite",
            "first_k_dense_replace is 1, allowed: what mlp_layer_types says",
            {"mlp_layer_types": ["sparse"] * 3},
        ),
        ("Glm4MoeLite", "first_k_dense_replace is 2", {"first_k_dense_replace": 2}),
    ],
)  # fmt: skip
def test_what_other_families_refuse(architecture, words, fields):
    usual = {"n_group": None, "topk_group": None}
    with pytest.raises(UnsupportedModel, match=words):
        small(architectures=[f"{architecture}ForCausalLM"], **usual | fields)


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_mistral_4_rotates_what_its_sizes_say(part):
    """`partial_rotary_factor` says it again."""
    usual = {"n_group": None, "topk_group": None, "first_k_dense_replace": None}
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16, "partial_rotary_factor": part,
    }  # fmt: skip
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
        small(architectures=["Mistral4ForCausalLM"], rope_parameters=rope, **usual)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_narrow_cache_of_latents_is_refused(dtype):
    with pytest.raises(ConfigError, match=f"kv_cache_dtype: got {dtype}, allowed for Deepseek"):
        scaled_model(small(), dtype, (1.0, 1.0), None)
