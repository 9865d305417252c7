"""Ctrl-C waits until the books agree.

A step changes the scheduler's books, tables that the device holds, and buffers that the device
takes over. An interrupt in the middle of that would leave them saying different things, and the
next request would silently read another one's pages. So SIGINT is only noted while they change, and
delivered at the end.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

PATIENCE_S = 5.0
"""Seconds from the first interrupt after which another one is not held back any more: the device
may hang.
"""


class DeferredInterrupts:
    """A context in which SIGINT is noted instead of handled; its handler is called when the context
    ends.

    Nests: an inner context delivers to the outer one. Outside of the main thread, where Python
    handles no signals, and where SIGINT is ignored or left to the system, it does nothing.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._frame: FrameType | None = None
        self._first: float | None = None

    def __enter__(self) -> DeferredInterrupts:
        if threading.current_thread() is threading.main_thread() and callable(
            signal.getsignal(signal.SIGINT)
        ):
            self._handler = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._frame = now, frame
        elif now - self._first > PATIENCE_S and self._handler is not None:
            self._handler(number, frame)

    def deliver(self) -> None:
        """Call the handler of an interrupt that was noted: as a rule that raises
        KeyboardInterrupt.
        """
        if self._first is not None and self._handler is not None:
            frame, self._first, self._frame = self._frame, None, None
            self._handler(signal.SIGINT, frame)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if error is None:  # else something is on its way to the caller already
            self.deliver()
