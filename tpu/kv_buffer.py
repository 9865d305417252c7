"""How the KV cache lies in a device's memory: one buffer for all layers, in one layout that no program re-lays.

The buffer is [layer * page, slot, word, row, lane]: a slot's entries in the order that the ops know, 2*kvhead*hdim, cut
into rows of 128 lanes where heads are 64, 128 or 256 wide, and words of as many rows as fill 32 bits
(`kernels.cache.slot_form`). Lanes of a TPU come by 128, so heads of 80 and 96 take the space of 128 there (1.6 and 1.33
times their bytes), and so do those of 64 where a shard has an odd number of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh

from ..shared.config import ResolvedConfig
from ..shared.models.config import ModelConfig
from .kernels.cache import LANES, slot_dims
from .sharding import CACHE, local_config, on

ROW_MAJOR = Layout((0, 1, 2, 3, 4))


def buffer(model: ModelConfig, config: ResolvedConfig, num_pages: int, dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The buffer on `mesh` with a scratch page, its layout pinned where the compiler would choose another."""
    shards = config.tensor_parallel_size
    words, *tile = local_dims(model, shards, dtype)
    shape = (model.num_layers * (num_pages + 1), config.page_size, shards * words, *tile)
    place: Any = on(mesh, CACHE)
    if mesh.devices.flat[0].platform == "tpu":
        place = Format(ROW_MAJOR, place)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


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
