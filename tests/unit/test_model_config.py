"""config.json: what transformers writes is read as transformers reads it; anything else is
refused in one line.
"""

import dataclasses
import json
import math
import os
import string
import tracemalloc
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from twinfer.shared.errors import ModelError, ModelNotFound, TwinferError, UnsupportedModel
from twinfer.shared.models import families
from twinfer.shared.models import fields as fields_module
from twinfer.shared.models.config import ModelConfig
from twinfer.shared.models.config_json import load_config, parse_config
from twinfer.shared.models.decoder import model_of, parameters_of, rotary_tables
from twinfer.shared.models.families.dense import FIXED, HARMLESS, READ
from twinfer.shared.models.locate import model_folder
from twinfer.shared.models.rope import RopeConfig, rope_inverse_frequencies

from .checkpoint_tensors import expected_tensors

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
GRANITE = LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
# The embeddings of layers have the vocabulary of the model.
GEMMA4 = LLAMA | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
}
UNIFIED4 = LLAMA | {
    "architectures": ["Gemma4UnifiedForCausalLM"],
    "model_type": "gemma4_unified_text",
}
GLM4 = LLAMA | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
OLMO2 = LLAMA | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
OLMO3 = LLAMA | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
MINISTRAL3 = LLAMA | {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
SEED_OSS = LLAMA | {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
GLM = LLAMA | {"architectures": ["GlmForCausalLM"], "model_type": "glm"}
ERNIE = LLAMA | {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5"}
GEMMA = LLAMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
EXAONE4 = LLAMA | {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"}
MINISTRAL = LLAMA | {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
CWM = LLAMA | {"architectures": ["CwmForCausalLM"], "model_type": "cwm"}
HELIUM = LLAMA | {"architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": 16}
ARCEE = LLAMA | {
    "architectures": ["ArceeForCausalLM"],
    "model_type": "arcee",
    "hidden_act": "relu2",
}
HUNYUAN = LLAMA | {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "model_type": "hunyuan_v1_dense",
}
GRANITE4 = LLAMA | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["attention"] * 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 20,
    "position_embedding_type": "rope",
}
CLOVA = LLAMA | {"architectures": ["HyperCLOVAXForCausalLM"], "model_type": "hyperclovax"}
VAULT = LLAMA | {"architectures": ["VaultGemmaForCausalLM"], "model_type": "vaultgemma"}
# Of these there is more in test_dense_families.py.
NEWER = {
    "arcee": ARCEE,
    "helium": HELIUM,
    "granitemoehybrid": GRANITE4,
    "hunyuan_v1_dense": HUNYUAN,
    "hyperclovax": CLOVA,
    "vaultgemma": VAULT,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": UNIFIED4,
    "glm4": GLM4,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "ministral3": MINISTRAL3,
    "seed_oss": SEED_OSS,
    "glm": GLM,
    "ernie4_5": ERNIE,
    "gemma": GEMMA,
    "smollm3": SMOLLM3,
    "exaone4": EXAONE4,
    "ministral": MINISTRAL,
    "cwm": CWM,
}
ALONE = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "granite": GRANITE,
}
# What else there is of such configs is in test_nested_models.py.
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": MISTRAL,
}
IMAGES3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": GEMMA3,
}
IMAGES4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": GEMMA4,
}
PIXELS4 = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "model_type": "gemma4_unified",
    "text_config": UNIFIED4,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
QWEN2_MOE = LLAMA | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"} | EXPERTS
QWEN3_MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | EXPERTS
GPT_OSS = LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
MINIMAX_M2 = LLAMA | {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2"}
GLM4_MOE = LLAMA | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"} | EXPERTS
OLMOE = LLAMA | {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}
DOTS1 = LLAMA | {"architectures": ["Dots1ForCausalLM"], "model_type": "dots1"} | EXPERTS
GRANITE_MOE = LLAMA | {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"}
EXAONE_MOE = LLAMA | {"architectures": ["ExaoneMoeForCausalLM"], "model_type": "exaone_moe"}
SOLAR = LLAMA | {"architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open"}
LLAMA4 = LLAMA | {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
HY3 = LLAMA | {"architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3"}
FLEX_OLMO = LLAMA | {"architectures": ["FlexOlmoForCausalLM"], "model_type": "flex_olmo"}
ERNIE_MOE = LLAMA | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
}
HUNYUAN_MOE = LLAMA | {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
}
# And of these in test_expert_families.py.
MIXTURES = {
    "exaone_moe": EXAONE_MOE | EXPERTS | {"num_experts": 4},
    "ernie4_5_moe": ERNIE_MOE | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12},
    "llama4_text": LLAMA4 | {"num_local_experts": 4, "intermediate_size_mlp": 20},
    "flex_olmo": FLEX_OLMO | {"num_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": HY3 | EXPERTS | {"num_experts": 4},
    "hunyuan_v1_moe": HUNYUAN_MOE | {"num_experts": 4, "moe_topk": 2},
    "solar_open": SOLAR | EXPERTS | {"n_routed_experts": 4},
    "mixtral": MIXTRAL | {"num_local_experts": 4},
    "qwen2_moe": QWEN2_MOE | {"num_experts": 4, "shared_expert_intermediate_size": 20},
    "qwen3_moe": QWEN3_MOE | {"num_experts": 4},
    "glm4_moe": GLM4_MOE | {"n_routed_experts": 4},
    "gpt_oss": GPT_OSS | {"num_local_experts": 4},
    "minimax_m2": MINIMAX_M2 | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": OLMOE | {"num_experts": 4, "num_experts_per_tok": 2},
    "dots1": DOTS1 | {"n_routed_experts": 4, "n_shared_experts": 1},
    "granitemoe": GRANITE_MOE | {"num_local_experts": 4},
}
# What else there is of these is in test_text_beside_towers.py.
VL3_TEXT = LLAMA | {"architectures": None, "model_type": "qwen3_vl_text"}
VL3 = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": VL3_TEXT,
}
VL3_MOE = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": VL3_TEXT | EXPERTS | {"model_type": "qwen3_vl_moe_text", "num_experts": 4},
}
VL2 = LLAMA | {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
VL2_5 = VL2 | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
}
GLM4V = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "model_type": "glm4v",
    "text_config": VL3_TEXT | {"model_type": "glm4v_text"},
}
GLM4V_MOE = {
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "model_type": "glm4v_moe",
    "text_config": VL3_TEXT | EXPERTS | {"model_type": "glm4v_moe_text", "n_routed_experts": 4},
}
FAMILIES = ALONE | NEWER | MIXTURES | {"glm4v": GLM4V, "glm4v_moe": GLM4V_MOE}
FAMILIES |= {"qwen3_vl": VL3, "qwen3_vl_moe": VL3_MOE}
LLAMA4_IMAGES = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": MIXTURES["llama4_text"],
}
FAMILIES |= {"llama4": LLAMA4_IMAGES}
LATENTS = {"num_key_value_heads": None, "kv_lora_rank": 12, "qk_nope_head_dim": 6}
LATENTS |= {"qk_rope_head_dim": 4, "v_head_dim": 5, "head_dim": None}
for _name, _type in (
    ("DeepseekV2", "deepseek_v2"), ("DeepseekV3", "deepseek_v3"), ("Mistral4", "mistral4"),
    ("Glm4MoeLite", "glm4_moe_lite"), ("Youtu", "youtu"),
):  # fmt: skip
    _named = {"architectures": [f"{_name}ForCausalLM"], "model_type": _type}
    FAMILIES[_type] = LLAMA | _named | LATENTS
    if _type != "youtu":
        FAMILIES[_type] |= EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1}
    if _type == "deepseek_v3":
        FAMILIES[_type] |= {"n_group": 2, "topk_group": 1}
FAMILIES |= {"qwen2_vl": VL2, "qwen2_5_vl": VL2_5}
FAMILIES |= {"mistral3": MISTRAL3, "gemma3": IMAGES3, "gemma4": IMAGES4, "gemma4_unified": PIXELS4}
NAMES = [
    "LlamaConfig",
    "MistralConfig",
    "Qwen2Config",
    "Qwen3Config",
    "Phi3Config",
    "GraniteConfig",
    "Gemma2Config",
    "Olmo2Config",
]

# As published, shortened to what differs from a plain config.
LLAMA_3_1 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3_1 |= {"original_max_position_embeddings": 8192}


def oracle(name, **fields):
    import transformers

    return getattr(transformers, name)(
        architectures=[name.replace("Config", "ForCausalLM")], **fields
    )


def refused(error, *words, **fields):
    """Check that LLAMA with these fields is refused, in one line that has these words; `base`
    replaces LLAMA.
    """
    base = fields.pop("base", LLAMA)
    with pytest.raises(error) as caught:
        parse_config(base | fields, where="/models/x/config.json")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500  # one line, with the names of all architectures
    assert message.startswith("/models/x/config.json: ")
    for word in words:
        assert word in message, message


# What transformers writes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("whole", [False, True])
def test_what_transformers_5_writes_is_read(name, whole):
    theirs = oracle(
        name, num_hidden_layers=3, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    ours = parse_config(json.loads(theirs.to_json_string(use_diff=not whole)))
    assert ours.num_layers == 3
    assert ours.rope == RopeConfig(theta=5e5)
    assert (ours.num_heads, ours.num_kv_heads) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert ours.head_dim == getattr(
        theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.tie_embeddings is theirs.tie_word_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_transformers_model(name):
    """Names and shapes of the weights that our table derives from the config."""
    import torch
    import transformers

    bias = (
        {} if name in ("MistralConfig", "Qwen2Config", "Phi3Config") else {"attention_bias": True}
    )
    bias |= {"mlp_bias": True} if name in ("LlamaConfig", "GraniteConfig") else {}
    for tied, more in ((True, {}), (False, bias)):
        small = {
            "vocab_size": 40,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
        }
        small |= {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": tied,
        }
        config = oracle(name, bos_token_id=1, eos_token_id=2, pad_token_id=None, **small, **more)
        with torch.device("meta"):
            model = getattr(transformers, name.replace("Config", "ForCausalLM"))(config)
        theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        if tied:
            theirs.pop("lm_head.weight")
        ours = parse_config(json.loads(config.to_json_string()))
        assert expected_tensors(parameters_of(ours)) == theirs


@pytest.mark.parametrize("name", sorted(ALONE | NEWER | MIXTURES))
def test_a_config_that_says_nothing_of_rope_has_that_of_transformers(name):
    """The base and the scaling that a family has where its file leaves them out."""
    import transformers

    raw = FAMILIES[name]
    theirs = transformers.AutoConfig.for_model(
        **raw | {"pad_token_id": None, "vocab_size": 300_000}
    ).rope_parameters
    said, silent = parse_config(raw | {"rope_parameters": theirs}), parse_config(raw)
    assert (silent.rope, silent.window_rope) == (said.rope, said.window_rope)


def test_a_rope_of_version_4_takes_the_place_of_the_familys_own():
    base = FAMILIES["gpt_oss"]
    assert parse_config(base).rope.kind == "yarn"
    linear = parse_config(base | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}).rope
    assert linear == RopeConfig(theta=150_000.0, kind="linear", factor=2.0)
    assert parse_config(base | {"rope_theta": 1e6}).rope.theta == 1e6


def test_a_whole_config_of_version_4_is_read():
    """Every generic field that `PretrainedConfig.to_dict()` of 4.x writes."""
    generic = """bad_words_ids begin_suppress_tokens cross_attention_hidden_size
    decoder_start_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id pad_token_id prefix problem_type
    sep_token_id suppress_tokens task_specific_params tokenizer_class""".split()
    numbers = {
        "chunk_size_feed_forward": 0,
        "diversity_penalty": 0.0,
        "length_penalty": 1.0,
        "max_length": 20,
    }
    numbers |= {
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "top_k": 50,
    }
    numbers |= {
        "repetition_penalty": 1.0,
        "temperature": 0.6,
        "top_p": 0.9,
        "typical_p": 1.0,
        "num_beam_groups": 1,
    }
    numbers |= {
        "encoder_no_repeat_ngram_size": 0,
        "initializer_range": 0.02,
        "attention_dropout": 0.1,
    }
    false = """add_cross_attention do_sample early_stopping is_decoder is_encoder_decoder
    output_attentions output_hidden_states output_scores remove_invalid_values
    return_dict_in_generate tf_legacy_loss tie_encoder_decoder tie_word_embeddings
    torchscript use_bfloat16 attention_bias mlp_bias""".split()
    more = {
        "id2label": {"0": "A"},
        "label2id": {"A": 0},
        "pruned_heads": {},
        "return_dict": True,
        "use_cache": True,
    }
    more |= {
        "transformers_version": "4.46.0",
        "_name_or_path": "somewhere",
        "pretraining_tp": 1,
        "hidden_act": "silu",
    }
    more |= {"rope_theta": 500000.0, "rope_scaling": LLAMA_3_1}
    raw = LLAMA | dict.fromkeys(generic) | numbers | dict.fromkeys(false, False) | more
    assert parse_config(raw).rope.kind == "llama3"


def test_smollm_fields_are_harmless():
    assert parse_config(
        LLAMA
        | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1}}
    )


def test_the_fields_of_each_family():
    llama, mistral, qwen2, qwen3, phi3, granite = (parse_config(raw) for raw in ALONE.values())
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (
        False,
        False,
        False,
        False,
    )
    assert (mistral.qkv_bias, mistral.o_bias, mistral.mlp_bias, mistral.qk_norm) == (
        False,
        False,
        False,
        False,
    )
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (
        True,
        False,
        False,
        False,
    )
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (
        False,
        False,
        False,
        True,
    )
    assert (phi3.qkv_bias, phi3.o_bias, phi3.mlp_bias, phi3.qk_norm) == (False, False, False, False)
    assert (
        granite.attention_scale,
        granite.embedding_scale,
        granite.residual_scale,
        granite.logits_scale,
    ) == (1,) * 4
    assert {config.attention_scale for config in (llama, mistral, qwen2, qwen3, phi3)} == {None}
    biased = parse_config(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    assert llama.dtype == "bfloat16"
    assert llama.head_dim == 16
    assert qwen3.head_dim == 32
    assert parse_config({k: v for k, v in QWEN3.items() if k != "head_dim"}).head_dim == 128
    assert llama.tie_embeddings is False
    assert parse_config(LLAMA | {"tie_word_embeddings": True}).tie_embeddings is True


def test_it_is_frozen_and_hashable():
    config = parse_config(LLAMA)
    assert hash(config) == hash(parse_config(dict(reversed(LLAMA.items()))))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 1


def test_raw_hash_follows_content_not_layout():
    assert parse_config(LLAMA).raw_hash == parse_config(dict(reversed(LLAMA.items()))).raw_hash
    assert parse_config(LLAMA).raw_hash != parse_config(LLAMA | {"use_cache": True}).raw_hash
    assert len(parse_config(LLAMA).raw_hash) == 64


def test_absent_kv_heads_are_heads_where_transformers_says_so():
    for config in (LLAMA, ARCEE, HUNYUAN, HUNYUAN_MOE | {"num_experts": 4, "moe_topk": 2}):
        absent = {key: value for key, value in config.items() if key != "num_key_value_heads"}
        assert parse_config(absent).num_kv_heads == 4
        assert parse_config(absent | {"num_key_value_heads": None}).num_kv_heads == 4
    assert parse_config(MISTRAL | {"num_key_value_heads": None}).num_kv_heads == 4
    without = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    with pytest.raises(ModelError, match="num_key_value_heads is missing"):
        parse_config(without)


def test_architecture_follows_from_the_model_type_when_absent():
    assert parse_config(LLAMA | {"architectures": None}).architecture == "LlamaForCausalLM"
    assert parse_config(LLAMA | {"model_type": None}).model_type == "llama"


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": None}, "float32"),
    ],
)
def test_dtype(fields, dtype):
    assert parse_config(LLAMA | fields).dtype == dtype


@pytest.mark.parametrize("fields", [{}, {"torch_dtype": "float16"}, {"dtype": "float32"}])
@pytest.mark.parametrize("base", [LLAMA, MISTRAL3])
def test_a_dtype_that_nobody_says_is_that_of_most_weights(tmp_path, fields, base):
    """As for transformers and vLLM. A norm in float32 is not the model."""
    inner = {k: v for k, v in MISTRAL.items() if k != "torch_dtype"} | fields
    raw = base | {"text_config": inner} if "text_config" in base else inner | {
        name: base[name] for name in ("architectures", "model_type")
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    said = next(iter(fields.values()), None)
    assert load_config(tmp_path).dtype == (said or "float32")
    half, single = np.ones((8, 8), ml_dtypes.bfloat16), np.ones(8, np.float32)
    integers = np.ones((64, 64), np.int32)
    save_file({"a": single, "b": half, "c": integers}, tmp_path / "model.safetensors")
    assert load_config(tmp_path).dtype == (said or "bfloat16")
    save_file({"c": integers}, tmp_path / "model.safetensors")
    assert load_config(tmp_path).dtype == (said or "float32")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert load_config(tmp_path).dtype == (said or "float32"), "who loads it is told"


# Windows


def their_windows(config_name, **fields):
    """The window of each layer in a config of transformers, 0 for none."""
    config = oracle(config_name, **fields)
    return tuple(
        config.sliding_window if kind == "sliding_attention" else 0 for kind in config.layer_types
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 512},
        {"use_sliding_window": True, "sliding_window": 512},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 4},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "max_window_layers": 5,
        },
        {"layer_types": ["full_attention"] * 6},
    ],
)
@pytest.mark.parametrize("raw", [QWEN2, QWEN3])
def test_qwen_windows_are_those_of_transformers(raw, fields):
    fields = {"num_hidden_layers": 6} | fields
    assert parse_config(raw | fields).layer_windows == their_windows("Qwen2Config", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 0},
        {"use_sliding_window": True, "sliding_window": 512},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ],
)
def test_qwen2_moe_windows_are_those_of_transformers(fields):
    """Before `max_window_layers`, and not from there on as Qwen2's."""
    fields = {"num_hidden_layers": 4} | fields
    windows = parse_config(FAMILIES["qwen2_moe"] | fields).layer_windows
    assert windows == their_windows("Qwen2MoeConfig", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_window_layers": 2},
        {"max_window_layers": 0, "sliding_window": 8},
        {"max_window_layers": 0, "sliding_window": None},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ],
)
def test_dots1_windows_are_those_of_transformers(fields):
    """They need no `use_sliding_window`."""
    fields = {"num_hidden_layers": 4} | fields
    windows = parse_config(FAMILIES["dots1"] | fields).layer_windows
    assert windows == their_windows("Dots1Config", **fields)


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "gemma4_text", "olmo3", "gpt_oss", "cwm"]
)
def test_layers_with_a_window_need_its_length(name):
    """Whether the file says which layers these are, or the family does."""
    raw = FAMILIES[name] | {"sliding_window": None}
    words = "sliding_window is null, must be an integer"
    if name == "gemma4_text":
        words = "layer_types is sliding_attention, allowed: full_attention, since no sliding window"
    refused(ModelError, words, base=raw)
    full = {"layer_types": ["full_attention"] * raw["num_hidden_layers"]}
    assert not any(parse_config(raw | full).layer_windows)


def test_mistral_slides_in_every_layer_unless_null():
    assert parse_config(MISTRAL).layer_windows == (4096,) * 4  # MistralConfig's default
    assert parse_config(MISTRAL | {"sliding_window": None}).layer_windows == (0,) * 4
    assert parse_config(MISTRAL | {"sliding_window": 128}).layer_windows == (128,) * 4
    assert parse_config(LLAMA).layer_windows == (0,) * 4
    same = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}
    assert parse_config(MISTRAL | same).layer_windows == (8,) * 4


def test_windows_that_the_modeling_code_ignores_are_refused():
    refused(UnsupportedModel, "sliding_window is 128", sliding_window=128)
    refused(UnsupportedModel, "use_sliding_window is True", use_sliding_window=True)
    mixed = ["sliding_attention", "full_attention"] * 2
    refused(
        UnsupportedModel,
        "layer_types",
        "mistral",
        base=MISTRAL,
        sliding_window=8,
        layer_types=mixed,
    )
    refused(UnsupportedModel, "layer_types is sliding_attention", base=QWEN2, layer_types=mixed)
    refused(
        UnsupportedModel,
        "layer_types is chunked_attention",
        base=QWEN2,
        layer_types=["chunked_attention"] * 4,
    )
    refused(ModelError, "layer_types", "(4)", base=QWEN2, layer_types=["full_attention"] * 3)
    refused(ModelError, "sliding_window is 0", base=MISTRAL, sliding_window=0)
    refused(ModelError, "max_window_layers is -1", base=QWEN2, max_window_layers=-1)


# Rotary embedding

ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    LLAMA_3_1,
    LLAMA_3_1
    | {
        "factor": 32,
        "low_freq_factor": 2,
        "high_freq_factor": 3.5,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
    {
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    {
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.75,
    },
    {
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 1024,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 1024, "mscale": 0.7},
    {
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "truncate": None,  # is not the default there
    },
]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    ("theta", "head_dim"), [(10000.0, 128), (500000.0, 64), (1e6, 80), (100, 16)]
)
def test_frequencies_are_those_of_transformers(rope, theta, head_dim):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = rope | {"rope_theta": theta}
    theirs = oracle(
        "LlamaConfig",
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters=dict(parameters),
    )
    compute = ROPE_INIT_FUNCTIONS.get(
        rope["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    expected, expected_scaling = compute(theirs)
    for raw in (
        {"rope_parameters": parameters},
        {"rope_theta": theta, "rope_scaling": rope},
        {
            "rope_theta": theta,
            "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in rope.items()},
        },
        {"rope_theta": theta, "rope_scaling": rope, "rope_parameters": parameters},
    ):
        config = parse_config(LLAMA | raw)
        ours, scaling = rope_inverse_frequencies(config.rope, head_dim, 1)
        assert ours.dtype == np.float64
        assert ours.shape == (head_dim // 2,)
        np.testing.assert_allclose(ours, expected.numpy(), rtol=2e-6)
        assert scaling == pytest.approx(expected_scaling, rel=1e-12)


def test_a_part_of_a_head_may_be_rotated():
    ours, _ = rope_inverse_frequencies(RopeConfig(partial_rotary_factor=0.25), 64, 1)
    np.testing.assert_allclose(ours, 10000.0 ** -(np.arange(8) / 8))


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_rotary_tables_are_float64_until_they_are_rounded(theta):
    """Angles in float32 are off by up to 0.004 at position 100 000. Backends share a table:
    comparing them is blind.

    The formula is written down once more here, an entry at a time.
    """
    config = parse_config(LLAMA | {"rope_theta": theta, "hidden_size": 512})
    size, positions = config.head_dim, 131072
    cos, sin = rotary_tables(config, positions)
    assert (cos.shape, cos.dtype, sin.dtype) == ((positions, size // 2), np.float32, np.float32)
    for position in (0, 1, 2, 4095, 4096, 32767, 65537, 99999, 131071):
        for i in range(size // 2):
            angle = position * math.pow(theta, -2 * i / size)
            assert abs(float(cos[position, i]) - math.cos(angle)) < 2.0**-24, (position, i)
            assert abs(float(sin[position, i]) - math.sin(angle)) < 2.0**-24, (position, i)


def test_rotary_tables_take_little_more_memory_than_they_have():
    """Those of Llama 4 Scout's 10 485 760 positions have gigabytes, once and not six times."""
    config = parse_config(LLAMA | {"hidden_size": 512})
    tracemalloc.start()
    try:
        tables = rotary_tables(config, 400_000)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = sum(table.nbytes for table in tables)
    assert size <= most < 1.5 * size


def test_yarn_without_a_factor_takes_the_ratio_of_lengths():
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 512, "factor": None}
    assert parse_config(LLAMA | {"rope_parameters": rope}).rope.factor == 8.0


def test_original_length_outside_counts_as_in_transformers_5():
    rope = {"rope_type": "yarn", "factor": 4.0}
    outside = {"rope_parameters": rope, "original_max_position_embeddings": 512}
    assert parse_config(LLAMA | outside).rope.original_max_position == 512
    assert parse_config(LLAMA | {"rope_parameters": rope}).rope.original_max_position == 4096
    rope = rope | {"original_max_position_embeddings": 256}
    refused(
        UnsupportedModel,
        "is 256",
        "512",
        rope_parameters=rope,
        original_max_position_embeddings=512,
    )


def test_nested_parameters_must_agree():
    plain = {"rope_type": "default", "rope_theta": 5000.0}
    nested = {"full_attention": plain, "sliding_attention": dict(plain)}
    assert parse_config(QWEN2 | {"rope_parameters": nested}).rope.theta == 5000.0
    other = {"full_attention": plain, "sliding_attention": plain | {"rope_theta": 10000.0}}
    refused(
        UnsupportedModel, "rope_parameters.sliding_attention", base=QWEN2, rope_parameters=other
    )
    refused(
        UnsupportedModel,
        "rope_parameters",
        base=QWEN2,
        rope_parameters=nested | {"rope_theta": 5.0},
    )
    refused(
        UnsupportedModel, "full_attention", base=QWEN2, rope_parameters={"full_attention": None}
    )


@pytest.mark.parametrize(
    "kind", ["dynamic", "longrope", "su", "mrope", "proportional", "axial", "Linear", 5, {}]
)
def test_other_kinds_are_refused_by_name(kind):
    for name in ("rope_parameters", "rope_scaling"):
        for key in ("type", "rope_type"):
            block = {key: kind, "factor": 2.0}
            refused(
                UnsupportedModel,
                f"rope_type is {kind}",
                "default, linear, llama3, yarn",
                name,
                **{name: block},
            )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor is missing"]),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
            ["factor is 0.5", "at least 1"],
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, ['factor is "2"']),
        ({"rope_parameters": {"rope_type": "linear", "factor": True}}, ["factor is True"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, ["factor is nan"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, ["factor is inf"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 10**400}}, ["factor is 1000"]),
        (
            {"rope_parameters": LLAMA_3_1 | {"high_freq_factor": 0.5}},
            ["high_freq_factor is 0.5", "at least 1"],
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            ["low_freq_factor is missing"],
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "beta_fast": 1,
                    "beta_slow": 2,
                }
            },
            ["beta_fast is 1"],
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}},
            ["truncate is 1"],
        ),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_theta is 0"]),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": "x"}, ['rope_theta is "x"']),
        ({"rope_parameters": []}, ["rope_parameters is []"]),
        ({"rope_scaling": "linear"}, ["rope_scaling is linear"]),
        ({"rope_theta": -1}, ["rope_theta is -1"]),
    ],
)
def test_malformed_rope(fields, words):
    refused(ModelError, *words, **fields)


def test_rope_that_versions_read_differently_is_refused():
    refused(
        UnsupportedModel,
        "rope_theta is 5000.0",
        rope_parameters={"rope_theta": 5000.0},
        rope_theta=10000.0,
    )
    linear = {"rope_type": "linear", "factor": 2.0}
    refused(
        UnsupportedModel,
        "rope_scaling",
        "rope_parameters",
        rope_parameters={"rope_theta": 9.0},
        rope_scaling=linear,
    )
    refused(
        UnsupportedModel,
        "rope_type",
        rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0},
    )
    refused(
        UnsupportedModel,
        "partial_rotary_factor is 0.5",
        rope_parameters={"partial_rotary_factor": 0.5},
    )
    refused(
        UnsupportedModel,
        "short_factor",
        rope_scaling={"type": "linear", "factor": 2.0, "short_factor": [1.0]},
    )


# Longrope


def longrope(pairs=6, **fields):
    lists = {
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0**i for i in range(pairs)],
    }
    return {"partial_rotary_factor": 0.75, "rope_scaling": {"type": "longrope"} | lists | fields}


@pytest.mark.parametrize("fields", [{}, {"factor": 32.0}, {"attention_factor": 1.25}])
def test_longrope_is_that_of_transformers_for_short_and_for_long_sequences(fields):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = PHI3 | longrope(**fields) | {"original_max_position_embeddings": 256}
    theirs = oracle(
        "Phi3Config",
        **json.loads(json.dumps({k: v for k, v in raw.items() if k != "architectures"})),
    )
    config = parse_config(raw)
    for length in (1, 256, 257, 4096):
        want, want_scaling = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=length)
        ours, scaling = rope_inverse_frequencies(config.rope, config.head_dim, length)
        np.testing.assert_allclose(ours, want.numpy(), rtol=2e-6)
        assert scaling == pytest.approx(want_scaling, rel=1e-12)
        # In the tables, cos of position 0 is the scaling and the angles of position 1 are the
        # frequencies.
        cos, sin = rotary_tables(config, length)
        assert cos[0] == pytest.approx(scaling, rel=1e-6)
        if length > 1:
            np.testing.assert_allclose(np.arctan2(sin[1], cos[1]), ours, rtol=1e-5)


def test_where_longrope_switches():
    raw = PHI3 | longrope() | {"original_max_position_embeddings": 256}
    assert parse_config(raw).rope.switches_at == 256
    assert parse_config(raw | longrope(type="su")).rope == parse_config(raw).rope  # its first name
    alike = longrope(long_factor=longrope()["rope_scaling"]["short_factor"])
    assert parse_config(raw | alike).rope.switches_at is None
    assert parse_config(PHI3).rope.switches_at is None
    # Phi3Config's default, which counts more than what stands inside.
    assert parse_config(PHI3 | longrope()).rope.switches_at == 4096
    refused(
        UnsupportedModel,
        "is 256",
        "4096",
        base=PHI3,
        **longrope(original_max_position_embeddings=256),
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (longrope(short_factor=None), ["short_factor is missing"]),
        (longrope(pairs=5), ["short_factor has 5 entries", "(6)"]),
        (longrope(long_factor=[1.0] * 5), ["long_factor has 5 entries", "(6)"]),
        (longrope(long_factor=[1.0] * 5 + [0]), ["long_factor is", "more than 0"]),
        (longrope(long_factor=[1.0] * 5 + ["2"]), ["long_factor is", "numbers"]),
        (longrope(factor=-1), ["factor is -1"]),
        (
            longrope() | {"original_max_position_embeddings": 1},
            ["original_max_position_embeddings is 1", "at least 2"],
        ),
        ({"partial_rotary_factor": 0.7}, ["partial_rotary_factor is 0.7", "11 entries", "pairs"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor is 1.5", "at most 1"]),
        ({"partial_rotary_factor": 0}, ["partial_rotary_factor is 0"]),
        (longrope(partial_rotary_factor=0.5), ["partial_rotary_factor is 0.5", "outside, 0.75"]),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            ["rope_type is yarn", "default, longrope"],
        ),
    ],
)
def test_malformed_longrope(fields, words):
    refused(ModelError, *words, base=PHI3, **fields)


def test_phi3_slides_in_every_layer_if_there_is_a_window():
    assert parse_config(PHI3).layer_windows == (0,) * 4
    assert parse_config(PHI3 | {"sliding_window": 2047}).layer_windows == (2047,) * 4
    assert parse_config(PHI3 | {"sliding_window": None}).layer_windows == (0,) * 4


def test_granite_multipliers():
    numbers = {"embedding_multiplier": 12, "attention_multiplier": 0.0078125}
    numbers |= {"residual_multiplier": 0.22, "logits_scaling": 16.0}
    config = parse_config(GRANITE | numbers)
    assert (config.embedding_scale, config.attention_scale) == (12.0, 0.0078125)
    assert (config.residual_scale, config.logits_scale) == (0.22, 0.0625)
    for name in numbers:
        refused(ModelError, f"{name} is 0", base=GRANITE, **{name: 0})


# Refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            ["architectures is GPT2LMHeadModel", "LlamaForCausalLM"],
        ),
        ({"architectures": ["LlamaModel"]}, ["LlamaModel"]),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, ["architectures"]),
        ({"architectures": [], "model_type": "gpt2"}, ["architectures is []"]),
        ({"architectures": None, "model_type": None}, ["architectures is None"]),
        ({"architectures": None, "model_type": []}, ["architectures is None"]),
        ({"model_type": "mistral"}, ["model_type is mistral", "llama for LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act is gelu", '"silu"']),
        ({"pretraining_tp": 2}, ["pretraining_tp is 2", "allowed: 1"]),
        ({"pretraining_tp": True}, ["pretraining_tp is True"]),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            ["quantization_config.bits is None", "4"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
        ({"rope_interleaved": True}, ["rope_interleaved is True", "false"]),
        ({"logit_scale": 0.0625}, ["logit_scale is 0.0625", "absent"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ({"num_local_experts": 8}, ["num_local_experts is 8"]),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, ["dual_chunk_attention_config"]),
        ({"per_layer_config": [{}]}, ["per_layer_config"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder is True"]),
        ({"pruned_heads": {"1": [0]}}, ["pruned_heads"]),
        ({"torch_dtype": "float64"}, ["torch_dtype is float64", "float32 or bfloat16 or float16"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype is float8_e4m3fn"]),
        ({"dtype": 7}, ["dtype is 7"]),
        ({"a\nb": 1}, ["a"]),
        ({"x": "y" * 10_000}, ["x is yyy"]),
    ],
)
def test_what_could_change_the_maths_is_refused(fields, words):
    refused(UnsupportedModel, *words, **fields)


def test_biases_that_the_modeling_code_ignores_are_refused():
    refused(
        UnsupportedModel, "attention_bias is True", "mistral", base=MISTRAL, attention_bias=True
    )
    refused(UnsupportedModel, "attention_bias is False", "qwen2", base=QWEN2, attention_bias=False)
    refused(UnsupportedModel, "mlp_bias is True", "qwen3", base=QWEN3, mlp_bias=True)
    assert parse_config(QWEN2 | {"attention_bias": True})
    assert parse_config(MISTRAL | {"attention_bias": False, "mlp_bias": False})


@pytest.mark.parametrize("name", sorted(FIXED))
def test_fixed_fields_pass_at_their_value_and_null(name):
    for value in (*FIXED[name], None):
        assert parse_config(LLAMA | {name: value})


@pytest.mark.parametrize("architecture", families.FAMILIES)
def test_fixed_fields_of_a_family_pass_at_their_values_alone(architecture):
    family, raw = families.family_of(architecture), FAMILIES[families.FAMILIES[architecture]]
    for name, values in family.fixed.items():
        for value in (*values, None):
            assert parse_config(raw | {name: value})
        refused(UnsupportedModel, f"{name} is other", base=raw, **{name: "other"})
    for name in family.harmless:
        assert parse_config(raw | {name: "anything"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"sliding_windows": 8},
            ["sliding_windows is 8", "the nearest known one is sliding_window)", "for llama"],
        ),
        (
            {"architectures": ["LamaCausalLM"]},
            ["LamaCausalLM", "the nearest known one is LlamaForCausalLM"],
        ),
        (
            {"base": QWEN2, "layer_types": ["slide_attention"] * 4},
            [
                "layer_types is slide_attention",
                "nearest known one is sliding_attention",
                "for qwen2",
            ],
        ),
        (
            {"rope_scaling": {"type": "yarn", "beta_fat": 1}},
            ["beta_fat is 1", "the nearest known one is beta_fast"],
        ),
        (
            {"base": GRANITE, "logit_scaling": 2.0},
            ["logit_scaling is 2.0", "nearest known one is logits_scaling"],
        ),
        ({"logits_scaling": 2.0}, ["logits_scaling is 2.0", "absent", "for llama"]),
    ],
)
def test_what_is_unknown_is_refused_with_the_nearest_known(fields, words):
    refused(UnsupportedModel, *words, **fields)


class Noting(dict):
    """An object that notes which of its fields are asked for."""

    def __init__(self, raw, asked):
        super().__init__(raw)
        self.asked = asked

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)

    def __contains__(self, name):
        self.asked.add(name)
        return super().__contains__(name)


SOMETIMES = {"torch_dtype", "rope_scaling", "head_dim", "vocab_size_per_layer_input"}
"""Fields that are read where another one does not say it, or says that they are needed."""
SOMETIMES |= {"original_max_position_embeddings", "quantization_config"}


@pytest.mark.parametrize("name", sorted(ALONE | NEWER | MIXTURES))
def test_every_field_that_a_family_knows_is_read(name, monkeypatch):
    """One that is known and not read would change nothing, whatever it says."""
    asked, init = set(), fields_module.Fields.__init__

    def noting(self, raw, *more, **by_name):
        init(self, Noting(raw, asked), *more, **by_name)

    monkeypatch.setattr(fields_module.Fields, "__init__", noting)
    parse_config(FAMILIES[name])
    family = families.family_of(parse_config(FAMILIES[name]).architecture)
    assert family.read_fields - asked - SOMETIMES == set()


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, "layer_types"),
        ("qwen3_moe", {"num_local_experts": 3}, "num_local_experts is 3, allowed: 4"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers is [4], must be a list of"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts is missing"),
        (
            "dots1",
            {"use_sliding_window": False, "max_window_layers": 1},
            "use_sliding_window is False, allowed: true",
        ),
        ("dots1", {"topk_method": "greedy"}, "topk_method is greedy"),
        ("olmoe", {"num_local_experts": 3}, "num_local_experts is 3, allowed: 4"),
        ("exaone_moe", {"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types is ['dense', 'dense'"),
        ("exaone_moe", {"mlp_layer_types": ["sparse"] * 3}, "must be a list of num_hidden_layers"),
        ("exaone_moe", {"mlp_layer_types": ["moe"] * 4}, "names: dense and sparse"),
        (
            "exaone_moe",
            {"mlp_layer_types": ["sparse"] * 4, "is_moe_layer": [False, True, True, True]},
            "is_moe_layer is [False, True, True, True], allowed: [true, true, true, true]",
        ),
        (
            "exaone_moe",
            {"first_last_k_dense_replace": 2},
            "first_last_k_dense_replace is 2, allowed: 1",
        ),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1, allowed: 0"),
        *(
            ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic"} | block}, words)
            for block, words in (
                ({}, "rope_scaling: alpha is missing"),
                ({"alpha": 0}, "alpha is 0, must be a number of more than 0"),
                ({"alpha": 9.0, "factor": 2.0}, "factor is 2.0, allowed: 1.0"),
                ({"alpha": 9.0, "beta": 2.0}, "beta is 2.0, allowed: absent"),
                ({"alpha": 9.0, "rope_type": "yarn"}, 'rope_type is yarn, allowed: "dynamic"'),
            )
        ),
        (
            "hunyuan_v1_dense",
            {
                "rope_scaling": {"type": "dynamic", "alpha": 9.0},
                "rope_parameters": {"type": "default"},
            },
            "rope_scaling is {'rope_type': 'default'}, allowed: the same as rope_parameters",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": 9.0}, "head_dim": 2},
            "head_dim is 2, must be more",
        ),
        ("hunyuan_v1_dense", {"attention_head_dim": 8}, "attention_head_dim is 8, allowed: 16"),
        ("granitemoehybrid", {"num_local_experts": 4}, "num_local_experts is 4, allowed: 0"),
        ("granitemoehybrid", {"num_local_experts": None}, "num_local_experts is 8, allowed: 0"),
        ("granitemoehybrid", {"shared_intermediate_size": None}, "size is missing"),
        (
            "granitemoehybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type is alibi",
        ),
        ("flex_olmo", {"num_local_experts": 3}, "num_local_experts is 3, allowed: 4"),
        ("hy_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2, allowed: 1"),
        ("hy_v3", {"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types is ['dense', 'dense'"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2, allowed: 1"),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size is missing"),
        ("llama4_text", {"moe_layers": [0, 4]}, "moe_layers is [0, 4], must be a list of layers"),
        ("llama4_text", {"moe_layers": []}, "moe_layers is [], allowed: a list that leaves"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0], must be a list"),
        ("llama4_text", {"sliding_window": 8}, "sliding_window is 8, allowed: false"),
        ("llama4_text", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, allowed: 0.0"),
        ("llama4_text", {"attn_temperature_tuning": "no"}, "must be true or false"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True, allowed: false"),
        ("ernie4_5_moe", {"moe_norm_min": 1e-6}, "moe_norm_min is 1e-06, allowed: 1e-12"),
        ("ernie4_5_moe", {"moe_k": 5}, "moe_k is 5, must be an integer from 1 to 4"),
        (
            "ernie4_5_moe",
            {"moe_layer_start_index": 4},
            "moe_layer_start_index is 4, allowed: a number that leaves layers with experts",
        ),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "moe_topk is [1, 2], allowed: one number"),
        ("hunyuan_v1_moe", {"moe_topk": 5}, "moe_topk is 5, must be at most num_experts (4)"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert is 2, allowed: 1"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 12}, "moe_intermediate_size is 12, allowed"),
        ("arcee", {"hidden_act": "silu"}, 'hidden_act is silu, allowed: "relu2"'),
        ("helium", {"head_dim": 32}, "head_dim is 32, allowed: hidden_size / num_attention_heads"),
        ("hyperclovax", {"use_post_norm": False}, "use_post_norm is False, allowed: true"),
        ("qwen2_moe", {"attention_bias": False}, "attention_bias is False, allowed: true"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token is 3, allowed: 4"),
        *((name, {"mlp_bias": True}, "mlp_bias is True") for name in MIXTURES),
    ],
)
def test_fields_that_contradict_what_is_read_are_refused(name, fields, words):
    raw = FAMILIES[name]
    if "layer_types" in words:
        fields = fields | {"layer_types": ["full_attention"] * raw["num_hidden_layers"]}
    refused(ModelError, words, base=raw, **fields)


def test_which_layers_of_exaone_have_experts():
    raw = FAMILIES["exaone_moe"]
    for fields, without in (
        ({}, (0,)),
        ({"first_k_dense_replace": 0}, ()),
        ({"first_k_dense_replace": 2, "first_last_k_dense_replace": 2}, (0, 1)),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}, (1, 3)),
    ):
        assert parse_config(raw | fields).dense_layers == without
    # The first files have this name.
    other = parse_config(raw | {"architectures": ["ExaoneMoEForCausalLM"]})
    usual = replace(parse_config(raw), architecture=other.architecture, raw_hash=other.raw_hash)
    assert other == usual


def test_which_layers_of_ernie_have_experts():
    raw = FAMILIES["ernie4_5_moe"]
    for fields, without in (
        ({}, (0,)),
        ({"moe_layer_start_index": 0}, ()),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 2}, (0, 1, 3)),
        ({"moe_layer_interval": 2, "moe_layer_end_index": -1}, (0, 2)),
    ):
        assert parse_config(raw | fields).dense_layers == without


def test_layers_of_granite_4_are_attention_and_may_rotate_nothing():
    for types in (["attention"] * 4, ["full_attention"] * 4):
        assert parse_config(GRANITE4 | {"layer_types": types}).unrotated_layers == ()
    for still in ("nope", None):
        config = parse_config(GRANITE4 | {"position_embedding_type": still})
        assert config.unrotated_layers == (0, 1, 2, 3)
    for types, words in (
        (["attention"] * 3 + ["mamba"], "layer_types is mamba, allowed: attention and full_"),
        (["attention"], "layer_types is ['attention'], must be a list of num_hidden_layers (4)"),
        (None, "layer_types is missing"),
    ):
        refused(ModelError, words, base=GRANITE4, layer_types=types)


def test_layers_of_llama_4():
    full, chunked = "full_attention", "chunked_attention"
    raw = FAMILIES["llama4_text"] | {"attention_chunk_size": 24, "floor_scale": 100}
    for fields, chunks, unrotated in (
        ({}, (24, 24, 24, 0), (3,)),
        ({"no_rope_layers": []}, (24, 24, 24, 0), (3,)),
        ({"no_rope_layers": [1, 0, 1, 1]}, (24, 0, 24, 24), (1,)),
        ({"layer_types": [full, chunked, full, full]}, (0, 24, 0, 0), (3,)),
        ({"layer_types": [full] * 4, "attention_chunk_size": None}, (0, 0, 0, 0), (3,)),
    ):
        config = parse_config(raw | fields)
        assert (config.layer_windows, config.unrotated_layers) == (chunks, unrotated)
        assert (config.windows_are_chunks, config.temper) == (True, (0.1, 100))
        for layer, chunk in zip(model_of(config).layers, chunks, strict=True):
            assert (layer[0].mixer.window, layer[0].mixer.chunk) == (0, chunk)
    for fields, without in (
        ({}, ()),
        ({"interleave_moe_layer_step": 2}, (0, 2)),
        ({"interleave_moe_layer_step": 2, "moe_layers": [0, 3]}, (1, 2)),
    ):
        assert parse_config(raw | fields).dense_layers == without
    for value, temper in ((4, (0.1, 100)), (0, None), (True, (0.1, 100)), (False, None)):
        assert parse_config(raw | {"attn_temperature_tuning": value}).temper == temper
    with pytest.raises(UnsupportedModel, match="layer_types is sliding_attention, allowed: full_"):
        parse_config(raw | {"layer_types": ["sliding_attention"] * 4})


def test_heads_of_llama_4_are_normed_where_they_are_rotated():
    config = parse_config(FAMILIES["llama4_text"])
    mixers = [layer[0].mixer for layer in model_of(config).layers]
    assert [mixer.qk_norm for mixer in mixers] == [True, True, True, False]
    assert [mixer.temper is None for mixer in mixers] == [True, True, True, False]
    without = parse_config(FAMILIES["llama4_text"] | {"use_qk_norm": False})
    assert not any(layer[0].mixer.qk_norm for layer in model_of(without).layers)


def test_the_rotary_base_of_hunyuan_is_stretched():
    block = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
    stretched = block | {"mscale_all_dim": 1.0, "type": "dynamic"}
    raw = HUNYUAN | {"head_dim": 32, "rope_theta": 1e4}
    config = parse_config(raw | {"rope_scaling": stretched})
    assert config.rope == RopeConfig(theta=1e4 * 1000 ** (32 / 30))
    newer = {"rope_parameters": stretched | {"rope_theta": 1e4}, "rope_theta": None}
    assert parse_config(raw | newer).rope == config.rope
    both = newer | {"rope_scaling": stretched}
    assert parse_config(raw | both).rope == config.rope
    assert parse_config(raw).rope == RopeConfig(theta=1e4)


def test_numbers_of_layers_of_hunyuan():
    raw = FAMILIES["hunyuan_v1_moe"]
    listed = parse_config(raw | {"num_experts": [4] * 4, "moe_topk": [2] * 4})
    assert replace(listed, raw_hash=parse_config(raw).raw_hash) == parse_config(raw)


def test_logits_of_hyperclova_are_multiplied():
    config = parse_config(CLOVA | {"logits_scaling": 0.125, "head_dim": 32})
    assert (config.logits_scale, config.attention_scale) == (0.125, 32**-0.5)


def test_a_cap_that_gemma_3_with_images_does_not_apply_is_refused():
    """Its text model alone does, and so do all of Gemma 4."""
    cap = {"final_logit_softcapping": 30.0}
    for name in ("gemma3_text", "gemma4", "gemma4_unified"):
        raw = FAMILIES[name]
        with_cap = raw | (
            {"text_config": raw["text_config"] | cap} if "text_config" in raw else cap
        )
        assert parse_config(with_cap).logits_cap == 30.0
    images = IMAGES3 | {"text_config": IMAGES3["text_config"] | cap}
    refused(UnsupportedModel, "text_config.final_logit_softcapping is 30.0, allowed", base=images)


@pytest.mark.parametrize("name", sorted(ALONE | NEWER | MIXTURES))
def test_a_field_that_is_left_out_is_what_transformers_takes(name):
    """Or it has to be there. Tokens that end a text are no default of the architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw, compared = FAMILIES[name], 0
    family = families.family_of(parse_config(raw).architecture)
    known = (family.read_fields | set(family.fixed_fields)) - {"eos_token_id", "bos_token_id"}
    for field in dataclasses.fields(CONFIG_MAPPING[name]):
        if field.name not in known or field.default is dataclasses.MISSING:
            continue
        try:
            ours = parse_config({key: raw[key] for key in raw if key != field.name})
        except ModelError:
            continue
        theirs = parse_config(raw | {field.name: field.default})
        assert replace(ours, raw_hash="") == replace(theirs, raw_hash=""), field.name
        compared += 1
    assert compared > 5


def test_lists_of_fields_do_not_overlap():
    assert not READ & HARMLESS
    assert not (READ | HARMLESS) & set(FIXED)
    for family in map(families.family_of, (*families.FAMILIES, *families.PARTS)):
        assert not family.fields & (READ | HARMLESS | family.harmless)
        assert not family.harmless & (READ | HARMLESS | set(family.fixed_fields))
        assert not set(family.fixed) & (family.read_fields | HARMLESS | set(FIXED))


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize(
    "value", [None, 0, -1, 2.0, "12", True, [], {}, 2**31, 1e400, pytest.param(10**5000, id="huge")]
)
def test_sizes_must_be_positive_integers(name, value):
    refused(ModelError, name, **{name: value})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            ["num_attention_heads is 6", "num_key_value_heads (4)"],
        ),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, ["hidden_size is 64", "(3)"]),
        ({"num_key_value_heads": 8}, ["num_attention_heads is 4"]),
        ({"head_dim": 15}, ["head_dim is 15", "even"]),
        ({"head_dim": 1 << 20}, ["head_dim"]),
        ({"num_hidden_layers": 1_000_000}, ["num_hidden_layers", "10000"]),
        ({"hidden_size": "64"}, ['hidden_size is "64", must be an integer from 1']),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0"]),
        ({"rms_norm_eps": "1e-6"}, ['rms_norm_eps is "1e-6"']),
        ({"tie_word_embeddings": "yes"}, ['tie_word_embeddings is "yes"', "true or false"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings is 1"]),
        ({"attention_bias": 0}, ["attention_bias is 0"]),
        ({"eos_token_id": 1000}, ["eos_token_id is 1000", "vocab_size (1000)"]),
        ({"eos_token_id": [1, "2"]}, ["eos_token_id"]),
        ({"eos_token_id": -1}, ["eos_token_id is -1"]),
        ({"eos_token_id": True}, ["eos_token_id is True"]),
        ({"eos_token_id": {}}, ["eos_token_id is {}"]),
        ({"bos_token_id": 5000}, ["bos_token_id is 5000"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures is LlamaForCausalLM", "list"]),
        ({"architectures": [5]}, ["architectures is [5]"]),
    ],
)
def test_malformed_fields(fields, words):
    refused(ModelError, *words, **fields)


BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
QUANTIZATIONS = [
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:.*down.*": {}}},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": BLOCKS | {"symmetric": True, "dynamic": False},
                "input_activations": BLOCKS
                | {"strategy": "group", "group_size": 128, "dynamic": True},
            }
        },
    },
]


def paths(tree, before=()):
    """Of all that an object has, and objects in it."""
    for name, value in tree.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


@pytest.mark.parametrize("base", QUANTIZATIONS, ids=lambda base: base["quant_method"])
def test_every_field_of_a_quantization_may_be_nonsense(base):
    """It is read, or refused in one line."""
    parse_config(LLAMA | {"quantization_config": base}, where="config.json")
    refusals = []
    for path in paths(base):
        for nonsense in (None, 5, -1, 1.5, True, "x", [], {}, [1], ["re:("], {"a": 1}, 2**70):
            changed = json.loads(json.dumps(base))
            place = changed
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = nonsense
            try:
                parse_config(LLAMA | {"quantization_config": changed}, where="config.json")
            except ModelError as error:
                refusals.append(str(error))
    assert len(refusals) > 20
    assert all(text.startswith("config.json: quantization_config") for text in refusals)
    assert not any("\n" in text for text in refusals)


def test_text_in_the_place_of_a_number_is_quoted():
    """Else it would look like what is allowed."""
    awq = {"quant_method": "awq", "bits": "4", "group_size": 128}
    words = ['quantization_config.bits is "4", allowed: 4 or absent']
    refused(UnsupportedModel, *words, quantization_config=awq)
    refused(UnsupportedModel, 'mlp_bias is "false", allowed: false', base=QWEN2, mlp_bias="false")


def test_eos_ids_of_both_files_are_merged():
    assert parse_config(LLAMA, {"eos_token_id": [5, 2, 9]}).eos_token_ids == (2, 5, 9)
    assert parse_config(LLAMA, {"eos_token_id": 7}).eos_token_ids == (2, 7)
    assert parse_config(LLAMA | {"eos_token_id": None}, {"eos_token_id": [5]}).eos_token_ids == (5,)
    assert parse_config(LLAMA | {"eos_token_id": [3, 4]}, {}).eos_token_ids == (3, 4)
    assert parse_config(LLAMA | {"eos_token_id": None}).eos_token_ids == ()
    with pytest.raises(ModelError, match=r"^/m/generation_config.json: eos_token_id is \"x\""):
        parse_config(LLAMA, {"eos_token_id": "x"}, "/m/config.json")


# Files


def write(folder, config=LLAMA, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_load_reads_both_files(tmp_path):
    config = load_config(write(tmp_path, generation={"eos_token_id": [8], "temperature": 0.6}))
    assert isinstance(config, ModelConfig)
    assert config.eos_token_ids == (2, 8)
    assert load_config(str(tmp_path)) == config


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The cache of the Hub's library, with the bundled model under another name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--Some.Body--Demo-1.5"
    snapshot, blobs = model / "snapshots" / "0123abcd", model / "blobs"
    for folder in (snapshot, blobs, model / "refs"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text("0123abcd")
    for number, file in enumerate(sorted(Path(model_folder("demo")).iterdir())):
        if file.is_file():
            (blobs / str(number)).write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_the_name_of_a_model_on_the_hub_is_where_it_was_downloaded(hub_cache, monkeypatch):
    assert model_folder("Some.Body/Demo-1.5") == str(hub_cache)
    assert load_config(model_folder("Some.Body/Demo-1.5")) == load_config(model_folder("demo"))
    # A folder of that name goes first.
    monkeypatch.chdir(hub_cache.parent)
    (hub_cache.parent / "Some.Body" / "Demo-1.5").mkdir(parents=True)
    assert model_folder("Some.Body/Demo-1.5") == "Some.Body/Demo-1.5"


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "a--b/c", "a..b/c", "a/b.git", "Some.Body/demo"]
)
def test_the_name_of_a_model_on_the_hub_is_told_how_to_become_a_folder(hub_cache, name):
    words = (
        f"no such folder: {name}, and no such model among those in {hub_cache.parents[2]}; "
        f"nothing is downloaded here: .* `hf download {name}`"
    )
    with pytest.raises(ModelNotFound, match=words):
        model_folder(name)


def test_missing_folder_and_file(tmp_path):
    for folder in (tmp_path / "no", "", "\0", "a" * 5000):
        with pytest.raises(ModelNotFound):
            load_config(folder)
    with pytest.raises(ModelNotFound, match=r"config\.json: no such file"):
        load_config(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match="no such folder"):
        load_config(tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"vocab_size": ' + b"9" * 5000 + b"}",
        b"\x00" * 10,
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_json(tmp_path, name, content):
    write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_config(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_folder_in_place_of_the_file(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path):
    (write(tmp_path) / "config.json").chmod(0)
    with pytest.raises(ModelError, match="cannot be read"):
        load_config(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
ROPE_NAMES = st.sampled_from(
    "type rope_type rope_theta factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings beta_fast "
    "beta_slow attention_factor mscale mscale_all_dim truncate partial_rotary_factor "
    "full_attention short_factor "
    "long_factor".split()
)
EVERY_FAMILY = [families.family_of(architecture) for architecture in families.FAMILIES]
FIELDS = sorted(
    {name for family in EVERY_FAMILY for name in (*family.read_fields, *family.fixed_fields)}
)
ROPE_VALUES = st.sampled_from(
    [
        [1.0] * 8,
        [0.5, 2],
        "longrope",
        "yarn",
        "llama3",
        "linear",
        "default",
        1,
        2,
        4.0,
        1e-300,
        1e300,
        10**400,
        -1,
        0,
        None,
    ]
)


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=4),
    st.dictionaries(ROPE_NAMES, ROPE_VALUES, max_size=6),
    st.booleans(),
)
def test_any_values_give_a_config_or_one_line(family, fields, rope, inside):
    raw, fields = FAMILIES[family], fields | {"rope_parameters": rope}
    try:
        text = {"text_config": MISTRAL | fields} if inside and family == "mistral3" else fields
        config = parse_config(raw | text)
    except TwinferError as error:
        message = str(error)
    else:
        message = ""
        assert len(config.layer_windows) == config.num_layers
        frequencies, scaling = rope_inverse_frequencies(config.rope, config.head_dim, 1)
        assert np.isfinite(frequencies).all()
        assert np.isfinite(scaling)
    assert "\n" not in message
    assert len(message) < 1500
