"""Zeros by which the programs of one launch find out which of them is the last; it leaves zeros
behind.

Two launches may share them only if one follows the other. A launch outside of graphs therefore
takes those of its stream, whichever engine it serves. A graph is replayed on another stream than
the one that captured it, so a launch that is captured takes those of its recorder, all graphs of
which follow one another: they share their memory as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ...ops.declare import OpError

COUNTERS = 1 << 14

_of_capture: ContextVar[torch.Tensor | None] = ContextVar("counters_of_capture", default=None)
_of_streams: dict[tuple[torch.device, int], torch.Tensor] = {}
_of_thread = threading.local()
"""Triton's interpreter runs a launch within its call, so that there a thread is what a stream
is.
"""


def make_counters(device: torch.device) -> torch.Tensor:
    """Zeros [COUNTERS] int32. The stream that makes them must be waited for before another one
    uses them.
    """
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@contextmanager
def counters_of_capture(zeros: torch.Tensor) -> Iterator[None]:
    """Let what is captured within the block count in `zeros`, which must live as long as the
    graph.
    """
    token = _of_capture.set(zeros)
    try:
        yield
    finally:
        _of_capture.reset(token)


def counters(device: torch.device) -> torch.Tensor:
    """The counters of the launch that comes next on `device`: [COUNTERS] int32. Raises OpError."""
    of_capture = _of_capture.get()
    if of_capture is not None:
        return of_capture
    if device.type != "cuda":
        if not hasattr(_of_thread, "zeros"):
            _of_thread.zeros = make_counters(device)
        zeros: torch.Tensor = _of_thread.zeros
        return zeros
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _of_streams:
        if torch.cuda.is_current_stream_capturing():
            raise OpError(
                "kernels with counters must run once on a stream before a graph captures them on it"
            )
        _of_streams[key] = make_counters(device)
    return _of_streams[key]
