"""Compiles programs in a thread pool, counts what XLA compiles, and says what each program
costs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..shared.config import DeviceInfo
from ..shared.errors import BackendUnavailable
from ..shared.progress import Progress
from ..shared.worker import ProgramReport
from . import programs
from .compile_options import OPTIONS, options_for
from .executables import Reader
from .ladder import Job
from .platforms import devices_of
from .sharding import make_mesh, on

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
STACK = 64 << 20
"""Bytes of stack of a compiling thread: XLA recurses deeper than the default of 8 MiB holds for
large programs.
"""

_lowering = threading.Lock()
"""Held by the thread that lowers. Jaxlib's bindings of MLIR fail now and then where several do
("incompatible function arguments", properties without a value), and Python's lock lets one of them
work at a time anyway.
"""
_compilations = 0
_of_thread = threading.local()


def _count(event: str, seconds: float, **_: Any) -> None:
    global _compilations
    if event == COMPILE_EVENT:
        _compilations += 1
        _of_thread.compilations = compilations_here() + 1


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """XLA compilations in this process so far."""
    return _compilations


def compilations_here() -> int:
    """XLA compilations of this thread so far. Another engine that starts in another one is not
    counted.
    """
    return getattr(_of_thread, "compilations", 0)


@dataclass(slots=True)
class Program:
    """A compiled executable under its name."""

    name: str
    compiled: Any

    def __call__(self, *args: Any) -> Any:
        """Start it."""
        return self.compiled(*args)


def compile_all(
    jobs: Mapping[Any, Job],
    mesh: Mesh,
    label: str,
    progress: Progress,
    stored: Reader | None = None,
    known: Mapping[Any, tuple[Program, ProgramReport]] = MappingProxyType({}),
    what: str = "programs",
) -> Iterator[tuple[Any, Program, ProgramReport]]:
    """Build every job, in order: (key, program, report). XLA leaves Python's lock, so the cores are
    used.

    `label` goes into each module's name, and with it into the key of JAX's compilation cache. With
    `stored`, programs are read from there instead; those of `known` are taken as they are. Raises
    ConfigError if one is not there.
    """
    missing = {key: job for key, job in jobs.items() if key not in known}
    with deep_stacks(), ThreadPoolExecutor(max_workers=workers()) as pool:
        futures = {
            key: pool.submit(compile_one, job, mesh, label, stored) for key, job in missing.items()
        }
        try:
            for done, key in enumerate(jobs):
                program, report = known[key] if key in known else futures[key].result()
                progress(f"{what}; {report.name} {report.seconds:.0f} s", done + 1, len(jobs))
                yield key, program, report
        finally:
            for future in futures.values():
                future.cancel()


def compile_one(
    job: Job, mesh: Mesh, label: str, stored: Reader | None = None
) -> tuple[Program, ProgramReport]:
    """Lower and compile one job for the devices of `mesh`, or read it from `stored`."""
    if stored is not None:
        start = time.perf_counter()
        loaded = stored.load(job, list(mesh.devices.flat))
        return Program(job.name, loaded), report(job.name, loaded, time.perf_counter() - start)
    function = programs.named(f"{job.name}_{label}", job.function)
    # The abstract mesh tells kernels which TPU they are lowered for, also where there is none.
    with _lowering, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        start = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=job.donate, out_shardings=job.results).lower(
            *job.arguments
        )
    compiled = lowered.compile(compiler_options=options_for(mesh.devices.flat[0].platform))
    seconds = time.perf_counter() - start
    return Program(job.name, compiled), report(job.name, compiled, seconds)


def check_rounding(device: DeviceInfo) -> None:
    """Raise BackendUnavailable if XLA leaves out roundings between ops of programs that are
    compiled as a worker's.
    """
    mesh = make_mesh(devices_of(device), 1)
    number = jax.ShapeDtypeStruct((1,), jnp.bfloat16, sharding=on(mesh))
    sums = lambda x, y: (x + y).astype(jnp.float32)  # noqa: E731
    program, _ = compile_one(Job("rounding", sums, (), (number, number), on(mesh)), mesh, "check")
    total = program(*(jax.device_put(jnp.full(1, x, jnp.bfloat16), on(mesh)) for x in (256, 1)))
    # 257 has nine digits, bfloat16 eight.
    if float(total[0]) != 256.0:
        raise BackendUnavailable(
            f"XLA leaves out roundings between ops of programs that are compiled with {OPTIONS}"
        )


def report(name: str, compiled: Any, seconds: float) -> ProgramReport:
    """What a compiled program needs, by the compiler's word."""
    memory = compiled.memory_analysis()
    if memory is None:
        return ProgramReport(name, seconds)
    return ProgramReport(
        name, seconds, memory.generated_code_size_in_bytes, memory.temp_size_in_bytes
    )


def workers() -> int:
    """Threads that compile at a time."""
    return min(8, os.cpu_count() or 1)


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that start within the block can hold the compiler's recursion."""
    before = threading.stack_size(STACK)
    try:
        yield
    finally:
        threading.stack_size(before)
