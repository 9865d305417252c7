"""Forms of unknown clients are compiled on trial, in a process that may be killed: llguidance
counts work, but of some forms one unit of it takes long, and nothing can stop a thread.

`python -m twinfer.serving.server.trial` is that process: the first line of its standard input says
for which tokens, each further one is a form. Only the engine's process starts it.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import msgspec

from ...shared.errors import RequestError
from ...shared.grammars import FIELD, Grammars
from ...shared.structured_outputs import StructuredOutputs

MODULE = f"{__package__}.trial"
COMPILE_S = 1.0
"""Processor time that a form may take until its first token."""
STEP_S = 0.1
"""And for one more token: all streams wait for it."""
STEPS = 6
MEMORY = 8 << 30
"""Bytes of addresses, of which the library takes few."""
PROCESSES = 2
"""So that others have one while a form is killed, and its process starts anew."""


class Told(msgspec.Struct):
    """What became of a form: `field` and `message` of the error, if there is one."""

    field: str = ""
    message: str = ""


class Setup(msgspec.Struct):
    """The tokens that the forms are of."""

    folder: str
    vocab_size: int
    eos_token_ids: list[int]


class Trials:
    """Tries forms out for `grammars`. Any thread may call `check`."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._free: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        for _ in range(PROCESSES):
            self._free.put(None)

    def start(self) -> None:
        """Start a process before somebody waits for it."""
        self._free.put(self._start(self._free.get()))

    def check(self, wanted: StructuredOutputs) -> None:
        """Raise RequestError for a form that cannot be compiled, or not within its bounds."""
        self._grammars.prepare()
        process = self._start(self._free.get())
        try:
            told = self._ask(process, wanted)
        finally:
            self._free.put(process)
        if told is None:
            raise RequestError(FIELD, f"{wanted.kind}: compiling it takes too much work")
        if told.message:
            raise RequestError(told.field, told.message)

    def close(self) -> None:
        """End the processes. Nobody may be within `check`."""
        for _ in range(PROCESSES):
            process = self._free.get()
            if process is not None:
                _end(process)

    def _start(self, process: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
        """A process that runs: `process`, unless it was killed."""
        if process is not None and process.poll() is None:
            return process
        if process is not None:
            _end(process)
        command = [sys.executable, "-P", "-m", MODULE]
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        setup = Setup(*self._grammars.tokens)
        with suppress(BrokenPipeError):  # it has ended at once: `_ask` sees that
            _pipe(started.stdin).write(msgspec.json.encode(setup) + b"\n")
            _pipe(started.stdin).flush()
        return started

    def _ask(self, process: subprocess.Popen[bytes], wanted: StructuredOutputs) -> Told | None:
        """What it says; None if it was killed."""
        try:
            _pipe(process.stdin).write(msgspec.json.encode(wanted) + b"\n")
            _pipe(process.stdin).flush()
            line = _pipe(process.stdout).readline()
        except BrokenPipeError:
            line = b""
        if not line:
            _end(process)
            return None
        return msgspec.json.decode(line, type=Told)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a process end, if it has not, and take nothing more from it."""
    with suppress(BrokenPipeError):  # what it has not read
        _pipe(process.stdin).close()
    process.wait()
    _pipe(process.stdout).close()


def _pipe(end: Any) -> Any:
    return end


def main() -> None:
    """Answers until standard input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which kills, also within the library
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return  # the engine has ended meanwhile
    setup = msgspec.json.decode(line, type=Setup)
    grammars = Grammars(setup.folder, setup.vocab_size, setup.eos_token_ids)
    grammars.prepare()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        wanted = msgspec.json.decode(line, type=StructuredOutputs)
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
        try:
            longest = grammars.try_out(wanted, STEPS)
            told = Told()
            if longest > STEP_S:
                told = Told(FIELD, f"{wanted.kind}: a token of it takes too much work")
        except RequestError as error:
            told = Told(error.field, " ".join(error.reason.split()))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
