"""One op on a side: whose implementations a backend runs, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from ...ops.implement import Framework
from ...ops.plan import resolve
from ...ops.testing import run
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
    # By name, as nothing else here imports torch_xla.
    module = import_module(f"{__package__.partition('.')[0]}.xla.one_op")
    found: tuple[np.ndarray, ...] = module.run_op(
        op, wrap(function) if wrap is not None else function, arguments, device
    )
    return found
