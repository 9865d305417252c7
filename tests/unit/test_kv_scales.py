"""Scales of a narrow KV cache: their names and shapes in checkpoints, what is refused, and how they
lie on shards.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from twinfer.shared.checkpoint import Checkpoint
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import CheckpointError, ConfigError
from twinfer.shared.kv_scales import with_scales
from twinfer.shared.models import decoder
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.placement import local_config, place
from twinfer.shared.shard_reading import read_shard
from twinfer.shared.weights import check_checkpoint, read_parameter

from .checkpoint_tensors import expected_tensors

LLAMA = parse_config(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 12,
        "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 3, "max_position_embeddings": 32, "torch_dtype": "float32",
    }
)  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3_text", "vocab_size": 16, "hidden_size": 12, "intermediate_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2,
        "max_position_embeddings": 32, "sliding_window": 8,
    },
}  # fmt: skip
NAMES = {
    "vLLM": ("self_attn.k_scale", "self_attn.v_scale"),
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "module": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "one of both": ("self_attn.kv_scale", "self_attn.kv_scale"),
}
K, V = np.array([0.5, 0.25, 3.0], np.float32), np.array([0.1, 0.2, 7.0], np.float32)


def weights(model=LLAMA):
    return {
        name: np.ones(shape, np.float32)
        for name, shape in expected_tensors(decoder.parameters_of(model)).items()
    }


def folder_of(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    return str(tmp_path)


def layered(names, k, v, start="model.layers."):
    """Scales of both layers: those of layer 1 are twice those of layer 0."""
    found = {}
    for layer in range(2):
        for name, value in zip(names, (k, v), strict=True):
            found[f"{start}{layer}.{name}"] = np.asarray(value * (1 + layer), value.dtype)
    return found


def chosen(folder, kind="fp8_e4m3", model=LLAMA, **options):
    config = EngineConfig(model="m", backend="torch", kv_cache_dtype=kind, **options)
    resolved, _ = resolve(config, model, DeviceInfo("cpu", "cpu", 1 << 34))
    return with_scales(model, resolved, folder)


def read(folder, model=LLAMA):
    """Scales of K and V by layer, as both workers' loaders read them."""
    table = decoder.parameters_of(model)
    with Checkpoint(folder) as checkpoint:
        check_checkpoint(checkpoint, table)
        return [
            [read_parameter(checkpoint, table.layer(i)[name], i) for name in ("k_scale", "v_scale")]
            for i in range(2)
        ]


@pytest.mark.parametrize("start", ["model.layers.", "layers."])
@pytest.mark.parametrize("spelling", NAMES)
def test_names_in_checkpoints(tmp_path, spelling, start):
    v = K if spelling == "one of both" else V
    found = layered(NAMES[spelling], K, v, start)
    folder = folder_of(tmp_path, weights() | found)
    model, (change,) = chosen(folder)
    assert model.kv_scales == "checkpoint"
    assert change.after == "the checkpoint's"
    assert f"{start}0.{NAMES[spelling][0]}" in change.why
    for layer, pair in enumerate(read(folder, model)):
        for got, want in zip(pair, (K, v), strict=True):
            np.testing.assert_array_equal(got, want * (1 + layer))


@pytest.mark.parametrize("spelling", NAMES)
@pytest.mark.parametrize("start", ["model.language_model.layers.", "language_model.model.layers."])
def test_names_in_models_of_several_parts(tmp_path, start, spelling):
    whole = parse_config(GEMMA3)
    found = layered(NAMES[spelling], K, K, start)
    folder = folder_of(tmp_path, weights(whole) | found)
    model, _ = chosen(folder, model=whole)
    np.testing.assert_array_equal(read(folder, model)[1], [2 * K, 2 * K])
    ignoring, (change,) = chosen(folder, "auto", whole)
    assert change.after is None
    with Checkpoint(folder) as checkpoint:
        check_checkpoint(checkpoint, decoder.parameters_of(ignoring))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_value_stands_for_all_heads(tmp_path, shape, dtype):
    one = np.full(shape, 0.25, dtype)
    folder = folder_of(tmp_path, weights() | layered(NAMES["vLLM"], one, one))
    model, _ = chosen(folder)
    for layer, pair in enumerate(read(folder, model)):
        np.testing.assert_array_equal(pair, np.full((2, 3), 0.25 * (1 + layer)))


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e-40])
def test_what_is_no_scale_is_refused_by_name(tmp_path, value):
    wrong = layered(NAMES["vLLM"], K, V)
    wrong["model.layers.1.self_attn.v_scale"][1] = value
    folder = folder_of(tmp_path, weights() | wrong)
    model, _ = chosen(folder)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_scale.*a scale is from"):
        read(folder, model)


@pytest.mark.parametrize("shape", [(2,), (3, 1), (6,)])
def test_other_shapes_are_refused(tmp_path, shape):
    wrong = np.full(shape, 0.5, np.float32)
    folder = folder_of(tmp_path, weights() | layered(NAMES["vLLM"], K, wrong))
    model, _ = chosen(folder)
    with pytest.raises(CheckpointError, match=r"v_scale.*has shape .*\[\], \[1\] or \[3\]"):
        read(folder, model)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "auto"])
@pytest.mark.parametrize(
    "lost", ["model.layers.1.self_attn.k_scale", "model.layers.0.self_attn.v_scale"]
)
def test_scales_of_some_layers_are_refused(tmp_path, lost, kind):
    found = layered(NAMES["vLLM"], K, V)
    del found[lost]
    folder = folder_of(tmp_path, weights() | found)
    with pytest.raises(CheckpointError, match=f"but not {lost}"):
        chosen(folder, kind)


def test_two_names_for_one_scale_are_refused(tmp_path):
    found = layered(NAMES["vLLM"], K, V) | layered(NAMES["ModelOpt"], V, K)
    folder = folder_of(tmp_path, weights() | found)
    model, _ = chosen(folder)
    with pytest.raises(CheckpointError, match=r"unexpected.*k_proj\.k_scale"):
        read(folder, model)


def test_without_scales_fp8_has_1_and_int8_is_refused(tmp_path):
    folder = folder_of(tmp_path, weights())
    model, (change,) = chosen(folder)
    assert model.kv_scales is None
    assert str(change) == "kv_cache_scales: None -> (1.0, 1.0) (the weights have none)"
    assert "k_scale" not in decoder.parameters_of(model).layer(0)
    with pytest.raises(ConfigError, match=r"kv_cache_scales: int8 .* needs scales"):
        chosen(folder, "int8")
    with pytest.raises(ConfigError, match=r"kv_cache_scales: int8 .* needs scales"):
        chosen(None, "int8")
    assert chosen(folder, "auto") == (LLAMA, [])


def test_given_scales_are_those_of_every_head(tmp_path):
    folder = folder_of(tmp_path, weights())
    model, changes = chosen(folder, "int8", kv_cache_scales=(0.5, 0.3))
    assert changes == []
    np.testing.assert_array_equal(
        read(folder, model)[1], np.array([[0.5] * 3, [0.3] * 3], np.float32)
    )
    assert chosen(folder, "fp8_e4m3", kv_cache_scales=(1, 1)) == (LLAMA, [])


@pytest.mark.parametrize(("shards", "heads"), [(1, [0, 1, 2]), (2, [0, 1, 2, -1]), (3, [0, 1, 2])])
def test_shards_have_the_scales_of_their_heads(shards, heads):
    model = replace(LLAMA, kv_scales="checkpoint")
    placement = place(decoder.parameters_of(model).layer(0)["k_scale"], model, shards)
    assert placement.source.tolist() == heads
    assert placement.shape == (len(heads),)
    local = decoder.parameters_of(local_config(model, shards)).layer(0)["k_scale"]
    assert local.shape == (len(heads) // shards,)


@pytest.mark.parametrize("size", [(), (3,)])
def test_heads_that_no_model_has_get_the_scale_1(tmp_path, size):
    """Not 0, by which nothing can be divided."""
    k = K if size else np.float32(0.5).reshape(())
    folder = folder_of(tmp_path, weights() | layered(NAMES["vLLM"], k, k))
    model = replace(LLAMA, kv_scales="checkpoint")
    parameter = decoder.parameters_of(model).layer(0)["k_scale"]
    placement, found = place(parameter, model, 2), []
    with Checkpoint(folder) as checkpoint:
        for shard in range(2):
            out = np.empty(2, np.float32)
            index = (slice(2 * shard, 2 * shard + 2),)
            read_shard(checkpoint, parameter, placement, 1, index, out)
            found += out.tolist()
    assert found == [*np.broadcast_to(2 * k, 3).tolist(), 1.0]
