"""What one of several shards computes, where no compiler places the sums: the same layers, which
say where the shards' parts are added up.

A product whose inputs are dealt out gives a part of a sum. Nothing that stands between it and the
residual needs the whole, unless there is a norm or a factor, so the parts are added where the
residual is: a model of L layers states 2 L + 1 sums, those of attention, MLP or experts, and
embedding, and one more a layer where experts stand beside an MLP. Norms of q and k over all heads
add a small one to each layer, of a token's two mean squares.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from .placement import WHOLE_EXPERTS
from .spec import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    Mixer,
    Mlp,
    MlpAndExperts,
    Model,
    Shard,
    Sublayer,
)
from .table import Parameter, ParameterTable, Part

PARTIAL = (Attention, LatentAttention, Mlp, Experts)
"""The mixers whose last product has inputs, or experts, that are dealt out; the others are whole
everywhere.
"""


def words_of(vocab_size: int, shard: Shard) -> range:
    """The words whose rows a shard has. Those from `vocab_size` on are padding, all zeros."""
    size = words_per_shard(vocab_size, shard.count)
    return range(shard.index * size, (shard.index + 1) * size)


def words_per_shard(vocab_size: int, shards: int) -> int:
    """Words of each shard, padding among them."""
    return -(-vocab_size // shards)


def rows_to_sample(requests: int, shard: Shard | None) -> int:
    """Rows that a shard samples of so many: an equal share, or all if they cannot be dealt out."""
    if shard is None or requests % shard.count:
        return requests
    return requests // shard.count


def sharded_model(model: Model, vocab_size: int, shard: Shard) -> Model:
    """The model of one shard."""
    # What a layer leaves open is the same for all, so that equal layers stay of one kind.
    leaves = all(_leaves_open(layer[-1]) for layer in model.layers)
    return replace(
        model,
        layers=tuple(_sharded_layer(layer, leaves, shard) for layer in model.layers),
        first_word=words_of(vocab_size, shard).start,
        reduces_embedding=not leaves or model.input_size > 0,
        reduces_before=leaves,
    )


def _leaves_open(sub: Sublayer) -> bool:
    """Whether the parts of a sublayer's result are added up where the next one begins."""
    plain = sub.post is None and sub.scale == 1.0 and sub.factor is None
    return plain and isinstance(sub.mixer, PARTIAL)


def _sharded_layer(layer: Layer, leaves: bool, shard: Shard) -> Layer:
    """`leaves`: whether the last sublayers of all layers leave their sums open, and embeddings."""
    found: list[Sublayer] = []
    before = leaves
    for number, sub in enumerate(layer):
        stays_open = _leaves_open(sub) and (leaves or number + 1 < len(layer))
        reduces = isinstance(sub.mixer, PARTIAL) and not stays_open
        mixer = sharded_mixer(sub.mixer, shard)
        found.append(replace(sub, mixer=mixer, reduces=reduces, reduces_before=before))
        before = stays_open
    return tuple(found)


def sharded_mixer(mixer: Mixer, shard: Shard) -> Mixer:
    """What a shard has of a mixer: experts whole, in order; of other products, those that `DEALT`
    names.
    """
    if isinstance(mixer, MlpAndExperts):
        experts = _own_experts(mixer.experts, shard)
        return replace(mixer, mlp=_dealt(mixer.mlp), experts=experts, reduces=True)
    if isinstance(mixer, Experts):
        return _own_experts(mixer, shard)
    return _dealt(mixer) if isinstance(mixer, Attention | LatentAttention | Mlp) else mixer


M = TypeVar("M", bound=Attention | LatentAttention | Mlp | Experts)


def _own_experts(mixer: Experts, shard: Shard) -> Experts:
    own = mixer.num_experts // shard.count
    return replace(_dealt(mixer), num_experts=own, first=shard.index * own)


def _dealt(mixer: M) -> M:
    if mixer.narrow is None:
        return mixer
    return replace(mixer, narrow=replace(mixer.narrow, dealt=True))


def sharded_table(table: ParameterTable, shard: Shard) -> ParameterTable:
    """The shapes of a shard's parameters, from a table of all words. Nothing is read by it: the
    rows of its parts are the shard's.
    """
    own = tuple(_sharded_parameter(parameter, shard) for parameter in table)
    return replace(table, parameters=own)


def _sharded_parameter(parameter: Parameter, shard: Shard) -> Parameter:
    if parameter.axes[0] == "vocab":
        rows = words_per_shard(parameter.shape[0], shard.count)
    elif parameter.axes[0] == WHOLE_EXPERTS:
        rows = parameter.shape[0] // shard.count
    else:
        return parameter
    part, of = parameter.parts[0], parameter.piece_of
    return replace(
        parameter,
        shape=(rows, *parameter.shape[1:]),
        parts=(Part(part.key, rows, part.axis),),
        alternatives=(),
        piece_of=of and replace(of, wide=_sharded_parameter(of.wide, shard)),
    )
