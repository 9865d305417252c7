"""Quantised checkpoints as their own libraries write them, and what these say the weights are.

compressed-tensors writes its formats itself. GPTQ and AWQ have packers here, written from what their
kernels unpack, since their libraries need a GPU; what the first gives for AWQ is judged by the
reader of compressed-tensors too.
"""

import json
from contextlib import contextmanager

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .conftest import build

LEFT = ("lm_head", "embed_tokens", "norm")


def with_scales(weight, groups, levels, symmetric=True):
    """(scale, zero) [n groups] of a weight [n k], zeros as the integer that stands for 0."""
    parts = weight.reshape(len(weight), groups, -1)
    if symmetric:
        return parts.abs().amax(-1) / ((levels - 1) // 2), None
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = (high - low) / (levels - 1)
    return scale, torch.round(-low / scale).clamp(0, levels - 1).int()


def compressed(form, weights, tokens=None):
    """A format of compressed-tensors: (write(weight) -> (tensors, twin), config)."""
    # Imported here, as below, for whoever writes one: it takes five seconds.
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )

    activations = None if tokens is None else QuantizationArgs(**tokens)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=activations,
        format=form,
    )
    writer = BaseCompressor.get_value_from_registry(form)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed",
        ignore=["lm_head"],
    )  # fmt: skip

    def write(weight):
        n, k = weight.shape
        bits, strategy = weights["num_bits"], weights.get("strategy")
        groups = k // weights["group_size"] if strategy in ("group", "tensor_group") else 1
        state = {"weight": weight}
        if form == "nvfp4-pack-quantized":
            parts = weight.reshape(n, groups, -1).abs().amax(-1)
            state["weight_global_scale"] = (448.0 * 6.0 / weight.abs().max()).reshape(1)
            of = parts / 6.0 * state["weight_global_scale"]
            state["weight_scale"] = of.to(torch.float8_e4m3fn).to(torch.float32)
        elif strategy == "block":
            rows, columns = weights["block_structure"]
            blocks = torch.zeros(-(-n // rows) * rows, k)
            blocks[:n] = weight
            blocks = blocks.reshape(-1, rows, k // columns, columns).abs().amax((1, 3))
            state["weight_scale"] = blocks / 448.0
        else:
            levels = 2**bits if weights["type"] == "int" else 2 * 448 + 1
            scale, zero = with_scales(weight, groups, levels, weights.get("symmetric", True))
            if strategy == "tensor":
                scale = scale.amax().reshape(1)
            state["weight_scale"] = scale
            if zero is not None:
                state["weight_zero_point"] = (zero - 2 ** (bits - 1)).to(torch.int8)
        if tokens is not None and not tokens.get("dynamic", False):
            state["input_scale"] = torch.tensor([0.02])
        tensors = writer.compress(state, scheme)
        if form == "nvfp4-pack-quantized":
            return tensors, widened_nvfp4(tensors, scheme.weights)
        return tensors, writer.decompress(dict(tensors), scheme)["weight"].float()

    dumped = json.loads(config.model_dump_json())
    return write, dumped | {"quant_method": "compressed-tensors"}


def widened_nvfp4(tensors, arguments):
    """What the library's own functions say in float32. Its `decompress` calls them in bfloat16,
    which rounds the scale of the tensor by up to 2^-9.
    """
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed = tensors["weight_packed"]
    n, half = packed.shape
    return dequantize(
        unpack_fp4_from_uint8(packed, n, 2 * half, dtype=torch.float32),
        scale=tensors["weight_scale"].float(),
        args=arguments,
        global_scale=tensors["weight_global_scale"],
        dtype=torch.float32,
    )


def pack_words(values, order=range(8)):
    """Words [x y/8] int32 of values [x y] from 0 to 15; `order` is the place of each of eight."""
    eights = values.reshape(len(values), -1, 8).astype(np.uint32)
    words = sum(eights[:, :, j] << np.uint32(4 * place) for j, place in enumerate(order))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def four_bits(weight, group):
    """(q [n k], zero, scale [n groups], twin) of 4 bits with zeros, scales in float16."""
    n, k = weight.shape
    scale, zero = with_scales(weight, k // group, 16, symmetric=False)
    scale = scale.half().float()
    zero = zero.clamp(1, 15)
    parts = weight.reshape(n, -1, group)
    q = (torch.round(parts / scale[..., None]) + zero[..., None]).clamp(0, 15)
    twin = ((q - zero[..., None]) * scale[..., None]).reshape(n, k)
    return q.reshape(n, k).int().numpy(), zero.numpy(), scale.half(), twin


def gptq(group, form="gptq"):
    """GPTQ as auto-gptq and gptqmodel pack it."""

    def write(weight):
        q, zero, scale, twin = four_bits(weight, group)
        k = weight.shape[1]
        stored = zero - 1 if form == "gptq" else zero
        return {
            "qweight": pack_words(q).T.contiguous(),
            "qzeros": pack_words(stored.T),
            "scales": scale.T.contiguous(),
            "g_idx": torch.arange(k, dtype=torch.int32) // group,
        }, twin

    config = dict(
        quant_method="gptq", bits=4, group_size=group, desc_act=False, sym=False, lm_head=False,
        checkpoint_format=form, true_sequential=True, damp_percent=0.1,
    )  # fmt: skip
    return write, config


def awq(group):
    """AWQ in its gemm version."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]

    def write(weight):
        q, zero, scale, twin = four_bits(weight, group)
        return {
            "qweight": pack_words(np.ascontiguousarray(q.T), order),
            "qzeros": pack_words(np.ascontiguousarray(zero.T), order),
            "scales": scale.T.contiguous(),
        }, twin

    return write, dict(
        quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm"
    )


def fp8(rows, columns):
    """fp8 by blocks, as DeepSeek and transformers write it."""

    def write(weight):
        n, k = weight.shape
        blocks = torch.zeros(-(-n // rows) * rows, k)
        blocks[:n] = weight
        scale = blocks.reshape(-1, rows, k // columns, columns).abs().amax((1, 3)) / 448.0
        wide = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)
        values = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scale}, values.float() * wide

    return write, dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic",
        weight_block_size=[rows, columns], modules_to_not_convert=["lm_head"],
    )  # fmt: skip


def fp8_tensor(scheme):
    """fp8 with one scale for a tensor."""

    def write(weight):
        scale = weight.abs().max() / 448.0
        values = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": values, "weight_scale": scale.reshape(())}
        if scheme == "static":
            tensors["input_scale"] = torch.tensor(0.02)
        return tensors, values.float() * scale

    return write, dict(quant_method="fp8", activation_scheme=scheme, ignored_layers=["lm_head"])


def fp8_rows():
    """fp8 with a scale for each row, as its config does not say."""

    def write(weight):
        scale = weight.abs().amax(1, keepdim=True) / 448.0
        values = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scale}, values.float() * scale

    return write, dict(quant_method="fp8", activation_scheme="dynamic", ignored_layers=["lm_head"])


INT4 = dict(num_bits=4, type="int", strategy="group", group_size=32)
INT8 = dict(num_bits=8, type="int", strategy="channel")
FP8 = dict(num_bits=8, type="float", strategy="channel")
TOKEN = dict(strategy="token", dynamic=True)
SCHEMES = {
    "packed": lambda: compressed("pack-quantized", INT4 | dict(symmetric=True)),
    "packed-zeros": lambda: compressed("pack-quantized", INT4 | dict(symmetric=False)),
    "packed-channel": lambda: compressed(
        "pack-quantized", dict(num_bits=4, type="int", strategy="channel")
    ),
    "int8": lambda: compressed("int-quantized", INT8, dict(num_bits=8, type="int") | TOKEN),
    "int8-weights": lambda: compressed("int-quantized", INT8),
    "fp8-rows": fp8_rows,
    "fp8-channel": lambda: compressed("float-quantized", FP8, dict(num_bits=8, type="float") | TOKEN),
    "fp8-tensor-static": lambda: compressed(
        "float-quantized", FP8 | dict(strategy="tensor"),
        dict(num_bits=8, type="float", strategy="tensor"),
    ),
    "fp8-block": lambda: compressed(
        "float-quantized",
        FP8 | dict(strategy="block", block_structure=[24, 32]),
        dict(num_bits=8, type="float", strategy="group", group_size=32, dynamic=True),
    ),
    "nvfp4": lambda: compressed(
        "nvfp4-pack-quantized", dict(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    ),
    "gptq": lambda: gptq(32),
    "gptq-v2": lambda: gptq(64, "gptq_v2"),
    "awq": lambda: awq(32),
    "deepseek": lambda: fp8(40, 32),
    "fp8-dynamic": lambda: fp8_tensor("dynamic"),
    "fp8-static": lambda: fp8_tensor("static"),
}  # fmt: skip


def quantize(folder, model, scheme, **changes):
    """Write the checkpoint of a transformers model to `folder` in a scheme, and put into the model
    what its weights are then.
    """
    write, config = SCHEMES[scheme]()
    model.save_pretrained(folder)
    path = f"{folder}/model.safetensors"
    tensors = load_file(path)
    modules = dict(model.named_modules())
    for key in list(tensors):
        weight, module = tensors[key], key.removesuffix(".weight")
        if weight.ndim != 2 or any(name in key for name in LEFT) or module.endswith("mlp.gate"):
            continue
        del tensors[key]
        found, twin = write(weight.float())
        tensors |= {f"{module}.{name}": x.contiguous() for name, x in found.items()}
        with torch.no_grad():
            weight_in(modules, module).copy_(twin)
    save_file(tensors, path, {"format": "pt"})
    with open(f"{folder}/config.json") as file:
        raw = json.load(file)
    raw["quantization_config"] = config | changes
    with open(f"{folder}/config.json", "w") as file:
        json.dump(raw, file)
    return write


def weight_in(modules, module):
    """The weight of a module of the checkpoint in the transformers model, which holds those of all
    experts of a layer in one.
    """
    parent, marked, rest = module.partition(".experts.")
    if not marked:
        return modules[module].weight
    experts, (number, name) = modules[f"{parent}.experts"], rest.split(".")
    if name == "down_proj":
        return experts.down_proj[int(number)]
    half = experts.gate_up_proj[int(number)].chunk(2)
    return half[0] if name == "gate_proj" else half[1]


def make_mxfp4(folder, **overrides):
    """A small gpt-oss in mxfp4, and the transformers model with what transformers unpacks of it.

    No library writes this format on a CPU: the layout is that of `convert_moe_packed_tensors`.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = build("gpt-oss", folder, **overrides)
    path = f"{folder}/model.safetensors"
    tensors, state = load_file(path), dict(model.named_parameters())
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = mxfp4(tensors.pop(key).transpose(1, 2))
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        with torch.no_grad():
            state[key].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path, {"format": "pt"})
    with open(f"{folder}/config.json") as file:
        raw = json.load(file)
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    raw["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=left)
    with open(f"{folder}/config.json", "w") as file:
        json.dump(raw, file)
    return model


def mxfp4(weight):
    """(blocks [expert n k/32 16], scales [expert n k/32]) uint8 of a weight [expert n k]."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    parts = weight.reshape(*weight.shape[:2], -1, 32)
    exponent = (parts.abs().amax(-1) / 6.0).log2().ceil()
    scaled = parts / exponent.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - levels).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks.contiguous(), (exponent + 127).to(torch.uint8).contiguous()


def make(folder, scheme, name="qwen3", **overrides):
    """A small checkpoint in a scheme, and the transformers model with the same weights, whose
    tokens are not quantised.
    """
    model = build(name, f"{folder}-wide", intermediate_size=128, **overrides)
    quantize(folder, model, scheme)
    return model


@contextmanager
def tokens_quantised(model, scheme):
    """The transformers model with what goes into its projections quantised, as a scheme says."""
    _, config = SCHEMES[scheme]()
    if config["quant_method"] == "fp8":
        block = config.get("weight_block_size")
        arguments = ("float", block[1] if block else 0, config["activation_scheme"] == "dynamic")
    else:
        ((_, group),) = config["config_groups"].items()
        tokens = group["input_activations"]
        arguments = (tokens["type"], tokens["group_size"] or 0, tokens["dynamic"])

    def hook(_, inputs):
        return (fake_quantized(inputs[0], *arguments),)

    linears = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    hooks = [module.register_forward_pre_hook(hook) for module in linears]
    try:
        yield model
    finally:
        for each in hooks:
            each.remove()


def fake_quantized(x, sort, group, dynamic):
    """x rounded to 8 bits and back."""
    limit = 127.0 if sort == "int" else 448.0
    parts = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
    amax = parts.abs().amax(-1, keepdim=True)
    scale = torch.where(amax < 2**-100, 1.0, amax / limit) if dynamic else torch.tensor(0.02)
    scaled = (parts / scale).clamp(-limit, limit)
    rounded = scaled.round() if sort == "int" else scaled.to(torch.float8_e4m3fn).float()
    return (rounded * scale).reshape(x.shape)
