"""The layers of a step as JAX runs them: blocks of layers, scanned over stacked weights, on one buffer of caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..bucketing import Descriptor
from ..ops import BoundPlans
from ..shared.models import decoder
from ..shared.models.blocks import Block, cover, single_blocks
from ..shared.models.decoder import Batch, Stream
from ..shared.models.spec import Layer, Model
from .kv_buffer import as_buffer, as_heads

Weights = Mapping[str, Any]


def blocks_of(model: Model, scan: bool) -> tuple[Block, ...]:
    """How the layers of a model are run: in loops, with as few bodies as possible, or all unrolled."""
    return cover(model.layers) if scan else single_blocks(len(model.layers))


class ScannedPass:
    """An `Execution` (shared/models/decoder.py). The cache is the buffer of all layers (kv_buffer.py).

    `weights["blocks"]` has, for each block and each position of its period, weights stacked over the repeats.
    `cache_dtype` and `head_dim` are those of the keys and values that the ops see.
    """

    def __init__(
        self,
        ops: BoundPlans,
        model: Model,
        blocks: Sequence[Block],
        descriptor: Descriptor,
        weights: Weights,
        token_ids: jax.Array,
        batch: Batch,
        head_dim: int,
        cache_dtype: Any,
    ) -> None:
        self._ops, self._model, self._kind = ops, model, descriptor.kind
        self.blocks = blocks
        self._weights, self._token_ids = weights, token_ids
        self._stacked = dict(zip(blocks, weights["blocks"], strict=True))
        self._batch = batch.within(descriptor.max_query_len)
        self._head_dim, self._cache_dtype = head_dim, cache_dtype

    def embed(self) -> Stream:
        """See `Execution`."""
        hidden = decoder.embed(self._ops[self._kind], self._weights, self._token_ids)
        return Stream(hidden, jnp.zeros_like(hidden))

    def layers(
        self, block: Block, stream: Stream, cache: jax.Array, rows: jax.Array | None
    ) -> tuple[Stream, jax.Array]:
        """See `Execution`. Every token is finished: `rows` must be None."""
        specs = self._model.layers[block.first : block.first + block.period]

        def body(carry: Any, repeat: Any) -> tuple[Any, None]:
            stream, cache = carry
            weights, first = repeat
            for position, (spec, of_layer) in enumerate(zip(specs, weights, strict=True)):
                stream, cache = self._layer(spec, of_layer, first + position, stream, cache)
            return (stream, cache), None

        stacked = self._stacked[block]
        if block.repeats == 1:
            only = jax.tree.map(lambda x: x[0], stacked)
            carry, _ = body((stream, cache), (only, block.first))
        else:
            firsts = jnp.asarray(block.layers_at(0), jnp.int32)
            carry, _ = jax.lax.scan(body, (stream, cache), (stacked, firsts))
        stream, cache = carry
        return stream, cache

    def _layer(
        self, spec: Layer, weights: Weights, index: Any, stream: Stream, buffer: jax.Array
    ) -> tuple[Stream, jax.Array]:
        batch, kv = self._batch, as_heads(buffer, self._head_dim, self._cache_dtype)
        # Layer l owns the pages [l * P, (l + 1) * P) of the one buffer: no slice of it is ever taken or put back.
        pages = buffer.shape[0] // len(self._model.layers)
        slots = jnp.where(batch.slots < 0, -1, batch.slots + index * pages * kv.shape[1])
        here = batch._replace(page_table=batch.page_table + index * pages, slots=slots)
        stream, kv = decoder.layer(self._ops.of(self._kind, spec), spec, weights, stream, kv, here)
        return stream, as_buffer(kv, buffer)

    def finish(self, stream: Stream) -> jax.Array:
        """See `Execution`."""
        finished: jax.Array = decoder.finish(self._ops[self._kind], self._model, self._weights, stream)
        return finished
