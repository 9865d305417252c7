"""Records the ops that a model calls: what each one got and gave, in order. The numerics tool
aligns these traces.

A recorder wraps bound functions, so it works in eager torch, and under a JAX trace whose records
are returned as outputs (layers unrolled: values inside of a scan cannot leave it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .declare import Op

OUTSIDE = -1
"""The `layer` of calls outside of layers."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op: `index` counts the calls of this op; `layer` is what its caller says, or
    `OUTSIDE`.

    `parents` are the coarse ops that it happened in, outermost first; `program` names what made it,
    as its caller says.
    """

    op: str
    layer: int
    index: int
    arguments: Mapping[str, Any]
    outputs: tuple[Any, ...]
    parents: tuple[str, ...] = ()
    program: str = ""


@dataclass(slots=True)
class Recorder:
    """Collects calls. Give `wrap` to `Plan.bind`; set `layer` before each layer, `program` before
    each program.

    `keep` turns values into what is kept.

    A coarse op is recorded, and so are the finer ops that it is composed of, before it: they end
    first.
    """

    keep: Callable[[Any], Any] = lambda value: value
    layer: int = OUTSIDE
    program: str = ""
    calls: list[Call] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    def wrap(self, op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, recorded."""
        names = tuple(op.signature.parameters)

        def arguments_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
            if len(args) == len(names):  # binding takes longer than all the rest here
                return dict(zip(names, args, strict=True))
            bound = op.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return bound.arguments

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = {
                name: self.keep(value) for name, value in arguments_of(args, kwargs).items()
            }
            parents = tuple(self._open)
            self._open.append(op.name)
            try:
                result = function(*args, **kwargs)
            finally:
                self._open.pop()
            outputs = tuple(
                self.keep(value) for value in (result if isinstance(result, tuple) else (result,))
            )
            index = self._counts.get(op.name, 0)
            self._counts[op.name] = index + 1
            self.calls.append(
                Call(op.name, self.layer, index, arguments, outputs, parents, self.program)
            )
            return result

        call.__signature__ = op.signature  # type: ignore[attr-defined]
        return call
