"""Passes over graphs of wrapped ops: in-place functionalisation, fusion of known neighbours, lowering to a plan."""

from .backend import PassesBackend, passes_backend
from .functionalize import functionalize
from .fuse import FUSIONS, fuse
from .graph import count_calls
from .lower import Lowering

__all__ = ["FUSIONS", "Lowering", "PassesBackend", "count_calls", "functionalize", "fuse", "passes_backend"]
