"""Comparing backends: which op, in which layer, computes something else, and is it rounding or an
error?

Importing this package imports neither JAX nor torch. One process may run both sides here (and only
here).
"""

from __future__ import annotations

from typing import Any

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

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Public names, loaded when they are first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
