"""KV write and paged attention in plain torch: no kernel, ragged lengths read on the host.

The lengths arrive as CPU tensors (`host_metadata`), so nothing waits for the device. Requests with
one query token run together, the others one after the other in blocks of queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from ..reference.paged import check_reach, oldest_seen
from ..reference.quantization import stored

XP = namespace("torch")
QUERY_BLOCK = 256
MAX_GATHER = 1 << 26
"""Elements of the cache gathered at a time: bounds the memory that a step needs."""


@implement("write_kv", provider="native", framework="torch", inplace=True, row_invariant=True)
def write_kv(
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    """Write the rows of K and V into their slots, in place; rows with slot -1 go to the scratch
    slot.
    """
    pages, page_size, heads, size = kv.shape
    rows = torch.stack([stored(XP, k, kv, k_scale), stored(XP, v, kv, v_scale)], dim=2).view(
        k.shape[0], heads, size
    )
    target = slots.remainder(pages * page_size).to(torch.int64)  # slot -1 is the last one
    flat = kv.view(pages * page_size, heads, size)
    if kv.dtype.itemsize == 1:  # fp8 is copied by nothing but its bytes
        flat, rows = flat.view(torch.uint8), rows.view(torch.uint8)
    flat.index_copy_(0, target, rows)
    return kv


@implement("paged_attention", provider="native", framework="torch", host_metadata=True)
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
    """See the op. Scores and softmax in float32, weights not normalised and rounded to q's
    dtype, one rounding.
    """
    check_reach(window, chunk)
    bounded = window > 0 or chunk > 0
    single, requests = counts.tolist()
    starts, lengths = query_start.tolist(), kv_lens.tolist()
    out = torch.zeros_like(q)
    on_cpu = q.device.type == "cpu" and q.dtype == torch.float32
    attend = _attend_on_cpu if on_cpu and soft_cap == 0 and sinks is None else _attend
    settings = (scale, k_scale, v_scale, soft_cap, sinks)

    # How many slots each request with one query sees.
    reaches = [n - max(0, oldest_seen(n - 1, window, chunk)) for n in lengths[:single]]
    slots = max(reaches, default=1)
    step = max(1, MAX_GATHER // (slots * kv[0, 0].numel()))
    for first in range(0, single, step):
        last = min(single, first + step)
        positions = torch.arange(slots, device=q.device)[None]
        seen = None
        if lengths[first:last] != [slots] * (last - first):
            ends = kv_lens[first:last].to(q.device, torch.int64, non_blocking=True)[:, None]
            if bounded:
                positions = positions + oldest_seen(ends - 1, window, chunk).clamp(min=0)
            seen = (positions < ends)[:, None] if min(reaches[first:last]) < slots else None
            # A slot that is not seen can hold anything, and 0 * NaN is NaN: the last one stands in
            # for it.
            positions = torch.minimum(positions, ends - 1)
        cache = _gather(kv, page_table[first:last], positions)
        out[first:last] = attend(q[first:last, None], cache, seen, *settings)[:, 0]

    for i in range(single, requests):
        start, stop, length = starts[i], starts[i + 1], lengths[i]
        past = length - (stop - start)
        lowest = max(0, oldest_seen(past, window, chunk))
        cache = _gather(
            kv, page_table[i : i + 1], torch.arange(lowest, length, device=q.device)[None]
        )
        for first in range(start, stop, QUERY_BLOCK):
            last = min(stop, first + QUERY_BLOCK)
            position = torch.arange(past + first - start, past + last - start, device=q.device)[
                :, None
            ]
            lowest_seen = max(lowest, oldest_seen(past + first - start, window, chunk))
            highest = past + last - start
            slot = torch.arange(lowest_seen, highest, device=q.device)
            seen = slot <= position
            if bounded:
                seen &= slot >= oldest_seen(position, window, chunk)
            of_block = cache[:, lowest_seen - lowest : highest - lowest]
            out[first:last] = attend(q[None, first:last], of_block, seen[None], *settings)[0]
    return out


@implement("write_latents", provider="native", framework="torch", inplace=True, row_invariant=True)
def write_latents(cache: Array, latents: Array, rotated: Array, slots: Array) -> Array:
    """Write the rows into their slots, in place; rows with slot -1 go to the scratch slot."""
    pages, page_size, copies, size = cache.shape
    rows = torch.cat([latents, rotated], 1)[:, None].expand(-1, copies, -1)
    target = slots.remainder(pages * page_size).to(torch.int64)  # slot -1 is the last one
    cache.view(pages * page_size, copies, size).index_copy_(0, target, rows)
    return cache


@implement("latent_attention", provider="native", framework="torch", host_metadata=True)
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
    both = torch.cat([q, rotated], -1)
    found: Array = paged_attention(both, cache, *batch, scale, 0, 0.0, max_query_len)
    return found[..., : q.shape[-1]].contiguous()


def _gather(kv: torch.Tensor, page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The cache at positions [req or 1, slot] of requests with page_table [req page] -> [req
    slot 2*kvhead hdim].
    """
    pages, page_size, heads, size = kv.shape
    columns, offsets = positions // page_size, positions % page_size
    pages_of = page_table[:, columns[0]] if len(positions) == 1 else page_table.gather(1, columns)
    slots = torch.add(offsets, pages_of, alpha=page_size)
    flat = kv.view(pages * page_size, heads * size)
    if kv.dtype.itemsize == 1:  # fp8 is copied by nothing but its bytes
        flat = flat.view(torch.uint8)
    found = flat.index_select(0, slots.flatten()).view(kv.dtype).view(*slots.shape, heads, size)
    # The one row of a latent is K and V.
    return found.expand(-1, -1, 2, -1) if heads == 1 else found


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [req n head hdim] over cache [req slot 2*kvhead hdim]; seen [req n slot], None: all."""
    requests, n, heads, size = q.shape
    kv_heads = cache.shape[2] // 2
    group = heads // kv_heads
    # The queries of a group of heads are rows of one product; a batched product copies what is not
    # contiguous.
    queries = q.view(requests, n, kv_heads, group, size).permute(0, 2, 3, 1, 4).to(torch.float32)
    queries = queries.reshape(requests, kv_heads, group * n, size)
    keys, values = (
        cache[:, :, j::2].transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        for j in (0, 1)
    )
    scores = (
        torch.matmul(queries, keys.transpose(-1, -2))
        .mul_(scale if k_scale is None else scale * k_scale[:, None, None])
        .view(requests, kv_heads, group, n, -1)
    )
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if seen is not None:
        scores = scores.masked_fill_(~seen[:, None, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks.view(kv_heads, group, 1, 1) - top).exp_()
    weights = weights.to(q.dtype).to(torch.float32).view(requests, kv_heads, group * n, -1)
    product = torch.matmul(weights, values).view(requests, kv_heads, group, n, size) / total
    if v_scale is not None:
        product *= v_scale[:, None, None, None]
    return product.permute(0, 3, 1, 2, 4).reshape(requests, n, heads, size).to(q.dtype)


def _attend_on_cpu(
    q: torch.Tensor,
    cache: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `_attend` without a cap and sinks, in float32, by torch's kernel for CPUs.

    It reads keys and values where they lie; a batched product would first copy each head's. In half
    precision its results lie within the op's bound, but `twinfer numerics` finds pages of the demo
    model that are farther from float64 than roundings where the op says would be.
    """
    requests, n, heads, size = q.shape
    kv_heads = cache.shape[2] // 2
    group = heads // kv_heads
    # The queries of a group of heads stand beside each other, as queries of their one head of keys.
    queries = (
        q.view(requests, n, kv_heads, group, size)
        .transpose(1, 2)
        .reshape(requests, kv_heads, n * group, size)
    )
    if k_scale is not None:
        queries = queries * k_scale[:, None, None]
    keys, values = (cache[:, :, j::2].transpose(1, 2).to(torch.float32) for j in (0, 1))
    mask = None
    if seen is not None:
        mask = torch.zeros(seen.shape, dtype=torch.float32).masked_fill_(~seen, -torch.inf)
        mask = (
            mask[:, None, :, None].expand(-1, -1, -1, group, -1).reshape(requests, 1, n * group, -1)
        )
    mean = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    if v_scale is not None:
        mean = mean * v_scale[:, None, None]
    return (
        mean.view(requests, kv_heads, n, group, size)
        .transpose(1, 2)
        .reshape(requests, n, heads, size)
    )
