"""Models that the comparisons of layers do not know yet are refused by name, before anything is
loaded.
"""

import json

import pytest

from twinfer.numerics import open_subject
from twinfer.shared.errors import ConfigError

GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "hidden_size_per_layer_input": 0,
}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "caches of two shapes;"),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 1000,
            },
            "caches of two shapes, caches of other layers, inputs of their own;",
        ),
    ],
)
def test_layers_that_cannot_be_compared_one_by_one_are_refused(tmp_path, fields, named):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4 | fields))
    with pytest.raises(ConfigError) as caught:
        open_subject(str(tmp_path), load_format="dummy")
    message = str(caught.value)
    assert message.startswith(f"model: got {tmp_path} (Gemma4ForCausalLM), whose layers have")
    assert named in message
