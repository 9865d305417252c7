"""What is read of a quantised checkpoint, module by module, without an engine: the weights that its
own library decompresses, on any rows; readers with a fault are seen; what cannot be read is refused
by the name of the tensor.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from twinfer import LLM
from twinfer.ops.namespaces import namespace
from twinfer.ops.reference.narrow import widened_weight
from twinfer.shared import narrow_checkpoint
from twinfer.shared.errors import CheckpointError, ConfigError, ModelError, UnsupportedModel
from twinfer.shared.models import decoder
from twinfer.shared.models.config_json import load_config
from twinfer.shared.narrow_checkpoint import NarrowCheckpoint, open_checkpoint
from twinfer.shared.weights import check_checkpoint, read_parameter

from .quantized_checkpoints import SCHEMES, make, make_mxfp4

SHAPE = 80, 128
"""Rows that are whole numbers of words and not of blocks."""
NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(scheme) -> the folder of a small model, made once."""
    made = {}

    def get(scheme):
        if scheme not in made:
            made[scheme] = str(tmp_path_factory.mktemp("reading") / scheme)
            make_mxfp4(made[scheme]) if scheme == "mxfp4" else make(made[scheme], scheme)
        return made[scheme]

    return get


@pytest.fixture
def module(tmp_path, checkpoint):
    """module(scheme) -> (reader of one module's weight [n k], what its library says it is)."""

    def get(scheme):
        write, _ = SCHEMES[scheme]()
        weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
        tensors, twin = write(weight * 0.1)
        named = {f"m.{name}": x.contiguous() for name, x in tensors.items()}
        save_file(named, tmp_path / "model.safetensors")
        quantization = load_config(checkpoint(scheme)).quantization
        return NarrowCheckpoint(tmp_path, quantization), twin.numpy()

    return get


def wide(reader, start=0, stop=SHAPE[0]):
    """Rows of the weight [n k] that a reader's pieces stand for."""
    narrow = reader._quantization.narrow
    pieces = ["values", "scale", *(["zero"] if narrow.zeros else [])]
    values, scale, *zero = (reader.read_slice(f"m:{piece}", 0, start, stop) for piece in pieces)
    scale = scale.astype(np.float64)
    return widened_weight(namespace("numpy"), values, scale, *(zero or [None]), narrow.kind)


def close(found, twin):
    return np.allclose(found, twin, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_modules_are_what_their_libraries_decompress(module, scheme):
    reader, twin = module(scheme)
    assert close(wide(reader), twin)
    for start, stop in [(0, 8), (3, 50), (39, 80), (41, 42)]:
        assert close(wide(reader, start, stop), twin[start:stop]), (start, stop)


def shifted(piece, by):
    """A reader that gives one piece of other rows or groups."""

    def fault(monkeypatch, form):
        original = getattr(form, piece)
        monkeypatch.setattr(form, piece, lambda *args: by(original(*args)))

    return fault


FAULTS = {
    "zero off by one": (shifted("zero", lambda z: z + 1), ("packed-zeros", "gptq", "awq")),
    "halves of a byte swapped": (
        shifted("values", lambda v: (v >> 4) | (v << 4)),
        ("packed", "packed-zeros", "gptq", "awq", "nvfp4"),
    ),
    "group shifted": (
        shifted("scale", lambda s: np.roll(s, 1, 1)),
        ("packed", "gptq", "awq", "nvfp4", "deepseek", "fp8-block"),
    ),
    "scale of the neighbour": (
        shifted("scale", lambda s: np.roll(s, 1, 0)),
        ("packed", "packed-channel", "gptq", "awq", "nvfp4", "int8", "fp8-channel", "deepseek"),
    ),
    "divided for multiplied": (shifted("scale", lambda s: 1.0 / s), SCHEMES),
}
"""Mistakes that a reader of each format can make, and the formats that show them."""


@pytest.mark.parametrize("fault", FAULTS)
def test_readers_with_a_fault_are_seen(module, monkeypatch, fault):
    plant, schemes = FAULTS[fault]
    for scheme in schemes:
        reader, twin = module(scheme)
        with monkeypatch.context() as patch:
            plant(patch, reader._form)
            assert not close(wide(reader), twin), scheme


def test_readers_of_another_form_are_seen(module, monkeypatch):
    """The stored zeros of GPTQ as they are, AWQ's words in plain order, a global scale multiplied."""
    reader, twin = module("gptq")
    reader._form.quantization = reader._quantization.__class__(reader._quantization.narrow, "gptq")
    assert not close(wide(reader), twin)
    reader, twin = module("awq")
    monkeypatch.setattr(narrow_checkpoint, "AWQ_PLACES", np.arange(8))
    assert not close(wide(reader), twin)
    reader, twin = module("nvfp4")
    share = reader.read("m.weight_global_scale") ** 2
    shifted("scale", lambda s: s * share)(monkeypatch, reader._form)
    assert not close(wide(reader), twin)


# What is refused


def check(folder):
    """What an engine does with the weights of a folder before it reads them, and all that it reads
    of the first layer.
    """
    model = load_config(folder)
    decoder.model_of(model)
    table = decoder.parameters_of(model)
    reader = open_checkpoint(folder, model)
    check_checkpoint(reader, table)
    for parameter in table.layer(0).values():
        read_parameter(reader, parameter, 0)


def changed(folder, target, change=None, **quantization):
    """A copy of a checkpoint, its tensors and its quantization_config changed."""
    target.mkdir()
    tensors = load_file(f"{folder}/model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    with open(f"{folder}/config.json") as file:
        raw = json.load(file)
    raw["quantization_config"] |= quantization
    (target / "config.json").write_text(json.dumps(raw))
    return str(target)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_libraries_write_is_accepted(checkpoint, scheme):
    check(checkpoint(scheme))


def by_activations(tensors):
    order = tensors[f"{NAME}.g_idx"]
    tensors[f"{NAME}.g_idx"] = order.flip(0).contiguous()


def truncated(name):
    def change(tensors):
        whole = tensors[f"{NAME}.{name}"]
        tensors[f"{NAME}.{name}"] = whole[:-1].clone()

    return change


def without(name):
    return lambda tensors: tensors.pop(f"{NAME}.{name}")


def plain_module(tensors):
    """One of the modules as it was before: a file of two schemes."""
    for name in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{NAME}.{name}"]
    tensors[f"{NAME}.weight"] = torch.zeros(64, 128)


def not_a_number(tensors):
    tensors[f"{NAME}.weight_scale"][3] = float("nan")


def no_value(tensors):
    """The byte that is no number in e4m3."""
    tensors[f"{NAME}.weight"].view(torch.uint8)[3, 5] = 0xFF


def wrapped_zero(tensors):
    """A stored zero of 15, which stands for 16 or wraps to 0."""
    tensors[f"{NAME}.qzeros"][0, 0] = -1


def other_input_scale(tensors):
    tensors["model.layers.0.self_attn.k_proj.input_scale"] *= 2


def no_input_scale(tensors):
    tensors["model.layers.0.mlp.down_proj.input_scale"] *= 0


def infinite(tensors):
    tensors[f"{NAME}.weight_global_scale"] *= float("inf")


TENSORS = {
    "an order by activations": ("gptq", by_activations, rf"{NAME}\.g_idx.*desc_act"),
    "a truncated scale of groups": ("gptq", truncated("scales"), rf"{NAME}\.scales.*has shape"),
    "a truncated scale of rows": ("int8", truncated("weight_scale"), rf"{NAME}\.weight_scale.*shape"),
    "a truncated scale of blocks": (
        "deepseek", truncated("weight_scale_inv"), rf"{NAME}\.weight_scale_inv.*shape",
    ),
    "no scale": ("awq", without("scales"), rf"missing: .*{NAME}\.scales"),
    "no zeros": ("packed-zeros", without("weight_zero_point"), rf"{NAME}\.weight_zero_point"),
    "a plain module among packed ones": (
        "packed", plain_module, rf"missing: .*{NAME}\.weight_packed.*unexpected: .*{NAME}\.weight",
    ),
    "a scale that is no number": ("fp8-channel", not_a_number, rf"{NAME}\.weight_scale.*no number"),
    "an entry that is no number": (
        "fp8-channel", no_value, rf"{NAME}\.weight holds nan at \[3, 5\], must be finite",
    ),
    "a zero that wraps": ("gptq", wrapped_zero, rf"{NAME}\.qzeros.*holds 15"),
    "a scale that is divided by and is 0": (
        "fp8-static", no_input_scale, r"layers\.0\.mlp\.down_proj\.input_scale.*number above 0",
    ),
    "a scale of the tensor that is infinite": (
        "nvfp4", infinite, rf"{NAME}\.weight_global_scale.*holds inf",
    ),
    "several input scales of one product": (
        "fp8-static", other_input_scale, r"layers\.0\.self_attn\.k_proj\.input_scale.*q_proj",
    ),
}  # fmt: skip


def of_other_sizes(tensor):
    """Tensors with an entry less, one more, or one alone, along each axis."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    for axis, size in enumerate(raw.shape):
        every = torch.arange(size)
        for entries in (every[:-1], torch.cat([every, every[:1]]), every[:1]):
            if len(entries) != size:
                yield axis, raw.index_select(axis, entries).view(tensor.dtype)


@pytest.mark.parametrize("scheme", [*SCHEMES, "mxfp4"])
def test_each_axis_of_each_tensor_is_checked(checkpoint, tmp_path, scheme):
    """Of what attention and the MLP of a layer hold: no shape but that of config.json is read."""
    folder, seen = changed(checkpoint(scheme), tmp_path / "changed"), 0
    path = f"{folder}/model.safetensors"
    tensors = load_file(path)
    for key, tensor in tensors.items():
        if "layers.0." not in key or not any(name in key for name in ("q_proj", "down_proj")):
            continue
        for axis, other in of_other_sizes(tensor):
            if scheme == "fp8-rows" and other.numel() == 1:
                continue  # its config has nothing against one scale for all rows
            save_file(tensors | {key: other}, path)
            with pytest.raises(CheckpointError) as caught:
                check(folder)
            assert f"{key} has shape {list(other.shape)}, expected" in str(caught.value), axis
            seen += 1
    assert seen >= 8


def test_experts_in_one_tensor_are_as_many_as_the_config_says(checkpoint, tmp_path):
    """Half of them with rows of twice as many have the bytes of all of them."""
    folder = changed(checkpoint("mxfp4"), tmp_path / "changed")
    path, key = f"{folder}/model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(path)
    for name in (f"{key}_blocks", f"{key}_scales"):
        experts, rows, *rest = tensors[name].shape
        tensors[name] = tensors[name].reshape(experts // 2, 2 * rows, *rest)
    save_file(tensors, path)
    message = rf"{key}_blocks has shape \[3, 128, .*expected \[6, 64, .*{key}_scales has shape"
    with pytest.raises(CheckpointError, match=message):
        check(folder)


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_do_not_fit_are_named(checkpoint, tmp_path, what):
    scheme, change, message = TENSORS[what]
    folder = changed(checkpoint(scheme), tmp_path / "changed", change)
    with pytest.raises(CheckpointError, match=message):
        check(folder)


CONFIGS = {
    "an unknown method": ("awq", dict(quant_method="quip"), r"quant_method.*gptq"),
    "an unknown field": ("gptq", dict(rotation="hadamard"), r"rotation.*not known"),
    "an unknown format": ("packed", dict(format="marlin-24"), r"format.*pack-quantized"),
    "3 bits": ("gptq", dict(bits=3), r"bits.*3"),
    "an AWQ of another layout": ("awq", dict(version="gemv"), r"version.*gemm"),
    "two layouts": ("awq", dict(format="gemv"), r"format is gemv, allowed: .*gemm"),
    "two formats": ("gptq", dict(format="gptq_v2"), r"format is gptq_v2, allowed: .*gptq"),
    "the AWQ of another library": ("awq", dict(backend="llm-awq"), r"backend is llm-awq.*autoawq"),
    "a GPTQ that is packed for a kernel": ("gptq", dict(is_marlin_format=True), r"is_marlin_format"),
    "a GPTQ that is no name": ("gptq", dict(checkpoint_format=[]), r"checkpoint_format is \[\]"),
    "activations that nobody knows": ("fp8-dynamic", dict(activation_scheme="auto"), r"activation_scheme"),
    "some of one product": (
        "gptq", dict(dynamic={r"-:.*k_proj": {}}), r"leaves .*k_proj as it is and not the others",
    ),
    "some of one mixer": (
        "gptq", dict(dynamic={r"-:.*down_proj": {}}), r"projections of layer 0.*down as it is",
    ),
}  # fmt: skip


def groups_of(folder):
    with open(f"{folder}/config.json") as file:
        return json.load(file)["quantization_config"]["config_groups"]


@pytest.mark.parametrize("what", CONFIGS)
def test_schemes_that_are_not_known_are_named(checkpoint, tmp_path, what):
    scheme, changes, message = CONFIGS[what]
    if what == "an unknown format":
        group = groups_of(checkpoint(scheme))["group_0"]
        changes = changes | {"config_groups": {"group_0": group | {"format": None}}}
    folder = changed(checkpoint(scheme), tmp_path / "changed", None, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        check(folder)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [("symmetric", False, "true"), ("strategy", "group", '"tensor_group"'), ("dynamic", True, "false")],
)  # fmt: skip
def test_an_fp4_of_another_kind_is_refused(checkpoint, tmp_path, field, value, allowed):
    groups = groups_of(checkpoint("nvfp4"))
    groups["group_0"]["weights"][field] = value
    folder = changed(checkpoint("nvfp4"), tmp_path / "changed", None, config_groups=groups)
    with pytest.raises(UnsupportedModel, match=f"weights.{field} is {value}, allowed: {allowed}"):
        check(folder)


def test_biases_that_a_gptq_model_has_not_may_be_zeros(checkpoint, tmp_path):
    """AutoGPTQ wrote them for all modules. Others have a meaning that nothing here computes."""

    def biased(value, module=NAME, size=64):
        def change(tensors):
            tensors[f"{module}.bias"] = torch.full((size,), value, dtype=torch.float16)

        return change

    check(changed(checkpoint("gptq"), tmp_path / "zeros", biased(0.0)))
    refused = {
        "ones": (biased(1.0), rf"{NAME}\.bias holds numbers but 0"),
        "long": (biased(0.0, size=65), rf"{NAME}\.bias has shape \[65\], expected \[64\]"),
        "head": (biased(0.0, "lm_head", 997), r"unexpected: lm_head\.bias"),
    }
    for what, (change, message) in refused.items():
        folder = changed(checkpoint("gptq"), tmp_path / what, change)
        with pytest.raises(CheckpointError, match=message):
            check(folder)
    folder = changed(checkpoint("awq"), tmp_path / "awq", biased(0.0))
    with pytest.raises(CheckpointError, match=rf"unexpected: {NAME}\.bias"):
        check(folder)


def test_packed_weights_have_no_scale_of_a_tensor(checkpoint, tmp_path):
    """Those of its rows would be read as such."""
    groups = groups_of(checkpoint("packed-channel"))
    groups["group_0"]["weights"]["strategy"] = "tensor"
    changes = dict(config_groups=groups)
    folder = changed(checkpoint("packed-channel"), tmp_path / "changed", None, **changes)
    with pytest.raises(UnsupportedModel, match=r"weights\.strategy is tensor, allowed: channel or"):
        check(folder)


def test_an_order_by_activations_has_to_be_in_the_file(checkpoint, tmp_path):
    """Without one, groups would be taken for neighbours."""

    def orderless(tensors):
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    check(changed(checkpoint("gptq"), tmp_path / "neighbours", orderless))
    check(changed(checkpoint("gptq"), tmp_path / "said", None, desc_act=True))
    folder = changed(checkpoint("gptq"), tmp_path / "unsaid", orderless, desc_act=True)
    with pytest.raises(CheckpointError, match=r"missing: .*\.g_idx"):
        check(folder)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_config_of_transformers_has_more_fields(checkpoint, tmp_path, method):
    """Its releases from 5 on write `format`, whatever the other field is."""
    import transformers

    kind = {"gptq": transformers.GPTQConfig, "awq": transformers.AwqConfig}[method]
    written = json.loads(kind(bits=4, group_size=32).to_json_string(use_diff=False))
    assert written["format"]
    check(changed(checkpoint(method), tmp_path / "model", None, **written))


@pytest.mark.parametrize("value", [0, {}, "lm_head"])
def test_names_of_modules_are_a_list(checkpoint, tmp_path, value):
    folder = changed(checkpoint("packed"), tmp_path / "changed", None, ignore=value)
    with pytest.raises(ModelError, match=r"ignore is .*, must be a list of names"):
        check(folder)


def test_two_schemes_in_one_config_are_refused(checkpoint, tmp_path):
    groups = groups_of(checkpoint("packed"))
    groups["group_1"] = groups["group_0"]
    folder = changed(checkpoint("packed"), tmp_path / "changed", None, config_groups=groups)
    with pytest.raises(UnsupportedModel, match=r"config_groups.*one group"):
        check(folder)


def test_scales_of_powers_of_two(checkpoint, tmp_path):
    """E8M0 for the scales of fp8 blocks, as DeepSeek V3.1 has them."""

    def change(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            exponents = tensors[name].log2().round()
            tensors[name] = exponents.exp2().to(torch.float8_e8m0fnu)

    folder = changed(checkpoint("deepseek"), tmp_path / "changed", change)
    check(folder)
    scale = open_checkpoint(folder, load_config(folder)).read(f"{NAME}:scale")
    stored = load_file(f"{folder}/model.safetensors")[f"{NAME}.weight_scale_inv"].float().numpy()
    assert scale.dtype == np.float32
    assert np.array_equal(scale[::40], stored)


# Weights whose scales are large

SCALES = {
    "packed": ("weight_scale", 1), "packed-zeros": ("weight_scale", 1),
    "int8-weights": ("weight_scale", 1), "nvfp4": ("weight_global_scale", -1),
    "gptq": ("scales", 1), "awq": ("scales", 1),
    "int8": ("weight_scale", 1), "fp8-channel": ("weight_scale", 1),
    "deepseek": ("weight_scale_inv", 1),
}  # fmt: skip
"""The tensor that has the scales of a module, and the power of it that multiplies entries."""
OF_TOKENS = ("int8", "fp8-channel", "deepseek")
"""Schemes that quantise tokens: no entry is ever of the run dtype."""


def entries_of(folder):
    """The entries of the module NAME."""
    model = load_config(folder)
    reader, narrow = open_checkpoint(folder, model), model.quantization.narrow
    pieces = ["values", "scale", *(["zero"] if narrow.zeros else [])]
    values, scale, *zero = (reader.read(f"{NAME}:{piece}") for piece in pieces)
    return widened_weight(namespace("numpy"), values, scale, zero[0] if zero else None, narrow.kind)


def scaled_to(checkpoint, target, scheme, largest):
    """A checkpoint in which the largest entry of NAME is about `largest`."""
    name, power = SCALES[scheme]
    factor = (largest / np.abs(entries_of(checkpoint(scheme))).max()) ** power

    def change(tensors):
        tensors[f"{NAME}.{name}"] *= float(factor)

    return changed(checkpoint(scheme), target, change)


def read_for(folder, dtype):
    """Read all of the first layer, to be run in a dtype."""
    model = load_config(folder)
    reader = open_checkpoint(folder, model, np.dtype(dtype))
    for parameter in decoder.parameters_of(model).layer(0).values():
        read_parameter(reader, parameter, 0)


@pytest.mark.parametrize("scheme", SCALES)
def test_an_entry_that_the_run_dtype_does_not_hold_is_named(checkpoint, tmp_path, scheme):
    folder = scaled_to(checkpoint, tmp_path / "large", scheme, 80_000)
    if scheme in OF_TOKENS:
        read_for(folder, "float16")
        return
    every = entries_of(folder)
    row, column = (int(at) for at in np.unravel_index(np.abs(every).argmax(), every.shape))
    with pytest.raises(ConfigError) as caught:
        read_for(folder, "float16")
    message = str(caught.value)
    assert message.startswith(f"dtype: got float16, in which an entry of {folder}")
    assert f"{NAME}.weight" in message or f"{NAME}.qweight" in message
    assert f"it is {every[row, column]:.6g} at [{row}, {column}]; " in message
    assert message.endswith("; allowed are bfloat16, float32")
    read_for(folder, "bfloat16")
    read_for(folder, "float32")


@pytest.mark.parametrize("scheme", [one for one in SCALES if one not in OF_TOKENS])
def test_large_scales_of_small_values_are_read(checkpoint, tmp_path, scheme):
    """Such as 60 000 of 4 bits: the largest value that there could be is not there."""
    read_for(scaled_to(checkpoint, tmp_path / "large", scheme, 60_000), "float16")


def test_an_entry_of_an_expert_that_the_run_dtype_does_not_hold_is_named(checkpoint, tmp_path):
    key = "model.layers.0.mlp.experts.gate_up_proj"

    def change(tensors):
        tensors[f"{key}_scales"][1, 2] += 24

    folder = changed(checkpoint("mxfp4"), tmp_path / "large", change)
    with pytest.raises(ConfigError, match=rf"dtype: got float16, .*{key}_blocks would be infinite"):
        read_for(folder, "float16")
    read_for(folder, "bfloat16")


def test_scales_of_mxfp4_that_kernels_do_not_take_are_named(checkpoint, tmp_path):
    key = "model.layers.0.mlp.experts.gate_up_proj_scales"

    def change(tensors):
        tensors[key][1, 2, 0] = 190

    folder = changed(checkpoint("mxfp4"), tmp_path / "large", change)
    with pytest.raises(
        CheckpointError, match=rf"{key} holds 190, or 2\^63; allowed are up to 2\^62"
    ):
        read_for(folder, "bfloat16")


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_engines_refuse_entries_that_they_could_not_compute_with(checkpoint, tmp_path, backend):
    folder = scaled_to(checkpoint, tmp_path / "large", "gptq", 80_000)
    with pytest.raises(ConfigError, match="dtype: got float16, in which an entry of"):
        LLM(folder, backend=backend, device="cpu", dtype="float16", max_model_len=64)
