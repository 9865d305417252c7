"""The op `paged_attention` by Pallas kernels: `pallas` on a TPU, `pallas_interpret` the same source interpreted.

`pallas_interpret` is for proving and debugging: it runs anywhere, hundreds of times slower than native attention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from ...ops.declare import Array
from ...ops.implement import implement
from .blocks import block_sizes
from .cache import CacheShape, flat_pages, pack_words
from .decode import decode_attention
from .mixed import mixed_attention

SMEM_FOR_TABLES = 512 << 10
"""Bytes: half of a TPU core's scalar memory, which the compiler also needs."""

HEAD_SIZES = (64, 80, 96, 128, 256)
PAGES = (16, 32, 64, 128, 256)


def target_kind() -> str:
    """The kind of device that is lowered for: the abstract mesh's, else the default device's."""
    abstract = get_abstract_mesh().abstract_device
    if abstract is not None:
        return str(abstract.device_kind)
    return str(jax.devices()[0].device_kind)


def on_tpu() -> bool:
    """Whether programs are lowered for a TPU, here or ahead of time."""
    return target_kind().startswith("TPU")


def attend(
    q: jax.Array, kv: jax.Array, page_table: jax.Array, query_start: jax.Array, kv_lens: jax.Array, counts: jax.Array,
    scale: float, window: int, soft_cap: float, max_query_len: int, k_scale: float, v_scale: float, interpret: Any,
    blocks: Any = None,
) -> jax.Array:  # fmt: skip
    """The op, with the block sizes of the device kind (or `blocks`); `interpret` as pallas_call takes it."""
    page, kv_heads, hdim = kv.shape[1], kv.shape[2] // 2, kv.shape[3]
    tokens, requests = q.shape[0], page_table.shape[0]
    sizes = blocks or block_sizes("none" if interpret else target_kind())
    narrow = jnp.dtype(kv.dtype).itemsize == 1
    k_scale, v_scale = (k_scale, v_scale) if narrow else (1.0, 1.0)
    rows = flat_pages(kv)
    if interpret is not False and interpret is not True:
        rows = pack_words(rows)  # TPU interpret mode cannot look at a cache as words
    common = {
        "scale": scale * k_scale, "window": window, "soft_cap": soft_cap, "v_scale": v_scale, "interpret": interpret,
        "vmem": sizes.vmem_bytes,
    }  # fmt: skip

    def cache(block: int) -> CacheShape:
        return CacheShape(page, kv_heads, hdim, jnp.dtype(kv.dtype), max(1, block // page))

    single = min(requests, tokens)
    lengths = jnp.where(jnp.arange(single, dtype=jnp.int32) < counts[0], kv_lens[:single], 0)
    out = decode_attention(
        q[:single], rows, page_table[:single], lengths, cache=cache(sizes.decode_kv),
        block_requests=min(sizes.decode_requests, single), **common,
    )  # fmt: skip
    out = jnp.pad(out, ((0, tokens - single), (0, 0), (0, 0)))
    if max_query_len == 1:
        return out
    more = mixed_attention(
        q, rows, page_table, query_start, kv_lens, counts, cache=cache(sizes.mixed_kv),
        block_tokens=min(sizes.mixed_tokens, tokens), **common,
    )  # fmt: skip
    decoded = jnp.arange(tokens, dtype=jnp.int32) < counts[0]
    return jnp.where(decoded[:, None, None], out, more)


def fits(q: Any, kv: Any, page_table: Any) -> bool:
    """Whether the kernels can be interpreted for these shapes."""
    rows = kv.shape[1] * kv.shape[2]
    known = kv.dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)
    return (
        q.dtype in (jnp.float32, jnp.bfloat16)
        and (kv.dtype == q.dtype or jnp.dtype(kv.dtype).itemsize == 1)
        and known
        and rows % (4 // jnp.dtype(kv.dtype).itemsize) == 0
        and page_table.size * 4 <= SMEM_FOR_TABLES
    )


def compiles(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array, scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: float = 1.0, v_scale: float = 1.0,
) -> bool:  # fmt: skip
    """What the kernels take on a TPU."""
    return fits(q, kv, page_table) and kv.shape[3] in HEAD_SIZES and kv.shape[1] in PAGES


def interprets(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array, scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: float = 1.0, v_scale: float = 1.0,
) -> bool:  # fmt: skip
    """What the kernels take where they are interpreted."""
    return fits(q, kv, page_table)


@implement("paged_attention", provider="pallas", framework="jax", supported=on_tpu, supports_args=compiles)
def paged_attention(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array, scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: float = 1.0, v_scale: float = 1.0,
) -> Array:  # fmt: skip
    """See the op."""
    return attend(
        q, kv, page_table, query_start, kv_lens, counts, scale, window, soft_cap, max_query_len, k_scale, v_scale, False
    )


@implement("paged_attention", provider="pallas_interpret", framework="jax", supports_args=interprets)
def interpreted_attention(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array, scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: float = 1.0, v_scale: float = 1.0,
) -> Array:  # fmt: skip
    """See the op."""
    return attend(
        q, kv, page_table, query_start, kv_lens, counts, scale, window, soft_cap, max_query_len, k_scale, v_scale, True
    )
