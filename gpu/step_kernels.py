"""`plumbing.py` by Triton kernels: one launch for each function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
import triton

from ..shared.models.sampler import OF_THE_OP
from .kernels.launch import power_of_2, supported
from .kernels.plumbing_kernels import (
    advance_kernel,
    keep_kernel,
    processors_kernel,
    put_pages_kernel,
    select_kernel,
)

__all__ = ["advance", "keep", "processors", "put_pages", "select", "supported"]

Tensor: TypeAlias = torch.Tensor
BLOCK = 128


def put_pages(pages: Tensor, index: Tensor, value: Tensor) -> None:
    """See `plumbing.put_pages`."""
    count = index.shape[0]
    put_pages_kernel[(triton.cdiv(count, BLOCK),)](pages, index, value, count, BLOCK=BLOCK)


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
    select_kernel[(tokens + tables,)](
        token_ids, positions, rows, last_tokens, cos, sin, pages, cos_out, sin_out, table, tokens,
        requests, pages.shape[0] // num_groups,
        HALF=half, BLOCK_H=power_of_2(half), WIDTH=width, BLOCK_W=min(1024, power_of_2(width)),
        num_warps=1,
    )  # fmt: skip
    return token_ids, cos_out, sin_out, table


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
    processors_kernel[(requests, triton.cdiv(max(biases, words), 1024))](
        *(fields[name] for name in names), last_tokens, histories, *tables, *made, last,
        histories.shape[1],
        BIASES=biases, WORDS=words, BLOCK=1024,
    )  # fmt: skip
    known = {name: fields[name] for name in OF_THE_OP}
    ids, bias, mask = made
    return known | {
        "bias_ids": ids, "bias": bias, "mask": mask, "history": histories, "last": last,
    }  # fmt: skip


def keep(sampled: Tensor, sample_rows: Tensor, last_tokens: Tensor, tokens: Tensor) -> None:
    """See `plumbing.keep`."""
    count = sampled.shape[0]
    keep_kernel[(triton.cdiv(count, BLOCK),)](
        sampled, sample_rows, last_tokens, tokens, count, BLOCK=BLOCK
    )


def advance(fields: dict[str, Tensor], pages: Tensor, page_sizes: Sequence[int]) -> None:
    """See `plumbing.advance`."""
    names = ("counts", "rows", "token_ids", "positions", "kv_lens", "position", "slots")
    requests = fields["rows"].shape[0]
    advance_kernel[(triton.cdiv(requests, BLOCK),)](
        *(fields[name] for name in names), pages, requests, pages.shape[0] // len(page_sizes),
        PAGE_SIZES=sum(size << (32 * i) for i, size in enumerate(page_sizes)),
        GROUPS=len(page_sizes), WIDTH=pages.shape[1], BLOCK=BLOCK,
    )  # fmt: skip
