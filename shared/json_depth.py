"""How deeply JSON may nest that comes from a client: what reads it later may recurse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Objects and lists inside of each other; what they hold at the bottom does not count."""

_SCALARS = frozenset({str, int, float, bool, type(None)})
"""Most values of a large body, known without a look at what a class inherits."""


def nests_too_deep(value: Any) -> bool:
    """Whether a JSON value nests more than MAX_DEPTH deep. Does not recurse itself."""
    level = [] if type(value) in _SCALARS else [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for parent in level
            if isinstance(parent, (dict, list, tuple, Mapping))
            for item in (parent.values() if isinstance(parent, (dict, Mapping)) else parent)
            if type(item) not in _SCALARS and isinstance(item, (dict, list, tuple, Mapping))
        ]
        if not level:
            return False
    return True
