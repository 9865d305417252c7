"""What a rank of the torch worker holds of weights in 8 or 4 bits: the bits that one process has."""

from dataclasses import replace

import numpy as np
import pytest

from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import ConfigError
from twinfer.shared.models import decoder
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.models.placement import shard_config
from twinfer.shared.models.quantization import WHEN_LOADED
from twinfer.shared.models.spec import Shard
from twinfer.shared.quantized import with_quantization

DEMO = load_config(model_folder("demo"))


def weights_of(scheme, shard=None, dtype="float32"):
    """The pieces of the second layer's projections of the demo model, as bytes or float32."""
    import torch

    from twinfer.gpu.module import Decoder
    from twinfer.gpu.weights import load_weights

    model, _ = with_quantization(DEMO, scheme)
    local = model if shard is None else shard_config(model, shard)
    held, whole = decoder.parameters_of(local), decoder.parameters_of(model)
    module = Decoder(local, held, None, getattr(torch, dtype), torch.device("cpu"))
    load_weights(module, str(model_folder("demo")), "auto", whole, 0, lambda *_: None, model)
    return {
        name: (x.view(torch.uint8) if x.element_size() == 1 else x.float()).numpy()
        for name, x in module.layer_weights[1].items()
        if name.removesuffix("_scale") in ("qkv", "o", "gate_up", "down")
    }


def rows_of_parts(x, sizes, ranks):
    """For each rank, its equal part of the rows of each of the parts that x consists of."""
    parts = np.split(x, np.cumsum(sizes)[:-1])
    return [
        np.concatenate([np.split(part, ranks)[rank] for part in parts]) for rank in range(ranks)
    ]


@pytest.mark.parametrize("scheme", ["int8_weights", "fp8_weights", "int4_g32", "fp8_block"])
def test_ranks_hold_the_bits_of_one_process(scheme, monkeypatch):
    if WHEN_LOADED[scheme].group:
        # So that the 304 entries of a row that a rank has are whole groups.
        monkeypatch.setitem(WHEN_LOADED, scheme, replace(WHEN_LOADED[scheme], group=16))
    whole = weights_of(scheme)
    ranks = [weights_of(scheme, Shard(index, 2)) for index in range(2)]
    heads, mlp = DEMO.num_heads * DEMO.head_dim, DEMO.intermediate_size
    kv = DEMO.num_kv_heads * DEMO.head_dim
    for name, x in whole.items():
        if name.startswith(("qkv", "gate_up")):
            expected = rows_of_parts(
                x, (heads, kv, kv) if name.startswith("qkv") else (mlp, mlp), 2
            )
        else:
            # Entries of rows; one scale of a whole row is the same on all ranks.
            expected = [x, x] if x.shape[1] == 1 else np.split(x, 2, axis=1)
        for rank, own in zip(ranks, expected, strict=True):
            np.testing.assert_array_equal(rank[name], own, err_msg=name)
    of_values = [name for name in whole if not name.endswith("_scale")]
    assert len(of_values) == 4
    for rank in ranks:
        assert 2 * sum(rank[n].nbytes for n in of_values) == sum(whole[n].nbytes for n in of_values)


@pytest.mark.parametrize("shard", [None, Shard(1, 2)])
@pytest.mark.parametrize("scheme", WHEN_LOADED)
def test_weights_begin_where_their_memory_does(scheme, shard):
    """Kernels read bytes as words, which torch refuses for what begins within a word. The stages
    hand each parameter to one op, as a whole.
    """
    import torch

    from twinfer.gpu.module import Decoder

    sizes = replace(DEMO, hidden_size=256, intermediate_size=256)
    model, _ = with_quantization(sizes, scheme)
    local = model if shard is None else shard_config(model, shard)
    table = decoder.parameters_of(local)
    module = Decoder(local, table, None, torch.bfloat16, torch.device("cpu"))
    module.freeze()
    read = [x for weights in (module.top_weights, *module.joined_weights) for x in weights.values()]
    assert len(read) >= len(list(module.parameters()))
    for weight in read:
        assert weight.is_contiguous()
        assert weight.storage_offset() == 0


@pytest.mark.parametrize(
    ("scheme", "width", "words"),
    [
        (
            "int4_g32",
            608,
            "groups of 32 entries that share a scale in down; allowed up to 16 are 1$",
        ),
        (
            "int4",
            128,
            r"on each device: quantization: got int4, and the rows of down \(.*mlp.down_proj\) "
            r"have 64 entries, allowed are multiples of 128.*; allowed up to 16 are 1$",
        ),
        ("int4_g32", 96, "groups of 32 entries that share a scale in down; allowed .* are 1, 3$"),
        (
            "int8_weights",
            602,
            r"on each device: .*down.* have 301 entries, allowed are multiples of 2\); .* are 1, 7, 8, 16$",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_what_cannot_be_dealt_out_is_refused_with_its_numbers(backend, scheme, width, words):
    model, _ = with_quantization(replace(DEMO, intermediate_size=width), scheme)
    config = EngineConfig(
        model="demo", backend=backend, device="cpu", tensor_parallel_size=2, quantization=scheme
    )
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: got 2, .*{words}"):
        resolve(config, model, DeviceInfo("cpu", "cpu", 1 << 40))
