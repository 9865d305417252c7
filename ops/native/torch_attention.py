"""KV write and paged attention in plain torch: no kernel, ragged lengths read on the host.

The lengths arrive as CPU tensors (`host_metadata`), so nothing waits for the device. Requests with one query token run
together, the others one after the other in blocks of queries.
"""

from __future__ import annotations

import torch

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from ..reference.quantization import stored

QUERY_BLOCK = 256
MAX_GATHER = 1 << 26
"""Elements of the cache gathered at a time: bounds the memory that a step needs."""


@implement("write_kv", provider="native", framework="torch", inplace=True)
def write_kv(kv: Array, k: Array, v: Array, slots: Array, k_scale: float = 1.0, v_scale: float = 1.0) -> Array:
    """Write the rows of K and V into their slots, in place; rows with slot -1 go to the scratch slot."""
    pages, page_size, heads, size = kv.shape
    xp = namespace("torch")
    rows = torch.stack([stored(xp, k, kv, k_scale), stored(xp, v, kv, v_scale)], dim=2).view(k.shape[0], heads, size)
    target = torch.where(slots < 0, pages * page_size - 1, slots).to(torch.int64)
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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Array:
    """See the op. Scores and softmax in float32, weights not normalised and rounded to q's dtype, one rounding."""
    single, requests = counts.tolist()
    starts, lengths = query_start.tolist(), kv_lens.tolist()
    out = torch.zeros_like(q)
    page_size = kv.shape[1]
    settings = (scale * k_scale, v_scale, window, soft_cap)
    longest = max(lengths[:single], default=1)
    pages = -(-longest // page_size)
    step = max(1, MAX_GATHER // (pages * kv[0].numel()))
    for first in range(0, single, step):
        last = min(single, first + step)
        cache = kv[page_table[first:last, :pages].to(torch.int64)].flatten(1, 2)
        end = kv_lens[first:last].to(q.device, non_blocking=True)
        out[first:last] = _attend(q[first:last, None], cache, end[:, None] - 1, *settings)[:, 0]
    for i in range(single, requests):
        start, stop, length = starts[i], starts[i + 1], lengths[i]
        cache = kv[page_table[i, : -(-length // page_size)].to(torch.int64)].flatten(0, 1)[None, :length]
        for first in range(start, stop, QUERY_BLOCK):
            last = min(stop, first + QUERY_BLOCK)
            position = torch.arange(length - stop + first, length - stop + last, device=q.device)
            seen = cache[:, : length - stop + last]
            out[first:last] = _attend(q[None, first:last], seen, position[None], *settings)[0]
    return out


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    v_scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """q [req n head hdim] at positions [req n] over cache [req slot 2*kvhead hdim], slots from position 0."""
    requests, n, heads, size = q.shape
    kv_heads = cache.shape[2] // 2
    slot = torch.arange(cache.shape[1], device=q.device)
    seen = slot[None, None, :] <= positions[:, :, None]
    if window > 0:
        seen &= slot[None, None, :] > positions[:, :, None] - window
    seen = seen[:, None, None]
    queries = q.view(requests, n, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4).to(torch.float32)
    keys, values = (cache[:, :, j::2].permute(0, 2, 1, 3)[:, :, None].to(torch.float32) for j in (0, 1))
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    weights = weights.to(q.dtype).to(torch.float32)
    # A slot that no query sees can hold anything, NaN included, and 0 * NaN is NaN.
    used = slot[None, :] <= positions.amax(1)[:, None]
    if window > 0:
        used &= slot[None, :] > positions.amin(1)[:, None] - window
    product = torch.matmul(weights, values.masked_fill(~used[:, None, None, :, None], 0.0)) / total * v_scale
    return product.permute(0, 3, 1, 2, 4).reshape(requests, n, heads, size).to(q.dtype)
