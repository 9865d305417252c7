"""A model's config.json as the numbers that the maths needs. What could change the maths and is not known is refused.

Sources: `configuration_*.py` and `modeling_rope_utils.py` of transformers 5, which also read what version 4 wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from ..errors import ModelError, ModelNotFound, UnsupportedModel

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
MAX_HEAD_DIM = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. Fields after `kind` mean something for some kinds only; None leaves it to the formula.

    `partial_rotary_factor` is the part of a head that is rotated. Every model that is parsed here rotates all of it.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder. `layer_windows[i]` w > 0 lets position p of layer i see positions above p - w; 0 is all of them.

    `eos_token_ids` joins config.json and generation_config.json. `raw_hash` is the SHA-256 of config.json's content.
    `kv_scales` are what K and V are divided by in a narrow cache: the engine's choice, not config.json's.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layer_windows: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig = RopeConfig()
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    raw_hash: str = ""
    kv_scales: tuple[float, float] = (1.0, 1.0)


MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

READ = frozenset(
    """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias mlp_bias
    sliding_window use_sliding_window max_window_layers layer_types rope_theta rope_scaling rope_parameters
    original_max_position_embeddings dtype torch_dtype eos_token_id bos_token_id""".split()
)

# Training, bookkeeping, outputs that nobody asks for here, and defaults of sampling (which a request states itself).
HARMLESS = frozenset(
    """_name_or_path name_or_path _commit_hash transformers_version transformers.js_config auto_map tokenizer_class
    unsloth_version unsloth_fixed is_llama_config keys_to_ignore_at_inference finetuning_task task_specific_params
    prefix problem_type num_labels id2label label2id initializer_range attention_dropout use_cache pad_token_id
    sep_token_id decoder_start_token_id max_sequence_length model_max_length gradient_checkpointing
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate torchscript
    use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder _attn_implementation attn_implementation
    _attn_implementation_autoset _flash_attn_2_enabled _experts_implementation experts_implementation
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    max_new_tokens no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values
    repetition_penalty suppress_tokens temperature top_k top_p typical_p""".split()
)

# Fields with one value (or absent, or null) that leaves the maths as it is written here.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "quantization_config": (),
}

ROPE_FIELDS: dict[RopeKind, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset("factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate".split()),
}
ROPE_COMMON = frozenset("rope_type type rope_theta partial_rotary_factor original_max_position_embeddings".split())
LAYER_TYPES = ("full_attention", "sliding_attention")


def load_config(folder: str | Path) -> ModelConfig:
    """The config of the model in `folder`. Raises ModelNotFound, ModelError or UnsupportedModel."""
    path = need_folder(folder)
    raw = read_json(path / "config.json")
    generation = path / "generation_config.json"
    return parse_config(raw, read_json(generation) if os.path.exists(generation) else {}, str(path / "config.json"))


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """The config that a config.json (`raw`) and a generation_config.json describe; `where` names them in errors."""
    fields = Fields(raw, where)
    architecture, model_type = _architecture(fields)
    _refuse_unknown(fields)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    # Llama is the one family whose default is as many heads for keys as for queries; for others transformers has a
    # number that fits one model, so an absent field is an error.
    absent = heads if model_type == "llama" or "num_key_value_heads" in raw else None
    kv_heads = fields.size("num_key_value_heads", absent)
    if heads % kv_heads:
        fields.fail("num_attention_heads", f"is {heads}, which is not a multiple of num_key_value_heads ({kv_heads})")
    vocab, layers = fields.size("vocab_size"), fields.size("num_hidden_layers", high=MAX_LAYERS)
    max_position = fields.size("max_position_embeddings")
    qkv_bias, o_bias, mlp_bias = _biases(fields, model_type)
    eos = _token_ids(fields, "eos_token_id", vocab)
    beside = str(Path(where).with_name("generation_config.json"))
    eos += _token_ids(Fields(generation or {}, beside), "eos_token_id", vocab)
    bos = _token_ids(fields, "bos_token_id", vocab)
    return ModelConfig(
        architecture=architecture,
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, model_type, hidden, heads),
        max_position_embeddings=max_position,
        layer_windows=_layer_windows(fields, model_type, layers),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0, above=True),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=model_type == "qwen3",
        rope=_rope(fields, max_position),
        dtype=_dtype(fields),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        raw_hash=hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest(),
    )


def rope_inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angles per position [rotated / 2] float64, and the factor of cos and sin.

    linear: Chen et al., arXiv 2306.15595. llama3: Meta's Llama 3.1 reference code. yarn: Peng et al., arXiv 2309.00071.
    """
    dim = int(head_dim * rope.partial_rotary_factor)
    inverse = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        # Turns within the original context, from "so few that it is interpolated" (0) to "many, left alone" (1).
        turns = rope.original_max_position * inverse / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return (1 - keep) * inverse / rope.factor + keep * inverse, 1.0
    if rope.kind == "yarn":
        low, high = (_yarn_dimension(rope, dim, beta) for beta in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (np.arange(dim // 2, dtype=np.float64) - low) / (high - low if high != low else 0.001)
        keep = 1 - np.clip(ramp, 0.0, 1.0)
        return (1 - keep) * inverse / rope.factor + keep * inverse, _yarn_attention_factor(rope)
    return inverse, 1.0


def _yarn_dimension(rope: RopeConfig, dim: int, turns: float) -> float:
    """The (fractional) pair of entries that makes `turns` turns within the original context."""
    return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class Fields:
    """Typed access to a JSON object. Null counts as absent. Errors name the file, the field, the value and the rule."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def get(self, name: str) -> Any:
        """The value, None if absent."""
        return self.raw.get(name)

    def need(self, name: str, default: Any) -> Any:
        """The value, or `default`. Raises ModelError if both are None."""
        value = self.raw.get(name)
        if value is None and default is None:
            self.fail(name, "is missing")
        return default if value is None else value

    def fail(self, name: str, message: str) -> NoReturn:
        """Raise ModelError about a field."""
        raise ModelError(f"{self.where}: {name} {message}")

    def refuse(self, name: str, value: Any, allowed: str) -> NoReturn:
        """Raise UnsupportedModel about a field."""
        raise UnsupportedModel(f"{self.where}: {name} is {show(value)}, allowed: {allowed}")

    def size(self, name: str, default: int | None = None, high: int = MAX_SIZE) -> int:
        """A positive integer. Without a default it must be there."""
        value = self.need(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            self.fail(name, f"is {quoted(value)}, must be an integer from 1 to {high}")
        return int(value)

    def number(self, name: str, default: float | None = None, low: float = 0.0, above: bool = False) -> float:
        """A finite number of at least `low`, or more than that. Without a default it must be there."""
        value = self.need(name, default)
        if not is_number(value) or value < low or (above and value == low):
            self.fail(name, f"is {quoted(value)}, must be a number of {'more than' if above else 'at least'} {low:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.fail(name, f"is {quoted(value)}, must be true or false")
        return default if value is None else bool(value)


def need_folder(folder: str | Path) -> Path:
    """The path of a folder. Raises ModelNotFound if it is none."""
    if not os.path.isdir(folder):
        raise ModelNotFound(f"{show(str(folder), 300)}: no such folder")
    return Path(folder)


def read_json(path: Path, error: type[ModelError] = ModelError) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelNotFound if there is no file, `error` if it is not an object."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file") from None
    except OSError as why:
        raise error(f"{path}: cannot be read: {why.strerror or why}") from None
    except (ValueError, RecursionError) as why:
        raise error(f"{path}: is not valid JSON: {show(str(why), 160)}") from None
    if not isinstance(raw, dict):
        raise error(f"{path}: is not a JSON object but {show(raw)}")
    return raw


def show(value: Any, limit: int = 80) -> str:
    """A value for an error message: one line, cut at `limit` characters. Text keeps no quotes if it needs none."""
    try:
        text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in a list in a list
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(value: Any) -> str:
    """As `show`, but text is in quotes: where a number is expected, "64" must not look like one."""
    return show(json.dumps(value) if isinstance(value, str) else value)


def is_number(value: Any) -> bool:
    """Whether `value` is a finite float or an integer that has one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _architecture(fields: Fields) -> tuple[str, str]:
    named, model_type = fields.get("architectures"), fields.get("model_type")
    known = ", ".join(MODEL_TYPES)
    if named is None or named == []:
        by_type = {v: k for k, v in MODEL_TYPES.items()}
        if not isinstance(model_type, str) or model_type not in by_type:
            fields.refuse("architectures", named, f"one of {known}")
        return by_type[model_type], model_type
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        fields.fail("architectures", f"is {show(named)}, must be a list of names")
    if len(named) != 1 or named[0] not in MODEL_TYPES:
        fields.refuse("architectures", named[0] if len(named) == 1 else named, f"one of {known}")
    expected = MODEL_TYPES[named[0]]
    if model_type not in (None, expected):
        fields.refuse("model_type", model_type, f"{expected} for {named[0]}")
    return named[0], expected


def _refuse_unknown(fields: Fields) -> None:
    for name, value in fields.raw.items():
        if value is None or name in READ or name in HARMLESS:
            continue
        if name not in FIXED:
            fields.refuse(show(name), value, "absent (this field is not known, so it might change the result)")
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in FIXED[name]):
            fields.refuse(name, value, " or ".join([*(json.dumps(one) for one in FIXED[name]), "absent"]))


def _biases(fields: Fields, model_type: str) -> tuple[bool, bool, bool]:
    """(q, k and v; o; mlp). transformers reads `attention_bias` for Llama and Qwen3 and `mlp_bias` for Llama alone."""
    attention = fields.boolean("attention_bias", model_type == "qwen2")
    mlp = fields.boolean("mlp_bias", False)
    if model_type in ("mistral", "qwen2") and attention != (model_type == "qwen2"):
        fields.refuse("attention_bias", attention, f"{json.dumps(not attention)} or absent for {model_type}")
    if mlp and model_type != "llama":
        fields.refuse("mlp_bias", mlp, f"false or absent for {model_type}")
    return attention, attention and model_type != "qwen2", mlp


def _head_dim(fields: Fields, model_type: str, hidden: int, heads: int) -> int:
    if fields.get("head_dim") is None and "head_dim" not in fields.raw and model_type == "qwen3":
        return 128  # Qwen3Config's default, which does not follow hidden_size
    if fields.get("head_dim") is None and hidden % heads:
        fields.fail("hidden_size", f"is {hidden}, which is not a multiple of num_attention_heads ({heads})")
    head_dim = fields.size("head_dim", hidden // heads, high=MAX_HEAD_DIM)
    if head_dim % 2:
        fields.fail("head_dim", f"is {head_dim}, must be even: rotary embedding turns pairs")
    return head_dim


def _layer_windows(fields: Fields, model_type: str, layers: int) -> tuple[int, ...]:
    """As transformers 5: Qwen slides from layer `max_window_layers` on or where `layer_types` says, Mistral always."""
    qwen = model_type in ("qwen2", "qwen3")
    default = 4096 if qwen or model_type == "mistral" else 0
    if fields.get("sliding_window") is not None:
        window = fields.size("sliding_window")
    else:
        window = 0 if "sliding_window" in fields.raw else default
    use = fields.boolean("use_sliding_window", window > 0 and not qwen)
    if qwen and not use:
        window = 0
    elif not qwen and use != (window > 0):
        fields.refuse("use_sliding_window", use, f"what sliding_window ({window or None}) says, for {model_type}")
    if model_type == "llama" and window:
        fields.refuse("sliding_window", window, "null or absent for llama")
    first = fields.get("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        fields.fail("max_window_layers", f"is {quoted(first)}, must be an integer of at least 0")
    usual = tuple(window if not qwen or layer >= first else 0 for layer in range(layers))
    types = fields.get("layer_types")
    if types is None:
        return usual
    if not isinstance(types, list) or len(types) != layers:
        fields.fail("layer_types", f"is {show(types)}, must be a list of num_hidden_layers ({layers}) names")
    for name in types:
        if name not in LAYER_TYPES:
            fields.refuse("layer_types", name, " and ".join(LAYER_TYPES))
    if not window and "sliding_attention" in types:
        fields.refuse("layer_types", "sliding_attention", "full_attention, since no sliding window is set")
    windows = tuple(window if name == "sliding_attention" else 0 for name in types)
    if not qwen and windows != usual:  # the modeling code of these families does not read the field
        fields.refuse("layer_types", types, f"the same window in every layer, for {model_type}")
    return windows


def _rope(fields: Fields, max_position: int) -> RopeConfig:
    """From `rope_theta` and `rope_scaling` (version 4) or `rope_parameters` (version 5), or from both if they agree."""
    found: list[tuple[str, RopeConfig]] = []
    for name in ("rope_parameters", "rope_scaling"):
        block = fields.get(name)
        block = {} if block is None else block
        if not isinstance(block, dict):
            fields.fail(name, f"is {show(block)}, must be an object")
        nested = {f"{name}.{key}": value for key, value in block.items() if key in LAYER_TYPES}
        if nested and len(nested) != len(block):
            fields.refuse(name, sorted(block), "either one object per layer type or plain fields")
        for label, part in (nested or {name: block}).items():
            if nested and not isinstance(part, dict):
                fields.refuse(label, part, "an object")
            if part:
                found.append((label, _rope_block(fields, Fields(part, f"{fields.where}: {label}"), max_position)))
    if not found:
        return RopeConfig(theta=fields.number("rope_theta", 10_000.0, low=1.0, above=True))
    for label, rope in found[1:]:
        if rope != found[0][1]:
            fields.refuse(label, fields.get(label.partition(".")[0]), f"the same as {found[0][0]}")
    return found[0][1]


def _rope_block(top: Fields, block: Fields, max_position: int) -> RopeConfig:
    named = [block.get(name) for name in ("rope_type", "type") if block.get(name) is not None]
    kind: RopeKind = named[0] if named else "default"
    if kind not in ROPE_KINDS or named[1:] not in ([], [kind]):
        block.refuse("rope_type", kind if len(named) < 2 else named, f"one of {', '.join(ROPE_KINDS)}")
    for name, value in block.raw.items():
        if value is not None and name not in ROPE_COMMON | ROPE_FIELDS[kind]:
            block.refuse(show(name), value, f"absent for rope_type {kind}")
    if block.number("partial_rotary_factor", 1.0) != 1.0:
        block.refuse("partial_rotary_factor", block.get("partial_rotary_factor"), "1.0 or absent")
    thetas = {f.number("rope_theta", low=1.0, above=True) for f in (block, top) if f.get("rope_theta") is not None}
    if len(thetas) > 1:  # version 5 would take this one, version 4 the one outside
        block.refuse("rope_theta", block.get("rope_theta"), f"the value of rope_theta outside, {top.get('rope_theta')}")
    theta = thetas.pop() if thetas else 10_000.0
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=block.number("factor", low=1.0))
    name = "original_max_position_embeddings"
    original = block.size(name, top.size(name, max_position))
    if top.get(name) not in (None, original):
        block.refuse(name, original, f"the value of {name} outside, {top.get(name)}")
    if kind == "llama3":
        low = block.number("low_freq_factor", above=True)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=block.number("factor", low=1.0),
            low_freq_factor=low,
            high_freq_factor=block.number("high_freq_factor", low=low, above=True),
            original_max_position=original,
        )
    slow = block.number("beta_slow", 1.0, above=True)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=block.number("factor", max_position / original, low=1.0),
        original_max_position=original,
        beta_fast=block.number("beta_fast", max(32.0, slow), low=slow),
        beta_slow=slow,
        attention_factor=_optional(block, "attention_factor"),
        mscale=_optional(block, "mscale"),
        mscale_all_dim=_optional(block, "mscale_all_dim"),
        truncate=block.boolean("truncate", True),
    )


def _optional(fields: Fields, name: str) -> float | None:
    return None if fields.get(name) is None else fields.number(name, above=name == "attention_factor")


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return "float32"
    if not isinstance(value, str) or value.removeprefix("torch.") not in DTYPES:
        fields.refuse(name, value, " or ".join(DTYPES))
    return str(value).removeprefix("torch.")


def _token_ids(fields: Fields, name: str, vocab_size: int) -> list[int]:
    value = fields.get(name)
    ids: Sequence[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            fields.fail(name, f"is {quoted(value)}, must be below vocab_size ({vocab_size}): an id, or a list of ids")
    return list(ids)
