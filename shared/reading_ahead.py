"""Weights that several threads read: which of them have begun, and which one is waited for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

READERS = 8
"""Threads that read weights, at most: one alone gets a part of what a disk or the system's cache
gives, and two of each processor wait for one another.
"""
MOST_BEGUN = 64
"""Weights that may have begun, but for the one that is waited for."""


def readers() -> int:
    """How many threads read weights: of the processors that this process may run on."""
    own = getattr(os, "sched_getaffinity", None)  # which Linux alone has
    return min(READERS, (os.cpu_count() or 1) if own is None else len(own(0)))


class Begun(NamedTuple):
    """A weight that threads read: the bytes that it takes until it is finished, beside those where
    it belongs, and what waits for the threads and finishes it.
    """

    size: int
    finish: Callable[[], object]


def finish_ahead(every: Iterable[Begun], most: int) -> Iterator[None]:
    """Finish weights in order, each once others have begun that take `most` bytes; goes on after
    each. What a thread raised for one is raised here.
    """
    waiting: deque[Begun] = deque()
    size = 0
    for begun in every:
        waiting.append(begun)
        size += begun.size
        while waiting and (size > most or len(waiting) > MOST_BEGUN):
            size -= _finish(waiting)
            yield
    while waiting:
        _finish(waiting)
        yield


def _finish(waiting: deque[Begun]) -> int:
    first = waiting.popleft()
    first.finish()
    return first.size
