"""The plan: which implementation of each op runs, chosen once when an engine is built.

Nothing is chosen at run time, and nothing depends on whether code is compiled: the plan is the arithmetic of an engine.
It covers the ops that the model calls, and the finer ones of those that run as compositions. Its hash belongs into
every benchmark, every comparison and every key of a compile cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from .choosing import COMPOSITION, DISABLED, NATIVE, Choice, Chooser, Voice, named
from .declare import REGISTRY, Op, OpError
from .implement import Framework, check_framework
from .recording import Call

__all__ = [
    "COMPOSITION",
    "DISABLED",
    "NATIVE",
    "Choice",
    "Plan",
    "Plans",
    "enabled_ops",
    "priority",
    "resolve",
    "set_default",
]

_defaults: dict[tuple[str, Framework], tuple[str, ...]] = {}
_scoped: ContextVar[Mapping[str, tuple[str, ...]]] = ContextVar("op_priority", default={})  # noqa: B039


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for each op that it covers. `unavailable` says why some ops of a plan over all ops have none."""

    framework: Framework
    choices: Mapping[str, Choice]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    _hash: list[str] = field(default_factory=list, repr=False, compare=False)

    def __getitem__(self, op: str) -> Choice:
        if op in self.choices:
            return self.choices[op]
        REGISTRY[op]
        raise OpError(self.unavailable.get(op, f"op {op!r} is not in this plan: no program of the model calls it"))

    def __contains__(self, op: str) -> bool:
        return op in self.choices

    @property
    def host_metadata(self) -> bool:
        """Whether anything here reads the ragged lengths on the host."""
        return any(choice.implementation.host_metadata for choice in self.choices.values())

    @property
    def hash(self) -> str:
        """Hex digest that changes when a choice or the source of one does."""
        if not self._hash:
            lines = [f"{name}={choice.provider}:{choice.uuid}" for name, choice in sorted(self.choices.items())]
            self._hash.append(hashlib.sha256("\n".join([self.framework, *lines]).encode()).hexdigest()[:16])
        return self._hash[0]

    def bind(self, wrap: Callable[[Op, Callable[..., Any]], Callable[..., Any]] | None = None) -> Any:
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
class Plans:
    """The plans of one engine: one for each kind of program (`decode`, `mixed`), and `sample` for what follows them."""

    by_kind: Mapping[str, Plan]

    def __getitem__(self, kind: str) -> Plan:
        return self.by_kind[kind]

    @property
    def hash(self) -> str:
        """Hex digest over all kinds."""
        lines = [f"{kind}={plan.hash}" for kind, plan in sorted(self.by_kind.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @property
    def factors(self) -> dict[str, str]:
        """All that compiled code depends on here: provider and uuid, by `kind/op`.

        A compile cache keeps them beside what it stores, so that a miss can say what has changed.
        """
        return {
            f"{kind}/{op}": f"{plan.framework}:{choice.provider}:{choice.uuid}"
            for kind, plan in sorted(self.by_kind.items())
            for op, choice in sorted(plan.choices.items())
        }

    @property
    def cache_key(self) -> str:
        """Hex digest, all 256 bits, of the factors: it belongs into every key of a compile cache."""
        lines = [f"{name}={value}" for name, value in self.factors.items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def set_default(op: str, framework: Framework, *providers: str) -> None:
    """Set the order in which providers of `op` are tried in this process.

    Raises OpError for an unknown op or framework.
    """
    REGISTRY[op]
    check_framework(framework)
    _defaults[op, framework] = providers


@contextmanager
def priority(op: str, *providers: str) -> Iterator[None]:
    """Within the block, plans try `providers` first for `op`: for tests and experiments. Raises OpError."""
    REGISTRY[op]
    token = _scoped.set({**_scoped.get(), op: providers})
    try:
        yield
    finally:
        _scoped.reset(token)


def enabled_ops(enable: Sequence[str]) -> set[str]:
    """The ops that an enable list leaves on: `all` (the default start) or `none`, then `+op` and `-op` in order.

    A disabled op runs its native implementation, whatever the priorities say. Raises OpError.
    """
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
            raise OpError(f"enable list: got {word!r}, allowed are all, none, and +op or -op for a known op")
        (on.add if sign == "+" else on.discard)(name)
    return on


def resolve(
    framework: Framework,
    priorities: Mapping[str, Sequence[str]] | None = None,
    *,
    platform: Mapping[str, Sequence[str]] | None = None,
    enable: Sequence[str] = ("all",),
    calls: Sequence[Call] | None = None,
) -> Plan:
    """Choose implementations for `framework`: `choosing.py` says how.

    `priorities` are the user's wishes, `platform` those of the machine's backend. With `calls`, what a model calls, the
    plan covers these ops and the finer ones of compositions, and a provider must take the arguments of every call.
    Without, it covers all ops that have an implementation. Raises OpError for an unknown op or provider, for an op of
    the model without an implementation that takes everything, and for a predicate that takes some programs only.
    """
    from .plugins import load_plugins

    load_plugins()
    _load(framework)
    defaults = {op: order for (op, where), order in _defaults.items() if where == framework}
    wishes: dict[Voice, Mapping[str, Sequence[str]]] = {
        "scoped": _scoped.get(), "user": priorities or {}, "default": defaults, "platform": platform or {},
    }  # fmt: skip
    by_op: dict[str, list[Call]] = {}
    for call in calls or ():
        by_op.setdefault(call.op, []).append(call)
    insisted = {word[1:] for word in enable if word.startswith("+")}
    chooser = Chooser(framework, wishes, enabled_ops(enable), insisted, by_op)
    chooser.check("scoped")
    chooser.check("user")
    if calls is None:
        return _over_all_ops(framework, chooser)
    return Plan(framework, {name: chooser.choose(name) for name in chooser.called()})


def _over_all_ops(framework: Framework, chooser: Chooser) -> Plan:
    """For tests and tools. An op that has no implementation here is refused when it is asked for."""
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
        from .native import jax_attention  # noqa: F401
    elif framework == "torch":
        from .native import torch_attention  # noqa: F401
