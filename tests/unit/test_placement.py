"""How weights lie on several shards, in integers alone: heads, the parts of stacked projections,
the vocabulary.
"""

from dataclasses import replace

import pytest

from twinfer.shared.models import decoder
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.placement import head_layout, place
from twinfer.shared.models.shapes import SHAPES

LLAMA = parse_config(SHAPES["llama3-8b"])


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(32, 8), (4, 2), (6, 2), (6, 3), (14, 2), (5, 1), (9, 9), (12, 4)]
)
def test_every_shard_reads_the_groups_of_its_own_heads(heads, kv_heads, shards):
    layout = head_layout(heads, kv_heads, shards)
    assert len(layout.query) % shards == len(layout.kv) % shards == 0
    assert len(layout.query) % len(layout.kv) == 0
    assert sorted(h for h in layout.query if h >= 0) == list(range(heads))
    assert {h for h in layout.kv if h >= 0} == set(range(kv_heads))
    group = len(layout.query) // len(layout.kv)
    for i, head in enumerate(layout.query):
        assert head < 0 or layout.kv[i // group] == head // (heads // kv_heads)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_each_shard_of_a_stacked_projection_is_a_small_projection(shards):
    """Shard s of qkv holds its q, then its k, then its v: what the layer's code takes apart by
    position.
    """
    table = decoder.parameters_of(LLAMA).layer(0)
    placement = place(table["qkv"], LLAMA, shards)
    assert sorted(placement.source) == list(range(6144))
    first = placement.source.reshape(shards, -1)[-1]
    q, k = 4096 // shards, 1024 // shards
    assert first[:q].tolist() == list(range(4096 - q, 4096))
    assert first[q : q + k].tolist() == list(range(5120 - k, 5120))
    assert first[q + k :].tolist() == list(range(6144 - k, 6144))
    assert place(table["o"], LLAMA, shards).axis == 1
    assert place(table["input_norm"], LLAMA, shards).axis is None


def test_a_vocabulary_that_does_not_divide_is_held_whole():
    odd = replace(LLAMA, vocab_size=997)
    assert place(decoder.parameters_of(odd).top["embed"], odd, 4).axis is None
    assert place(decoder.parameters_of(LLAMA).top["embed"], LLAMA, 4).axis == 0


def test_a_shard_has_whole_experts_and_a_part_of_the_shared_one():
    config = parse_config(SHAPES["qwen3-30b-a3b"])
    table = decoder.parameters_of(config).layer(0)
    for name, rows in (("experts_gate_up", 2 * 768), ("experts_down", 2048)):
        placement = place(table[name], config, 4)
        assert placement.axis == 0
        assert placement.source.tolist() == list(range(128 * rows))
    assert place(table["router"], config, 4).axis is None
    shared = replace(config, shared_expert_size=6)
    table = decoder.parameters_of(shared).layer(0)
    halves = place(table["shared_gate_up"], shared, 4)
    # Each shard has its gates, then what they gate; the last one has padding alone.
    assert halves.source.reshape(4, 4).tolist() == [
        [0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], [-1, -1, -1, -1],
    ]  # fmt: skip
    assert place(table["shared_down"], shared, 4).axis == 1
