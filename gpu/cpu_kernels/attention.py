"""norm_rope_write_kv and paged attention by C kernels."""

from __future__ import annotations

import torch
from torch import get_num_threads

from ...ops.declare import Array, OpError, dtype_name
from ...ops.reference.paged import check_reach
from .call import DTYPES, MAX_WIDTH, address, cpu_kernel, dense, kernel


def _takes_cache(x: Array, kv: Array, k_scale: Array | None, v_scale: Array | None) -> bool:
    same = dtype_name(x) in DTYPES and dtype_name(kv) == dtype_name(x)
    return same and k_scale is None and v_scale is None and kv.shape[-1] <= MAX_WIDTH


def _takes_all(
    qkv: Array,
    kv: Array,
    q_weight: Array | None,
    k_weight: Array | None,
    cos: Array,
    sin: Array,
    slots: Array,
    eps: float,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    v_norm: bool = False,
    norm_behind: bool = False,
) -> bool:
    weights = [dtype_name(x) for x in (q_weight, k_weight) if x is not None]
    same = all(name == dtype_name(qkv) for name in weights)
    return same and not norm_behind and _takes_cache(qkv, kv, k_scale, v_scale)


@cpu_kernel("norm_rope_write_kv", supports_args=_takes_all, inplace=True)
def norm_rope_write_kv(
    qkv: Array,
    kv: Array,
    q_weight: Array | None,
    k_weight: Array | None,
    cos: Array,
    sin: Array,
    slots: Array,
    eps: float,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    v_norm: bool = False,
    norm_behind: bool = False,
) -> tuple[Array, Array]:
    """See the op: with the roundings of its finer ops. The cache is written in place."""
    _check(kv)
    kv_heads, size = kv.shape[2] // 2, kv.shape[3]
    qkv, cos, sin, slots = dense(qkv), dense(cos), dense(sin), dense(slots)
    q_weight, k_weight = (None if x is None else dense(x) for x in (q_weight, k_weight))
    tokens, heads = qkv.shape[0], qkv.shape[1] // size - 2 * kv_heads
    q = torch.empty((tokens, heads, size), dtype=qkv.dtype)
    kernel("norm_rope_write_kv", qkv.dtype)(
        qkv.data_ptr(), kv.data_ptr(), address(q_weight), address(k_weight), cos.data_ptr(),
        sin.data_ptr(), slots.data_ptr(), q.data_ptr(), tokens, heads, kv_heads, size,
        cos.shape[1], eps, v_norm, get_num_threads(),
    )  # fmt: skip
    return q, kv


def _takes_attention(
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
) -> bool:
    return _takes_cache(q, kv, k_scale, v_scale)


@cpu_kernel("paged_attention", supports_args=_takes_attention)
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
    """See the op. Each query for itself: the softmax of all its scores, in float32."""
    check_reach(window, chunk)
    _check(kv)
    q, page_table = dense(q), dense(page_table)
    query_start, kv_lens, counts = dense(query_start), dense(kv_lens), dense(counts)
    sinks = None if sinks is None else dense(sinks)
    out = torch.empty_like(q)
    _, page_size, entries, size = kv.shape
    missing = kernel("paged_attention", q.dtype)(
        q.data_ptr(), kv.data_ptr(), page_table.data_ptr(), query_start.data_ptr(),
        kv_lens.data_ptr(), counts.data_ptr(), address(sinks), out.data_ptr(), q.shape[0],
        q.shape[1], entries // 2, size, page_size, page_table.shape[1], window, chunk, scale,
        soft_cap, get_num_threads(),
    )  # fmt: skip
    if missing:
        raise OpError(f"paged_attention: no memory for the scores of {q.shape[0]} tokens")
    return out


def _check(kv: torch.Tensor) -> None:
    if not (kv.is_contiguous() and kv.is_cpu):
        raise OpError(
            f"a KV cache of shape {tuple(kv.shape)} must be contiguous and on the CPU, for C "
            "kernels to read it in place"
        )
