"""How faults are made: wrappers around what a plan has chosen for an op, written over an array
namespace.

A wrapper still calls what it wraps, even where it replaces the result: the taps of the ops inside
must stay in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ops import REGISTRY

Given = dict[str, Any]
"""The arguments of a call, by name."""
Make = Callable[[Any, Callable[..., Any]], Callable[..., Any]]


def around(op: str, wrong: Callable[[Any, Callable[..., Any], Given], Any]) -> tuple[str, Make]:
    """`wrong` calls the function itself."""

    def make(xp: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        names = REGISTRY[op].signature.parameters

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            return wrong(xp, function, {name: given[name] for name in names if name in given})

        return call

    return op, make


def _run(op: str, function: Callable[..., Any], given: Given) -> Any:
    """`function` by position, with the defaults of arguments that were left out before others."""
    named = list(REGISTRY[op].signature.parameters.items())
    last = max(number for number, (name, _) in enumerate(named) if name in given)
    return function(*(given.get(name, parameter.default) for name, parameter in named[: last + 1]))


def changed(op: str, **changes: Callable[[Any, Given], Any]) -> tuple[str, Make]:
    """Some arguments are others."""

    def wrong(xp: Any, function: Callable[..., Any], given: Given) -> Any:
        others = {name: change(xp, given) for name, change in changes.items()}
        return _run(op, function, given | others)

    return around(op, wrong)


def instead(op: str, result: Callable[[Any, Given], Any]) -> tuple[str, Make]:
    """Another result, from the same arguments. It is made first: what is wrapped may write into
    them.
    """

    def wrong(xp: Any, function: Callable[..., Any], given: Given) -> Any:
        out = result(xp, given)
        _run(op, function, given)
        return out

    return around(op, wrong)


def after(op: str, change: Callable[[Any, Any], Any]) -> tuple[str, Make]:
    """The result is changed."""
    return around(op, lambda xp, function, given: change(xp, _run(op, function, given)))


def bf16(xp: Any, x: Any) -> Any:
    """x rounded to bfloat16, in its own dtype."""
    return xp.astype(xp.accumulate(xp.astype(x, xp.float_dtype("bfloat16"))), x.dtype)
