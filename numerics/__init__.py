"""Comparing backends: which op, in which layer, computes something else, and is it rounding or an
error?

Importing this package imports neither JAX nor torch. One process may run both sides here (and only
here).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import capture, compare_targets, write_report
    from .bundles.bundle import read
    from .judging.diff import Diff
    from .questions.logits import compare_ends
    from .questions.model import compare_model
    from .questions.saved import compare
    from .questions.served import check_served
    from .sides.steps import default_prompts, make_steps
    from .sides.subject import open_subject, parse_target

_PUBLIC = {
    "Diff": "judging.diff",
    "capture": "api",
    "check_served": "questions.served",
    "compare": "questions.saved",
    "compare_ends": "questions.logits",
    "compare_model": "questions.model",
    "compare_targets": "api",
    "default_prompts": "sides.steps",
    "make_steps": "sides.steps",
    "open_subject": "sides.subject",
    "parse_target": "sides.subject",
    "read": "bundles.bundle",
    "write_report": "api",
}

__all__ = [
    "Diff",
    "capture",
    "check_served",
    "compare",
    "compare_ends",
    "compare_model",
    "compare_targets",
    "default_prompts",
    "make_steps",
    "open_subject",
    "parse_target",
    "read",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Public names, loaded when they are first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
