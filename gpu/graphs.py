"""Captures programs as CUDA graphs: each in one graph, or in pieces between calls that run eagerly.

All graphs of a recorder share one memory pool: replays run one after the other on one stream, and
what outlives a replay is copied to buffers outside of the pool (`tests/e2e/test_gpu_levels.py`
poisons the pool between replays to show it).
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..bucketing import Descriptor
from ..shared.compilation_config import CUDAGraphMode
from .forward_context import ForwardContext, forward_context
from .kernels.counters import counters_of_capture, make_counters

Replay = Callable[[], Any]
WORDS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}


class _Memory:
    """What `torch.as_tensor` needs to know of memory that it shall not own."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        word: str,
        owner: Any = None,
    ) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": word,
            "data": (address, False),
            "strides": strides,
            "version": 3,
        }


def alias_of(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, device: int, owner: Any = None
) -> torch.Tensor:
    """A contiguous tensor over memory of a CUDA device that torch does not manage. It keeps
    `owner` alive.
    """
    memory = _Memory(address, shape, None, WORDS[dtype.itemsize], owner)
    return torch.as_tensor(memory, device=torch.device("cuda", device)).view(dtype)


def alias(x: Any) -> Any:
    """A tensor over the memory of a CUDA tensor that does not keep that memory: addresses in a
    graph's pool are fixed, and whoever owned them would keep later graphs from using them again.
    Other values are themselves.
    """
    if not isinstance(x, torch.Tensor) or not x.is_cuda or x.numel() == 0:
        return x
    size = x.element_size()
    memory = _Memory(
        x.data_ptr(), tuple(x.shape), tuple(stride * size for stride in x.stride()), WORDS[size]
    )
    return torch.as_tensor(memory, device=x.device).view(x.dtype)


_idle_streams: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)
"""By device, the streams of recorders that are gone. They are used again: torch keeps a workspace
of cuBLAS for every stream that it has seen, 32 MiB on some chips, until the process ends.
"""


class GraphRecorder:
    """Captures programs on a stream of its own into one pool. It must live as long as what it
    has captured.
    """

    def __init__(self) -> None:
        idle = _idle_streams[torch.cuda.current_device()]
        try:
            self.stream = idle.pop()
        except IndexError:
            self.stream = torch.cuda.Stream()
        weakref.finalize(self, idle.append, self.stream).atexit = False
        self.pool = torch.cuda.graph_pool_handle()
        self._counters = make_counters(self.stream.device)

    def synchronize(self) -> None:
        """Wait for what was run or captured on the recorder's stream."""
        self.stream.synchronize()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around a series of captures: warm-up runs belong inside, so that libraries get their
        workspaces there.
        """
        gc.collect()
        torch.cuda.synchronize()
        gc.disable()  # freeing a tensor of another stream in the middle of a capture would break it
        try:
            with torch.cuda.stream(self.stream):
                yield
            torch.cuda.synchronize()
        finally:
            gc.enable()

    def capture(
        self, descriptor: Descriptor, mode: CUDAGraphMode, run: Callable[[], Any]
    ) -> tuple[Replay, Any]:
        """Capture `run`, which was run before, and return what replays it and aliases of its
        result's tensors.
        """
        segments = _Segments(self.pool)
        splitter = segments if mode is CUDAGraphMode.PIECEWISE else None
        context = ForwardContext(descriptor, mode, splitter)
        with forward_context(context), counters_of_capture(self._counters):
            segments.begin()
            try:
                result = run()
            finally:
                segments.end()
        kept = tuple(alias(x) for x in result) if isinstance(result, tuple) else alias(result)
        return segments.replay(), kept


class _Segments:
    """Graphs and the calls between them, in order."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._parts: list[Replay] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        if self._graph is not None:
            self._graph.capture_end()
            self._parts.append(self._graph.replay)
            self._graph = None

    def split(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """See `Splitter`. The result looks like the first argument and lies in the pool, for the
        next graph to read.
        """
        result = torch.empty_like(args[0])
        self.end()
        self._parts.append(
            partial(_run_into, function, tuple(alias(x) for x in args), alias(result))
        )
        self.begin()
        return result

    def replay(self) -> Replay:
        parts = tuple(self._parts)
        return parts[0] if len(parts) == 1 else partial(_run_all, parts)


def _run_all(parts: tuple[Replay, ...]) -> None:
    for part in parts:
        part()


def _run_into(function: Callable[..., Any], args: tuple[Any, ...], result: torch.Tensor) -> None:
    result.copy_(function(*args))
