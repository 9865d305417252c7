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
from ..namespaces import device_of, namespace
from ..reference.moe import product_of_expert
from ..reference.narrow import widened_weight
from .experts import experts_of_blocks

PRODUCT_BLOCK = 32
ROW_BLOCK = 16

ByBlock = Callable[..., Any]
"""(run, size, arrays [row ...]) -> `run` of these in blocks of `size` rows, the last one padded."""

PRODUCTS = {
    "linear": ("x",),
    "logits": ("x",),
    "linear_int8": ("x", "x_scale"),
    "linear_fp8": ("x", "x_scale"),
    "lora_shrink": ("x", "index"),
    "lora_expand": ("y", "x", "index"),
}
SUMS = {
    "rms_norm": ("x",),
    "gemma_rms_norm": ("x",),
    "unit_rms_norm": ("x",),
    "gated_rms_norm": ("x", "gate"),
    "layer_norm": ("x",),
    "wide_qk_norm": ("qkv",),
    "qk_mean_squares": ("qkv",),
    "top_logprobs": ("logits", "chosen"),
    "moe_route": ("logits", "slots"),
    "moe_route_sigmoid": ("logits", "slots"),
    "moe_unpermute": ("place", "weights"),
}
"""Ops that sum within a row, by products and else: the arguments that have rows. One of them that
has a single row stands for all.
"""


def register(framework: Framework, by_block: ByBlock, **properties: Any) -> None:
    """Register an implementation of each of them that runs its reference block by block, and those
    of products whose weights are widened, or chosen by row, before that.
    """
    in_blocks: dict[str, Callable[..., Any]] = {
        **{name: partial(_run, name, PRODUCT_BLOCK) for name in PRODUCTS},
        **{name: partial(_run, name, ROW_BLOCK) for name in SUMS},
        "linear_grouped": _linear_grouped,
        "grouped_matmul": _grouped_matmul,
        "grouped_linear": _grouped_linear,
    }
    for name, function in in_blocks.items():
        run = named(REGISTRY[name], partial(function, framework, by_block))
        implement(name, provider=ROWS, framework=framework, row_invariant=True, **properties)(run)


def _run(
    name: str, size: int, framework: Framework, by_block: ByBlock, *args: Any, **kwargs: Any
) -> Any:
    op, xp = REGISTRY[name], namespace(framework)
    given = op.signature.bind(*args, **kwargs).arguments
    first, *others = (PRODUCTS | SUMS)[name]
    count = given[first].shape[0]
    rows = {first: given[first]}
    for other in others:
        if given[other] is not None:
            rows[other] = xp.broadcast_to(given[other], (count, *given[other].shape[1:]))
    fixed = {key: value for key, value in given.items() if key not in rows}

    def run(*arrays: Any) -> Any:
        return op.reference(xp, **dict(zip(rows, arrays, strict=True)), **fixed)

    return by_block(run, size, *rows.values())


def _linear_grouped(
    framework: Framework,
    by_block: ByBlock,
    x: Array,
    weight: Array,
    scale: Array,
    zero: Array | None,
    bias: Array | None,
    kind: str,
) -> Any:
    """See the op: the weight is widened once."""
    xp = namespace(framework)
    wide = xp.astype(widened_weight(xp, weight, scale, zero, kind), x.dtype)
    return _run("linear", PRODUCT_BLOCK, framework, by_block, x, wide, bias)


def _grouped_matmul(
    framework: Framework, by_block: ByBlock, x: Array, weight: Array, group_sizes: Array
) -> Any:
    return _grouped_linear(framework, by_block, x, weight, None, None, None, group_sizes, "")


def _grouped_linear(
    framework: Framework,
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
    xp, (rows, k) = namespace(framework), x.shape
    expert, first, block_of, real = experts_of_blocks(xp, group_sizes, rows, ROW_BLOCK)
    within = xp.arange(ROW_BLOCK, dtype=xp.int32, device=device_of(group_sizes))
    index = first[:, None] + within[None, :]
    # Rows behind the last one are not anybody's: any will do.
    index = xp.reshape(xp.where(index < rows, index, rows - 1), (-1,))
    blocks = xp.reshape(xp.take(x, index, axis=0), (-1, ROW_BLOCK, k))

    def run(block: Any, expert: Any) -> Any:
        def own(weights: Any) -> Any:
            return weights[expert][0]

        y = product_of_expert(xp, block[0], weight, scale, zero, bias, kind, own)
        return xp.astype(y, x.dtype)[None]

    out = by_block(run, 1, blocks, expert)
    row = xp.arange(rows, dtype=xp.int32, device=device_of(group_sizes))
    return xp.where(real[:, None], out[block_of, row - first[block_of]], 0)
