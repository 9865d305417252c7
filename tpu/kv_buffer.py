"""How the KV cache lies in a device's memory: one buffer for all layers, in one layout that no
program re-lays.

The buffer is [layer * page, slot, word, row, lane]: a slot's entries in the order that the ops
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
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh

from ..shared.config import ResolvedConfig
from ..shared.models.config import ModelConfig
from ..shared.models.placement import local_config
from .kernels.cache import LANES, slot_dims
from .sharding import CACHE, on

ROW_MAJOR = Layout((0, 1, 2, 3, 4))


def buffer(
    model: ModelConfig, config: ResolvedConfig, num_pages: int, dtype: Any, mesh: Mesh
) -> jax.ShapeDtypeStruct:
    """The buffer on `mesh` with a scratch page, its layout pinned where the compiler would
    choose another.
    """
    shards, platform = config.tensor_parallel_size, mesh.devices.flat[0].platform
    pages = model.num_layers * (num_pages + 1), config.page_size
    place: Any = on(mesh, CACHE)
    if not in_words(platform):
        local = local_config(model, shards)
        shape = (*pages, shards * 2 * local.num_kv_heads, local.head_dim)
        return jax.ShapeDtypeStruct(shape, bits_of(dtype), sharding=place)
    words, *tile = local_dims(model, shards, dtype)
    if platform == "tpu":
        place = Format(ROW_MAJOR, place)
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


def as_heads(buffer: jax.Array, head_dim: int, dtype: Any) -> jax.Array:
    """What the ops see of the buffer: [page slot 2*kvhead hdim] of `dtype`. The same entries in
    the same order.
    """
    heads = buffer.reshape(*buffer.shape[:2], -1, head_dim)
    return heads if heads.dtype == dtype else jax.lax.bitcast_convert_type(heads, dtype)


def as_buffer(heads: jax.Array, buffer: jax.Array) -> jax.Array:
    """The inverse of `as_heads`: `heads` in the form of `buffer`."""
    if heads.dtype != buffer.dtype:
        heads = jax.lax.bitcast_convert_type(heads, buffer.dtype)
    return heads.reshape(buffer.shape)


def local_dims(model: ModelConfig, shards: int, dtype: Any) -> tuple[int, int, int]:
    """(words, rows in a word, lanes) of a slot on one shard."""
    local = local_config(model, shards)
    return slot_dims(local.num_kv_heads, local.head_dim, dtype)


def page_bytes(model: ModelConfig, config: ResolvedConfig, dtype: Any) -> int:
    """Bytes of a page over all layers on each device."""
    words, rows, lanes = local_dims(model, config.tensor_parallel_size, dtype)
    if config.platform == "tpu":
        lanes = -(-lanes // LANES) * LANES
    return model.num_layers * config.page_size * words * rows * lanes * jnp.dtype(dtype).itemsize
