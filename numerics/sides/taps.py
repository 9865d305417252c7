"""Taps: what an op got and gave, at one call. Models are made of ops, so traces align by op, layer
and call.

The reference is traced with everything nested (`Tracer`). From that trace follows what a backend
must offer under its plan (`declare`): a coarse op that it implements as one has nothing inside. The
declared taps become extra outputs of the backend's programs before these are compiled (`Tapped`),
so nothing is compiled again because somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ...ops import Op, Plan
from ...ops.plan import COMPOSITION
from ..errors import NotComparable


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op in the reference. `key` names it within its program, as
    `gated_mlp[gate_up]/linear[down]`.

    `constants` are the arguments that do not come from other ops: weights, tables, what the step
    says. `parents` are the numbers of the calls that it happened in, outermost first.
    """

    op: str
    key: str
    parents: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: frozenset[str]
    outputs: tuple[Any, ...]

    @property
    def activations(self) -> tuple[str, ...]:
        """Names of the arguments that come from other ops."""
        return tuple(
            n
            for n, v in self.arguments.items()
            if isinstance(v, np.ndarray) and n not in self.constants
        )


class Tracer:
    """Records calls of numpy ops. `constants` are arrays with their names; they are recognised
    by identity.
    """

    def __init__(self) -> None:
        self.constants: dict[int, str] = {}
        self.weights: frozenset[int] = frozenset()
        self._calls: list[Call | None] = []
        self._open: list[int] = []
        self._keys: list[str] = []

    def start(self, weights: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Forget all calls; these are the constants from now on."""
        self.constants = {id(value): name for name, value in (*others.items(), *weights.items())}
        self.weights = frozenset(id(value) for value in weights.values())
        self._calls, self._open, self._keys = [], [], []

    def wrap(self, op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, recorded. Give it to `Plan.bind`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = op.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            constant = frozenset(
                n for n, v in given.items() if id(v) in self.constants and isinstance(v, np.ndarray)
            )
            number, parents = len(self._calls), tuple(self._open)
            key = self._key(op.name, given)
            self._calls.append(None)
            self._keys.append(key)
            self._open.append(number)
            result = function(*args, **kwargs)
            self._open.pop()
            outputs = result if isinstance(result, tuple) else (result,)
            self._calls[number] = Call(op.name, key, parents, dict(given), constant, outputs)
            return result

        return call

    def _key(self, op: str, given: Mapping[str, Any]) -> str:
        inside = f"{self._keys[self._open[-1]]}/" if self._open else ""
        weight = next(
            (self.constants[id(v)] for v in given.values() if id(v) in self.weights), None
        )
        key = f"{inside}{op}" + (f"[{weight}]" if weight else "")
        same = sum(known == key or known.startswith(key + ".") for known in self._keys)
        return f"{key}.{same}" if same else key

    @property
    def calls(self) -> list[Call]:
        """The calls in the order in which they began."""
        return [call for call in self._calls if call is not None]


@dataclass(frozen=True, slots=True)
class Declared:
    """A tap that is built into a program: `arguments` are kept, and the outputs. Not kept at all
    unless `kept`.
    """

    op: str
    key: str
    arguments: tuple[str, ...]
    kept: bool = True


def declare(
    calls: Sequence[Call], plan: Plan, patterns: Iterable[str] = ("*",)
) -> tuple[Declared, ...]:
    """The taps of a program under `plan`: all calls of the reference, but for those inside of what
    is one piece there.

    `patterns` select keys, as a shell would.
    """
    patterns = tuple(patterns)
    whole: set[int] = set()
    declared: list[Declared] = []
    for number, call in enumerate(calls):
        # A plan need not cover what is inside of one piece: nothing calls it there.
        if whole.intersection(call.parents):
            continue
        if plan[call.op].provider != COMPOSITION:
            whole.add(number)
        kept = any(fnmatchcase(call.key, pattern) for pattern in patterns)
        declared.append(Declared(call.op, call.key, call.activations, kept))
    return tuple(declared)


@dataclass(slots=True)
class Tapped:
    """Wraps a backend's ops while a program is traced. `values` are the program's extra outputs,
    one per declared tap.

    `copy` keeps a value as it is now, where ops write in place. `faults` wrap the functions of some
    ops, `replaced` are other functions for the calls with some keys; what these would call inside
    is not called then, and has no value.
    """

    declared: Sequence[Declared]
    copy: Callable[[Any], Any] = lambda value: value
    faults: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = field(
        default_factory=dict
    )
    values: list[Any] = field(default_factory=list)
    replaced: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def wrap(self, op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, tapped."""
        name, names, declared, values, copy = (
            op.name,
            tuple(op.signature.parameters),
            self.declared,
            self.values,
            self.copy,
        )
        replaced = self.replaced
        fault = self.faults.get(name)
        faulty = fault(function) if fault is not None else function

        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(values)
            if number >= len(declared) or declared[number].op != name:
                expected = declared[number].op if number < len(declared) else "the end"
                raise NotComparable(
                    f"taps: the program calls {name} where the reference has {expected}"
                )
            given = dict(zip(names, args, strict=False)) | kwargs
            tap = declared[number]
            values.append(())
            kept = (
                {argument: copy(given[argument]) for argument in tap.arguments} if tap.kept else {}
            )
            other = replaced.get(tap.key)
            result = faulty(*args, **kwargs) if other is None else other(*args, **kwargs)
            if other is not None:
                values.extend(() for inner in declared if inner.key.startswith(f"{tap.key}/"))
            if tap.kept:
                outputs = result if isinstance(result, tuple) else (result,)
                values[number] = (kept, tuple(copy(value) for value in outputs))
            return result

        return call
