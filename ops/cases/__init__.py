"""Cases, bounds and mutants of the ops, one module per group: `load_all` attaches all of them
(see `ops.testing`).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules


def load_all() -> tuple[str, ...]:
    """Import every module of this package, and return their names."""
    names = tuple(sorted(module.name for module in iter_modules(__path__)))
    for name in names:
        import_module(f"{__name__}.{name}")
    return names
