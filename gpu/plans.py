"""The plans of a model on torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from ..bucketing import Descriptor
from ..ops import Plan, Plans, resolve
from ..ops.native.torch_parallel import planning_for_ranks
from ..ops.recording import Call
from ..shared.config import ResolvedConfig
from ..shared.models import decoder
from ..shared.models.calls import plan_programs
from ..shared.models.config import ModelConfig
from ..shared.models.placement import shard_config
from ..shared.models.spec import Model, Shard
from ..shared.models.stages import is_replaced
from . import cpu_kernels, kernels  # noqa: F401 - registers the providers "c" and "triton"
from .recording import record as record_programs

PROMPT_ROWS = 64
"""Rows of logits made at a time for the log-probabilities of prompts."""


def chooser(config: ResolvedConfig) -> Callable[..., Plan]:
    """`resolve` as it chooses here."""
    return partial(
        resolve,
        "torch",
        config.op_priority,
        platform=config.platform,
        enable=config.enable_ops,
        row_invariant=config.row_invariant,
    )


def plan_all(config: ResolvedConfig) -> Plan:
    """A plan over all ops, of one of several ranks if there are such. Raises OpError."""
    with planning_for_ranks() if config.tensor_parallel_size > 1 else nullcontext():
        return chooser(config)()


def make_plans(model: ModelConfig, config: ResolvedConfig) -> Plans:
    """Choose implementations for the calls of all programs, on one shard: of a model whose `shard`
    is not named, on any, as all make the same calls. Raises OpError.
    """
    if model.shard is None and config.tensor_parallel_size > 1:
        with planning_for_ranks():
            return make_plans(shard_config(model, Shard(0, config.tensor_parallel_size)), config)
    return plan_programs(model, chooser(config), lambda kind: record(model, config, kind))


def record(model: ModelConfig, config: ResolvedConfig, kind: str) -> list[Call]:
    """The calls of all programs of a kind."""
    tokens = {d.tokens for d in config.table() if d.kind == "mixed"}
    parts = {min(n, PROMPT_ROWS) for n in tokens} | {n % PROMPT_ROWS for n in tokens}
    drops = partial(drops_rows, decoder.model_of(model))
    return record_programs(model, config, kind, sorted(parts - {0}), drops, joins=True)


def drops_rows(model: Model, d: Descriptor) -> bool:
    """Whether the last layer drops the tokens that nothing is sampled from, behind attention: most
    of its work in a prompt.
    """
    *others, last = model.layers
    # Log-probabilities of prompts run it for all tokens, and at start nothing but another such
    # layer compiles that.
    return (
        last in others
        and not is_replaced(last)
        and d.kind == "mixed"
        and 2 * d.requests <= d.tokens
    )
