"""Models whose text decoder is one part of several: its config and tensors are found, the rest
is left out by name.
"""

import json
import re
from fnmatch import fnmatch

import numpy as np
import pytest
from safetensors.numpy import save_file

from twinfer.shared.checkpoint import Checkpoint
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import CheckpointError, ModelError, UnsupportedModel
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.decoder import model_of, parameters_of
from twinfer.shared.models.rope import RopeConfig
from twinfer.shared.models.table import keys, parameter_count
from twinfer.shared.weights import check_checkpoint, read_parameter

from .checkpoint_tensors import expected_tensors

# As published: Mistral-Small-3.1-24B-Instruct-2503, whose head is not tied.
SMALL_3_1 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
    "vision_feature_layer": -1,
}
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def nested(text=(), **fields):
    """SMALL_3_1 of small sizes, with these fields inside and outside."""
    return SMALL_3_1 | {"text_config": SMALL_3_1["text_config"] | SMALL | dict(text)} | fields


def refused(error, raw, *words):
    with pytest.raises(error) as caught:
        parse_config(raw, where="/models/x/config.json")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert message.startswith("/models/x/config.json: ")
    for word in words:
        assert word in message, message


# --- the config
# --------------------------------------------------------------------------------------------------


def test_the_published_config_is_read():
    config = parse_config(SMALL_3_1)
    assert (config.architecture, config.model_type) == (
        "Mistral3ForConditionalGeneration",
        "mistral3",
    )
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (
        5120,
        32,
        8,
        128,
    )
    assert (config.layer_windows, config.rms_norm_eps, config.rope) == (
        (0,) * 40,
        1e-5,
        RopeConfig(theta=1e9),
    )
    assert (config.dtype, config.tie_embeddings, config.image_token_ids) == (
        "bfloat16",
        False,
        (10,),
    )
    # that of Mistral-Small-24B-2501, which is the text
    assert parameter_count(parameters_of(config)) == 23_572_403_200


@pytest.mark.parametrize("model_type", ["mistral", None])
@pytest.mark.parametrize(
    "text", [{}, {"sliding_window": 8}, {"num_key_value_heads": 1, "rope_theta": 5e5}]
)
def test_the_text_model_is_what_it_would_be_alone(text, model_type):
    """transformers too takes a text model without a type for a Mistral."""
    raw = nested(text | {"model_type": model_type})
    alone = {"architectures": ["MistralForCausalLM"], "torch_dtype": "bfloat16"} | raw[
        "text_config"
    ]
    inside, flat = parse_config(raw), parse_config(alone)
    names = set(
        "architecture model_type raw_hash text_architecture image_token_ids left_out".split()
    )
    differ = {name for name in inside.__slots__ if getattr(inside, name) != getattr(flat, name)}
    assert differ == names
    assert model_of(inside) == model_of(flat)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_5_writes_is_read(whole, tied):
    """It writes the text model's own default of `tie_word_embeddings`, which nobody set and
    which it never reads.
    """
    import transformers

    text = SMALL | {
        "model_type": "mistral",
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    }
    theirs = transformers.Mistral3Config(
        text_config=text,
        tie_word_embeddings=tied,
        architectures=["Mistral3ForConditionalGeneration"],
        image_token_id=7,
    )
    raw = json.loads(theirs.to_json_string(use_diff=not whole))
    assert raw["text_config"]["tie_word_embeddings"] is False
    ours = parse_config(raw)
    assert (ours.num_layers, ours.head_dim, ours.rope) == (2, 16, RopeConfig(theta=5e5))
    assert ours.layer_windows == (theirs.text_config.sliding_window,) * 2
    assert (ours.tie_embeddings, ours.image_token_ids) == (tied, (7,))
    assert (ours.eos_token_ids, ours.bos_token_id) == ((2,), 1)


@pytest.mark.parametrize(
    ("outer", "text", "name", "value"),
    [
        ({"torch_dtype": None}, {"torch_dtype": "float16"}, "dtype", "float16"),
        ({"torch_dtype": "float16"}, {"dtype": "torch.float16"}, "dtype", "float16"),
        ({"torch_dtype": None}, {}, "dtype", "float32"),
        ({"tie_word_embeddings": True}, {}, "tie_embeddings", True),
        ({}, {"tie_word_embeddings": True}, "tie_embeddings", True),
        ({"tie_word_embeddings": False}, {}, "tie_embeddings", False),
        ({"eos_token_id": [2]}, {"eos_token_id": 2}, "eos_token_ids", (2,)),
        ({"eos_token_id": [2, 3]}, {}, "eos_token_ids", (2, 3)),
        ({"bos_token_id": 1}, {}, "bos_token_id", 1),
        ({"vocab_size": 40, "hidden_size": 32}, {}, "vocab_size", 40),
        ({"image_token_index": None, "image_token_id": 7}, {}, "image_token_ids", (7,)),
        ({"image_token_index": None}, {}, "image_token_ids", (10,)),  # Mistral3Config's default
        # no token of this vocabulary
        ({"image_token_index": None}, {"vocab_size": 8}, "image_token_ids", ()),
        ({"vision_config": None}, {}, "vocab_size", 40),
        ({}, {"architectures": ["MistralForCausalLM"]}, "vocab_size", 40),
        ({}, {"architectures": []}, "vocab_size", 40),
    ],
)
def test_what_may_stand_inside_or_outside(outer, text, name, value):
    assert getattr(parse_config(nested(text, **outer)), name) == value


@pytest.mark.parametrize(
    ("error", "raw", "words"),
    [
        (ModelError, nested(text_config=None), ["text_config is missing"]),
        (ModelError, nested(text_config=[]), ["text_config is [], must be an object"]),
        (ModelError, nested(text_config="mistral"), ["text_config is mistral, must be an object"]),
        (ModelError, nested(text_config={}), ["text_config.num_hidden_layers is missing"]),
        (
            UnsupportedModel,
            nested({"model_type": "mixtral"}),
            ["text_config.model_type is mixtral", '"mistral" or "ministral3"', "for mistral3"],
        ),
        (UnsupportedModel, nested({"model_type": 5}), ["text_config.model_type is 5"]),
        (
            UnsupportedModel,
            nested({"architectures": ["LlamaForCausalLM"]}),
            ["text_config.architectures is ['LlamaForCausalLM']", "MistralForCausalLM"],
        ),
        (
            UnsupportedModel,
            nested({"sliding_windows": 8}),
            ["text_config.sliding_windows is 8", "the nearest known one is sliding_window)"],
        ),
        (
            UnsupportedModel,
            nested(image_token_idx=8),
            [": image_token_idx is 8", "the nearest known one is image_token_id"],
        ),
        (
            UnsupportedModel,
            nested(rms_norm_eps=1e-6),
            [": rms_norm_eps is 1e-06", "text_config.rms_norm_eps (1e-05)"],
        ),
        (
            UnsupportedModel,
            nested(vocab_size=41),
            [": vocab_size is 41", "text_config.vocab_size (40)"],
        ),
        (
            UnsupportedModel,
            nested(max_window_layers=2),
            [": max_window_layers is 2", "max_window_layers (absent)"],
        ),
        (
            UnsupportedModel,
            nested({"dtype": "float16"}),
            [": torch_dtype is bfloat16", "text_config.dtype (float16)"],
        ),
        (
            UnsupportedModel,
            nested({"tie_word_embeddings": True}, tie_word_embeddings=False),
            [": tie_word_embeddings is False", "text_config.tie_word_embeddings (True)"],
        ),
        (
            UnsupportedModel,
            nested({"eos_token_id": 2}, eos_token_id=3),
            [": eos_token_id is 3", "text_config.eos_token_id (2)"],
        ),
        (
            UnsupportedModel,
            nested(quantization_config={"quant_method": "fp8"}),
            [": quantization_config is", "fp8"],
        ),
        (
            UnsupportedModel,
            nested({"quantization_config": {"quant_method": "fp8"}}),
            [": text_config.quantization_config is", "fp8"],
        ),
        (
            UnsupportedModel,
            nested({"hidden_act": "gelu"}),
            [": text_config.hidden_act is gelu", '"silu"'],
        ),
        (
            UnsupportedModel,
            nested({"attention_bias": True}),
            [": text_config.attention_bias is True"],
        ),
        (ModelError, nested({"vocab_size": None}), [": text_config.vocab_size is missing"]),
        (ModelError, nested({"head_dim": 15}), [": text_config.head_dim is 15", "even"]),
        (ModelError, nested({"rope_theta": -1}), [": text_config.rope_theta is -1"]),
        (
            ModelError,
            nested({"rope_scaling": {"type": "linear"}}),
            [": text_config.rope_scaling: factor is missing"],
        ),
        (UnsupportedModel, nested(torch_dtype="float64"), [": torch_dtype is float64"]),
        (
            UnsupportedModel,
            nested({"torch_dtype": "int8"}, torch_dtype=None),
            [": text_config.torch_dtype is int8"],
        ),
        (ModelError, nested(eos_token_id=40), [": eos_token_id is 40", "vocab_size (40)"]),
        (ModelError, nested({"eos_token_id": 40}), [": text_config.eos_token_id is 40"]),
        (
            ModelError,
            nested(image_token_index=40),
            [": image_token_index is 40", "vocab_size (40)"],
        ),
        (ModelError, nested(image_token_index="[IMG]"), [': image_token_index is "[IMG]"']),
        (
            UnsupportedModel,
            nested(image_token_id=11),
            [": image_token_id is 11", "image_token_index (10)"],
        ),
        (
            ModelError,
            nested(tie_word_embeddings=1),
            [": tie_word_embeddings is 1", "true or false"],
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(error, raw, words):
    refused(error, raw, *words)


def test_the_start_report_says_what_is_left_out():
    config, device = EngineConfig(model="m", backend="torch"), DeviceInfo("cpu", "cpu", 1 << 34)
    changes = [str(change) for change in resolve(config, parse_config(nested()), device)[1]]
    assert (
        "prompts: text and images -> text (not read: vision tower, multi-modal projector)"
        in changes
    )
    alone = {"architectures": ["MistralForCausalLM"]} | nested()["text_config"]
    assert not any(
        str(c).startswith("prompts") for c in resolve(config, parse_config(alone), device)[1]
    )


# --- the tensors
# --------------------------------------------------------------------------------------------------

BESIDE = {
    "vision_tower.transformer.layers.0.attention.q_proj.weight": np.ones((2, 2), np.float32),
    "multi_modal_projector.linear_1.weight": np.ones((2, 2), np.float32),
}
OLD = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}


def old_spelling(key):
    """The name in published files of what transformers calls `key`."""
    for new, old in (*OLD.items(), ("model.", "")):
        if key.startswith(new):
            return old + key.removeprefix(new)
    return key


def written(folder, table, old, **more):
    """A checkpoint with random tensors of the text model and some of its other parts, in one of
    both spellings.
    """
    rng = np.random.default_rng(0)
    tensors = {
        key: rng.normal(size=shape).astype(np.float32)
        for key, shape in expected_tensors(table).items()
    }
    tensors |= {f"model.{key}": value for key, value in BESIDE.items()} | more
    tensors = {old_spelling(key) if old else key: value for key, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_those_of_transformers(tied):
    """By the names in its memory; what it has besides is in the parts that are left out."""
    import torch
    import transformers

    text = SMALL | {"model_type": "mistral"}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, image_token_id=7,
        architectures=["Mistral3ForConditionalGeneration"],
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Mistral3ForConditionalGeneration(config)
    theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    if tied:
        theirs.pop("lm_head.weight")
    ours = expected_tensors(parameters_of(parse_config(json.loads(config.to_json_string()))))
    assert ours.items() <= theirs.items()
    rest = {key.split(".")[1] for key in theirs.keys() - ours.keys()}
    assert rest == {"vision_tower", "multi_modal_projector"}


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        (
            "Gemma4",
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40},
            {"vision_tower", "embed_vision", "audio_tower", "embed_audio"},
        ),
        ("Gemma4Unified", {}, {"embed_vision", "embed_audio"}),
    ],
)
def test_tensors_of_gemma_4_are_those_of_transformers(family, changes, parts):
    """And all that it has besides is left out by name."""
    import torch
    import transformers

    text = SMALL | changes | {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6}
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config={}, audio_config={}, image_token_id=7,
        architectures=[f"{family}ForConditionalGeneration"],
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    theirs.pop("lm_head.weight")
    table = parameters_of(parse_config(json.loads(config.to_json_string(use_diff=False))))
    ours = expected_tensors(table)
    assert ours.items() <= theirs.items()
    rest = theirs.keys() - ours.keys()
    assert {key.split(".")[1] for key in rest} == parts
    unread = [key for key in rest if not any(fnmatch(key, pattern) for pattern in table.ignored)]
    assert unread == []


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_both_spellings_are_read(tmp_path, tied, old):
    table = parameters_of(parse_config(nested(tie_word_embeddings=tied)))
    tensors = written(tmp_path, table, old)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.has(
        "language_model.model.norm.weight" if old else "model.language_model.norm.weight"
    )
    check_checkpoint(checkpoint, table)
    for parameter, layer in table.placed():
        parts = [tensors[old_spelling(key) if old else key] for key in keys(parameter.parts, layer)]
        np.testing.assert_array_equal(
            read_parameter(checkpoint, parameter, layer), np.concatenate(parts)
        )
    assert ("head" in table.top) is not tied


@pytest.mark.parametrize("old", [False, True])
def test_a_head_beside_tied_embeddings_must_be_a_copy(tmp_path, old):
    """What transformers 5 writes of a published model says that it is tied, and has a head of
    its own.
    """
    table = parameters_of(parse_config(nested(tie_word_embeddings=True)))
    embedding = (
        "language_model.model.embed_tokens.weight"
        if old
        else "model.language_model.embed_tokens.weight"
    )
    tensors, head = (
        written(tmp_path, table, old),
        old_spelling("lm_head.weight") if old else "lm_head.weight",
    )
    save_file(tensors | {head: tensors[embedding]}, tmp_path / "model.safetensors")
    check_checkpoint(Checkpoint(tmp_path), table)
    save_file(tensors | {head: tensors[embedding] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=f"{head} differs from {embedding}.*tie_word_embeddings"
    ):
        check_checkpoint(Checkpoint(tmp_path), table)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("stranger", "near"),
    [
        ("{text}layers.0.self_attn.q_prj.weight", "{text}layers.0.self_attn.q_proj.weight"),
        ("{text}layers.0.mlp.down_proj.weight_scale", "{text}layers.0.mlp.down_proj.weight"),
        ("{text}layers.2.mlp.down_proj.weight", "{text}layers.[01].mlp.down_proj.weight"),
        ("{text}vision_tower.weight", "{text}norm.weight"),
        ("vision_towers.0.weight", None),
        ("audio_tower.layers.0.weight", None),
    ],
)
def test_an_unknown_tensor_is_refused_with_the_nearest_known(tmp_path, old, stranger, near):
    table, text = (
        parameters_of(parse_config(nested())),
        "language_model.model." if old else "model.language_model.",
    )
    tensors, stranger = written(tmp_path, table, old), stranger.format(text=text)
    save_file(tensors | {stranger: np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(Checkpoint(tmp_path), table)
    assert f"1 unexpected: {stranger}" in str(caught.value)
    if near is not None:
        assert re.search(f"the nearest known one is {near.format(text=text)}$", str(caught.value))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "lost", ["layers.1.mlp.down_proj.weight", "layers.1.self_attn.k_proj.weight", "norm.weight"]
)
def test_a_missing_tensor_is_named_as_the_others_of_the_file_are(tmp_path, old, lost):
    table, text = (
        parameters_of(parse_config(nested())),
        "language_model.model." if old else "model.language_model.",
    )
    tensors = written(tmp_path, table, old)
    del tensors[text + lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"do not fit the model: 1 missing: {text}{lost}$"):
        check_checkpoint(Checkpoint(tmp_path), table)


def test_both_spellings_of_one_tensor_are_one_too_many(tmp_path):
    table = parameters_of(parse_config(nested()))
    tensors = written(tmp_path, table, old=True)
    twice = {"model.language_model.norm.weight": tensors["language_model.model.norm.weight"]}
    save_file(tensors | twice, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unexpected: language_model\.model\.norm\.weight"):
        check_checkpoint(Checkpoint(tmp_path), table)
