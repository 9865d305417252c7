"""How the KV cache lies in a device's memory: one buffer for all layers, in one layout that no
program re-lays.

The buffer is [layer * page, slot, word, row, lane], where layers of different page groups share a
place (`models/caches.py`): a slot's entries in the order that the ops
know, 2*kvhead*hdim, cut into rows of 128 lanes where heads are 64, 128 or 256 wide, and words of as
many rows as fill 32 bits (`kernels.cache.slot_form`). Lanes of a TPU come by 128, so heads of 80
and 96 take the space of 128 there (1.6 and 1.33 times their bytes), and so do those of 64 where a
shard has an odd number of them.

On a CPU a slot is heads, as the ops see it, and narrow floats are held as the unsigned integers of
their bits. XLA's CPU compiler computes bfloat16 in float32: to write one token it would convert the
whole cache there and back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import Mesh

from ..shared.config import ResolvedConfig
from ..shared.models.caches import CacheLayout, layout_of
from ..shared.models.config import ModelConfig
from .kernels.cache import LANES, slot_dims
from .sharding import CACHE, on

ROW_MAJOR = Layout((0, 1, 2, 3, 4))
BY_SLOT = Layout((0, 2, 3, 1, 4))
"""Of latents, of which a slot has one row: slots are a tile's rows, so that none is empty."""
HEADS_BY_SLOT = Layout((0, 2, 1, 3))
"""The same of what the ops see. Loops over layers would choose another one, and copy the cache."""


def buffer(
    model: ModelConfig, config: ResolvedConfig, num_pages: int, dtype: Any, mesh: Mesh
) -> jax.ShapeDtypeStruct:
    """The buffer on `mesh` with a scratch page, its layout pinned where the compiler would
    choose another.
    """
    shards, platform = config.tensor_parallel_size, mesh.devices.flat[0].platform
    layout = layout_of(model, config)
    pages = layout.stripe * (num_pages + 1), layout.groups[0].page_size
    place: Any = on(mesh, CACHE)
    if not in_words(platform):
        spec = layout.specs[0]
        shape = (*pages, shards * spec.rows, spec.head_dim)
        return jax.ShapeDtypeStruct(shape, bits_of(dtype), sharding=place)
    words, *tile = local_dims(layout, dtype)
    if platform == "tpu":
        place = Format(BY_SLOT if layout.specs[0].latent else ROW_MAJOR, place)
    return jax.ShapeDtypeStruct((*pages, shards * words, *tile), dtype, sharding=place)


def in_words(platform: str) -> bool:
    """Whether a slot is held as words of rows of lanes; else it is heads."""
    return platform != "cpu"


def bits_of(dtype: Any) -> Any:
    """The unsigned integer that holds the bits of a float of one or two bytes; other dtypes hold
    themselves.
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(f"uint{8 * dtype.itemsize}")
    return dtype


def as_heads(
    buffer: jax.Array, page_shape: tuple[int, int, int], shards: int, dtype: Any
) -> jax.Array:
    """What the ops see of the buffer: [page slot 2*kvhead hdim] of `dtype`, with pages of
    `page_shape` [slot 2*kvhead hdim] on each of `shards` shards. The same entries in the same
    order.
    """
    slots, rows, head_dim = page_shape
    if slots == buffer.shape[1]:
        heads = buffer.reshape(*buffer.shape[:2], -1, head_dim)
    else:
        heads = _regrouped(buffer, shards, page_shape, shards * rows)
    if rows == shards == 1 and buffer.ndim == len(BY_SLOT.major_to_minor):
        heads = with_layout_constraint(heads, HEADS_BY_SLOT)
    return heads if heads.dtype == dtype else jax.lax.bitcast_convert_type(heads, dtype)


def as_buffer(heads: jax.Array, buffer: jax.Array, shards: int) -> jax.Array:
    """The inverse of `as_heads`: `heads` in the form of `buffer`."""
    if heads.dtype != buffer.dtype:
        heads = jax.lax.bitcast_convert_type(heads, buffer.dtype)
    if heads.shape[2] == shards == 1 and buffer.ndim == len(BY_SLOT.major_to_minor):
        heads = with_layout_constraint(heads, HEADS_BY_SLOT).reshape(buffer.shape)
        return with_layout_constraint(heads, BY_SLOT)
    if heads.shape[1] == buffer.shape[1]:
        return heads.reshape(buffer.shape)
    slots, words, *tile = buffer.shape[1:]
    return _regrouped(heads, shards, (slots, words // shards, *tile), words)


def _regrouped(x: jax.Array, shards: int, page: tuple[int, ...], width: int) -> jax.Array:
    """x [page slot shards*n ...] with pages of `page` on each shard, so of other slots: [page slot
    `width` ...]. Nothing moves between shards.
    """
    pages, slots, _, *rest = x.shape
    apart = x.reshape(pages, slots, shards, -1, *rest).swapaxes(1, 2)
    apart = apart.reshape(pages, shards, *page).swapaxes(1, 2)
    return apart.reshape(pages, page[0], width, *page[2:])


def local_dims(layout: CacheLayout, dtype: Any) -> tuple[int, int, int]:
    """(words, rows in a word, lanes) of a slot of the first group on one shard."""
    spec = layout.specs[0]
    if spec.latent:
        return 1, 1, spec.head_dim
    return slot_dims(spec.kv_heads, spec.head_dim, dtype)


def page_bytes(model: ModelConfig, config: ResolvedConfig, dtype: Any) -> int:
    """Bytes of a page over all layers of a group on each device."""
    layout = layout_of(model, config)
    words, rows, lanes = local_dims(layout, dtype)
    if config.platform == "tpu":
        lanes = -(-lanes // LANES) * LANES
    entries = layout.groups[0].page_size * words * rows * lanes
    return layout.stripe * entries * jnp.dtype(dtype).itemsize
