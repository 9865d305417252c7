"""What a step does around the model: page changes, gathers by row and position, tokens kept, the
next step of a loop.

Here in torch; `step_kernels.py` has the same functions as one kernel each, for GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch

from ..shared.models.sampler import known_processors

Tensor: TypeAlias = torch.Tensor


def plumbing(device: torch.device) -> Any:
    """The module to use on a device: this one, or the kernels."""
    if device.type == "cuda":
        kernels = _kernels()
        if kernels is not None:
            return kernels
    from . import plumbing as here

    return here


def _kernels() -> ModuleType | None:
    try:
        from . import step_kernels
    except ImportError:  # no Triton
        return None
    return step_kernels if step_kernels.supported() else None


def put_pages(pages: Tensor, index: Tensor, value: Tensor) -> None:
    """Write `value` [n] at the flat indices `index` [n] of the page table `pages` [row P]."""
    pages.view(-1)[index] = value


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
    """Token ids [T], cos and sin [T r], page tables [G R, P] of a step, one group's behind
    another's.

    A token id of -1 at index i stands for the last token of request i; it may be replaced in place.
    """
    index = torch.arange(token_ids.shape[0], device=token_ids.device).clamp(max=rows.shape[0] - 1)
    ids = torch.where(token_ids < 0, last_tokens[rows[index]], token_ids)
    if num_groups == 1:
        tables = pages[rows]
    else:
        width = pages.shape[1]
        tables = pages.view(num_groups, -1, width)[:, rows].reshape(-1, width)
    return ids, cos[positions], sin[positions], tables


def processors(fields: Mapping[str, Tensor], last_tokens: Tensor) -> dict[str, Tensor]:
    """See `known_processors`. `histories` [row + 1, H] get what is new to them before: request i
    the token `new_token[i]` at `new_column[i]`, if that is not -1.
    """
    histories, column = fields["histories"], fields["new_column"]
    if histories.shape[1]:
        is_new = (column >= 0) & (fields["history_row"] >= 0)
        row = torch.where(is_new, fields["history_row"], histories.shape[0] - 1)
        histories[row, torch.where(is_new, column, 0)] = fields["new_token"]
    return known_processors(torch.where, fields, last_tokens)


def keep(sampled: Tensor, sample_rows: Tensor, last_tokens: Tensor, tokens: Tensor) -> None:
    """Put `sampled` [R] where the next step finds it (`last_tokens` at `sample_rows` [R]), and into
    `tokens` [R].

    The next step finds token 0 in place of -1 (no token): it may have started before the host ends
    such a request.
    """
    last_tokens[sample_rows] = sampled.clamp(min=0)
    tokens.copy_(sampled)


def advance(fields: dict[str, Tensor], pages: Tensor, page_sizes: Sequence[int]) -> None:
    """Turn the inputs of a decode step into those of the step after it, whose tokens are the ones
    just sampled.

    `pages` [G row, P] are the page tables of all rows, with pages of `page_sizes` tokens by group;
    entries behind counts[1] are padding and stay as they are.
    """
    requests, stride = fields["rows"].shape[0], pages.shape[0] // len(page_sizes)
    live = torch.arange(fields["rows"].shape[0], device=pages.device) < fields["counts"][1]
    for name in ("positions", "kv_lens", "position"):
        fields[name] += live
    place = fields["positions"]
    for group, page_size in enumerate(page_sizes):
        slots = fields["slots"][group * requests : (group + 1) * requests]
        page = pages[fields["rows"] + group * stride, place // page_size]
        slots.copy_(torch.where(live, page * page_size + place % page_size, slots))
    fields["token_ids"].copy_(torch.where(live, -1, fields["token_ids"]))
