"""How deeply JSON may nest that comes from a client: what reads it later may recurse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Objects and lists inside of each other; what they hold at the bottom does not count."""


def nests_too_deep(value: Any) -> bool:
    """Whether a JSON value nests more than MAX_DEPTH deep. Does not recurse itself."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for parent in level
            if isinstance(parent, (Mapping, list, tuple))
            for item in (parent.values() if isinstance(parent, Mapping) else parent)
            if isinstance(item, (Mapping, list, tuple))
        ]
        if not level:
            return False
    return True
