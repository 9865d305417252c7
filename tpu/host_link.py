"""What several hosts that run one model tell each other: the calls of the first, and what comes of
them.

Messages are those of `shared/executor/messages.py`, over tcp on the interface that the
coordinator's name stands for, with CURVE: each host has a key pair of its own, and who has none of
the keys that the hosts told each other hears nothing. Each host watches the others: one that
raises, or of which nothing is heard, ends all, from a thread, since a device that waits for a dead
peer never returns.
"""

from __future__ import annotations

import os
import socket as sockets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from ..bucketing import Table
from ..shared.config import ResolvedConfig
from ..shared.errors import BackendUnavailable, ConfigError, InternalError
from ..shared.executor.curve import CurveServer, connected
from ..shared.executor.messages import Beat, Call, Done, Failed, Keys, Report, decode, encode
from ..shared.executor.rank import checkpoint_digest, digest_of, failure
from ..shared.models.config import ModelConfig
from ..shared.progress import Progress, silent
from ..shared.starvation import Silence
from ..shared.step import StepInput, StepOutput
from ..shared.waiting import waiting
from ..shared.worker import ProgramReport, StepHandle, Worker

BEAT_S, SILENT_S = 1.0, 8.0
"""Between two signs of life, and how long there may be none."""
PATIENCE_S = 300.0
"""How long hosts wait for each other at start."""
EXIT_LOST = 70
"""The exit code of a host that has lost another one; that of a failed engine."""
ARGUMENTS: dict[str, Any] = {
    "allocate_kv": int, "warm_up": Table, "execute": StepInput, "sample": np.ndarray,
}  # fmt: skip
"""The calls of a worker that all hosts make and that take something, and what."""
ANSWERED = ("digests", "measure", "close")
"""The calls whose results the first host waits for."""
UNFINISHED = "it was closed before it was ready"
"""Why others leave where the first host has met no error of theirs."""
PARTING_S = 5.0
"""How long it waits for the others to leave: the last of them needs it still."""


class Board(Protocol):
    """Where hosts put up what the others are to know."""

    def put(self, name: str, value: str) -> None:
        """Put a value up, once."""
        ...

    def get(self, name: str, patience: float) -> str:
        """The value of that name, which is waited for, in seconds. Raises TimeoutError,
        BackendUnavailable.
        """
        ...


def digests_of(
    model: ModelConfig, config: ResolvedConfig, plan: str, folder: str
) -> dict[str, str]:
    """What must be the same on all hosts, by name."""
    kept = replace(config, compilation_cache_dir=None, aot_folder=None)
    return {
        "configuration": digest_of(model, kept),
        "plan": plan,
        "checkpoint": checkpoint_digest(folder, config.load_format),
    }


def end_process(why: str) -> None:
    """Say why in one line, and end this process whatever its other threads wait for."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    os._exit(EXIT_LOST)


def in_words(error: BaseException) -> str:
    """An error of the first host in one line."""
    failed = failure(0, error)
    return f"{failed.kind}: {failed.words}"


class Watch:
    """Gives signs of life, and loses a host that was heard once and then was silent for too
    long. While this process is stopped itself, or held up, nobody is silent: what the others say
    waits to be read.
    """

    def __init__(self, lose: Callable[[str], None], beat: Callable[[], None]) -> None:
        self._silences: dict[int, Silence] = {}
        self._lose, self._beat = lose, beat
        self._has_lost = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def heard(self, host: int) -> None:
        """A host has given a sign of life."""
        self._silences.setdefault(host, Silence()).end()

    def all_heard_since(self, then: float) -> bool:
        """Whether every host that was ever heard has given a sign of life since then."""
        return all(silence.heard > then for silence in list(self._silences.values()))

    @property
    def is_over(self) -> bool:
        """Whether nobody is waited for any more: a host was lost, or it was stopped."""
        return self._has_lost or self._done.is_set()

    def stop(self) -> None:
        """Nobody is waited for any more."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(BEAT_S):
            self._beat()
            for host, silence in list(self._silences.items()):
                silence.look(None, SILENT_S)
                if (seconds := silence.seconds) > SILENT_S:
                    self._lose(f"host {host} gave no sign of life for {seconds:.0f} s")
                    self._has_lost = True


def interface(address: str) -> tuple[str, int]:
    """The numeric address and the port of HOST:PORT. Raises BackendUnavailable."""
    host, _, port = address.rpartition(":")
    try:
        return sockets.gethostbyname(host), int(port)
    except OSError as error:
        raise BackendUnavailable(f"coordinator: {host}: {error}") from error


def doors(ip: str, port: int) -> str:
    """What has to be open for connections to the first host. Keys come by JAX's own service, whose
    port a firewall may let through alone.
    """
    return f"ports {port} and {port + 1} of {ip} must be open to them"


def key_name(host: int) -> str:
    """What a host's public key is called on the board."""
    return f"hosts/key/{host}"


def key_of(host: int, board: Board) -> str:
    """The public key of another host. It puts it up when its worker is made, the first one when it
    has those of all others. Raises BackendUnavailable.
    """
    try:
        with waiting(lambda: f"the key of host {host}", PATIENCE_S):
            return board.get(key_name(host), PATIENCE_S)
    except TimeoutError as error:
        raise BackendUnavailable(
            f"hosts: host {host} gave no key within {PATIENCE_S:.0f} s"
        ) from error


class FirstHost:
    """The worker of the engine: what starts device work is sent to the other hosts, the rest asks
    this one alone.
    """

    def __init__(
        self,
        worker: Worker,
        address: str,
        others: int,
        board: Board,
        digests: Mapping[str, str],
        lose: Callable[[str], None] = end_process,
    ) -> None:
        """Waits for the other hosts. Raises BackendUnavailable if they do not come or a port is
        taken, ConfigError if they run something else.
        """
        self._worker, self._others = worker, range(1, others + 1)
        self._lose, self._number = lose, 0
        self._context = zmq.Context()
        self._sending = threading.Lock()
        ip, port = interface(address)
        self._doors = doors(ip, port)
        self._server = CurveServer(self._context)
        try:
            self._calls, _ = self._server.bind(zmq.XPUB, ip, port)
            self._reports, _ = self._server.bind(zmq.PULL, ip, port + 1)
        except zmq.ZMQError as error:
            self._server.close()
            self._context.destroy(linger=0)
            raise BackendUnavailable(
                f"coordinator: {ip}, ports {port} and {port + 1}, where the other hosts connect: "
                f"{error.strerror}"
            ) from error
        self._calls.linger = self._reports.linger = 5000
        self._calls.setsockopt(zmq.XPUB_VERBOSE, 1)  # one message for each host that subscribes
        self._answers: dict[int, dict[int, Any]] = {}
        self._met = threading.Event()
        self._changed = threading.Condition()
        self._closing = False
        self._failed = UNFINISHED
        """Why nothing comes of this host, which the others are told that have to leave. "": it is
        ready.
        """
        self._watch = Watch(self._told, self._beat)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            keys = [key_of(host, board) for host in self._others]
            board.put(key_name(0), self._server.allow(keys))
            self._meet(digests)
        except BaseException as error:
            self._failed = in_words(error)
            if self._met.is_set():
                self._wait_for_leaving(self._send("close", self._failed))
            self._leave()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def _meet(self, digests: Mapping[str, str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        self._wait_for_subscriptions(deadline)
        self._met.set()
        number = self._send("digests")
        for host, other in self._collect(number, dict[str, str], deadline).items():
            for name, digest in other.items():
                if digest != digests[name]:
                    raise ConfigError(
                        f"{name}: host {host} has {digest}, host 0 has {digests[name]}; all hosts "
                        "must have the same"
                    )

    def _wait_for_subscriptions(self, deadline: float) -> None:
        """Wait until each of the others has subscribed twice; what is sent before would not reach
        it.
        """
        done = 0

        def others() -> str:
            came = f"{done // 2} of {len(self._others)} came"
            return f"connections of the other hosts: {came}; {self._doors}"

        with waiting(others, PATIENCE_S):
            while done < 2 * len(self._others):
                left = max(0.0, deadline - time.monotonic())
                if not self._calls.poll(round(1000 * left)):
                    raise BackendUnavailable(
                        f"hosts: {done // 2} of {len(self._others)} others came within "
                        f"{PATIENCE_S:.0f} s; {self._doors}"
                    )
                self._calls.recv()
                done += 1

    def _send(self, name: str, value: Any = None) -> int:
        with self._sending:
            if self._closing:
                return self._number
            # Signs of life have no number: they come from another thread.
            self._number += name != "beat"
            number = 0 if name == "beat" else self._number
            self._calls.send(encode(Call(number, name, msgspec.Raw(encode(value)))))
            return number

    def _collect(self, number: int, kind: Any, deadline: float | None = None) -> dict[int, Any]:
        """What call `number` gives on each of the other hosts. Without a deadline it may take as
        long as it does. Raises BackendUnavailable.
        """

        def missing() -> str:
            found = set(self._others) - set(self._answers.get(number, ()))
            return f"host {', '.join(map(str, sorted(found)))}"

        with waiting(lambda: f"an answer of {missing()}"), self._changed:
            while len(self._answers.get(number, ())) < len(self._others):
                if deadline is not None and time.monotonic() >= deadline:
                    raise BackendUnavailable(
                        f"hosts: {missing()} gave no answer within {PATIENCE_S:.0f} s"
                    )
                self._changed.wait(1.0)
            return {host: decode(x, kind) for host, x in self._answers.pop(number).items()}

    def _listen(self) -> None:
        while not self._closing:
            if self._reports.poll(200):
                self._take(decode(self._reports.recv(), Report))
        self._reports.close()

    def _take(self, report: Any) -> None:
        self._watch.heard(report.rank)
        if isinstance(report, Failed):
            self._told(f"host {report.rank} failed with {report.kind}: {report.words}")
        elif isinstance(report, Done):
            with self._changed:
                self._answers.setdefault(report.number, {})[report.rank] = report.value
                self._changed.notify_all()

    def _beat(self) -> None:
        if self._met.is_set():
            self._send("beat")

    def _told(self, why: str) -> None:
        if not self._closing:
            self._lose(why)

    @contextmanager
    def reasoned(self) -> Iterator[None]:
        """Let an error of device work pass once all other hosts were heard after it: it may say no
        more than that one is gone, and who has lost that one says so and ends this process.
        """
        try:
            yield
        except Exception as error:
            self._failed = in_words(error)
            met = time.monotonic()
            # Each is heard of in the end, or lost.
            while not (self._watch.all_heard_since(met) or self._watch.is_over):
                time.sleep(BEAT_S / 10)
            raise

    def load(self, progress: Progress) -> None:
        """See `Worker`."""
        self._send("load")
        with self.reasoned():
            self._worker.load(progress)

    def measure(self) -> int:
        """See `Worker`: what the host with the least has."""
        number = self._send("measure")
        with self.reasoned():
            own = self._worker.measure()
        return min(own, *self._collect(number, int).values())

    def allocate_kv(self, num_pages: int) -> None:
        """See `Worker`."""
        self._send("allocate_kv", num_pages)
        with self.reasoned():
            self._worker.allocate_kv(num_pages)

    def warm_up(self, table: Table, progress: Progress) -> list[ProgramReport]:
        """See `Worker`."""
        self._send("warm_up", table)
        with self.reasoned():
            reports = self._worker.warm_up(table, progress)
        self._failed = ""
        return reports

    def execute(self, step: StepInput) -> StepHandle:
        """See `Worker`."""
        self._send("execute", step)
        with self.reasoned():
            return Handle(self._worker.execute(step), self)

    def sample(self, masks: np.ndarray) -> None:
        """See `Worker`."""
        self._send("sample", masks)
        with self.reasoned():
            self._worker.sample(masks)

    def logits(self, step: StepInput) -> np.ndarray:
        """Not on several hosts: no host holds all logits."""
        raise BackendUnavailable("logits: backends are compared on one host")

    def close(self) -> None:
        """See `Worker`. The other hosts leave, with an error if this one is not ready or has met
        one.
        """
        number = self._send("close", self._failed)
        self._worker.close()
        self._wait_for_leaving(number)
        self._leave()

    def _wait_for_leaving(self, number: int) -> None:
        """Wait for the others' answers to the call `number`, which told them to leave."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._answers.get(number, ())) == len(self._others), PARTING_S
            )

    def _leave(self) -> None:
        self._watch.stop()
        with self._sending:
            self._closing = True
        self._listener.join()
        self._calls.close()
        self._server.close()
        self._context.term()


@dataclass(frozen=True, slots=True)
class Handle:
    """A step that all hosts have started."""

    own: StepHandle
    host: FirstHost

    def result(self) -> StepOutput:
        """See `StepHandle`."""
        with self.host.reasoned():
            return self.own.result()


def follow(
    worker: Worker,
    address: str,
    host: int,
    board: Board,
    digests: Mapping[str, str],
    lose: Callable[[str], None] = end_process,
    leave: Callable[[], None] = lambda: None,
) -> None:
    """Make the calls that the first host makes, until it closes. It stays until `leave` has run
    here. Raises BackendUnavailable if it makes none, or gives up.
    """
    public, secret = zmq.curve_keypair()
    board.put(key_name(host), public.decode())
    keys = Keys(public.decode(), secret.decode(), key_of(0, board))
    ip, port = interface(address)
    context = zmq.Context()
    sending = threading.Lock()
    calls, beats, reports = (
        connected(context, kind, f"tcp://{ip}:{port + number}", keys)
        for kind, number in ((zmq.SUB, 0), (zmq.SUB, 0), (zmq.PUSH, 1))
    )

    def send(report: Report) -> None:
        # A first host that has refused this one takes nothing: nobody may wait for that.
        with sending, suppress(zmq.Again):
            reports.send(encode(report), zmq.DONTWAIT)

    watch = Watch(lose, lambda: send(Beat(host)))
    stop = threading.Event()

    def hear() -> None:
        while not stop.is_set():
            if beats.poll(200):
                beats.recv()
                watch.heard(0)

    listener = threading.Thread(target=hear, daemon=True)
    listener.start()
    try:
        open_ = doors(ip, port)
        with waiting(lambda: f"the first call of host 0; {open_}", PATIENCE_S):
            called = calls.poll(round(1000 * PATIENCE_S))
        if not called:
            raise BackendUnavailable(
                f"hosts: host 0 made no call within {PATIENCE_S:.0f} s; {open_}"
            )
        why = _make_calls(worker, calls, host, send, digests, leave)
    except Exception as error:
        send(failure(host, error))
        time.sleep(BEAT_S)  # the first host ends all; what it says is the reason
        raise
    finally:
        stop.set()
        listener.join()
        watch.stop()
        for socket in (calls, beats, reports):
            socket.close(linger=2000)
        context.term()
    if why:
        raise BackendUnavailable(f"hosts: host 0 gave up: {why}")


def _make_calls(
    worker: Worker,
    calls: Any,
    host: int,
    send: Callable[[Report], None],
    digests: Mapping[str, str],
    leave: Callable[[], None],
) -> str:
    """Returns why the first host has given up, "" if it has not."""
    number = 0
    while True:
        call = decode(calls.recv(), Call)
        if call.name == "beat":
            continue
        number += 1
        if call.number != number:
            raise InternalError(f"call {number} was lost: {call.number} came")
        given = [decode(call.value, ARGUMENTS[call.name])] if call.name in ARGUMENTS else []
        if call.name in ("load", "warm_up"):
            given.append(silent)
        if call.name == "digests":
            found: Any = dict(digests)
        else:
            found = getattr(worker, call.name)(*given)
        if call.name == "close":
            leave()
        if call.name in ANSWERED:
            send(Done(host, number, msgspec.Raw(encode(found))))
        if call.name == "close":
            return decode(call.value, str)
