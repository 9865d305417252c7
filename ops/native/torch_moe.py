"""Products of rows with the weights of their experts in plain torch: work proportional to the rows,
static shapes.
"""

from __future__ import annotations

import torch

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from .experts import block_of_rows, experts_of_blocks, gather_blocks, rows_of_blocks

XP = namespace("torch")
MAX_GATHER = 1 << 26
"""Entries of weights that are brought together at a time: bounds the memory that a step needs."""


@implement("grouped_matmul", provider="native", framework="torch", sized=True)
def grouped_matmul(x: Array, weight: Array, group_sizes: Array) -> Array:
    """See the op: blocks of rows, each of one expert, as one batch of products."""
    rows = x.shape[0]
    size = block_of_rows(rows, weight.shape[0])
    expert, first, block_of, real = experts_of_blocks(XP, group_sizes, rows, size)
    blocks = gather_blocks(XP, x, first, size)
    some = max(1, MAX_GATHER // (weight.shape[1] * weight.shape[2]))
    parts = [
        torch.bmm(
            XP.accumulate(blocks[at : at + some]), XP.accumulate(weight[expert[at : at + some]]).mT
        )
        for at in range(0, len(expert), some)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    found: Array = rows_of_blocks(XP, out, first, block_of, real).to(x.dtype)
    return found
