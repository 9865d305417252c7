"""The plan: which implementation of each op runs, chosen once when an engine is built.

Nothing is chosen at run time, and nothing depends on whether code is compiled: the plan is the
arithmetic of an engine. It covers the ops that the model calls, and the finer ones of those that
run as compositions. Its hash belongs into every benchmark, every comparison and every key of a
compile cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from .choosing import COMPOSITION, DISABLED, NATIVE, Choice, Chooser, Voice, named
from .declare import REGISTRY, Op, OpError
from .implement import IMPLEMENTATIONS, ROWS, Framework, check_framework, preferred
from .recording import OUTSIDE, Call

__all__ = [
    "COMPOSITION",
    "DISABLED",
    "NATIVE",
    "BoundPlans",
    "Choice",
    "LayerPlan",
    "Plan",
    "Plans",
    "enabled_ops",
    "plan_layers",
    "priority",
    "resolve",
    "set_default",
]

_defaults: dict[tuple[str, Framework], tuple[str, ...]] = {}
_scoped: ContextVar[Mapping[str, tuple[str, ...]]] = ContextVar("op_priority", default={})  # noqa: B039


@dataclass(frozen=True)
class Plan:
    """The choice for each op that it covers. `unavailable` says why some ops of a plan over all
    ops have none.
    """

    framework: Framework
    choices: Mapping[str, Choice]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, op: str) -> Choice:
        if op in self.choices:
            return self.choices[op]
        REGISTRY[op]
        raise OpError(
            self.unavailable.get(
                op, f"op {op!r} is not in this plan: no program of the model calls it"
            )
        )

    def __contains__(self, op: str) -> bool:
        return op in self.choices

    @property
    def host_metadata(self) -> bool:
        """Whether anything here reads the ragged lengths on the host."""
        return any(choice.implementation.host_metadata for choice in self.choices.values())

    @cached_property
    def hash(self) -> str:
        """Hex digest that changes when a choice or the source of one does."""
        lines = [
            f"{name}={choice.provider}:{choice.uuid}"
            for name, choice in sorted(self.choices.items())
        ]
        return hashlib.sha256("\n".join([self.framework, *lines]).encode()).hexdigest()[:16]

    def bind(
        self, wrap: Callable[[Op, Callable[..., Any]], Callable[..., Any]] | None = None
    ) -> Any:
        """A namespace with one plain function per op of the plan.

        `wrap(op, function)` lets a binding name or trace it.
        """
        bound = SimpleNamespace()
        for name, choice in self.choices.items():
            op, function = REGISTRY[name], choice.implementation.function
            if choice.provider == COMPOSITION:
                function = named(op, partial(op.reference, bound))
            setattr(bound, name, wrap(op, function) if wrap else function)
        for name, why in self.unavailable.items():
            setattr(bound, name, partial(_refuse, why))
        return bound


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The plan of one kind of layer, and the ops that such a layer calls (not those inside of a
    coarse one).
    """

    plan: Plan
    called: frozenset[str]


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of one engine: one for each kind of program (`decode`, `mixed`), and `sample` for
    what follows them.

    `layers` are those of each kind of layer, by kind of program: an implementation that refuses one
    kind of layer still runs in the others. Most often they are all the plan of the program.

    `stages` are hex digests of what stages from outside are made of, by name. What one does
    between its ops is in no plan, and in all compiled programs.
    """

    by_kind: Mapping[str, Plan]
    layers: Mapping[str, Mapping[Hashable, LayerPlan]] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Plan:
        return self.by_kind[kind]

    def of(self, kind: str, layer: Hashable) -> Plan:
        """The plan of a kind of layer in a kind of program."""
        return self.layers[kind][layer].plan

    def every(self, kind: str) -> list[Plan]:
        """The different plans of a kind of program."""
        plans = [self.by_kind[kind], *(layer.plan for layer in self.layers.get(kind, {}).values())]
        return list({plan.hash: plan for plan in plans}.values())

    def host_metadata(self, kind: str) -> bool:
        """Whether anything in a kind of program reads the ragged lengths on the host."""
        return any(plan.host_metadata for plan in self.every(kind))

    def titled(self) -> list[tuple[str, Plan]]:
        """The different plans under names that do not depend on the model: `decode`, `decode.1`,
        ...
        """
        found = []
        for kind in sorted(self.by_kind):
            for number, plan in enumerate(self.every(kind)):
                found.append((f"{kind}.{number}" if number else kind, plan))
        return found

    def layer_titles(self) -> dict[str, list[str]]:
        """By kind of program, under which of these names the plan of each kind of layer stands."""
        titles = {(title.partition(".")[0], plan.hash): title for title, plan in self.titled()}
        return {
            kind: [titles[kind, layer.plan.hash] for layer in layers.values()]
            for kind, layers in self.layers.items()
        }

    @property
    def hash(self) -> str:
        """Hex digest over all kinds and stages from outside."""
        lines = [f"{title}={plan.hash}" for title, plan in self.titled()]
        lines += [f"{name}={uuid}" for name, uuid in self._stage_factors.items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @property
    def factors(self) -> dict[str, str]:
        """All that compiled code depends on here: provider and uuid, by `kind/op`, and what stages
        from outside are, by `stage/name`.

        A compile cache keeps them beside what it stores, so that a miss can say what has changed.
        """
        ops = {
            f"{title}/{op}": f"{plan.framework}:{choice.provider}:{choice.uuid}"
            for title, plan in self.titled()
            for op, choice in sorted(plan.choices.items())
        }
        return ops | self._stage_factors

    @property
    def _stage_factors(self) -> dict[str, str]:
        return {f"stage/{name}": uuid for name, uuid in sorted(self.stages.items())}

    @property
    def cache_key(self) -> str:
        """Hex digest, all 256 bits, of the factors: it belongs into every key of a compile
        cache.
        """
        lines = [f"{name}={value}" for name, value in self.factors.items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class BoundPlans:
    """The bound ops of all programs: `bound[kind]`, and `bound.of(kind, layer)` for a kind of
    layer.
    """

    def __init__(self, plans: Plans, bind: Callable[[str, Plan], Any]) -> None:
        """`bind(kind, plan)` gives a namespace of ops; it is called once for each different plan
        of a kind.
        """
        self._by_kind: dict[str, Any] = {}
        self._of_layer: dict[tuple[str, Hashable], Any] = {}
        for kind in plans.by_kind:
            bound = {plan.hash: bind(kind, plan) for plan in plans.every(kind)}
            self._by_kind[kind] = bound[plans[kind].hash]
            for layer, planned in plans.layers.get(kind, {}).items():
                self._of_layer[kind, layer] = bound[planned.plan.hash]

    def __getitem__(self, kind: str) -> Any:
        return self._by_kind[kind]

    def of(self, kind: str, layer: Hashable) -> Any:
        """The ops of a kind of layer in a kind of program."""
        return self._of_layer[kind, layer]


def plan_layers(
    choose: Callable[..., Plan], calls: Sequence[Call], layers: Sequence[Hashable]
) -> tuple[Plan, dict[Hashable, LayerPlan]]:
    """The plan of a kind of program, and that of each of its kinds of `layers`. A call's `layer` is
    a number there.

    `choose(calls=...)` makes a plan. A kind of layer whose choices are those of the program has the
    program's plan.
    """
    plans: dict[Hashable, Plan] = {}
    for number, layer in enumerate(layers):
        plans[layer] = choose(calls=[call for call in calls if call.layer in (OUTSIDE, number)])
    first, *others = plans.values()
    choices = dict(first.choices)
    for plan in others:
        for name, choice in plan.choices.items():
            choices.setdefault(name, choice)
    program = Plan(first.framework, choices)
    found = {}
    for number, (layer, plan) in enumerate(plans.items()):
        called = frozenset(call.op for call in calls if call.layer == number and not call.parents)
        found[layer] = LayerPlan(program if _agrees(plan, program) else plan, called)
    return program, found


def _agrees(plan: Plan, program: Plan) -> bool:
    """Whether all that a plan covers is chosen alike in another one."""
    return all(choice.provider == program[name].provider for name, choice in plan.choices.items())


def set_default(op: str, framework: Framework, *providers: str) -> None:
    """Set the order in which providers of `op` are tried in this process.

    Raises OpError for an unknown op or framework.
    """
    REGISTRY[op]
    check_framework(framework)
    _defaults[op, framework] = providers


@contextmanager
def priority(op: str, *providers: str) -> Iterator[None]:
    """Within the block, plans try `providers` first for `op`: for tests and experiments. Raises
    OpError.
    """
    REGISTRY[op]
    token = _scoped.set({**_scoped.get(), op: providers})
    try:
        yield
    finally:
        _scoped.reset(token)


def enabled_ops(enable: Sequence[str]) -> set[str]:
    """The ops that an enable list leaves on: `all` (the default start) or `none`, then `+op` and
    `-op` in order.

    A disabled op runs its native implementation, whatever the priorities say. Raises OpError.
    """
    if not enable:
        raise OpError("enable list: got an empty one, allowed are all, none, and +op or -op")
    words = set(enable)
    if {"all", "none"} <= words:
        raise OpError("enable list: got both 'all' and 'none', one start is allowed")
    names = {op.name for op in REGISTRY}
    on = set() if "none" in words else set(names)
    for word in enable:
        if word in ("all", "none"):
            continue
        sign, name = word[:1], word[1:]
        if sign not in ("+", "-") or name not in names:
            raise OpError(
                f"enable list: got {word!r}, allowed are all, none, and +op or -op for a known op"
            )
        (on.add if sign == "+" else on.discard)(name)
    return on


def resolve(
    framework: Framework,
    priorities: Mapping[str, Sequence[str]] | None = None,
    *,
    platform: str = "",
    enable: Sequence[str] = ("all",),
    calls: Sequence[Call] | None = None,
    row_invariant: bool = False,
) -> Plan:
    """Choose implementations for `framework`: `choosing.py` says how.

    `priorities` are the user's wishes; what implementations prefer on `platform` (`cpu`, `cuda`,
    `tpu`) is heard after them. With `calls`, what a model calls, the plan covers these ops and the
    finer ones of compositions, and a provider must take the arguments of every call. Without, it
    covers all ops that have an implementation. With `row_invariant`, only what promises that is
    chosen, and the plain ones that do are tried behind what the platform prefers. Raises OpError
    for an unknown op or provider, for an op of the model without an implementation that takes
    everything, and for a predicate that takes some programs only.
    """
    from .plugins import load_plugins

    load_plugins()
    _load(framework)
    defaults = {op: order for (op, where), order in _defaults.items() if where == framework}
    wishes: dict[Voice, Mapping[str, Sequence[str]]] = {
        "scoped": _scoped.get(),
        "user": priorities or {},
        "default": defaults,
        "platform": preferred(framework, platform),
    }
    if row_invariant:
        wishes["platform"] = _with_rows(framework, wishes["platform"])
    by_op: dict[str, list[Call]] = {}
    for call in calls or ():
        by_op.setdefault(call.op, []).append(call)
    insisted = {word[1:] for word in enable if word.startswith("+")}
    chooser = Chooser(
        framework, wishes, enabled_ops(enable), insisted, by_op, row_invariant, platform
    )
    chooser.check("scoped")
    chooser.check("user")
    if calls is None:
        return _over_all_ops(framework, chooser)
    return Plan(framework, {name: chooser.choose(name) for name in chooser.called()})


def _with_rows(
    framework: Framework, priorities: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[str]]:
    """The wishes, and behind them the plain implementations that are row-invariant."""
    plain = {
        op for (op, where), known in IMPLEMENTATIONS.items() if where == framework and ROWS in known
    }
    return {**priorities, **{op: (*priorities.get(op, ()), ROWS) for op in plain}}


def _over_all_ops(framework: Framework, chooser: Chooser) -> Plan:
    """For tests and tools. An op that has no implementation here is refused when it is asked
    for.
    """
    choices, unavailable = {}, {}
    for op in REGISTRY:
        try:
            choices[op.name] = chooser.choose(op.name)
        except OpError as error:
            unavailable[op.name] = str(error)
    return Plan(framework, choices, unavailable)


def _refuse(why: str, *_: Any, **__: Any) -> Any:
    raise OpError(why)


def _load(framework: Framework) -> None:
    """Import the native implementations of a framework, and only of that one."""
    if framework == "jax":
        from .native import jax_attention, jax_moe, jax_parallel, jax_rows  # noqa: F401
    elif framework == "torch":
        from .native import (  # noqa: F401
            torch_attention,
            torch_moe,
            torch_parallel,
            torch_rows,
            torch_static,
        )
