"""Implementations whose rows do not depend on the batch, in plain torch.

Attention takes rows in blocks, too, and slots in blocks that begin where the position says, not
where a request does. What a block adds to a row that sees none of it is an exact zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..declare import Array
from ..implement import ROWS, implement
from ..namespaces.torch_ import TorchNamespace
from ..reference.paged import check_reach, oldest_seen
from .blocks import ROWS_OF_BLOCK, register

SLOT_BLOCK = 128
ALIGNED = 64
"""Bytes. In which order a library sums up a row depends on where the row begins, too."""

rows = partial(implement, provider=ROWS, framework="torch", row_invariant=True, sized=True)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x with zeros behind its last axis, so that each row begins where the first one would."""
    missing = -x.shape[-1] % (ALIGNED // x.dtype.itemsize)
    return F.pad(x, (0, missing)) if missing else x


def _rows_to_sum(x: torch.Tensor, axis: int) -> torch.Tensor:
    """x as it is summed up over an axis: rows that lie behind one another are aligned. torch's sums
    on GPUs read 16 bytes at a time, and what lies before the first such place by itself.
    """
    in_rows = axis % x.ndim == x.ndim - 1 and x.is_floating_point()
    return _aligned(x.contiguous()) if in_rows else x


class AlignedNamespace(TorchNamespace):
    """torch, with the rows of products and sums aligned."""

    def sum(self, x: torch.Tensor, *, axis: int, **how: Any) -> torch.Tensor:
        """See the Array API."""
        found: torch.Tensor = super().__getattr__("sum")(_rows_to_sum(x, axis), axis=axis, **how)
        return found

    def mean(self, x: torch.Tensor, *, axis: int, **how: Any) -> torch.Tensor:
        """See the Array API."""
        return self.sum(x, axis=axis, **how) / x.shape[axis]

    def linear_accumulated(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [..., k] by w [n, k] in the accumulation dtype."""
        return super().linear_accumulated(_aligned(x), _aligned(w))

    def head_linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [tok head k] by w [head n k], rounded once."""
        return super().head_linear(_aligned(x), _aligned(w))

    @staticmethod
    def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., k] by w [n, k] plus bias, rounded once."""
        return TorchNamespace.linear(_aligned(x), _aligned(w), bias)


def _by_block(run: Callable[..., Any], size: int, *arrays: torch.Tensor) -> Any:
    """See `blocks.ByBlock`."""
    count = len(arrays[0])
    missing = -count % size if count else size
    padded = [F.pad(x.contiguous(), (0, 0) * (x.ndim - 1) + (0, missing)) for x in arrays]
    found = [run(*parts) for parts in zip(*(x.split(size) for x in padded), strict=True)]
    if isinstance(found[0], tuple):
        return tuple(torch.cat(each)[:count] for each in zip(*found, strict=True))
    return torch.cat(found)[:count]


register("torch", AlignedNamespace(), _by_block, sized=True)


@rows("paged_attention", host_metadata=True)
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
    """See the op. Each query for itself, by an online softmax over blocks of slots; scores and
    softmax in float32, weights rounded to q's dtype, one rounding at the end.
    """
    check_reach(window, chunk)
    requests = int(counts[1])
    lengths = query_start[1 : requests + 1] - query_start[:requests]
    request = torch.repeat_interleave(torch.arange(requests), lengths.to(torch.int64))
    index = torch.arange(len(request))
    past = (kv_lens[:requests] - query_start[1 : requests + 1]).to(torch.int64)
    position = past[request] + index
    settings = window, chunk, scale, soft_cap, k_scale, v_scale, sinks
    out = torch.zeros_like(q)
    for first in range(0, len(request), ROWS_OF_BLOCK):
        block = slice(first, first + ROWS_OF_BLOCK)
        missing = ROWS_OF_BLOCK - len(request[block])
        queries = F.pad(q[block][: ROWS_OF_BLOCK - missing], (0, 0, 0, 0, 0, missing))
        of_request = F.pad(request[block], (0, missing)).to(q.device)
        places = F.pad(position[block], (0, missing), value=-1)
        found = _attend(queries, kv, page_table[of_request], places, *settings)
        out[first : first + ROWS_OF_BLOCK - missing] = found[: ROWS_OF_BLOCK - missing]
    return out


@rows("latent_attention", host_metadata=True)
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


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    window: int,
    chunk: int,
    scale: float,
    soft_cap: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [row head hdim] at `positions` [row] (on the host; -1: no query) of requests with
    page_table [row page].
    """
    count, heads, size = q.shape
    kv_heads = max(1, kv.shape[2] // 2)
    group = heads // kv_heads
    oldest = oldest_seen(positions, window, chunk).clamp(min=0)
    real = positions >= 0
    begin, end = int(oldest[real].min()), int(positions.max()) + 1
    first_seen, last_seen = oldest.to(q.device)[:, None], positions.to(q.device)[:, None]
    queries = _aligned(q.view(count, kv_heads, group, size).to(torch.float32))
    factor = scale if k_scale is None else scale * k_scale[:, None, None]
    shape = (count, kv_heads, group)
    maximum = torch.full((*shape, 1), torch.finfo(torch.float32).min, device=q.device)
    total = torch.zeros((*shape, 1), device=q.device)
    mean = torch.zeros((*shape, queries.shape[-1]), device=q.device)
    for block in range(begin // SLOT_BLOCK, -(-end // SLOT_BLOCK)):
        slot = torch.arange(block * SLOT_BLOCK, (block + 1) * SLOT_BLOCK, device=q.device)[None]
        seen = (slot <= last_seen) & (slot >= first_seen)
        cache = _aligned(_gather(kv, page_table, slot, seen))
        keys, values = (cache[:, :, j::2].transpose(1, 2).contiguous() for j in (0, 1))
        scores = torch.matmul(queries, keys.transpose(-1, -2)) * factor
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        visible = seen[:, None, None]
        higher = scores.masked_fill(~visible, torch.finfo(torch.float32).min).amax(-1, True)
        higher = torch.maximum(maximum, higher)
        weights = torch.where(visible, torch.exp(scores - higher), 0.0)
        decay = torch.exp(maximum - higher)
        total = total * decay + weights.sum(-1, keepdim=True)
        mean = mean * decay + torch.matmul(weights.to(q.dtype).to(torch.float32), values)
        maximum = higher
    if sinks is not None:
        total = total + torch.exp(sinks.view(1, kv_heads, group, 1) - maximum)
    mean = mean / torch.where(total == 0, 1.0, total)
    mean = mean[..., :size]
    if v_scale is not None:
        mean = mean * v_scale[:, None, None]
    return mean.reshape(count, heads, size).to(q.dtype)


def _gather(
    kv: torch.Tensor, page_table: torch.Tensor, slot: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """The cache at `slot` [1, slot] of rows with page_table [row page], 0 where a row does not see
    it: float32 [row slot 2*kvhead hdim].
    """
    pages, page_size, heads, size = kv.shape
    columns = (slot // page_size).clamp(max=page_table.shape[1] - 1)[0]
    index = page_table[:, columns].to(torch.int64) * page_size + slot % page_size
    flat = kv.view(pages * page_size, heads * size)
    if kv.dtype.itemsize == 1:  # fp8 is copied by nothing but its bytes
        flat = flat.view(torch.uint8)
    index = torch.where(seen, index, pages * page_size - 1)
    found = flat.index_select(0, index.flatten()).view(kv.dtype).view(*index.shape, heads, size)
    # The one row of a latent is K and V.
    found = found.expand(-1, -1, 2, -1) if heads == 1 else found
    # A slot that is not seen can hold anything, and 0 * NaN is NaN.
    return torch.where(seen[:, :, None, None], found.to(torch.float32), 0.0)
