"""The plans of a model on torch-xla: torch's implementations, static ones first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..gpu.recording import record as record_programs
from ..ops import Plan, Plans, resolve
from ..ops.native.torch_static import XLA
from ..ops.recording import Call
from ..shared.config import ResolvedConfig
from ..shared.errors import ConfigError
from ..shared.models.calls import KINDS, plan_programs
from ..shared.models.config import ModelConfig
from ..shared.step_difference import sampler_size


def chooser(config: ResolvedConfig) -> Callable[..., Plan]:
    """`resolve` as it chooses here."""
    return partial(resolve, "torch", config.op_priority, platform=XLA, enable=config.enable_ops)


def plan_all(config: ResolvedConfig) -> Plan:
    """A plan over all ops. Raises OpError."""
    return chooser(config)()


def make_plans(model: ModelConfig, config: ResolvedConfig) -> Plans:
    """Choose implementations for the calls of all programs. Raises OpError, ConfigError."""
    plans = plan_programs(model, chooser(config), lambda kind: record(model, config, kind))
    for kind in KINDS:
        for plan in plans.every(kind):
            check(plan, kind)
    return plans


def check(plan: Plan, kind: str) -> None:
    """Raise ConfigError for a choice that no XLA program can hold: it reads the host, writes in
    place, or launches a kernel of its own.
    """
    for op, choice in plan.choices.items():
        chosen = choice.implementation
        reasons = {
            "reads lengths on the host": chosen.host_metadata,
            "writes in place": chosen.inplace,
            "launches a kernel that is not XLA's": chosen.opaque,
        }
        why = [reason for reason, is_so in reasons.items() if is_so]
        if why:
            raise ConfigError(
                f"op_priority, enable_ops: in {kind} programs {op} is {choice.provider!r}, which "
                f"{' and '.join(why)}; a program of the torch-xla backend cannot hold that"
            )


def record(model: ModelConfig, config: ResolvedConfig, kind: str) -> list[Call]:
    """The calls of all programs of a kind."""
    sizes = {sampler_size(d.requests, config.max_num_seqs) for d in config.table()}
    return record_programs(model, config, kind, sorted(sizes))
