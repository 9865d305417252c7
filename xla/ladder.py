"""All programs of a table: what each is made from, and by what a step looks it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..bucketing import Descriptor, Table
from ..shared.step import PROCESSING, Sampler, processor_layout
from ..shared.step_difference import (
    PICKED,
    diff_layout,
    sampler_size,
    span_layout,
    update_layout,
)
from . import programs
from .programs import Held, Setting, State
from .traced import Program, trace


@dataclass(frozen=True, slots=True)
class Kept:
    """What programs give back changed: the buffers of the cache, the tables of requests, the last
    token of each row, and histories.
    """

    kv: list[torch.Tensor]
    state: State
    last_tokens: torch.Tensor
    histories: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fresh:
    """Makes the other arguments, which no two programs share, on a device."""

    where: torch.device
    width: int
    dtype: torch.dtype

    def ints(self, *shape: int) -> torch.Tensor:
        """Zeros, int32."""
        return torch.zeros(shape, dtype=torch.int32).to(self.where)

    def hidden(self, rows: int) -> torch.Tensor:
        """Hidden states of `rows` tokens."""
        return torch.zeros((rows, self.width), dtype=self.dtype).to(self.where)


@dataclass(frozen=True, slots=True)
class Job:
    """A program to build: `arguments` makes those of a call, of which those at `donated` are
    overwritten.
    """

    name: str
    function: Callable[..., Any]
    held: Held | None
    arguments: Callable[[], tuple[Any, ...]]
    donated: tuple[int, ...] = ()

    def build(self) -> Program:
        """Trace and compile it."""
        return trace(self.name, self.function, self.held, self.arguments(), self.donated)


def jobs(setting: Setting, table: Table, held: Held, kept: Kept, fresh: Fresh) -> dict[Any, Job]:
    """Every program of the table that the demand needs."""
    found: dict[Any, Job] = {}
    for d in table:
        found |= _backbone(setting, table, d, held, kept, fresh)
    found["update"] = Job(
        "update",
        partial(programs.update, setting.shape),
        None,
        lambda: (kept.state, fresh.ints(update_layout().size)),
        (0,),
    )
    if "processed" in setting.demand.samplers:
        found["remember"] = Job(
            "remember",
            partial(programs.remember, setting.shape),
            None,
            lambda: (kept.histories, fresh.ints(span_layout(setting.shape).size)),
            (0,),
        )
    for requests in sorted({sampler_size(d.requests, table.max_requests) for d in table}):
        found |= _samplers(setting, requests, held, kept, fresh)
    return found


def _backbone(
    setting: Setting, table: Table, d: Descriptor, held: Held, kept: Kept, fresh: Fresh
) -> dict[Any, Job]:
    """The backbone, and beside it what takes the rows of prompts whose log-probabilities are
    asked for.
    """

    def step() -> tuple[Any, ...]:
        buffer = fresh.ints(diff_layout(d, setting.shape).size)
        return kept.kv, kept.state, kept.last_tokens, buffer

    # last_tokens is read here and written by the sampler.
    function = partial(programs.backbone, setting, d)
    is_single = table.has_single_tokens(d)
    name = f"backbone_{'single' if is_single else d.kind}_{d.tokens}"
    found: dict[Any, Job] = {d: Job(name, function, held, step, (0, 1))}
    if d.kind == "mixed" and not is_single and setting.demand.prompt_logprobs:
        found["take", d.tokens] = Job(
            f"take_rows_{d.tokens}",
            partial(programs.take_rows, table.max_requests),
            None,
            lambda: (fresh.hidden(d.tokens), fresh.ints(1)),
        )
    return found


def _samplers(
    setting: Setting, requests: int, held: Held, kept: Kept, fresh: Fresh
) -> dict[Any, Job]:
    """What samples for `requests` requests, and what computes their log-probabilities."""

    def given(variant: Sampler) -> tuple[Any, ...]:
        picked = {name: fresh.ints(requests) for name in PICKED}
        rows: tuple[Any, ...] = (
            kept.last_tokens,
            kept.state.parameters,
            fresh.hidden(requests),
            picked,
        )
        if variant not in PROCESSING:
            return rows
        rows += (fresh.ints(processor_layout(requests, setting.shape, variant).size),)
        if variant == "masked":
            return rows
        return *rows, kept.histories, fresh.ints(2, requests)

    found: dict[Any, Job] = {}
    for variant in setting.demand.samplers:
        found[variant, requests] = Job(
            f"sample_{variant}_{requests}",
            partial(programs.sampler, setting, variant, requests),
            held,
            partial(given, variant),
            (0, 5) if variant == "processed" else (0,),
        )
    if setting.demand.logprobs or setting.demand.prompt_logprobs:
        found["logprobs", requests] = Job(
            f"logprobs_{requests}",
            partial(programs.logprobs, setting),
            held,
            lambda: (fresh.hidden(requests), fresh.ints(requests)),
        )
    return found
