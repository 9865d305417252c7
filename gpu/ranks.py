"""What the ranks of a tensor-parallel worker exchange beside the sums in their layers: logits,
tokens, and what they agree on at start.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..ops.native import torch_parallel
from ..shared.models.sharding import rows_to_sample
from ..shared.models.spec import Shard
from ..shared.waiting import waiting

PATIENCE = timedelta(seconds=600)
"""How long a collective waits for a rank. Whoever started the ranks ends them sooner."""


def join(shard: Shard, meeting: str, platform: str) -> None:
    """Make this process one of the ranks that meet there: at `file://PATH` in a folder that only
    its owner may enter, or at `tcp://HOST:PORT` of the first. Ranks on a GPU have chosen theirs
    before.
    """
    backend = "cpu:gloo,cuda:nccl" if platform == "cuda" else "gloo"
    with waiting(
        lambda: f"the {shard.count} ranks to meet at {meeting}, as rank {shard.index}",
        PATIENCE.total_seconds(),
    ):
        dist.init_process_group(
            backend,
            init_method=meeting,
            rank=shard.index,
            world_size=shard.count,
            timeout=PATIENCE,
            device_id=(
                torch.device("cuda", torch.cuda.current_device()) if platform == "cuda" else None
            ),
        )
    torch_parallel.use_group(dist.group.WORLD)


def leave() -> None:
    """Be one process again."""
    torch_parallel.use_group(None)
    dist.destroy_process_group()


def shard_here() -> Shard | None:
    """The shard that this process runs, None if it runs whole models."""
    group = torch_parallel.group()
    return None if group is None else Shard(dist.get_rank(group), dist.get_world_size(group))


class Ranks:
    """The exchanges of a shard's samplers. `words`: the size of the whole vocabulary."""

    def __init__(self, shard: Shard, words: int) -> None:
        self._shard, self._words = shard, words
        self.deals_out_evenly = words % shard.count == 0
        self.best_of_peers: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = (
            None
        )
        """`best` by one kernel, None of more rows than it takes; where the GPUs reach each
        other's memory.
        """

    def all_words(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [row vocab] from those of each shard's words [row words]."""
        return self._in_order(torch_parallel.gathered(logits.contiguous()))

    def share(self, logits: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Logits [k vocab] of the rows that this shard samples, and which rows they are."""
        rows = len(logits)
        count = rows_to_sample(rows, self._shard)
        if count == rows:
            return self.all_words(logits), slice(0, rows)
        parts = torch.empty_like(logits)
        dist.all_to_all_single(parts, logits.contiguous(), group=torch_parallel.group())
        first = self._shard.index * count
        of_shards = parts.view(self._shard.count, count, -1)
        return self._in_order(of_shards), slice(first, first + count)

    def all_tokens(self, tokens: torch.Tensor, rows: int) -> torch.Tensor:
        """Tokens [row] from those of the rows that each shard has sampled."""
        return tokens if len(tokens) == rows else torch_parallel.gathered(tokens).view(rows)

    def best(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The most probable tokens [row] of all words, the first of equal ones, from those of each
        shard's words (-1: a logit was not finite) and its logits [row words].
        """
        if self.best_of_peers is not None:
            found = self.best_of_peers(tokens, logits)
            if found is not None:
                return found
        # A start runs this without the kernels that are not compiled yet: tokens are anything then.
        place = tokens.clamp(0, logits.shape[1] - 1).long()
        value = logits.gather(1, place[:, None])[:, 0]
        first = self._shard.index * logits.shape[1]
        word = torch.where(tokens < 0, -1, tokens + first)
        both = torch.stack((value.view(torch.int32), word))
        values, words = torch_parallel.gathered(both).unbind(1)
        best_value, best = values[0].view(torch.float32), words[0]
        failed = best < 0
        for other, candidate in zip(values[1:].unbind(), words[1:].unbind(), strict=True):
            better = other.view(torch.float32) > best_value
            best_value = torch.where(better, other.view(torch.float32), best_value)
            best = torch.where(better, candidate, best)
            failed = failed | (candidate < 0)
        return torch.where(failed, -1, best)

    def _in_order(self, parts: torch.Tensor) -> torch.Tensor:
        """[shard row words] as [row vocab], without the words that are padding."""
        whole = parts.transpose(0, 1).reshape(parts.shape[1], -1)
        return whole if whole.shape[1] == self._words else whole[:, : self._words].contiguous()


def least(value: int) -> int:
    """The least of what all ranks say, on each of them: a rank that decided for itself which
    programs it runs would wait for the others for ever.
    """
    if torch_parallel.group() is None:
        return value
    held = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return int(held)
