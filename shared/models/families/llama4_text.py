"""Llama 4: attention by chunks in most layers, others that rotate nothing and whose queries grow,
and an expert for each token, beside one that all go through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...checkpoint import TRANSPOSED
from ..config import ModelConfig
from ..fields import Fields, show
from ..rope import RopeRules
from ..spec import Attention, Experts, Layer, Model
from ..table import Parameter, ParameterTable, Part
from . import dense, smollm3
from .family import Family

TYPES = ("full_attention", "chunked_attention")
ROPE = RopeRules(kinds=("default", "linear", "llama3"), theta=500_000.0)
NAMES = dense.Names(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    shared_expert="feed_forward.shared_expert",
)
STACKS = {
    "experts_gate_up": "feed_forward.experts.gate_up_proj",
    "experts_down": "feed_forward.experts.down_proj",
}


def read(fields: Fields) -> ModelConfig:
    """One field says whether all projections of attention have biases."""
    fields.only("num_experts_per_tok", 1)
    for name in ("mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers"):
        fields.only(name, False)
    size, inner = fields.size("intermediate_size"), fields.size("intermediate_size_mlp", 16384)
    rotated, bias = _rotated(fields), fields.boolean("attention_bias", False)
    plain = {"layer_types": None, "intermediate_size": inner}
    return dense.read(
        fields.replaced(plain),
        kv_heads=8,
        head_dim=128,
        eps=1e-5,
        rope=ROPE,
        windows=_chunks(fields, rotated),
        windows_are_chunks=True,
        unrotated_layers=tuple(layer for layer, turns in enumerate(rotated) if not turns),
        qkv_bias=bias,
        o_bias=bias,
        unit_qk_norm=fields.boolean("use_qk_norm", True),
        temper=_temper(fields),
        temper_start=1,
        num_experts=fields.size("num_local_experts", 16),
        experts_per_token=1,
        expert_size=size,
        shared_expert_size=size,
        renormalizes_experts=True,
        dense_layers=_dense_layers(fields),
    )


def _rotated(fields: Fields) -> list[bool]:
    """An empty list says nothing."""
    if fields.get(smollm3.ROTATED) == []:
        fields = fields.replaced({smollm3.ROTATED: None})
    return smollm3.rotated_layers(fields)


def _chunks(fields: Fields, rotated: list[bool]) -> list[int]:
    """The chunks of layers, 0 where one sees everything: as `layer_types` says, or those that are
    rotated have some.
    """
    types: Any = fields.get("layer_types")
    if types is None:
        types = [TYPES[turns] for turns in rotated]
    types = dense.names_of_layers(fields, types, len(rotated), TYPES)
    chunk = 0
    if TYPES[1] in types:
        default = None if "attention_chunk_size" in fields.raw else 8192
        chunk = fields.size("attention_chunk_size", default)
    return [chunk if name == TYPES[1] else 0 for name in types]


def _temper(fields: Fields) -> tuple[float, int] | None:
    """What q grows by where it is not rotated, and after how many positions. The first files have a
    number for true.
    """
    tunes = fields.get("attn_temperature_tuning")
    if isinstance(tunes, int):
        fields = fields.replaced({"attn_temperature_tuning": tunes != 0})
    scale, step = fields.number("attn_scale", 0.1), fields.size("floor_scale", 8192)
    return (scale, step) if fields.boolean("attn_temperature_tuning", True) else None


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Layers without experts: those that `moe_layers` does not name, or all but every
    `interleave_moe_layer_step`-th.
    """
    layers = range(fields.size("num_hidden_layers", high=dense.MAX_LAYERS))
    step, given = fields.size("interleave_moe_layer_step", 1), fields.get("moe_layers")
    if given is None:
        given = [layer for layer in layers if (layer + 1) % step == 0]
    if not isinstance(given, list) or any(
        type(one) is not int or one not in layers for one in given
    ):
        fields.fail("moe_layers", f"is {show(given)}, must be a list of layers below {len(layers)}")
    if not given:
        fields.refuse("moe_layers", show(given), "a list that leaves layers with experts")
    return tuple(layer for layer in layers if layer not in given)


def model(config: ModelConfig) -> Model:
    """Heads of q and k are normed where they are rotated, q grows where they are not."""
    usual = dense.model(config)
    made: dict[tuple[Layer, bool], Layer] = {}
    kinds = [
        (layer, number not in config.unrotated_layers) for number, layer in enumerate(usual.layers)
    ]
    for layer, is_rotated in kinds:
        made[layer, is_rotated] = _layer(config, layer, is_rotated)
    return replace(usual, layers=tuple(made[kind] for kind in kinds))


def _layer(config: ModelConfig, usual: Layer, is_rotated: bool) -> Layer:
    attention, last = usual
    if isinstance(attention.mixer, Attention):
        mixer = attention.mixer
        if is_rotated:
            mixer = replace(mixer, temper=None, qk_norm=config.unit_qk_norm)
        attention = replace(attention, mixer=mixer)
    if isinstance(last.mixer, Experts):
        last = replace(last, mixer=replace(last.mixer, gates_input=True))
    return attention, last


def parameters(config: ModelConfig) -> ParameterTable:
    """Names of their own, and all experts of a layer in one tensor. Norms of heads have no weights
    in files: those here are 1.
    """
    table = dense.parameters(config, NAMES, pairs=True)
    table = dense.with_stacked_experts(table, config.num_experts, STACKS, (TRANSPOSED,))
    return replace(table, parameters=(*table, *_ones(config)))


def _ones(config: ModelConfig) -> Iterator[Parameter]:
    layers = [n for n in range(config.num_layers) if n not in config.unrotated_layers]
    if not config.unit_qk_norm or not layers:
        return
    for name in ("q_norm", "k_norm"):
        part = Part(f"{dense.LAYER}self_attn.{name}.weight", config.head_dim, "head_dim")
        shape, axes = (config.head_dim,), ("head_dim",)
        yield Parameter(name, shape, axes, (part,), layers, "ones", value=1.0)


FAMILY = Family(
    read=read,
    model=model,
    parameters=parameters,
    fields=frozenset(
        """num_experts_per_tok num_local_experts intermediate_size_mlp moe_layers
        interleave_moe_layer_step use_qk_norm no_rope_layers no_rope_layer_interval
        attention_chunk_size attn_temperature_tuning floor_scale attn_scale""".split()
    ),
    fixed={"for_llm_compressor": (False,), "router_jitter_noise": (0.0,)},
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
)
