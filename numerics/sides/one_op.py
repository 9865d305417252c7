"""One op on a side: whose implementations a backend runs, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from ...ops import REGISTRY, Plan
from ...ops.implement import Framework
from ...ops.plan import resolve
from ...ops.testing import call, run
from ...shared.config import Backend

FRAMEWORKS: Mapping[str, Framework] = {"jax": "jax", "torch": "torch", "torch-xla": "torch"}
"""Whose implementations each backend runs."""
PLATFORMS = {"torch-xla": "xla"}
"""What the plans of a backend prefer, where that is not the platform of its device."""


def run_op(
    backend: Backend | str,
    op: str,
    provider: str | None,
    arguments: Mapping[str, Any],
    device: str,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> tuple[np.ndarray, ...]:
    """The outputs of an implementation as numpy arrays. `wrap` wraps it: to plant a fault."""
    framework = FRAMEWORKS[backend]
    if backend != "torch-xla":
        return run(op, framework, provider, dict(arguments), device, wrap)
    # What it is composed of is what runs there, too.
    wanted = {} if provider is None else {op: (provider,)}
    plan = resolve(framework, wanted, platform=PLATFORMS[backend])
    function = getattr(plan.bind(), op)
    return _run_traced(op, wrap(function) if wrap is not None else function, arguments, device)


def _run_traced(
    op: str, function: Callable[..., Any], arguments: Mapping[str, Any], device: str
) -> tuple[np.ndarray, ...]:
    # By name, as nothing else here imports torch_xla.
    module = import_module(f"{__package__.partition('.')[0]}.xla.one_op")
    found: tuple[np.ndarray, ...] = module.run_op(op, function, arguments, device)
    return found


class PlannedOps:
    """The ops of a plan, each as a program of its own, on a platform of a backend."""

    def __init__(self, backend: Backend | str, plan: Plan, platform: str) -> None:
        self._backend, self._plan, self._platform = backend, plan, platform
        self._framework = FRAMEWORKS[backend]
        # By name: whoever imports this package must not get both frameworks with it.
        self._binding = import_module(f"...ops.bindings.{self._framework}", __package__)
        self._bound = self._binding.bind(plan)
        self._programs: dict[str, Callable[..., Any]] = {}

    def __call__(self, op: str, arguments: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        """The outputs of an op as numpy arrays."""
        function = _by_position(getattr(self._bound, op), tuple(REGISTRY[op].signature.parameters))
        if self._backend == "torch-xla":
            return _run_traced(op, function, arguments, self._platform)
        if self._framework == "jax":
            if op not in self._programs:
                # As the worker compiles: a rounding that a contract states must happen.
                exact = {"xla_allow_excess_precision": False}
                self._programs[op] = self._binding.alone(REGISTRY[op], function, exact)
            function = self._programs[op]
        host = REGISTRY[op].host if self._plan.host_metadata else ()
        return call(function, self._framework, dict(arguments), self._platform, host)


def _by_position(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """`function`, called as models call ops: an implementation may name its arguments otherwise."""

    def call_by_position(**arguments: Any) -> Any:
        return function(*(arguments[name] for name in names))

    return call_by_position
