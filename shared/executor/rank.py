"""One rank: a process with a worker of its own, which makes the calls of the driver in their order.
`python -m twinfer.shared.executor.rank` with a `Job` on standard input; only the driver starts it.

It leaves when its standard input ends, and dies with the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import os
import queue
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from ...bucketing import Table
from ..errors import InternalError
from ..progress import silent
from ..step import StepInput, StepOutput
from ..worker import Worker, backend_module
from .curve import connected
from .messages import (
    Beat,
    Call,
    Done,
    Failed,
    Found,
    Job,
    Made,
    Make,
    Progressed,
    Report,
    Stepped,
    decode,
    encode,
    shown,
)

BEAT_S, SILENT_S = 1.0, 8.0
"""Between two signs of life, and how long the driver may give none."""
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl."""
ARGUMENTS: dict[str, Any] = {"allocate_kv": int, "warm_up": Table, "logits": StepInput}
"""The calls that are a worker's own, with what is sent with each."""


class Rank:
    """Makes calls on a worker, and sends what comes of them."""

    def __init__(self, job: Job, send: Callable[[Report], None]) -> None:
        self._job, self._send = job, send
        self._index = job.place.shard.index
        self._backend = backend_module(job.backend)
        self._device = self._backend.find_rank_device(job.device, job.place)
        self._worker: Worker | None = None
        self._unsampled: tuple[int, Any] | None = None
        self._started: queue.Queue[tuple[int, Any]] = queue.Queue()
        threading.Thread(target=self._read_steps, daemon=True).start()
        send(Found(self._index, self._device))

    def take(self, call: Call) -> bool:
        """Make one call; False after the last one."""
        if call.name == "execute":
            self._execute(call)
        elif call.name == "sample":
            self._sample(call)
        else:
            self._send(Done(self._index, call.number, msgspec.Raw(encode(self._answer(call)))))
        return call.name != "close"

    @property
    def _own(self) -> Worker:
        if self._worker is None:
            raise InternalError("a rank was called before its worker was made")
        return self._worker

    def _execute(self, call: Call) -> None:
        step = decode(call.value, StepInput)
        started = call.number, self._own.execute(step)
        if step.waiting is None:
            self._started.put(started)
        else:
            self._unsampled = started

    def _sample(self, call: Call) -> None:
        self._own.sample(decode(call.value, np.ndarray))
        if self._unsampled is not None:
            self._started.put(self._unsampled)
        self._unsampled = None

    def _answer(self, call: Call) -> Any:
        name = call.name
        if name == "make":
            return self._make(decode(call.value, Make))
        if name == "close" and self._worker is None:
            return None  # the driver's start has failed before it asked for workers
        given = [decode(call.value, ARGUMENTS[name])] if name in ARGUMENTS else []
        if name in ("load", "warm_up"):
            given.append(self._progress if self._index == 0 else silent)
        found = getattr(self._own, name)(*given)
        if name == "logits" and self._index:
            return None
        return found

    def _progress(self, what: str, done: int, total: int) -> None:
        self._send(Progressed(what, done, total))

    def _make(self, given: Make) -> Made:
        backend = self._backend
        backend.join_ranks(self._job.place, self._device)
        worker = backend.make_worker(given.model, given.config, self._device, given.folder)
        self._worker = worker
        digests = {
            "configuration": digest_of(asdict(given.model), asdict(given.config)),
            "plan": worker.plan_hash(),
            "checkpoint": checkpoint_digest(given.folder, given.config.load_format),
        }
        return Made(worker.config, list(map(shown, worker.changes)), worker.multi_step, digests)

    def _read_steps(self) -> None:
        """Send what steps bring, in their order."""
        try:
            while True:
                number, handle = self._started.get()
                output = handle.result()
                late = self._own.compilations_after_ready()
                sent = None if self._index else output
                real = step_digest(output, handle.step)
                self._send(Stepped(self._index, number, real, late, sent))
        except Exception as error:
            self._send(failure(self._index, error))


def step_digest(output: StepOutput, step: StepInput) -> int:
    """Of what must be the same on all ranks: the tokens, and the residual stream if it was kept."""
    count = int(step.field("counts")[1])
    digest = zlib.crc32(np.ascontiguousarray(output.tokens[..., :count]).tobytes())
    if output.streams is not None:
        tokens = int(step.field("query_start")[count])
        residual = np.ascontiguousarray(output.streams[:, :, 1, :tokens])
        digest = zlib.crc32(residual.tobytes(), digest)
    return digest


def digest_of(*values: Any) -> str:
    """A short digest of plain values."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def checkpoint_digest(folder: str, load_format: str) -> str:
    """A digest of a checkpoint's files: their names, sizes and headers."""
    if load_format == "dummy":
        return "dummy"
    files = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(min(size, path.stat().st_size))
        files.append((path.name, path.stat().st_size, hashlib.sha256(header).hexdigest()))
    return digest_of(files)


def failure(rank: int, error: BaseException) -> Failed:
    """An error in one line."""
    words = " ".join(str(error).split()) or "no message"
    return Failed(rank, type(error).__name__, words)


def main() -> int:
    """Runs until the driver has closed it, or is gone."""
    # A terminal and a container signal the whole group; the driver decides for all.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    _die_with_the_driver()
    threading.Thread(target=_leave_with_the_driver, daemon=True).start()
    context = zmq.Context()
    inbox = connected(context, zmq.PULL, job.calls, job.keys)
    outbox = connected(context, zmq.PUSH, job.reports, job.keys)
    if job.beats:
        threading.Thread(target=_leave_when_it_is_silent, args=(context, job), daemon=True).start()
    sending = threading.Lock()

    def send(report: Report) -> None:
        data = encode(report)
        with sending:
            outbox.send(data)

    threading.Thread(target=_beat, args=(job.place.shard.index, send), daemon=True).start()
    code = 0
    try:
        rank = Rank(job, send)
        while rank.take(decode(inbox.recv(), Call)):
            pass
    except Exception as error:
        send(failure(job.place.shard.index, error))
        code = 1
    with sending:
        inbox.close(linger=0)
        outbox.close(linger=2000)
        context.term()
    return code


def _beat(index: int, send: Callable[[Report], None]) -> None:
    while True:
        send(Beat(index))
        threading.Event().wait(BEAT_S)


def _leave_when_it_is_silent(context: Any, job: Job) -> None:
    """End this process when the driver gives no sign of life."""
    socket = connected(context, zmq.SUB, job.beats, job.keys)
    with contextlib.suppress(zmq.ContextTerminated):
        while socket.poll(round(1000 * SILENT_S)):
            socket.recv()
        os._exit(0)
    socket.close(linger=0)


def _die_with_the_driver() -> None:
    """Ask the system to kill this process when the driver's thread that started it ends: even one
    that is stopped.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _leave_with_the_driver() -> None:
    """Wait for the end of standard input; then end this process."""
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Frameworks' own threads have nothing to add, and some never end.
    os._exit(code)
