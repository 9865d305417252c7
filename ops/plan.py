"""The plan: which implementation of each op runs, chosen once when an engine is built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from .declare import REGISTRY, Op, OpError
from .implement import IMPLEMENTATIONS, Framework, Implementation

COMPOSITION = "composition"
NATIVE = "native"


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


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for every op. The arithmetic of an engine depends on this and on nothing else."""

    framework: Framework
    choices: Mapping[str, Choice]

    def __getitem__(self, op: str) -> Choice:
        return self.choices[op]

    @property
    def hash(self) -> str:
        """Hex digest that changes when a choice does."""
        lines = [f"{self.framework}"] + [f"{name}={choice.provider}" for name, choice in sorted(self.choices.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def bind(self, wrap: Callable[[Op, Callable[..., Any]], Callable[..., Any]] | None = None) -> Any:
        """A namespace with one plain function per op. `wrap(op, function)` lets a binding name or trace it."""
        bound = SimpleNamespace()
        for op in REGISTRY:
            function = self.choices[op.name].implementation.function
            if self.choices[op.name].provider == COMPOSITION:
                function = _named(op, partial(op.reference, bound))
            setattr(bound, op.name, wrap(op, function) if wrap else function)
        return bound


def resolve(framework: Framework, priorities: Mapping[str, Sequence[str]] | None = None) -> Plan:
    """Choose an implementation of every op for `framework`.

    `priorities` maps an op to providers in order of preference; what it does not name runs its native implementation,
    or, for a coarse op, the composition of its finer ops. Raises OpError for an unknown op or provider.
    """
    _load(framework)
    priorities = dict(priorities or {})
    for name in priorities:
        REGISTRY[name]
    return Plan(framework, {op.name: _choose(op, framework, priorities.get(op.name, ())) for op in REGISTRY})


def _choose(op: Op, framework: Framework, order: Sequence[str]) -> Choice:
    fallback = COMPOSITION if op.level == "coarse" else NATIVE
    available = dict(IMPLEMENTATIONS.get((op.name, framework), {}))
    if fallback not in available:
        available[fallback] = _fallback(op, framework)
    passed_over: list[tuple[str, str]] = []
    for provider in (*order, fallback):
        if provider not in available:
            raise OpError(
                f"op {op.name!r} has no provider {provider!r} for {framework}; known are {', '.join(available)}"
            )
        if available[provider].supported():
            return Choice(op.name, available[provider], tuple(passed_over))
        passed_over.append((provider, "not supported on this machine"))
    raise OpError(f"op {op.name!r}: no implementation for {framework} runs on this machine")


def _fallback(op: Op, framework: Framework) -> Implementation:
    if op.level == "coarse":
        return Implementation(op.name, COMPOSITION, framework, op.reference)
    if op.native == "per framework" and framework != "numpy":
        raise OpError(f"op {op.name!r} needs a native implementation for {framework}, and none is registered")
    from .namespaces import namespace

    return Implementation(op.name, NATIVE, framework, _named(op, partial(op.reference, namespace(framework))))


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
