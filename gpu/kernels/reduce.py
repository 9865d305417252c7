"""Sums over the ranks of a tensor-parallel model, and the add and norm behind them.

Providers: `peers` reads what the other ranks have written, in the order of ranks, in the kernel
that adds and norms; `nccl` is the library's sum. Neither uses multicast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...ops.declare import Array, dtype_name
from ...ops.implement import implement
from ...ops.native.torch_parallel import group, in_group
from .launch import FLOATS, overlap, power_of_2, processors
from .reduce_kernels import reduce_kernel
from .rows import MAX_WIDTH, _takes_add_norm, fused_add_rms_norm

MOST_BYTES = 64 << 20
"""Of the rows that two ranks sum by reading each other's."""
MOST_BYTES_AMONG_MORE = 4 << 20
"""Of the rows where there are more ranks, each of which reads what all others have: the library's
ring moves less. By reckoning: no more than two GPUs were there to measure it.
"""


def _on_gpus() -> bool:
    """Whether this process is one of several ranks, each with a GPU."""
    return in_group() and torch.cuda.is_available()


def _reaches_peers() -> bool:
    """Whether each of the ranks' GPUs may read what the others hold."""
    if not _on_gpus():
        return False
    own = torch.cuda.current_device()
    others = (i for i in range(torch.cuda.device_count()) if i != own)
    return all(torch.cuda.can_device_access_peer(own, other) for other in others)


on_gpus = partial(implement, framework="torch", supported=_on_gpus, inplace=True, opaque=True)
on_peers = partial(on_gpus, provider="peers", supported=_reaches_peers, preferred_on=("cuda",))


@dataclass(frozen=True, slots=True)
class Peers:
    """Memory that the peers read and write, for `rows` rows. It lies outside of all graphs."""

    rank: int
    world: int
    rows: int
    width: int
    dtype: torch.dtype
    held: tuple[Any, ...]
    buffers: torch.Tensor
    flags: torch.Tensor
    counts: torch.Tensor


_peers: Peers | None = None


def meet_peers(rows: int, width: int, dtype: torch.dtype) -> None:
    """Allocate what the provider `peers` needs for up to so many rows of this width. All ranks call
    it, before anything is captured.
    """
    global _peers
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", torch.cuda.current_device())
    world = dist.get_world_size(group())
    most = MOST_BYTES if world == 2 else MOST_BYTES_AMONG_MORE
    rows = max(1, min(rows, most // (width * dtype.itemsize)))
    held = symmetric.empty(2 * rows * width, dtype=dtype, device=device)
    flags = symmetric.empty(world, dtype=torch.int32, device=device)
    flags.zero_()
    handles = [symmetric.rendezvous(x, group()) for x in (held, flags)]
    buffers, at_flags = (
        torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device) for handle in handles
    )
    counts = torch.zeros(3, dtype=torch.int32, device=device)
    # Nobody signals before all flags are zero.
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1), group=group())
    kept = held, flags, *handles
    _peers = Peers(
        dist.get_rank(group()), world, rows, width, dtype, kept, buffers, at_flags, counts
    )


def leave_peers() -> None:
    """Give the memory back."""
    global _peers
    _peers = None


def _fits(x: Array) -> Peers | None:
    """The peers' memory, if it takes the rows of x."""
    peers = _peers
    if peers is None or not 0 < x.shape[0] <= peers.rows:
        return None
    return peers if (x.shape[1], x.dtype) == (peers.width, peers.dtype) else None


def _launch(
    peers: Peers, x: Array, residual: Array | None, weight: Array | None, eps: float
) -> None:
    width, rows = power_of_2(peers.width), x.shape[0]
    norm, many = residual is not None, rows > processors()
    # All programs run at once: two of 8 warps have room on a processor, whatever their registers.
    reduce_kernel[(min(rows, 2 * processors()) if many else rows,)](
        x, residual if norm else x, weight if norm else x, peers.buffers, peers.flags, peers.counts,
        rows, eps, x.stride(0), 0 if residual is None else residual.stride(0), peers.rows,
        N=peers.width, BLOCK_N=width, RANK=peers.rank, WORLD=peers.world, NORM=norm,
        num_warps=min(8 if many else 16, max(1, width // 256)), **overlap(early=True),
    )  # fmt: skip


def _takes_rows(x: Array) -> bool:
    return dtype_name(x) in FLOATS and x.shape[-1] <= MAX_WIDTH


@on_peers("all_reduce", supports_args=_takes_rows)
def all_reduce_of_peers(x: Array) -> Array:
    """See the op: as many rows as the peers have memory for by one kernel, more of them by
    the library."""
    peers = _fits(x)
    if peers is None or x.stride(1) != 1:
        return all_reduce(x)
    _launch(peers, x, None, None, 0.0)
    return x


@on_peers("reduce_add_rms_norm", supports_args=_takes_add_norm)
def reduce_add_rms_norm_of_peers(
    x: Array, residual: Array, weight: Array, eps: float
) -> tuple[Array, Array]:
    """See the op: as many rows as the peers have memory for by one kernel, more of them by
    the library."""
    peers = _fits(x)
    if peers is None or x.stride(1) != 1 or residual.stride(1) != 1:
        return reduce_add_rms_norm(x, residual, weight, eps)
    _launch(peers, x, residual, weight.contiguous(), eps)
    return x, residual


@on_gpus("all_reduce", provider="nccl", preferred_on=("cuda",))
def all_reduce(x: Array) -> Array:
    """See the op: the library's sum, in place."""
    if not x.is_contiguous():
        return x.copy_(all_reduce(x.contiguous()))
    dist.all_reduce(x, group=group())
    return x


@on_gpus(
    "reduce_add_rms_norm", provider="nccl", supports_args=_takes_add_norm, preferred_on=("cuda",)
)
def reduce_add_rms_norm(
    x: Array, residual: Array, weight: Array, eps: float
) -> tuple[Array, Array]:
    """See the op: the library's sum, then one kernel, in place."""
    both: tuple[Array, Array] = fused_add_rms_norm(all_reduce(x), residual, weight, eps)
    return both
