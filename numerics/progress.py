"""What tells somebody how far a comparison has come, in a line of text."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


def silent(text: str) -> None:
    """A progress that shows nothing."""
