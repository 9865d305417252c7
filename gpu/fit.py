"""How plans and the options of compilation fit together: what an op that reads the host allows, and
how ops are bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ops import BoundPlans, Choice, Plan, Plans
from ..ops.bindings.torch import bind
from ..ops.plan import NATIVE
from ..shared.compilation_config import (
    ATTENTION_OPS,
    CUDAGraphMode,
    ResolvedCompilation,
    check_wrapping,
)
from ..shared.config import Change
from ..shared.errors import ConfigError
from . import cpu_kernels
from .forward_context import splittable


def fit_mode(
    compilation: ResolvedCompilation, plans: Plans
) -> tuple[ResolvedCompilation, list[Change]]:
    """The options, with a graph mode that the chosen attention can be captured in: PIECEWISE where
    it reads the host.

    Raises ConfigError if the user chose a mode that cannot be had, or to split elsewhere than such
    a graph is split or must be.
    """
    changes = []
    for kind in ("decode", "mixed"):
        mode, readers = compilation.cudagraph_mode, host_readers(plans.every(kind))
        if mode.step_mode(kind) is CUDAGraphMode.FULL and readers:
            op, provider = readers[0].op, readers[0].provider
            why = f"in {kind} steps {op} is {provider!r}, which reads lengths on the host"
            if compilation.mode_given:
                raise ConfigError(
                    f"cudagraph_mode: got {mode.name}, allowed are PIECEWISE and NONE: {why} and "
                    "cannot be captured"
                )
            fitted = (
                CUDAGraphMode.FULL_AND_PIECEWISE if kind == "mixed" else CUDAGraphMode.PIECEWISE
            )
            compilation = replace(compilation, cudagraph_mode=fitted)
            changes.append(Change("cudagraph_mode", mode.name, fitted.name, why))
    if compilation.road == "regional" and set(compilation.splitting_ops) - {*ATTENTION_OPS}:
        raise ConfigError(
            f"splitting_ops: got {compilation.splitting_ops}, the road 'regional' splits at "
            f"{' and '.join(ATTENTION_OPS)} only"
        )
    for kind in ("decode", "mixed"):
        if compilation.cudagraph_mode.step_mode(kind) is CUDAGraphMode.PIECEWISE:
            _check_splits(compilation, kind, plans.every(kind))
    check_wrapping(compilation)
    return compilation, changes


def without_kernels(plans: Plans) -> list[Change]:
    """What to say where the plans ask for kernels for CPUs and there are none on this machine."""
    passed_over = {
        reason
        for kind in plans.by_kind
        for plan in plans.every(kind)
        for choice in plan.choices.values()
        for reason in choice.passed_over
    }
    if all(provider != cpu_kernels.PROVIDER for provider, _ in passed_over):
        return []
    why = cpu_kernels.supported()
    missing = (cpu_kernels.PROVIDER, str(why)) in passed_over
    return [Change("op_priority", cpu_kernels.PROVIDER, NATIVE, str(why))] if missing else []


def chooses(plans: Plans, provider: str) -> bool:
    """Whether any program runs an op by this provider."""
    return any(
        choice.provider == provider
        for kind in plans.by_kind
        for plan in plans.every(kind)
        for choice in plan.choices.values()
    )


def host_readers(plans: Sequence[Plan]) -> list[Choice]:
    """The choices of plans that read lengths on the host, which a graph would replay as they
    were at its capture.
    """
    return [
        choice
        for plan in plans
        for choice in plan.choices.values()
        if choice.implementation.host_metadata
    ]


def _check_splits(compilation: ResolvedCompilation, kind: str, plans: Sequence[Plan]) -> None:
    """Raise ConfigError if a graph between splits would hold an op that reads lengths on the
    host.
    """
    for choice in host_readers(plans):
        if choice.op not in compilation.splitting_ops:
            raise ConfigError(
                f"splitting_ops: got {list(compilation.splitting_ops)}, with cudagraph_mode "
                f"{compilation.cudagraph_mode.name} it must name {choice.op}: in {kind} steps "
                "that is "
                f"{choice.provider!r}, which reads lengths on the host, and a graph would keep "
                "those of its capture; "
                "leave splitting_ops out, or set cudagraph_mode to NONE"
            )


def bind_plans(
    plans: Plans, compilation: ResolvedCompilation, compiled: frozenset[str]
) -> BoundPlans:
    """The ops of all programs, opaque to a compiler where they must be."""

    def bind_one(kind: str, plan: Plan) -> Any:
        if compilation.wraps and kind in compiled:
            return bind(plan, wrap=True)
        split = kind != "sample" and compilation.cudagraph_mode.has_mode(CUDAGraphMode.PIECEWISE)
        chosen = splittable(plan, compilation.splitting_ops) if split else plan
        return bind(chosen, compiling=kind in compiled or compilation.road == "piecewise")

    return BoundPlans(plans, bind_one)
