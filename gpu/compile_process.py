"""Processes that compile Triton kernels into the cache on disk, for an engine that starts: one that
imports what that takes, and its forks.

They touch no GPU and import no torch, which takes seconds: the kernels' own modules need neither.
Each line of JSON that one reads is a job, each that it writes the answer. All end with the process
that started them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import IO, Any

from .kernel_keys import hash_compiler, import_kernels, settle_keys

KERNELS = f"{__package__}.kernels"
"""The package whose kernels are compiled here."""


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel by its module's name and its own, what to compile it for, and the GPU as Triton
    names it: backend, architecture, threads of a warp.
    """

    module: str
    name: str
    data: str
    target: tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """The key on disk of what was compiled, or why nothing was."""

    key: str = ""
    error: str = ""


def encode(message: Job | Answer) -> bytes:
    """A message as a line of JSON, from whose values it is made again."""
    return json.dumps(astuple(message)).encode() + b"\n"


class Driver:
    """What Triton asks of a GPU to compile for it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        """The engine's GPU."""
        return self._target

    def get_current_device(self) -> str:
        """By what Triton keeps kernels in memory."""
        return str(self._target)


def main() -> None:
    """Fork a worker for each socket, given by its number, until the input ends."""
    os.dup2(2, 1)  # what the compilers print that are called
    # A program may have the engine's children be reaped by themselves, which is inherited.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    bypass_package(KERNELS)
    _prepare()
    sockets = [int(word) for word in sys.argv[1:]]
    workers = [_fork(number, sockets) for number in sockets]
    for number in sockets:
        os.close(number)
    sys.stdin.buffer.read()
    for worker in workers:
        with suppress(OSError):
            os.killpg(worker, signal.SIGKILL)  # not waited for yet, so the number is its own
    for worker in workers:
        os.waitpid(worker, 0)


def _fork(number: int, sockets: Sequence[int]) -> int:
    """Start the worker of a socket. It leads a group, in which is all that it calls."""
    worker = os.fork()
    if worker:
        with suppress(OSError):  # it may have ended
            os.setpgid(worker, worker)
        return worker
    try:
        os.setpgid(0, 0)
        for each in sockets:
            if each != number:
                os.close(each)
        _work(number)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _work(number: int) -> None:
    """Answer jobs until the input ends."""
    jobs: SimpleQueue[Job] = SimpleQueue()
    # A kernel can take seconds: another thread sees that nobody waits for it any more.
    Thread(target=_read, args=(os.fdopen(os.dup(number), "rb"), jobs), daemon=True).start()
    while True:
        os.write(number, encode(_answer(jobs.get())))


def _read(stream: IO[bytes], jobs: SimpleQueue[Job]) -> None:
    try:
        for line in stream:
            jobs.put(Job(*json.loads(line)))
    finally:
        os.killpg(0, signal.SIGKILL)


def bypass_package(package: str) -> None:
    """Let modules of a package be imported without the package's own imports, torch among them."""
    module = ModuleType(package)
    module.__path__ = [str(Path(__file__).with_name(package.rpartition(".")[2]))]
    sys.modules[package] = module


def _prepare() -> None:
    """Do what each worker would do before its first kernel."""
    hash_compiler()
    import_kernels()


def _answer(job: Job) -> Answer:
    try:
        return Answer(key=compile_kernel(job))
    except Exception as error:
        return Answer(error=f"{error!r}, from {error.__cause__!r}")


def compile_kernel(job: Job) -> str:
    """Compile a kernel, and what launches it, into the cache on disk. The kernel's key there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(Driver(GPUTarget(*job.target)))
    kernel: Any = reduce(getattr, job.name.split("."), import_module(job.module))
    settle_keys(kernel)
    made = kernel.preload(job.data)
    _compile_launcher(made)
    return str(made.hash)


def _compile_launcher(made: Any) -> None:
    """Before Triton 3.7, what launches a kernel is C code for its signature. If it cannot be
    compiled here, the engine tries again.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        try:
            driver.CudaLauncher(made.src, made.metadata)
        except Exception as error:
            print(f"what launches {made.name}: {error!r}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
