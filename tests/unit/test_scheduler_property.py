"""Random schedules against a model whose every token depends on all it should have read, and on
nothing else.

The mock worker has some layers of paged keys and values, two for each page group. What a layer
stores at a position is a hash of everything that the layer below let that position read, through
the page table of its group: all tokens, or the last ones of a window; so that a wrong
page, a stale one, one shared under another prefix or an order of steps that is off by one changes
every later token. It reads the `StepInput` and its own memory only, to which its page tables
belong: they are made of the differences that steps bring. The expected tokens come from the same
hashes over a plain list of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, event, find, given, settings
from hypothesis import strategies as st

from twinfer.bucketing import Table, decode_ladder, mixed_ladder
from twinfer.shared import packer
from twinfer.shared.drafts import Drafts, SpeculativeConfig, look_up
from twinfer.shared.errors import InternalError
from twinfer.shared.kv_manager import KVManager
from twinfer.shared.ngrams import NgramFilter
from twinfer.shared.packer import pack
from twinfer.shared.page_groups import PageGroup, pages_for
from twinfer.shared.request import FinishReason, Request, RequestState
from twinfer.shared.request_table import POSITION, SAMPLING_FIELDS, RequestTable
from twinfer.shared.sampling_encoding import FAR, ONE, encode_sampling
from twinfer.shared.sampling_params import SamplingParams
from twinfer.shared.scheduler import Scheduler
from twinfer.shared.scheduler_config import SchedulerConfig
from twinfer.shared.step import (
    PROCESSING,
    NewPages,
    StepInput,
    StepShape,
    batch_layout,
    processor_layout,
    sampling_layout,
    with_all_entries,
    with_masks,
)

VOCABULARY = 50
REPEATS = 2
"""Layers of a page group."""
U64 = np.uint64
Write = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""Puts pages [n] into the page tables, at rows [n] and columns [n]."""
FILTERS_OFF = {"top_k": 0, "top_p": ONE, "min_p": FAR}


def mix(*parts: np.ndarray | int) -> np.ndarray:
    """A 64-bit hash of its arguments, elementwise (splitmix64's finalizer after each)."""
    value = np.zeros(1, U64)
    for part in parts:
        value = (value + np.asarray(part).astype(U64)) * U64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        value = value ^ (value >> U64(31))
    return value


def attend(stored: np.ndarray, window: int) -> np.ndarray:
    """What each position reads of the values `[n]` stored at positions 0..n-1: all up to its
    own, or those in the window, in order.
    """
    sums = np.cumsum(stored * (2 * np.arange(len(stored)).astype(U64) + U64(1)))
    if window:
        sums[window:] = sums[window:] - sums[:-window]
    return sums


def may_follow(output: list[int]) -> np.ndarray:
    """The tokens that a form allows behind `output`: each depends on all of it."""
    tokens = np.arange(VOCABULARY)
    allowed = np.flatnonzero(mix(*output, 11, tokens) % U64(3) == 0)
    return allowed if len(allowed) else tokens


class Form:
    """A matcher: it has taken the tokens that were read back, and knows what may follow them."""

    def __init__(self) -> None:
        self.output: list[int] = []

    def advance(self, token: int) -> None:
        self.output.append(token)

    @property
    def mask(self) -> np.ndarray:
        bits = np.zeros(-(-VOCABULARY // 32) * 32, np.bool_)
        bits[may_follow(self.output)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


def draw(
    hidden: int,
    position: int,
    fields: dict[str, int],
    history: list[int] | None,
    allowed: np.ndarray,
) -> int:
    """The token of one request. Greedy uses no seed; filters and penalties count where they are on.

    Now and then there is none (-1), as when a logit is not finite.
    """
    if int(mix(hidden, 3)[0]) % 97 == 0:
        return -1
    parts = [hidden, position]
    if not fields["greedy"]:
        parts += [fields["seed_lo"], fields["seed_hi"], fields["scale"]]
        parts += [fields[name] for name in FILTERS_OFF]
    if history is not None:
        parts += history
    return int(allowed[int(mix(*parts)[0]) % len(allowed)])


def expected_output(
    request: Request, groups: tuple[PageGroup, ...]
) -> tuple[list[int], FinishReason]:
    """Tokens and finish reason by a direct simulation: one request alone, no pages, no steps."""
    params, tokens = request.params, request.prompt.tolist()
    fields = as_bits(encode_sampling(params, request.seed))
    output: list[int] = []
    while True:
        hidden = mix(np.array(tokens), np.arange(len(tokens)))
        for layer in range(REPEATS * len(groups)):
            hidden = mix(attend(hidden, groups[layer % len(groups)].window), layer + 1)
        allowed = np.arange(VOCABULARY)
        if params.banned_token_ids:
            allowed = np.setdiff1d(allowed, params.banned_token_ids)
        if params.structured_outputs:
            allowed = may_follow(output)
        if len(output) < params.min_tokens:
            allowed = np.setdiff1d(allowed, request.stop_ids)
        history = tokens if params.repetition_penalty != 1.0 else None
        token = draw(int(hidden[-1]), len(tokens), fields, history, allowed)
        if token < 0:
            return output, FinishReason.ERROR
        output.append(token)
        tokens = [*tokens, token]
        if output[-1] in request.stop_ids and len(output) > params.min_tokens:
            return output, FinishReason.STOP
        if len(tokens) == request.max_total:
            return output, FinishReason.LENGTH


def as_bits(fields: dict[str, int | float]) -> dict[str, int]:
    """The int32 values that stand for `fields` in a buffer."""
    return {
        k: int(np.float32(v).view(np.int32)) if isinstance(v, float) else v
        for k, v in fields.items()
    }


class MockWorker:
    """Executes packed steps in order, at once. Knows nothing but the steps and its own memory.

    It runs loops to their end, or `stops_early`, when one request has sampled a stop id.
    """

    def __init__(self, config: SchedulerConfig, shape: StepShape, stops_early: bool) -> None:
        random, max_rows = np.random.default_rng(0), shape.max_rows
        self.groups = config.page_groups
        self.stride = max_rows + 1
        # A page of a group may hold more tokens than that of another; in memory they are alike, and
        # layers of different groups share it.
        self.largest = max(group.page_size for group in self.groups)
        self.memory = random.integers(1, 2**63, (REPEATS, config.num_pages, self.largest)).astype(
            U64
        )
        self.tables = random.integers(
            0, config.num_pages, (shape.table_rows, shape.pages_per_request)
        )
        self.num_entries = 0
        self.histories = random.integers(0, VOCABULARY, (max_rows, shape.max_model_len))
        self.num_tokens = 0
        self.last_tokens = np.full(max_rows + 1, 10**6)
        self.stops_early = stops_early
        self.halted = False
        self.unsampled: tuple[StepInput, np.ndarray, np.ndarray] | None = None

    def take(self, new: NewPages | None) -> None:
        assert new is not None
        assert new.start == self.num_entries, "a difference was lost or came twice"
        self.num_entries += len(new)
        assert len(set(zip(new.rows.tolist(), new.columns.tolist(), strict=True))) == len(new)
        self.write(new.rows, new.columns, new.pages)

    def remember(self, step: StepInput) -> None:
        new = step.new_tokens
        assert new is not None
        assert new.start == self.num_tokens, "new tokens were lost or came twice"
        self.num_tokens += len(new)
        stops = np.cumsum(new.ends - new.firsts)
        rows = step.field("rows")[new.indices]
        for row, first, end, stop in zip(rows, new.firsts, new.ends, stops, strict=True):
            self.histories[row, first:end] = new.tokens[stop - (end - first) : stop]
            self.histories[row, end:] = -1

    def write(self, rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        self.tables[rows, columns] = pages

    def execute(self, step: StepInput) -> np.ndarray:
        assert self.unsampled is None, "a step came before the one before it was sampled"
        # also of a loop that does nothing: its pages belong to its requests
        self.take(step.new_pages)
        if step.loop is None:
            return self.one(step)
        assert step.descriptor.kind == "decode"
        assert step.sampler not in PROCESSING
        assert not step.logprobs
        made = np.zeros((0, step.descriptor.requests), np.int64)
        if self.stops_early and self.halted and step.loop.chained:
            return made
        live = slice(0, step.field("counts")[1])
        while len(made) < step.loop.steps:
            made = np.vstack((made, self.one(self.later(step, len(made)))))
            if self.stops_early and (step.loop.stop_ids[live] == made[-1, live, None]).any():
                break
        self.halted = len(made) < step.loop.steps
        return made

    def later(self, step: StepInput, k: int) -> StepInput:
        """Iteration k of a loop as a plain step, as docs/adr/0005 says."""
        moved = replace(step, batch=step.batch.copy(), sampling=step.sampling.copy(), loop=None)
        f = batch_layout(step.descriptor, step.shape).views(moved.batch)
        live = np.arange(f["counts"][1])
        f["positions"][live] += k
        f["kv_lens"][live] += k
        for number, group in enumerate(self.groups):
            page, offset = np.divmod(f["positions"][live], group.page_size)
            pages = self.tables[f["rows"][live] + number * self.stride, page]
            slots = f["slots"][number * step.descriptor.tokens :]
            slots[live] = pages * group.page_size + offset
        if k:
            f["token_ids"][live] = -1
        sampling_layout(step.descriptor.requests).view(moved.sampling, "position")[live] += k
        return moved

    def one(self, step: StepInput) -> np.ndarray:
        singles, count = step.field("counts").tolist()
        start = step.field("query_start").astype(int)
        rows, lens = step.field("rows"), step.field("kv_lens")
        tokens, positions = step.field("token_ids").astype(int), step.field("positions").astype(int)
        unread = np.flatnonzero(tokens == -1)
        assert (unread < singles).all()
        assert (np.diff(start)[:singles] == 1).all()
        assert (np.diff(start)[singles:count] > 1).all()
        tokens[unread] = self.last_tokens[rows[unread]]
        hidden = mix(tokens, positions)
        all_slots = step.field("slots").astype(int).reshape(len(self.groups), -1)
        for layer in range(REPEATS * len(self.groups)):
            repeat, number = divmod(layer, len(self.groups))
            group, memory, slots = self.groups[number], self.memory[repeat], all_slots[number]
            # As on a device: a layer writes the whole step before anybody reads; but in a step of
            # single tokens all but a request's last slot may be read before.
            written = slots >= 0
            page, offset = np.divmod(slots[written], group.page_size)
            before = memory.copy() if step.descriptor.kind == "decode" else memory
            memory[page, offset] = hidden[written]
            after = np.zeros_like(hidden)
            for index in range(count):
                length, row = int(lens[index]), rows[index] + number * self.stride
                pages = self.tables[row, : group.columns_for(length)]
                stored = before[pages, : group.page_size].reshape(-1)[:length]
                stored[-1] = memory[pages[-1], (length - 1) % group.page_size]
                new = slice(start[index], start[index + 1])
                after[new] = attend(stored, group.window)[positions[new]]
            hidden = mix(after, layer + 1)
        sampled = np.zeros(len(rows), np.int64)
        hidden = hidden[step.field("sample_index")]
        if step.waiting is None:
            self.finish(step, hidden, sampled)
        else:
            self.unsampled = step, hidden, sampled
        return sampled

    def sample(self, masks: np.ndarray) -> None:
        assert self.unsampled is not None
        (step, hidden, sampled), self.unsampled = self.unsampled, None
        self.finish(replace(step, processors=with_masks(step, masks)), hidden, sampled)

    def finish(self, step: StepInput, hidden: np.ndarray, sampled: np.ndarray) -> None:
        """The second half of a step, which writes its tokens to `sampled`."""
        sampled[:] = self._sample(step, hidden)
        sample_rows = sampling_layout(len(sampled)).view(step.sampling, "sample_rows")
        self.last_tokens[sample_rows] = np.maximum(sampled, 0)

    def _sample(self, step: StepInput, hidden: np.ndarray) -> np.ndarray:
        requests = step.descriptor.requests
        fields = sampling_layout(requests).views(step.sampling)
        fields["scale"] = fields["scale"].view(np.int32)
        processors = None
        assert (step.new_tokens is not None) == (step.sampler == "processed")
        if step.sampler == "processed":
            self.remember(step)
        if step.sampler in PROCESSING:
            assert step.processors is not None
            layout = processor_layout(requests, step.shape, step.sampler)
            processors = layout.views(with_all_entries(layout, step.processors))
        tokens = np.full(requests, 7)
        for index in np.flatnonzero(fields["position"] > 0).tolist():
            values = {name: int(column[index]) for name, column in fields.items()}
            # Each program knows less than the one after it: a step sent to the wrong one gives
            # wrong tokens.
            if step.sampler == "greedy":
                values["greedy"] = 1
            if step.sampler in ("greedy", "random"):
                values |= FILTERS_OFF
            history, allowed = None, np.arange(VOCABULARY)
            if processors is not None:
                if processors["mask_row"][index] >= 0:
                    words = processors["masks"][processors["mask_row"][index]].view(np.uint8)
                    allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")[:VOCABULARY])
                if processors["history_row"][index] >= 0:
                    seen = self.histories[processors["history_row"][index]]
                    history = seen[seen != -1].tolist()
                    if processors["pending"][index]:
                        history.append(int(self.last_tokens[processors["rows"][index]]))
            tokens[index] = draw(int(hidden[index]), values["position"], values, history, allowed)
        return tokens


@dataclass
class Plan:
    """What happens to one request, and when, in turns of the loop."""

    request: Request
    arrival: int
    cancel: int | None
    reason: FinishReason


@dataclass
class Run:
    """One scheduler, its worker, and the loop of an engine."""

    config: SchedulerConfig
    plans: list[Plan]
    eager: list[bool]
    """By turn, over and over: whether to read a step back before the pipeline is full."""
    stops_early: bool = False
    in_flight: deque[tuple[Any, StepInput, np.ndarray]] = field(default_factory=deque)
    waited: int = 0
    """Steps whose sampler waited for masks."""
    cancelled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        config = self.config
        table = Table(
            decode_ladder(config.max_num_seqs, 4), mixed_ladder(config.max_num_batched_tokens, 4), 8
        )
        self.scheduler = Scheduler(config, table)
        groups = config.page_groups
        pages = max(group.columns_for(config.max_model_len) for group in groups)
        self.shape = StepShape(
            pages + 1, config.max_num_seqs, config.max_model_len, VOCABULARY, len(groups)
        )
        self.worker = MockWorker(config, self.shape, self.stops_early)
        self.loops = 0
        self.known: dict[str, tuple[list[int], FinishReason]] = {}

    def go(self) -> None:
        """Run to the end; a bound on the turns is the proof that nothing starves."""
        tokens = sum(plan.request.max_total or 64 for plan in self.plans)
        for turn in range(4 * tokens + 100):
            self.come_and_go(turn)
            if turn >= max(plan.arrival for plan in self.plans) and not self.scheduler.has_work:
                return
            stuck = not self.schedule(turn)
            full = len(self.in_flight) == self.config.pipeline_depth
            if self.in_flight and (stuck or full or self.eager[turn % len(self.eager)]):
                self.read()
        raise AssertionError(f"not done after {turn} turns: {self.scheduler.metrics()}")

    def expected(self, request: Request) -> tuple[list[int], FinishReason]:
        """See `expected_output`; made once, as it takes long."""
        name = request.request_id
        if name not in self.known:
            self.known[name] = expected_output(request, self.config.page_groups)
        return self.known[name]

    def guess(self, tokens: np.ndarray, config: SpeculativeConfig, most: int) -> np.ndarray:
        """What follows in the text of a request that begins so, with a mistake in some places."""
        size, found = len(tokens), tokens[:0]
        for request in self.scheduler.requests.values():
            text = np.concatenate((request.prompt, self.expected(request)[0]))
            if len(text) > size and np.array_equal(text[:size], tokens):
                found = text[size : size + max(0, most)].astype(np.int32)
                break
        wrong = mix(np.arange(len(found)), size, 5) % U64(4) == 0
        return np.where(wrong, (found + 1) % VOCABULARY, found).astype(np.int32)

    def come_and_go(self, turn: int) -> None:
        for plan in self.plans:
            name = plan.request.request_id
            if plan.arrival == turn:
                self.scheduler.add(plan.request)
            if plan.cancel == turn:
                alive = name in self.scheduler.requests
                assert self.scheduler.finish(name, plan.reason) == alive
                assert not self.scheduler.finish(name, plan.reason)
                if alive:
                    self.cancelled.add(name)
                self.scheduler.check_integrity()

    def schedule(self, turn: int) -> bool:
        waited = [plan.request for plan in self.plans if plan.request.state is RequestState.WAITING]
        ran = [request for request in self.scheduler.requests.values() if request.row >= 0]
        preemptions = {request.request_id: request.num_preemptions for request in ran}
        idle = not self.in_flight
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is None:
            assert not idle or not self.scheduler.requests, (
                "work waits, nothing is in flight, nothing is scheduled"
            )
            return False
        waiting = [request.order for request in self.scheduler.requests.values() if request.row < 0]
        started = [request.order for request in waited if request.row >= 0]
        assert not waiting or not started or max(started) < min(waiting), (
            "the head of the queue was overtaken"
        )
        victims = [
            request.order
            for request in ran
            if request.num_preemptions > preemptions[request.request_id]
        ]
        spared = [
            request.order
            for request in ran
            if request.num_preemptions == preemptions[request.request_id]
        ]
        assert not victims or not spared or min(victims) > max(spared), (
            "the wrong request was preempted"
        )
        packed = pack(step, self.scheduler.table, self.shape, turn)
        frozen = [buffer.copy() for buffer in (packed.batch, packed.sampling)]
        self.in_flight.append((step, packed, self.worker.execute(packed)))
        self.loops += step.loop is not None
        assert all(map(np.array_equal, frozen, (packed.batch, packed.sampling)))
        return True

    def read(self) -> None:
        step, _, tokens = self.in_flight.popleft()
        events = self.scheduler.update(step, tokens)
        self.scheduler.check_integrity()
        assert len(events.requests) == len(events.tokens) == len(events.indices)
        assert not self.cancelled & {request.request_id for request in events.requests}
        made: dict[Request, list[int]] = {}
        for request, token in zip(events.requests, events.tokens.tolist(), strict=True):
            made.setdefault(request, []).append(token)
        for request, new in made.items():
            assert request.output[-len(new) :] == new
            assert (request in events.finished) == (request.state is RequestState.FINISHED)
            for token in new if request.matcher is not None else []:
                request.matcher.advance(token)
        if self.in_flight and self.in_flight[0][1].waiting is not None:
            self.sample(*self.in_flight[0][:2])

    def sample(self, step: Any, packed: StepInput) -> None:
        """Bring the masks that a step waits for: of a request that ended, any."""
        assert packed.waiting is not None
        self.waited += 1
        waiting = [step.requests[index] for index in packed.waiting.tolist()]
        self.worker.sample(np.array([request.matcher.mask for request in waiting]))

    def check(self) -> None:
        """Right tokens and reasons, and nothing left behind."""
        for plan in self.plans:
            request = plan.request
            output, reason = self.expected(request)
            if request.request_id in self.cancelled:
                assert request.output == output[: len(request.output)]
                assert request.finish_reason is plan.reason
            else:
                assert (request.output, request.finish_reason) == (output, reason)
            assert request.row == -1
            assert request.source is None
        metrics = self.scheduler.metrics()
        assert (metrics.running, metrics.waiting, metrics.cache_usage) == (0, 0, 0.0)
        assert self.scheduler.kv.available == self.config.num_pages
        assert self.scheduler.kv.num_registered == 0 or self.config.enable_prefix_caching


SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.5},
    {"repetition_penalty": 1.5},
    {"temperature": 0.0, "repetition_penalty": 2.0, "top_k": 2},
    {"banned_token_ids": (0, 3, 31, 32, 49)},
    {"prompt_logprobs": 1},
    {"structured_outputs": {"regex": "."}},
    {"temperature": 0.0, "structured_outputs": {"regex": "."}},
    {"structured_outputs": {"regex": "."}, "repetition_penalty": 1.5},
]
PROMPTS = np.random.default_rng(1).integers(0, VOCABULARY, (3, 40))


@st.composite
def configs(draw_: st.DrawFn) -> SchedulerConfig:
    page_size = draw_(st.sampled_from([1, 2, 4, 5]))
    model_len = draw_(st.integers(12, 40))
    seqs = draw_(st.integers(1, 6))
    chunked = draw_(st.booleans())
    tokens = (seqs if chunked else max(seqs, model_len)) + draw_(st.integers(0, 9) | st.just(40))
    groups = draw_(page_groups(page_size))
    drafts = draw_(st.none() | st.builds(SpeculativeConfig, st.integers(1, 7)))
    plain = st.just(1)
    least = pages_for(groups, model_len, tokens)
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=model_len,
        page_size=page_size,
        num_pages=least + draw_(st.integers(0, 2 * least)),
        enable_prefix_caching=draw_(st.sampled_from([True, True, False])),
        enable_chunked_prefill=chunked,
        policy=draw_(st.sampled_from(["fcfs", "priority"])),
        priority_window=draw_(st.integers(1, 4)),
        pipeline_depth=draw_(st.sampled_from([1, 2, 2]) if drafts is None else plain),
        watermark=draw_(st.sampled_from([0.0, 0.1])),
        decode_steps=draw_(st.sampled_from([1, 2, 7]) if drafts is None else plain),
        groups=groups,
        drafts=drafts,
    )


@st.composite
def page_groups(draw_: st.DrawFn, page_size: int) -> tuple[PageGroup, ...]:
    """One group or several, of which one has the smallest pages."""
    windows = st.sampled_from([0, 0, 1, 3, 4, 9, 16])
    rest = draw_(st.lists(st.tuples(st.sampled_from([1, 1, 2, 3]), windows), max_size=2))
    first = PageGroup(page_size, draw_(windows))
    return (first, *(PageGroup(page_size * times, window) for times, window in rest))


@st.composite
def plans(draw_: st.DrawFn, model_len: int) -> list[Plan]:
    made = []
    for index in range(draw_(st.integers(1, 10))):
        # Most prompts share a beginning, and part ways at different places.
        length = draw_(st.integers(1, model_len - 1))
        prompt = PROMPTS[draw_(st.sampled_from([0, 0, 0, 1, 2]))][:length].copy()
        own = draw_(st.integers(0, 3))
        prompt[length - min(own, length) :] = (index * 7) % VOCABULARY
        most = draw_(st.integers(1, 24))
        stop_ids = tuple(draw_(st.sampled_from([(), (1, 2, 3), (5, 6, 7, 8, 9, 10, 11, 12)])))
        params = SamplingParams(max_tokens=most, **draw_(st.sampled_from(SAMPLING)))
        if params.structured_outputs is None:
            params = replace(params, min_tokens=draw_(st.sampled_from([0, 0, most // 2])))
        request = Request(
            request_id=f"r{index}",
            prompt=prompt,
            params=params,
            seed=index - 2,
            stop_ids=stop_ids,
            priority=draw_(st.integers(-3, 3)),
            cache_salt=draw_(st.sampled_from(["", "", "tenant"])),
        )
        if params.structured_outputs is not None:
            request.matcher = Form()  # type: ignore[assignment]  # all that is used of one
        arrival = draw_(st.integers(0, 20))
        cancel = draw_(
            st.none() | st.integers(0, 30).map(lambda turns, arrival=arrival: arrival + turns)
        )
        made.append(
            Plan(
                request,
                arrival,
                cancel,
                draw_(st.sampled_from([FinishReason.ABORT, FinishReason.STOP])),
            )
        )
    return made


@st.composite
def runs(draw_: st.DrawFn) -> Run:
    config = draw_(configs())
    turns, stops_early = draw_(st.lists(st.booleans(), min_size=1)), draw_(st.booleans())
    return Run(config, draw_(plans(config.max_model_len)), turns, stops_early)


@given(runs())
@settings(max_examples=60)
def test_random_schedules_give_each_request_the_tokens_it_gets_alone(run: Run) -> None:
    check_random_schedule(run)


def guessing_runs() -> st.SearchStrategy[Run]:
    """Those in which tokens are guessed."""
    return runs().filter(lambda run: run.config.drafts is not None)


@given(guessing_runs())
@settings(max_examples=60)
def test_random_guesses_change_no_token(run: Run) -> None:
    check_random_schedule(run)


@pytest.mark.slow
@given(guessing_runs())
@settings(max_examples=1500)
def test_many_random_guesses_change_no_token(run: Run) -> None:
    check_random_schedule(run)


@pytest.mark.slow
@given(runs())
@settings(max_examples=3000)
def test_many_random_schedules_give_each_request_the_tokens_it_gets_alone(run: Run) -> None:
    check_random_schedule(run)


def check_random_schedule(run: Run) -> None:
    may_repeat = NgramFilter.may_repeat

    def anywhere(ngrams: NgramFilter, rows: np.ndarray, lasts: np.ndarray) -> np.ndarray:
        """Guesses are not looked up here; but what would be found is not denied."""
        table, config = run.scheduler.table, run.config.drafts
        found = [
            len(look_up(table.tokens[row, : last + 1], config, 1)) > 0
            for row, last in zip(rows.tolist(), lasts.tolist(), strict=True)
        ]
        assert (may_repeat(ngrams, rows, lasts) >= np.array(found, np.bool_)).all()
        return rows >= 0

    with (
        mock.patch("twinfer.shared.ngrams.FEW", 1),
        mock.patch.object(NgramFilter, "may_repeat", anywhere),
        mock.patch("twinfer.shared.scheduler.look_up", run.guess),
    ):
        run.go()
    run.check()
    metrics = run.scheduler.metrics()
    event(f"preemptions: {min(metrics.preemptions, 3)}")
    event(f"prefix hits: {metrics.prefix_hits > 0}")
    event(f"loops: {run.loops > 0}")
    event(f"groups: {len(run.config.groups)}")
    event(f"windows: {any(group.window for group in run.config.groups)}")
    event(f"errors: {min(metrics.errors, 3)}")
    event(f"waited for masks: {run.waited > 0}")
    event(f"right guesses: {min(metrics.accepted_tokens, 3)}")
    assert metrics.accepted_tokens <= metrics.draft_tokens


def dropped(worker: MockWorker, write: Write) -> Write:
    """The fourth difference is lost."""
    times = iter(range(10**6))

    def changed(rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        if len(pages) and next(times) != 3:
            write(rows, columns, pages)

    return changed


def twice(worker: MockWorker, write: Write) -> Write:
    """The fourth difference comes once more, with other pages."""
    times = iter(range(10**6))

    def changed(rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        write(rows, columns, pages)
        if len(pages) and next(times) == 3:
            write(rows, columns, (pages + 1) % len(worker.memory[0]))

    return changed


def wrong_row(worker: MockWorker, write: Write) -> Write:
    """The fourth difference goes to the next row."""
    times = iter(range(10**6))

    def changed(rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        by = len(pages) > 0 and next(times) == 3
        write((rows + by) % len(worker.tables), columns, pages)

    return changed


def not_sent_again(worker: MockWorker, write: Write) -> Write:
    """What a row has it keeps, whoever has the row."""
    filled = np.zeros(worker.tables.shape, np.bool_)

    def changed(rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        new = ~filled[rows, columns]
        filled[rows, columns] = True
        write(rows[new], columns[new], pages[new])

    return changed


@pytest.mark.parametrize("fault", [dropped, twice, wrong_row, not_sent_again])
def test_a_fault_in_the_differences_of_page_tables_changes_tokens(
    fault: Callable[[MockWorker, Write], Write],
) -> None:
    """The twin of the test above: each of these faults must fail it, although the differences
    are numbered right.
    """

    def fails(run: Run) -> bool:
        run.worker.write = fault(run.worker, run.worker.write)  # type: ignore[method-assign]
        try:
            run.go()
            run.check()
        except (AssertionError, InternalError):
            return True
        return False

    find(runs(), fails, settings=settings(max_examples=200, phases=[Phase.generate], database=None))


def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are released one token before the last query that reads them."""

    def first_columns(group: PageGroup, positions: np.ndarray) -> np.ndarray:
        if not group.window:
            return np.zeros_like(positions)
        return np.maximum(positions - group.window + 2, 0) // group.page_size

    monkeypatch.setattr(PageGroup, "first_columns", first_columns)


def short_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached prefix is taken although the first page that its window reads is not there."""
    monkeypatch.setattr(
        PageGroup,
        "first_column",
        lambda group, position: (
            -(-max(0, position - group.window + 1) // group.page_size) if group.window else 0
        ),
    )


def other_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are found by their content in another group."""
    monkeypatch.setattr(
        KVManager, "find", lambda kv, digest, group: kv._page_of[group - 1].get(digest)
    )


def same_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of all groups go to the page tables of the first."""
    take = RequestTable.take_new_pages

    def changed(table: RequestTable) -> NewPages:
        new = take(table)
        return replace(new, rows=new.rows % (table.max_rows + 1))

    monkeypatch.setattr(RequestTable, "take_new_pages", changed)


@pytest.mark.parametrize(
    "fault", [early, pytest.param(short_hits, marks=pytest.mark.slow), other_group, same_columns]
)
def test_a_fault_in_page_groups_changes_tokens(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other twin: a page that is released one step early, a window's page that is missing, a
    page or a table of the wrong group.
    """
    fault(monkeypatch)

    def fails(run: Run) -> bool:
        try:
            run.go()
            run.check()
        except (AssertionError, IndexError, InternalError):
            return True
        return False

    find(runs(), fails, settings=settings(max_examples=600, phases=[Phase.generate], database=None))


def stale(run: Run) -> None:
    """Masks are made before the token that was just read is taken."""
    for plan in run.plans:
        matcher: Any = plan.request.matcher
        if matcher is not None:
            matcher.advance = lambda token, form=matcher: _advance_late(form, token)


def _advance_late(form: Any, token: int) -> None:
    form.output = [*form.output, *getattr(form, "held", [])]
    form.held = [token]


def of_another(run: Run) -> None:
    """Masks come in the wrong order."""
    sample = run.worker.sample
    run.worker.sample = lambda masks: sample(masks[::-1])  # type: ignore[method-assign]


def not_awaited(run: Run) -> None:
    """No step waits: each takes the masks that were there when it was packed."""
    execute = run.worker.execute
    run.worker.execute = lambda step: execute(replace(step, waiting=None))  # type: ignore[method-assign]
    run.sample = lambda step, packed: None  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [stale, of_another, not_awaited])
def test_a_mask_that_is_late_or_of_another_request_changes_tokens(
    fault: Callable[[Run], None],
) -> None:
    """The third twin."""

    def fails(run: Run) -> bool:
        fault(run)
        try:
            run.go()
            run.check()
        except (AssertionError, InternalError):
            return True
        return False

    find(runs(), fails, settings=settings(max_examples=200, phases=[Phase.generate], database=None))


def one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wrong guess is kept."""
    kept = Drafts.kept

    def changed(drafts: Drafts, sampled: np.ndarray) -> np.ndarray:
        return np.minimum(kept(drafts, sampled) + 1, drafts.counts)

    monkeypatch.setattr(Drafts, "kept", changed)


def before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses run in a decode step, which may read before others have written."""
    decide = Table.decide

    def changed(table: Table, tokens: int, requests: int, longest: int) -> Any:
        return decide(table, tokens, requests, 1 if tokens == requests else longest)

    monkeypatch.setattr(Table, "decide", changed)


def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn behind a guess is drawn for the position of its request's own token."""
    original = packer._sampling

    def changed(step: Any, table: RequestTable) -> np.ndarray:
        fields = original(step, table).reshape(len(SAMPLING_FIELDS), -1)
        if step.drafts is not None:
            places = step.drafts.places
            own = np.searchsorted(step.drafts.heads, places, side="right") - 1
            fields[POSITION, places] = step.ends[step.drafts.heads[own]]
        return fields.reshape(-1)

    monkeypatch.setattr(packer, "_sampling", changed)


def not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong guesses count as computed."""
    original = Scheduler._take_several

    def changed(scheduler: Scheduler, group: Any, *rest: Any) -> Any:
        events = original(scheduler, group, *rest)
        if scheduler.config.drafts is not None:
            scheduler.table.computed[group.rows] += 1
        return events

    monkeypatch.setattr(Scheduler, "_take_several", changed)


@pytest.mark.parametrize(
    "fault", [one_too_many, before_they_are_written, same_noise, not_taken_back]
)
def test_a_fault_in_guesses_changes_tokens(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would say nothing if it could not see these."""
    fault(monkeypatch)

    def fails(run: Run) -> bool:
        try:
            check_random_schedule(run)
        except (AssertionError, InternalError, IndexError):
            return True
        return False

    find(guessing_runs(), fails, settings=settings(max_examples=500, phases=[Phase.generate]))
