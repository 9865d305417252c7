"""Gemma, GLM-4, OLMo 2 and 3, Ministral 3 and others: what their configs say, and what is refused."""

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch

import numpy as np
import pytest

from twinfer.ops.testing import DTYPES
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError, ModelError, UnsupportedModel
from twinfer.shared.models.caches import cache_layout, cached_tokens
from twinfer.shared.models.config import Heads
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.decoder import model_of, parameters_of, rotary_tables, rounded
from twinfer.shared.models.rope import RopeConfig, rope_inverse_frequencies
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.models.spec import source_of
from twinfer.shared.models.table import parameter_count

from .checkpoint_tensors import expected_tensors

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def config_of(architecture, **fields):
    return parse_config({"architectures": [architecture]} | SMALL | fields, where="/m/config.json")


def gemma3(**fields):
    return config_of("Gemma3ForCausalLM", **fields)


def olmo3(**fields):
    return config_of("Olmo3ForCausalLM", **fields)


def refused(error, words, architecture, **fields):
    with pytest.raises(error) as caught:
        config_of(architecture, **fields)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


# --- as transformers reads it
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "model", "fields"),
    [
        ("Gemma3TextConfig", "Gemma3ForCausalLM", {}),
        ("Glm4Config", "Glm4ForCausalLM", {}),
        ("Glm4Config", "Glm4ForCausalLM", {"attention_bias": False, "tie_word_embeddings": True}),
        ("Olmo3Config", "Olmo3ForCausalLM", {"attention_bias": True}),
        ("Ministral3Config", "Ministral3ForCausalLM", {}),
        ("SeedOssConfig", "SeedOssForCausalLM", {}),
        ("SeedOssConfig", "SeedOssForCausalLM", {"attention_out_bias": True, "mlp_bias": True}),
        ("GlmConfig", "GlmForCausalLM", {"tie_word_embeddings": True}),
        ("Ernie4_5Config", "Ernie4_5ForCausalLM", {}),
        ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"use_bias": True, "tie_word_embeddings": False}),
        ("GemmaConfig", "GemmaForCausalLM", {}),
        ("GemmaConfig", "GemmaForCausalLM", {"attention_bias": True, "tie_word_embeddings": False}),
        ("SmolLM3Config", "SmolLM3ForCausalLM", {"bos_token_id": None}),
        (
            "SmolLM3Config",
            "SmolLM3ForCausalLM",
            {"bos_token_id": None, "use_sliding_window": True, "sliding_window": 8},
        ),
        ("Exaone4Config", "Exaone4ForCausalLM", {"sliding_window_pattern": 2}),
        (
            "Exaone4Config",
            "Exaone4ForCausalLM",
            {"layer_types": [FULL] * 6, "sliding_window": None},
        ),
        ("MinistralConfig", "MinistralForCausalLM", {}),
        ("MinistralConfig", "MinistralForCausalLM", {"sliding_window": None}),
        ("CwmConfig", "CwmForCausalLM", {"bos_token_id": 1, "mlp_bias": True}),
        ("Gemma4TextConfig", "Gemma4ForCausalLM", {"hidden_size_per_layer_input": 0}),
        (
            "Gemma4TextConfig",
            "Gemma4ForCausalLM",
            {
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "global_head_dim": 64,
                "hidden_size_per_layer_input": 0,
                "attention_bias": True,
            },
        ),
        (
            "Gemma4TextConfig",
            "Gemma4ForCausalLM",
            {
                "layer_types": [SLIDING, FULL] * 3,
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 1000,
            },
        ),
        ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM", {"sliding_window": 8}),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_parameters_are_those_of_the_transformers_model(config, model, fields, whole):
    import torch
    import transformers

    sizes = SMALL | {"pad_token_id": None, "architectures": [model]} | fields
    theirs = getattr(transformers, config)(**sizes)
    with torch.device("meta"):
        made = getattr(transformers, model)(theirs)
    tensors = {key: tuple(value.shape) for key, value in made.state_dict().items()}
    if theirs.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    ours = parse_config(json.loads(theirs.to_json_string(use_diff=not whole)))
    assert expected_tensors(parameters_of(ours)) == tensors
    types = getattr(theirs, "layer_types", [FULL] * 6)
    windows = tuple(theirs.sliding_window if name == SLIDING else 0 for name in types)
    assert ours.layer_windows == windows
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("config", "architecture"),
    [("Gemma3TextConfig", "Gemma3ForCausalLM"), ("Olmo3Config", "Olmo3ForCausalLM")],
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_local_base_freq": 2e4},
        {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 3e6}}},
        {
            "rope_parameters": {
                FULL: {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7e5},
                SLIDING: {"rope_type": "default", "rope_theta": 3e4},
            }
        },
    ],
)
def test_both_ropes_are_read_as_transformers_reads_them(config, architecture, fields):
    import copy

    import transformers

    if "rope_local_base_freq" in fields and architecture == "Olmo3ForCausalLM":
        refused(UnsupportedModel, ["rope_local_base_freq is 20000.0"], architecture, **fields)
        return
    theirs = getattr(transformers, config)(**copy.deepcopy(SMALL | fields))
    ours = config_of(architecture, **fields)
    assert len(ours.ropes) == 1 + (ours.window_rope is not None)
    for name, rope in ((FULL, ours.rope), (SLIDING, ours.ropes[-1])):
        block = theirs.rope_parameters[name]
        assert (rope.theta, rope.kind) == (block["rope_theta"], block["rope_type"])
        assert rope.factor == block.get("factor", 1.0)


def test_layers_without_a_type_follow_a_pattern():
    assert gemma3(sliding_window=8).layer_windows == (8, 8, 8, 8, 8, 0)
    assert gemma3(sliding_window=8, sliding_window_pattern=2).layer_windows == (8, 0) * 3
    assert config_of("Gemma2ForCausalLM").layer_windows == (4096, 0) * 3
    assert olmo3(sliding_window=8).layer_windows == (8, 8, 8, 0, 8, 8)
    types = [FULL] * 5 + [SLIDING]
    assert gemma3(sliding_window=8, layer_types=types).layer_windows == (0,) * 5 + (8,)


def test_one_rope_where_no_layer_needs_the_other():
    assert gemma3(layer_types=[FULL] * 6).window_rope is None
    assert olmo3().window_rope is None
    assert olmo3(rope_scaling={"rope_type": "linear", "factor": 2.0}).window_rope == RopeConfig(
        theta=5e5
    )


def test_published_files_leave_out_what_is_the_default():
    """google/gemma-3-4b-it says five numbers of its text model."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    raw |= {"eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256}
    config = parse_config(raw)
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (262_208, 256, 4)
    assert config.tie_embeddings
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.window_rope == RopeConfig(theta=1e4)
    assert config.layer_windows == tuple(0 if i % 6 == 5 else 1024 for i in range(34))
    assert config.attention_scale == 1 / 16
    assert config.image_token_ids == (262_144,)
    assert config.text_architecture == "Gemma3ForCausalLM"


def test_caps_are_off_where_they_are_null():
    usual, off = (
        config_of("Gemma2ForCausalLM", **fields)
        for fields in ({}, {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    )
    assert (usual.attention_cap, usual.logits_cap) == (50.0, 30.0)
    assert (off.attention_cap, off.logits_cap) == (0.0, 0.0)
    assert (gemma3().attention_cap, gemma3().logits_cap) == (0.0, 0.0)
    assert gemma3(final_logit_softcapping=20.0).logits_cap == 20.0


def test_half_of_a_head_is_rotated_by_default():
    assert config_of("Glm4ForCausalLM").rope.partial_rotary_factor == 0.5
    assert config_of("Glm4ForCausalLM", partial_rotary_factor=1.0).rope.rotated(16) == 16
    order = parameters_of(config_of("Glm4ForCausalLM")).layer(0)["qkv"].parts[0].order
    assert (order.head_dim, order.rotated) == (16, 8)


def test_ministral_3_has_a_rope_of_its_own_where_it_says_none():
    config = config_of("Ministral3ForCausalLM")
    assert (config.rope.kind, config.rope.factor, config.temper) == ("yarn", 16.0, (0.1, 16384))
    assert rope_inverse_frequencies(config.rope, 16, 1)[1] == 1.0


def gemma4(**fields):
    usual = {"hidden_size_per_layer_input": 0, "sliding_window": 8}
    return config_of("Gemma4ForCausalLM", **usual | fields)


def test_layers_of_gemma_4_without_a_window_have_heads_of_their_own():
    first = gemma4(global_head_dim=64, num_global_key_value_heads=1, attention_k_eq_v=True)
    assert (first.full_heads, first.full_keys_are_values) == (Heads(4, 1, 64), True)
    by_layer = {"5": {"head_dim": 64, "num_key_value_heads": 1}}
    newer = gemma4(per_layer_config=by_layer, attention_k_eq_v=True)
    assert replace(newer, raw_hash="") == replace(first, raw_hash="")
    # As transformers writes it where no layer has anything of its own.
    assert replace(gemma4(per_layer_config={}), raw_hash="") == replace(
        gemma4(global_head_dim=16), raw_hash=""
    )
    # Without keys that are values the number of heads is not read, as in transformers.
    assert gemma4(num_global_key_value_heads=1).full_heads == Heads(4, 2, 512)
    window, full = (layer[0].mixer for layer in model_of(first).kinds)
    assert (window.num_kv_heads, window.head_dim, window.window) == (2, 16, 8)
    assert (full.num_kv_heads, full.head_dim, full.window) == (1, 64, 0)
    assert window.scale == full.scale == 1.0
    assert window.v_norm
    assert full.v_norm
    keys = [part.key for part in parameters_of(first).layer(5)["qkv"].parts]
    assert [key.split(".")[-2] for key in keys] == ["q_proj", "k_proj", "k_proj"]


def test_the_last_layer_of_gemma_4_sees_everything():
    assert gemma4(layer_types=[SLIDING] * 6).layer_windows == (8,) * 5 + (0,)
    assert gemma4(layer_types=None).layer_windows == (8,) * 5 + (0,)


def test_most_angles_of_a_proportional_rope_are_zero():
    rope = gemma4().rope
    assert (rope.kind, rope.theta, rope.partial_rotary_factor) == ("proportional", 1e6, 0.25)
    inverse, scaling = rope_inverse_frequencies(rope, 512, 1)
    np.testing.assert_allclose(inverse[:64], 1e6 ** -(np.arange(0, 128, 2) / 512))
    assert inverse.shape == (256,)
    assert not inverse[64:].any()
    assert scaling == 1.0
    cos, sin = rotary_tables(gemma4(), 3)
    assert cos.shape == sin.shape == (3, 256 + 8)


@pytest.mark.parametrize(
    "block",
    [
        {"rope_type": "proportional"},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        {"rope_type": "default"},
        {},
    ],
)
def test_a_rope_of_gemma_4_that_says_no_part_is_that_of_transformers(block):
    """The part of a file that has no rope at all is not that of one which leaves it out."""
    import transformers
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    blocks = {
        FULL: block | {"rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    config = gemma4(rope_parameters=blocks)
    theirs = transformers.Gemma4TextConfig(
        rope_parameters=copy.deepcopy(blocks), head_dim=config.head_dim, num_hidden_layers=6,
        global_head_dim=config.full_heads.size,
    )  # fmt: skip
    found, _ = rope_inverse_frequencies(config.rope, config.full_heads.size, 1)
    expected = Gemma4TextRotaryEmbedding(theirs).full_attention_inv_freq.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_layers_that_read_another_cache_have_none_of_their_own():
    types = [SLIDING, FULL] * 3
    config = gemma4(layer_types=types, num_kv_shared_layers=3, use_double_wide_mlp=True)
    layers, table = model_of(config).layers, parameters_of(config)
    assert [layer[0].mixer.reads for layer in layers] == [None, None, None, 1, 2, 1]
    assert [source_of(layer, i) for i, layer in enumerate(layers)] == [0, 1, 2, 1, 2, 1]
    layout = cache_layout(model_of(config), 16, 4096)
    assert layout.places[3] == layout.places[5] == layout.places[1]
    assert layout.places[4] == layout.places[2]
    assert {"q", "q_norm"} <= set(table.layer(3))
    assert not {"qkv", "k_norm"} & set(table.layer(3))
    assert table.layer(3)["down"].shape == (64, 256)
    # Published files have these weights all the same.
    assert any(fnmatch("model.layers.4.self_attn.v_proj.weight", p) for p in table.ignored)
    assert not any(fnmatch("model.layers.2.self_attn.v_proj.weight", p) for p in table.ignored)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("gemma4-31b", 30.81), ("gemma4-e2b", 4.63), ("gemma4-e4b", 7.46)),
        ("gemma4-26b-a4b", 25.25),
    ],
)
def test_gemma_4_has_as_many_parameters_as_it_says(name, count):
    """30.7, 5.1 and 8 billion with towers, and 25.2; keys that are values are held twice here."""
    table = parameters_of(parse_config(SHAPES[name]))
    assert parameter_count(table) == pytest.approx(count * 1e9, rel=1e-3)


def test_gemma_4_31b_holds_eight_times_the_tokens():
    model = model_of(parse_config(SHAPES["gemma4-31b"]))
    groups, plain = (cache_layout(model, 16, 32768, windows) for windows in (True, False))
    assert {group.page_size for group in groups.groups} == {16, 32}
    assert groups.page_entries * groups.stripe == plain.page_entries * plain.stripe
    held, before = (cached_tokens(layout, 10_000, 32768) for layout in (groups, plain))
    assert held > 8 * before


# --- what is refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "architecture", "fields", "words"),
    [
        (
            UnsupportedModel,
            "Gemma3ForCausalLM",
            {"rope_parameters": {"full_atention": {"rope_type": "default"}}},
            ["full_atention", "sliding_attention", "the nearest known one is full_attention"],
        ),
        (
            UnsupportedModel,
            "Gemma3ForCausalLM",
            {"rope_parameters": {FULL: {"rope_type": "yarm"}}},
            ["rope_parameters.full_attention", "yarm", "the nearest known one is yarn"],
        ),
        (
            UnsupportedModel,
            "Gemma3ForCausalLM",
            {"layer_types": [FULL] * 5 + ["chunked_attention"]},
            ["layer_types is chunked_attention", SLIDING],
        ),
        (ModelError, "Gemma3ForCausalLM", {"layer_types": [FULL]}, ["num_hidden_layers (6)"]),
        (
            ModelError,
            "Gemma3ForCausalLM",
            {"rope_local_base_freq": "x"},
            ['rope_local_base_freq is "x"'],
        ),
        (
            ModelError,
            "Gemma3ForCausalLM",
            {"sliding_window_pattern": 0},
            ["sliding_window_pattern is 0"],
        ),
        (UnsupportedModel, "Gemma3ForCausalLM", {"hidden_activation": "silu"}, ["is silu"]),
        (
            UnsupportedModel,
            "Gemma3ForCausalLM",
            {"attn_logit_softcapping": 2.0},
            ["attn_logit_softcapping is 2.0, allowed: absent"],
        ),
        (
            UnsupportedModel,
            "Gemma3ForCausalLM",
            {"use_bidirectional_attention": True},
            ["use_bidirectional_attention is True"],
        ),
        (UnsupportedModel, "Gemma2ForCausalLM", {"hidden_act": "gelu"}, ["hidden_act is gelu"]),
        (
            UnsupportedModel,
            "Gemma2ForCausalLM",
            {"sliding_window_size": 8},
            ["sliding_window_size is 8", "4096"],
        ),
        (
            ModelError,
            "Gemma2ForCausalLM",
            {"final_logit_softcapping": 0},
            ["final_logit_softcapping is 0", "more than 0"],
        ),
        (ModelError, "Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar"]),
        (UnsupportedModel, "Gemma2ForCausalLM", {"max_window_layers": 2}, ["max_window_layers"]),
        (
            UnsupportedModel,
            "Gemma4ForCausalLM",
            {"num_experts": 8},
            ["num_experts is 8", "absent unless enable_moe_block is true"],
        ),
        (
            UnsupportedModel,
            "Gemma4ForCausalLM",
            {"per_layer_config": {"0": {"head_dim": 32}}},
            ["per_layer_config", "each of the layers ['5']"],
        ),
        (
            UnsupportedModel,
            "Gemma4ForCausalLM",
            {"per_layer_config": {"5": {"head_dim": 32, "intermediate_size": 8}}},
            ["per_layer_config", "head_dim and num_key_value_heads"],
        ),
        (
            ModelError,
            "Gemma4ForCausalLM",
            {"num_kv_shared_layers": 2},
            ["num_kv_shared_layers is 2", "layers of each type"],
        ),
        (ModelError, "Gemma4ForCausalLM", {"num_kv_shared_layers": 6}, ["from 0 to 5"]),
        (ModelError, "Gemma4ForCausalLM", {"num_kv_shared_layers": False}, ["is False"]),
        (ModelError, "Gemma4ForCausalLM", {"hidden_size_per_layer_input": -1}, ["from 0 to"]),
        (ModelError, "Gemma4ForCausalLM", {"hidden_size_per_layer_input": False}, ["is False"]),
        (
            UnsupportedModel,
            "Gemma4ForCausalLM",
            {"vocab_size_per_layer_input": 500},
            ["vocab_size_per_layer_input is 500", "1000"],
        ),
        (
            UnsupportedModel,
            "Gemma4ForCausalLM",
            {"rope_parameters": {FULL: {"rope_type": "proportional", "rope_theta": 1e6}}},
            ["rope_parameters is", SLIDING],
        ),
        (
            UnsupportedModel,
            "Gemma4ForCausalLM",
            {
                "rope_parameters": {
                    FULL: {"rope_type": "default", "partial_rotary_factor": 0.5},
                    SLIDING: {"rope_type": "default"},
                }
            },
            [f"rope_parameters.{FULL}.partial_rotary_factor is 0.5", "1.0 or absent"],
        ),
        (
            ModelError,
            "Gemma4ForCausalLM",
            {"global_head_dim": 33},
            ["global_head_dim is 33", "must be even"],
        ),
        (
            UnsupportedModel,
            "Gemma4ForCausalLM",
            {"use_bidirectional_attention": "all"},
            ["use_bidirectional_attention is all"],
        ),
        (UnsupportedModel, "Olmo2ForCausalLM", {"sliding_window": 8}, ["sliding_window is 8"]),
        (UnsupportedModel, "Olmo2ForCausalLM", {"clip_qkv": 8.0}, ["clip_qkv is 8.0"]),
        (UnsupportedModel, "Glm4ForCausalLM", {"mlp_bias": True}, ["mlp_bias is True"]),
        (
            ModelError,
            "Ministral3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            ["rope_parameters: llama_4_scaling_beta is missing"],
        ),
        (
            ModelError,
            "Ministral3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            ["original_max_position_embeddings is missing"],
        ),
        (
            UnsupportedModel,
            "Ministral3ForCausalLM",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ["rope_scaling is", "absent"],
        ),
        (UnsupportedModel, "GlmForCausalLM", {"sliding_window": 8}, ["sliding_window is 8"]),
        (
            UnsupportedModel,
            "Ernie4_5ForCausalLM",
            {"use_bias": True, "mlp_bias": False},
            ["mlp_bias is False", "true"],
        ),
        (UnsupportedModel, "GemmaForCausalLM", {"hidden_act": "silu"}, ["hidden_act is silu"]),
        (
            UnsupportedModel,
            "GemmaForCausalLM",
            {"hidden_activation": "gelu"},
            ["hidden_activation is gelu"],
        ),
        (
            UnsupportedModel,
            "GemmaForCausalLM",
            {"use_bidirectional_attention": True},
            ["use_bidirectional_attention is True"],
        ),
        (
            ModelError,
            "SmolLM3ForCausalLM",
            {"no_rope_layers": [1] * 5},
            ["no_rope_layers is", "num_hidden_layers (6)"],
        ),
        (
            ModelError,
            "SmolLM3ForCausalLM",
            {"no_rope_layers": [True] * 6},
            ["no_rope_layers is", "a list of 1 and 0"],
        ),
        (
            UnsupportedModel,
            "SmolLM3ForCausalLM",
            {"layer_types": [SLIDING] * 6, "sliding_window": 8},
            ["layer_types is sliding_attention", "no sliding window is set"],
        ),
        (
            ModelError,
            "Exaone4ForCausalLM",
            {"sliding_window_pattern": "LLLG"},
            ['sliding_window_pattern is "LLLG"', "must be an integer"],
        ),
        (
            ModelError,
            "Exaone4ForCausalLM",
            {"sliding_window_pattern": None},
            ["sliding_window_pattern is missing"],
        ),
        (
            ModelError,
            "MinistralForCausalLM",
            {"sliding_window": None, "layer_types": [SLIDING] * 6},
            ["layer_types is sliding_attention", "no sliding window is set"],
        ),
        (UnsupportedModel, "CwmForCausalLM", {"attention_bias": True}, ["attention_bias is True"]),
        (ModelError, "CwmForCausalLM", {"sliding_window": None}, ["sliding_window is null"]),
        (
            UnsupportedModel,
            "OlmoeForCausalLM",
            {"num_experts": 2, "num_experts_per_tok": 1, "clip_qkv": 8.0},
            ["clip_qkv is 8.0"],
        ),
        (
            UnsupportedModel,
            "OlmoeForCausalLM",
            {"num_experts": 2, "num_experts_per_tok": 1, "head_dim": 32},
            ["head_dim is 32", "16"],
        ),
        (
            UnsupportedModel,
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            ["llama_4_scaling_beta is 0.1"],
        ),
    ],
)
def test_what_could_change_the_maths_is_refused(error, architecture, fields, words):
    refused(error, words, architecture, **fields)


def test_two_shapes_of_caches_need_two_page_tables():
    options = {"level": 3, "road": "piecewise"}
    config = EngineConfig(model="m", backend="torch", compilation_config=options)
    named = "the road piecewise has one page table"
    with pytest.raises(ConfigError, match=f"page_groups: {named}, and layers of Gemma4ForCausalLM"):
        resolve(config, gemma4(), DeviceInfo("cpu", "", 1 << 34))


# --- numbers that follow
# --------------------------------------------------------------------------------------------------


def test_tables_of_two_ropes_stand_side_by_side():
    config = gemma3(rope_scaling={"rope_type": "linear", "factor": 8.0})
    cos, sin = rotary_tables(config, 50)
    assert cos.shape == sin.shape == (50, 16)
    local, full = (layer[0].mixer.angles for layer in model_of(config).kinds)
    for columns, rope in ((full, config.rope), (local, config.window_rope)):
        inverse, _ = rope_inverse_frequencies(rope, 16, 50)
        angles = np.arange(50)[:, None] * inverse
        np.testing.assert_allclose(cos[:, slice(*columns)], np.cos(angles), atol=1e-7)
        np.testing.assert_allclose(sin[:, slice(*columns)], np.sin(angles), atol=1e-7)


def test_the_temperature_of_q_is_a_column_of_the_table():
    rope = {"rope_type": "default", "original_max_position_embeddings": 10}
    config = config_of(
        "Ministral3ForCausalLM", rope_parameters=rope | {"llama_4_scaling_beta": 0.5}
    )
    cos, _ = rotary_tables(config, 40)
    attention = model_of(config).layers[0][0].mixer
    assert (attention.angles, attention.temper, cos.shape) == ((0, 8), 8, (40, 9))
    want = [1 + 0.5 * math.log(1 + p // 10) for p in range(40)]
    np.testing.assert_allclose(cos[:, 8], want, rtol=1e-7)


def test_layers_that_rotate_nothing_have_angles_of_zero():
    config = config_of("SmolLM3ForCausalLM")
    assert config.unrotated_layers == (3,)
    assert config_of("SmolLM3ForCausalLM", no_rope_layer_interval=2).unrotated_layers == (1, 3, 5)
    said = config_of("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1, 1, 0, 0])
    assert said.unrotated_layers == (0, 5)
    angles = [layer[0].mixer.angles for layer in model_of(config).layers]
    assert angles == [(0, 8)] * 3 + [(8, 16)] + [(0, 8)] * 2
    cos, sin = rotary_tables(config, 50)
    assert (cos[:, 8:] == 1).all()
    assert not sin[:, 8:].any()
    every = config_of("SmolLM3ForCausalLM", no_rope_layers=[1] * 6)
    assert every.unrotated_layers == ()
    assert {layer[0].mixer.angles for layer in model_of(every).layers} == {None}


def test_layers_of_exaone_4_without_a_window_rotate_nothing_if_others_have_one():
    assert config_of("Exaone4ForCausalLM").unrotated_layers == (3,)
    assert config_of("Exaone4ForCausalLM", sliding_window=None).unrotated_layers == ()
    # A window that no layer has is there all the same, as for transformers.
    full = {"layer_types": [FULL] * 6}
    assert config_of("Exaone4ForCausalLM", **full).unrotated_layers == tuple(range(6))
    assert config_of("Exaone4ForCausalLM", **full, sliding_window=None).unrotated_layers == ()
    assert {layer[0].pre for layer in model_of(config_of("Exaone4ForCausalLM")).layers} == {None}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("hidden", [1152, 2304, 2560, 3584, 3840, 5376, 4096])
def test_the_scale_of_embeddings_is_rounded_to_their_dtype(dtype, hidden):
    """As transformers does it; 5376 and bfloat16 give 73.5 for 73.32."""
    exact = hidden**0.5
    for name in (dtype, f"torch.{dtype}"):
        assert rounded(exact, name) == float(np.asarray(exact).astype(DTYPES[dtype]))


PLANS = """
import json, sys
from twinfer.gpu.plans import make_plans
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.models.config_json import parse_config

for raw in json.loads(sys.argv[1]):
    model = parse_config(raw)
    asked = EngineConfig(
        model="m", backend="torch", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64,
        num_pages=64, dtype="bfloat16",
    )
    config, _ = resolve(asked, model, DeviceInfo("cuda", "H200", 1 << 37))
    plans = make_plans(model, config)
    chosen = [
        f"{op}={layer.plan[op].provider}"
        for kind in plans.layers.values() for layer in kind.values() for op in layer.called
    ]
    print(json.dumps(sorted(set(chosen))))
"""


def test_layers_are_made_of_kernels_alone_on_a_gpu():
    """Planned in Triton's interpreter, which has every kernel without a GPU."""
    names = """Gemma2ForCausalLM Gemma3ForCausalLM Glm4ForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM
    Ministral3ForCausalLM Gemma4ForCausalLM GemmaForCausalLM
    SmolLM3ForCausalLM Exaone4ForCausalLM ArceeForCausalLM HunYuanDenseV1ForCausalLM
    Llama4ForCausalLM""".split()
    models = json.dumps([{"architectures": [name]} | SMALL | {"head_dim": 64} for name in names])
    done = subprocess.run(
        [sys.executable, "-c", PLANS, models],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    plans = dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))
    for name, chosen in plans.items():
        assert all(choice.endswith("=triton") for choice in chosen), (name, chosen)
    assert "gelu_gated_mlp=triton" in plans["Gemma3ForCausalLM"]
    assert {"wide_qk_norm=triton", "add=triton"} <= set(plans["Olmo3ForCausalLM"])
    assert "scale_tokens=triton" in plans["Ministral3ForCausalLM"]
    assert "relu2=triton" in plans["ArceeForCausalLM"]
