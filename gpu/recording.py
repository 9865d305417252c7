"""The calls of a model's programs on torch, from shapes alone: tensors on the meta device, no
weight is loaded. Both workers that run torch plan from them: `gpu/`, `xla/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from ..bucketing import Descriptor
from ..ops import REGISTRY, Recorder, resolve
from ..ops.bindings.torch import empty_tensor
from ..ops.recording import Call
from ..ops.shapes import without_data
from ..shared.config import ResolvedConfig
from ..shared.models import decoder
from ..shared.models.calls import (
    ModelShapes,
    RecordedCalls,
    largest_first,
    record_joints,
    record_layers,
    record_samplers,
)
from ..shared.models.config import ModelConfig
from ..shared.models.stages import any_replaced

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = DTYPES | {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def record(
    model: ModelConfig,
    config: ResolvedConfig,
    kind: str,
    prompt_rows: Sequence[int],
    drops_rows: Callable[[Descriptor], bool] | None = None,
    joins: bool = False,
) -> list[Call]:
    """The calls of all programs of a kind; their arguments are on the meta device.

    `prompt_rows` are the numbers of rows whose log-probabilities are made at a time; `drops_rows`
    says whose last layer finishes the sampled tokens only, `joins` whether layers are joined.
    """
    recorder, shapes = Recorder(keep=_tensor), ModelShapes(model, config)
    if kind == "sample":
        record_samplers(recorder, shapes, prompt_rows)
    elif any_replaced(shapes.spec):
        _trace(recorder, shapes, kind, joins)
    else:
        record_layers(recorder, shapes, kind, drops_rows, joins)
    return recorder.calls


def _trace(recorder: Recorder, shapes: ModelShapes, kind: str, joins: bool) -> None:
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
        if joins:
            record_joints(ops, model, top, weights, finished)
        if d.requests < d.tokens:
            rows = finished[: d.requests]
            calls.finish(decoder.Stream(rows, rows))


def _tensor(value: Any) -> Any:
    """A tensor without data for an array without data; anything else as it is."""
    return _meta(value.shape, value.dtype) if isinstance(value, np.ndarray) else value


@cache
def _meta(shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype.name), device="meta")
