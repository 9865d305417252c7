"""The engine core: requests of integers in, tokens out. It ties the scheduler, the packer and a
worker together.

`step()` keeps up to two steps in flight: the next step is scheduled and started before the tokens
of the one before it are read, so the host works while the device does. With `async_scheduling` off,
each step is read before the next one is scheduled; the tokens are the same.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from .backends import find_backend, first_installed
from .banned_sequences import BannedSequences, every_token
from .config import Backend, Change, EngineConfig, ResolvedConfig, resolve
from .demand import ANYTHING, Demand
from .errors import (
    ConfigError,
    EngineClosed,
    EngineDead,
    InternalError,
    RankLost,
    RequestError,
)
from .grammars import Grammars, Look, Matcher, new_masks
from .interrupts import DeferredInterrupts
from .kv_scales import with_scales
from .models.caches import cached_tokens, layout_of, request_pages, step_shape
from .models.config import ModelConfig
from .packer import pack, padding
from .page_groups import PageGroup
from .progress import Progress, silent
from .quantized import with_quantization
from .request import FinishReason, Request
from .request_checks import (
    check_cache_salt,
    check_priority,
    check_tokens,
    stop_tokens,
    token_array,
)
from .request_table import ScheduledStep
from .sampling_encoding import encode_mask
from .sampling_params import SamplingParams
from .scheduler import Scheduler, SchedulerMetrics
from .scheduler_config import SchedulerConfig
from .step import StepInput, StepOutput, TopLogprobs, mask_words
from .worker import (
    ProgramReport,
    RankProcesses,
    StepHandle,
    Worker,
    attach_camera,
    cache_pages,
    create_worker,
    most_room,
    start_ranks,
)

LOG = logging.getLogger("twinfer.engine")
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's API uses the same number."""


class Logprob(NamedTuple):
    """Natural log of a token's probability, from the raw logits, and its rank (1 is the most
    probable).
    """

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]
"""The best tokens of one position and the one that was taken, by token id."""


class Update(NamedTuple):
    """What one step brought to one request. Values alone, so that it can cross to another process.

    Each request that `Engine.add` took has exactly one update with a `finish_reason`, its last one,
    however it ends; only a dead engine (EngineDead) sends none.

    tokens             in order; none where the request ended without one more
    logprobs           one for each of `tokens`, if they were asked for
    prompt_logprobs    with the first token, if they were asked for
    num_cached_tokens  tokens of the prompt that the prefix cache supplied
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class StartReport:
    """What happened before *ready*: values filled in, programs, seconds by phase, the size of
    the cache.
    """

    changes: list[Change]
    programs: list[ProgramReport] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    num_pages: int = 0
    page_bytes: int = 0
    cached_tokens: int = 0
    """Tokens that the cache holds of requests of `max_model_len` tokens."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    scheduled: ScheduledStep
    packed: StepInput
    handle: StepHandle


class Engine:
    """Owns one worker. Not thread-safe: one thread calls everything here. `close()` frees the
    device.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        folder: str,
        progress: Progress = silent,
        demand: Demand = ANYTHING,
    ) -> None:
        """Loads the model and builds all programs that `demand` needs. A start that fails, wherever
        that is, leaves the device free.

        Raises ConfigError, ModelError, BackendUnavailable.
        """
        backend = config.backend
        if backend == "auto" and config.tensor_parallel_size > 1:
            backend = first_installed(config.device)
        ranks = start_ranks(
            backend, config.device, config.tensor_parallel_size, progress,
            config.distributed_executor_backend,
        )  # fmt: skip
        try:
            if ranks is not None:
                config = replace(config, backend=cast(Backend, backend))
            self._start(config, model, folder, progress, demand, ranks)
        except BaseException:
            self._give_up(ranks)
            raise

    def _start(
        self,
        config: EngineConfig,
        model: ModelConfig,
        folder: str,
        progress: Progress,
        demand: Demand,
        ranks: RankProcesses | None,
    ) -> None:
        self._folder, self._progress = folder, progress
        if config.capture is not None:
            # What is kept of a step is what its own program passed from layer to layer.
            demand = replace(demand, streams=True)
        self._resolve(config, model, demand, ranks)
        self._make_ready(ranks)
        self._open_books()
        self._is_stuck = False
        """Whether a request without a form has no token left."""
        self.grammars = Grammars(folder, self.model.vocab_size, self.model.eos_token_ids)
        self._has_camera = config.capture is not None
        if config.capture is not None:
            attach_camera(self, config, folder)

    def _give_up(self, ranks: RankProcesses | None) -> None:
        """End what a start that fails has begun: the ranks, which are the worker too, or the
        worker, if it was made. An error shows the start to whoever keeps it, so that nothing would
        go by itself.
        """
        owner = getattr(self, "worker", None) if ranks is None else ranks
        if owner is not None:
            # A device that has failed may not close either, which is not what the caller asks.
            with suppress(Exception):
                owner.close()

    def _resolve(
        self,
        config: EngineConfig,
        model: ModelConfig,
        demand: Demand,
        ranks: RankProcesses | None,
    ) -> None:
        """Settle device, configuration and model, before anything is loaded."""
        chosen: list[Change] = []
        if ranks is None:
            backend, self.device, chosen = find_backend(config.backend, config.device)
            config = replace(config, backend=backend)
        else:
            self.device = ranks.device
        model, quantized = with_quantization(model, config.quantization)
        self.config, changes = resolve(config, model, self.device, demand)
        weights = None if self.config.load_format == "dummy" else self._folder
        self.model, scales = with_scales(model, self.config, weights)
        self.report = StartReport([*chosen, *changes, *quantized, *scales])
        self._asked = self.config
        self.table = self.config.table()
        self.shape = step_shape(self.model, self.config)

    def _make_ready(self, ranks: RankProcesses | None) -> None:
        """Load the model, size the cache, and build the programs."""
        self.worker: Worker = (
            create_worker(self.model, self.config, self.device, self._folder)
            if ranks is None
            else ranks.make_worker(self.model, self.config, self._folder)
        )
        self.config = self.worker.config
        self.report.changes += self.worker.changes
        if self.config.decode_steps > 1 and not self.worker.multi_step:
            raise ConfigError(
                f"decode_steps: got {self.config.decode_steps}, the {self.config.backend} worker "
                "allows 1"
            )
        self._check_length()
        self._timed("load", lambda: self.worker.load(self._progress))
        self.report.num_pages = self._timed("measure", self._num_pages)
        self.report.page_bytes = self.worker.page_bytes()
        layout = layout_of(self.model, self.config)
        self.report.cached_tokens = cached_tokens(
            layout, self.report.num_pages, self.config.max_model_len
        )
        # Before anything is compiled: the scheduler's own checks of the configuration.
        self.scheduler = Scheduler(
            scheduler_config(self.config, self.report.num_pages, layout.groups), self.table
        )
        self.worker.allocate_kv(self.report.num_pages)
        self._timed(
            "programs",
            lambda: self.report.programs.extend(self.worker.warm_up(self.table, self._progress)),
        )

    def _open_books(self) -> None:
        """What the engine keeps of requests and of steps in flight."""
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 2 if self.config.async_scheduling else 1
        self._step_id = 0
        self._num_read = 0
        self._restarted_at = -1
        self._num_requests = 0
        self._closed = False
        self._dead: str | None = None
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        # Of requests that were ended between steps, for the next `step`.
        self._updates: list[Update] = []
        self._matched: dict[str, Request] = {}
        self.started: list[str] = []
        """Ids of requests that the last `step` took out of the queue for the first time."""
        self._look: Look | None = None
        """The look at what may follow the tokens that were read last, until it is done."""
        self._unsampled = False
        """Whether the step in flight waits for that look."""

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.report.seconds[phase] = time.perf_counter() - start
        return result

    def _num_pages(self) -> int:
        config, page = self.config, self.worker.page_bytes()
        asked = {"num_pages": config.num_pages}
        if config.num_pages is None and config.kv_cache_memory is not None:
            asked = {"kv_cache_memory": config.kv_cache_memory // page}
        for name, number in asked.items():
            if number is not None:
                if not 1 <= number * page <= self.device.memory:
                    raise ConfigError(
                        f"{name}: got {getattr(config, name)}; a page takes {page} bytes, the "
                        f"device has {self.device.memory}, and at least one page is needed"
                    )
                return number
        # Stored programs have the number that they were compiled with, which may be any.
        least = 1 if config.aot_folder is not None else None
        return self._enough_pages(self.worker.measure(), least)

    def _check_length(self) -> None:
        """Raise ConfigError where no request of `max_model_len` tokens has room, as far as that is
        known before weights are read: tables of so many positions are made with them.
        """
        config = self.config
        if (config.num_pages, config.kv_cache_memory, config.aot_folder) != (None, None, None):
            return
        room = most_room(self.model, config, self.device)
        if room is not None:
            self._enough_pages(room)

    def _enough_pages(self, room: int, least: int | None = None) -> int:
        """The pages that the cache has of `room` bytes. Raises ConfigError if they are fewer than
        `least`, or, where that is None, than a request of `max_model_len` tokens holds.
        """
        config, page = self.config, self.worker.page_bytes()
        needed = request_pages(self.model, config)
        pages = cache_pages(config, room, page, needed)
        if pages < (needed if least is None else least):
            raise ConfigError(
                f"max_model_len: {config.max_model_len} tokens need {needed} pages of {page} "
                f"bytes, and there is memory for {pages}; lower max_model_len or raise "
                "kv_cache_memory"
            )
        return pages

    def add(
        self,
        request_id: str,
        prompt: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Queue a request. Raises RequestError, which leaves the engine and others alone,
        EngineDead, EngineClosed.
        """
        self._check_usable()
        tokens = token_array(prompt)
        check_tokens(tokens, self.model)
        params.check_vocabulary(self.model.vocab_size)
        self.config.demand.check(params)
        check_priority(priority, self.config.scheduling_policy)
        check_cache_salt(cache_salt)
        request = Request(
            request_id,
            tokens.astype(np.int32),
            params,
            derive_seed(self.config.seed, self._num_requests)
            if params.seed is None
            else params.seed,
            stop_ids=stop_tokens(params, self.model),
            priority=priority,
            cache_salt=cache_salt,
        )
        request.matcher = self._matcher_of(request)
        with self._changing_books():
            self.scheduler.add(request)
            self._num_requests += 1
            if request.matcher is not None:
                self._matched[request_id] = request
            if params.prompt_logprobs is not None:
                self._prompt_logprobs[request_id] = [None] * len(tokens)
        return request

    @cached_property
    def _every_token(self) -> np.ndarray:
        """The mask [W] of the whole vocabulary, made for the first request that bans sequences."""
        return every_token(self.model.vocab_size)

    def _matcher_of(self, request: Request) -> Matcher | None:
        """What says which tokens may follow those of a request, where they decide that."""
        params, banned = request.params, None
        if params.bad_words:
            raise RequestError(
                "bad_words", "are texts, and an engine knows token ids: see banned_sequences"
            )
        if params.banned_sequences:
            banned = BannedSequences(params.banned_sequences, request.stop_ids, params.min_tokens)
        if banned is None and params.structured_outputs is None:
            return None
        base = encode_mask(params, self.model.vocab_size)
        if params.structured_outputs is not None:
            return self.grammars.start(params.structured_outputs, base, banned)
        matcher = Matcher(None, base, banned=banned)
        matcher.take(self._every_token)
        return matcher

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if it is not known (any more)."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request for a reason of the caller's, such as a stop string; False if it is not
        known (any more).

        The next `step` says so in an update.
        """
        if self._dead is not None:
            return False  # all requests ended with the engine
        with self._changing_books():
            return self._finish(request_id, reason)

    def _finish(self, request_id: str, reason: FinishReason) -> bool:
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        self._prompt_logprobs.pop(request_id, None)
        self._matched.pop(request_id, None)
        self.scheduler.finish(request_id, reason)
        self._updates.append(_last_update(request))
        return True

    def abort_all(self) -> None:
        """End all requests. Whoever got an exception out of `add` or `step` and goes on calls
        this first.
        """
        if self._dead is None and not self._closed:
            with self._changing_books():
                self._abort_all()

    def _abort_all(self) -> None:
        for request_id in list(self.scheduler.requests):
            self._finish(request_id, FinishReason.ABORT)

    def slowest_step(self) -> float:
        """Seconds that the slowest program takes now, on padding alone. Before the first request.

        Each kind's largest is run twice: what a first run still loads does not count.
        """
        slowest = 0.0
        for kind in {descriptor.kind for descriptor in self.table}:
            largest = max((d for d in self.table if d.kind == kind), key=lambda d: d.tokens)
            for _ in range(2):
                start = time.perf_counter()
                self.worker.execute(padding(largest, self.shape)).result()
                seconds = time.perf_counter() - start
            steps = self.config.decode_steps if kind == "decode" else 1
            slowest = max(slowest, seconds * steps)
        return slowest

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while there are requests or
        steps in flight, and once the engine has ended.
        """
        if self.has_work or self._dead is not None or self._closed:
            return False
        with self._changing_books():
            return self.scheduler.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        """Whether `step()` has anything to do."""
        return self._dead is None and bool(
            self.scheduler.has_work or self._in_flight or self._updates
        )

    def step(self) -> list[Update]:
        """Start what can be started, then read the oldest step in flight.

        An interrupt (SIGINT) waits for the end of the step; then all requests are aborted before
        KeyboardInterrupt leaves, and the engine takes new ones.

        Any other exception ends the engine: from then on what the device holds, what the host
        believes that it holds and the books may disagree. All requests end with the reason ERROR,
        and every later call raises EngineDead. With `restart_on_failure` a lost rank is none: new
        ranks are started, and all requests resume with the tokens that they had.
        """
        self._check_usable()
        with self._changing_books():
            try:
                return self._step()
            except RankLost as lost:
                self._restart(lost)
                updates, self._updates = self._updates, []
                return updates

    def late_compilations(self) -> int:
        """Programs that steps have compiled since *ready*. A rank that was lost while there was
        nothing to do is noticed here.
        """
        self._check_usable()
        with self._changing_books():
            try:
                return self.worker.compilations_after_ready()
            except RankLost as lost:
                self._restart(lost)
                return self.worker.compilations_after_ready()

    def _restart(self, lost: RankLost) -> None:
        """Build the worker anew. Raises `lost` if that is not wanted, or if nothing was read since
        the last time: what ends the ranks at once would do so for ever.
        """
        if not self.config.restart_on_failure or self._num_read == self._restarted_at:
            raise lost
        self._restarted_at = self._num_read
        LOG.warning("engine: starting again: %s", lost)
        look, self._look = self._look, None
        self._finish_look(look)
        self._unsampled = False
        self._in_flight.clear()
        self.worker.close()
        config = self._asked
        ranks = start_ranks(
            config.backend, self.device.platform, config.tensor_parallel_size, self._progress,
            config.distributed_executor_backend,
        )  # fmt: skip
        if ranks is None:
            raise lost
        try:
            self.worker = ranks.make_worker(self.model, config, self._folder)
            self.worker.load(self._progress)
            self.worker.allocate_kv(self.report.num_pages)
            self.worker.warm_up(self.table, self._progress)
        except BaseException:
            ranks.close()
            raise
        self.scheduler.start_over()

    def _check_usable(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine has ended, make a new one: {self._dead}")
        if self._closed:
            raise EngineClosed("the engine is closed, make a new one")

    @contextmanager
    def _changing_books(self) -> Iterator[None]:
        """Holds interrupts back; an exception in the middle ends the engine, unless it is a
        refused request's.
        """
        with DeferredInterrupts() as interrupts:
            try:
                yield
            except RequestError:
                raise
            except BaseException as error:
                self._end(error)
                raise
            try:
                interrupts.deliver()
            except BaseException:
                self._withdraw()
                raise

    def _withdraw(self) -> None:
        try:
            self._abort_all()
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException) -> None:
        """From now on the engine only says why it has ended."""
        words = " ".join(str(error).split()) or "no message"
        self._dead = f"step {self._step_id} failed with {type(error).__name__}: {words}"
        look, self._look = self._look, None
        if look is not None:
            with suppress(Exception):
                look.done()
        self._in_flight.clear()
        self._prompt_logprobs.clear()
        self._updates.clear()
        self._matched.clear()
        self.scheduler.abandon()

    def _step(self) -> list[Update]:
        # A camera reads the steps that it keeps at once, so none may wait for masks.
        depth = 1 if self._matched and self._has_camera else self._depth
        self.started.clear()
        while len(self._in_flight) < depth:
            scheduled = self.scheduler.schedule()
            self.started += self.scheduler.started
            if scheduled is None:
                break
            self._step_id += 1
            packed = pack(scheduled, self.scheduler.table, self.shape, self._step_id)
            look = self._sample()
            self._in_flight.append(_InFlight(scheduled, packed, self.worker.execute(packed)))
            # After the device has its work: what ends here is in the step already.
            self._finish_look(look)
            if packed.waiting is not None and len(self._in_flight) == 1:
                raise InternalError(f"step {self._step_id} waits, and no step is before it")
        if not self._in_flight:
            if self.scheduler.has_work:
                raise InternalError(
                    "requests wait, nothing is in flight, and nothing can be scheduled"
                )
        else:
            self._finish_look(self._sample())
            oldest = self._in_flight.popleft()
            self._read(oldest, oldest.handle.result())
            self._unsampled = bool(self._in_flight) and (
                self._in_flight[0].packed.waiting is not None
            )
            # While a thread looks, the next step is packed, and what came is told.
            if self._look is None or not (self._unsampled and self._look.runs):
                self._finish_look(self._sample())
        updates, self._updates = self._updates, []
        return updates

    def _sample(self) -> Look | None:
        """Start the sampler of the step whose requests waited for the tokens that were read last,
        if there is one: before another step is started, and after all that the host can do
        meanwhile. Returns a look that is to be finished, which may wait.
        """
        look, self._look = self._look, None
        if not self._unsampled:
            self._finish_look(look)
            return None
        self._unsampled, step = False, self._in_flight[0]
        waiting = [] if step.packed.waiting is None else step.packed.waiting.tolist()
        requests = [step.scheduled.requests[index] for index in waiting]
        if look is not None and look.is_all_of([_open_matcher(r) for r in requests]):
            # The device goes on before the matchers are asked whether they can.
            look.wait()
            self.worker.sample(look.words)
            return look
        self._finish_look(look)
        masks = np.empty((len(waiting), mask_words(self.model.vocab_size)), np.int32)
        for row, matcher in zip(masks, map(_open_matcher, requests), strict=True):
            row[:] = -1 if matcher is None else matcher.mask
        self.worker.sample(masks)
        return None

    def _finish_look(self, look: Look | None) -> None:
        """Wait for a look, and end the requests whose texts are complete, or cannot go on."""
        ended = look is not None and look.done()
        if not ended and not self._is_stuck:
            return
        self._is_stuck = False
        for request_id, request in list(self._matched.items()):
            matcher, form = request.matcher, request.params.structured_outputs
            if matcher is None:
                continue
            if matcher.finished:
                self._finish(request_id, FinishReason.STOP)
            elif matcher.stuck:
                self._finish(request_id, FinishReason.STUCK)
                if form is not None:
                    self.grammars.forget(form)

    def _read(self, step: _InFlight, output: StepOutput) -> None:
        """Take what a step brought; `_updates` say what that was."""
        self._num_read += 1
        if output.prompt_logprobs is not None:
            self._keep_prompt_logprobs(step, output.prompt_logprobs)
        events = self.scheduler.update(step.scheduled, output.tokens)
        requests, tokens, indices = events.requests, events.tokens.tolist(), events.indices.tolist()
        if self._matched:
            self._advance_matchers(requests, tokens, events.failed)
        listed: Iterator[TokenLogprobs] = iter(())
        if output.logprobs is not None:
            listed = _wanted_logprobs(output.logprobs, requests, tokens, indices)
        first, count = 0, len(tokens)
        while first < count:
            request, last = requests[first], first + 1
            # Of a loop, a request's tokens follow one another.
            while last < count and requests[last] is request:
                last += 1
            brought = tuple(tokens[first:last])
            logprobs = prompt = None
            if request.params.logprobs is not None and output.logprobs is not None:
                logprobs = [next(listed)]  # requests that want them are never in loops
            if self._prompt_logprobs:
                prompt = self._prompt_logprobs.pop(request.request_id, None)
            self._updates.append(
                Update(
                    request.request_id,
                    brought,
                    request.finish_reason,
                    logprobs,
                    prompt,
                    request.num_cached_tokens,
                )
            )
            first = last
        self._updates += map(_last_update, events.failed)

    def _advance_matchers(
        self, requests: Sequence[Request], tokens: Sequence[int], failed: Sequence[Request]
    ) -> None:
        """Start to tell the matchers which tokens came, and to look at what may follow."""
        for request in failed:
            self._matched.pop(request.request_id, None)
        brought = []
        for request, token in zip(requests, tokens, strict=True):
            matcher = request.matcher
            if matcher is None:
                continue
            if request.finish_reason is not None:
                self._matched.pop(request.request_id, None)
                continue
            if matcher.banned is not None:
                matcher.banned.take(token)
            if matcher.library is not None:
                brought.append((matcher, token))
            else:
                matcher.take(self._every_token)
                self._is_stuck |= matcher.stuck
        # Some workers have memory that masks go to the device from as they are.
        memory = getattr(self.worker, "new_masks", new_masks)
        self._look = self.grammars.advance(brought, memory)

    def _keep_prompt_logprobs(self, step: _InFlight, top: TopLogprobs) -> None:
        """Row p of a prompt tells the log-probability of its token p + 1."""
        scheduled, targets = step.scheduled, step.packed.prompt_targets
        first = step.packed.field("query_start")
        if targets is None:
            return
        live = self.scheduler.table.epoch[scheduled.rows] == scheduled.group.epochs
        for i, request in enumerate(scheduled.requests):
            kept = self._prompt_logprobs.get(request.request_id)
            wanted = request.params.prompt_logprobs
            if kept is None or wanted is None or not live[i]:
                continue
            start, end = int(scheduled.starts[i]), int(scheduled.ends[i])
            if np.isnan(top.chosen[int(first[i]) : int(first[i]) + end - start]).any():
                self._finish(request.request_id, FinishReason.ERROR)
                continue
            count = min(end, len(kept) - 1) - start
            rows = list(range(int(first[i]), int(first[i]) + count))
            tokens = targets[rows].tolist()
            asked = [(row, token, wanted) for row, token in zip(rows, tokens, strict=True)]
            kept[start + 1 : start + 1 + count] = _listed(top, asked)

    def metrics(self) -> SchedulerMetrics:
        """Gauges and counters of the scheduler."""
        return self.scheduler.metrics()

    def close(self) -> None:
        """Free the device; the engine is unusable afterwards."""
        if not self._closed:
            self._closed = True
            self._in_flight.clear()
            self.worker.close()


def _open_matcher(request: Request) -> Matcher | None:
    """What says which token may follow; None for a request that ended: it takes any, which is
    dropped.
    """
    return request.matcher if request.finish_reason is None else None


def _last_update(request: Request) -> Update:
    """The update of a request that ended without one more token."""
    cached = request.num_cached_tokens
    return Update(request.request_id, (), request.finish_reason, num_cached_tokens=cached)


def scheduler_config(
    config: ResolvedConfig, num_pages: int, groups: tuple[PageGroup, ...]
) -> SchedulerConfig:
    """The scheduler's part of the configuration."""
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        page_size=config.page_size,
        num_pages=num_pages,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy="priority" if config.scheduling_policy == "priority" else "fcfs",
        priority_window=config.priority_window,
        pipeline_depth=2 if config.async_scheduling else 1,
        watermark=config.watermark,
        decode_steps=config.decode_steps,
        groups=groups,
        drafts=config.speculative_config,
    )


def derive_seed(seed: int, index: int) -> int:
    """A 64-bit seed for the request (or the completion of a request) number `index`."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _wanted_logprobs(
    top: TopLogprobs, requests: Sequence[Request], tokens: Sequence[int], indices: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """Those of the requests that want any, in order; of each the one token at its index."""
    wanted = [
        (index, token, request.params.logprobs)
        for index, token, request in zip(indices, tokens, requests, strict=True)
        if request.params.logprobs is not None
    ]
    return iter(_listed(top, wanted))


def _listed(top: TopLogprobs, wanted: Sequence[tuple[int, int, int]]) -> list[TokenLogprobs]:
    """Of each (row, token, count) the log-probabilities of the token and of the `count` best ones.
    All rows in a few calls: numbers that are fetched one by one take far longer.
    """
    if not wanted:
        return []
    rows, tokens, counts = zip(*wanted, strict=True)
    most = max(counts)
    # A view of one row takes half as long as an array of its number.
    picked = slice(rows[0], rows[0] + 1) if len(rows) == 1 else np.asarray(rows)
    numbers = (
        top.rank[picked].tolist(),
        top.chosen[picked].tolist(),
        top.top_ids[picked, :most].tolist(),
        top.top[picked, :most].tolist(),
    )
    found = []
    for token, count, rank, chosen, ids, values in zip(tokens, counts, *numbers, strict=True):
        if values and values[-1] < LEAST_LOGPROB:  # the least of them
            values = [max(value, LEAST_LOGPROB) for value in values]
        logprobs = {token: Logprob(max(chosen, LEAST_LOGPROB), rank)}
        best = map(Logprob, values[:count], itertools.count(1))
        logprobs |= zip(ids[:count], best, strict=True)
        found.append(logprobs)
    return found
