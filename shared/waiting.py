"""Says what this process waits for, where that takes long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOG = logging.getLogger("twinfer.waiting")
NOTICE_S = 10.0
"""After how long a wait is spoken of, and how often."""


@contextmanager
def waiting(what: Callable[[], str], patience: float | None = None) -> Iterator[None]:
    """While the body waits, log every NOTICE_S seconds what for.

    `what` is called from a thread of its own. `patience`, in seconds, is how long the body waits
    at most, if it has an end.
    """
    began = time.monotonic()
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(NOTICE_S):
            limit = "" if patience is None else f" of at most {patience:.0f}"
            LOG.warning("waits for %s: %.0f%s s", what(), time.monotonic() - began, limit)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
