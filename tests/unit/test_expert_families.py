"""Mixtures of experts: what their configs say, what is refused, and how their weights lie."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from twinfer.shared.checkpoint import Checkpoint
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import (
    CheckpointError,
    ConfigError,
    InternalError,
    ModelError,
    UnsupportedModel,
)
from twinfer.shared.models.config_json import parse_config
from twinfer.shared.models.decoder import model_of, parameters_of
from twinfer.shared.models.quantization import Quantization
from twinfer.shared.models.shapes import SHAPES
from twinfer.shared.models.spec import Experts, Mlp, MlpAndExperts, Narrow
from twinfer.shared.models.table import parameter_count
from twinfer.shared.weights import check_checkpoint, read_parameter

from .checkpoint_tensors import stored_tensors

SMALL = {
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
QWEN = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4}


def qwen3(**fields):
    return parse_config({"architectures": ["Qwen3MoeForCausalLM"]} | SMALL | QWEN | fields)


def mixtral(**fields):
    return parse_config(
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3} | SMALL | fields
    )


def glm(**fields):
    mixture = {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    return parse_config({"architectures": ["Glm4MoeForCausalLM"]} | SMALL | mixture | fields)


def gemma4(**fields):
    mixture = {"num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 4}
    usual = {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "sliding_window": 8}
    named = {"architectures": ["Gemma4ForCausalLM"], "head_dim": 4, "global_head_dim": 4}
    return parse_config(named | SMALL | mixture | usual | fields)


def mixers(config):
    return [layer[1].mixer for layer in model_of(config).layers]


@pytest.mark.parametrize(
    ("name", "published"), [("qwen3-30b-a3b", 30_532_122_624), ("mixtral-8x7b", 46_702_792_704)]
)
def test_published_sizes(name, published):
    assert parameter_count(parameters_of(parse_config(SHAPES[name]))) == published


def test_which_layers_have_experts():
    routed, plain = Experts(3, 2, renormalize=False), Mlp()
    assert mixers(qwen3()) == [routed] * 4
    assert mixers(qwen3(mlp_only_layers=[0, 3])) == [plain, routed, routed, plain]
    assert mixers(qwen3(decoder_sparse_step=2)) == [plain, routed, plain, routed]
    assert mixers(qwen3(norm_topk_prob=True))[0].renormalize
    # transformers 5 writes the number under another name.
    assert mixers(qwen3(num_experts=None, num_local_experts=5))[0].num_experts == 5
    assert mixers(mixtral()) == [Experts(3, 2, renormalize=True)] * 4
    shared = qwen3(architectures=["Qwen2MoeForCausalLM"], shared_expert_intermediate_size=6)
    assert mixers(shared) == [Experts(3, 2, renormalize=False, shared="gated")] * 4
    assert shared.qkv_bias
    routed = Experts(3, 2, renormalize=True, act="gelu_tanh", factors=True)
    for mixer in mixers(gemma4()):
        assert isinstance(mixer, MlpAndExperts)
        assert (mixer.mlp, mixer.experts) == (Mlp("gelu_tanh"), routed)


@pytest.mark.parametrize(
    ("error", "words", "fields"),
    [
        (ModelError, "num_experts_per_tok is 4, must be an integer from 1 to 3", {"num_experts_per_tok": 4}),
        (ModelError, "moe_intermediate_size is missing", {"moe_intermediate_size": None}),
        (ModelError, ": num_experts is missing", {"num_experts": None}),
        (ModelError, "mlp_only_layers is", {"mlp_only_layers": [0.5]}),
        (ModelError, "mlp_only_layers is", {"mlp_only_layers": 3}),
        (ModelError, "mlp_only_layers is", {"mlp_only_layers": {}}),
        (UnsupportedModel, "leaves layers with experts", {"decoder_sparse_step": 9}),
        (UnsupportedModel, "n_shared_experts", {"n_shared_experts": 1}),
    ],
)  # fmt: skip
def test_what_is_refused(error, words, fields):
    with pytest.raises(error, match=words):
        qwen3(**fields)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("top_k_experts is 4, must be an integer from 1 to 3", {"top_k_experts": 4}),
        ("top_k_experts is 0, must be an integer from 1 to 3", {"top_k_experts": 0}),
        ("top_k_experts is missing", {"top_k_experts": None}),
        ("moe_intermediate_size is missing", {"moe_intermediate_size": None}),
        ("num_experts is missing", {"num_experts": None}),
        ('enable_moe_block is "yes"', {"enable_moe_block": "yes"}),
    ],
)
def test_what_is_refused_of_experts_beside_an_mlp(words, fields):
    with pytest.raises(ModelError, match=words):
        gemma4(**fields)


def test_a_model_may_have_no_plain_layers_before_its_experts():
    def kinds(**fields):
        return [type(mixer) for mixer in mixers(glm(**fields))]

    assert kinds(first_k_dense_replace=0) == [Experts] * 4
    assert kinds(first_k_dense_replace=3) == [Mlp] * 3 + [Experts]
    for value in (4, -1, False):
        words = f"first_k_dense_replace is {value}, must be an integer from 0 to 3"
        with pytest.raises(ModelError, match=words):
            kinds(first_k_dense_replace=value)


def test_shards_that_do_not_divide_the_experts_are_refused():
    device = DeviceInfo("cpu", "cpu", 1 << 30, None)
    config = EngineConfig(model="m", backend="jax", tensor_parallel_size=2)
    words = r"tensor_parallel_size: got 2, allowed are sizes that divide the 3 experts of Mixtral"
    with pytest.raises(ConfigError, match=words):
        resolve(config, mixtral(), device)
    with pytest.raises(ConfigError, match=words):
        resolve(replace(config, backend="torch"), mixtral(), device)
    four = mixtral(num_local_experts=4)
    resolve(config, four, device)
    resolve(replace(config, backend="torch"), four, device)


def tensors(rng, config):
    """A checkpoint of Qwen3-MoE in its names on disk: each expert's tensors apart."""
    from .checkpoint_tensors import expected_tensors

    shapes = expected_tensors(parameters_of(config))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_experts_lie_one_below_the_other_and_each_tensor_is_needed(tmp_path):
    config, table = qwen3(mlp_only_layers=[1]), parameters_of(qwen3(mlp_only_layers=[1]))
    held = tensors(np.random.default_rng(0), config)
    assert "model.layers.1.mlp.gate_proj.weight" in held
    assert "model.layers.1.mlp.gate.weight" not in held
    (tmp_path / "config.json").write_text(json.dumps({}))
    save_file(held, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    check_checkpoint(checkpoint, table)
    found = read_parameter(checkpoint, table.layer(2)["experts_gate_up"], 2).reshape(3, 2, 4, 8)
    down = read_parameter(checkpoint, table.layer(2)["experts_down"], 2).reshape(3, 8, 4)
    for expert in range(3):
        prefix = f"model.layers.2.mlp.experts.{expert}."
        np.testing.assert_array_equal(found[expert, 0], held[f"{prefix}gate_proj.weight"])
        np.testing.assert_array_equal(found[expert, 1], held[f"{prefix}up_proj.weight"])
        np.testing.assert_array_equal(down[expert], held[f"{prefix}down_proj.weight"])
    missing = "model.layers.2.mlp.experts.1.up_proj.weight"
    save_file({k: v for k, v in held.items() if k != missing}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=missing):
        check_checkpoint(Checkpoint(str(tmp_path)), table)
    more = held | {"model.layers.2.mlp.experts.3.up_proj.weight": held[missing]}
    save_file(more, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.3"):
        check_checkpoint(Checkpoint(str(tmp_path)), table)


ROUTER = "model.layers.1.router."


def test_experts_of_gemma_4_are_one_tensor_and_its_router_has_three(tmp_path):
    """The scale of the router's norm is divided by the root of the width, in float32 whatever the
    file has.
    """
    import ml_dtypes

    table = parameters_of(gemma4())
    held = tensors(np.random.default_rng(0), gemma4())
    held = {name.removesuffix(":stacked3"): x for name, x in held.items()}
    for name, shape in (("gate_up_proj", (3, 8, 8)), ("down_proj", (3, 8, 4))):
        for layer in range(4):
            key = f"model.layers.{layer}.experts.{name}"
            held[key] = held[key].reshape(shape)
    held[f"{ROUTER}scale"] = held[f"{ROUTER}scale"].astype(ml_dtypes.bfloat16)
    save_file(held, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(str(tmp_path))
    check_checkpoint(checkpoint, table)
    of_layer = table.layer(1)
    assert {"gate_up", "experts_gate_up", "router", "mlp_own_norm"} <= set(of_layer)
    found = read_parameter(checkpoint, of_layer["experts_gate_up"], 1)
    np.testing.assert_array_equal(found, held["model.layers.1.experts.gate_up_proj"].reshape(-1, 8))
    norm = read_parameter(checkpoint, of_layer["router_norm"], 1)
    wide = held[f"{ROUTER}scale"].astype(np.float32)
    np.testing.assert_array_equal(norm, wide * np.float32(8**-0.5))
    assert norm.dtype == np.float32
    swapped = held["model.layers.1.experts.gate_up_proj"].swapaxes(0, 1).copy()
    save_file(
        held | {"model.layers.1.experts.gate_up_proj": swapped}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj has shape \[8, 3, 8\], expected \[3, 8, 8"
    ):
        check_checkpoint(Checkpoint(str(tmp_path)), table)
    for missing in (f"{ROUTER}scale", f"{ROUTER}per_expert_scale"):
        save_file({k: v for k, v in held.items() if k != missing}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=missing):
            check_checkpoint(Checkpoint(str(tmp_path)), table)


@pytest.mark.parametrize("published", [False, True])
def test_the_bias_of_a_router_of_exaone_lies_in_it_or_beside_it(tmp_path, published):
    """And what predicts further tokens is ignored by name."""
    named = {"architectures": ["ExaoneMoeForCausalLM"]}
    table = parameters_of(parse_config(named | SMALL | QWEN))
    name = "mlp.e_score_correction_bias" if published else "mlp.gate.e_score_correction_bias"
    tensors = {
        key.replace("mlp.gate.e_score_correction_bias", name): np.full(shape, 0.5, np.float32)
        for key, shape in stored_tensors(table).items()
    }
    assert f"model.layers.1.{name}" in tensors
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = np.ones((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    check_checkpoint(checkpoint, table)
    read = read_parameter(checkpoint, table.layer(1)["router_bias"], 1)
    np.testing.assert_array_equal(read, np.full(3, 0.5, np.float32))


def test_a_factor_that_is_not_exact_needs_float32():
    table = parameters_of(gemma4())
    with pytest.raises(
        InternalError, match=r"factor is 0\.3, dtype model; allowed are powers of two"
    ):
        replace(table.layer(0)["mlp_own_norm"], factor=0.3)


def test_either_part_may_be_narrow():
    config = replace(gemma4(), quantization=Quantization(Narrow("int8"), left=(r".*\.mlp\..*",)))
    for mixer in mixers(config):
        assert (mixer.mlp.narrow, mixer.experts.narrow) == (None, Narrow("int8"))
    table = parameters_of(config)
    assert "experts_down_scale" in table.layer(0)
    assert "down_scale" not in table.layer(0)
