"""HunYuan without experts: a Llama whose heads of q and k are normed once they are rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from ..table import ParameterTable
from . import dense
from .family import Family

NORMS = ("self_attn.query_layernorm", "self_attn.key_layernorm")
NAMES = dense.Names(qk_norms=NORMS)
STRETCHED = "dynamic"
"""What files call a rotary embedding whose base is stretched once and for all, by `alpha`."""
UNREAD: dict[str, tuple[Any, ...]] = {
    "factor": (1.0,),
    "beta_fast": (32,),
    "beta_slow": (1,),
    "mscale": (1.0,),
    "mscale_all_dim": (1.0, 0.0),
}
"""Fields beside `alpha`, with the values that say nothing else."""


def read(fields: Fields) -> ModelConfig:
    """One field says whether all projections of attention have biases."""
    return numbers(fields)


def numbers(fields: Fields, **more: Any) -> ModelConfig:
    """What those with and without experts read alike."""
    fields.only("mlp_bias", False)
    bias = fields.boolean("attention_bias", False)
    plain, alpha = unstretched(fields)
    config = dense.read(
        plain,
        kv_heads=fields.size("num_attention_heads"),
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        qk_norm_behind_rope=True,
        **more,
    )
    size = config.head_dim
    fields.only("attention_head_dim", size)
    if alpha == 1.0:
        return config
    if size == 2:
        fields.fail("head_dim", "is 2, must be more where a rotary embedding is stretched")
    theta = config.rope.theta * alpha ** (size / (size - 2))
    return replace(config, rope=replace(config.rope, theta=theta))


def unstretched(fields: Fields) -> tuple[Fields, float]:
    """The same fields with a plain rotary embedding, and by what its base is stretched: 1 where
    nothing says it.
    """
    stretched: dict[str, float] = {}
    for name in ("rope_parameters", "rope_scaling"):
        block = fields.get(name)
        if not isinstance(block, dict) or not block:
            continue
        within = Fields(block, f"{fields.where}: {fields.path(name)}")
        stretched[name] = 1.0
        if STRETCHED in (block.get("rope_type"), block.get("type")):
            fields, stretched[name] = fields.replaced({name: _plain(within)}), _alpha(within)
    if len(set(stretched.values())) > 1:
        fields.refuse("rope_scaling", fields.get("rope_scaling"), "the same as rope_parameters")
    return fields, max(stretched.values(), default=1.0)


def _alpha(block: Fields) -> float:
    for name, allowed in UNREAD.items():
        block.only(name, *allowed)
    for name in ("rope_type", "type"):
        block.only(name, STRETCHED)
    return block.number("alpha", above=True)


def _plain(block: Fields) -> dict[str, Any]:
    named = {"rope_type", "type", "alpha", *UNREAD}
    rest = {name: value for name, value in block.raw.items() if name not in named}
    return rest | {"rope_type": "default"}


def parameters(config: ModelConfig) -> ParameterTable:
    """Norms of heads under names of their own."""
    return dense.parameters(config, NAMES)


FIXED: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,),
    "use_cla": (False,),
    "use_mla": (False,),
    "use_rotary_pos_emb": (True,),
    "position_embedding_xdrope": (False,),
    "norm_type": ("rms", "hf_rms", "fused"),
    "add_classification_head": (False,),
}
FAMILY = Family(
    read=read,
    parameters=parameters,
    fields=frozenset({"attention_head_dim"}),
    fixed=FIXED | {"num_experts": (1,)},
    harmless=frozenset(
        """eod_token_id im_start_id im_end_id im_newline_id text_start_id text_end_id
        image_token_id video_start_id video_end_id mask_init_id num_media_embeds
        org_vocab_size pad_id cla_share_factor class_num pool_type dense_list
        skip_cls_token""".split()
    ),
)
