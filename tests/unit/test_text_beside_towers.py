"""Qwen and GLM with images, text alone: what config.json says, and how tensors lie on disk."""

import dataclasses
import json
from dataclasses import replace
from fnmatch import fnmatch

import numpy as np
import pytest
from safetensors.numpy import save_file

from twinfer.shared.checkpoint import Checkpoint
from twinfer.shared.errors import CheckpointError, ModelError, RequestError, UnsupportedModel
from twinfer.shared.models import families
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.decoder import parameters_of
from twinfer.shared.models.rope import RopeConfig
from twinfer.shared.request_checks import check_tokens
from twinfer.shared.weights import check_checkpoint, read_parameter

from .checkpoint_tensors import stored_tensors

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
TEXTS = {
    "Glm4v": SMALL,
    "Glm4vMoe": SMALL | EXPERTS | {"n_routed_experts": 3},
    "Qwen2VL": SMALL,
    "Qwen2_5_VL": SMALL,
    "Qwen3VL": SMALL | {"head_dim": 8},
    "Qwen3VLMoe": SMALL | EXPERTS | {"num_experts": 3},
}
MODEL_TYPES = {
    "Glm4v": "glm4v",
    "Glm4vMoe": "glm4v_moe",
    "Qwen2VL": "qwen2_vl",
    "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3VL": "qwen3_vl",
    "Qwen3VLMoe": "qwen3_vl_moe",
}
TOKENS = {"Glm4v": (151_343, 151_344), "Glm4vMoe": (151_363, 151_364)}
FLAT = ("Qwen2VL", "Qwen2_5_VL")
INTERLEAVED = ("Qwen3VL", "Qwen3VLMoe")
ROTATED = {"Glm4vMoe": 0.5}
"""Of a head, which are rotated where the file does not say it."""
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
VISIONS = {"Qwen2VL": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}}


def raw_of(family, text=(), **fields):
    """A config.json of this family, with these fields inside and outside."""
    model_type = MODEL_TYPES[family]
    inner = TEXTS[family] | {"model_type": f"{model_type}_text"} | dict(text)
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": inner,
        "image_token_id": 38,
        "video_token_id": 39,
    } | fields


def refused(error, raw, *words):
    with pytest.raises(error) as caught:
        parse_config(raw, where="config.json")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("family", TEXTS)
def test_how_pairs_are_dealt_to_three_positions_changes_nothing(family):
    usual = {"rope_type": "default", "rope_theta": 5e6}
    plain = parse_config(raw_of(family, {"rope_parameters": usual}))
    assert plain.rope == RopeConfig(theta=5e6, partial_rotary_factor=ROTATED.get(family, 1.0))
    for section in ([2, 1, 1], [1, 2, 1]):
        rope = usual | {"mrope_section": section}
        rope |= {"mrope_interleaved": True} if family in INTERLEAVED else {}
        mrope = parse_config(raw_of(family, {"rope_parameters": rope}))
        assert replace(mrope, raw_hash="") == replace(plain, raw_hash="")
        rope.pop("rope_theta")
        old = parse_config(raw_of(family, {"rope_theta": 5e6, "rope_scaling": rope}))
        assert replace(old, raw_hash="") == replace(plain, raw_hash="")


@pytest.mark.parametrize("family", TEXTS)
def test_a_field_that_is_left_out_is_what_transformers_takes(family):
    """Or it has to be there."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, compared = f"{MODEL_TYPES[family]}_text", 0
    text = TEXTS[family]
    known = families.family_of(f"{family}TextModel")
    names = (known.read_fields | set(known.fixed_fields)) - {"eos_token_id", "bos_token_id"}
    if family == "Qwen3VLMoe":
        names -= {"tie_word_embeddings"}  # the outer config alone says it
    theirs = CONFIG_MAPPING[model_type]
    for field in dataclasses.fields(theirs):
        if field.name not in names or field.default is dataclasses.MISSING:
            continue
        try:
            ours = parse_config(raw_of(family) | {"text_config": _without(text, field.name)})
        except ModelError:
            continue
        whole = parse_config(raw_of(family, {field.name: field.default}))
        assert replace(ours, raw_hash="") == replace(whole, raw_hash=""), field.name
        compared += 1
    assert compared > 5
    rope = RopeConfig(theta=theirs.default_theta, partial_rotary_factor=ROTATED.get(family, 1.0))
    assert parse_config(raw_of(family)).rope == rope


def _without(raw, name):
    return {key: value for key, value in raw.items() if key != name}


@pytest.mark.parametrize("family", TEXTS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_5_writes_is_read_and_has_its_tensors(family, whole, tied):
    """By the names and shapes in its memory. What it has besides is left out by name."""
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(
        text_config=TEXTS[family] | {"eos_token_id": 2, "bos_token_id": 1},
        vision_config=dict(VISIONS.get(family, VISION)), tie_word_embeddings=tied,
        architectures=[f"{family}ForConditionalGeneration"], image_token_id=7, video_token_id=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if tied:
        theirs.pop("lm_head.weight")
    ours = parse_config(json.loads(config.to_json_string(use_diff=not whole)))
    assert (ours.tie_embeddings, ours.image_token_ids) == (tied, (7, 8))
    table = parameters_of(ours)
    stored = stored_tensors(table)
    if family == "Glm4vMoe":  # which has one for each expert on disk, and one for all in memory
        theirs, stored = (
            {key: shape for key, shape in found.items() if ".mlp.experts." not in key}
            for found in (theirs, stored)
        )
    assert stored.items() <= theirs.items()
    rest = theirs.keys() - stored.keys()
    assert rest
    assert all(any(fnmatch(key, pattern) for pattern in table.ignored) for key in rest)


@pytest.mark.parametrize("family", TEXTS)
def test_tokens_of_images_and_videos_are_refused(family):
    config = parse_config(raw_of(family))
    check_tokens(np.arange(38), config)
    for token in (38, 39):
        with pytest.raises(RequestError, match=f"token id {token} stands for an image or a video"):
            check_tokens(np.array([1, token]), config)
    big = raw_of(family, {"vocab_size": 151_936, "image_token_id": 38})
    if family not in TOKENS:
        refused(UnsupportedModel, big, "text_config.image_token_id is 38")
    big = raw_of(family, {"vocab_size": 151_936})
    config = parse_config(big | {"image_token_id": None, "video_token_id": None})
    assert config.image_token_ids == TOKENS.get(family, (151_655, 151_656))


@pytest.mark.parametrize(
    ("family", "text", "words"),
    [
        ("Glm4v", {"attention_bias": False}, ["text_config.attention_bias is False"]),
        ("Glm4v", {"head_dim": 16}, ["text_config.head_dim is 16, allowed: 8"]),
        ("Glm4vMoe", {"use_qk_norm": True}, ["text_config.use_qk_norm is True"]),
        ("Glm4vMoe", {"num_local_experts": 4}, ["num_local_experts is 4, allowed: 3"]),
        ("Glm4vMoe", {"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers is 2"]),
        ("Qwen2VL", {"attention_bias": False}, ["text_config.attention_bias is False"]),
        ("Qwen2VL", {"head_dim": 16}, ["text_config.head_dim is 16, allowed: 8"]),
        (
            "Qwen2VL",
            {"rope_scaling": {"type": "mrope", "rope_type": "yarn"}},
            ["rope_type is ['yarn', 'default']"],
        ),
        ("Qwen2_5_VL", {"model_type": "qwen2_vl_text"}, ["text_config.model_type is"]),
        ("Qwen3VL", {"mlp_bias": True}, ["text_config.mlp_bias is True"]),
        ("Qwen3VL", {"sliding_window": 8}, ["text_config.sliding_window is 8"]),
        ("Qwen3VL", {"rope_scaling": {"rope_type": "mrope"}}, ["rope_type is mrope"]),
        (
            "Qwen3VL",
            {"rope_scaling": {"mrope_sections": [2, 1, 1]}},
            ["text_config.rope_scaling: mrope_sections is [2, 1, 1]"],
        ),
        ("Qwen3VLMoe", {"norm_topk_prob": False}, ["text_config.norm_topk_prob is False"]),
        ("Qwen3VLMoe", {"moe_intermediate_size": 16}, ["moe_intermediate_size is 16, allowed"]),
        ("Qwen3VLMoe", {"moe_intermediate_size": 32}, ["moe_intermediate_size is 32, allowed"]),
        ("Qwen3VLMoe", {"model_type": "qwen3_vl_text"}, ["text_config.model_type is"]),
    ],
)
def test_what_is_not_so_is_refused(family, text, words):
    refused(UnsupportedModel, raw_of(family, text), *words)


def test_a_text_model_is_no_model_of_its_own():
    alone = TEXTS["Qwen3VL"] | {"model_type": "qwen3_vl_text"}
    for named in ([], ["Qwen3VLTextModel"]):
        refused(UnsupportedModel, alone | {"architectures": named}, "architectures is")


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_read_as_they_lie(tmp_path, transposed):
    """Published files have them transposed; those that transformers 5 writes have not."""
    table = parameters_of(parse_config(raw_of("Qwen3VLMoe")))
    rng = np.random.default_rng(0)
    matrices = {
        key: rng.normal(size=shape).astype(np.float32)
        for key, shape in stored_tensors(table).items()
    }
    lie = {
        key: np.ascontiguousarray(x.swapaxes(1, 2)) if transposed and x.ndim == 3 else x
        for key, x in matrices.items()
    }
    save_file(lie, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    check_checkpoint(checkpoint, table)
    for name, key in (("experts_gate_up", "gate_up_proj"), ("experts_down", "down_proj")):
        read = read_parameter(checkpoint, table.layer(1)[name], 1)
        want = matrices[f"model.language_model.layers.1.mlp.experts.{key}"]
        np.testing.assert_array_equal(read, want.reshape(read.shape))


def test_experts_of_another_shape_are_refused(tmp_path):
    table = parameters_of(parse_config(raw_of("Qwen3VLMoe")))
    tensors = {key: np.ones(shape, np.float32) for key, shape in stored_tensors(table).items()}
    key = "model.language_model.layers.2.mlp.experts.down_proj"
    save_file(tensors | {key: np.ones((3, 12, 31), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has shape \[3, 12, 31\], expected \[3, 32, 12\]"):
        check_checkpoint(Checkpoint(tmp_path), table)


def flat(family, **fields):
    """A config.json as published: without an object for the text model."""
    raw = raw_of(family)
    text = raw.pop("text_config")
    mrope = {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    return text | mrope | raw | fields


@pytest.mark.parametrize("family", FLAT)
def test_fields_of_the_text_model_may_stand_beside_the_others(family):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    inside = parse_config(raw_of(family, rope | {"dtype": "float16"}))
    outside = parse_config(flat(family, dtype="float16", vision_config={"depth": 1}))
    assert replace(outside, raw_hash="") == replace(inside, raw_hash="")
    assert parse_config(flat(family, tie_word_embeddings=True)).tie_embeddings
    refused(UnsupportedModel, flat(family, rope_thet=1.0), ": rope_thet is 1.0", "rope_theta")
    refused(ModelError, flat(family, hidden_size=None), ": hidden_size is missing")


@pytest.mark.parametrize("family", FLAT)
def test_what_transformers_4_wrote_in_both_places_is_read(family):
    """A window that nothing uses it wrote outside alone, and the names of the whole inside too."""
    rope = {"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1]}
    both = flat(family, rope_scaling=rope, sliding_window=8, use_sliding_window=False)
    inner = {name: both[name] for name in (*SMALL, "rope_theta", "rope_scaling", "architectures")}
    inner |= {"model_type": f"{MODEL_TYPES[family]}_text", "image_token_id": None}
    inner |= {"sliding_window": None, "use_sliding_window": False, "vision_token_id": 7}
    config = parse_config(both | {"text_config": inner})
    assert replace(config, raw_hash="") == replace(parse_config(flat(family)), raw_hash="")
    wrong = both | {"text_config": inner | {"rope_theta": 1e4}}
    refused(UnsupportedModel, wrong, ": rope_theta is 500000.0, allowed: absent, or as text_config")


@pytest.mark.parametrize("family", FLAT)
def test_layers_with_a_window(family):
    window = {"use_sliding_window": True, "sliding_window": 8}
    for more, windows in (
        ({}, (0, 0, 0)),
        ({"max_window_layers": 1}, (0, 8, 8)),
        ({"layer_types": ["sliding_attention", *["full_attention"] * 2]}, (8, 0, 0)),
        ({"max_window_layers": 0, "use_sliding_window": False}, (0, 0, 0)),
    ):
        assert parse_config(raw_of(family, window | more)).layer_windows == windows


@pytest.mark.parametrize("family", FLAT)
def test_quantised_ones_are_refused(family):
    scheme = {"quant_method": "awq", "bits": 4, "group_size": 128}
    raw = flat(family, quantization_config=scheme)
    refused(UnsupportedModel, raw, "quantization_config is", "text is one of several parts")


@pytest.mark.parametrize("family", FLAT)
@pytest.mark.parametrize("published", [False, True])
def test_both_spellings_of_the_text_model_are_read(tmp_path, family, published):
    table = parameters_of(parse_config(flat(family)))
    text, vision = (
        ("model.", "visual.") if published else ("model.language_model.", "model.visual.")
    )
    tensors = {
        key.replace("model.language_model.", text): np.ones(shape, np.float32)
        for key, shape in stored_tensors(table).items()
    }
    tensors[f"{vision}blocks.0.norm1.weight"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    check_checkpoint(Checkpoint(tmp_path), table)
    stranger = {f"{text}layers.0.mlp.norm.weight": np.ones(4, np.float32)}
    save_file(tensors | stranger, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unexpected: .*layers\.0\.mlp\.norm\.weight"):
        check_checkpoint(Checkpoint(tmp_path), table)
