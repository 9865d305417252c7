"""What families with multi-head latent attention have in common (DeepSeek-V2, arXiv:2405.04434).

Dense decoders otherwise: `dense.py` has the rest of a layer. Norms of latents have an eps of 1e-6
whatever `rms_norm_eps` is, as transformers has it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...errors import InternalError
from ..config import Latents, ModelConfig
from ..fields import Fields
from ..rope import RopeConfig, RopeRules
from ..spec import Attention, LatentAttention, Model, Sublayer
from ..table import PairsToHalves, Parameter, ParameterTable, Part
from . import dense

EPS = 1e-6
FIELDS = frozenset(
    """kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim
    rope_interleave""".split()
)
"""What `read` reads beside the fields of all dense decoders."""


def read(
    fields: Fields,
    *,
    rank: int = 512,
    query_rank: int = 1536,
    plain: int = 128,
    rotated: int = 64,
    v_dim: int = 128,
    rope: RopeRules,
    head_dim: tuple[int, ...] = (),
    **more: Any,
) -> ModelConfig:
    """The numbers of a config.json; sizes are defaults of the family. A `q_lora_rank` that is null
    is none. `head_dim`: what the field of this name may be beside the rotated part, which nothing
    but that reads. `more` is what `dense.read` takes.
    """
    fields.only("attention_bias", False)
    fields.only("num_key_value_heads", fields.size("num_attention_heads"))
    latents = Latents(
        rank=fields.size("kv_lora_rank", rank),
        query_rank=_query_rank(fields, query_rank),
        plain=fields.size("qk_nope_head_dim", plain),
        rotated=fields.size("qk_rope_head_dim", rotated),
        v_dim=fields.size("v_head_dim", v_dim),
        in_pairs=fields.boolean("rope_interleave", True),
    )
    if latents.rotated % 2:
        fields.fail(
            "qk_rope_head_dim", f"is {latents.rotated}, must be even: rotary embedding turns pairs"
        )
    whole = latents.plain + latents.rotated
    fields.only("qk_head_dim", whole)
    fields.only("head_dim", latents.rotated, *head_dim)
    # All heads share the one latent.
    shared = {"num_key_value_heads": 1, "head_dim": latents.rotated}
    config = dense.read(fields.replaced(shared), rope=rope, **more)
    scale = float(whole**-0.5 * _grown(config.rope) ** 2)
    return replace(config, latents=latents, attention_scale=scale)


def _query_rank(fields: Fields, default: int) -> int:
    if "q_lora_rank" in fields.raw and fields.get("q_lora_rank") is None:
        return 0
    return fields.size("q_lora_rank", default)


def _grown(rope: RopeConfig) -> float:
    """What yarn multiplies q and k by, all of their entries, beside what it does to angles."""
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def model(config: ModelConfig) -> Model:
    """The layers of a dense decoder, whose attention is another."""
    plain = dense.model(config)
    layers = {layer: tuple(map(with_latents(config), layer)) for layer in plain.kinds}
    return replace(plain, layers=tuple(layers[layer] for layer in plain.layers))


def with_latents(config: ModelConfig) -> Any:
    """A function from a sublayer to what it is with latents."""
    latents = sizes(config)

    def changed(sub: Sublayer) -> Sublayer:
        own = sub.mixer
        if not isinstance(own, Attention):
            return sub
        attention = LatentAttention(
            num_heads=own.num_heads,
            plain=latents.plain,
            rotated=latents.rotated,
            v_dim=latents.v_dim,
            rank=latents.rank,
            query_rank=latents.query_rank,
            scale=own.scale,
            norm_eps=EPS,
            angles=own.angles,
            temper=own.temper,
        )
        return replace(sub, mixer=attention)

    return changed


def sizes(config: ModelConfig) -> Latents:
    """Those of a config of such a family."""
    if config.latents is None:
        raise InternalError(f"{config.architecture}: a config without latents")
    return config.latents


def parameters(config: ModelConfig, names: dense.Names = dense.SEPARATE) -> ParameterTable:
    """The parameters of a dense decoder, with others of attention."""
    table = dense.parameters(config, names)
    others = [one for one in table if one.name not in ("qkv", "o")]
    attention = map(dense.or_without_model, _attention(config))
    return replace(table, parameters=(*others, *attention))


def _attention(config: ModelConfig) -> list[Parameter]:
    latents, width, heads = sizes(config), config.hidden_size, config.num_heads
    rank, layers, turn = latents.rank, range(config.num_layers), latents.rotated
    query = latents.plain + turn
    of_queries, of_latents = (
        PairsToHalves(size, turn, size - turn) if latents.in_pairs else None
        for size in (query, rank + turn)
    )

    def part(module: str, rows: int, axis: str, order: PairsToHalves | None = None) -> Part:
        return Part(f"{dense.LAYER}self_attn.{module}.weight", rows, axis, order=order)

    def norm(name: str, module: str, size: int) -> Parameter:
        axis = "rank"
        return Parameter(name, (size,), (axis,), (part(module, size, axis),), layers, init="ones")

    latent = part("kv_a_proj_with_mqa", rank + turn, "rank", of_latents)
    found = [norm("kv_a_norm", "kv_a_layernorm", rank)]
    if latents.query_rank:
        first = part("q_a_proj", latents.query_rank, "rank")
        rows, axes = first.rows + latent.rows, ("rank", "embed")
        found += [
            Parameter("qkv_a", (rows, width), axes, (first, latent), layers),
            norm("q_a_norm", "q_a_layernorm", latents.query_rank),
        ]
        q, columns = "q_b_proj", (latents.query_rank, "rank")
    else:
        found.append(Parameter("kv_a", (latent.rows, width), ("rank", "embed"), (latent,), layers))
        q, columns = "q_proj", (width, "embed")
    values = latents.plain + latents.v_dim
    of_heads = (
        ("q", part(q, heads * query, "heads", of_queries), columns),
        ("kv_b", part("kv_b_proj", heads * values, "heads"), (rank, "rank")),
    )
    found += [
        Parameter(name, (one.rows, size), ("heads", axis), (one,), layers)
        for name, one, (size, axis) in of_heads
    ]
    out = part("o_proj", width, "embed")
    shape = width, heads * latents.v_dim
    return [*found, Parameter("o", shape, ("embed", "heads"), (out,), layers)]
