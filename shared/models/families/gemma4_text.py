"""Gemma 4: layers without a window have heads of another size, whose keys may be their values; V is
normed; the stream is multiplied by a weight behind each layer.

Small ones: the last layers read the cache of layers before them, and each layer has a small
embedding of its own. 26B: each layer has experts beside its MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import Heads, ModelConfig
from ..fields import Fields, show
from ..rope import PER_LAYER as LAYER_TYPES
from ..rope import RopeConfig, RopeRules, read_ropes
from ..spec import (
    Attention,
    Layer,
    LayerInput,
    Mlp,
    MlpAndExperts,
    Model,
    Norm,
    Sublayer,
)
from ..table import Parameter, ParameterTable, Part
from . import dense, gemma2
from .dense import LAYER
from .family import Family

STACKS = {"experts_gate_up": "experts.gate_up_proj", "experts_down": "experts.down_proj"}
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
"""Published files leave out what is as in transformers' `Gemma4TextConfig`."""
FULL = RopeRules(kinds=("proportional", "default"), theta=1e6, partial=True)
LOCAL = RopeRules(kinds=("default",), theta=1e4)
NORMS = replace(gemma2.NORMS, offset=0.0)
FULL_HEAD_DIM = 512
ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OVERRIDES = ("head_dim", "num_key_value_heads")
MIXTURE = ("num_experts", "top_k_experts", "moe_intermediate_size")
NAMES = replace(dense.SEPARATE, router="router.proj")
EXPERT_NORMS = {
    "expert_norm": "pre_feedforward_layernorm_2",
    "expert_out_norm": "post_feedforward_layernorm_2",
    "mlp_own_norm": "post_feedforward_layernorm_1",
}
"""The norms of layers with experts, beside those of all layers, by the name of their parameter."""


def reader(layer_input_size: int, window: int, defaults: Mapping[str, Any]) -> Any:
    """How config.json is read, with the family's defaults of `hidden_size_per_layer_input`, of
    `sliding_window` and of others.
    """

    def read(fields: Fields) -> ModelConfig:
        fields = fields.defaulted(defaults)
        fields.only("use_bidirectional_attention", "vision")
        types = _layer_types(fields)
        windows = dense.windows_in_pattern(fields.replaced({"layer_types": types}), window, 6)
        full, keys_are_values = _full_heads(fields, windows)
        reading = _reading_layers(fields, windows)
        wide = fields.boolean("use_double_wide_mlp", False) and reading > 0
        given = gemma2.numbers(fields, 0.0, 0.0)
        return dense.read(
            fields.replaced({"layer_types": types}),
            windows=windows,
            ropes=lambda fields, head_dim: _ropes(fields, head_dim, full),
            qk_norm=True,
            v_norm=True,
            full_heads=full,
            full_keys_are_values=keys_are_values,
            num_reading_layers=reading,
            reading_intermediate_size=2 * fields.size("intermediate_size") if wide else 0,
            layer_input_size=_layer_input_size(fields, layer_input_size),
            layer_factor=True,
            **given | {"attention_scale": 1.0} | _mixture(fields),
        )

    return read


def _mixture(fields: Fields) -> dict[str, Any]:
    """The experts of all layers, if there are any."""
    if not fields.boolean("enable_moe_block", False):
        for name in MIXTURE:
            if fields.get(name) is not None:
                fields.refuse(name, fields.get(name), "absent unless enable_moe_block is true")
        return {}
    count = fields.size("num_experts")
    return {
        "num_experts": count,
        "experts_per_token": fields.size("top_k_experts", high=count),
        "expert_size": fields.size("moe_intermediate_size"),
        "renormalizes_experts": True,
        "expert_factors": True,
        "experts_beside_mlp": True,
    }


def _layer_types(fields: Fields) -> Any:
    """As stated, but the last layer always sees everything."""
    types = fields.get("layer_types")
    layers = fields.size("num_hidden_layers", high=dense.MAX_LAYERS)
    if types is None:
        kinds = LAYER_TYPES
        types = [kinds[0] if (layer + 1) % 6 == 0 else kinds[1] for layer in range(layers)]
    if not isinstance(types, list) or not types:
        return types
    return [*types[:-1], LAYER_TYPES[0] if types[-1] in LAYER_TYPES else types[-1]]


def _full_heads(fields: Fields, windows: list[int]) -> tuple[Heads, bool]:
    """The heads of layers that see everything, and whether their keys are their values.

    `per_layer_config` says it by layer; first files have `global_head_dim` and
    `num_global_key_value_heads`.
    """
    heads, kv = fields.size("num_attention_heads"), fields.size("num_key_value_heads")
    alike = fields.boolean("attention_k_eq_v", False)
    by_layer = fields.get("per_layer_config")
    if by_layer is not None:
        own = _by_layer(fields, by_layer, windows)
        block = Fields({"head_dim": fields.size("head_dim", gemma2.HEAD_DIM)} | own, fields.where)
        head_dim, kv_heads = "head_dim", "num_key_value_heads"
    else:
        block = fields if alike else fields.replaced({"num_global_key_value_heads": None})
        head_dim, kv_heads = "global_head_dim", "num_global_key_value_heads"
    size = block.size(head_dim, FULL_HEAD_DIM, dense.MAX_HEAD_DIM)
    if size % 2:
        block.fail(head_dim, f"is {size}, must be even: rotary embedding turns pairs")
    groups = block.size(kv_heads, kv)
    if heads % groups:
        block.fail(
            kv_heads,
            f"is {groups} in layers that see everything, of which num_attention_heads ({heads}) "
            "is no multiple",
        )
    return Heads(heads, groups, size), alike


def _by_layer(fields: Fields, blocks: Any, windows: list[int]) -> dict[str, Any]:
    """What all layers that see everything have of their own: nothing, if `blocks` is empty."""
    if blocks == {}:
        return {}
    full = [str(layer) for layer, window in enumerate(windows) if not window]
    allowed = (
        f"an object of {' and '.join(OVERRIDES)}, the same for each of the layers {full}, or an "
        "empty one"
    )
    if not isinstance(blocks, dict) or sorted(blocks, key=str) != sorted(full):
        fields.refuse("per_layer_config", show(blocks), allowed)
    own: Any = blocks[full[0]]
    for block in blocks.values():
        if not isinstance(block, dict) or block != own or set(block) - set(OVERRIDES):
            fields.refuse("per_layer_config", block, allowed)
    return dict(own)


def _reading_layers(fields: Fields, windows: list[int]) -> int:
    """How many of the last layers read another one's cache."""
    reading = fields.size("num_kv_shared_layers", 0, high=len(windows) - 1, low=0)
    own = windows[: len(windows) - reading]
    if not set(windows) <= set(own):
        fields.fail(
            "num_kv_shared_layers",
            f"is {reading}, must leave layers of each type before those that read their cache",
        )
    return reading


def _layer_input_size(fields: Fields, default: int) -> int:
    if "hidden_size_per_layer_input" not in fields.raw and not default:
        return 0
    size = fields.size("hidden_size_per_layer_input", default or None, low=0)
    words, vocab = fields.get("vocab_size_per_layer_input"), fields.size("vocab_size")
    if size and words is not None:
        fields.only("vocab_size_per_layer_input", vocab)
    return size


def _ropes(fields: Fields, head_dim: int, full: Heads) -> tuple[RopeConfig, RopeConfig]:
    fields = fields.defaulted({"rope_parameters": ROPES})
    for name in ("rope_theta", "rope_scaling"):
        fields.only(name)
    blocks = fields.get("rope_parameters")
    if not isinstance(blocks, dict) or set(blocks) != set(ROPES):
        fields.refuse(
            "rope_parameters", show(blocks), f"an object for each of {' and '.join(ROPES)}"
        )
    found = read_ropes(fields, head_dim, FULL, LOCAL, "rope_local_base_freq", full.size)
    part = found[0].partial_rotary_factor
    if found[0].kind == "default" and part != 1.0:
        # transformers reads it for the other kind alone.
        fields.refuse("rope_parameters.full_attention.partial_rotary_factor", part, "1.0 or absent")
    return found


def model(config: ModelConfig) -> Model:
    """As Gemma 3, with what is behind each layer."""
    usual = dense.model(config, NORMS)
    made: dict[tuple[Layer, int | None], Layer] = {}
    layers = []
    for index, layer in enumerate(usual.layers):
        source = config.source_of(index)
        reads = None if source == index else source
        # Equal layers are one object.
        if (layer, reads) not in made:
            made[layer, reads] = _layer(config, layer, reads)
        layers.append(made[layer, reads])
    return replace(usual, layers=tuple(layers), input_size=config.layer_input_size)


def _layer(config: ModelConfig, usual: Layer, reads: int | None) -> Layer:
    attention, last = usual
    if isinstance(attention.mixer, Attention):
        attention = replace(attention, mixer=replace(attention.mixer, reads=reads))
    if config.num_experts:
        last = Sublayer(_mlp_and_experts(config), last.pre)
    layer = [attention, last]
    if config.layer_input_size:
        post = Norm("input_out_norm", config.rms_norm_eps)
        layer.append(Sublayer(LayerInput("gelu_tanh"), None, post))
    layer[-1] = replace(layer[-1], factor="layer_factor")
    return tuple(layer)


def _mlp_and_experts(config: ModelConfig) -> MlpAndExperts:
    """Both parts, and their norms."""
    names = "expert_norm", "router_norm", "mlp_own_norm", "expert_out_norm", "mlp_out_norm"
    norms = (Norm(name, config.rms_norm_eps) for name in names)
    return MlpAndExperts(Mlp(config.act), dense.mixture(config), *norms)


def parameters(config: ModelConfig) -> ParameterTable:
    """The usual names, and those of what is behind each layer."""
    table = dense.parameters(config, NAMES, NORMS)
    if config.num_experts:
        table = dense.with_stacked_experts(table, config.num_experts, STACKS)
    more = [_one("layer_factor", (1,), ("one",), "{layer}layer_scalar", config)]
    if config.layer_input_size:
        more += _layer_inputs(config)
    if config.num_experts:
        more += _routing(config)
    every = tuple(dense.or_without_model(parameter) for parameter in more)
    # Published files have weights of k and v in layers that have none.
    unread = [
        f"*layers.{layer}.self_attn.{name}.*"
        for layer in range(config.num_layers - config.num_reading_layers, config.num_layers)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    return replace(table, parameters=(*table.parameters, *every), ignored=(*table.ignored, *unread))


def _routing(config: ModelConfig) -> list[Parameter]:
    """The norms around experts. That of the router has its scale times width^-0.5 for a weight."""
    width, count = config.hidden_size, config.num_experts
    found = [
        _one(name, (width,), ("embed",), f"{{layer}}{key}.weight", config)
        for name, key in EXPERT_NORMS.items()
    ]
    router = _one("router_norm", (width,), ("embed",), "{layer}router.scale", config)
    factor = _one("expert_factor", (count,), ("expert",), "{layer}router.per_expert_scale", config)
    return [
        *found,
        replace(router, dtype="float32", factor=width**-0.5),
        replace(factor, dtype="float32"),
    ]


def _layer_inputs(config: ModelConfig) -> list[Parameter]:
    """Of the small embeddings: once in all, and of each layer."""
    size, width = config.layer_input_size, config.hidden_size
    every = size * config.num_layers
    return [
        _one(
            "input_embed", (config.vocab_size, every), ("vocab", "layer_input"),
            "model.embed_tokens_per_layer.weight",
        ),
        _one(
            "input_projection", (every, width), ("layer_input", "embed"),
            "model.per_layer_model_projection.weight",
        ),
        _one("input_norm", (size,), ("layer_input",), "model.per_layer_projection_norm.weight"),
        _one(
            "input_gate", (size, width), ("layer_input", "embed"),
            "{layer}per_layer_input_gate.weight", config,
        ),
        _one(
            "input_up", (width, size), ("embed", "layer_input"),
            "{layer}per_layer_projection.weight", config,
        ),
        _one(
            "input_out_norm", (width,), ("embed",),
            "{layer}post_per_layer_input_norm.weight", config,
        ),
    ]  # fmt: skip


def _one(
    name: str, shape: tuple[int, ...], axes: tuple[str, ...], key: str,
    config: ModelConfig | None = None,
) -> Parameter:  # fmt: skip
    """One tensor, once in all or of each layer of `config`."""
    part = Part(key.replace("{layer}", LAYER), shape[0], axes[0])
    layers = None if config is None else range(config.num_layers)
    return Parameter(name, shape, axes, (part,), layers, "ones" if len(shape) == 1 else "normal")


FIELDS = frozenset(
    """hidden_activation final_logit_softcapping per_layer_config global_head_dim
    num_global_key_value_heads attention_k_eq_v num_kv_shared_layers use_double_wide_mlp
    hidden_size_per_layer_input vocab_size_per_layer_input enable_moe_block
    use_bidirectional_attention""".split()
)


def family(layer_input_size: int, window: int, defaults: Mapping[str, Any]) -> Family:
    """Of the models with these defaults (see `reader`)."""
    return Family(
        read=reader(layer_input_size, window, defaults),
        model=model,
        parameters=parameters,
        fields=FIELDS.union(MIXTURE),
        harmless=frozenset({"cache_implementation"}),
    )


FAMILY = family(256, 512, DEFAULTS)
