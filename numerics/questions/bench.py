"""A worker under forced tokens: the same requests through any schedule, with the logits of every
token.

The schedules differ in what must not matter: batch, chunks, pages, padding, preemption. All run on
one worker, through the programs that it serves with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from ...bucketing import Table
from ...shared.config import resolve
from ...shared.errors import InternalError
from ...shared.models.caches import layout_of, step_shape
from ...shared.packer import pack
from ...shared.page_groups import PageGroup, longest, pages_for
from ...shared.request import Request
from ...shared.request_table import ScheduledStep
from ...shared.sampling_params import SamplingParams
from ...shared.scheduler import Scheduler
from ...shared.scheduler_config import SchedulerConfig
from ...shared.step import StepInput, batch_layout
from ...shared.worker import Worker, backend_module
from ..faults.engine import EditedSteps
from ..sides.fault import Fault
from ..sides.sampling import sampled_rows
from ..sides.side import start_worker
from ..sides.steps import by_group, forced_steps, owned_rows, real_tokens
from ..sides.subject import Subject, Target

Change = Callable[[StepInput], StepInput]
Value = Callable[[int], np.ndarray | None]
"""What a step gave by row, None where it gave nothing."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How requests run.

    `budget` tokens of a step at most (at least as many as there may be requests), `decoded` tokens
    of a request that are decoded one by one (all but the first at most), `pages` of the cache in
    use; `alone`: one request after the other; `rounds` of the same requests; `large`: the largest
    program only. `change` is done to each step before it runs; such steps have their page tables,
    all others the new pages, as in an engine.
    """

    budget: int | None = None
    decoded: int = 3
    pages: int | None = None
    prefix: bool = False
    alone: bool = False
    rounds: int = 1
    large: bool = False
    change: Change | None = None


@dataclass(slots=True)
class Rows:
    """What a run gave: (request, position) of each row, in the order of computing, and its logits
    [vocab], or the best log-probabilities. `computed` are the keys of all tokens, also of those
    that gave no row.
    """

    keys: list[tuple[int, int]] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    computed: list[tuple[int, int]] = field(default_factory=list)
    preemptions: int = 0
    cached: int = 0
    steps: list[StepInput] = field(default_factory=list)

    def first(self) -> dict[tuple[int, int], np.ndarray]:
        """The first row of each key."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for key, value in zip(self.keys, self.values, strict=True):
            found.setdefault(key, value)
        return found


class Bench:
    """A loaded worker of a target, and the schedules that it can run."""

    def __init__(
        self, subject: Subject, target: Target, lengths: Sequence[int], fault: Fault | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """A cache that holds requests of up to `lengths` tokens at once, in the page groups of an
        engine; `options` are engine options. Raises ConfigError, ModelError, BackendUnavailable.
        """
        device = backend_module(target.backend).find_device(target.device)
        if target.backend == "jax":
            # Few programs: each takes seconds to compile.
            mixed = tuple(sorted({16, subject.most_tokens}))
            options = {"decode_sizes": (subject.max_num_seqs,), "mixed_sizes": mixed} | options
        config = subject.engine_config(target, **options)
        self.subject, self.target = subject, target
        self.config, _ = resolve(config, subject.model, device)
        self.table = self.config.table()
        self.shape = step_shape(subject.model, self.config)
        self.layout = layout_of(subject.model, self.config)
        self.pages = sum(self.pages_of(length) for length in lengths)
        given = subject, target, self.config, self.pages, self.table
        self.worker = start_worker(*given, fault)
        if fault is not None and fault.edit is not None:
            edited = EditedSteps(self.worker, self.layout.groups, fault.edit)
            self.worker = cast(Worker, edited)  # it passes on what it does not define

    def close(self) -> None:
        self.worker.close()

    def pages_of(self, length: int) -> int:
        """The most pages that a request of up to `length` tokens holds at a time, in all groups."""
        tokens = min(length, self.subject.max_model_len)
        return pages_for(self.layout.groups, tokens, self.table.mixed_sizes[-1])

    def _scheduler(self, schedule: Schedule, depth: int = 1) -> Scheduler:
        s, table = self.subject, self.table
        if schedule.large:
            table = Table((), table.mixed_sizes[-1:], table.max_requests)
        config = SchedulerConfig(
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=schedule.budget or table.mixed_sizes[-1],
            max_model_len=s.max_model_len,
            page_size=s.page_size,
            num_pages=schedule.pages or self.pages,
            enable_prefix_caching=schedule.prefix,
            pipeline_depth=depth,
            watermark=0.0,
            groups=self.layout.groups,
        )  # fmt: skip
        return Scheduler(config, table)

    def logits(self, schedule: Schedule, prompts: Sequence[np.ndarray]) -> Rows:
        """The logits of every token, all tokens given."""

        def execute(step: StepInput) -> Value:
            logits = self.worker.logits(step)
            return lambda row: logits[row].copy()

        return self._run(schedule, prompts, execute)

    def outputs(self, schedule: Schedule, prompts: Sequence[np.ndarray]) -> Rows:
        """The best log-probabilities, falling, where tokens are sampled, all tokens given:
        through `execute`.
        """

        def execute(step: StepInput) -> Value:
            found = self.worker.execute(replace(step, logprobs=True)).result().logprobs
            if found is None:
                return lambda row: None
            return {row: found.top[request].copy() for request, row in sampled_rows(step)}.get

        return self._run(schedule, prompts, execute)

    def scrub(self) -> None:
        """Write other tokens over the whole cache, in all layers: what the run before left would
        be right for the next one too.
        """
        step, rng = self._full_step(), np.random.default_rng(11)
        tokens, groups = real_tokens(step), self.layout.groups
        for first in range(0, self.pages * max(group.page_size for group in groups), tokens):
            batch, places = step.batch.copy(), np.arange(first, first + tokens)
            views = batch_layout(step.descriptor, step.shape).views(batch)
            views["token_ids"][:tokens] = rng.integers(0, self.subject.model.vocab_size, tokens)
            for slots, group in zip(by_group(views["slots"], groups), groups, strict=True):
                slots[:tokens] = np.where(places < self.pages * group.page_size, places, -1)
            self.worker.execute(replace(step, batch=batch)).result()

    def _full_step(self) -> StepInput:
        """A step of one request with as many tokens as a step and the cache hold."""
        most, limit = self.table.mixed_sizes[-1], self.subject.max_model_len
        held = longest(self.layout.groups, self.pages, most, limit)
        scheduler = self._scheduler(Schedule())
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        prompt = np.zeros(min(most, held - 1), np.int32)
        scheduler.add(Request("scrub", prompt, params, seed=0))
        scheduled = scheduler.schedule()
        if scheduled is None:
            raise InternalError(f"a request of {len(prompt)} tokens was not scheduled")
        return pack(scheduled, scheduler.table, self.shape, 1, with_page_table=True)

    def _run(
        self, schedule: Schedule, prompts: Sequence[np.ndarray],
        execute: Callable[[StepInput], Value],
    ) -> Rows:  # fmt: skip
        self.scrub()
        scheduler, found = self._scheduler(schedule), Rows()
        everyone = list(range(len(prompts)))
        groups = [[i] for i in everyone] if schedule.alone else [everyone]
        for round_ in range(schedule.rounds):
            for group in groups:
                for i in group:
                    decoded = min(schedule.decoded, len(prompts[i]) - 1)
                    params = SamplingParams(temperature=0.0, max_tokens=decoded, ignore_eos=True)
                    prompt = prompts[i][: len(prompts[i]) - decoded]
                    scheduler.add(Request(f"{i}/{round_}", prompt, params, seed=i))
                self._drain(scheduler, schedule, prompts, execute, found)
        metrics = scheduler.metrics()
        found.preemptions, found.cached = metrics.preemptions, metrics.prefix_hits
        return found

    def _drain(
        self, scheduler: Scheduler, schedule: Schedule, prompts: Sequence[np.ndarray],
        execute: Callable[[StepInput], Value], found: Rows,
    ) -> None:  # fmt: skip
        first_id = len(found.steps) + 1
        for step, owners, scheduled in forced_steps(scheduler, self.shape, prompts, first_id):
            if schedule.change is not None:
                step = schedule.change(step)
                value = execute(step)
            else:
                value = execute(_as_difference(step, scheduled))
            found.steps.append(step)
            for row, key in enumerate(owned_rows(step, owners)):
                found.computed.append(key)
                of_row = value(row)
                if of_row is not None:
                    found.keys.append(key)
                    found.values.append(of_row)

    def generate(self, prompts: Sequence[np.ndarray], depth: int, new_tokens: int = 8) -> Rows:
        """Free running with `depth` steps in flight: the token and the best log-probabilities,
        by request and place.
        """
        self.scrub()
        scheduler, found = self._scheduler(Schedule(), depth), Rows()
        for i, prompt in enumerate(prompts):
            # Every other one draws: the noise must not depend on what is in flight either.
            params = SamplingParams(
                temperature=0.8 * (i % 2), seed=i, max_tokens=new_tokens, ignore_eos=True
            )
            scheduler.add(
                Request(str(i), prompt[: self.subject.max_model_len - new_tokens], params, seed=i)
            )
        in_flight: list[Any] = []
        while True:
            while len(in_flight) < depth and (scheduled := scheduler.schedule()) is not None:
                number = len(found.steps) + 1
                step = pack(scheduled, scheduler.table, self.shape, number, with_page_table=True)
                step = replace(step, logprobs=True)
                found.steps.append(step)
                in_flight.append((scheduled, self.worker.execute(_as_difference(step, scheduled))))
            if not in_flight:
                return found
            scheduled, handle = in_flight.pop(0)
            output = handle.result()
            events = scheduler.update(scheduled, output.tokens)
            for request, token, index in zip(
                events.requests, events.tokens, events.indices, strict=True
            ):
                key = int(request.request_id), int(scheduled.ends[index])
                found.keys.append(key)
                found.values.append(np.append(output.logprobs.top[index], np.float32(token)))


def _as_difference(step: StepInput, scheduled: ScheduledStep) -> StepInput:
    """The step as an engine sends it, with its new pages instead of its page table."""
    return replace(step, page_table=None, new_pages=scheduled.new_pages)


# --- changes of steps
# ------------------------------------------------------------------------------------------------


def permuted_pages(pages: int, groups: Sequence[PageGroup], seed: int) -> Change:
    """Put every page elsewhere: in the slots that are written and in the page table that is read.

    For steps that have their page table.
    """
    places = np.random.default_rng(seed).permutation(pages).astype(np.int32)

    def change(step: StepInput) -> StepInput:
        batch, page_table = step.batch.copy(), step.field("page_table").copy()
        of_requests = by_group(page_table, groups)[:, : int(step.field("counts")[1])]
        of_requests[...] = places[of_requests]
        written = batch_layout(step.descriptor, step.shape).view(batch, "slots")
        for of_group, group in zip(by_group(written, groups), groups, strict=True):
            page, offset = np.divmod(of_group, group.page_size)
            moved = places[page] * group.page_size + offset
            of_group[...] = np.where(of_group >= 0, moved, of_group)
        return replace(step, batch=batch, page_table=page_table)

    return change
