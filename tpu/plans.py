"""The plans of a model on JAX, from shapes alone: no weight is loaded and nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import Choice, Plan, Plans, Recorder, resolve
from ..ops.implement import is_required
from ..ops.plan import DISABLED
from ..ops.recording import Call
from ..shared.config import ResolvedConfig
from ..shared.errors import ConfigError
from ..shared.models import decoder
from ..shared.models.calls import (
    ModelShapes,
    RecordedCalls,
    largest_first,
    plan_programs,
    record_layers,
    record_samplers,
)
from ..shared.models.config import ModelConfig
from ..shared.models.placement import local_config, physical_config
from ..shared.models.stages import any_replaced
from . import (
    gpu_kernels,  # noqa: F401 - registers the providers for NVIDIA GPUs
    kernels,  # noqa: F401 - registers the Pallas providers
)


def chooser(config: ResolvedConfig) -> Callable[..., Plan]:
    """`resolve` as it chooses here."""
    return partial(
        resolve,
        "jax",
        config.op_priority,
        platform=config.platform,
        enable=config.enable_ops,
        row_invariant=config.row_invariant,
    )


def plan_all(config: ResolvedConfig) -> Plan:
    """A plan over all ops. Raises OpError."""
    return chooser(config)()


def make_plans(model: ModelConfig, config: ResolvedConfig) -> Plans:
    """Choose implementations for the calls of all programs, on one shard. Raises OpError,
    ConfigError.
    """
    # Programs see the layers of all shards together, and a kind of them is a kind of what one shard
    # computes.
    physical = physical_config(model, config.tensor_parallel_size)
    plans = plan_programs(physical, chooser(config), lambda kind: record(model, config, kind))
    for kind in plans.by_kind:
        for plan in plans.every(kind):
            for choice in plan.choices.values():
                if is_required(choice.op, "jax", config.platform):
                    _require(choice, kind)
    return plans


def _require(choice: Choice, kind: str) -> None:
    """Raise ConfigError if nobody asked for a choice, and what runs on this platform refuses the
    programs.

    Natively, attention lays the whole cache out anew in each layer there.
    """
    refused = [f"{provider}: {why}" for provider, why in choice.passed_over if why != DISABLED]
    if refused and choice.chosen_by == "native":
        how = f"op_priority {choice.op}={choice.provider} runs it without a kernel"
        raise ConfigError(f"{choice.op} in {kind} programs: {'; '.join(refused)} ({how})")


def record(model: ModelConfig, config: ResolvedConfig, kind: str) -> list[Call]:
    """The calls of all programs of a kind on one shard; their arguments are shapes and dtypes."""
    recorder = Recorder(keep=_shape)
    if kind == "sample":
        record_samplers(recorder, ModelShapes(model, config), (config.max_num_seqs,))
        return recorder.calls
    shapes = ModelShapes(local_config(model, config.tensor_parallel_size), config)
    if any_replaced(shapes.spec):
        _trace(recorder, shapes, kind)
    else:
        record_layers(recorder, shapes, kind)
    return recorder.calls


def _trace(recorder: Recorder, shapes: ModelShapes, kind: str) -> None:
    """Trace the programs with JAX, with whatever a stage from outside does between its ops."""
    ops = resolve("jax", enable=("none",)).bind(recorder.wrap)
    top, *weights = (
        {n: _shape(x) for n, x in some.items()} for some in (shapes.top, *shapes.layers)
    )
    model = shapes.spec

    for d in largest_first(shapes.config, kind):
        recorder.program = str(d)

        def program(
            top: Any,
            weights: Any,
            ids: Any,
            kv: Any,
            batch: decoder.Batch,
            query_len: int = d.max_query_len,
        ) -> Any:
            parts = ops, model, top, weights, ids, batch.within(query_len), jnp.zeros_like
            return decoder.forward(RecordedCalls(recorder, model.layers, *parts), list(kv))

        batch = decoder.Batch(*map(_shape, shapes.batch(d)))
        jax.eval_shape(
            program,
            top,
            weights,
            jax.ShapeDtypeStruct((d.tokens,), jnp.int32),
            [_shape(kv) for kv in shapes.caches(model)],
            batch,
        )


def _shape(value: Any) -> Any:
    return _struct(value.shape, value.dtype) if isinstance(value, jax.Array | np.ndarray) else value


@cache
def _struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
