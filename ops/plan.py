"""The plan: which implementation of each op runs, chosen once when an engine is built.

Nothing is chosen at run time, and nothing depends on whether code is compiled: the plan is the arithmetic of an engine.
Its hash belongs into every benchmark, every comparison and every key of a compile cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from .declare import REGISTRY, Op, OpError
from .implement import IMPLEMENTATIONS, Framework, Implementation, Refusal, always
from .source_hash import source_hash

COMPOSITION = "composition"
NATIVE = "native"
DISABLED = "the op is disabled"

Calls = Mapping[str, Sequence[Mapping[str, Any]]]
"""By op, the arguments of each of its calls in a model: arrays (or their shapes and dtypes) and Python values."""

_defaults: dict[tuple[str, Framework], tuple[str, ...]] = {}
_scoped: ContextVar[Mapping[str, tuple[str, ...]]] = ContextVar("op_priority", default={})  # noqa: B039


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation of one op, and why those with a higher priority were passed over."""

    op: str
    implementation: Implementation
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def provider(self) -> str:
        """Name of the provider."""
        return self.implementation.provider

    @property
    def uuid(self) -> str:
        """Hex digest of the sources of the implementation, of all that they import, and of the versions they call."""
        return source_hash(self.implementation.function, self.implementation.framework)


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for every op."""

    framework: Framework
    choices: Mapping[str, Choice]
    _hash: list[str] = field(default_factory=list, repr=False, compare=False)

    def __getitem__(self, op: str) -> Choice:
        return self.choices[op]

    @property
    def hash(self) -> str:
        """Hex digest that changes when a choice or the source of one does."""
        if not self._hash:
            lines = [f"{name}={choice.provider}:{choice.uuid}" for name, choice in sorted(self.choices.items())]
            self._hash.append(hashlib.sha256("\n".join([self.framework, *lines]).encode()).hexdigest()[:16])
        return self._hash[0]

    def bind(self, wrap: Callable[[Op, Callable[..., Any]], Callable[..., Any]] | None = None) -> Any:
        """A namespace with one plain function per op. `wrap(op, function)` lets a binding name or trace it."""
        bound = SimpleNamespace()
        for op in REGISTRY:
            function = self.choices[op.name].implementation.function
            if self.choices[op.name].provider == COMPOSITION:
                function = _named(op, partial(op.reference, bound))
            setattr(bound, op.name, wrap(op, function) if wrap else function)
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
    """Set the order in which providers of `op` are tried in this process. Raises OpError for an unknown op."""
    REGISTRY[op]
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
    enable: Sequence[str] = ("all",),
    calls: Calls | None = None,
) -> Plan:
    """Choose an implementation of every op for `framework`.

    Tried are, in this order: the scoped priority, the user's (`priorities`), the process default, and last the native
    implementation (or, for a coarse op, the composition of its finer ops), which takes everything. With `calls`, a
    provider must also accept the arguments of every call of its op. Raises OpError for an unknown op or provider, and
    for an op whose last provider has a predicate.
    """
    from .plugins import load_plugins

    load_plugins()
    _load(framework)
    priorities = dict(priorities or {})
    for name in priorities:
        REGISTRY[name]
    on, scoped = enabled_ops(enable), _scoped.get()
    choices = {}
    for op in REGISTRY:
        order = [*scoped.get(op.name, ()), *priorities.get(op.name, ()), *_defaults.get((op.name, framework), ())]
        choices[op.name] = _choose(op, framework, order, op.name in on, (calls or {}).get(op.name, ()))
    return Plan(framework, choices)


def _choose(
    op: Op, framework: Framework, order: Sequence[str], enabled: bool, calls: Sequence[Mapping[str, Any]]
) -> Choice:
    available = dict(IMPLEMENTATIONS.get((op.name, framework), {}))
    last = _last(op, framework, available)
    available[last.provider] = last
    for provider in order:
        if provider not in available:
            known = ", ".join(sorted(available))
            raise OpError(f"op {op.name!r} has no provider {provider!r} for {framework}; known are {known}")
    passed_over: list[tuple[str, str]] = []
    for provider in dict.fromkeys(order):
        why = DISABLED if not enabled else _refusal(available[provider], calls)
        if provider == last.provider or why is None:
            return Choice(op.name, available[provider], tuple(passed_over))
        passed_over.append((provider, why))
    return Choice(op.name, last, tuple(passed_over))


def _last(op: Op, framework: Framework, available: Mapping[str, Implementation]) -> Implementation:
    """What every priority list of an op ends with: the composition, the native one, or what was registered last.

    Raises OpError if there is none, or if it does not take everything.
    """
    if op.level == "coarse":
        if COMPOSITION in available:
            raise OpError(f"op {op.name!r}: {COMPOSITION!r} is what its finer ops give, no provider may have that name")
        return Implementation(op.name, COMPOSITION, framework, op.reference)
    if NATIVE not in available and (op.native == "reference" or framework == "numpy"):
        from .namespaces import namespace

        return Implementation(op.name, NATIVE, framework, _named(op, partial(op.reference, namespace(framework))))
    if not available:
        raise OpError(f"op {op.name!r} needs a native implementation for {framework}, and none is registered")
    last = available.get(NATIVE) or [*available.values()][-1]
    if last.supports_args is not None or last.supported is not always:
        why = "a per-argument predicate" if last.supports_args is not None else "support that depends on the machine"
        raise OpError(
            f"op {op.name!r}: the last provider for {framework}, {last.provider!r}, has {why}; it must take everything "
            f"(register a {NATIVE!r} one without predicates)"
        )
    return last


def _refusal(implementation: Implementation, calls: Sequence[Mapping[str, Any]]) -> str | None:
    """Why an implementation cannot serve these calls, or None if it can."""
    if not implementation.supported():
        return "not supported on this machine"
    if implementation.supports_args is not None:
        for arguments in calls:
            answer = implementation.supports_args(**arguments)
            if not answer:
                if isinstance(answer, Refusal):
                    return str(answer)
                shapes = {name: getattr(value, "shape", value) for name, value in arguments.items()}
                return f"does not take {', '.join(f'{name}={shape}' for name, shape in shapes.items())}"
    return None


def _named(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(op.reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__signature__ = op.signature  # type: ignore[attr-defined]
    return call


def _load(framework: Framework) -> None:
    """Import the native implementations of a framework, and only of that one."""
    if framework == "jax":
        from .native import jax_attention  # noqa: F401
    elif framework == "torch":
        from .native import torch_attention  # noqa: F401
