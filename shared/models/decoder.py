"""The decoder, written once over ops: layers from `spec.py`, each sublayer computed by its stage
(`stages.py`).

`forward` is the one loop over layers. How they are run (scanned over stacked weights by JAX,
compiled or captured by torch, one at a time with taps by numerics) is its argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from .blocks import Block, single_blocks
from .config import ModelConfig
from .families import model_of, parameters_of
from .rope import rope_inverse_frequencies
from .spec import Layer, Model, Norm, Sublayer, mixes_tokens, source_of
from .stages import Array, Batch, Cache, Rows, Weights, begins_with_norm, stage_of, stage_with_norm

__all__ = [
    "Batch",
    "Execution",
    "PlainCalls",
    "Stream",
    "embed",
    "finish",
    "forward",
    "head",
    "joints",
    "layer",
    "model_of",
    "parameters_of",
    "rotary_tables",
    "with_joints",
]

BEFORE = "norm_before"
"""Under this name a layer finds the weight of the norm behind the layer before it."""
ROTARY_ROWS = 1 << 14
"""Rows of the rotary tables that are computed together: what is in float64 of all of them would be
several times as large as the tables.
"""


def rotary_tables(config: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [positions r] float32, r = half of the rotated entries, computed in float64.

    Those of several ropes stand side by side, as `config.ropes` has them, then angles of 0 if there
    are layers that rotate nothing. If q has a temperature by position, what it is multiplied with
    is one more column of cos, beside one of zeros in sin. The tables are for sequences of up to
    `positions` tokens: with longrope, short and long ones have different tables.
    """
    ropes = [
        rope_inverse_frequencies(rope, size, positions)
        for rope, size in zip(config.ropes, config.rope_head_dims, strict=True)
    ]
    cos, sin = (
        np.empty((positions, columns.shape[1]), np.float32)
        for columns in _rotary_rows(config, ropes, range(1))
    )
    for first in range(0, positions, ROTARY_ROWS):
        rows = range(first, min(first + ROTARY_ROWS, positions))
        cos[first : rows.stop], sin[first : rows.stop] = _rotary_rows(config, ropes, rows)
    return cos, sin


def _rotary_rows(
    config: ModelConfig, ropes: Sequence[tuple[np.ndarray, float]], positions: range
) -> tuple[np.ndarray, np.ndarray]:
    """These rows of the tables, in float64."""
    position = np.arange(positions.start, positions.stop, dtype=np.float64)[:, None]
    cos: list[np.ndarray] = []
    sin: list[np.ndarray] = []
    for inverse, scaling in ropes:
        angles = position * inverse[None, :]
        cos.append(np.cos(angles) * scaling)
        sin.append(np.sin(angles) * scaling)
    if config.unrotated_layers:
        cos.append(np.ones_like(cos[0]))
        sin.append(np.zeros_like(sin[0]))
    if config.temper is not None:
        beta, original = config.temper
        cos.append(1.0 + beta * np.log1p(np.floor((position + config.temper_start) / original)))
        sin.append(np.zeros_like(position))
    return np.concatenate(cos, axis=1), np.concatenate(sin, axis=1)


def embed(ops: Any, model: Model, weights: Weights, token_ids: Array) -> Array:
    """Hidden states [tok dim] of token ids [tok]."""
    table, factor = weights["embed"], model.embedding_scale
    if model.rounds_embedding_scale:
        factor = rounded(factor, table.dtype)
    hidden = looked_up(ops, model, token_ids, table)
    if model.reduces_embedding:
        hidden = ops.all_reduce(hidden)
    return scaled(ops, hidden, factor)


def looked_up(ops: Any, model: Model, token_ids: Array, table: Array) -> Array:
    """The rows [tok dim] of token ids: of a shard, those of its own words, and zeros."""
    if model.first_word is None:
        return ops.embedding(token_ids, table)
    return ops.vocab_parallel_embedding(token_ids, table, model.first_word)


def layer_input(
    ops: Any, model: Model, weights: Weights, token_ids: Array, hidden: Array
) -> Array | None:
    """The small embeddings [layer tok size] that layers get of tokens [tok], whose hidden states
    before the first layer are `hidden`; None for models without. Each is half of the token's own,
    half of what these states say.
    """
    if not model.input_size:
        return None
    size, tokens = model.input_size, hidden.shape[0]
    projected = ops.linear(hidden, weights["input_projection"], None)
    projected = ops.scale(projected, hidden.shape[1] ** -0.5)
    normed = ops.rms_norm(
        projected.reshape(tokens, -1, size), weights["input_norm"], model.norm.eps
    )
    table = weights["input_embed"]
    own = looked_up(ops, model, token_ids, table)
    if model.first_word is not None:
        own = ops.all_reduce(own)
    own = ops.scale(own, rounded(size**0.5, table.dtype))
    total = ops.scale(ops.add(normed.reshape(tokens, -1), own), 0.5**0.5)
    return total.reshape(tokens, -1, size).swapaxes(0, 1)


DIGITS = {"float32": 24, "bfloat16": 8, "float16": 11}
"""Binary digits of a number, by dtype."""


def rounded(x: float, dtype: Any) -> float:
    """The number of a dtype of any framework that is nearest to x, a normal one."""
    digits = DIGITS[str(dtype).removeprefix("torch.")]
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, digits)), exponent - digits)


def scaled(ops: Any, x: Array, factor: float) -> Array:
    """x times a factor of the model, rounded to the dtype of x as a step of its own; nothing is
    called for a 1.
    """
    return x if factor == 1.0 else ops.scale(x, factor)


class Stream(NamedTuple):
    """The residual stream as two summands [tok dim]: what the last sublayer gave, and all before
    it.
    """

    hidden: Array
    residual: Array


def layer(
    ops: Any,
    spec: Layer,
    weights: Weights,
    stream: Stream,
    cache: Cache,
    batch: Batch,
    before: Norm | None = None,
    joins_next: bool = False,
) -> tuple[Stream, Cache]:
    """One layer: its sublayers in order. With `batch.rows` the result is [row dim].

    Behind the last sublayer whose tokens see each other, the layer goes on with these tokens only.
    With `before` (see `joints`) the hidden states are still to be normed by that, with the weight
    `BEFORE`; with `joins_next` the norm behind the last sublayer is left to what comes next.
    """
    hidden, residual = stream
    narrowing = None if batch.rows is None else last_mixing(spec)
    post = before and replace(before, weight=BEFORE)
    for number, sub in enumerate(spec):
        rows = batch.rows if number == narrowing else None
        (hidden, residual), cache = through_mixer(
            ops, sub, weights, Stream(hidden, residual), cache, batch._replace(rows=rows), post
        )
        if rows is not None:
            residual = residual[rows.index]
            batch = batch.narrowed(rows)
        if sub.reduces:
            hidden = ops.all_reduce(hidden)
        is_last = number + 1 == len(spec)
        joins = joins_next if is_last else added_as_it_is(sub, spec[number + 1].pre)
        post = sub.post if joins else None
        if sub.post is not None and post is None:
            hidden = ops.rms_norm(hidden, weights[sub.post.weight], sub.post.eps)
        hidden = scaled(ops, hidden, sub.scale)
        if sub.factor is not None:
            factor = weights[sub.factor]
            hidden, residual = ops.scale_by(hidden, factor), ops.scale_by(residual, factor)
    return Stream(hidden, residual), cache


def through_mixer(
    ops: Any,
    sub: Sublayer,
    weights: Weights,
    stream: Stream,
    cache: Cache,
    batch: Batch,
    post: Norm | None,
) -> tuple[Stream, Cache]:
    """A stream whose summands are what the mixer gives of the norm of `stream`, and the sum of
    that. `post`: its hidden states are still to be normed by this.
    """
    (hidden, residual), norm = stream, sub.pre
    if post is not None and norm is not None:
        own, other = weights[post.weight], weights[norm.weight]
        x, residual = ops.norm_add_rms_norm(hidden, own, residual, other, post.eps, norm.eps)
    elif norm is not None and not sub.reduces_before and begins_with_norm(sub.mixer):
        given = weights, norm, hidden, residual, cache, batch
        hidden, residual, cache = stage_with_norm(ops, sub.mixer, *given)
        return Stream(hidden, residual), cache
    else:
        x, residual = pre_norm(ops, norm, weights, hidden, residual, sub.reduces_before)
    seen = batch._replace(stream=residual)
    hidden, cache = stage_of(sub.mixer)(ops, sub.mixer, weights, x, cache, seen)
    return Stream(hidden, residual), cache


def pre_norm(
    ops: Any,
    norm: Norm | None,
    weights: Weights,
    hidden: Array,
    residual: Array,
    reduces: bool = False,
) -> tuple[Array, Array]:
    """(what a mixer reads, the stream so far): the last result is added here, where the norm
    reads the sum anyway. `reduces`: it is a shard's part of a sum, which is made here too.
    """
    if norm is None:
        total = ops.add(ops.all_reduce(hidden) if reduces else hidden, residual)
        return total, total
    add = ops.reduce_add_rms_norm if reduces else ops.fused_add_rms_norm
    x, residual = add(hidden, residual, weights[norm.weight], norm.eps)
    return x, residual


def added_as_it_is(sub: Sublayer, following: Norm | None) -> bool:
    """Whether nothing stands between the norm behind a sublayer and a sum that the `following`
    norm reads.
    """
    return sub.scale == 1.0 and sub.factor is None and following is not None


def joints(model: Model) -> tuple[Norm | None, ...]:
    """The norm behind the layer before each layer, and last behind the last one, if its result is
    added as it is and normed again: then one op can do it all. None where there is none.

    A walk that joins layers calls `layer` and `finish` with these, and gives them the weights of
    `with_joints`.
    """
    following = [*(spec[0].pre for spec in model.layers[1:]), model.norm]
    behind = [
        spec[-1].post if added_as_it_is(spec[-1], norm) else None
        for spec, norm in zip(model.layers, following, strict=True)
    ]
    return (None, *behind)


def with_joints(
    model: Model, top: Weights, layers: Sequence[Weights]
) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """The weights of a model for a walk that joins layers: those outside of layers, and of each."""
    _, *behind = joints(model)
    of_norms = [
        {} if norm is None else {BEFORE: weights[norm.weight]}
        for norm, weights in zip(behind, layers, strict=True)
    ]
    joined = zip(layers, [{}, *of_norms[:-1]], strict=True)
    return {**top, **of_norms[-1]}, [{**weights, **more} for weights, more in joined]


def last_mixing(spec: Layer) -> int:
    """The number of the last sublayer whose tokens see each other, -1 if there is none."""
    mixing = [number for number, sub in enumerate(spec) if mixes_tokens(sub)]
    return mixing[-1] if mixing else -1


S = TypeVar("S")
C = TypeVar("C")


class Execution(Protocol[S, C]):
    """How the parts of a forward pass are run: as plain calls, scanned, compiled, captured or
    tapped.

    S is what is carried from layer to layer (a `Stream`, or several), C whatever holds the caches.
    """

    @property
    def blocks(self) -> Sequence[Block]:
        """The layers, in the portions that run at a time."""
        ...

    def embed(self) -> S:
        """The stream before the first layer: the residual is zero."""
        ...

    def layers(self, block: Block, stream: S, cache: C, rows: Rows | None) -> tuple[S, C]:
        """The layers of a block; the last of them finishes the tokens `rows` only, if there are
        any.
        """
        ...

    def finish(self, stream: S) -> Array:
        """The final norm."""
        ...


def forward(execution: Execution[S, C], cache: C, rows: Rows | None = None) -> tuple[Array, C]:
    """Finished hidden states [tok dim], or [row dim] of the tokens `rows`, and the cache.

    This is the only loop over the layers of a model.
    """
    stream = execution.embed()
    *blocks, last = execution.blocks
    for block in blocks:
        stream, cache = execution.layers(block, stream, cache, None)
    stream, cache = execution.layers(last, stream, cache, rows)
    return execution.finish(stream), cache


class PlainCalls:
    """An `Execution` that calls one layer after the other. The cache is a list, in which it puts
    that of each layer.

    `layer_weights` are those of each layer, `zeros` gives the residual before the first one, from
    hidden states. `ops_of(layer)` are the ops of a kind of layer, if they are not `ops`. `joins`:
    norms between layers are joined, and the weights are those of `with_joints`.
    """

    def __init__(
        self,
        ops: Any,
        model: Model,
        weights: Weights,
        layer_weights: Sequence[Weights],
        token_ids: Array,
        batch: Batch,
        zeros: Callable[[Array], Array],
        ops_of: Callable[[Layer], Any] | None = None,
        joins: bool = False,
    ) -> None:
        self.ops, self.model, self.weights, self.layer_weights = ops, model, weights, layer_weights
        self.token_ids, self.batch, self.zeros = token_ids, batch, zeros
        # Not `or`: Dynamo of torch 2.11 cannot tell whether a partial function is true.
        self.ops_of = (lambda spec: ops) if ops_of is None else ops_of
        self.blocks: Sequence[Block] = single_blocks(len(model.layers))
        self._joints = joints(model) if joins else (None,) * (len(model.layers) + 1)

    def embed(self) -> Stream:
        """See `Execution`."""
        given = self.ops, self.model, self.weights, self.token_ids
        hidden = embed(*given)
        self.batch = self.batch._replace(layer_input=layer_input(*given, hidden))
        return Stream(hidden, self.zeros(hidden))

    def layers(
        self, block: Block, stream: Stream, cache: Cache, rows: Rows | None
    ) -> tuple[Stream, Cache]:
        """See `Execution`."""
        index = block.first
        batch = self.batch.of_layer(index)._replace(rows=rows)
        spec, weights = self.model.layers[index], self.layer_weights[index]
        place = self.cache_of(index)
        before, behind = self._joints[index : index + 2]
        stream, cache[place] = layer(
            self.ops_of(spec), spec, weights, stream, cache[place], batch, before,
            behind is not None,
        )  # fmt: skip
        return stream, cache

    def cache_of(self, index: int) -> int:
        """The place in the list of the cache that a layer reads."""
        return source_of(self.model.layers[index], index)

    def finish(self, stream: Stream) -> Array:
        """See `Execution`."""
        return finish(self.ops, self.model, self.weights, stream, self._joints[-1])


def finish(
    ops: Any, model: Model, weights: Weights, stream: Stream, before: Norm | None = None
) -> Array:
    """The final norm: [tok dim]. `before` is as in `layer`."""
    if before is not None:
        hidden, residual = stream
        own, norm = weights[BEFORE], model.norm
        return ops.norm_add_rms_norm(
            hidden, own, residual, weights[norm.weight], before.eps, norm.eps
        )[0]
    return pre_norm(ops, model.norm, weights, *stream, model.reduces_before)[0]


def head(ops: Any, model: Model, weights: Weights, rows: Array) -> Array:
    """Logits [row vocab] float32 of finished hidden states [row dim]."""
    logits = ops.logits(rows, weights["head"] if "head" in weights else weights["embed"])
    logits = scaled(ops, logits, model.logits_scale)
    if model.logits_cap > 0:
        logits = ops.logits_processor(logits, 1.0, model.logits_cap)
    return logits
