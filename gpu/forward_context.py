"""What code inside a compiled or captured forward must know and cannot be passed: which capture is
under way.

Everything else is an argument. The context is set while a program is captured and reset afterwards,
so that a replay or an eager run finds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..bucketing import Descriptor
from ..ops import Plan
from ..shared.compilation_config import CUDAGraphMode


class Splitter(Protocol):
    """A capture that can be interrupted."""

    def split(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """End the graph under capture, note the call for replays, begin the next graph. Returns
        the call's result.
        """
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The program that is being captured, how, and by whom (None: in one graph)."""

    descriptor: Descriptor
    mode: CUDAGraphMode
    splitter: Splitter | None = None


_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


def get_forward_context() -> ForwardContext | None:
    """The context of the capture under way in this thread, or None."""
    return _current.get()


def set_forward_context(context: ForwardContext) -> Token[ForwardContext | None]:
    """Set the context; give the token to `reset_forward_context`."""
    return _current.set(context)


def reset_forward_context(token: Token[ForwardContext | None]) -> None:
    """Put back what was there before."""
    _current.reset(token)


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """The context, within the block."""
    token = set_forward_context(context)
    try:
        yield
    finally:
        reset_forward_context(token)


def splittable(plan: Plan, names: tuple[str, ...]) -> Plan:
    """The plan with the ops `names` interrupting a piecewise capture; anywhere else they run as
    before.
    """
    choices = dict(plan.choices)
    for name in set(names).intersection(choices):
        choice = choices[name]
        function = _splitting(choice.implementation.function)
        choices[name] = replace(
            choice, implementation=replace(choice.implementation, function=function, opaque=True)
        )
    return Plan(plan.framework, choices)


def _splitting(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        context = get_forward_context()
        if context is None or context.splitter is None:
            return function(*args)
        return context.splitter.split(function, args)

    return call
