"""What a model takes of each device besides the KV cache, by the compiler's word; what is left is
the cache's.

`twinfer aot` and the worker both ask here, so that what the one promises is what the other
allocates. The programs that need most are compiled before there is a cache, with one of a single
request. What a program holds besides the cache does not depend on how large that is: no program
copies it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from ..shared.errors import ConfigError
from ..shared.progress import Progress
from ..shared.worker import ProgramReport
from . import compilation
from .compilation import Program
from .ladder import Job, Shapes, bytes_per_device, is_step, kind_of, largest

IN_FLIGHT = 2
"""Steps whose results are held at a time."""

Built = dict[Any, tuple[Job, Program, ProgramReport]]
"""Compiled jobs by what the worker looks them up with."""


class DoesNotFit(ConfigError):
    """A program takes more memory than a device has; the compiler says how much."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Within the block, a compiler that runs out of the device's memory raises DoesNotFit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        words = " ".join(str(error).split())[:300]
        raise DoesNotFit(
            f"max_num_batched_tokens, max_num_seqs: a program takes too much memory: {words}"
        ) from error


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on each device.

    arguments    weights, rotary tables, page tables, last tokens, histories
    temporaries  of the program that needs most
    results      hidden states and tokens of the steps in flight
    code         of all programs, each taken for as large as the largest of its kind
    """

    arguments: int
    temporaries: int
    results: int
    code: int

    def parts(self) -> dict[str, int]:
        """The bytes, by what for."""
        return {
            "weights, rotary and page tables": self.arguments,
            "temporaries of the largest program": self.temporaries,
            f"results of {IN_FLIGHT} steps": self.results,
            "code of all programs": self.code,
        }

    def room(self, allowed: int, page: int, used: int = 0) -> int:
        """Bytes for a cache beside its scratch page, of `allowed` bytes; below 0 if there are none.

        `used`: what a device holds before anything is compiled, where one can ask it.
        """
        return (
            allowed - max(self.arguments, used) - self.temporaries - self.results - self.code - page
        )


def measure(
    jobs: Mapping[Any, Job], shapes: Shapes, cache: int, mesh: Mesh, label: str, progress: Progress
) -> tuple[Footprint, Built]:
    """Compile the programs of `jobs` that need most, and return them too. Raises DoesNotFit.

    `shapes`: what they were made for. `cache`: bytes of the KV cache on each device, which are
    among the arguments.
    """
    chosen = largest(jobs)
    built: Built = {}
    with memory_errors():
        for key, program, report in compilation.compile_all(
            chosen, mesh, label, progress, what="largest programs"
        ):
            built[key] = chosen[key], program, report
    # Of a head that is not the embedding too, the compiler leaves a step's argument out: only
    # samplers read it, and histories.
    head = {name: x for name, x in shapes.head.items() if name != "embed"}
    besides = bytes_per_device((head, shapes.histories))
    return footprint(jobs, built, besides - cache), built


def footprint(jobs: Mapping[Any, Job], built: Built, besides: int) -> Footprint:
    """What `jobs` take, by those of them that were built; `besides` is added to the arguments of
    a step.
    """
    memory = {key: program.compiled.memory_analysis() for key, (_, program, _) in built.items()}
    kinds = Counter(kind_of(key) for key in jobs)
    return Footprint(
        max(m.argument_size_in_bytes for key, m in memory.items() if is_step(key)) + besides,
        max(m.temp_size_in_bytes for m in memory.values()),
        IN_FLIGHT * max(m.output_size_in_bytes - m.alias_size_in_bytes for m in memory.values()),
        sum(kinds[kind_of(key)] * m.generated_code_size_in_bytes for key, m in memory.items()),
    )


def reusable(built: Built, jobs: Mapping[Any, Job]) -> dict[Any, tuple[Program, ProgramReport]]:
    """Of what was built, the programs that are those of `jobs`: same arguments, so no cache of
    another size.
    """
    same = (
        key
        for key, (job, _, _) in built.items()
        if key in jobs and jobs[key].arguments == job.arguments
    )
    return {key: built[key][1:] for key in same}
