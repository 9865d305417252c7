"""The plans of a model on torch, from shapes alone: tensors on the meta device, no weight is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from ..bucketing import Descriptor
from ..ops import REGISTRY, Plan, Plans, Recorder, resolve
from ..ops.bindings.torch import empty_tensor
from ..ops.recording import Call
from ..ops.shapes import without_data
from ..shared.config import ResolvedConfig
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
from ..shared.models.spec import Model
from ..shared.models.stages import any_replaced, is_replaced
from . import kernels  # noqa: F401 - registers the Triton providers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = DTYPES | {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
PROMPT_ROWS = 64
"""Rows of logits made at a time for the log-probabilities of prompts."""


def chooser(config: ResolvedConfig) -> Callable[..., Plan]:
    """`resolve` as it chooses here: `calls=None` gives a plan over all ops."""
    return partial(
        resolve,
        "torch",
        config.op_priority,
        platform=config.platform,
        enable=config.enable_ops,
        row_invariant=config.row_invariant,
    )


def make_plans(model: ModelConfig, config: ResolvedConfig) -> Plans:
    """Choose implementations for the calls of all programs. Raises OpError."""
    return plan_programs(model, chooser(config), lambda kind: record(model, config, kind))


def record(model: ModelConfig, config: ResolvedConfig, kind: str) -> list[Call]:
    """The calls of all programs of a kind; their arguments are on the meta device."""
    recorder, shapes = Recorder(keep=_tensor), ModelShapes(model, config)
    if kind == "sample":
        tokens = {d.tokens for d in config.table() if d.kind == "mixed"}
        parts = {min(n, PROMPT_ROWS) for n in tokens} | {n % PROMPT_ROWS for n in tokens}
        record_samplers(recorder, shapes, sorted(parts - {0}))
    elif any_replaced(shapes.spec):
        _trace(recorder, shapes, kind)
    else:
        record_layers(recorder, shapes, kind, partial(drops_rows, decoder.model_of(model)))
    return recorder.calls


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


def _trace(recorder: Recorder, shapes: ModelShapes, kind: str) -> None:
    """Run the programs on the meta device, with whatever a stage from outside does between its
    ops.
    """
    native = resolve("torch", enable=("none",))  # kernels do not run on the meta device
    # torch's own shape functions are in Python and import Dynamo, which takes seconds.
    shaped = {
        op.name: without_data(op, empty_tensor)
        for op in REGISTRY
        if op.level == "fine" and op.shapes is not None
    }
    ops = native.bind(lambda op, function: recorder.wrap(op, shaped.get(op.name, function)))
    top, *weights = (
        {n: _tensor(x) for n, x in some.items()} for some in (shapes.top, *shapes.layers)
    )
    model = shapes.spec
    for d in largest_first(shapes.config, kind):
        recorder.program = str(d)
        ids = torch.empty(d.tokens, dtype=torch.int32, device="meta")
        batch = decoder.Batch(*map(_tensor, shapes.batch(d)))
        parts = ops, model, top, weights, ids, batch, torch.zeros_like
        calls = RecordedCalls(recorder, model.layers, *parts)
        finished, _ = decoder.forward(calls, [_tensor(kv) for kv in shapes.caches(model)])
        if d.requests < d.tokens:
            rows = finished[: d.requests]
            calls.finish(decoder.Stream(rows, rows))


def _tensor(value: Any) -> Any:
    """A tensor without data for an array without data; anything else as it is."""
    return _meta(value.shape, value.dtype) if isinstance(value, np.ndarray) else value


@cache
def _meta(shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype.name), device="meta")
