"""`plumbing.py` as Triton kernels: one launch for each function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
import triton
import triton.language as tl

from ..shared.models.sampler import OF_THE_OP
from .kernels.launch import power_of_2, supported

__all__ = ["advance", "keep", "processors", "put_pages", "select", "supported"]

Tensor: TypeAlias = torch.Tensor
BLOCK = 128


@triton.jit(do_not_specialize=["count"])
def _put_pages_kernel(pages, index, value, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index + i, mask=i < count, other=0)
    tl.store(pages + place, tl.load(value + i, mask=i < count), mask=i < count)


def put_pages(pages: Tensor, index: Tensor, value: Tensor) -> None:
    """See `plumbing.put_pages`."""
    count = index.shape[0]
    _put_pages_kernel[(triton.cdiv(count, BLOCK),)](pages, index, value, count, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["tokens", "requests", "stride"])
def _select_kernel(
    token_ids, positions, rows, last_tokens, cos, sin, pages, cos_out, sin_out, pages_out, tokens,
    requests, stride,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Grid: a program for each token, then one for each request of each page group, whose tables
    lie `stride` rows behind those of the group before.
    """
    t = tl.program_id(0)
    if t < tokens:
        if tl.load(token_ids + t) < 0:
            tl.store(
                token_ids + t, tl.load(last_tokens + tl.load(rows + tl.minimum(t, requests - 1)))
            )
        h = tl.arange(0, BLOCK_H)
        source = tl.load(positions + t).to(tl.int64) * HALF + h
        target = t.to(tl.int64) * HALF + h
        tl.store(cos_out + target, tl.load(cos + source, mask=h < HALF), mask=h < HALF)
        tl.store(sin_out + target, tl.load(sin + source, mask=h < HALF), mask=h < HALF)
    else:
        request = t - tokens
        group = request // requests
        row = (tl.load(rows + request % requests) + group * stride).to(tl.int64)
        for start in range(0, WIDTH, BLOCK_W):
            p = start + tl.arange(0, BLOCK_W)
            tl.store(
                pages_out + request.to(tl.int64) * WIDTH + p,
                tl.load(pages + row * WIDTH + p, mask=p < WIDTH),
                mask=p < WIDTH,
            )


def select(
    token_ids: Tensor,
    positions: Tensor,
    rows: Tensor,
    last_tokens: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    num_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `plumbing.select`. The ids are written into `token_ids`, so that they are valid ones
    at any time.
    """
    tokens, requests, half, width = token_ids.shape[0], rows.shape[0], cos.shape[1], pages.shape[1]
    cos_out, sin_out = (
        torch.empty((tokens, half), dtype=x.dtype, device=x.device) for x in (cos, sin)
    )
    tables = num_groups * requests
    table = torch.empty((tables, width), dtype=pages.dtype, device=pages.device)
    _select_kernel[(tokens + tables,)](
        token_ids, positions, rows, last_tokens, cos, sin, pages, cos_out, sin_out, table, tokens,
        requests, pages.shape[0] // num_groups,
        HALF=half, BLOCK_H=power_of_2(half), WIDTH=width, BLOCK_W=min(1024, power_of_2(width)),
        num_warps=1,
    )  # fmt: skip
    return token_ids, cos_out, sin_out, table


@triton.jit
def _entry(table, out, r, entry, place, WIDTH: tl.constexpr):
    """Row r of `out` [row WIDTH] is an entry of the table, or -1 where it is none."""
    own = tl.load(
        table + entry.to(tl.int64) * WIDTH + place, mask=(place < WIDTH) & (entry >= 0), other=-1
    )
    tl.store(out + r.to(tl.int64) * WIDTH + place, own, mask=place < WIDTH)


@triton.jit(do_not_specialize=["length"])
def _processors_kernel(
    rows, pending, history_row, bias_row, mask_row, new_column, new_token, last_tokens, histories,
    bias_ids, bias, masks, ids_out, bias_out, masks_out, last_out, length,
    BIASES: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (request, block of entries). Histories are `length` long."""
    r, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    _entry(masks, masks_out, r, tl.load(mask_row + r), place, WORDS)
    if block * BLOCK < BIASES:
        of_bias = tl.load(bias_row + r)
        _entry(bias_ids, ids_out, r, of_bias, place, BIASES)
        _entry(bias, bias_out, r, of_bias, place, BIASES)
    if block == 0:
        row = tl.load(history_row + r)
        column = tl.load(new_column + r)
        is_new = (row >= 0) & (column >= 0) & (column < length)
        target = row.to(tl.int64) * length + column
        tl.store(histories + target, tl.load(new_token + r), mask=is_new)
        known = (tl.load(pending + r) > 0) & (row >= 0)
        last = tl.load(last_tokens + tl.load(rows + r), mask=known, other=-1)
        tl.store(last_out + r, last)


def processors(fields: Mapping[str, Tensor], last_tokens: Tensor) -> dict[str, Tensor]:
    """See `plumbing.processors`."""
    names = (
        "rows", "pending", "history_row", "bias_row", "mask_row", "new_column", "new_token",
    )  # fmt: skip
    histories = fields["histories"]
    tables = tuple(fields[name] for name in ("bias_ids", "bias", "masks"))
    requests, biases, words = tables[0].shape[0], tables[0].shape[1], tables[2].shape[1]
    last = torch.empty_like(fields["rows"])
    made = tuple(torch.empty_like(table) for table in tables)
    _processors_kernel[(requests, triton.cdiv(max(biases, words), 1024))](
        *(fields[name] for name in names), last_tokens, histories, *tables, *made, last,
        histories.shape[1],
        BIASES=biases, WORDS=words, BLOCK=1024,
    )  # fmt: skip
    known = {name: fields[name] for name in OF_THE_OP}
    ids, bias, mask = made
    return known | {
        "bias_ids": ids, "bias": bias, "mask": mask, "history": histories, "last": last,
    }  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _keep_kernel(sampled, sample_rows, last_tokens, tokens, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(sampled + i, mask=i < count)
    row = tl.load(sample_rows + i, mask=i < count, other=0)
    tl.store(last_tokens + row, tl.maximum(token, 0), mask=i < count)
    tl.store(tokens + i, token, mask=i < count)


def keep(sampled: Tensor, sample_rows: Tensor, last_tokens: Tensor, tokens: Tensor) -> None:
    """See `plumbing.keep`."""
    count = sampled.shape[0]
    _keep_kernel[(triton.cdiv(count, BLOCK),)](
        sampled, sample_rows, last_tokens, tokens, count, BLOCK=BLOCK
    )


@triton.jit(do_not_specialize=["requests", "stride"])
def _advance_kernel(
    counts, rows, token_ids, positions, kv_lens, position, slots, pages, requests, stride,
    PAGE_SIZES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PAGE_SIZES: those of all groups as one number, 32 bits for each from the lowest on. A
    start notes launches as text, from which a tuple comes back as a list: another kernel.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < tl.load(counts + 1)
    place = tl.load(positions + i, mask=live, other=0) + 1
    tl.store(positions + i, place, mask=live)
    tl.store(kv_lens + i, tl.load(kv_lens + i, mask=live) + 1, mask=live)
    tl.store(position + i, tl.load(position + i, mask=live) + 1, mask=live)
    row = tl.load(rows + i, mask=live, other=0).to(tl.int64)
    for group in tl.static_range(GROUPS):
        page_size = (PAGE_SIZES >> (32 * group)) & 0xFFFFFFFF
        entry = (row + group * stride) * WIDTH + place // page_size
        page = tl.load(pages + entry, mask=live, other=0)
        slot = page * page_size + place % page_size
        tl.store(slots + group * requests + i, slot, mask=live)
    tl.store(token_ids + i, tl.full([BLOCK], -1, tl.int32), mask=live)


def advance(fields: dict[str, Tensor], pages: Tensor, page_sizes: Sequence[int]) -> None:
    """See `plumbing.advance`."""
    names = ("counts", "rows", "token_ids", "positions", "kv_lens", "position", "slots")
    requests = fields["rows"].shape[0]
    _advance_kernel[(triton.cdiv(requests, BLOCK),)](
        *(fields[name] for name in names), pages, requests, pages.shape[0] // len(page_sizes),
        PAGE_SIZES=sum(size << (32 * i) for i, size in enumerate(page_sizes)),
        GROUPS=len(page_sizes), WIDTH=pages.shape[1], BLOCK=BLOCK,
    )  # fmt: skip
