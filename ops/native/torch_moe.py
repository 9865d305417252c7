"""Products of rows with the weights of their experts in plain torch: work proportional to the rows,
static shapes.
"""

from __future__ import annotations

import torch

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from .experts import block_of_rows, experts_of_blocks

XP = namespace("torch")
MAX_GATHER = 1 << 26
"""Entries of weights that are brought together at a time: bounds the memory that a step needs."""


@implement("grouped_matmul", provider="native", framework="torch", sized=True)
def grouped_matmul(x: Array, weight: Array, group_sizes: Array) -> Array:
    """See the op: blocks of rows, each of one expert, as one batch of products."""
    rows = x.shape[0]
    size = block_of_rows(rows, weight.shape[0])
    expert, first, block_of, real = experts_of_blocks(XP, group_sizes, rows, size)
    within = torch.arange(size, dtype=torch.int32, device=x.device)
    # Rows behind the last one are not anybody's: any will do.
    blocks = x[(first[:, None] + within).clamp(max=rows - 1)]
    some = max(1, MAX_GATHER // (weight.shape[1] * weight.shape[2]))
    parts = [
        torch.bmm(
            XP.accumulate(blocks[at : at + some]), XP.accumulate(weight[expert[at : at + some]]).mT
        )
        for at in range(0, len(expert), some)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    row = torch.arange(rows, dtype=torch.int32, device=x.device)
    chosen = out[block_of, row - first[block_of]]
    return torch.where(real[:, None], chosen, 0.0).to(x.dtype)
