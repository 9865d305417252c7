"""The row-invariant implementations of both frameworks.

The order of a product's sums depends on its shape, and frameworks choose that of other sums by
shape too. Here all that sums has one shape, however many rows there are: rows are padded to blocks,
and of rows that are sorted by expert each block is one expert's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..choosing import named
from ..declare import REGISTRY, Array
from ..implement import ROWS, Framework, implement
from ..reference.narrow import product_of_expert, widened_weight
from .experts import experts_of_blocks, gather_blocks, rows_of_blocks

ByBlock = Callable[..., Any]
"""(run, size, arrays [row ...]) -> `run` of these in blocks of `size` rows, the last one padded."""

PRODUCT_ROWS = 32
ROWS_OF_BLOCK = 16
IN_BLOCKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "linear": (PRODUCT_ROWS, ("x",)),
    "logits": (PRODUCT_ROWS, ("x",)),
    "to_latents": (PRODUCT_ROWS, ("q",)),
    "from_latents": (PRODUCT_ROWS, ("y",)),
    "linear_int8": (PRODUCT_ROWS, ("x", "x_scale")),
    "linear_fp8": (PRODUCT_ROWS, ("x", "x_scale")),
    "lora_shrink": (PRODUCT_ROWS, ("x", "index")),
    "lora_expand": (PRODUCT_ROWS, ("y", "x", "index")),
    "rms_norm": (ROWS_OF_BLOCK, ("x",)),
    "gemma_rms_norm": (ROWS_OF_BLOCK, ("x",)),
    "unit_rms_norm": (ROWS_OF_BLOCK, ("x",)),
    "gated_rms_norm": (ROWS_OF_BLOCK, ("x", "gate")),
    "layer_norm": (ROWS_OF_BLOCK, ("x",)),
    "wide_qk_norm": (ROWS_OF_BLOCK, ("qkv",)),
    "qk_mean_squares": (ROWS_OF_BLOCK, ("qkv",)),
    "top_logprobs": (ROWS_OF_BLOCK, ("logits", "chosen")),
    "moe_route": (ROWS_OF_BLOCK, ("logits", "slots")),
    "moe_route_sigmoid": (ROWS_OF_BLOCK, ("logits", "slots")),
    "moe_route_biased": (ROWS_OF_BLOCK, ("logits", "slots")),
    "moe_unpermute": (ROWS_OF_BLOCK, ("place", "weights")),
}
"""Ops that sum up within a row: how many rows a block has, and the arguments that have rows. The
first of these has all of them; others may have one row that stands for all.
"""


def register(framework: Framework, xp: Any, by_block: ByBlock, **properties: Any) -> None:
    """Register an implementation of each of them that runs its reference block by block, and those
    of products by weights that are widened first, or are an expert's. `xp` is the namespace that
    multiplies blocks.
    """
    functions: dict[str, Callable[..., Any]] = {
        **{name: partial(_run, name) for name in IN_BLOCKS},
        "linear_grouped": _linear_grouped,
        "grouped_matmul": _grouped_matmul,
        "grouped_linear": _grouped_linear,
    }
    for name, function in functions.items():
        run = named(REGISTRY[name], partial(function, xp, by_block))
        implement(name, provider=ROWS, framework=framework, row_invariant=True, **properties)(run)


def _run(name: str, xp: Any, by_block: ByBlock, *args: Any, **kwargs: Any) -> Any:
    op, (size, names) = REGISTRY[name], IN_BLOCKS[name]
    given = op.signature.bind(*args, **kwargs).arguments
    count = given[names[0]].shape[0]
    rows = {
        name: xp.broadcast_to(given[name], (count, *given[name].shape[1:]))
        for name in names
        if given[name] is not None
    }
    fixed = {name: value for name, value in given.items() if name not in rows}

    def run(*arrays: Any) -> Any:
        return op.reference(xp, **dict(zip(rows, arrays, strict=True)), **fixed)

    return by_block(run, size, *rows.values())


def _linear_grouped(
    xp: Any,
    by_block: ByBlock,
    x: Array,
    weight: Array,
    scale: Array,
    zero: Array | None,
    bias: Array | None,
    kind: str,
) -> Any:
    """See the op: the weight is widened once."""
    wide = xp.astype(widened_weight(xp, weight, scale, zero, kind), x.dtype)
    return _run("linear", xp, by_block, x, wide, bias)


def _grouped_matmul(xp: Any, by_block: ByBlock, x: Array, weight: Array, group_sizes: Array) -> Any:
    return _grouped_linear(xp, by_block, x, weight, None, None, None, group_sizes, "")


def _grouped_linear(
    xp: Any,
    by_block: ByBlock,
    x: Array,
    weight: Array,
    scale: Array | None,
    zero: Array | None,
    bias: Array | None,
    group_sizes: Array,
    kind: str,
) -> Any:
    """See the op: blocks of rows, each of one expert, whose weight alone is read."""
    found = experts_of_blocks(xp, group_sizes, x.shape[0], ROWS_OF_BLOCK)
    expert, first, block_of, real = found
    blocks = gather_blocks(xp, x, first, ROWS_OF_BLOCK)

    def run(block: Any, expert: Any) -> Any:
        def own(weights: Any) -> Any:
            return weights[expert][0]

        y = product_of_expert(xp, block[0], weight, scale, zero, bias, kind, own)
        return xp.astype(y, x.dtype)[None]

    out = by_block(run, 1, blocks, expert)
    return rows_of_blocks(xp, out, first, block_of, real)
