"""The op `paged_attention` by Pallas kernels: `pallas` on a TPU, `pallas_interpret` the same source
interpreted.

`pallas_interpret` is for proving and debugging: it runs anywhere, hundreds of times slower than
native attention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...ops.declare import Array
from ...ops.implement import Refusal, implement
from ...ops.reference.paged import check_reach
from .blocks import BlockSizes, block_sizes
from .cache import LANES, CacheShape, pack_words, slot_form
from .decode import decode_attention
from .mixed import mixed_attention
from .target import (
    answer,
    on_tpu,
    refused_memory,
    refused_scalars,
    refused_size,
    refused_words,
    target_kind,
)


def attend(
    q: jax.Array, kv: jax.Array, page_table: jax.Array, query_start: jax.Array, kv_lens: jax.Array,
    counts: jax.Array,
    scale: float, window: int, soft_cap: float, max_query_len: int, k_scale: jax.Array | None,
    v_scale: jax.Array | None, interpret: Any,
    blocks: Any = None, sinks: jax.Array | None = None, chunk: int = 0,
) -> jax.Array:  # fmt: skip
    """The op, with the block sizes of the device kind (or `blocks`); `interpret` as pallas_call
    takes it.
    """
    check_reach(window, chunk)
    page, kv_heads, hdim = kv.shape[1], kv.shape[2] // 2, kv.shape[3]
    tokens, requests = q.shape[0], page_table.shape[0]
    count, lanes = slot_form(kv_heads, hdim, kv.dtype)
    sizes = blocks or block_sizes("none" if interpret else target_kind(), kv.dtype, kv_heads, hdim)
    rows = kv.reshape(kv.shape[0], page * count, lanes)
    if interpret is not False and interpret is not True:
        rows = pack_words(rows)  # TPU interpret mode cannot look at a cache as words
    by_head = {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    common = {
        "scale": scale, "window": window, "chunk": chunk, "soft_cap": soft_cap,
        "by_head": {name: x for name, x in by_head.items() if x is not None},
        "interpret": interpret, "vmem": sizes.vmem_bytes,
    }  # fmt: skip

    def cache(block: int) -> CacheShape:
        return CacheShape(page, kv_heads, count, lanes, jnp.dtype(kv.dtype), max(1, block // page))

    joint = cache(page).joint
    if joint:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, hdim)))  # 0 where a row holds V
    single = min(requests, tokens)
    lengths = jnp.where(jnp.arange(single, dtype=jnp.int32) < counts[0], kv_lens[:single], 0)
    out = decode_attention(
        q[:single], rows, page_table[:single], lengths, cache=cache(sizes.decode_kv),
        block_requests=min(sizes.decode_requests, single), step=sizes.decode_step, **common,
    )  # fmt: skip
    out = jnp.pad(out, ((0, tokens - single), (0, 0), (0, 0)))
    if max_query_len == 1:
        return out[..., hdim:] if joint else out
    more = mixed_attention(
        q, rows, page_table, query_start, kv_lens, counts, cache=cache(sizes.mixed_kv),
        block_tokens=min(sizes.mixed_tokens, tokens), step=sizes.mixed_step, **common,
    )  # fmt: skip
    decoded = jnp.arange(tokens, dtype=jnp.int32) < counts[0]
    out = jnp.where(decoded[:, None, None], out, more)
    return out[..., hdim:] if joint else out


def takes(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array,
    scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None, chunk: int = 0,
) -> bool | Refusal:  # fmt: skip
    """What the kernels take where they are interpreted."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return Refusal(f"queries are {q.dtype}: float32 or bfloat16 are taken")
    if kv.dtype not in (q.dtype, jnp.int8, jnp.float8_e4m3fn):
        return Refusal(
            f"the cache is {kv.dtype}: {q.dtype} (as the queries are), int8 or float8_e4m3fn are "
            "taken"
        )
    hint = "larger pages (page_size), fewer requests (max_num_seqs) or a smaller max_model_len"
    return answer(
        refused_words(kv, kv.shape[1], "a page"),
        refused_scalars("the page table", hint, *page_table.shape),
    )


def compiles(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array,
    scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None, chunk: int = 0,
) -> bool | Refusal:  # fmt: skip
    """What the kernels take on a TPU."""
    kind = target_kind()
    given = (
        q,
        kv,
        page_table,
        query_start,
        kv_lens,
        counts,
        scale,
        window,
        soft_cap,
        max_query_len,
        k_scale,
        v_scale,
        sinks,
        chunk,
    )
    sizes = block_sizes(kind, kv.dtype, kv.shape[2] // 2, kv.shape[3])
    return answer(
        refused_size(kv),
        refused_memory(kind, vmem_need(sizes, q, kv, max_query_len)),
        takes(*given),
    )


def vmem_need(sizes: BlockSizes, q: Any, kv: Any, max_query_len: int) -> dict[str, int]:
    """Bytes of vector memory of the larger kernel: pages, the state of the softmax, queries and
    results.
    """
    page, kv_heads = kv.shape[1], kv.shape[2] // 2
    rows, lanes = slot_form(kv_heads, kv.shape[3], kv.dtype)
    shape = CacheShape(page, kv_heads, rows, lanes, jnp.dtype(kv.dtype), 1)
    heads, hdim = q.shape[1], -(-shape.hdim // LANES) * LANES

    def need(block: int, states: int, queries: int) -> dict[str, int]:
        slots = max(1, block // page) * page
        return {
            "two blocks of pages": 2
            * slots
            * rows
            * -(-lanes // LANES)
            * LANES
            * jnp.dtype(kv.dtype).itemsize,
            "softmax": states * (2 * LANES + hdim) * 4,
            "queries and results": 4 * queries * heads * hdim * jnp.dtype(q.dtype).itemsize,
        }

    decode = need(sizes.decode_kv, max(heads, 8 * kv_heads), sizes.decode_requests)
    if max_query_len == 1:
        return decode
    tokens = min(sizes.mixed_tokens, q.shape[0])
    return max(
        decode, need(sizes.mixed_kv, tokens * heads, tokens), key=lambda parts: sum(parts.values())
    )


@implement(
    "paged_attention", provider="pallas", framework="jax", supported=on_tpu, supports_args=compiles,
    preferred_on=("tpu",), required_on=("tpu",),
)  # fmt: skip
def paged_attention(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array,
    scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None, chunk: int = 0,
) -> Array:  # fmt: skip
    """See the op."""
    return attend(
        q,
        kv,
        page_table,
        query_start,
        kv_lens,
        counts,
        scale,
        window,
        soft_cap,
        max_query_len,
        k_scale,
        v_scale,
        False,
        sinks=sinks,
        chunk=chunk,
    )


@implement("paged_attention", provider="pallas_interpret", framework="jax", supports_args=takes)
def interpreted_attention(
    q: Array, kv: Array, page_table: Array, query_start: Array, kv_lens: Array, counts: Array,
    scale: float,
    window: int, soft_cap: float, max_query_len: int, k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None, chunk: int = 0,
) -> Array:  # fmt: skip
    """See the op."""
    return attend(
        q,
        kv,
        page_table,
        query_start,
        kv_lens,
        counts,
        scale,
        window,
        soft_cap,
        max_query_len,
        k_scale,
        v_scale,
        True,
        sinks=sinks,
        chunk=chunk,
    )
