"""Fills weights with entries of files, by several threads: one alone reads a fraction of what the
system's cache gives and a GPU takes (docs/measurements/gpu-start.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod

import numpy as np
import torch

from ..ops.namespaces.torch_ import from_numpy
from ..shared.reading_ahead import readers
from ..shared.shard_reading import Entries

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STAGING_BYTES = 8 << 20
"""Bytes that are on their way to a GPU at once. Two of each thread are page-locked."""
ROUNDING_ENTRIES = 1 << 20
"""Entries of another dtype that are copied at a time until they are rounded: new memory for all of
a tensor takes longer than its numbers.
"""


class Uploads:
    """Threads that read arrays and put them where weights lie, on the device of the weights.

    Within a block, whose end waits for what was begun and gives up what was not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(readers(), "weights")
        self._of_thread = threading.local()

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, target: torch.Tensor, read: Callable[[], Entries]) -> Future[None]:
        """Put what `read` gives into `target`, in a thread, which calls it. Once it is done, the
        entries are there.
        """
        free = None
        if self._device.type == "cuda":
            # What the memory was used for before may not be done.
            free = torch.cuda.Event()
            free.record()
        return self._pool.submit(self._fill, target, read, free)

    def _staging(self) -> Staging:
        """What this thread has, made for its first weight: of an error where threads begin, as too
        little memory, those that wait would not hear.
        """
        if not hasattr(self._of_thread, "staging"):
            torch.cuda.set_device(self._device)
            self._of_thread.staging = Staging()
        staging: Staging = self._of_thread.staging
        return staging

    @torch.no_grad()
    def _fill(
        self, target: torch.Tensor, read: Callable[[], Entries], free: torch.cuda.Event | None
    ) -> None:
        if free is None:
            for place, values in read():
                copy(target[place], values)
            return
        staging = self._staging()
        with torch.cuda.stream(staging.stream):
            staging.stream.wait_event(free)
            for place, values in read():
                staging.put(target[place], values)
            staging.stream.synchronize()


class Staging:
    """Page-locked memory of one thread, from which a GPU copies while the thread fills the rest."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._buffers = [
            torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._events = [torch.cuda.Event() for _ in self._buffers]
        self._next = 0

    def put(self, target: torch.Tensor, values: np.ndarray) -> None:
        """Copy values to a weight of the GPU, by as many rows as there is memory for."""
        width = target[0].numel() * target.itemsize if len(target) else 0
        rows = max(1, STAGING_BYTES // max(1, width))
        for first in range(0, len(target), rows):
            some = slice(first, first + rows)
            staged = self._buffer_for(target[some])
            copy(staged, values[some])
            target[some].copy_(staged, non_blocking=True)
            self._events[self._next].record()
            self._next = (self._next + 1) % len(self._buffers)

    def _buffer_for(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for such a tensor, once the GPU has what was there."""
        size = like.numel() * like.itemsize
        if size > STAGING_BYTES:  # one row
            return torch.empty(like.shape, dtype=like.dtype)
        self._events[self._next].synchronize()
        return self._buffers[self._next][:size].view(like.dtype).view(like.shape)


def copy(target: torch.Tensor, values: np.ndarray) -> None:
    """Put values into a tensor of the host, rounded to its dtype."""
    if str(target.dtype) == f"torch.{values.dtype.name}":
        # As words: numpy copies bfloat16 and float8 one by one, torch by all processors at once.
        words = target.view(WORDS[target.itemsize]).numpy()
        words[...] = values.view(words.dtype)
        return
    rows = max(1, ROUNDING_ENTRIES // max(1, prod(values.shape[1:])))
    for first in range(0, len(values), rows):
        some = slice(first, first + rows)
        # torch warns of what is not to be written to.
        target[some].copy_(from_numpy(np.array(values[some])))
