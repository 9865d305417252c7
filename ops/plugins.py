"""Out-of-tree ops: packages that register ops, implementations or layers through the entry point
`twinfer.ops`.

An entry point names a function without parameters; it is called once per process, before the first
plan is made. They are called by name: folders are listed in any order, and another order of
registrations may make another plan.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from .declare import OpError

GROUP = "twinfer.ops"


@cache
def load_plugins() -> tuple[str, ...]:
    """Call every entry point of the group, and return their names. Raises OpError, naming the
    one that fails.
    """
    names = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        try:
            entry.load()()
        except Exception as error:
            raise OpError(
                f"plugin {entry.name!r} ({entry.value}) cannot be loaded: {error}"
            ) from error
        names.append(entry.name)
    return tuple(names)
