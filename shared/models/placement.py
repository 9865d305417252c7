"""How the weights of a model lie on several shards, in integers: the same for every backend.

Attention heads are dealt out so that every shard holds whole key-value heads and the query heads
that read them. Where the numbers do not divide, heads of zeros are added; where there are fewer
key-value heads than shards, each is held by several shards. Both happen once, when weights are
loaded: `physical_config` is the model as the programs see it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from .config import Heads, ModelConfig
from .spec import Shard
from .table import Parameter, ParameterTable, Part

SHARDED = {
    "vocab": True,
    "heads": True,
    "kv_heads": True,
    "full_heads": True,
    "full_kv_heads": True,
    "qkv": True,
    "mlp": True,
    "embed": False,
    "head_dim": False,
    "rank": False,
    "layer_input": False,
    "experts": True,
    "expert": False,
    "one": False,
}
"""Whether a logical axis is dealt out to the shards; else every shard holds all of it."""
WHOLE_EXPERTS = "experts"
"""The axis of all experts, one below the other: a shard has some of them, whole. Parts of each
would be too narrow for a TPU's registers of 128 lanes.
"""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """For each head that shards hold, shard by shard, the model's head that it is, or -1 for one
    of zeros.
    """

    query: tuple[int, ...]
    kv: tuple[int, ...]


@cache
def head_layout(heads: int, kv_heads: int, shards: int) -> HeadLayout:
    """How `heads` query heads in `kv_heads` equal groups lie on `shards` shards.

    With at least as many groups as shards, groups are dealt out in order and padded to a multiple.
    With fewer, they are padded to a divisor of `shards`, and each is split among as many shards as
    that leaves it.
    """
    group = heads // kv_heads
    if kv_heads >= shards:
        slots, copies = -(-kv_heads // shards) * shards, 1
    else:
        slots = next(n for n in range(kv_heads, shards + 1) if shards % n == 0)
        copies = shards // slots
    part = -(-group // copies)
    query: list[int] = []
    kv: list[int] = []
    for slot in range(slots):
        for copy in range(copies):
            kv.append(slot if slot < kv_heads else -1)
            members = range(copy * part, (copy + 1) * part)
            query += [slot * group + i if slot < kv_heads and i < group else -1 for i in members]
    return HeadLayout(tuple(query), tuple(kv))


def physical_config(model: ModelConfig, shards: int) -> ModelConfig:
    """The model with the heads and the MLP width that its shards hold together."""
    heads = _on_shards(Heads(model.num_heads, model.num_kv_heads, model.head_dim), shards)
    full = model.full_heads
    return replace(
        model,
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        dealt_heads=_dealt_heads(model, shards),
        full_heads=None if full is None else _on_shards(full, shards),
        intermediate_size=_multiple(model.intermediate_size, shards),
        reading_intermediate_size=_multiple(model.reading_intermediate_size, shards),
        shared_expert_size=_multiple(model.shared_expert_size, shards),
    )


def _dealt_heads(model: ModelConfig, shards: int) -> tuple[int, int] | None:
    """The heads of q and of k, but those of zeros, that norms over all of them see on shards."""
    if not model.wide_qk_norm or shards == 1:
        return None
    layout = head_layout(model.num_heads, model.num_kv_heads, shards)
    return sum(head >= 0 for head in layout.query), sum(head >= 0 for head in layout.kv)


def _on_shards(heads: Heads, shards: int) -> Heads:
    layout = head_layout(heads.query, heads.kv, shards)
    return replace(heads, query=len(layout.query), kv=len(layout.kv))


def _multiple(size: int, shards: int) -> int:
    return -(-size // shards) * shards


def local_config(model: ModelConfig, shards: int) -> ModelConfig:
    """The model that one shard computes within a layer."""
    whole = physical_config(model, shards)
    full = whole.full_heads
    return replace(
        whole,
        num_heads=whole.num_heads // shards,
        num_kv_heads=whole.num_kv_heads // shards,
        full_heads=None
        if full is None
        else Heads(full.query // shards, full.kv // shards, full.size),
        intermediate_size=whole.intermediate_size // shards,
        reading_intermediate_size=whole.reading_intermediate_size // shards,
        shared_expert_size=whole.shared_expert_size // shards,
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """How one parameter (of one layer) lies on the shards.

    `axis` is the dimension that is sharded, None if every shard holds all. `source` [physical size]
    is, for each entry of that dimension, the model's entry that it is, or -1 for the
    parameter's padding.
    """

    shape: tuple[int, ...]
    axis: int | None
    source: np.ndarray | None


def shard_config(model: ModelConfig, shard: Shard) -> ModelConfig:
    """The model that one shard computes, where it sums with the others by itself."""
    return replace(local_config(model, shard.count), shard=shard)


def place(
    parameter: Parameter, model: ModelConfig, shards: int, *, pads_words: bool = False
) -> Placement:
    """The placement of a parameter on `shards` shards. The parts of one dimension are dealt out
    together. `pads_words`: a vocabulary that does not divide is dealt out too, with words that
    nobody samples behind it; else each shard has all of it.

    Pieces of a narrow weight lie where its entries do: those of one group or byte on one shard.
    """
    of = parameter.piece_of
    if of is not None and parameter.shape[1] > 1 and not SHARDED[parameter.axes[0]]:
        wide = place(of.wide, model, shards)
        if wide.source is None:
            return Placement(parameter.shape, None, None)
        size = of.wide.shape[1] // parameter.shape[1]
        first = wide.source[::size]
        pieces = np.where(first < 0, -1, first // size)
        return Placement((parameter.shape[0], len(pieces)), 1, pieces)
    for axis, name in enumerate(parameter.axes):
        if not SHARDED[name]:
            continue
        parts = (
            [(p.axis, p.rows) for p in parameter.parts]
            if axis == 0 and name != WHOLE_EXPERTS
            else [(name, parameter.shape[axis])]
        )
        columns, offset = [], 0
        for part, size in parts:
            source = _source(part, size, model, shards, pads_words)
            if source is None:
                return Placement(parameter.shape, None, None)
            columns.append(np.where(source < 0, -1, source + offset).reshape(shards, -1))
            offset += size
        whole = np.concatenate(columns, axis=1).reshape(-1)
        shape = (*parameter.shape[:axis], len(whole), *parameter.shape[axis + 1 :])
        return Placement(shape, axis, whole)
    return Placement(parameter.shape, None, None)


def split_pieces(table: ParameterTable, model: ModelConfig, shards: int) -> str:
    """What of narrow weights such shards would split, groups or bytes, or ""."""
    for parameter in table:
        of = parameter.piece_of
        if of is None or of.piece == "input_scale" or parameter.axes[-1] == "one":
            continue
        wide, own = place(of.wide, model, shards), place(parameter, model, shards)
        if wide.axis != 1 or wide.source is None or own.source is None:
            continue
        size = of.wide.shape[1] // parameter.shape[1]
        # What is behind the last whole group is no entry of the model, if groups are whole.
        entries = own.source[:, None] * size + np.arange(size)
        spread = np.where(own.source[:, None] < 0, -1, entries).reshape(-1)
        in_turn = len(wide.source) // shards % size == 0
        if not (in_turn and np.array_equal(spread, wide.source)):
            return f"groups of {size} entries that share a {of.piece} in {of.wide.name}"
    return ""


def _source(
    axis: str, size: int, model: ModelConfig, shards: int, pads_words: bool
) -> np.ndarray | None:
    """The entries of one logical axis of `size` as they lie on the shards, or None if it is not
    dealt out.
    """
    if axis.endswith("heads"):
        # Windows of 1 stand for any.
        heads = model.heads(0 if axis.startswith("full_") else 1)
        layout = head_layout(heads.query, heads.kv, shards)
        is_kv = axis.endswith("kv_heads")
        held = np.array(layout.kv if is_kv else layout.query)[:, None]
        # A head's own entries: a row each of its dimensions, or one.
        width = size // (heads.kv if is_kv else heads.query)
        within = np.arange(width)[None, :]
        return np.where(held < 0, -1, held * width + within).reshape(-1)
    if axis == "vocab" and size % shards and not pads_words:
        # A padded word could be sampled, so a vocabulary that does not divide is held whole.
        return None
    padded = np.arange(-(-size // shards) * shards)
    return np.where(padded < size, padded, -1)


def rows_of(part: Part, source: np.ndarray, offset: int) -> np.ndarray:
    """The rows of a part's tensor that make up a shard, -1 where it has none of this part.

    `source` is what `Placement` says of the shard's rows, `offset` where the part begins in the
    parameter.
    """
    inside = (source >= offset) & (source < offset + part.rows)
    rows = part.rows_in_tensor(np.where(inside, source - offset, 0))
    return np.where(inside, rows, -1)
