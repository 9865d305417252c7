"""Processes that compile Triton kernels while the engine does something else. They are forks of one
that runs `compile_process.py`, and write into the cache on disk, where the engine finds the code.

They make a start shorter and are no condition of it: what they do not bring, whatever the reason,
the engine compiles.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

from ..shared.interpreter import module_command
from ..shared.starvation import GROUPS, SYSTEM, processors_of
from . import compile_process
from .compile_process import KERNELS, Answer, Job, encode

LOG = logging.getLogger("twinfer.gpu")
MOST = 16
MEMORY = 1 << 29
"""Bytes that a process may need, generously: 200 MiB were seen."""
PATIENCE_S = 60.0
"""How long the processes may compile no kernel until they are given up. One takes up to 4 s."""
ENDING_S = 5.0
"""How long the processes may take to end by themselves."""
COMMAND = module_command(compile_process.__name__)

Key: TypeAlias = tuple[int, str]
"""The id of a kernel, and what to compile it for."""


@dataclass(slots=True)
class _Shared:
    """What the threads of a pool share. None of them holds the pool, so that it can be dropped."""

    process: subprocess.Popen[bytes] | None
    sockets: list[socket.socket]
    serving: int
    """Threads that may still bring an answer."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    jobs: list[tuple[int, int, Key, Job]] = field(default_factory=list)
    """A heap, long sources first: what began last would be waited for alone."""
    answers: dict[Key, Answer] = field(default_factory=dict)
    ended: bool = False
    owner: int = field(default_factory=os.getpid)


class CompilePool:
    """Compiles the kernels that it is told of. One thread calls it. It ends by `close`, when it is
    dropped, and with this process.
    """

    def __init__(self, count: int) -> None:
        """Starts `count` processes, in the environment as it is now."""
        process, sockets = _start(count)
        self._shared = shared = _Shared(process, sockets, len(sockets))
        self._kernels: dict[Key, Any] = {}
        self._target: tuple[str, int, int] | None = None
        self._end = weakref.finalize(self, _end, shared)
        for index, each in enumerate(sockets):
            try:
                threading.Thread(target=_serve, args=(shared, each), daemon=True).start()
            except RuntimeError as error:  # there are as many as may be
                LOG.info("no thread to have kernels compiled: %r", error)
                with shared.changed:
                    shared.serving -= len(sockets) - index
                break

    def ask(self, kernel: Any, data: str) -> None:
        """Have a kernel compiled, if it is one of ours: others may be in no module that a process
        finds, or in one that imports torch.
        """
        module, key = kernel.fn.__module__, (id(kernel), data)
        if key in self._kernels or not module.startswith(f"{KERNELS}."):
            return
        if self._target is None:
            self._target = _target_here()
        number, self._kernels[key] = len(self._kernels), kernel
        job = Job(module, kernel.fn.__qualname__, data, self._target)
        with self._shared.changed:
            heapq.heappush(self._shared.jobs, (-len(kernel.src), number, key, job))
            self._shared.changed.notify_all()

    def wait(self, needed: Collection[Key], progress: Callable[[int], None]) -> Mapping[Key, str]:
        """Wait until no more of the kernels that are needed is to come, and end the processes. What
        was compiled, by its key on disk.
        """
        shared, since, seen = self._shared, time.monotonic(), 0
        keys = self._kernels.keys() & {*needed}
        with shared.changed:
            shared.jobs = [job for job in shared.jobs if job[2] in keys]
            heapq.heapify(shared.jobs)
        answers: dict[Key, Answer] = {}
        while len(answers) < len(keys):
            left = since + PATIENCE_S - time.monotonic()
            with shared.changed:
                over = not shared.serving or left <= 0
                if not over and len(shared.answers.keys() & keys) == seen:
                    shared.changed.wait(left)
                answers = {key: shared.answers[key] for key in keys & shared.answers.keys()}
            if over:
                break
            if len(answers) > seen:
                since, seen = time.monotonic(), len(answers)
                progress(seen)
        self.close()
        for key in keys:
            answer = answers.get(key, Answer(error="no answer"))
            if answer.error:
                LOG.debug("%s, in a process: %s", self._kernels[key], answer.error)
        compiled = {key: answer.key for key, answer in answers.items() if answer.key}
        if len(compiled) < len(keys):
            LOG.info("processes compiled %d of %d kernels", len(compiled), len(keys))
        return compiled

    def close(self) -> None:
        """End the processes, whatever they do. May be called again."""
        self._end()


def make_pool(ranks: int) -> CompilePool | None:
    """A pool for one of so many ranks on this machine; None if it would not help: there are one or
    two processors, little memory, or a Triton whose kernels cannot be noted. Nor is there one where
    Python is part of a program: what is called its executable may be that program.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    try:
        from triton import knobs  # noqa: F401 - from 3.4 on
    except ImportError:
        return None
    # One processor is the engine's.
    processors = int(processors_of(os.getpid())) // ranks - 1
    count = min(MOST, processors, _available() // MEMORY // ranks)
    return CompilePool(count) if count > 1 else None


def _available(system: Path = SYSTEM, groups: Path = GROUPS) -> int:
    """Bytes of memory that processes may take: what is free, and a quarter of what the container
    may have, as the engine is in it too. A lot where nothing is said.
    """
    found = [sys.maxsize]
    with suppress(OSError, ValueError, KeyError):  # another system
        lines = (system / "meminfo").read_text().splitlines()
        sizes = dict(line.split(":") for line in lines)
        found.append(int(sizes["MemAvailable"].split()[0]) << 10)
    with suppress(OSError, ValueError):  # no container, or "max", which is no bound
        found.append(int((groups / "memory.max").read_text()) // 4)
    return min(found)


def _target_here() -> tuple[str, int, int]:
    """The GPU that is current, as Triton names it."""
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def _start(count: int) -> tuple[subprocess.Popen[bytes] | None, list[socket.socket]]:
    """The process that forks so many, and the sockets to these; None, and no sockets, if it cannot
    be started.
    """
    pairs: list[tuple[socket.socket, socket.socket]] = []
    process = None
    try:
        pairs += (socket.socketpair() for _ in range(count))
        numbers = [theirs.fileno() for _, theirs in pairs]
        process = subprocess.Popen(
            (*COMMAND, *map(str, numbers)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=None if LOG.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            pass_fds=numbers,
            start_new_session=True,  # an interrupt is the engine's
        )
    except OSError as error:
        LOG.info("no process to compile kernels: %r", error)
    for ours, theirs in pairs:
        theirs.close()
        if process is None:
            ours.close()
    return process, [] if process is None else [ours for ours, _ in pairs]


def _serve(shared: _Shared, own: socket.socket) -> None:
    """Give a process one job after the other."""
    try:
        with own.makefile("rb") as answers:
            while (job := _next(shared)) is not None and _answers(shared, own, answers, *job):
                pass
    finally:
        with shared.changed:
            shared.serving -= 1
            shared.changed.notify_all()


def _next(shared: _Shared) -> tuple[Key, Job] | None:
    """The job that is next, once there is one; None at the end."""
    with shared.changed:
        shared.changed.wait_for(lambda: shared.ended or shared.jobs)
        if shared.ended:
            return None
        *_, key, job = heapq.heappop(shared.jobs)
        return key, job


def _answers(shared: _Shared, own: socket.socket, answers: IO[bytes], key: Key, job: Job) -> bool:
    """Whether a process has answered, whatever its answer."""
    answer = None
    with suppress(OSError, ValueError, TypeError):  # it has ended, perhaps amid an answer
        own.sendall(encode(job), socket.MSG_NOSIGNAL)  # SIGPIPE may be as it is by default
        answer = Answer(*json.loads(answers.readline()))
    with shared.changed:
        shared.answers[key] = answer or Answer(error="its process has ended")
        shared.changed.notify_all()
    return answer is not None


def _end(shared: _Shared) -> None:
    if os.getpid() != shared.owner:
        return  # a fork of the engine's process, which has copies, of locks that are taken too
    with shared.changed:
        shared.ended = True
        shared.changed.notify_all()
    process = shared.process
    if process is None or process.stdin is None:
        return
    process.stdin.close()  # it kills its forks
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):  # it has ended, and a program's own code has waited
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for own in shared.sockets:
        # Forks end by that too, had theirs ended before them.
        with suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)
        own.close()
