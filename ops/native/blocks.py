"""What the row-invariant implementations of both frameworks share.

The order of a product's sums depends on its shape, and frameworks choose that of other sums by
shape too. Here all that sums has one shape, however many rows there are: rows are padded to blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..choosing import named
from ..declare import REGISTRY
from ..implement import ROWS, Framework, implement
from ..namespaces import namespace

ROW_BLOCK = 32
QUERY_BLOCK = 16

ByBlock = Callable[..., Any]
"""(run, size, arrays [row ...]) -> `run` of these in blocks of `size` rows, the last one padded."""

SUMS = {
    "rms_norm": ("x",),
    "gemma_rms_norm": ("x",),
    "unit_rms_norm": ("x",),
    "layer_norm": ("x",),
    "wide_qk_norm": ("qkv",),
    "qk_mean_squares": ("qkv",),
    "top_logprobs": ("logits", "chosen"),
}
"""Ops that sum within a row: the arguments that have rows."""


def register_sums(framework: Framework, by_block: ByBlock, **properties: Any) -> None:
    """Register an implementation of each of them that runs its reference block by block."""
    for name in SUMS:
        run = named(REGISTRY[name], partial(_run, name, framework, by_block))
        implement(name, provider=ROWS, framework=framework, row_invariant=True, **properties)(run)


def _run(name: str, framework: Framework, by_block: ByBlock, *args: Any, **kwargs: Any) -> Any:
    op, rows, xp = REGISTRY[name], SUMS[name], namespace(framework)
    given = op.signature.bind(*args, **kwargs).arguments
    fixed = {key: value for key, value in given.items() if key not in rows}

    def run(*arrays: Any) -> Any:
        return op.reference(xp, **dict(zip(rows, arrays, strict=True)), **fixed)

    return by_block(run, QUERY_BLOCK, *(given[key] for key in rows))
