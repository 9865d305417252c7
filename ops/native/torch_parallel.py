"""The sum over shards in torch: what each rank has is gathered, and added up in the order of ranks.

So the sum has the same bits on all ranks, whatever the library that carries it does. The largest of
all shards has them anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..declare import Array
from ..implement import implement
from ..namespaces import namespace
from ..reference.quantization import largest_of_rows, scale_of

XP = namespace("torch")
_group: Any = None
_plans_for_ranks = False
# Its name since torch 2.13.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def use_group(group: Any) -> None:
    """Sum over the ranks of this process group from now on; None: over this process alone."""
    global _group
    _group = group


def group() -> Any:
    """The process group that is summed over, None for this process alone."""
    return _group


def in_group() -> bool:
    """Whether this process is one of several ranks, or chooses for them what they run."""
    return _group is not None or _plans_for_ranks


@contextmanager
def planning_for_ranks() -> Iterator[None]:
    """Have a process that is no rank choose implementations as one."""
    global _plans_for_ranks
    before, _plans_for_ranks = _plans_for_ranks, True
    try:
        yield
    finally:
        _plans_for_ranks = before


def gathered(x: Array) -> Array:
    """What x [...] is on each rank: [rank ...]."""
    if _group is None:
        return x[None]
    ranks = dist.get_world_size(_group)
    found = torch.empty((ranks, *x.shape), dtype=x.dtype, device=x.device)
    _gather(found.view(ranks * x.shape[0], *x.shape[1:]), x, group=_group)
    return found


@implement("all_reduce", provider="native", framework="torch", opaque=True)
def all_reduce(x: Array) -> Array:
    """See the op."""
    first, *others = gathered(x.contiguous())
    total = first.to(torch.promote_types(x.dtype, torch.float32))
    for part in others:
        total = total + part
    return total.to(x.dtype, copy=True)


@implement("token_scales", provider="native", framework="torch", opaque=True)
def token_scales(x: Array, limit: float) -> Array:
    """See the op."""
    return scale_of(XP, gathered(largest_of_rows(XP, x)).amax(0), limit)
