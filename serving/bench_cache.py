"""Whether the KV cache holds all requests of a batch at once: where it does not, some of them wait
or give their pages back, and there is no step in which all decode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..shared.page_groups import pages_for
from ..shared.request import Request
from ..shared.request_table import ScheduledStep
from ..shared.sampling_params import SamplingParams
from ..shared.scheduler import Scheduler

REMEDY = "ask for fewer or shorter ones, or a larger cache (kv_cache_memory, num_pages)"


@dataclass(frozen=True, slots=True)
class Shortage:
    """A batch that a cache does not hold at once. `tokens` has the longest of its requests."""

    requests: int
    tokens: int
    pages_needed: int
    pages: int

    def __str__(self) -> str:
        return (
            f"{self.requests} requests of {self.tokens} tokens need {self.pages_needed} pages at "
            f"once, the KV cache has {self.pages}"
        )

    def figures(self) -> dict[str, Any]:
        """What stands in the place of figures."""
        return {"left_out": str(self), **asdict(self)}


def find_shortage(scheduler: Scheduler, lengths: Sequence[int], output_len: int) -> Shortage | None:
    """What prompts of `lengths` tokens, each with as many as `output_len` behind it, lack to run at
    once; None if nothing.
    """
    needed = pages_needed(scheduler, lengths, output_len)
    pages = scheduler.config.num_pages
    if needed <= pages:
        return None
    return Shortage(len(lengths), max(lengths) + output_len, needed, pages)


def pages_needed(scheduler: Scheduler, lengths: Sequence[int], output_len: int) -> int:
    """The most pages that such requests hold, and those that `scheduler` keeps free to start one
    beside others.

    They are scheduled once, without a device, by a scheduler that has pages enough.
    """
    config = scheduler.config
    rehearsal = Scheduler(
        replace(
            config,
            max_num_seqs=len(lengths),
            num_pages=sum(
                pages_for(scheduler.groups, length + output_len, config.max_num_batched_tokens)
                for length in lengths
            ),
            watermark=0.0,
            enable_prefix_caching=False,  # the prompts here are alike, those of a run are not
            drafts=None,  # guesses take pages that nobody needs
        ),
        scheduler.programs,
    )
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    for index, length in enumerate(lengths):
        rehearsal.add(Request(str(index), np.zeros(length, np.int32), params, seed=0))
    most, in_flight = 0, deque[ScheduledStep]()
    while rehearsal.has_work:
        if step := rehearsal.schedule():
            in_flight.append(step)
            most = max(most, rehearsal.kv.num_held)
        else:
            step = in_flight.popleft()
            tokens = np.zeros((step.num_iterations, len(lengths)), np.int32)
            rehearsal.update(step, tokens if step.loop else tokens[0])
    return most + (scheduler.reserve if len(lengths) > 1 else 0)
