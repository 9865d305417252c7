"""What the namespaces of frameworks that run as they are called have in common."""

from __future__ import annotations

from typing import Any


class EagerLoop:
    """The loop of Python."""

    @staticmethod
    def loop(start: int, stop: int, body: Any, state: Any) -> Any:
        """state after state = body(i, state) for each i."""
        for i in range(start, stop):
            state = body(i, state)
        return state
