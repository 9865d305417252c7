"""Processes that tests start, and what each of them was doing when a test has waited for too long.

conftest.py has every Python process of a test write the stacks of its threads when it is aborted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

SHOWN = 12_000
"""Characters of what a process has written, the last ones."""
ABORT_S = 30.0
"""How long a process may take to write its stacks."""


def children(pid: int) -> list[int]:
    """The processes that a process has started, in order."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            if int(words[1]) == pid:
                found.append(int(path.parent.name))
    return sorted(found)


def every(word: str) -> list[int]:
    """The processes with a word in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def crowded(pid: int) -> Iterator[None]:
    """A process shares a processor with a dozen that keep it busy, each in a session of its own: the
    system may deal it out by sessions.
    """
    (cpu, *_) = os.sched_getaffinity(0)
    others: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(12):
            busy = [sys.executable, "-S", "-c", "while True: pass"]
            others.append(subprocess.Popen(busy, start_new_session=True))
            os.sched_setaffinity(others[-1].pid, [cpu])
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            os.sched_setaffinity(thread, [cpu])
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def abort(*pids: int) -> None:
    """End processes and all that they have started; each writes its stacks to its standard error
    first.

    All are stopped before the first of them ends, so that none reacts to the end of another: of one
    that is continued, the main thread, which mostly waits for that, meets the signal before it goes
    on. Sent to the whole process, another thread might take it.
    """
    everyone: list[int] = []
    waiting = list(pids)
    while waiting:
        pid = waiting.pop(0)
        _signal(pid, signal.SIGSTOP)
        everyone.append(pid)
        waiting += children(pid)
    for pid in reversed(everyone):  # some die with who has started them
        ctypes.CDLL(None).tgkill(pid, pid, signal.SIGABRT)
        _signal(pid, signal.SIGCONT)
        end = time.monotonic() + ABORT_S
        while is_running(pid) and time.monotonic() < end:
            time.sleep(0.02)
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def last_words(processes: Sequence[subprocess.Popen[str]]) -> str:
    """End processes, and return how each was found and the last that it wrote, with its stacks."""
    codes = [process.poll() for process in processes]
    with ThreadPoolExecutor(len(processes)) as readers:
        # Read while they write: a full pipe would keep a process from its end.
        outputs = [readers.submit(process.communicate) for process in processes]
        abort(
            *(process.pid for process, code in zip(processes, codes, strict=True) if code is None)
        )
    words = []
    for index, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        state = "ran" if code is None else f"ended with {code}"
        out, error = ((text or "")[-SHOWN:] for text in output.result())
        words.append(f"process {index} {state}\n{error}\n--- its standard output\n{out}")
    return "\n\n".join(words)


def fail(why: str, processes: Sequence[subprocess.Popen[str]]) -> NoReturn:
    """Fail the test, and end its processes, with what they did and said."""
    pytest.fail(f"{why}\n\n{last_words(processes)}", pytrace=False)


def wait_until(
    holds: Callable[[], bool], processes: Sequence[subprocess.Popen[str]], seconds: float
) -> None:
    """Wait for `holds()`. Fail where a process ends before that, or time is over."""
    deadline = time.monotonic() + seconds
    while not holds():
        if any(process.poll() is not None for process in processes):
            fail("a process has ended", processes)
        if time.monotonic() > deadline:
            fail(f"not so after {seconds:.0f} s", processes)
        time.sleep(0.2)


def communicate(
    process: subprocess.Popen[str], seconds: float, *others: subprocess.Popen[str]
) -> tuple[str, str]:
    """What a process writes until its end. Fail where it does not end in time, with what `others`
    did meanwhile too.
    """
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        fail(f"process 0 did not end within {seconds:.0f} s", [process, *others])


def run(command: Sequence[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with its output. Fail where it does not end in time."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes, **options) as process:
        out, error = communicate(process, seconds)
    return subprocess.CompletedProcess(command, process.returncode, out, error)
