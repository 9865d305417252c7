"""Implementations whose rows do not depend on the batch, in plain XLA.

A loop takes the blocks one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..declare import Array
from ..implement import ROWS, implement
from ..namespaces import namespace
from ..reference.paged import check_reach
from .blocks import ROWS_OF_BLOCK, register
from .jax_attention import KV_BLOCK, attend, by_slot

rows = partial(implement, provider=ROWS, framework="jax", row_invariant=True)


def _by_block(run: Callable[..., Any], size: int, *arrays: jax.Array) -> Any:
    """See `blocks.ByBlock`."""
    count = arrays[0].shape[0]
    blocks = -(-count // size)

    def split(x: jax.Array) -> jax.Array:
        wide = jnp.pad(x, ((0, blocks * size - count), *[(0, 0)] * (x.ndim - 1)))
        return wide.reshape(blocks, size, *x.shape[1:])

    out = jax.lax.map(lambda given: run(*given), tuple(split(x) for x in arrays))
    return jax.tree.map(lambda x: x.reshape(blocks * size, *x.shape[2:])[:count], out)


register("jax", namespace("jax"), _by_block)


@rows("paged_attention")
def paged_attention(
    q: Array,
    kv: Array,
    page_table: Array,
    query_start: Array,
    kv_lens: Array,
    counts: Array,
    scale: float,
    window: int,
    soft_cap: float,
    max_query_len: int,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None,
    chunk: int = 0,
) -> Array:
    """See the op: each query for itself, as a request with one, in blocks of slots that begin where
    the position says.
    """
    check_reach(window, chunk)
    block_pages = max(1, KV_BLOCK // kv.shape[1])
    width = -(-page_table.shape[1] // block_pages) * block_pages
    page_table = jnp.pad(page_table, ((0, 0), (0, width - page_table.shape[1])))
    index = jnp.arange(q.shape[0], dtype=jnp.int32)
    live = jnp.arange(kv_lens.shape[0], dtype=jnp.int32) < counts[1]
    behind = (index[:, None] >= query_start[None, 1:]) & live[None, :]
    request = jnp.minimum(behind.sum(1, dtype=jnp.int32), kv_lens.shape[0] - 1)
    real = index < query_start[counts[1]]
    position = kv_lens[request] - query_start[request + 1] + index
    # A length of 0 stands for no query, as padding to whole blocks has it.
    lengths = jnp.where(real, position + 1, 0)
    settings = kv, block_pages, scale, k_scale, v_scale, window, chunk, soft_cap, sinks
    attended = partial(attend, *settings)

    def run(q: jax.Array, request: jax.Array, lengths: jax.Array) -> jax.Array:
        found = attended(q[:, None], page_table[request], lengths[:, None] - 1, lengths)
        return jnp.where((lengths > 0)[:, None, None], found[:, 0], 0)

    out: Array = _by_block(run, ROWS_OF_BLOCK, q, request, lengths)
    return out


@rows("latent_attention")
def latent_attention(
    q: Array,
    rotated: Array,
    cache: Array,
    page_table: Array,
    query_start: Array,
    kv_lens: Array,
    counts: Array,
    scale: float,
    max_query_len: int,
) -> Array:
    """See the op: as `paged_attention` of one head, which is K and V."""
    batch = page_table, query_start, kv_lens, counts
    both = jnp.concatenate([q, rotated], -1)
    found: Array = paged_attention(both, by_slot(cache), *batch, scale, 0, 0.0, max_query_len)
    return found[..., : q.shape[-1]]
