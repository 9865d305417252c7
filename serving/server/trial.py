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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import IO, cast

import msgspec

from ...shared.errors import RequestError
from ...shared.grammars import FIELD, Grammars
from ...shared.interpreter import module_command
from ...shared.structured_outputs import StructuredOutputs

MODULE = f"{__package__}.trial"
COMPILE_S = 0.7
"""Processor time that a form may take until its first token. The engine takes as long again, and
the answer is due within 2 s.
"""
STEP_S = 0.1
"""And for one more token: all streams wait for it."""
STEPS = 6
MEMORY = 8 << 30
"""Bytes of addresses, of which the library takes few."""
PROCESSES = 2
"""So that others have one while a form is killed, and its process starts anew."""


class Told(msgspec.Struct):
    """What became of a form: `field` and `reason` of the error, if there is one."""

    field: str = ""
    reason: str = ""


class Setup(msgspec.Struct):
    """The tokens that the forms are of."""

    folder: str
    vocab_size: int
    eos_token_ids: list[int]


class Process:
    """A process that tries forms out, one after the other."""

    def __init__(self, setup: Setup) -> None:
        self._process = subprocess.Popen(
            module_command(MODULE), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        # Both are pipes, which the type of Popen does not say.
        self._stdin = cast(IO[bytes], self._process.stdin)
        self._stdout = cast(IO[bytes], self._process.stdout)
        with suppress(BrokenPipeError):  # it has ended at once: `ask` sees that
            self._send(setup)

    @property
    def runs(self) -> bool:
        """Whether it has not been killed."""
        return self._process.poll() is None

    def ask(self, wanted: StructuredOutputs) -> Told | None:
        """What became of a form; None if the process was killed over it."""
        try:
            self._send(wanted)
            line = self._stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self.close()
            return None
        return msgspec.json.decode(line, type=Told)

    def _send(self, message: Setup | StructuredOutputs) -> None:
        self._stdin.write(msgspec.json.encode(message) + b"\n")
        self._stdin.flush()

    def close(self) -> None:
        """Let it end, if it has not. May be called again."""
        with suppress(BrokenPipeError):  # what it has not read
            self._stdin.close()
        self._process.wait()
        self._stdout.close()


class Trials:
    """Tries forms out for `grammars`. Any thread may call `check`."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._free: SimpleQueue[Process | None] = SimpleQueue()
        for _ in range(PROCESSES):
            self._free.put(None)

    def start(self) -> None:
        """Start a process before somebody waits for it."""
        with self._one():
            pass

    def check(self, wanted: StructuredOutputs) -> None:
        """Raise RequestError for a form that cannot be compiled, or not within its bounds."""
        self._grammars.prepare()
        with self._one() as process:
            told = process.ask(wanted)
        if told is None:
            raise RequestError(FIELD, f"{wanted.kind}: compiling it takes too much work")
        if told.reason:
            raise RequestError(told.field, told.reason)

    def close(self) -> None:
        """End the processes. Nobody may be within `check`."""
        for _ in range(PROCESSES):
            process = self._free.get()
            if process is not None:
                process.close()

    @contextmanager
    def _one(self) -> Iterator[Process]:
        """A process that runs and that nobody else asks: the successor of one that was killed."""
        process = self._free.get()
        try:
            if process is not None and not process.runs:
                process.close()
                process = None
            if process is None:
                process = Process(Setup(*self._grammars.tokens))
            yield process
        finally:
            self._free.put(process)


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
