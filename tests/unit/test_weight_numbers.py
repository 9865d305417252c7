"""Entries of weights that are no numbers, or that the run dtype does not hold, are refused by the
tensor's name and their place in it, on both backends and by ranks.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from twinfer.shared.errors import CheckpointError, ConfigError
from twinfer.shared.models import decoder
from twinfer.shared.models.blocks import single_blocks
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.placement import shard_config
from twinfer.shared.models.spec import Shard
from twinfer.shared.progress import silent
from twinfer.shared.weight_numbers import FLOATS, _extremes

from .checkpoint_tensors import stored_tensors

FIELDS = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
MODELS = {
    "llama": parse_config({"architectures": ["LlamaForCausalLM"]} | FIELDS),
    "gemma": parse_config({"architectures": ["Gemma2ForCausalLM"]} | FIELDS),
    "gpt-oss": parse_config(
        {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
        | FIELDS
    ),
}
EMBED, Q, K, V, DOWN, NORM = (
    "model.embed_tokens.weight",
    *(f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"),
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.1.input_layernorm.weight",
)
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
BACKENDS = ["torch", "torch rank", "jax"]
BFLOAT16 = ml_dtypes.bfloat16


def write(folder, model, stored, entries):
    """A checkpoint whose tensors are of `stored`, with these entries in the tensor of a name."""
    rng = np.random.default_rng(0)
    shapes = stored_tensors(decoder.parameters_of(model))
    tensors = {key: rng.normal(size=shape).astype(stored) for key, shape in shapes.items()}
    for key, at, value in entries:
        tensors[key][at] = value
    save_file(tensors, folder / "model.safetensors")


def load(backend, folder, model, dtype):
    """Load all weights; of a rank, those of the second of two."""
    table = decoder.parameters_of(model)
    if backend == "jax":
        import jax

        from twinfer.tpu.sharding import make_mesh
        from twinfer.tpu.weights import load_weights

        mesh = make_mesh(jax.devices("cpu"), 1)
        blocks = single_blocks(model.num_layers)
        dtype = jax.numpy.dtype(dtype)
        load_weights(str(folder), "auto", model, table, blocks, dtype, 0, mesh, silent)
        return
    import torch

    from twinfer.gpu.module import Decoder
    from twinfer.gpu.weights import load_weights

    local = shard_config(model, Shard(1, 2)) if backend == "torch rank" else model
    held = decoder.parameters_of(local)
    module = Decoder(local, held, None, getattr(torch, dtype), torch.device("cpu"))
    load_weights(module, str(folder), "auto", table, 0, silent, model)
    for weight in module.parameters():
        assert weight.isfinite().all()


NO_NUMBERS = {
    "nan": ("llama", np.float32, [(DOWN, (3, 40), np.nan)]),
    "the first of several": (
        "llama", BFLOAT16, [(V, (9, 2), -np.inf), (V, (12, 0), np.nan), (V, (15, 31), np.inf)]
    ),
    "of a word": ("llama", np.float16, [(EMBED, (39, 7), np.inf)]),
    "of a norm that is made in float32": ("gemma", BFLOAT16, [(NORM, (31,), np.nan)]),
    "of an expert whose tensor is read transposed": (
        "gpt-oss", BFLOAT16, [(EXPERTS, (3, 30, 5), np.nan)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_NUMBERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_number_is_named(tmp_path, backend, what):
    name, stored, entries = NO_NUMBERS[what]
    write(tmp_path, MODELS[name], stored, entries)
    (key, at, value), count = entries[0], len(entries)
    with pytest.raises(CheckpointError) as caught:
        load(backend, tmp_path, MODELS[name], "bfloat16")
    message = str(caught.value)
    assert f"model.safetensors: {key} holds {value} at {list(at)}, must be finite" in message
    assert f"({count} of " in message


HELD_BY = {
    "float32, above float16": (
        "llama", np.float32, "float16", [(DOWN, (3, 5), 6e4), (DOWN, (4, 40), -7e4)],
        "bfloat16, float32",
    ),
    "bfloat16, above float16": (
        "llama", BFLOAT16, "float16", [(K, (15, 1), 65536)], "bfloat16, float32"
    ),
    "float32, above bfloat16": (
        "llama", np.float32, "bfloat16", [(EMBED, (39, 0), -3.4e38)], "float32"
    ),
    "what rounds to infinity": (
        "llama", np.float32, "float16", [(Q, (31, 3), 65520)], "bfloat16, float32"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HELD_BY)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_dtype_does_not_hold_is_named(tmp_path, backend, what):
    name, stored, dtype, entries, allowed = HELD_BY[what]
    write(tmp_path, MODELS[name], stored, entries)
    key, at, value = entries[-1]
    with pytest.raises(ConfigError) as caught:
        load(backend, tmp_path, MODELS[name], dtype)
    message = str(caught.value)
    assert message.startswith(f"dtype: got {dtype}, in which an entry of {tmp_path}")
    assert f": {key} would be infinite: it holds {float(value):.6g} at {list(at)}; " in message
    assert message.endswith(f"; allowed are {allowed}")
    for name_of_dtype in allowed.split(", "):
        load(backend, tmp_path, MODELS[name], name_of_dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_held_is_loaded(tmp_path, backend):
    """65 519 rounds to the largest number of float16; norms of 1 + weight are float32."""
    write(tmp_path, MODELS["llama"], np.float32, [(DOWN, (3, 40), -65519)])
    load(backend, tmp_path, MODELS["llama"], "float16")
    write(tmp_path, MODELS["gemma"], np.float32, [(NORM, (3,), 1e6)])
    load(backend, tmp_path, MODELS["gemma"], "float16")


@given(st.sampled_from(FLOATS), st.data())
def test_the_extremes_are_those_of_the_numbers(dtype, data):
    size = dtype.itemsize
    words = st.integers(0, (1 << 8 * size) - 1)
    bits = data.draw(st.lists(words, min_size=1, max_size=12))
    values = np.array(bits, f"u{size}").view(dtype)
    found, wide = (x.astype(np.float64) for x in (_extremes(values), values))
    if np.isfinite(wide).all():
        assert np.abs(found).max() == np.abs(wide).max()
        assert np.isin(found, wide).all()
    else:
        assert not np.isfinite(found).all()
