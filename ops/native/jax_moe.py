"""Products of rows with the weights of their experts in plain XLA: work proportional to the rows,
static shapes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from .experts import block_of_rows, experts_of_blocks, rows_of_blocks


@implement("grouped_matmul", provider="native", framework="jax")
def grouped_matmul(x: Array, weight: Array, group_sizes: Array) -> Array:
    """See the op: a loop over blocks of rows, each of one expert, whose weight alone is read."""
    xp, (rows, k) = namespace("jax"), x.shape
    size = block_of_rows(rows, weight.shape[0])
    expert, first, block_of, real = experts_of_blocks(xp, group_sizes, rows, size)
    wide = jnp.pad(x, ((0, size), (0, 0)))

    def run(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        expert, first = block
        of_block = jax.lax.dynamic_slice(wide, (first, 0), (size, k))
        found: jax.Array = xp.linear(of_block, weight[expert], None)
        return found

    out = jax.lax.map(run, (expert, first))
    found: Array = rows_of_blocks(xp, out, first, block_of, real)
    return found
