"""A small model for the tests of comparisons."""

import json

import pytest

import twinfer.tests.numerics.faults  # noqa: F401 - it adds to the catalogue


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """The folder of a Qwen3 of two layers; its weights are dummy ones."""
    folder = tmp_path_factory.mktemp("small")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 256, "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
