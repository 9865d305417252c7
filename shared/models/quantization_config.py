"""What a config.json says of quantised weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .fields import Fields, show
from .quantization import Quantization
from .spec import Narrow


def read_quantization(fields: Fields) -> Quantization | None:
    """How the weights of a checkpoint are quantised; None: not at all. Raises ModelError or
    UnsupportedModel.
    """
    raw = fields.get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        fields.fail("quantization_config", f"is {show(raw)}, must be an object")
    inner = Fields(raw, fields.where, fields.family, "quantization_config.")
    method = inner.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        inner.refuse("quant_method", method, f"one of {', '.join(METHODS)}")
    known, read = METHODS[method]
    for name, value in raw.items():
        if value is not None and name not in known:
            inner.refuse(show(name), value, "absent (this field is not known)")
    return read(inner)


def _read_fp8(fields: Fields) -> Quantization:
    """As DeepSeek and transformers write it: blocks, or one scale for a tensor."""
    fields.only("fmt", "e4m3")
    fields.only("dequantize", False)
    scheme = fields.get("activation_scheme")
    if scheme not in ("dynamic", "static"):
        fields.refuse("activation_scheme", scheme, '"dynamic" or "static"')
    names = [*_names(fields, "modules_to_not_convert"), *_names(fields, "ignored_layers")]
    left = tuple(_anywhere(name) for name in names)
    blocks = fields.get("weight_block_size")
    if blocks is None:
        narrow = Narrow("fp8", activations="fp8", static_activations=scheme == "static")
        return Quantization(narrow, "plain", left, block_rows=0, scale_of_rows=True)
    rows, group = _block_size(fields, "weight_block_size", blocks)
    if scheme == "static":
        fields.refuse("activation_scheme", scheme, '"dynamic" where weights have blocks')
    narrow = Narrow("fp8", group, activations="fp8", activation_group=group)
    return Quantization(narrow, "plain", left, "weight_scale_inv", rows)


def _block_size(fields: Fields, name: str, value: Any) -> tuple[int, int]:
    good = isinstance(value, list) and len(value) == 2
    if not good or not all(type(x) is int and 0 < x <= 4096 for x in value):
        fields.fail(name, f"is {show(value)}, must be two numbers of rows and columns")
    return value[0], value[1]


def _read_gptq(fields: Fields) -> Quantization:
    bits = fields.get("bits")
    if bits != 4:
        fields.refuse("bits", bits, "4")
    form = _form(fields, "checkpoint_format", "gptq", "gptq_v2")
    fields.only("lm_head", False)
    fields.only("pack_dtype", "int32")
    fields.only("is_marlin_format", False)
    left = []
    dynamic = fields.need("dynamic", {})
    if not isinstance(dynamic, dict):
        fields.fail("dynamic", f"is {show(dynamic)}, must be an object")
    for pattern, changes in dynamic.items():
        if not pattern.startswith("-:"):
            fields.refuse("dynamic", pattern, f"patterns that begin with -: (got {show(changes)})")
        left.append(_pattern(fields, "dynamic", pattern.removeprefix("-:")))
    narrow = Narrow("int4", _group_size(fields, "group_size"), zeros=True)
    return Quantization(
        narrow, "gptq", tuple(left), zero_offset=1 if form == "gptq" else 0,
        by_activations=fields.boolean("desc_act", False),
    )  # fmt: skip


def _read_awq(fields: Fields) -> Quantization:
    for name in ("bits", "w_bit"):
        fields.only(name, 4)
    fields.only("zero_point", True)
    # llm-awq packs otherwise, whatever `version` says.
    fields.only("backend", "autoawq", "auto")
    fields.only("desc_act", False)
    _form(fields, "version", "gemm")
    name = "group_size" if fields.get("group_size") is not None else "q_group_size"
    narrow = Narrow("int4", _group_size(fields, name), zeros=True)
    left = tuple(f".*{re.escape(n)}.*" for n in _names(fields, "modules_to_not_convert"))
    return Quantization(narrow, "awq", left)


def _form(fields: Fields, name: str, *allowed: str) -> str:
    """How numbers lie, the first of `allowed` where nothing says it. Since transformers 5 the field
    is `format`, beside `name`, the method's own.
    """
    for each in (name, "format"):
        value = fields.need(each, allowed[0])
        low = value.lower() if isinstance(value, str) else value
        if low not in allowed:
            fields.refuse(each, value, " or ".join(map(json.dumps, allowed)))
        allowed = (low,)
    return allowed[0]


def _group_size(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if value == -1:
        return 0
    if type(value) is not int or value not in (16, 32, 64, 128, 256, 512, 1024):
        fields.refuse(name, value, "-1, or a power of two from 16 to 1024")
    return value


def _read_compressed(fields: Fields) -> Quantization:
    """As `compressed_tensors` writes it: one group of projections, all quantised alike."""
    fields.only("quantization_status", "compressed", "frozen")
    for name in ("sparsity_config", "transform_config"):
        if fields.get(name) not in (None, {}):
            fields.refuse(name, fields.get(name), "absent or empty")
    group = _only_group(fields)
    form = fields.get("format") if group.get("format") is None else group.get("format")
    weights = _arguments(group, "weights")
    tokens = None
    if group.get("input_activations") is not None:
        tokens = _arguments(group, "input_activations")
    left = tuple(
        _pattern(fields, "ignore", name.removeprefix("re:"))
        if name.startswith("re:")
        else re.escape(name)
        for name in _names(fields, "ignore")
    )
    if form == "nvfp4-pack-quantized":
        return _read_nvfp4(weights, tokens, left)
    if form not in ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"):
        fields.refuse(
            "format", form,
            "float-quantized, int-quantized, naive-quantized, pack-quantized or "
            "nvfp4-pack-quantized",
        )  # fmt: skip
    rows, size = _scale_block(weights)
    weights.only("dynamic", False)
    weights.only("actorder", "weight", "static")
    bits, sort = weights.get("num_bits"), weights.get("type")
    if form == "pack-quantized":
        if bits != 4 or sort != "int" or tokens is not None:
            weights.refuse(
                "num_bits", bits, "4, of int, and plain activations, where they are packed"
            )
        if not rows:
            weights.refuse("strategy", "tensor", "channel or group, where they are packed")
        narrow = Narrow("int4", size, zeros=not weights.boolean("symmetric", True))
        return Quantization(narrow, "packed", left)
    if bits != 8 or sort not in ("int", "float") or not weights.boolean("symmetric", True):
        weights.refuse("num_bits", bits, "8, symmetric, of int or float")
    narrow = Narrow("int8" if sort == "int" else "fp8", size)
    if tokens is not None:
        narrow = _with_activations(narrow, weights, tokens)
    return Quantization(narrow, "plain", left, block_rows=rows)


def _only_group(fields: Fields) -> Fields:
    """The one group of projections that `config_groups` has."""
    groups = fields.need("config_groups", None)
    if not isinstance(groups, dict) or len(groups) != 1:
        fields.refuse(
            "config_groups", groups, "one group: projections that are all quantised alike"
        )
    ((name, group),) = groups.items()
    if not isinstance(group, dict):
        fields.fail("config_groups", f"is {show(groups)}, must map names to objects")
    path = f"quantization_config.config_groups.{name}."
    inner = Fields(group, fields.where, fields.family, path)
    for field in group:
        if field not in ("targets", "weights", "input_activations", "output_activations", "format"):
            inner.refuse(show(field), group[field], "absent (this field is not known)")
    inner.only("targets", ["Linear"])
    inner.only("output_activations")
    return inner


def _scale_block(weights: Fields) -> tuple[int, int]:
    """Rows and columns of a weight that share a scale; 0 stands for all."""
    strategy = weights.get("strategy")
    if strategy == "group":
        return 1, _group_size(weights, "group_size")
    if strategy == "block":
        return _block_size(weights, "block_structure", weights.get("block_structure"))
    if strategy not in ("tensor", "channel"):
        weights.refuse("strategy", strategy, "tensor, channel, group or block")
    return (0 if strategy == "tensor" else 1), 0


def _arguments(fields: Fields, name: str) -> Fields:
    """The arguments of one quantiser, none of which is unknown."""
    raw = fields.need(name, None)
    if not isinstance(raw, dict):
        fields.fail(name, f"is {show(raw)}, must be an object")
    inner = Fields(raw, fields.where, fields.family, fields.path(f"{name}."))
    for field, value in raw.items():
        if value is not None and field not in ARGUMENTS:
            inner.refuse(show(field), value, "absent (this field is not known)")
    return inner


def _with_activations(narrow: Narrow, weights: Fields, tokens: Fields) -> Narrow:
    """The same with tokens quantised as the file says."""
    if (tokens.get("num_bits"), tokens.get("type")) != (8, weights.get("type")):
        tokens.refuse("num_bits", tokens.get("num_bits"), "those of the weights, and their type")
    if not tokens.boolean("symmetric", True):
        tokens.refuse("symmetric", False, "true")
    dynamic, strategy = tokens.boolean("dynamic", False), tokens.get("strategy")
    size = _group_size(tokens, "group_size") if strategy == "group" else 0
    allowed = [(True, "token"), (False, "tensor")]
    # int32 sums of the whole row: blocks of it have scales of their own in fp8 only.
    if narrow.kind == "fp8" and size == narrow.group:
        allowed.append((True, "group"))
    if (dynamic, strategy) not in allowed or (narrow.kind == "int8" and narrow.group):
        tokens.refuse(
            "strategy", strategy,
            "token (dynamic), tensor (static), or in fp8 groups (dynamic) of the weight's size",
        )  # fmt: skip
    return replace(
        narrow,
        activations="int8" if narrow.kind == "int8" else "fp8",
        activation_group=size,
        static_activations=not dynamic,
    )


def _read_nvfp4(weights: Fields, tokens: Fields | None, left: tuple[str, ...]) -> Quantization:
    if tokens is not None:
        tokens.refuse("num_bits", tokens.get("num_bits"), "plain activations beside fp4 weights")
    weights.only("dynamic", False)
    weights.only("symmetric", True)
    weights.only("strategy", "tensor_group")
    shape = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if shape != (4, "float", 16):
        weights.refuse("num_bits", shape, "4 bits of float by groups of 16")
    return Quantization(Narrow("fp4", 16), "nvfp4", left)


def _read_mxfp4(fields: Fields) -> Quantization:
    """gpt-oss: of experts alone, whatever else is named as left."""
    fields.only("dequantize", False)
    _names(fields, "modules_to_not_convert")
    return Quantization(Narrow("fp4", 32), "mxfp4", (r"(?!.*\.experts\.).*",))


def _names(fields: Fields, name: str) -> list[str]:
    value = fields.need(name, [])
    if not isinstance(value, list) or not all(isinstance(x, str) and x for x in value):
        fields.fail(name, f"is {show(value)}, must be a list of names")
    return value


def _anywhere(name: str) -> str:
    """A module of this name, wherever it lies, and all in it."""
    return rf"(.*\.)?{re.escape(name)}(\..*)?"


def _pattern(fields: Fields, name: str, text: str) -> str:
    """A regular expression of the file that has to match from the beginning on."""
    try:
        re.compile(text)
    except re.error as why:
        fields.fail(name, f"holds {show(text)}, which is no regular expression: {why}")
    return f"(?:{text}).*"


ARGUMENTS = frozenset(
    """num_bits type strategy group_size symmetric dynamic observer observer_kwargs actorder
    block_structure scale_dtype zp_dtype""".split()
)
INTEGERS_OF_FOUR_BITS = frozenset(
    """quant_method bits group_size desc_act sym format backend true_sequential damp_percent
    act_group_aware meta dataset tokenizer model_seqlen block_name_to_quantize
    module_name_preceding_first_block batch_size pad_token_id max_input_length
    cache_block_outputs""".split()
)
"""What transformers writes of GPTQ and AWQ alike."""
METHODS: dict[str, tuple[frozenset[str], Callable[[Fields], Quantization]]] = {
    "fp8": (
        frozenset(
            """quant_method fmt activation_scheme weight_block_size modules_to_not_convert
            ignored_layers dequantize""".split()
        ),
        _read_fp8,
    ),
    "compressed-tensors": (
        frozenset(
            """quant_method format config_groups ignore quantization_status kv_cache_scheme
            global_compression_ratio sparsity_config transform_config version""".split()
        ),
        _read_compressed,
    ),
    "gptq": (
        frozenset(
            """checkpoint_format dynamic lm_head pack_dtype static_groups damp_auto_increment
            model_name_or_path model_file_base_name use_cuda_fp16 exllama_config use_exllama
            is_marlin_format quantizer""".split()
        )
        | INTEGERS_OF_FOUR_BITS,
        _read_gptq,
    ),
    "mxfp4": (frozenset("quant_method modules_to_not_convert dequantize".split()), _read_mxfp4),
    "awq": (
        frozenset(
            """w_bit q_group_size zero_point version modules_to_not_convert do_fuse modules_to_fuse
            fuse_max_seq_len exllama_config""".split()
        )
        | INTEGERS_OF_FOUR_BITS,
        _read_awq,
    ),
}  # fmt: skip
"""Fields that are read or do not touch the numbers, and who reads them, by method."""
