"""The front's end of the engine's process: starts it, sends requests, hands out what comes back,
and notices when it hangs or ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from ...shared.errors import EngineDead, InternalError, Overloaded, RequestError
from ...shared.executor.driver import clear_up
from ...shared.interpreter import module_command
from ...shared.progress import Progress, silent
from ...shared.sampling_params import SamplingParams
from ...shared.starvation import Silence
from ...shared.tokenizer import Tokenizer
from ..batch import settings_of
from .child import EXIT_ENGINE, EXIT_FAILED
from .live import Live
from .messages import (
    Abort,
    Add,
    Beat,
    Fatal,
    Finish,
    Gauges,
    Job,
    PrefixesReset,
    Ready,
    Refused,
    Reset,
    ResetPrefixes,
    Starting,
    Step,
    decode_outbox,
    encode,
    started_in,
    updates_of,
)

LOG = logging.getLogger("twinfer.server")
CHILD = f"{__package__}.child"
WATCH_S = 0.2
"""How often it is looked after."""
ENGINE_STOPPED_S = 5.0
"""How long a signal may stop the engine, if nothing says how long it may hang: while it starts,
nothing else would notice.
"""
QUIET_S, TOLD_S = 1.0, 5.0
"""How long an engine may be silent until it is looked at whether it gets a processor, and how long
it may get none until the log says so.
"""
STACKS_S = 0.5
"""How long a hung engine has to say where it hangs."""
PARTING_S = 10.0
"""How long an engine that was told to leave may take."""


@dataclass(slots=True)
class Limits:
    """How many requests may wait beyond those that have a place in the batch, and how many tokens
    of prompts.
    """

    requests: int
    tokens: int


@dataclass(slots=True)
class Counters:
    """What the front counts; `metrics` shows it."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    rejected: dict[str, int] = field(default_factory=dict)


class EngineProcess:
    """One engine in a process of its own. All calls come from the thread of the event loop.

    `exit_code` and `why` are set once it has ended. `on_tokens(live, count, now)` is called for
    what a step brings, `on_end(live)` when all completions of a request have ended by themselves.
    """

    def __init__(
        self,
        options: dict[str, Any],
        tokenizer: Tokenizer | None,
        *,
        limits: Limits,
        hang_s: float | None = None,
        progress: Progress = silent,
        on_tokens: Callable[[Live, int, float], None] = lambda live, count, now: None,
        on_end: Callable[[Live], None] = lambda live: None,
        log_format: str = "text",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.rescue: Callable[[Live], bool] = lambda live: False
        """Asked for each request that an end of the engine leaves: whether another one takes it."""
        self._environment = environment or {}
        self.ready: Ready | None = None
        self.gauges = Gauges()
        self.counters = Counters()
        self.limits = limits
        self.exit_code: int | None = None
        self.why = ""
        self.draining = False
        self.tokenizer = tokenizer
        self.ended = asyncio.Event()
        self.started = asyncio.Event()
        self._options = options
        self._hang_s = hang_s
        self._progress = progress
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._log_format = log_format
        self._numbers = itertools.count(1)
        self._live: dict[int, tuple[Live, int]] = {}
        self._waiting: dict[int, int] = {}
        self._waiting_tokens = 0
        self._resets: deque[asyncio.Future[bool]] = deque()
        self._silence = Silence()
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._context: Any = None

    # -- life

    def start(self) -> None:
        """Start the process; `started` or `ended` tells what came of it."""
        self._folder = tempfile.mkdtemp(prefix="twinfer-")  # only its owner may enter it
        self._context = zmq.asyncio.Context()
        self._outbox = self._context.socket(zmq.PULL)
        self._inbox = zmq.Socket(self._context, zmq.PUSH)
        for socket, name in ((self._inbox, "in"), (self._outbox, "out")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{self._folder}/{name}")
        # Its output would mix with what a command prints.
        self._process = subprocess.Popen(
            module_command(CHILD),
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            start_new_session=True,
            env=os.environ | self._environment,
        )
        job = msgspec.json.encode(Job(self._folder, self._options, self._log_format))
        with suppress(BrokenPipeError):  # it has ended already; `_watch` will say so
            _stdin(self._process).write(job + b"\n")
            _stdin(self._process).flush()
        self._silence = Silence()
        self._tasks = [
            asyncio.create_task(self._listen()),
            asyncio.create_task(self._watch()),
        ]

    async def close(self) -> None:
        """End the process and all that it has started. Requests that are left get an error."""
        self._finish(self.exit_code or 0, self.why or "the server is going down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        process = self._process
        if process is not None:
            _stdin(process).close()  # it leaves when its standard input ends
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, PARTING_S)
            self._kill()
            process.wait()
            clear_up(process.pid)
        if self._context is not None:
            self._inbox.close(linger=0)
            self._outbox.close(linger=0)
            self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        """The process and what it has started; what has ended is passed over."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(_started(self._process).pid, signal.SIGKILL)

    def _finish(self, exit_code: int, why: str) -> None:
        if self.exit_code is None:
            self.exit_code, self.why = exit_code, why
        error = EngineDead("the engine has ended; try again once the server is up again")
        left = {id(live): live for live, _ in self._live.values()}
        self._live.clear()
        self._waiting.clear()
        self._waiting_tokens = 0
        for live in left.values():
            if not self.rescue(live):
                live.fail(error)
        for reset in self._resets:
            if not reset.done():
                reset.set_exception(error)
        self._resets.clear()
        self.ended.set()

    # -- health

    @property
    def hang_limit(self) -> float:
        """Seconds without a message after which the engine counts as hung."""
        return self._hang_s or (self.ready.hang_limit if self.ready else float("inf"))

    @property
    def alive(self) -> bool:
        """Whether it has not ended, and was heard of lately. A start may take its time."""
        hangs = self.ready is not None and self._silence.seconds >= self.hang_limit
        return self.exit_code is None and not hangs

    def _look(self, pid: int) -> None:
        """See whether it could have been heard."""
        before = self._silence.excused
        self._silence.look(pid, min(QUIET_S, self.hang_limit / 4))
        if before < TOLD_S <= self._silence.excused:
            LOG.warning("nothing is heard of the engine: others have the processors")

    async def _watch(self) -> None:
        process = _started(self._process)
        while self.exit_code is None:
            await asyncio.sleep(WATCH_S)
            self._look(process.pid)
            code = process.poll()
            if code is not None:
                await asyncio.sleep(0.2)  # what it said last is on its way
                if self.exit_code is None:
                    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                    code = EXIT_ENGINE if self.ready else EXIT_FAILED
                    self._finish(code, f"the engine ended {how}")
            elif self.exit_code is None and not self.alive:
                process.send_signal(signal.SIGUSR1)  # its stacks, on standard error
                silence = self._silence.seconds
                await asyncio.sleep(STACKS_S)
                self._finish(EXIT_ENGINE, f"the engine has hung for {silence:.0f} s; killed")
                self._kill()
            elif self._silence.stopped > (self._hang_s or ENGINE_STOPPED_S):
                why = f"the engine was stopped for {self._silence.stopped:.0f} s; killed"
                self._finish(EXIT_ENGINE if self.ready else EXIT_FAILED, why)
                self._kill()

    async def _listen(self) -> None:
        while True:
            data = await self._outbox.recv()
            try:
                self._silence.end()
                self._take(decode_outbox(data))
            except Exception as error:
                self._finish(EXIT_ENGINE, f"a message of the engine cannot be taken: {error!r}")
                self._kill()
                raise

    def _take(self, message: Any) -> None:
        if isinstance(message, Step):
            self.gauges = message.gauges or self.gauges
            self._take_step(message)
        elif isinstance(message, Beat):
            self.gauges = message.gauges
        elif isinstance(message, Refused):
            self._take_refusal(message)
        elif isinstance(message, PrefixesReset):
            reset = self._resets.popleft()
            if not reset.done():  # else nobody waits for it any more
                reset.set_result(message.done)
        elif isinstance(message, Starting):
            if self.ready is None:  # one that starts anew is heard of, and has no bar
                self._progress(message.what, message.done, message.total)
        elif isinstance(message, Ready):
            self.ready = message
            self.started.set()
        elif isinstance(message, Fatal):
            self._finish(message.exit_code, message.message)

    def _take_step(self, step: Step) -> None:
        finished, now = [], time.monotonic()
        self.counters.steps += 1
        for number in started_in(step):
            if number in self._live:
                self._live[number][0].begin(self._live[number][1], now)
        for number, update in updates_of(step):
            entry = self._live.get(number)
            if entry is None:
                continue  # it was aborted, and this was on its way
            live, index = entry
            self._leave_queue(number)
            self.counters.generation_tokens += len(update.tokens)
            if live.take(index, update):
                finished.append(number)
            self._on_tokens(live, len(update.tokens), now)
            if live.completions[index].done:
                del self._live[number]
                self.counters.cached_tokens += update.num_cached_tokens
                if live.done:
                    self._on_end(live)
        if finished:
            self._send(Finish(finished))

    def _take_refusal(self, refused: Refused) -> None:
        entry = self._live.get(refused.id)
        if entry is not None:
            live = entry[0]
            live.fail(live.named(RequestError(refused.field, refused.reason)))
            self.abort(live)

    # -- requests

    @property
    def num_waiting(self) -> int:
        """Requests that have not had a token yet."""
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def admit(self, prompts: int, tokens: int) -> None:
        """Raise Overloaded if so many requests with so many tokens in all cannot wait, EngineDead
        if the engine has ended.
        """
        if self.exit_code is not None:
            raise EngineDead(f"the engine has ended: {self.why}")
        if self.ready is None:
            raise self._overloaded("starting", "the engine is starting")
        if self.draining:
            raise self._overloaded("draining", "the server is going down")
        if too_much := self.has_too_much(prompts, tokens):
            raise self._overloaded(*too_much)

    def has_too_much(self, prompts: int, tokens: int) -> tuple[str, str] | None:
        """What of so many more requests and tokens cannot wait, and what waits; None if all can."""
        if self.ready is None:
            return None
        # What fits into an idle server is never refused: nothing would change by waiting.
        waiting = len(self._waiting)
        places = max(0, self.ready.model["max_num_seqs"] - (len(self._live) - waiting))
        if waiting and waiting + prompts > self.limits.requests + places:
            return "requests", f"{waiting} requests are waiting"
        if waiting and self._waiting_tokens + tokens > self.limits.tokens:
            return "tokens", f"{self._waiting_tokens} tokens are waiting"
        return None

    def _overloaded(self, reason: str, message: str) -> Overloaded:
        self.counters.rejected[reason] = self.counters.rejected.get(reason, 0) + 1
        return Overloaded(f"{message}; try again later")

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        changed: asyncio.Event | None = None,
    ) -> Live:
        """Send a prompt with `params.n` completions, which `admit` has let in together with the
        other prompts of the call. Registers and sends in one go, so that a cancelled client leaves
        nothing behind.
        """
        settings = [settings_of(params, index) for index in range(params.n)]
        live = Live(list(prompt), settings, self.tokenizer, changed, priority=priority, salt=salt)
        self.send(live)
        self.counters.prompt_tokens += len(prompt)
        return live

    def send(self, live: Live) -> None:
        """Register a request that has no tokens yet, and send it."""
        data, size = np.array(live.prompt_ids, np.int32).tobytes(), len(live.prompt_ids)
        live.numbers = [next(self._numbers) for _ in live.settings]
        for index, (number, one) in enumerate(zip(live.numbers, live.settings, strict=True)):
            self._live[number] = (live, index)
            self._waiting[number] = size
            self._waiting_tokens += size
            self._send(Add(number, data, one, live.priority, live.salt))

    def abort(self, live: Live) -> None:
        """Nobody wants `live` any more. Ended ones are passed over."""
        # Another engine may have given the same numbers.
        numbers = [n for n in live.numbers if n in self._live and self._live[n][0] is live]
        for number in numbers:
            del self._live[number]
            self._leave_queue(number)
        if numbers:
            self._send(Abort(numbers))

    def reset(self) -> None:
        """End all requests, with an error for their clients."""
        error = Overloaded("the server was reset")
        for live, _ in list(self._live.values()):
            live.fail(error)
        self._live.clear()
        self._waiting.clear()
        self._waiting_tokens = 0
        self._send(Reset())

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while there are requests.
        Raises Overloaded, EngineDead.
        """
        self.admit(0, 0)
        reset = asyncio.get_running_loop().create_future()
        self._resets.append(reset)
        self._send(ResetPrefixes())
        return bool(await reset)

    def requests(self) -> list[dict[str, Any]]:
        """Each completion that has not ended, the oldest first: its id, age and sizes. It waits
        until it has a token.
        """
        now = time.monotonic()
        return [
            {
                "id": live.name,
                "completion": index,
                "state": "waiting" if number in self._waiting else "running",
                "age_s": round(now - live.created, 3),
                "prompt_tokens": len(live.prompt_ids),
                "output_tokens": len(live.completions[index].output.token_ids),
            }
            for number, (live, index) in self._live.items()
        ]

    def _leave_queue(self, number: int) -> None:
        self._waiting_tokens -= self._waiting.pop(number, 0)

    def _send(self, message: Any) -> None:
        """Requests are registered before: one that has ended and of which nobody knows yet takes no
        message, and `_finish` will see to what it leaves.
        """
        if self.exit_code is None:
            with suppress(zmq.Again):  # nobody is at the other end, as nothing else limits it
                self._inbox.send(encode(message), zmq.NOBLOCK)


def _started(process: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
    if process is None:
        raise InternalError("the engine's process was not started")
    return process


def _stdin(process: subprocess.Popen[bytes]) -> Any:
    return process.stdin
