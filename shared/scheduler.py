"""Decides what the next step computes. Pure integers; neither knows a device nor waits for one.

Requests are ordered by a key that never changes (first come first served, or priority with aging),
so nothing starves:

- decodes go first, then prompts under way, then waiting requests in order; none overtakes one that
  does not fit yet;
- all pages of a prompt are taken when it starts, so only decodes ever ask for more; of a group
  with a window as many as a request ever holds: each chunk takes as many as it leaves behind;
- when pages run out, the running request that is last in order gives all of its back and waits
  again at its old place.

A page that no later query of its request reads is released when the step is scheduled: what is in
flight reads earlier. If others hold it too, a prompt under way may lack the page that it would have
taken instead; it is owed one, and somebody gives way for it as for a decode.

The first running request in order is never a victim while another one runs, and alone it fits
(`add` refuses what does not), so it always gets on.

A step is scheduled before the tokens of the one before it are read. What is known without reading
(lengths) is respected; what is not (end-of-sequence) is found late: the row's epoch has changed by
then, and its token is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..bucketing import PaddingAccount, Table
from .drafts import NO_GUESSES, Drafts, SpeculativeConfig, look_up
from .errors import ConfigError, InternalError, OutsideTable, RequestError
from .kv_manager import KVManager
from .ngrams import NgramFilter
from .page_groups import longest
from .prefix_cache import PrefixCache
from .request import FinishReason, Request, RequestState, WaitingQueue
from .request_table import PROCESSED, Group, Loop, RequestTable, ScheduledStep, StepEvents
from .scheduler_config import SchedulerConfig
from .step_results import count_iterations, count_taken, find_finished, flatten


@dataclass(frozen=True, slots=True)
class SchedulerMetrics:
    """A reading of the gauges (the first three) and of the counters since the start."""

    running: int
    waiting: int
    cache_usage: float
    """Pages held over all pages."""
    prefix_queries: int
    """Tokens that were looked up in the prefix cache."""
    prefix_hits: int
    """Tokens that were found there."""
    preemptions: int
    padded_share: float
    """Tokens computed for padding, over all tokens computed."""
    errors: int
    """Requests that ended with ERROR: a logit was not finite."""
    drafts: int = 0
    """How often a request had guesses in a step."""
    draft_tokens: int = 0
    """These guesses."""
    accepted_tokens: int = 0
    """Those of them that were right."""


class _Chunk(NamedTuple):
    """Part of a prompt in the step that is being built."""

    request: Request
    row: int
    start: int
    end: int
    samples: bool


class Scheduler:
    """Owns the requests from `add` to their end. Not thread-safe: one thread calls everything here.

    The loop is: while `has_work`: up to `pipeline_depth` times `schedule`, each followed at once by
    `pack` (before any other call) and by the worker's `execute`; then `update` with the oldest
    step's tokens.
    """

    def __init__(self, config: SchedulerConfig, programs: Table) -> None:
        """Raises ConfigError if `programs` lacks one for a step that `config` allows."""
        if not programs.mixed_sizes or programs.mixed_sizes[-1] < config.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens: got {config.max_num_batched_tokens}, the largest "
                "program "
                "is for "
                f"{max(programs.mixed_sizes, default=0)}"
            )
        if programs.max_requests < config.max_num_seqs:
            raise ConfigError(
                f"max_num_seqs: got {config.max_num_seqs}, programs are for {programs.max_requests}"
            )
        self.config = config
        self.programs = programs
        self.groups = config.page_groups
        self._begin_books()
        self._windows = [(n, group) for n, group in enumerate(self.groups) if group.window]
        chunk = config.max_num_batched_tokens
        self.longest = longest(self.groups, config.num_pages, chunk, config.max_model_len)
        """Tokens of the longest request that context and cache hold."""
        self.padding = PaddingAccount()
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._prefilling: list[Request] = []
        self._decoding: dict[int, Request] = {}
        # Rebuilt from `_decoding` when that changed: in a steady state steps share it.
        self._group: Group | None = None
        # Steps that all requests of `_group` certainly get, each a token, before one reaches its
        # last.
        self._steps_left = 0
        self._in_flight: deque[ScheduledStep] = deque()
        # A loop stopped early, and the loop chained to it, which does nothing, was not read yet.
        self._halted = False
        self.reserve = int(config.watermark * config.num_pages)
        """Pages that stay free when a request starts beside others."""
        # (arrival of the head of the queue that lacked pages, `kv.num_releases` then): it is not
        # worth another look before the next release. The hit that a registration might bring
        # meanwhile is not worth one either.
        self._blocked: tuple[int, int] | None = None
        self.started: list[str] = []
        """Ids of requests that the last `schedule` gave their first row."""
        self._arrivals = 0
        self._preemptions = 0
        self._errors = 0
        self._num_drafts = self._num_draft_tokens = self._num_accepted = 0

    def _begin_books(self) -> None:
        """Tables and pages of a worker that holds nothing."""
        config = self.config
        self.table = RequestTable(config.max_num_seqs, config.max_model_len, self.groups)
        self.kv = KVManager(
            config.num_pages, config.page_size, config.enable_prefix_caching, len(self.groups)
        )
        self.prefixes = PrefixCache(self.table, self.kv)
        self._ngrams: NgramFilter | None = None
        if config.drafts is not None:
            self._ngrams = NgramFilter(self.table, config.drafts.shortest)

    def start_over(self) -> None:
        """All that the worker held is gone, steps in flight too: every request waits again, at its
        place and with the tokens that are known, and resumes on a new worker.
        """
        for request in (*self._prefilling, *self._decoding.values()):
            request.saved_output = self.table.output_of(request.row)
            request.row, request.source = -1, None
            request.state = RequestState.WAITING
            request.num_preemptions += 1
            self._waiting.add(request)
        self._prefilling, self._decoding = [], {}
        self._group, self._steps_left = None, 0
        self._in_flight.clear()
        self._halted, self._blocked = False, None
        queries, hits = self.prefixes.num_queries, self.prefixes.num_hits
        self._begin_books()
        self.prefixes.num_queries, self.prefixes.num_hits = queries, hits

    # Requests

    @property
    def requests(self) -> Mapping[str, Request]:
        """All requests that have not ended, by id. Not to be mutated."""
        return self._requests

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a step was not read back."""
        return bool(self._requests or self._in_flight)

    def add(self, request: Request) -> None:
        """Take a new request; it waits. Raises RequestError, and takes nothing, if it can never
        run.
        """
        config = self.config
        if request.request_id in self._requests:
            raise RequestError(
                "request_id", f"got {request.request_id!r}, allowed is one that is not in use"
            )
        request.prepare(config.max_model_len, self.longest)
        request.arrival = self._arrivals
        request.key = request.arrival
        if config.policy == "priority":
            request.key += request.priority * config.priority_window
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; its pages are free at once. False, and nothing happens, if
        there is none.
        """
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """As `abort`, for a reason of the caller's, e.g. a stop string. Tokens in flight are
        dropped.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason)
        return True

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._stop_running(request, trusted=reason is not FinishReason.ERROR)
        self._errors += reason is FinishReason.ERROR
        del self._requests[request.request_id]
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.page_hashes.clear()

    def _stop_running(self, request: Request, trusted: bool = True) -> None:
        """Take the row and the pages from `request`; not `trusted`: nobody is to find what they
        hold.
        """
        table, row = self.table, request.row
        if trusted:
            num_written = int(min(table.known[row], table.computed[row]))
            self.prefixes.register(request, row, num_written // self.config.page_size)
        else:
            self.prefixes.forget(request, row)
        if self._decoding.pop(row, None) is None:
            self._prefilling.remove(request)
        else:
            self._group = None
        self.kv.release(self.table.release(row))

    # Scheduling

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if nothing can be computed before an `update`, or an `add` if
        nothing is in flight.

        Its requests count as computed from now on: the step must be executed, in order, whatever
        happens to them.
        """
        self.started.clear()
        if len(self._in_flight) >= self.config.pipeline_depth:
            return None
        looping = self._may_loop()
        chained = bool(
            self._in_flight and self._in_flight[-1].loop is not None and not self._halted
        )
        if chained and not looping:
            return None  # where its requests will be is not known before the loop is read
        self._leave_prompts_behind()
        group, starts, steps = self._schedule_decodes(self.config.decode_steps if looping else 1)
        loop = Loop(steps, chained) if chained or steps > 1 else None
        chunks = []
        if loop is None:
            chunks = self._schedule_prefills(self.config.max_num_batched_tokens - len(group.rows))
        if chunks:
            step = self._mixed_step(group, starts, chunks)
        elif group.requests:
            step = self._draft_step(group, starts) or self._step(
                group, starts, starts + 1, loop=loop
            )
        else:
            return None
        self._in_flight.append(step)
        return step

    def _may_loop(self) -> bool:
        """Whether the running requests may be decoded for several steps while the host does not
        look.
        """
        if self.config.decode_steps == 1 or len(self._waiting) or self._prefilling:
            return False
        table, rows = self.table, self._decode_group().rows
        return bool(
            table.alone[rows].all() and (table.computed[rows] + 1 >= table.min_total[rows]).all()
        )

    def _schedule_decodes(self, most: int) -> tuple[Group, np.ndarray, int]:
        """Advance all decodes that may go on by `most` tokens, or by one: (group, position that
        each computes, steps).

        Fewer where one reaches its last token; one where there are not enough free pages for all.
        """
        while True:
            group, starts, steps = self._unfinished(most)
            last = starts if steps == 1 else starts + (steps - 1)
            needy, owed = self._without_room(group, last), self._num_owed()
            if not len(needy) and not owed:
                break
            self._leave_behind(group, needy, starts)
            if self._pages_missing(group, needy, last, steps) + owed <= self.kv.available:
                while len(needy):
                    self._grow(group.rows[needy], last[needy])
                    needy = self._without_room(group, last)
                break
            if steps > 1:
                most = 1
            else:
                self._preempt(
                    max(
                        chain(self._decoding.values(), self._prefilling),
                        key=lambda request: request.order,
                    )
                )
        self.table.computed[group.rows] = last + 1
        self._steps_left -= steps
        return group, starts, steps

    def _without_room(self, group: Group, positions: np.ndarray) -> np.ndarray:
        """The requests of `group` whose pages end before `positions`."""
        needy: np.ndarray = (positions >= self.table.capacity[group.rows]).nonzero()[0]
        return needy

    def _pages_missing(
        self, group: Group, needy: np.ndarray, positions: np.ndarray, steps: int
    ) -> int:
        """Pages that requests of `group` lack for their next tokens, as many as `steps`, up to
        `positions`.
        """
        if len(self.groups) == 1 and steps == 1:
            return len(needy)
        rows, missing = group.rows[needy], 0
        for number, page_group in enumerate(self.groups):
            held = self.table.num_pages[number, rows]
            wanted = positions[needy] // page_group.page_size + 1
            missing += int(np.maximum(wanted - held, 0).sum())
        return missing

    def _unfinished(self, most: int) -> tuple[Group, np.ndarray, int]:
        """The decodes whose last token is not under way, the position that each computes next, and
        for how many steps they go on: `most`, or fewer.
        """
        group = self._decode_group()
        starts = self.table.computed[group.rows]
        if self._steps_left >= most:
            return group, starts, most
        left = group.max_total - 1 - starts
        going = (left > 0).nonzero()[0]
        if len(going) < len(left):
            # The last token of the others is sampled by a step in flight.
            return group.select(going), starts[going], min(most, int(left[going].min(initial=most)))
        self._steps_left = int(left.min()) if len(left) else 0
        return group, starts, min(most, max(1, self._steps_left))

    def _decode_group(self) -> Group:
        if self._group is None:
            rows = np.fromiter(self._decoding, np.int64, len(self._decoding))
            samples = np.ones(len(rows), np.bool_)
            self._group = Group(self.table, rows, list(self._decoding.values()), samples)
            self._steps_left = 0
        return self._group

    def _leave_behind(self, group: Group, needy: np.ndarray, starts: np.ndarray) -> None:
        """Register the pages of the requests `needy`, which are full of the tokens before `starts`,
        and release those that no query from there on reads.
        """
        rows, positions = group.rows[needy], starts[needy]
        if self.prefixes.enabled and len(needy):
            # Steps in flight compute them all, and a loop always does its first step; not all ids
            # are known, maybe.
            counts = np.minimum(positions, self.table.known[rows]) // self.config.page_size
            self.prefixes.register_each(group, needy, counts)
        for number, page_group in self._windows:
            self._drop_front(number, rows, page_group.first_columns(positions))

    def _leave_prompts_behind(self) -> None:
        """Release the pages that the next chunks of prompts under way do not read any more."""
        if not self._windows or not self._prefilling:
            return
        rows = np.array([request.row for request in self._prefilling])
        positions = self.table.computed[rows]
        for number, page_group in self._windows:
            self._drop_front(number, rows, page_group.first_columns(positions))

    def _drop_front(self, number: int, rows: np.ndarray, columns: np.ndarray) -> None:
        pages = self.table.drop_front(number, rows, columns)
        if len(pages):
            self.kv.release_shared(pages)

    def _num_owed(self) -> int:
        """Pages without which prompts under way cannot go on."""
        if not self._windows:
            return 0
        return sum(self._owed(request.row) for request in self._prefilling)

    def _owed(self, row: int) -> int:
        """Pages that a prompt under way needs for its next token."""
        start = int(self.table.computed[row])
        return sum(
            int(self.table.num_pages[number, row]) * page_group.page_size <= start
            for number, page_group in self._windows
        )

    def _grow(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """One more page for each of `rows` in the groups whose pages end before `positions`."""
        for number, page_group in enumerate(self.groups):
            short = rows
            if len(self.groups) > 1:
                held = self.table.num_pages[number, rows] * page_group.page_size
                short = rows[held <= positions]
            if len(short):
                self.table.append_page_each(number, short, self.kv.allocate(len(short)))

    def _preempt(self, request: Request) -> None:
        """Back to the queue, at its old place, with the tokens that are known; those in flight
        are sampled again.
        """
        self._stop_running(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self._preemptions += 1
        self._waiting.add(request)

    def _schedule_prefills(self, budget: int) -> list[_Chunk]:
        """Chunks of prompts under way, then of waiting requests in order, of `budget` tokens
        together at most.
        """
        chunks, owed = [], self._num_owed()
        for request in sorted(self._prefilling, key=lambda request: request.order):
            if budget:
                owed -= self._owed(request.row) if owed else 0
                self._extend(request.row, self.kv.available - owed)
                chunks.append(self._advance(request, budget))
                budget -= chunks[-1].end - chunks[-1].start
        while budget and len(self._waiting) and self.table.num_free:
            request = self._waiting.head
            if not self._start(request, budget):
                break
            chunks.append(self._advance(request, budget))
            budget -= chunks[-1].end - chunks[-1].start
        return chunks

    def _start(self, request: Request, budget: int) -> bool:
        """Move `request` from the queue to a row with pages for all its known tokens, or False:
        it does not fit now.
        """
        if self._blocked == (request.arrival, self.kv.num_releases):
            return False
        kv, config = self.kv, self.config
        tokens = request.known_tokens()
        hit = self.prefixes.match(request, tokens)
        if not config.enable_chunked_prefill and len(tokens) - hit.num_tokens > budget:
            return False
        held = [first + len(pages) for first, pages in zip(hit.columns, hit.pages, strict=True)]
        # The next token must find room too, or a request that gave way for its own sake would come
        # back at once.
        needed = sum(self._columns(hit.columns, len(tokens) + 1)) - sum(held)
        reserve = self.reserve if self.table.num_used else 0
        idle = sum(map(kv.num_idle, hit.pages))
        if needed + idle + reserve > kv.available:
            self._blocked = request.arrival, kv.num_releases
            return False
        for pages in hit.pages:
            kv.acquire(pages)
        self._waiting.remove(request)
        row = self.table.assign(request, tokens)
        for number, last in enumerate(self._columns(hit.columns, len(tokens))):
            fresh = kv.allocate(last - held[number])
            cached = np.array(hit.pages[number], np.int64)
            self.table.begin_pages(number, row, hit.columns[number])
            self.table.append_pages(number, row, np.concatenate((cached, fresh)))
        self.table.computed[row] = num_cached = hit.num_tokens
        self.table.registered[row] = num_cached // config.page_size
        request.state = RequestState.RUNNING
        self._prefilling.append(request)
        self.prefixes.record(request, len(tokens), num_cached)
        if not request.num_preemptions:
            request.num_cached_tokens = num_cached
            self.started.append(request.request_id)
        return True

    def _columns(self, first: Sequence[int], num_tokens: int) -> list[int]:
        """Where the page tables end, by group, of a request of `num_tokens` tokens that begins at
        the columns `first`: as far as it may reach before it leaves pages behind.
        """
        chunk = self.config.max_num_batched_tokens
        return [
            min(group.columns_for(num_tokens), start + group.most_columns(num_tokens, chunk))
            for group, start in zip(self.groups, first, strict=True)
        ]

    def _extend(self, row: int, available: int) -> None:
        """Up to `available` more pages for a prompt under way, where a window has left some behind:
        first those that its next token needs.
        """
        if not self._windows:
            return
        start = int(self.table.computed[row])
        first: list[int] = self.table.dropped[:, row].tolist()
        last = self._columns(first, int(self.table.known[row]))
        needed = [start // group.page_size + 1 for group in self.groups]
        for columns in (needed, last):
            for number, _ in self._windows:
                missing = columns[number] - int(self.table.num_pages[number, row])
                missing = min(missing, available)
                if missing > 0:
                    self.table.append_pages(number, row, self.kv.allocate(missing))
                    available -= missing

    def _advance(self, request: Request, budget: int) -> _Chunk:
        """Schedule the next tokens of a prompt under way, as many as fit; at its end the first
        token is sampled.
        """
        table, row = self.table, request.row
        start, known = int(table.computed[row]), int(table.known[row])
        end = min(known, start + budget, int(table.capacity[row]))
        if end <= start:
            raise InternalError(f"request {request.request_id} has no page for its next token")
        table.computed[row] = end
        if end == known:
            self._prefilling.remove(request)
            self._decoding[row] = request
            self._group = None
        # Requests that start later in this step may share these pages at once, see
        # `KVManager.register`; not a page that one token fills.
        filled = end if end - start > 1 else start
        self.prefixes.register(request, row, filled // self.config.page_size)
        return _Chunk(request, row, start, end, end == known)

    def _mixed_step(self, group: Group, starts: np.ndarray, chunks: list[_Chunk]) -> ScheduledStep:
        chunks.sort(key=lambda chunk: chunk.end - chunk.start > 1)
        requests, *columns = zip(*chunks, strict=True)
        rows, first, last, samples = np.array(columns, np.int64)
        both = Group(
            self.table,
            np.concatenate((group.rows, rows)),
            [*group.requests, *requests],
            np.concatenate((group.samples, samples.astype(np.bool_))),
        )
        return self._step(
            both, np.concatenate((starts, first)), np.concatenate((starts + 1, last)), last - first
        )

    def _draft_step(self, group: Group, starts: np.ndarray) -> ScheduledStep | None:
        """The step of decodes with guesses of what follows; None where there are none.

        A guess is an entry of its own, one token long, which reads what the entries before it
        write: so it is a mixed step. That takes longer for all requests in it, so there are at
        least as many guesses as requests.
        """
        config, ngrams = self.config.drafts, self._ngrams
        if config is None or ngrams is None:
            return None
        found = self._guesses(group, starts, config, ngrams)
        if sum(map(len, found)) < len(group):
            return None
        counts = np.array([len(guesses) + 1 for guesses in found], np.int64)
        owner = group.indices.repeat(counts)
        heads = np.cumsum(counts) - counts
        within = np.arange(len(owner)) - heads[owner]
        first = starts[owner] + within
        drafts = Drafts(heads, counts, np.flatnonzero(within), np.concatenate(found))
        return self._step(group.select(owner), first, first + 1, drafts=drafts)

    def _guesses(
        self, group: Group, starts: np.ndarray, config: SpeculativeConfig, ngrams: NgramFilter
    ) -> list[np.ndarray]:
        """What follows the tokens of each request of `group`: as many as programs have places for,
        which are dealt out in equal parts; what one does not take is for those behind it.

        None where the host looks between two tokens, as histories and forms are those of the last
        token that is known. What `min_tokens` masks depends on the position alone.
        """
        room = min(self.programs.max_requests, self.config.max_num_batched_tokens) - len(group)
        found = [NO_GUESSES] * len(group)
        if room < len(group):
            return found
        alone = np.flatnonzero(self.table.alone[group.rows])
        may_have = alone[ngrams.may_repeat(group.rows[alone], starts[alone])].tolist()
        for place, index in enumerate(may_have):
            if room < 1:
                break
            row, start = int(group.rows[index]), int(starts[index])
            left = int(self.table.max_total[row]) - start - 2
            share = -(-room // (len(may_have) - place))
            most = min(config.num_speculative_tokens, share, left)
            guesses = look_up(self.table.tokens[row, : start + 1], config, most)
            found[index] = guesses[: self._room_behind(group, starts, index, len(guesses))]
            room -= len(found[index])
        return found

    def _room_behind(self, group: Group, starts: np.ndarray, index: int, wanted: int) -> int:
        """How many of the tokens behind the position that a request of `group` computes have pages,
        up to `wanted`; for these it takes pages that nobody else needs now.
        """
        table, place = self.table, group.rows[index : index + 1]
        row, last = int(place[0]), starts[index : index + 1] + wanted
        if table.capacity[row] <= last[0]:
            # With pages that it has got here a request seldom lacks one where decodes take theirs.
            self._leave_behind(group, group.indices[index : index + 1], starts)
        while table.capacity[row] <= last[0]:
            if self.kv.available <= self.reserve + len(self.groups):
                break
            self._grow(place, last)
        return min(wanted, int(table.capacity[row] - 1 - starts[index]))

    def _step(
        self,
        group: Group,
        starts: np.ndarray,
        ends: np.ndarray,
        chunks: np.ndarray | None = None,
        loop: Loop | None = None,
        drafts: Drafts | None = None,
    ) -> ScheduledStep:
        """The step of `group`; its last requests are chunks of prompts, of the lengths `chunks`,
        if there are any. With `drafts`, whose entries read what others write, it is a mixed one.
        """
        count = num_single = num_tokens = len(starts)
        max_query_len = 1
        if chunks is not None:
            num_tokens += int(chunks.sum()) - len(chunks)
            num_single -= int(np.count_nonzero(chunks > 1))
            max_query_len = int(chunks.max())
        if drafts is None:
            descriptor = self.programs.decide(num_tokens, count, max_query_len)
        else:
            descriptor = self.programs.decide_single(num_tokens)
        if descriptor is None:
            raise OutsideTable(f"no program for {num_tokens} tokens of {count} requests")
        self.padding.record(descriptor, num_tokens)
        return ScheduledStep(
            descriptor=descriptor,
            group=group,
            starts=starts,
            ends=ends,
            num_single=num_single,
            num_tokens=num_tokens,
            decode_only=chunks is None and drafts is None,
            num_releases=self.table.num_releases,
            new_pages=self.table.take_new_pages(),
            new_tokens=self.table.take_new_tokens(group) if group.level == PROCESSED else None,
            loop=loop,
            drafts=drafts,
        )

    # Results

    def update(self, step: ScheduledStep, tokens: np.ndarray) -> StepEvents:
        """Take the tokens `[at least R]` that the oldest step in flight sampled; requests that are
        done end here.

        A token of -1 says that a logit was not finite: its request ends with ERROR and without
        another token.

        A loop brings `[m, at least R]` for m steps, fewer than it was to do if it stopped early.

        Raises InternalError, and changes nothing, if it is another step or tokens are missing.
        """
        if not self._in_flight or self._in_flight[0] is not step:
            raise InternalError("a step was updated that is not the oldest one in flight")
        if step.loop is not None:
            return self._update_loop(step, step.loop, np.asarray(tokens))
        if step.drafts is not None:
            return self._update_drafts(step, step.drafts, np.asarray(tokens))
        if len(tokens) < len(step.group):
            raise InternalError(
                f"a step of {len(step.group)} requests came back with {len(tokens)} tokens"
            )
        self._in_flight.popleft()
        group, ends, indices, failed = step.group, step.ends, step.group.indices, []
        taken = np.asarray(tokens)[: len(group)]
        if not self._all_took(step, taken):
            live = self.table.epoch[group.rows] == group.epochs
            live &= group.samples
            failed = np.flatnonzero(live & (taken < 0)).tolist()
            indices = np.flatnonzero(live & (taken >= 0))
            group, ends, taken = group.select(indices), ends[indices], taken[indices]
        lengths = ends + 1
        self.table.tokens_flat[group.first_token + ends] = taken
        self.table.known[group.rows] = lengths
        finished = find_finished(group, lengths, taken)
        for request, reason in finished:
            self._end(request, reason)
        failures = [step.requests[index] for index in failed]
        for request in failures:
            self._end(request, FinishReason.ERROR)
        return StepEvents(
            group.requests, taken, indices, [request for request, _ in finished], failures
        )

    def _all_took(self, step: ScheduledStep, tokens: np.ndarray) -> bool:
        """Whether each request of `step` is still there and got a token."""
        if not step.decode_only or self.table.num_releases != step.num_releases:
            return False
        return not np.count_nonzero(tokens < 0)

    def _update_loop(self, step: ScheduledStep, loop: Loop, tokens: np.ndarray) -> StepEvents:
        is_void = loop.chained and self._halted
        done = count_iterations(tokens, len(step.rows), loop, is_void)
        stopped_early = done < loop.steps
        self._in_flight.popleft()
        self._halted = stopped_early and not is_void and bool(self._in_flight)
        table = self.table
        live = np.flatnonzero(table.epoch[step.rows] == step.group.epochs)
        if is_void:
            live = live[:0]
        group, ends, taken = step.group.select(live), step.ends[live], tokens[:, live]
        if stopped_early:
            # Neither the steps that were left out nor a loop chained to this one happened.
            table.computed[group.rows] = ends - 1 + done
        counts, last = count_taken(group.stop_ids, taken)
        return self._take_several(group, ends, taken, counts, last, np.tile(live, (len(taken), 1)))

    def _update_drafts(self, step: ScheduledStep, drafts: Drafts, tokens: np.ndarray) -> StepEvents:
        if len(tokens) < len(step.group):
            raise InternalError(
                f"a step of {len(step.group)} entries came back with {len(tokens)} tokens"
            )
        self._in_flight.popleft()
        table, sampled = self.table, tokens[: len(step.group)]
        heads = drafts.heads
        live = np.flatnonzero(table.epoch[step.rows[heads]] == step.group.epochs[heads])
        group, ends = step.group.select(heads[live]), step.ends[heads[live]]
        taken, most = drafts.by_request(sampled)[:, live], drafts.kept(sampled)[live]
        counts, last = count_taken(group.stop_ids, taken, most)
        # Requests go on by several tokens, each by its own number.
        self._steps_left = 0
        table.computed[group.rows] = ends + counts - 1
        self._num_drafts += int((drafts.counts[live] > 1).sum())
        self._num_draft_tokens += int(drafts.counts[live].sum()) - len(live)
        self._num_accepted += int(counts.sum()) - int((counts > 0).sum())
        indices = heads[live] + np.arange(len(taken))[:, None]
        return self._take_several(group, ends, taken, counts, last, indices)

    def _take_several(
        self, group: Group, ends: np.ndarray, taken: np.ndarray, counts: np.ndarray,
        last: np.ndarray, indices: np.ndarray,
    ) -> StepEvents:  # fmt: skip
        """Take the first `counts` [R] of the tokens `taken` [m, R] of a group, which stand from
        position `ends` [R] on. See `count_taken` for `last`. `indices` [m, R]: entries of the
        step's output.
        """
        table, rows, requests = self.table, group.rows, group.requests
        broken = last < 0
        owner, iteration, flat = flatten(taken, counts)
        table.tokens_flat[rows[owner] * table.max_model_len + ends[owner] + iteration] = flat
        lengths = ends + counts
        table.known[rows] = lengths
        sound = np.flatnonzero(~broken)
        finished = find_finished(group.select(sound), lengths[sound], last[sound])
        for request, reason in finished:
            self._end(request, reason)
        failed = np.flatnonzero(broken).tolist()
        for index in failed:
            self._end(requests[index], FinishReason.ERROR)
        ended = [request for request, _ in finished]
        ended += [requests[index] for index in failed if counts[index]]
        failures = [requests[index] for index in failed if not counts[index]]
        return StepEvents(
            [requests[index] for index in owner.tolist()],
            flat,
            indices[iteration, owner],
            ended,
            failures,
        )

    # Upkeep

    def metrics(self) -> SchedulerMetrics:
        """A reading of all gauges and counters."""
        return SchedulerMetrics(
            running=self.table.num_used,
            waiting=len(self._waiting),
            cache_usage=self.kv.num_held / self.kv.num_pages,
            prefix_queries=self.prefixes.num_queries,
            prefix_hits=self.prefixes.num_hits,
            preemptions=self._preemptions,
            padded_share=self.padding.padded_share,
            errors=self._errors,
            drafts=self._num_drafts,
            draft_tokens=self._num_draft_tokens,
            accepted_tokens=self._num_accepted,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while requests run."""
        if self.table.num_used:
            return False
        self.kv.reset()
        return True

    def abandon(self) -> None:
        """End all requests with ERROR, and touch no books, which may disagree: nothing is
        scheduled ever after.
        """
        for request in self._requests.values():
            request.state = RequestState.FINISHED
            request.finish_reason = FinishReason.ERROR
        self._requests = {}
        self._in_flight.clear()

    def check_integrity(self) -> None:
        """Raise InternalError, naming the fault, unless all books agree. Changes nothing; slow,
        for tests.
        """
        table = self.table
        table.check_integrity(sum(step.num_iterations for step in self._in_flight))
        held = [request for request in table.requests if request is not None]
        self.kv.check_integrity([table.pages_of(request.row) for request in held])
        if sorted(map(id, chain(self._decoding.values(), self._prefilling))) != sorted(
            map(id, held)
        ):
            raise InternalError("the requests that decode or prefill are not those in the table")
        for row, request in self._decoding.items():
            if request.row != row or table.computed[row] < table.known[row] - 1:
                raise InternalError(
                    f"request {request.request_id} decodes but lacks more than its last token"
                )
        for request in self._prefilling:
            if table.computed[request.row] >= table.known[request.row]:
                raise InternalError(
                    f"request {request.request_id} prefills but has nothing left to prefill"
                )
        waiting = list(self._waiting)
        if sorted(waiting, key=lambda request: request.order) != waiting:
            raise InternalError("the waiting queue is not in order")
        states = [(request, RequestState.WAITING) for request in waiting] + [
            (r, RequestState.RUNNING) for r in held
        ]
        if (
            len(states) != len(self._requests)
            or {r.request_id: r for r, _ in states} != self._requests
        ):
            raise InternalError("the requests are not those that wait or run")
        for request, state in states:
            if request.state is not state or (request.row >= 0) != (state is RequestState.RUNNING):
                raise InternalError(
                    f"request {request.request_id} is {request.state.value} in row {request.row}"
                )
        for request in held:
            known = table.tokens[request.row, : table.known[request.row]]
            for number, group in enumerate(self.groups):
                self.kv.check_content(
                    table.pages_in(number, request.row),
                    known,
                    request.cache_salt,
                    number,
                    int(table.dropped[number, request.row]),
                    group.page_size // self.config.page_size,
                )
