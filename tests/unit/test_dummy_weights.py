"""Dummy weights of the torch worker are made a block of rows at a time: the numbers do not depend on
the blocks, nor on the number of shards.
"""

from math import prod

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from twinfer.gpu import weights  # noqa: E402
from twinfer.ops.namespaces import namespace  # noqa: E402
from twinfer.shared.models import decoder  # noqa: E402
from twinfer.shared.models.config_json import parse_config  # noqa: E402
from twinfer.shared.models.placement import place  # noqa: E402
from twinfer.shared.models.spec import Shard  # noqa: E402
from twinfer.shared.weights import dummy_parameter  # noqa: E402

MODEL = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 333,
        "max_position_embeddings": 128,
    }
)
TABLE = decoder.parameters_of(MODEL)


def whole(parameter, layer):
    index = np.arange(prod(parameter.shape), dtype=np.int32)
    return dummy_parameter(namespace("numpy"), parameter, layer, 9, index).reshape(parameter.shape)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("entries", [1, 500, 1 << 26])
def test_blocks_give_the_same_numbers(monkeypatch, shards, entries):
    monkeypatch.setattr(weights, "DUMMY_ENTRIES", entries)
    sizes = []

    def counted(xp, parameter, layer, seed, index):
        sizes.append(len(index))
        return dummy_parameter(xp, parameter, layer, seed, index)

    monkeypatch.setattr(weights, "dummy_parameter", counted)
    for parameter, layer in TABLE.placed():
        expected = whole(parameter, max(layer, 0))
        placement = place(parameter, MODEL, shards, pads_words=True)
        if shards > 1 and placement.axis is not None:
            taken = np.take(expected, np.maximum(placement.source, 0), placement.axis)
            shape = [-1 if axis == placement.axis else 1 for axis in range(taken.ndim)]
            expected = np.where(
                (placement.source >= 0).reshape(shape), taken, np.float32(parameter.padding)
            )
        for index in range(shards):
            shard = Shard(index, shards) if shards > 1 else None
            own = expected
            if shard is not None and placement.axis is not None:
                own = np.split(expected, shards, placement.axis)[index]
            target = torch.full(own.shape, torch.nan)
            source = weights.Source(MODEL, TABLE, None, 9, shard)
            weights._fill_dummy(target, parameter, source, layer, shard)
            np.testing.assert_array_equal(target.numpy(), own)
    assert max(sizes) <= max(entries, max(prod(p.shape[1:]) for p in TABLE))
