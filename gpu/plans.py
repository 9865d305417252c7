"""The plans of a model on torch, from shapes alone: tensors on the meta device, no weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from ..bucketing import Descriptor
from ..ops import Op, Plan, Plans, Recorder, resolve
from ..ops.recording import Call
from ..ops.shapes import results
from ..shared.config import ResolvedConfig
from ..shared.models import decoder
from ..shared.models.calls import KINDS, ModelShapes, largest_first, record_layers, record_samplers
from ..shared.models.config import ModelConfig
from .kernels import preferred
from .module import Decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = DTYPES | {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
PROMPT_ROWS = 64
"""Rows of logits made at a time for the log-probabilities of prompts."""


def chooser(config: ResolvedConfig) -> Callable[..., Plan]:
    """`resolve` as it chooses here: `calls=None` gives a plan over all ops."""
    return partial(
        resolve, "torch", config.op_priority, platform=preferred(config.platform), enable=config.enable_ops
    )  # fmt: skip


def make_plans(model: ModelConfig, config: ResolvedConfig) -> Plans:
    """Choose implementations for the calls of all programs. Raises OpError."""
    choose = chooser(config)
    return Plans({kind: choose(calls=record(model, config, kind)) for kind in KINDS})


def record(model: ModelConfig, config: ResolvedConfig, kind: str) -> list[Call]:
    """The calls of all programs of a kind; their arguments are on the meta device."""
    recorder, shapes = Recorder(keep=_tensor), ModelShapes(model, config)
    if kind == "sample":
        tokens = {d.tokens for d in config.table() if d.kind == "mixed"}
        parts = {min(n, PROMPT_ROWS) for n in tokens} | {n % PROMPT_ROWS for n in tokens}
        record_samplers(recorder, shapes, sorted(parts - {0}))
    elif decoder.layer_function(model) is decoder.layer:
        record_layers(recorder, shapes, kind, partial(drops_rows, model))
    else:
        _trace(recorder, shapes, kind)
    return recorder.calls


def drops_rows(model: ModelConfig, d: Descriptor) -> bool:
    """Whether the last layer drops the tokens that nothing is sampled from, behind attention: most of its work in a
    prompt.
    """
    plain = decoder.layer_function(model) is decoder.layer
    *windows, last = model.layer_windows
    # Log-probabilities of prompts run it for all tokens, and at start nothing but another such layer compiles that.
    return plain and last in windows and d.kind == "mixed" and 2 * d.requests <= d.tokens


def _trace(recorder: Recorder, shapes: ModelShapes, kind: str) -> None:
    """Run the programs on the meta device, with whatever a layer from outside does between its ops."""
    native = resolve("torch", enable=("none",))  # kernels do not run on the meta device
    known = results(_empty)
    ops = native.bind(lambda op, function: recorder.wrap(op, _without_data(op, function, known)))
    model, dtype = shapes.layers, DTYPES[shapes.config.dtype]
    module = Decoder(model, decoder.abstract(model), {kind: ops}, dtype, torch.device("meta"))
    module.freeze()
    kv = _tensor(shapes.cache())
    for d in largest_first(shapes.config, kind):
        recorder.program = str(d)
        ids = torch.empty(d.tokens, dtype=torch.int32, device="meta")
        batch = decoder.Batch(*map(_tensor, shapes.batch(d)))
        hidden = module(ids, [kv] * model.num_layers, batch, d.kind, d.max_query_len)
        if d.requests < d.tokens:
            module.finish(d.kind, hidden[: d.requests], hidden[: d.requests])


def _without_data(op: Op, function: Callable[..., Any], known: Any) -> Callable[..., Any]:
    """The function, or its results' shapes where they are known: on the meta device, torch's own shape functions are in
    Python and import Dynamo, which takes seconds."""
    shapes: Callable[..., Any] = known.get(op.name, function)
    return shapes


def _empty(like: torch.Tensor, shape: tuple[int, ...], dtype: str | None = None) -> torch.Tensor:
    return like.new_empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype))


def _tensor(value: Any) -> Any:
    """A tensor without data for an array without data; anything else as it is."""
    return _meta(value.shape, value.dtype) if isinstance(value, np.ndarray) else value


@cache
def _meta(shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype.name), device="meta")
