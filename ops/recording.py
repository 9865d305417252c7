"""Records the ops that a model calls: what each one got and gave, in order. The numerics tool aligns these traces.

A recorder wraps bound functions, so it works in eager torch, and under a JAX trace whose records are returned as
outputs (layers unrolled: values inside of a scan cannot leave it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .declare import Op


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op: `index` counts the calls of this op; `layer` is -1 outside of layers."""

    op: str
    layer: int
    index: int
    arguments: Mapping[str, Any]
    outputs: tuple[Any, ...]


@dataclass(slots=True)
class Recorder:
    """Collects calls. Give `wrap` to `Plan.bind`; set `layer` before each layer. `keep` turns values into what is kept.

    A coarse op is recorded, and so are the finer ops that it is composed of, before it: they end first.
    """

    keep: Callable[[Any], Any] = lambda value: value
    layer: int = -1
    calls: list[Call] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)

    def wrap(self, op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = op.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = {name: self.keep(value) for name, value in bound.arguments.items()}
            result = function(*args, **kwargs)
            outputs = tuple(self.keep(value) for value in (result if isinstance(result, tuple) else (result,)))
            index = self._counts.get(op.name, 0)
            self._counts[op.name] = index + 1
            self.calls.append(Call(op.name, self.layer, index, arguments, outputs))
            return result

        call.__signature__ = op.signature  # type: ignore[attr-defined]
        return call

    def by_op(self) -> dict[str, list[Mapping[str, Any]]]:
        """Arguments of all calls, by op."""
        grouped: dict[str, list[Mapping[str, Any]]] = {}
        for call in self.calls:
            grouped.setdefault(call.op, []).append(call.arguments)
        return grouped
