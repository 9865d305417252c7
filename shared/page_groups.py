"""Page groups: layers that keep the same tokens of a request share a page table. Pure integers.

A model whose layers have windows keeps the last tokens in some layers and all of them in others.
Each group has a page table of its own and takes its pages from the one pool that all groups share;
what a page is in bytes is the same in all of them (`models/caches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Tokens of a page, and how far back a query reads: `window` w > 0 lets position p read
    positions above p - w, 0 all of them.
    """

    page_size: int
    window: int = 0

    def columns_for(self, num_tokens: int) -> int:
        """Columns of a page table that `num_tokens` tokens fill."""
        return -(-num_tokens // self.page_size)

    def first_column(self, position: int) -> int:
        """The first column that a query at `position`, or any later one, reads."""
        return max(0, position - self.window + 1) // self.page_size if self.window else 0

    def first_columns(self, positions: np.ndarray) -> np.ndarray:
        """`first_column` of each position."""
        if not self.window:
            return np.zeros_like(positions)
        first: np.ndarray = np.maximum(positions - (self.window - 1), 0) // self.page_size
        return first

    def most_columns(self, num_tokens: int, chunk: int) -> int:
        """The most pages that a request of `num_tokens` tokens holds at a time, if a step computes
        at most `chunk` of them.
        """
        columns = self.columns_for(num_tokens)
        if not self.window:
            return columns
        return min(columns, self.columns_for(self.window - 1 + chunk) + 1)


def check_groups(groups: Sequence[PageGroup]) -> None:
    """Raise ConfigError unless pages of all groups are multiples of the smallest."""
    if not groups:
        raise ConfigError("groups: got none, allowed is at least one")
    base = base_page(groups)
    for group in groups:
        if base < 1 or group.page_size % base or group.window < 0:
            raise ConfigError(
                f"groups: got pages of {group.page_size} tokens and a window of {group.window}, "
                f"allowed are multiples of {base} and windows of at least 0"
            )


def base_page(groups: Sequence[PageGroup]) -> int:
    """Tokens of the smallest page: what digests of the prefix cache are made of."""
    return min(group.page_size for group in groups)


def common_page(groups: Sequence[PageGroup]) -> int:
    """The fewest tokens that fill whole pages of every group."""
    return lcm(*(group.page_size for group in groups))


def widest(groups: Sequence[PageGroup], num_tokens: int) -> int:
    """Columns of the widest page table that `num_tokens` tokens need."""
    return max(group.columns_for(num_tokens) for group in groups)


def pages_for(groups: Sequence[PageGroup], num_tokens: int, chunk: int) -> int:
    """The most pages that a request of `num_tokens` tokens holds at a time, in all groups."""
    return sum(group.most_columns(num_tokens, chunk) for group in groups)


def longest(groups: Sequence[PageGroup], num_pages: int, chunk: int, limit: int) -> int:
    """Tokens of the longest request, up to `limit`, that `num_pages` pages hold."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if pages_for(groups, middle, chunk) <= num_pages:
            low = middle
        else:
            high = middle - 1
    return low
