"""Passes over graphs of wrapped ops: in-place functionalisation, fusion of known neighbours,
lowering to a plan.
"""

from .backend import PassesBackend, passes_backend
from .functionalize import functionalize
from .fuse import fuse, fusible
from .graph import count_calls
from .lower import Lowering

__all__ = [
    "Lowering",
    "PassesBackend",
    "count_calls",
    "functionalize",
    "fuse",
    "fusible",
    "passes_backend",
]
