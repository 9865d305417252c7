"""What tells somebody how far a start has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def silent(what: str, done: int, total: int) -> None:
    """A progress that shows nothing."""
