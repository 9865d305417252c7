"""Rows that are sorted by expert as blocks, each of one expert: what both frameworks share."""

from __future__ import annotations

from typing import Any

from ..namespaces import device_of


def block_of_rows(rows: int, experts: int) -> int:
    """Rows of a block of one expert: about as many as each would have if all had the same."""
    size = 8
    while size < 128 and size * experts < rows:
        size *= 2
    return size


def experts_of_blocks(xp: Any, group_sizes: Any, rows: int, size: int) -> tuple[Any, Any, Any, Any]:
    """Rows that are sorted by expert, `group_sizes` [expert] int32 of each, as blocks of `size` of
    one expert: (expert [block], first row [block], block of each row [row], whether a row is of
    an expert [row]).

    There are as many blocks as any sizes may need; the last ones may belong to nobody.
    """
    experts = group_sizes.shape[0]
    count = rows // size + min(experts, rows)
    blocks = (group_sizes + (size - 1)) // size
    ends, last = (xp.cumsum(x, 0, dtype=xp.int32) for x in (group_sizes, blocks))
    device = device_of(group_sizes)

    def owner(index: Any, ends: Any) -> Any:
        behind = xp.astype(index[:, None] >= ends[None, :], xp.int32)
        return xp.sum(behind, axis=-1, dtype=xp.int32)

    def at_most(index: Any, most: int) -> Any:
        return xp.where(index < most, index, most)

    block = xp.arange(count, dtype=xp.int32, device=device)
    expert = at_most(owner(block, last), experts - 1)
    begins, before = ends - group_sizes, last - blocks
    first = at_most(begins[expert] + (block - before[expert]) * size, rows)
    row = xp.arange(rows, dtype=xp.int32, device=device)
    whose = owner(row, ends)
    mine = at_most(whose, experts - 1)
    block_of = at_most(before[mine] + (row - begins[mine]) // size, count - 1)
    return expert, first, block_of, whose < experts


def gather_blocks(xp: Any, x: Any, first: Any, size: int) -> Any:
    """Blocks [block size k] of x [row k], from each one's first row [block] on."""
    rows, k = x.shape
    within = xp.arange(size, dtype=xp.int32, device=device_of(first))
    index = xp.reshape(first[:, None] + within[None, :], (-1,))
    # Rows behind the last one are not anybody's: any will do.
    index = xp.where(index < rows, index, rows - 1)
    return xp.reshape(xp.take(x, index, axis=0), (-1, size, k))


def rows_of_blocks(xp: Any, blocks: Any, first: Any, block_of: Any, real: Any) -> Any:
    """Each row [row n] out of its block of [block size n]; 0 where it is of no expert."""
    row = xp.arange(block_of.shape[0], dtype=xp.int32, device=device_of(first))
    return xp.where(real[:, None], blocks[block_of, row - first[block_of]], 0)
