"""The layers of a step as JAX runs them: blocks of layers, scanned over stacked weights, on one
buffer of caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..bucketing import Descriptor
from ..ops import BoundPlans
from ..ops.namespaces.jax_ import InStack, OneOf
from ..shared.models import decoder
from ..shared.models.blocks import Block, cover, single_blocks
from ..shared.models.caches import CacheLayout
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

    whole: Weights
    """[n, ...]: those of experts and of narrow weights, which kernels read in their stacks."""

    def at(self, stacked: Weights, repeat: Any, dealt: Mapping[str, int | None]) -> Weights:
        """The weights of one repeat, whose slice of `self.stacked` is given. `dealt` says which
        dimension of a narrow weight shards deal out.
        """
        return {
            **stacked,
            **{name: OneOf(matrices, repeat) for name, matrices in self.matrices.items()},
            **{n: InStack(stack, repeat, dealt.get(n)) for n, stack in self.whole.items()},
        }


class Places(NamedTuple):
    """Where the layers at one position of a block's period keep their caches, by repeat: indices
    [n], and groups [n] unless all are `group`.
    """

    indices: np.ndarray
    groups: np.ndarray | None
    group: int

    @property
    def scanned(self) -> tuple[np.ndarray, ...]:
        """What a loop over the repeats takes slices of."""
        return (self.indices,) if self.groups is None else (self.indices, self.groups)

    def at(self, slices: tuple[Any, ...]) -> tuple[Any, Any]:
        """(group, index) of one repeat, whose slices are given."""
        return (self.group if self.groups is None else slices[1]), slices[0]


def repeats_in_stacks(stacked: Weights) -> Repeats:
    """Of weights that are stacked over several repeats."""
    whole = [name for name in stacked if _read_in_stack(name, stacked)]
    return Repeats(
        {name: stack for name, stack in stacked.items() if name not in whole},
        {},
        {name: stacked[name] for name in whole},
    )


def _read_in_stack(name: str, weights: Weights) -> bool:
    """Whether a weight goes into nothing but ops that take an `InStack`: that of all experts, or a
    narrow one, which has scales of its own.
    """
    return name.startswith("experts_") or f"{name}_scale" in weights


def repeats_of(layers: Sequence[Weights]) -> Repeats:
    """Of layers whose weights are arrays [1, ...] of their own: vectors are stacked, as copying
    them takes no time.
    """
    # `OneOf` is for `linear` alone: what makes keys and values of latents is cut by head first.
    vectors = [name for name, weight in layers[0].items() if weight.ndim == 2 or name == "kv_b"]
    # Not a set, whose order differs between processes: the program would not be found in a cache.
    matrices = [name for name in layers[0] if name not in vectors]
    return Repeats(
        {name: jnp.concatenate([layer[name] for layer in layers]) for name in vectors},
        {name: tuple(layer[name][0] for layer in layers) for name in matrices},
        {},
    )


class ScannedPass:
    """An `Execution` (shared/models/decoder.py). The cache is the buffer of all layers
    (kv_buffer.py).

    `weights["blocks"]` has, for each block in `stored` and each position of its period, weights
    stacked over the repeats. These blocks are run, or with `scan` loops over layers that are stored
    one by one. `layout` says where the layers keep what, on each of `shards` shards; `cache_dtype`
    is that of the keys and values that the ops see. `dealt` is the dimension of each narrow weight
    that shards deal out. `streams`: keep what is between layers.
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
        layout: CacheLayout,
        shards: int,
        cache_dtype: Any,
        dealt: Mapping[str, int | None],
        streams: bool = False,
    ) -> None:
        self._ops, self._model, self._kind = ops, model, descriptor.kind
        self._kept: list[jax.Array] | None = [] if streams else None
        self.blocks = blocks_of(model, scan)
        self._weights, self._token_ids = weights, token_ids
        if tuple(stored) == self.blocks:
            found = [
                tuple(repeats_in_stacks(stacked) for stacked in block)
                for block in weights["blocks"]
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
        self._layout, self._shards, self._cache_dtype = layout, shards, cache_dtype
        self._dealt = dealt

    def embed(self) -> Stream:
        """See `Execution`."""
        given = self._ops[self._kind], self._model, self._weights, self._token_ids
        hidden = decoder.embed(*given)
        self._batch = self._batch._replace(layer_input=decoder.layer_input(*given, hidden))
        stream = Stream(hidden, jnp.zeros_like(hidden))
        if self._kept is not None:
            self._kept.append(jnp.stack(stream)[None])
        return stream

    @property
    def streams(self) -> jax.Array | None:
        """[layer + 1, 2, T, dim] of a pass that keeps them: before the layers, and behind each."""
        return None if self._kept is None else jnp.concatenate(self._kept)

    def layers(
        self, block: Block, stream: Stream, cache: jax.Array, rows: jax.Array | None
    ) -> tuple[Stream, jax.Array]:
        """See `Execution`. Every token is finished: `rows` must be None."""
        specs = self._model.layers[block.first : block.first + block.period]

        repeats = self._repeats[block]
        places = [self._places(block, position) for position in range(block.period)]

        def body(carry: Any, repeat: Any) -> tuple[Any, tuple[jax.Array, ...]]:
            stream, cache = carry
            passed: list[jax.Array] = []
            slices, place_slices, inputs, number = repeat
            for position, (spec, of_repeats, stacked) in enumerate(
                zip(specs, repeats, slices, strict=True)
            ):
                weights = of_repeats.at(stacked, number, self._dealt)
                place = places[position].at(place_slices[position])
                shape = self._layout.page_shape(block.first + position)
                own = None if inputs is None else inputs[position]
                stream, cache = self._layer(spec, weights, place, shape, own, stream, cache)
                if self._kept is not None:
                    passed.append(jnp.stack(stream))
            return (stream, cache), tuple(passed)

        stacked = tuple(of_repeats.stacked for of_repeats in repeats)
        of_places = tuple(place.scanned for place in places)
        inputs = None
        if self._batch.layer_input is not None:
            inputs = tuple(
                self._batch.layer_input[np.array(block.layers_at(position))]
                for position in range(block.period)
            )
        if block.repeats == 1:
            first = jax.tree.map(lambda x: x[0], (stacked, of_places, inputs))
            carry, passed = body((stream, cache), (*first, 0))
            passed = tuple(x[None] for x in passed)
        else:
            numbers = jnp.arange(block.repeats, dtype=jnp.int32)
            carry, passed = jax.lax.scan(
                body, (stream, cache), (stacked, of_places, inputs, numbers)
            )
        if self._kept is not None:
            # By repeat and position of the period: the order of the layers.
            self._kept.append(jnp.stack(passed, 1).reshape(-1, *passed[0].shape[1:]))
        stream, cache = carry
        return stream, cache

    def _places(self, block: Block, position: int) -> Places:
        found = [self._layout.places[layer] for layer in block.layers_at(position)]
        indices = np.array([place.index for place in found], np.int32)
        groups = np.array([place.group for place in found], np.int32)
        if (groups == groups[0]).all():
            return Places(indices, None, int(groups[0]))
        return Places(indices, groups, 0)

    def _layer(
        self,
        spec: Layer,
        weights: Weights,
        place: tuple[Any, Any],
        page_shape: tuple[int, int, int],
        layer_input: jax.Array | None,
        stream: Stream,
        buffer: jax.Array,
    ) -> tuple[Stream, jax.Array]:
        group, index = place
        batch = self._of_group(group)
        kv = as_heads(buffer, page_shape, self._shards, self._cache_dtype)
        # Layers with index l own the pages [l * P, (l + 1) * P) of the one buffer, each the pages
        # of its group: no slice of it is ever taken or put back.
        pages = buffer.shape[0] // self._layout.stripe
        slots = jnp.where(batch.slots < 0, -1, batch.slots + index * pages * kv.shape[1])
        here = batch._replace(
            page_table=batch.page_table + index * pages, slots=slots, layer_input=layer_input
        )
        stream, kv = decoder.layer(self._ops.of(self._kind, spec), spec, weights, stream, kv, here)
        return stream, as_buffer(kv, buffer, self._shards)

    def _of_group(self, group: Any) -> Batch:
        """What layers of a group read; in a loop the group may be known when it runs only."""
        batch, count = self._batch, len(self._layout.groups)
        if isinstance(group, int):
            return batch.of_group(group, count)
        slots = batch.slots.reshape(count, -1)
        tables = batch.page_table.reshape(count, -1, batch.page_table.shape[1])
        return batch._replace(slots=slots[group], page_table=tables[group])

    def finish(self, stream: Stream) -> jax.Array:
        """See `Execution`."""
        finished: jax.Array = decoder.finish(
            self._ops[self._kind], self._model, self._weights, stream
        )
        return finished
