"""The engine's process: one thread around `Engine`. `python -m twinfer.serving.server.child` with
a `Job` on standard input; only the front starts it.

It reads its inbox until that is empty, or for 50 ms, runs a step, and sends what the step brought.
When its standard input ends, the front is gone, and it leaves at once, even from inside a step.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import zmq

from ...shared.config import EngineConfig
from ...shared.engine import Engine
from ...shared.errors import EngineClosed, EngineDead, RequestError, TwinferError
from ...shared.models.config_json import load_config
from ...shared.models.digest import folder_digest
from ...shared.models.locate import model_folder
from ...shared.request import FinishReason
from ...shared.structured_outputs import StructuredOutputs
from .logs import configure_logging
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
    decode_inbox,
    encode,
    step_message,
)
from .trial import Trials

LOG = logging.getLogger("twinfer.engine")
IDLE_MS = 1000
"""How long it waits for a message before it says that it is alive."""
COMPILING_MS = 2
"""The same while a grammar is compiled for a request."""
TAKE_S = 0.05
"""How long messages are read before a step: a thousand of a large form each would take seconds."""
GAUGES_S = 0.1
"""Between two readings of the gauges."""
EXIT_FAILED, EXIT_ENGINE, EXIT_MEMORY = 1, 70, 71
"""The start failed; a step failed; the device has no memory left."""
OUT_OF_MEMORY = ("OutOfMemoryError", "RESOURCE_EXHAUSTED", "MemoryError")
HANG_STEPS, LEAST_HANG_S = 20, 10.0
"""An engine counts as hung when it was silent for so many times its slowest step, but not sooner
than after so many seconds.
"""


class Loop:
    """Reads the inbox, steps, and sends. `receive(wait_ms)` gives one message or None. `check` is
    asked before a grammar is compiled, and raises RequestError for one that should not be.
    """

    def __init__(
        self,
        engine: Engine,
        receive: Callable[[int], bytes | None],
        send: Callable[[Any], None],
        check: Callable[[StructuredOutputs], None] = lambda form: None,
    ) -> None:
        self._check = check
        self._engine = engine
        self._receive = receive
        self._send = send
        self._measured = 0.0
        self._compilers = ThreadPoolExecutor(2)
        self._compiling: dict[int, tuple[Add, Future[Any]]] = {}
        """Requests whose grammars are not compiled yet, by id: no step waits for those."""

    def turn(self) -> None:
        """Take the messages that are there, of very many the first, then run one step if there is
        work.
        """
        engine = self._engine
        patience = COMPILING_MS if self._compiling else IDLE_MS
        self._take(self._messages(0 if engine.has_work else patience))
        self._add_compiled()
        if not engine.has_work:
            if not self._compiling or time.monotonic() - self._measured >= IDLE_MS / 1000:
                self._measured = time.monotonic()
                self._send(Beat(self._gauges()))
            return
        updates = engine.step()
        now = time.monotonic()
        gauges = None
        if now - self._measured >= GAUGES_S or not engine.has_work:
            gauges, self._measured = self._gauges(), now
        self._send(step_message(updates, gauges, engine.started))

    def _messages(self, wait_ms: int) -> list[Any]:
        found: list[Any] = []
        end = float("inf")
        while time.monotonic() < end and (data := self._receive(wait_ms)) is not None:
            end = min(end, time.monotonic() + TAKE_S)
            wait_ms = 0
            try:
                found.append(decode_inbox(data))
            except (msgspec.DecodeError, TwinferError, ValueError, TypeError) as error:
                # The front sends only what it has checked: what cannot be read is nobody's.
                LOG.error("engine: a message was passed over: %s", error)
        return found

    def _take(self, messages: list[Any]) -> None:
        # Aborts first, so that a request whose abort stands behind it never starts.
        unwanted = {i for message in messages if isinstance(message, Abort) for i in message.ids}
        for number in unwanted:
            self._engine.abort(str(number))
            self._compiling.pop(number, None)
        for message in messages:
            if isinstance(message, Add) and message.id not in unwanted:
                self._compile_or_add(message)
            elif isinstance(message, Finish):
                for number in message.ids:
                    self._compiling.pop(number, None)
                    self._engine.finish(str(number), FinishReason.STOP)
            elif isinstance(message, Reset):
                self._compiling.clear()
                self._engine.abort_all()
            elif isinstance(message, ResetPrefixes):
                done = not self._compiling and self._engine.reset_prefix_cache()
                self._send(PrefixesReset(done))

    def _compile_or_add(self, message: Add) -> None:
        form = message.params.structured_outputs
        if form is None or self._engine.grammars.is_compiled(form):
            self._add(message)
        else:
            self._compiling[message.id] = message, self._compilers.submit(self._compile, form)

    def _compile(self, form: StructuredOutputs) -> None:
        self._check(form)
        self._engine.grammars.compile(form)

    def _add_compiled(self) -> None:
        for number, (message, compiled) in list(self._compiling.items()):
            if compiled.done():
                del self._compiling[number]
                self._add(message, compiled)

    def _add(self, message: Add, compiled: Future[Any] | None = None) -> None:
        try:
            if compiled is not None:
                compiled.result()
            if len(message.prompt) % 4:
                raise RequestError("prompt", "is no list of token ids")
            self._engine.add(
                str(message.id),
                np.frombuffer(message.prompt, np.int32),
                message.params,
                priority=message.priority,
                cache_salt=message.salt,
            )
        except RequestError as error:
            self._send(Refused(message.id, error.field, " ".join(error.reason.split())))
        except (EngineDead, EngineClosed):
            raise
        except Exception:
            # A bug of ours that this request met. If it has left the engine in doubt, the next
            # step says so.
            LOG.exception("engine: a request met an error inside")
            self._send(Refused(message.id, "request", "it met an error inside"))

    def _gauges(self) -> Gauges:
        metrics = dataclasses.asdict(self._engine.metrics())
        late = self._engine.late_compilations()
        return Gauges(**metrics, late_compilations=late)


def main() -> int:
    """Runs until the front leaves. Exit code 0, or what a `Fatal` said."""
    # A terminal and a container signal the whole group; the front decides for both.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The front asks a hung engine where it hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    configure_logging(job.log_format, verbose=False)
    threading.Thread(target=_leave_with_the_front, daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, name in ((inbox, "in"), (outbox, "out")):
        socket.set_hwm(0)
        socket.connect(f"ipc://{job.sockets}/{name}")

    def send(message: Any) -> None:
        outbox.send(encode(message))

    def receive(wait_ms: int) -> bytes | None:
        return inbox.recv() if inbox.poll(wait_ms) else None

    code = _run(job, receive, send)
    inbox.close(linger=0)
    outbox.close(linger=2000)
    context.term()
    return code


def _run(job: Job, receive: Callable[[int], bytes | None], send: Callable[[Any], None]) -> int:
    try:
        engine = start(job, send)
    except Exception as error:
        fatal = _fatal(error, starting=True)
        send(fatal)
        return fatal.exit_code
    trials = Trials(engine.grammars)
    with suppress(RequestError):  # without the library every form is refused
        engine.grammars.prepare()
        trials.start()
    loop = Loop(engine, receive, send, trials.check)
    try:
        while True:
            loop.turn()
    except Exception as error:
        fatal = _fatal(error, starting=False)
        send(fatal)
        return fatal.exit_code


def start(job: Job, send: Callable[[Any], None]) -> Engine:
    """The engine of a job. Sends how far the start has come, and `Ready`."""
    config = EngineConfig.from_options(job.options)
    folder = model_folder(config.model)

    engine = Engine(
        config,
        load_config(folder),
        folder,
        lambda what, done, total: send(Starting(what, done, total)),
    )
    # Without a tokenizer or the library, requests that need them are refused.
    with suppress(RequestError):
        engine.grammars.prepare()
    report, resolved = engine.report, engine.config
    model = {
        "backend": resolved.backend,
        "platform": engine.device.platform,
        "device": engine.device.name,
        "dtype": resolved.dtype,
        "digest": folder_digest(folder),
        "vocab_size": engine.model.vocab_size,
        "max_model_len": resolved.max_model_len,
        "longest_request": engine.scheduler.longest,
        "max_num_seqs": resolved.max_num_seqs,
        "page_size": resolved.page_size,
        "num_pages": report.num_pages,
        "cached_tokens": report.cached_tokens,
    }
    slowest = engine.slowest_step()
    limit = hang_limit(slowest)
    send(
        Ready(
            model,
            [
                *map(str, report.changes),
                f"hang-timeout: {limit:.0f} s; the slowest step takes {slowest:.3f} s",
            ],
            report.seconds,
            len(report.programs),
            limit,
            msgspec.to_builtins(dataclasses.asdict(resolved), enc_hook=str),
        )
    )
    return engine


def hang_limit(slowest: float) -> float:
    """Seconds without a message after which an engine counts as hung whose slowest step takes
    `slowest` seconds.
    """
    return max(LEAST_HANG_S, HANG_STEPS * slowest)


def _fatal(error: Exception, *, starting: bool) -> Fatal:
    words = " ".join(str(error).split()) or "no message"
    chain = f"{type(error).__name__} {words} {error.__cause__!r} {error.__context__!r}"
    if not isinstance(error, TwinferError):
        LOG.error("engine: an error inside", exc_info=error)
        words = f"{type(error).__name__}: {words}"
    if any(name in chain for name in OUT_OF_MEMORY):
        return Fatal(EXIT_MEMORY, words)
    if starting and isinstance(error, TwinferError):
        return Fatal(error.exit_code, words)
    return Fatal(EXIT_FAILED if starting else EXIT_ENGINE, words)


def _leave_with_the_front() -> None:
    """Wait for the end of standard input; then end this process and all that it has started."""
    while sys.stdin.buffer.read(4096):
        pass
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Frameworks' own threads have nothing to add, and some never end.
    os._exit(code)
