"""Sums over the ranks of a tensor-parallel model, and the add and norm behind them.

Providers: `peers` sends rows into the memory of the other ranks and adds up what came, in the order
of ranks, in the kernel that adds and norms (`reduce_kernels.py`); `nccl` is the library's sum.
Neither uses multicast. What ranks exchange of the most probable tokens is sent too
(`exchange_kernels.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import triton

from ...ops.declare import Array, dtype_name
from ...ops.implement import implement
from ...ops.namespaces import namespace
from ...ops.native.torch_parallel import group, in_group
from ...ops.reference.quantization import FP8_MAX, largest_of_rows, scale_of
from .exchange_kernels import best_kernel, scales_kernel
from .launch import FLOATS, overlap, power_of_2, processors
from .reduce_kernels import reduce_kernel
from .rows import MAX_WIDTH, fused_add_rms_norm, takes_add_norm

MOST_BYTES = 64 << 20
"""Of the rows that two ranks send each other for a sum."""
AHEAD = 1
"""Rows of a program that are on their way while it adds up one, where it has several."""
EMPTY = 255
"""Of each byte of memory that rows are sent into, until they come."""
BEST_BLOCK = 32
MOST_TOKENS = 1024
"""Of which the ranks exchange the most probable at once."""
MOST_BYTES_AMONG_MORE = 4 << 20
"""Of the rows where there are more ranks, each of which sends to all others: the library's ring
moves less. By reckoning: no more than two GPUs were there to measure it.
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
class Boxes:
    """Memory that peers send so many rows into, at `addresses`."""

    rows: int
    addresses: torch.Tensor
    counts: torch.Tensor
    late: torch.Tensor


@dataclass(frozen=True, slots=True)
class Peers:
    """Memory that the peers write into. It lies outside of all graphs."""

    rank: int
    world: int
    width: int
    dtype: torch.dtype
    held: tuple[Any, ...]
    sums: Boxes
    best: Boxes
    scales: Boxes


_peers: Peers | None = None


def meet_peers(rows: int, width: int, dtype: torch.dtype) -> None:
    """Allocate what the provider `peers` needs for up to so many rows of this width. All ranks call
    it, before anything is captured.
    """
    global _peers
    device = torch.device("cuda", torch.cuda.current_device())
    world = dist.get_world_size(group())
    most = MOST_BYTES if world == 2 else MOST_BYTES_AMONG_MORE
    tokens, rows = rows, max(1, min(rows, most // (width * dtype.itemsize)))
    late = torch.zeros(1, dtype=torch.int32, device=device)
    shared = _Shared(device)
    row = 2 * (world - 1) * width * dtype.itemsize
    sums = Boxes(rows, shared.addresses(rows * row, EMPTY), _zeros(rows, device), late)
    token = 2 * world * 2 * 8
    places = shared.addresses(MOST_TOKENS * token, 0)
    best = Boxes(MOST_TOKENS, places, _zeros(MOST_TOKENS, device), late)
    places = shared.addresses(tokens * 2 * world * 8, 0)
    scales = Boxes(tokens, places, _zeros(tokens, device), late)
    # Nobody sends before all memory is as it has to be.
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1), group=group())
    rank = dist.get_rank(group())
    _peers = Peers(rank, world, width, dtype, tuple(shared.held), sums, best, scales)


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


class _Shared:
    """Allocates memory that the ranks' GPUs share, and holds it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.held: list[Any] = []

    def addresses(self, size: int, value: int) -> torch.Tensor:
        """Where `size` bytes, all of this value, lie on each rank: [rank] int64."""
        import torch.distributed._symmetric_memory as symmetric

        memory = symmetric.empty(size, dtype=torch.uint8, device=self._device)
        memory.fill_(value)
        handle = symmetric.rendezvous(memory, group())
        self.held += memory, handle
        return torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self._device)


def leave_peers() -> None:
    """Give the memory back."""
    global _peers
    _peers = None


def _fits(x: Array) -> Peers | None:
    """The peers' memory, if it takes the rows of x."""
    peers = _peers
    if peers is None or not 0 < x.shape[0] <= peers.sums.rows:
        return None
    return peers if (x.shape[1], x.dtype) == (peers.width, peers.dtype) else None


def _launch(
    peers: Peers, x: Array, residual: Array | None, weight: Array | None, eps: float
) -> None:
    width, rows = power_of_2(peers.width), x.shape[0]
    norm = residual is not None
    tensors = x, residual if norm else x, weight if norm else x
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    boxes = peers.sums
    # All programs run at once: one of 16 warps has room on a processor, or two of 8, whatever their
    # registers.
    few = processors()
    programs, warps = min(rows, few), 16
    if few < rows <= 2 * few:
        programs, warps = rows, 8
    reduce_kernel[(programs,)](
        *tensors, boxes.addresses, boxes.counts, boxes.late, rows, eps, *strides, boxes.rows,
        N=peers.width, BLOCK_N=width, RANK=peers.rank, WORLD=peers.world, NORM=norm,
        AHEAD=0 if rows == programs else AHEAD, num_warps=min(warps, max(1, width // 256)),
        **overlap(early=True),
    )  # fmt: skip


def best_of_peers(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor | None:
    """The most probable tokens [row] of all words, the first of equal ones, from those of each
    shard's words (-1: a logit was not finite) and its logits [row words]. None where there is no
    memory for so many rows.
    """
    peers, rows = _peers, len(tokens)
    if peers is None or rows > peers.best.rows or logits.stride(1) != 1:
        return None
    return _best(peers, tokens, logits)


def _best(peers: Peers, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    rows, words = logits.shape
    boxes, out = peers.best, torch.empty_like(tokens)
    best_kernel[(triton.cdiv(rows, BEST_BLOCK),)](
        tokens, logits, out, boxes.addresses, boxes.counts, boxes.late, rows, words,
        logits.stride(0), boxes.rows, RANK=peers.rank, WORLD=peers.world, BLOCK=BEST_BLOCK,
        num_warps=1, **overlap(early=True),
    )  # fmt: skip
    return out


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


@on_peers("reduce_add_rms_norm", supports_args=takes_add_norm)
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


def _takes_parts(x: Array, limit: float) -> bool:
    return _takes_rows(x)


@on_peers("token_scales", supports_args=_takes_parts, inplace=False)
def token_scales_of_peers(x: Array, limit: float) -> Array:
    """See the op: by one kernel, or by the library where that has no memory for so many rows."""
    peers = _peers
    if peers is None or x.shape[0] > peers.scales.rows or x.stride(1) != 1:
        return token_scales(x, limit)
    return _scales(peers, x, limit)


def _scales(peers: Peers, x: torch.Tensor, limit: float) -> torch.Tensor:
    rows, k = x.shape
    boxes, block_k = peers.scales, power_of_2(k)
    out = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        # All programs run at once, whatever their registers.
        scales_kernel[(min(rows, 2 * processors()),)](
            x, out, boxes.addresses, boxes.counts, boxes.late, rows, x.stride(0), boxes.rows,
            K=k, BLOCK_K=block_k, FP8=limit == FP8_MAX, RANK=peers.rank, WORLD=peers.world,
            PLACES=power_of_2(peers.world), num_warps=min(8, max(1, block_k // 512)),
            **overlap(early=True),
        )  # fmt: skip
    return out


@on_gpus("all_reduce", provider="nccl", preferred_on=("cuda",))
def all_reduce(x: Array) -> Array:
    """See the op: the library's sum, in place."""
    if not x.is_contiguous():
        return x.copy_(all_reduce(x.contiguous()))
    dist.all_reduce(x, group=group())
    return x


@implement(
    "token_scales",
    provider="nccl",
    framework="torch",
    supported=_on_gpus,
    opaque=True,
    preferred_on=("cuda",),
)
def token_scales(x: Array, limit: float) -> Array:
    """See the op: the library finds the largest."""
    xp = namespace("torch")
    largest = largest_of_rows(xp, x)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group())
    return scale_of(xp, largest, limit)


@on_gpus(
    "reduce_add_rms_norm", provider="nccl", supports_args=takes_add_norm, preferred_on=("cuda",)
)
def reduce_add_rms_norm(
    x: Array, residual: Array, weight: Array, eps: float
) -> tuple[Array, Array]:
    """See the op: the library's sum, then one kernel, in place."""
    both: tuple[Array, Array] = fused_add_rms_norm(all_reduce(x), residual, weight, eps)
    return both
