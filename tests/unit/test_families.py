"""Families as data: every tensor of a file is read as a whole, parameters of any kind are
loaded, ones cost nothing.
"""

import re
from dataclasses import replace
from math import prod

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from twinfer.ops import resolve as resolve_ops
from twinfer.ops.namespaces import namespace
from twinfer.ops.namespaces.torch_ import from_numpy, to_numpy
from twinfer.ops.testing import DTYPES
from twinfer.shared.checkpoint import Checkpoint
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import CheckpointError, InternalError
from twinfer.shared.models import decoder
from twinfer.shared.models.blocks import single_blocks
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.families import FAMILIES
from twinfer.shared.models.placement import place, rows_of
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.models.table import (
    TOP,
    PairsToHalves,
    Parameter,
    ParameterTable,
    Part,
    keys,
    parameter_count,
)
from twinfer.shared.weights import (
    check_checkpoint,
    dummy_parameter,
    read_parameter,
)
from twinfer.shared.worker import backend_module

from .checkpoint_tensors import expected_tensors, stored_tensors

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


NESTED = tuple(name for name in FAMILIES if name.endswith("ForConditionalGeneration"))


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LLAMA4 = {"num_local_experts": 3, "intermediate_size_mlp": 20, "attention_chunk_size": 16}
LATENTS = {
    "num_key_value_heads": 4, "head_dim": None, "kv_lora_rank": 12, "q_lora_rank": 10,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
}  # fmt: skip
LATENT_EXPERTS = LATENTS | EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1}
LATENT_EXPERTS |= {"first_k_dense_replace": 1}
MIXTURES = {
    "DeepseekV2ForCausalLM": LATENT_EXPERTS | {"q_lora_rank": None},
    "DeepseekV3ForCausalLM": LATENT_EXPERTS | {"n_group": 2, "topk_group": 1},
    "Glm4MoeLiteForCausalLM": LATENT_EXPERTS,
    "Mistral4ForCausalLM": LATENT_EXPERTS,
    "YoutuForCausalLM": LATENTS,
    "MixtralForCausalLM": {"num_local_experts": 3},
    "GptOssForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "MiniMaxM2ForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": EXPERTS | {"num_experts": 3, "shared_expert_intermediate_size": 20},
    "Qwen3MoeForCausalLM": EXPERTS | {"num_experts": 3, "mlp_only_layers": [1]},
    "Glm4MoeForCausalLM": EXPERTS | {"n_routed_experts": 3},
    "OlmoeForCausalLM": {"num_experts": 3, "num_experts_per_tok": 2},
    "Dots1ForCausalLM": EXPERTS | {"n_routed_experts": 3, "n_shared_experts": 1},
    "GraniteMoeForCausalLM": {"num_local_experts": 3},
    "ExaoneMoEForCausalLM": EXPERTS | {"num_experts": 3},
    "ExaoneMoeForCausalLM": EXPERTS | {"num_experts": 3},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 3,
        "moe_k": 2,
        "moe_intermediate_size": 12,
    },
    "HunYuanMoEV1ForCausalLM": {"num_experts": 3, "moe_topk": 2},
    "GraniteMoeHybridForCausalLM": {
        "num_local_experts": 0,
        "shared_intermediate_size": 20,
        "layer_types": ["attention"] * 3,
    },
    "FlexOlmoForCausalLM": {"num_experts": 3, "num_experts_per_tok": 2},
    "HYV3ForCausalLM": EXPERTS | {"num_experts": 3},
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "SolarOpenForCausalLM": EXPERTS | {"n_routed_experts": 3},
    "Glm4vMoeForConditionalGeneration": EXPERTS | {"n_routed_experts": 3},
    "Qwen3VLMoeForConditionalGeneration": EXPERTS | {"num_experts": 3},
}
"""What those with experts, or latents, have besides."""


def model_of_family(architecture, **fields):
    sizes = SMALL | MIXTURES.get(architecture, {}) | fields
    if architecture in NESTED:
        tied = sizes.pop("tie_word_embeddings", None)
        sizes = {"text_config": sizes, "tie_word_embeddings": tied}
    return parse_config({"architectures": [architecture]} | sizes)


GRANITE = dict(embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_row_of_every_tensor_is_read_once(architecture, tied):
    table = decoder.parameters_of(model_of_family(architecture, tie_word_embeddings=tied))
    for alternative in (False, True):
        read = {key: [] for key in expected_tensors(table)}
        for parameter, layer in table.placed():
            if parameter.value is not None:
                continue
            parts = (
                parameter.alternatives[0]
                if alternative and parameter.alternatives
                else parameter.parts
            )
            for part, usual in zip(parts, keys(parameter.parts, layer), strict=True):
                read[usual] += part.rows_in_tensor(np.arange(part.rows)).tolist()
        for key, shape in expected_tensors(table).items():
            assert sorted(read[key]) == list(range(shape[0])), key


def written(folder, table, dtype=np.float32, bare=False):
    """A checkpoint of random tensors under the usual names, or under those without `model.`."""
    rng = np.random.default_rng(0)
    shapes = stored_tensors(table)
    tensors = {key: rng.normal(size=shape).astype(dtype) for key, shape in shapes.items()}
    save_file(
        {key.removeprefix("model." if bare else ""): x for key, x in tensors.items()},
        folder / "model.safetensors",
    )
    return tensors


def test_what_predicts_further_tokens_is_ignored_by_name(tmp_path):
    table = decoder.parameters_of(model_of_family("Ernie4_5_MoeForCausalLM"))
    tensors = written(tmp_path, table)
    more = {"model.mtp_block.0.mlp.up_proj.weight": np.ones((2, 2), np.float32)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    check_checkpoint(Checkpoint(tmp_path), table)
    more = {"model.mpt_block.0.mlp.up_proj.weight": np.ones((2, 2), np.float32)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="mpt_block"):
        check_checkpoint(Checkpoint(tmp_path), table)


def test_fused_tensors_are_read_as_their_parts(tmp_path):
    config = model_of_family("Phi3ForCausalLM")
    table = decoder.parameters_of(config)
    tensors = written(tmp_path, table)
    checkpoint = Checkpoint(tmp_path)
    check_checkpoint(checkpoint, table)
    assert [part.rows for part in table.layer(1)["qkv"].parts] == [32, 16, 16]
    for name, key in (("qkv", "self_attn.qkv_proj"), ("gate_up", "mlp.gate_up_proj")):
        read = read_parameter(checkpoint, table.layer(1)[name], 1)
        np.testing.assert_array_equal(read, tensors[f"model.layers.1.{key}.weight"])


def test_parts_of_one_parameter_may_have_different_dtypes(tmp_path):
    """numpy has no common dtype for bfloat16 and float16; float32 holds both exactly."""
    import ml_dtypes

    table = decoder.parameters_of(model_of_family("LlamaForCausalLM"))
    tensors = written(tmp_path, table)
    stored = {"q_proj": ml_dtypes.bfloat16, "k_proj": np.float16, "v_proj": np.float16}
    for key in tensors:
        name = key.split(".")[-2]
        tensors[key] = tensors[key].astype(stored.get(name, np.float32))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    check_checkpoint(checkpoint, table)
    read = read_parameter(checkpoint, table.layer(1)["qkv"], 1)
    parts = [tensors[f"model.layers.1.self_attn.{name}.weight"] for name in stored]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, np.concatenate([p.astype(np.float32) for p in parts]))


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_a_shard_of_a_fused_tensor_is_that_of_separate_ones(shards):
    """Phi-3 and Llama of the same sizes place the same entries, and find each in a tensor of
    their own.
    """
    fused, separate = (
        model_of_family(a, intermediate_size=50) for a in ("Phi3ForCausalLM", "LlamaForCausalLM")
    )
    for name in ("qkv", "gate_up"):
        one, other = (decoder.parameters_of(m).layer(0)[name] for m in (fused, separate))
        placed, same = place(one, fused, shards), place(other, separate, shards)
        np.testing.assert_array_equal(placed.source, same.source)
        offset = 0
        for part, whole in zip(one.parts, other.parts, strict=True):
            rows, rows_apart = (
                rows_of(part, placed.source, offset),
                rows_of(whole, same.source, offset),
            )
            np.testing.assert_array_equal(
                rows, np.where(rows_apart < 0, -1, rows_apart + part.first)
            )
            assert (rows_apart < whole.rows).all()
            offset += part.rows


def test_a_checkpoint_without_the_head_may_lack_the_prefix(tmp_path):
    """As Qwen3-Embedding and what `AutoModel` saves: layers.0 instead of model.layers.0."""
    table = decoder.parameters_of(model_of_family("Qwen3ForCausalLM", tie_word_embeddings=True))
    tensors = written(tmp_path, table, bare=True)
    checkpoint = Checkpoint(tmp_path)
    check_checkpoint(checkpoint, table)
    read = read_parameter(checkpoint, table.layer(2)["down"], 2)
    np.testing.assert_array_equal(read, tensors["model.layers.2.mlp.down_proj.weight"])
    bare = {key.removeprefix("model."): x for key, x in tensors.items()}
    # A part that is missing is called as the file calls the others.
    save_file(
        {key: x for key, x in bare.items() if "1.self_attn.k_proj" not in key},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"1 missing: layers\.1\.self_attn\.k_proj\.weight$"):
        check_checkpoint(Checkpoint(tmp_path), table)
    # Both names at once are one too many.
    save_file(
        bare | {"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"1 unexpected: norm\.weight"):
        check_checkpoint(Checkpoint(tmp_path), table)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_tied_embedding_may_be_there_as_the_head_alone(tmp_path, architecture):
    """What tensors are called besides does not change by it."""
    table = decoder.parameters_of(model_of_family(architecture, tie_word_embeddings=True))
    tensors = written(tmp_path, table)
    (key,) = keys(table.top["embed"].parts, TOP)
    (head,) = keys(table.top["embed"].alternatives[-1], TOP)
    assert head.endswith("lm_head.weight")
    tensors[head] = tensors.pop(key)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    check_checkpoint(checkpoint, table)
    read = read_parameter(checkpoint, table.top["embed"], TOP)
    np.testing.assert_array_equal(read, tensors[head])
    refuse_without(head, key, tensors, table, tmp_path)


def test_a_head_that_is_not_tied_is_no_embedding(tmp_path):
    table = decoder.parameters_of(model_of_family("LlamaForCausalLM"))
    embedding = "model.embed_tokens.weight"
    refuse_without(embedding, embedding, written(tmp_path, table), table, tmp_path)


def refuse_without(key, missing, tensors, table, folder):
    """A checkpoint without a tensor is refused, and `missing` is what it lacks."""
    save_file({k: x for k, x in tensors.items() if k != key}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"1 missing: {re.escape(missing)}$"):
        check_checkpoint(Checkpoint(folder), table)


def test_what_a_family_ignores_is_ignored_and_nothing_else(tmp_path):
    table = decoder.parameters_of(model_of_family("Phi3ForCausalLM"))
    tensors = written(tmp_path, table)
    rotary = {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file(tensors | rotary, tmp_path / "model.safetensors")
    check_checkpoint(Checkpoint(tmp_path), table)
    save_file(
        tensors | {"model.layers.1.self_attn.q_proj.weight": np.ones(4, np.float32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError,
        match=r"unexpected: .*q_proj\.weight; the nearest .*\.1\.self_attn\.qkv_proj",
    ):
        check_checkpoint(Checkpoint(tmp_path), table)


def test_a_layer_that_predicts_is_ignored_and_one_that_config_json_forgets_is_not(tmp_path):
    """GLM-4.5 has such a layer behind the last. One more of the usual is no such."""
    table = decoder.parameters_of(model_of_family("Glm4MoeForCausalLM"))
    tensors = written(tmp_path, table)
    last = max(int(key.split(".")[2]) for key in tensors if "layers" in key)
    of_last, behind = f"model.layers.{last}.", f"model.layers.{last + 1}."
    more = {k.replace(of_last, behind): x for k, x in tensors.items() if k.startswith(of_last)}
    predicts = {f"{behind}{name}.weight": np.ones(4, np.float32) for name in ("enorm", "eh_proj")}
    save_file(tensors | more | predicts, tmp_path / "model.safetensors")
    check_checkpoint(Checkpoint(tmp_path), table)
    save_file(tensors | more, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"unexpected: model\.layers\.{last + 1}"):
        check_checkpoint(Checkpoint(tmp_path), table)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_power_of_two_that_divides_logits_is_in_the_last_norm(tmp_path, dtype):
    table = decoder.parameters_of(model_of_family("GraniteForCausalLM", **GRANITE))
    tensors = written(tmp_path, table, dtype)
    read = read_parameter(Checkpoint(tmp_path), table.top["norm"], TOP)
    assert read.dtype == dtype
    np.testing.assert_array_equal(
        read.astype(np.float64) * 16, tensors["model.norm.weight"].astype(np.float64)
    )
    odd = model_of_family("GraniteForCausalLM", **GRANITE | {"logits_scaling": 13.0})
    assert decoder.parameters_of(odd).top["norm"].factor == 1.0
    assert decoder.model_of(odd).logits_scale == 1 / 13


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_scales_are_called_where_they_are_not_one(backend):
    """One op behind the embedding, and one behind each sublayer; programs of other models have
    none.
    """
    plans = backend_module(backend, "plans")

    def counts(model):
        config = EngineConfig(model="m", backend=backend, max_num_seqs=4, max_num_batched_tokens=16)
        resolved, _ = resolve(config, model, DeviceInfo("cpu", "cpu", 1 << 34))
        calls = [plans.record(model, resolved, kind) for kind in ("decode", "mixed", "sample")]
        programs = [{call.program for call in of_kind} for of_kind in calls]
        found = [[c for c in of_kind if c.op == "scale"] for of_kind in calls]
        factors = [sorted({c.arguments["factor"] for c in of_kind}) for of_kind in found]
        return [
            len(of_kind) / len(names) for of_kind, names in zip(found, programs, strict=True)
        ], factors

    assert counts(model_of_family("LlamaForCausalLM")) == ([0, 0, 0], [[], [], []])
    ones = dict.fromkeys(
        "embedding_multiplier attention_multiplier residual_multiplier logits_scaling".split(), 1.0
    )
    assert counts(model_of_family("GraniteForCausalLM", **ones)) == ([0, 0, 0], [[], [], []])
    # The layers of a model are recorded once for each kind, and they are of one kind.
    (decode, mixed, sample), factors = counts(model_of_family("GraniteForCausalLM", **GRANITE))
    assert (decode, sample) == (3, 0)
    assert mixed >= 3
    assert factors == [[0.22, 12.0], [0.22, 12.0], []]
    odd = model_of_family("GraniteForCausalLM", **GRANITE | {"logits_scaling": 13.0})
    assert counts(odd)[1][2] == [1 / 13]


# --- parameters of kinds that no family has yet
# ----------------------------------------------------------------------

LAYERS = (0, 2)
ODD = ParameterTable(
    (
        Parameter("embed", (6, 4), ("vocab", "embed"), (Part("embed", 6, "vocab"),)),
        Parameter(
            "cube",
            (6, 4, 5),
            ("embed", "mlp", "head_dim"),
            (Part("cube.{layer}", 4, "embed", 1, 5), Part("rest.{layer}", 2, "embed")),
            LAYERS,
        ),
        Parameter(
            "columns", (3, 4), ("embed", "mlp"), (Part("both.{layer}", 3, "embed", 3, 6),), LAYERS
        ),
        Parameter(
            "decay",
            (4,),
            ("embed",),
            (Part("decay.{layer}", 4, "embed"),),
            range(3),
            dtype="float32",
        ),
    )
)


def odd_values(folder, dummy):
    """What the parameters of ODD are: in a checkpoint that is written, or as seeded random
    numbers.
    """
    if dummy:
        return {(p.name, layer): dummy_values(p, max(layer, 0)) for p, layer in ODD.placed()}
    tensors = written(folder, ODD)
    values = {("embed", TOP): tensors["embed"]}
    for layer in range(3):
        values["decay", layer] = tensors[f"decay.{layer}"]
    for layer in LAYERS:
        values["cube", layer] = np.concatenate(
            [tensors[f"cube.{layer}"][1:], tensors[f"rest.{layer}"]]
        )
        values["columns", layer] = tensors[f"both.{layer}"][3:]
    return values


def dummy_values(parameter, layer):
    """From the index of each element in its parameter, as a row of all of them."""
    index = np.arange(prod(parameter.shape), dtype=np.int32)
    return dummy_parameter(namespace("numpy"), parameter, layer, 0, index).reshape(parameter.shape)


def test_a_table_says_what_each_layer_has():
    assert list(ODD.top) == ["embed"]
    assert [list(ODD.layer(i)) for i in range(3)] == [
        ["cube", "columns", "decay"],
        ["decay"],
        ["cube", "columns", "decay"],
    ]
    assert parameter_count(ODD) == 24 + 2 * (120 + 12) + 3 * 4
    assert expected_tensors(ODD)["cube.2"] == (5, 4, 5)
    assert expected_tensors(ODD)["both.0"] == (6, 4)
    with pytest.raises(InternalError, match="cube: stated twice for layer 2"):
        ParameterTable((*ODD, replace(ODD.layer(0)["cube"], layers=(1, 2))))
    with pytest.raises(InternalError, match="embed: the parts have 6 rows, the shape 7"):
        replace(ODD.top["embed"], shape=(7, 4))
    with pytest.raises(InternalError, match=r"embed: factor is 0\.3"):
        replace(ODD.top["embed"], factor=0.3)


@pytest.mark.parametrize("dummy", [False, True])
def test_torch_loads_parameters_of_any_kind(tmp_path, dummy):
    import torch

    from twinfer.gpu.module import Decoder
    from twinfer.gpu.weights import load_weights

    values, model = odd_values(tmp_path, dummy), model_of_family("LlamaForCausalLM")
    module = Decoder(model, ODD, None, torch.bfloat16, torch.device("cpu"))
    load_weights(module, str(tmp_path), "dummy" if dummy else "auto", ODD, 0, lambda *_: None)
    assert list(module.top_weights) == ["embed"]
    for (name, layer), value in values.items():
        loaded = module.top_weights[name] if layer == TOP else module.layer_weights[layer][name]
        assert tuple(loaded.shape) == value.shape
        assert loaded.dtype == (torch.float32 if name == "decay" else torch.bfloat16)
        np.testing.assert_array_equal(
            loaded.float().numpy(), value.astype(loaded_dtype(name)).astype(np.float32)
        )
    assert sum(len(weights) for weights in module.layer_weights) == len(values) - 1


def loaded_dtype(name):
    return np.float32 if name == "decay" else ml_dtypes.bfloat16


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("dummy", [False, True])
def test_jax_loads_parameters_of_any_kind(tmp_path, dummy, shards):
    """The same entries on any number of shards, with zeros where they do not divide."""
    import jax

    from twinfer.tpu.sharding import make_mesh
    from twinfer.tpu.weights import load_weights

    if len(jax.devices("cpu")) < shards:
        pytest.skip(
            "needs several devices: tests/e2e/test_tpu_sharding.py runs this file with them"
        )
    values, model, loaded = odd_values(tmp_path, dummy), model_of_family("LlamaForCausalLM"), []
    for count in (1, shards):
        mesh = make_mesh(jax.devices("cpu"), count)
        arguments = str(tmp_path), "dummy" if dummy else "auto", model, ODD, single_blocks(3)
        loaded.append(
            load_weights(*arguments, jax.numpy.dtype("bfloat16"), 0, mesh, lambda *_: None)
        )
    for (name, layer), value in values.items():
        plain, sharded = (
            np.asarray(w[name] if layer == TOP else w["blocks"][layer][0][name][0]) for w in loaded
        )
        assert plain.dtype == loaded_dtype(name)
        np.testing.assert_array_equal(plain, value.astype(plain.dtype))
        extra = [(0, n - size) for n, size in zip(sharded.shape, plain.shape, strict=True)]
        np.testing.assert_array_equal(sharded, np.pad(plain, extra))
    assert sum(len(of_layers) for (of_layers,) in loaded[0]["blocks"]) == len(values) - 1


# --- rows in another order, norms of 1 + weight
# --------------------------------------------------------------------------------------------------

TURNED = PairsToHalves(head_dim=8, rotated=6)


def turned_table(order):
    """q and k of four and two heads, their biases, and a norm that multiplies with 1 + weight."""
    q, k = Part("q", 32, "heads", order=order), Part("both", 16, "kv_heads", 4, 24, order)
    biases = replace(q, key="q_bias"), replace(k, key="both_bias")
    return ParameterTable(
        (
            Parameter("qk", (48, 5), ("qkv", "embed"), (q, k)),
            Parameter("qk_bias", (48,), ("qkv",), biases),
            Parameter("columns", (32, 6), ("embed", "mlp"), (replace(q, key="c", axis="embed"),)),
            Parameter(
                "norm", (8,), ("embed",), (Part("norm", 8, "embed"),), init="zeros",
                dtype="float32", offset=1.0,
            ),
        )
    )  # fmt: skip


def loaded_on(backend, folder, table, shards=1, load_format="auto"):
    """The parameters of a table that belong to no layer, in a bfloat16 model."""
    model = model_of_family("LlamaForCausalLM")
    if backend == "torch":
        import torch

        from twinfer.gpu.module import Decoder
        from twinfer.gpu.weights import load_weights

        module = Decoder(model, table, None, torch.bfloat16, torch.device("cpu"))
        load_weights(module, str(folder), load_format, table, 0, lambda *_: None)
        return {name: to_numpy(x) for name, x in module.top_weights.items()}
    import jax

    from twinfer.tpu.sharding import make_mesh
    from twinfer.tpu.weights import load_weights

    if len(jax.devices("cpu")) < shards:
        pytest.skip(
            "needs several devices: tests/e2e/test_tpu_sharding.py runs this file with them"
        )
    mesh = make_mesh(jax.devices("cpu"), shards)
    arguments = str(folder), load_format, model, table, single_blocks(3)
    weights = load_weights(*arguments, jax.numpy.dtype("bfloat16"), 0, mesh, lambda *_: None)
    return {name: np.asarray(x) for name, x in weights.items() if name != "blocks"}


def test_pairs_lie_as_halves():
    rows = TURNED.tensor_rows(np.arange(16))
    assert rows.tolist() == [0, 2, 4, 1, 3, 5, 6, 7, 8, 10, 12, 9, 11, 13, 14, 15]
    part = Part("k", 8, "kv_heads", first=16, of=32, order=TURNED)
    assert part.rows_in_tensor(np.arange(8)).tolist() == [16, 18, 20, 17, 19, 21, 22, 23]


@pytest.mark.parametrize(("backend", "shards"), [("torch", 1), ("jax", 1), ("jax", 2), ("jax", 3)])
def test_rows_in_another_order_are_read_as_those_that_lie_in_it(tmp_path, backend, shards):
    """A table that turns pairs into halves reads what a plain one reads of turned tensors."""
    turned, plain = turned_table(TURNED), turned_table(None)
    tensors = written(tmp_path, turned, ml_dtypes.bfloat16)
    here = loaded_on(backend, tmp_path, turned, shards)
    for key, first in (("q", 0), ("q_bias", 0), ("c", 0), ("both", 4), ("both_bias", 4)):
        rows = 16 if first else 32
        order = first + TURNED.tensor_rows(np.arange(rows))
        tensors[key] = tensors[key].copy()
        tensors[key][first : first + rows] = tensors[key][order]
    save_file(tensors, tmp_path / "model.safetensors")
    there = loaded_on(backend, tmp_path, plain, shards)
    assert here.keys() == there.keys()
    for name, value in there.items():
        np.testing.assert_array_equal(here[name], value, err_msg=name)


@pytest.mark.parametrize(("backend", "shards"), [("torch", 1), ("jax", 1), ("jax", 2)])
@pytest.mark.parametrize("dummy", [False, True])
def test_an_offset_is_added_in_float32(tmp_path, backend, shards, dummy):
    """1 + a bfloat16 weight needs more bits than bfloat16 has."""
    weight = written(tmp_path, turned_table(None), ml_dtypes.bfloat16)["norm"]
    load_format = "dummy" if dummy else "auto"
    norm = loaded_on(backend, tmp_path, turned_table(None), shards, load_format)["norm"]
    want = np.ones(8, np.float32) if dummy else np.float32(1) + weight.astype(np.float32)
    assert norm.dtype == np.float32
    np.testing.assert_array_equal(norm, want)
    assert dummy or not np.array_equal(norm, want.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_an_offset_needs_float32():
    with pytest.raises(InternalError, match=r"norm: offset is 1\.0, which needs the dtype float32"):
        replace(turned_table(None).top["norm"], dtype="model")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_norm_of_one_plus_weight_is_a_plain_norm_of_it_in_float32(framework, dtype):
    """Bit for bit: so every kernel for `rms_norm` serves Gemma."""
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(9, 200)) * np.logspace(-3, 3, 9)[:, None]).astype(DTYPES[dtype])
    weight = rng.normal(size=200).astype(DTYPES[dtype])
    plus_one = np.float32(1) + weight.astype(np.float32)
    if framework == "torch":
        ops = resolve_ops("torch").bind()
        theirs = to_numpy(ops.gemma_rms_norm(from_numpy(x), from_numpy(weight), 1e-6))
        ours = to_numpy(ops.rms_norm(from_numpy(x), from_numpy(plus_one), 1e-6))
    else:
        ops = resolve_ops("jax").bind()
        theirs = on_jax(lambda x, w: ops.gemma_rms_norm(x, w, 1e-6), x, weight)
        ours = on_jax(lambda x, w: ops.rms_norm(x, w, 1e-6), x, plus_one)
    assert ours.dtype == x.dtype
    np.testing.assert_array_equal(ours, theirs)
    # One plus weight in the storage dtype is another number.
    if dtype != "float32":
        rounded = plus_one.astype(x.dtype)
        assert not np.array_equal(plus_one, rounded.astype(np.float32))


VISION = 416_866_032
"""Parameters of the vision tower of Gemma 3, which does not run here."""


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("phi4-mini", 3_836_021_760),
        # The whole without the tower and the projector, 1152 * (width + 1).
        ("gemma3-4b", 4_300_079_472 - VISION - 1152 * 2561),
        ("gemma3-27b", 27_432_406_640 - VISION - 1152 * 5377),
        ("olmo3-7b", 7_298_011_136),
    ],
)
def test_the_number_of_parameters_is_the_published_one(name, published):
    assert parameter_count(decoder.parameters_of(parse_config(SHAPES[name]))) == published


@pytest.mark.parametrize(
    ("asked", "length", "changed"), [(None, 4096, 0), (4096, 4096, 0), (4097, 4097, 1)]
)
def test_an_engine_takes_the_short_longrope_factors_unless_asked_for_more(asked, length, changed):
    """At the short ones every sequence that is served is computed as by transformers."""
    model, device = parse_config(SHAPES["phi4-mini"]), DeviceInfo("cuda", "H200", 1 << 37)
    config = EngineConfig(model="m", backend="torch", max_model_len=asked)
    resolved, changes = resolve(config, model, device)
    assert resolved.max_model_len == length
    assert [change.field for change in changes].count("longrope factors") == changed
    assert (
        resolve(EngineConfig(model="m", backend="torch"), model, DeviceInfo("cpu", "", 1 << 34))[
            0
        ].max_model_len
        == 2048
    )
    # Others have the model's limit.
    granite = parse_config(SHAPES["granite3.3-8b"])
    assert resolve(replace(config, max_model_len=None), granite, device)[0].max_model_len == 131072


def on_jax(function, *arrays):
    """Compiled as the worker does."""
    import jax

    lowered = jax.jit(function).lower(*arrays)
    return np.asarray(
        lowered.compile(compiler_options={"xla_allow_excess_precision": False})(*arrays)
    )


@pytest.mark.parametrize("factor", [0.22, 12.0, 0.175, 1 / 13])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_multipliers_round_where_transformers_rounds(dtype, factor):
    """`residual + x * multiplier`, as its modeling code has it: bit for bit on both frameworks."""
    rng = np.random.default_rng(0)
    x, residual = (rng.normal(size=(7, 1000)).astype(DTYPES[dtype]) for _ in range(2))
    product = from_numpy(x) * factor
    torch_ops, jax_ops = resolve_ops("torch").bind(), resolve_ops("jax").bind()
    np.testing.assert_array_equal(
        to_numpy(torch_ops.scale(from_numpy(x), factor)), to_numpy(product)
    )
    np.testing.assert_array_equal(on_jax(lambda x: jax_ops.scale(x, factor), x), to_numpy(product))
    total = to_numpy(from_numpy(residual) + product)
    ours = torch_ops.add(torch_ops.scale(from_numpy(x), factor), from_numpy(residual))
    np.testing.assert_array_equal(to_numpy(ours), total)
    # XLA would make one operation of the product and the sum, which rounds once, if nothing kept
    # them apart.
    both = on_jax(lambda x, residual: jax_ops.add(jax_ops.scale(x, factor), residual), x, residual)
    np.testing.assert_array_equal(both, total)


def test_the_sizes_of_a_family_are_those_of_its_tensors():
    for architecture in FAMILIES:
        table = decoder.parameters_of(model_of_family(architecture))
        assert parameter_count(table) == sum(
            prod(shape) for shape in expected_tensors(table).values()
        )
