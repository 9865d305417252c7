"""The driver's end of the ranks: starts them, makes calls on all of them, and ends them all when
one is lost. It imports no framework and touches no device.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from .. import errors
from ..config import DeviceInfo
from ..errors import RankLost, RequestError, TwinferError
from ..interpreter import module_command
from ..models.spec import Place, Shard
from ..progress import Progress, silent
from ..starvation import Silence
from ..step import StepOutput
from ..waiting import waiting
from .messages import (
    Call,
    Done,
    Failed,
    Found,
    Job,
    Progressed,
    Report,
    Stepped,
    decode,
    encode,
)

COMMAND = module_command(f"{__package__}.rank")
STANDARD_ERROR = 2
LOOK_S = 0.2
"""Between two looks at the ranks' processes."""
SILENT_S, SILENT_AT_START_S = 8.0, 120.0
"""How long a rank may give no sign of life: once steps run, and while code is loaded and
compiled, which can keep a process busy.
"""
QUIET_S = 2.0
"""How long a rank may give none until it is looked at whether it gets a processor."""
STOPPED_S = 2.0
"""How long a rank may be stopped by a signal."""
BEAT_S = 1.0
"""Between two signs of life of this end: for who waits for a start, and for ranks far away."""
STEP_S = 300.0
"""How long a step may take. Who waits for the engine is less patient."""
GRACE_S = 0.3
"""How long the end of a process is waited for that may be the reason of another one's error."""
PARTING_S = 5.0
"""How long ranks that were told to leave may take."""
ENVIRONMENT = {
    # Ranks of one host meet on its own network: no port of theirs is open to another one.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


@dataclass(slots=True)
class Doors:
    """The driver's sockets: one that sends calls for each rank, the one where reports arrive, and
    for ranks that are far away one that gives signs of life.
    """

    inboxes: list[Any]
    outbox: Any
    beats: Any = None


class Launcher(Protocol):
    """What starts the processes of ranks and watches them. All but `close` is called by the thread
    of the driver that watches.
    """

    processes: list[int]
    """The ranks' process ids, in order, of those on this machine that are known."""

    def begin(self, context: Any, backend: str, device: str, count: int) -> Doors:
        """Bind the sockets and start the ranks. Raises TwinferError."""
        ...

    def ended(self, rank: int) -> str | None:
        """How a rank has ended; None while it runs."""
        ...

    def process(self, rank: int) -> int | None:
        """The process id of a rank on this machine; None where another one looks after it."""
        ...

    def kill(self) -> None:
        """End all ranks, and wait for their ends."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class Subprocesses:
    """Ranks as processes that this one starts, for each GPU of this machine one. They die with the
    thread that starts them, so it is the one that watches them.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        # Only its owner may enter it.
        self.folder = Path(tempfile.mkdtemp(prefix=folder_prefix(os.getpid())))
        self.processes: list[int] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def begin(self, context: Any, backend: str, device: str, count: int) -> Doors:
        """See `Launcher`."""
        address = f"ipc://{self.folder}"
        doors = Doors(
            [bound(context, zmq.PUSH, f"{address}/in{i}") for i in range(count)],
            bound(context, zmq.PULL, f"{address}/out"),
        )
        for rank in range(count):
            shard = Shard(rank, count)
            place = Place(shard, shard, f"file://{self.folder}/ranks")
            self._start(Job(place, backend, device, f"{address}/in{rank}", f"{address}/out"))
        return doors

    def _start(self, job: Job) -> None:
        process = subprocess.Popen(
            [*self._command],
            stdin=subprocess.PIPE,
            stdout=STANDARD_ERROR,  # their output would mix with what a command prints
            env=os.environ | {n: os.environ.get(n, v) for n, v in ENVIRONMENT.items()},
        )
        self._started.append(process)
        self.processes.append(process.pid)
        give(process, job)

    def ended(self, rank: int) -> str | None:
        """See `Launcher`."""
        code = self._started[rank].poll()
        return None if code is None else ending(code)

    def process(self, rank: int) -> int:
        """See `Launcher`."""
        return self.processes[rank]

    def kill(self) -> None:
        """See `Launcher`."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def close(self) -> None:
        """See `Launcher`."""
        shutil.rmtree(self.folder, ignore_errors=True)


def folder_prefix(pid: int) -> str:
    """How the folders of sockets begin that the driver in this process makes."""
    return f"twinfer-ranks-{pid}-"


def clear_up(pid: int) -> None:
    """Remove what a driver leaves that was killed, or left without closing its ranks. The process
    has ended.
    """
    for folder in Path(tempfile.gettempdir()).glob(folder_prefix(pid) + "*"):
        shutil.rmtree(folder, ignore_errors=True)


def bound(context: Any, kind: int, address: str) -> Any:
    """A socket that listens at an address."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.bind(address)
    return socket


def give(process: subprocess.Popen[bytes], job: Job) -> None:
    """Tell a process what it is to be."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it has ended; who watches will say so
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()


class Ranks:
    """The ranks of one engine. Calls come from one thread; another one listens and watches.

    A call that finds the ranks lost raises what one of them met: an error on purpose as itself,
    anything else as RankLost.
    """

    def __init__(
        self,
        backend: str,
        device: str,
        count: int,
        launcher: Launcher | None = None,
        progress: Progress = silent,
    ) -> None:
        """Starts `count` ranks and waits until each has its device, telling `progress` how many
        have. Raises what they raise.
        """
        self._launcher = Subprocesses(COMMAND) if launcher is None else launcher
        self.count = count
        self.late = 0
        self._context = zmq.Context()
        self._inboxes: list[Any] = []
        self._changed = threading.Condition(threading.RLock())
        self._error: TwinferError | None = None
        self._found: dict[int, DeviceInfo] = {}
        self._results: dict[int, dict[int, msgspec.Raw]] = {}
        self._outputs: dict[int, StepOutput] = {}
        self._digests: dict[int, dict[int, int]] = {}
        self._agreed: set[int] = set()
        self._progressed: list[Progressed] = []
        self._numbers = 0
        self._ready = self._closing = self._closed = False
        self._silences = [Silence() for _ in range(count)]
        self._left = False
        self._watcher = threading.Thread(target=self._watch, args=(backend, device), daemon=True)
        self._watcher.start()
        try:
            with waiting(lambda: f"the ranks' devices: {len(self._found)} of {count} are found"):
                self._wait(
                    lambda: len(self._found) == count,
                    lambda: progress("ranks", len(self._found), count),
                )
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> DeviceInfo:
        """The device of rank 0, with the least memory that any has."""
        first = self._found[0]
        least = min(device.memory for device in self._found.values())
        return DeviceInfo(first.platform, first.name, least)

    @property
    def processes(self) -> tuple[int, ...]:
        """The ranks' process ids, in order."""
        return tuple(self._launcher.processes)

    def call(
        self, name: str, value: Any = None, kind: Any = None, progress: Progress = silent
    ) -> list[Any]:
        """Make a call on all ranks, and return what each of them gives, of type `kind`."""
        number = self.start(name, value)
        ended, again = False, partial(progress, name, 0, 1)
        while not ended:
            with self._changed:
                self._wait(lambda: self._has_ended(number) or bool(self._progressed), again)
                told, self._progressed = self._progressed, []
                ended = self._has_ended(number)
            for one in told:
                again = partial(progress, one.what, one.done, one.total)
                again()
        results = self._results.pop(number)
        return [decode(results[rank], kind) for rank in range(self.count)]

    def _has_ended(self, number: int) -> bool:
        return len(self._results.get(number, ())) == self.count

    def start(self, name: str, value: Any = None) -> int:
        """Send a call to all ranks without waiting for it; its number."""
        self.check()
        self._numbers += 1
        data = encode(Call(self._numbers, name, msgspec.Raw(encode(value))))
        for inbox in self._inboxes:
            self._send(inbox, data)
        return self._numbers

    def _send(self, inbox: Any, data: bytes) -> None:
        """Send to a rank. To one that has just ended nothing can be sent: that its end is noticed
        is waited for, and raised.
        """
        while True:
            try:
                inbox.send(data, zmq.DONTWAIT)
                return
            except zmq.Again:
                self.check()
                inbox.poll(round(1000 * LOOK_S), zmq.POLLOUT)

    def output(self, number: int) -> StepOutput:
        """Wait for what the step that was call `number` brought: the same on all ranks."""
        self._wait(lambda: number in self._agreed)
        self._agreed.remove(number)
        return self._outputs.pop(number)

    def check(self) -> None:
        """Raise if a rank was lost."""
        if self._error is not None:
            raise self._error

    def steps_begin(self) -> None:
        """From now on a rank gives signs of life more often."""
        self._ready = True

    def close(self) -> None:
        """End all ranks, politely if they are well."""
        if self._closed:
            return
        self._closed = True
        if self._error is None:
            self._closing = True
            with contextlib.suppress(TwinferError):
                self.start("close")
            with self._changed:
                # Nobody is waited for behind an error: who watches ends all then.
                self._changed.wait_for(lambda: self._left or self._error is not None, PARTING_S)
        self._lose(RankLost("the ranks were closed"))
        self._watcher.join()
        for inbox in self._inboxes:
            inbox.close(linger=0)
        self._context.term()
        self._launcher.close()

    def _wait(self, ready: Callable[[], bool], beat: Callable[[], None] | None = None) -> None:
        """Wait for what the other thread brings. With a `beat`, which is called once a second, it
        may take as long as it does.
        """
        deadline = time.monotonic() + STEP_S
        with self._changed:
            while not ready():
                self.check()
                self._changed.wait(STEP_S if beat is None else BEAT_S)
                if ready():
                    return
                if beat is not None:
                    beat()
                elif time.monotonic() >= deadline:
                    self._lose(RankLost(f"the ranks gave no answer for {STEP_S:.0f} s"))

    # -- the thread that watches

    def _watch(self, backend: str, device: str) -> None:
        doors = None
        try:
            doors = self._launcher.begin(self._context, backend, device, self.count)
            self._inboxes = doors.inboxes
            self._silences = [Silence() for _ in range(self.count)]
            self._listen(doors)
        except TwinferError as error:
            self._lose(error)
        except Exception as error:
            self._lose(RankLost(f"the driver failed: {type(error).__name__}: {error}"))
        finally:
            self._launcher.kill()
            for door in () if doors is None else (doors.outbox, doors.beats):
                if door is not None:
                    door.close(linger=0)

    def _listen(self, doors: Doors) -> None:
        looked = beaten = time.monotonic()
        while self._error is None:
            if doors.outbox.poll(round(1000 * LOOK_S)):
                self._take(doors.outbox)
            if time.monotonic() - looked < LOOK_S:
                continue
            looked = time.monotonic()
            while doors.outbox.poll(0):
                self._take(doors.outbox)
            self._look()
            if doors.beats is not None and looked - beaten >= BEAT_S:
                beaten = looked
                doors.beats.send(b"")

    def _take(self, outbox: Any) -> None:
        report = decode(outbox.recv(), Report)
        rank = 0 if isinstance(report, Progressed) else report.rank
        self._silences[rank].end()
        if isinstance(report, Failed):
            self._lose(self._reason(report, outbox))
            return
        with self._changed:
            if isinstance(report, Found):
                self._found[rank] = report.device
            elif isinstance(report, Progressed):
                self._progressed.append(report)
            elif isinstance(report, Done):
                self._results.setdefault(report.number, {})[rank] = report.value
            elif isinstance(report, Stepped):
                self._take_step(report)
            else:
                return
            self._changed.notify_all()

    def _take_step(self, report: Stepped) -> None:
        self.late = max(self.late, report.late)
        if report.output is not None:
            self._outputs[report.number] = report.output
        digests = self._digests.setdefault(report.number, {})
        digests[report.rank] = report.digest
        if len(digests) == self.count:
            del self._digests[report.number]
            if len(set(digests.values())) > 1:
                self._lose(RankLost(f"call {report.number}: {differing(digests)}"))
            else:
                self._agreed.add(report.number)

    def _reason(self, first: Failed, outbox: Any) -> TwinferError:
        """Why the ranks are lost: what the first one to report an error has met, or that another
        one has ended without a report. An error may say no more than that a peer is gone, and what
        is left of a process takes a moment to go.
        """
        reported, deadline = {first.rank}, time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if outbox.poll(round(1000 * GRACE_S / 10)):
                report = decode(outbox.recv(), Report)
                if isinstance(report, Failed):
                    reported.add(report.rank)
                continue
            for rank in range(self.count):
                if rank not in reported and (how := self._launcher.ended(rank)) is not None:
                    return RankLost(f"rank {rank} {how}")
        return error_of(first)

    def _look(self) -> None:
        """Lose the ranks if one of them has ended or gives no sign of life."""
        limit = SILENT_S if self._ready else SILENT_AT_START_S
        ends = [self._launcher.ended(rank) for rank in range(self.count)]
        if self._closing and all(ends):
            with self._changed:
                self._left = True
                self._changed.notify_all()
        for rank, how in enumerate(ends):
            if how is not None:
                if not self._closing:
                    self._lose(RankLost(f"rank {rank} {how}"))
                continue
            pid, silence = self._launcher.process(rank), self._silences[rank]
            silence.look(pid, QUIET_S)
            for seconds, most, what in (
                (silence.stopped, STOPPED_S, "was stopped"),
                (silence.seconds, limit, "gave no sign of life"),
            ):
                if seconds > most:
                    self._lose(RankLost(f"rank {rank} {what} for {seconds:.0f} s"))

    def _lose(self, error: TwinferError) -> None:
        """End all ranks, and let whoever waits for them know. The first reason counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()


def error_of(report: Failed) -> TwinferError:
    """What a rank met, as an error of this process."""
    kind = getattr(errors, report.kind, None)
    if isinstance(kind, type) and issubclass(kind, TwinferError) and kind is not RequestError:
        return kind(report.words)
    return RankLost(f"rank {report.rank} failed with {report.kind}: {report.words}")


def differing(values: Mapping[int, Any]) -> str:
    """Which rank differs from rank 0."""
    rank = next(rank for rank in sorted(values) if values[rank] != values[0])
    return f"rank {rank} has other tokens or another residual than rank 0"


def ending(code: int) -> str:
    """How a process has ended."""
    if code < 0:
        from signal import Signals

        return f"was ended by {Signals(-code).name}"
    return f"ended with exit code {code}"
