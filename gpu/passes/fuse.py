"""Fusion of known neighbours: where a graph spells out the composition of a coarse op, it becomes
that op.

A pattern is the coarse op's own reference, so none is written twice, and the plan's implementation
of the coarse op meets its contract whether a model or this pass called it. Looked for are coarse
ops that are several calls and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...ops import REGISTRY, Op, OpError
from ...ops.bindings.torch import front, result_count
from .graph import DONATED, Call, as_call


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of the coarse op."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A call in a composition."""

    op: Op
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Value:
    """A result of a step; `index` is None where the op has one."""

    step: Step
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """A coarse op, the steps it is composed of, and which values it returns."""

    op: Op
    steps: tuple[Step, ...]
    results: tuple[Value, ...]


class _Tracer:
    """A namespace whose ops note that they were called."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __getattr__(self, name: str) -> Any:
        op = REGISTRY[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            given = op.signature.bind(*args, **kwargs)
            given.apply_defaults()
            step = Step(op, dict(given.arguments))
            self.steps.append(step)
            count = result_count(op)
            return (
                Value(step)
                if count is None
                else tuple(Value(step, index) for index in range(count))
            )

        return call


def pattern(name: str) -> Pattern:
    """The pattern of a coarse op. Raises OpError if its composition does more than call ops."""
    op, tracer = REGISTRY[name], _Tracer()
    try:
        results = op.reference(
            tracer, **{parameter: Parameter(parameter) for parameter in op.signature.parameters}
        )
    except (AttributeError, TypeError) as error:
        raise OpError(f"op {name!r} cannot be a fusion pattern: {error}") from error
    results = results if isinstance(results, tuple) else (results,)
    if not tracer.steps or not all(isinstance(value, Value) for value in results):
        raise OpError(f"op {name!r} cannot be a fusion pattern: it does more than call ops")
    return Pattern(op, tuple(tracer.steps), results)


def fusible(names: Collection[str]) -> tuple[str, ...]:
    """Those of some ops that a graph can be searched for, the longest compositions first."""
    steps: dict[str, int] = {}
    for name in names:
        if REGISTRY[name].level == "coarse":
            with suppress(OpError):
                steps[name] = len(pattern(name).steps)
    return tuple(sorted((name for name in steps if steps[name] > 1), key=lambda name: -steps[name]))


def fuse(graph: fx.Graph, fusions: Sequence[str]) -> int:
    """Replace what matches; returns how often. The graph must be functional."""
    done = 0
    for name in fusions:
        made = pattern(name)
        for node in list(graph.nodes):
            call = as_call(node)
            if call is not None and call.op is made.steps[-1].op and _fuse_at(graph, made, call):
                done += 1
    return done


def _fuse_at(graph: fx.Graph, made: Pattern, last: Call) -> bool:
    match = _match(made, last)
    if match is None:
        return False
    steps, arguments = match
    position = {node: index for index, node in enumerate(graph.nodes)}
    first = min((call.node for call in steps.values()), key=position.__getitem__)
    inputs = [value for value in arguments.values() if isinstance(value, fx.Node)]
    if any(position[node] > position[first] for node in inputs) or not _only_results_escape(
        made, steps
    ):
        # Only if nothing is read later than before is it certain that no donated memory is.
        return False
    donated = _donated(made, steps, arguments, position)
    with graph.inserting_before(first):
        fused = graph.call_function(
            front(made.op.name).functional,
            tuple(arguments.values()),
            {"plan": last.plan} if last.plan else {},
        )
        fused.meta[DONATED] = donated
        outputs = [fused]
        if result_count(made.op) is not None:
            outputs = [
                graph.call_function(operator.getitem, (fused, index))
                for index in range(len(made.results))
            ]
    for output, value in zip(outputs, made.results, strict=True):
        for node in _nodes_of(steps[value.step].node, value.index):
            output.meta.setdefault("example_value", node.meta.get("example_value"))
            node.replace_all_uses_with(output)
    for call in reversed(list(steps.values())):
        for user in list(call.node.users):
            graph.erase_node(user)
        graph.erase_node(call.node)
    return True


def _match(made: Pattern, last: Call) -> tuple[dict[Step, Call], dict[str, Any]] | None:
    """The calls that are the steps of a pattern whose last step is `last`, and the arguments of
    the coarse op.
    """
    found: dict[Step, Call] = {}
    arguments: dict[str, Any] = {}

    def same(wanted: Any, got: Any) -> bool:
        if isinstance(wanted, Parameter):
            known = arguments.setdefault(wanted.name, got)
            return known is got or (
                not isinstance(got, fx.Node) and type(known) is type(got) and known == got
            )
        if not isinstance(wanted, Value):
            return not isinstance(got, fx.Node) and bool(wanted == got)
        if wanted.index is not None:
            if (
                not isinstance(got, fx.Node)
                or got.target is not operator.getitem
                or got.args[1] != wanted.index
            ):
                return False
            got = got.args[0]
        call = as_call(got)
        return call is not None and matches(wanted.step, call)

    def matches(step: Step, call: Call) -> bool:
        if step in found:
            return found[step].node is call.node
        if call.op is not step.op or call.plan != last.plan or call.inplace:
            return False
        found[step] = call
        return all(same(step.arguments[name], value) for name, value in call.arguments.items())

    if not matches(made.steps[-1], last) or len(found) != len(made.steps):
        return None
    if len({call.node for call in found.values()}) != len(found):
        return None
    return {step: found[step] for step in made.steps}, {
        name: arguments[name] for name in made.op.signature.parameters
    }


def _nodes_of(node: fx.Node, index: int | None) -> list[fx.Node]:
    """The nodes that hold a result: the call itself, or what takes it apart."""
    if index is None:
        return [node]
    return [
        user for user in node.users if user.target is operator.getitem and user.args[1] == index
    ]


def _only_results_escape(made: Pattern, steps: dict[Step, Call]) -> bool:
    """Whether nothing outside of a match reads a value that the coarse op does not return."""
    inside = {call.node for call in steps.values()}
    returned = {(value.step, value.index) for value in made.results}
    for step, call in steps.items():
        count = result_count(step.op)
        indices: list[int | None] = [None] if count is None else list(range(count))
        if count is not None and any(
            user.target is not operator.getitem for user in call.node.users
        ):
            return False
        for index in indices:
            users = {user for node in _nodes_of(call.node, index) for user in node.users}
            if (step, index) not in returned and not users <= inside:
                return False
    return True


def _donated(
    made: Pattern, steps: dict[Step, Call], arguments: dict[str, Any], position: dict[fx.Node, int]
) -> frozenset[str]:
    """The activations of the coarse op that a step was given and that nothing else reads
    afterwards.
    """
    given = {call.arguments[name] for call in steps.values() for name in call.donated}
    inside = {call.node for call in steps.values()}
    start = min(position[node] for node in inside)

    def free(node: fx.Node) -> bool:
        return all(user in inside or position[user] < start for user in node.users)

    return frozenset(n for n in made.op.activations if arguments[n] in given and free(arguments[n]))
