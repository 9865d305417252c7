"""Forms of ops in torch whose shapes depend on no data and that write nothing in place, for
compilers that take whole programs: XLA.

The native implementations of torch read ragged lengths on the host and write the cache where it
lies. Here lengths stay on the device, and the cache is a new one: a compiler that is given the old
one writes into its memory.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from ..reference.paged import check_reach, oldest_seen
from ..reference.quantization import stored

XP = namespace("torch")
STATIC = "static"
"""The provider."""
XLA = "xla"
"""The platform whose plans prefer it."""
QUERY_BLOCK = 32
"""Query tokens of one request that attention takes at a time."""

static = partial(implement, provider=STATIC, framework="torch", preferred_on=(XLA,))


@static("linear")
def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """See the op. XLA would round the product before it adds the bias."""
    if bias is None:
        return F.linear(x, weight)
    return (XP.linear_accumulated(x, weight) + XP.accumulate(bias)).to(x.dtype)


@static("write_kv", row_invariant=True)
def write_kv(
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    """See the op; rows with slot -1 go to the scratch slot."""
    pages, page_size, heads, size = kv.shape
    rows = torch.stack([stored(XP, k, kv, k_scale), stored(XP, v, kv, v_scale)], dim=2)
    rows = rows.reshape(k.shape[0], heads, size)
    target = slots.remainder(pages * page_size).to(torch.int64)  # slot -1 is the last one
    flat = _bits(kv).reshape(pages * page_size, heads, size)
    return flat.index_copy(0, target, _bits(rows)).reshape(kv.shape).view(kv.dtype)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a narrow float as integers, anything else as it is.

    XLA's CPU compiler computes such floats in float32: to move some entries of a cache it would
    convert all of it. And torch copies fp8 by nothing but its bytes.
    """
    if not x.is_floating_point() or x.dtype.itemsize > 2:
        return x
    return x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.uint8)


@static("paged_attention")
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
    """See the op. Scores and softmax in float32, weights not normalised and rounded to q's dtype,
    one rounding.

    The queries of each request are cut into blocks. There are at most as many blocks as tokens fill
    and one more for each request, and each reads the whole page table of its request.
    """
    check_reach(window, chunk)
    tokens, heads, size = q.shape
    requests = page_table.shape[0]
    rows = min(QUERY_BLOCK, max(1, max_query_len), tokens)
    blocks = min(tokens, tokens // rows + requests)
    starts = query_start[:-1]
    lengths = query_start[1:] - starts
    ends = torch.cumsum((lengths + (rows - 1)) // rows, 0).to(torch.int32)
    number = torch.arange(blocks, dtype=torch.int32, device=q.device)
    behind = (number[:, None] >= ends[None, :]).to(torch.int32).sum(1)
    request = behind.clamp(max=requests - 1).to(torch.int64)
    first = ends - (lengths + (rows - 1)) // rows
    row = torch.arange(rows, dtype=torch.int32, device=q.device)
    offset = ((number - first[request]) * rows)[:, None] + row[None, :]
    real = (behind[:, None] < requests) & (offset < lengths[request][:, None])
    token = torch.where(real, starts[request][:, None] + offset, 0).to(torch.int64)
    position = (kv_lens[request] - lengths[request])[:, None] + offset
    found = _attend(
        q.index_select(0, token.flatten()).reshape(blocks, rows, heads, size),
        kv, page_table.index_select(0, request), position, real,
        scale, window, chunk, soft_cap, k_scale, v_scale, sinks,
    )  # fmt: skip
    # Where the token of each row stands: its request's first block, and its place behind that.
    place = torch.arange(tokens, dtype=torch.int32, device=q.device)
    owner = (place[:, None] >= query_start[None, 1:]).to(torch.int32).sum(1)
    of_request = owner.clamp(max=requests - 1).to(torch.int64)
    source = first[of_request] * rows + (place - starts[of_request])
    has_one = (owner < requests) & (source >= 0) & (source < blocks * rows)
    rows_of = found.reshape(blocks * rows, heads, size)
    taken = rows_of.index_select(0, torch.where(has_one, source, 0).to(torch.int64))
    return torch.where(has_one[:, None, None], taken, torch.zeros_like(taken))


@static("write_latents", row_invariant=True)
def write_latents(cache: Array, latents: Array, rotated: Array, slots: Array) -> Array:
    """See the op; rows with slot -1 go to the scratch slot."""
    pages, page_size, copies, size = cache.shape
    rows = torch.cat([latents, rotated], 1)[:, None].expand(-1, copies, -1)
    target = slots.remainder(pages * page_size).to(torch.int64)  # slot -1 is the last one
    flat = _bits(cache).reshape(pages * page_size, copies, size)
    return flat.index_copy(0, target, _bits(rows)).reshape(cache.shape).view(cache.dtype)


@static("latent_attention")
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
    position: torch.Tensor,
    real: torch.Tensor,
    scale: float,
    window: int,
    chunk: int,
    soft_cap: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [block row head hdim] at `position` [block row], where `real`, over the pages of each
    block's request [block page].
    """
    blocks, rows, heads, size = q.shape
    _, page_size, held, _ = kv.shape
    kv_heads = max(1, held // 2)
    group = heads // kv_heads
    slots = page_table.shape[1] * page_size
    pages = _bits(kv).index_select(0, page_table.flatten().to(torch.int64))
    # The one row of a latent is K and V.
    sides = min(2, held)
    cache = pages.view(kv.dtype).reshape(blocks, slots, kv_heads, sides, size).to(torch.float32)
    slot = torch.arange(slots, dtype=torch.int32, device=q.device)
    seen = slot <= position[:, :, None]
    seen &= slot >= oldest_seen(position, window, chunk)[:, :, None]
    seen &= real[:, :, None]
    # A slot that is not seen can hold anything, and 0 * NaN is NaN.
    cache = torch.where(seen.any(1)[:, :, None, None, None], cache, 0.0)
    keys, values = (cache[:, :, :, j].permute(0, 2, 1, 3) for j in (0, sides - 1))
    queries = q.to(torch.float32).reshape(blocks, rows, kv_heads, group, size)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(blocks, kv_heads, group * rows, size)
    scores = torch.matmul(queries, keys.transpose(-1, -2)) * scale
    scores = scores.reshape(blocks, kv_heads, group, rows, slots)
    if k_scale is not None:
        scores = scores * k_scale[:, None, None, None]
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    visible = seen[:, None, None]
    lowest = torch.finfo(torch.float32).min
    top = torch.where(visible, scores, lowest).amax(-1, keepdim=True)
    weights = torch.where(visible, torch.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.reshape(1, kv_heads, group, 1, 1) - top)
    rounded = weights.to(q.dtype).to(torch.float32).reshape(blocks, kv_heads, group * rows, slots)
    mean = torch.matmul(rounded, values).reshape(blocks, kv_heads, group, rows, size)
    mean = mean / torch.where(total == 0, 1.0, total)
    if v_scale is not None:
        mean = mean * v_scale[:, None, None, None]
    return mean.permute(0, 3, 1, 2, 4).reshape(blocks, rows, heads, size).to(q.dtype)
