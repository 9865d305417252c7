"""The layers of a step as JAX runs them: blocks of layers, scanned over stacked weights, on one
buffer of caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..bucketing import Descriptor
from ..ops import BoundPlans
from ..ops.namespaces.jax_ import OneOf
from ..shared.models import decoder
from ..shared.models.blocks import Block, cover, single_blocks
from ..shared.models.decoder import Batch, Stream
from ..shared.models.spec import Layer, Model
from .kv_buffer import as_buffer, as_heads

Weights = Mapping[str, Any]


def blocks_of(model: Model, scan: bool) -> tuple[Block, ...]:
    """How the layers of a model are run: in loops, with as few bodies as possible, or all
    unrolled.
    """
    return cover(model.layers) if scan else single_blocks(len(model.layers))


class Repeats(NamedTuple):
    """Weights of the layers at one position of a block's period, one for each repeat."""

    stacked: Weights
    """[n, ...]: a loop over the repeats takes a slice of each."""
    matrices: Mapping[str, tuple[jax.Array, ...]]
    """Those that lie apart: a slice of a stack is a copy, and on a CPU that takes longer than
    the product.
    """

    def at(self, stacked: Weights, repeat: Any) -> Weights:
        """The weights of one repeat, whose slice of `self.stacked` is given."""
        return {
            **stacked,
            **{name: OneOf(matrices, repeat) for name, matrices in self.matrices.items()},
        }


def repeats_of(layers: Sequence[Weights]) -> Repeats:
    """Of layers whose weights are arrays [1, ...] of their own: vectors are stacked, as copying
    them takes no time.
    """
    vectors = [name for name, weight in layers[0].items() if weight.ndim == 2]
    # Not a set, whose order differs between processes: the program would not be found in a cache.
    matrices = [name for name in layers[0] if name not in vectors]
    return Repeats(
        {name: jnp.concatenate([layer[name] for layer in layers]) for name in vectors},
        {name: tuple(layer[name][0] for layer in layers) for name in matrices},
    )


class ScannedPass:
    """An `Execution` (shared/models/decoder.py). The cache is the buffer of all layers
    (kv_buffer.py).

    `weights["blocks"]` has, for each block in `stored` and each position of its period, weights
    stacked over the repeats. These blocks are run, or with `scan` loops over layers that are stored
    one by one. `cache_dtype` and `head_dim` are those of the keys and values that the ops see.
    """

    def __init__(
        self,
        ops: BoundPlans,
        model: Model,
        scan: bool,
        stored: Sequence[Block],
        descriptor: Descriptor,
        weights: Weights,
        token_ids: jax.Array,
        batch: Batch,
        head_dim: int,
        cache_dtype: Any,
    ) -> None:
        self._ops, self._model, self._kind = ops, model, descriptor.kind
        self.blocks = blocks_of(model, scan)
        self._weights, self._token_ids = weights, token_ids
        if tuple(stored) == self.blocks:
            found = [
                tuple(Repeats(stacked, {}) for stacked in block) for block in weights["blocks"]
            ]
        else:
            layers = [layer for (layer,) in weights["blocks"]]
            found = [
                tuple(
                    repeats_of([layers[i] for i in block.layers_at(n)]) for n in range(block.period)
                )
                for block in self.blocks
            ]
        self._repeats = dict(zip(self.blocks, found, strict=True))
        self._batch = batch.within(descriptor.max_query_len)
        self._head_dim, self._cache_dtype = head_dim, cache_dtype

    def embed(self) -> Stream:
        """See `Execution`."""
        hidden = decoder.embed(self._ops[self._kind], self._model, self._weights, self._token_ids)
        return Stream(hidden, jnp.zeros_like(hidden))

    def layers(
        self, block: Block, stream: Stream, cache: jax.Array, rows: jax.Array | None
    ) -> tuple[Stream, jax.Array]:
        """See `Execution`. Every token is finished: `rows` must be None."""
        specs = self._model.layers[block.first : block.first + block.period]

        repeats = self._repeats[block]

        def body(carry: Any, repeat: Any) -> tuple[Any, None]:
            stream, cache = carry
            slices, first, number = repeat
            for position, (spec, of_repeats, stacked) in enumerate(
                zip(specs, repeats, slices, strict=True)
            ):
                weights = of_repeats.at(stacked, number)
                stream, cache = self._layer(spec, weights, first + position, stream, cache)
            return (stream, cache), None

        stacked = tuple(of_repeats.stacked for of_repeats in repeats)
        if block.repeats == 1:
            carry, _ = body(
                (stream, cache), (jax.tree.map(lambda x: x[0], stacked), block.first, 0)
            )
        else:
            firsts = jnp.asarray(block.layers_at(0), jnp.int32)
            numbers = jnp.arange(block.repeats, dtype=jnp.int32)
            carry, _ = jax.lax.scan(body, (stream, cache), (stacked, firsts, numbers))
        stream, cache = carry
        return stream, cache

    def _layer(
        self, spec: Layer, weights: Weights, index: Any, stream: Stream, buffer: jax.Array
    ) -> tuple[Stream, jax.Array]:
        batch, kv = self._batch, as_heads(buffer, self._head_dim, self._cache_dtype)
        # Layer l owns the pages [l * P, (l + 1) * P) of the one buffer: no slice of it is ever
        # taken or put back.
        pages = buffer.shape[0] // len(self._model.layers)
        slots = jnp.where(batch.slots < 0, -1, batch.slots + index * pages * kv.shape[1])
        here = batch._replace(page_table=batch.page_table + index * pages, slots=slots)
        stream, kv = decoder.layer(self._ops.of(self._kind, spec), spec, weights, stream, kv, here)
        return stream, as_buffer(kv, buffer)

    def finish(self, stream: Stream) -> jax.Array:
        """See `Execution`."""
        finished: jax.Array = decoder.finish(
            self._ops[self._kind], self._model, self._weights, stream
        )
        return finished
