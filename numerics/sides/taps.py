"""Taps: what an op got and gave, at one call. Models are made of ops, so calls align by op, layer
and place.

The reference is traced with everything nested (`Tracer`). From that trace follows what a backend
runs under its plan (`declare`): a coarse op that it implements as one has nothing inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ...ops import Op, Plan
from ...ops.plan import COMPOSITION


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
    """A call that a program makes: `arguments` are the activations that it is given. Looked at only
    if `kept`.
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
