"""The plans of a model on JAX, from shapes alone: no weight is loaded and nothing is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Plan, Plans, Recorder, resolve
from ..shared.config import ResolvedConfig
from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from ..shared.step import StepShape, batch_layout, processor_layout, sampling_layout
from . import (
    kernels,  # noqa: F401 - registers the Pallas providers
    programs,
)
from .sharding import local_config


def make_plans(model: ModelConfig, config: ResolvedConfig) -> Plans:
    """Choose implementations for the calls that the largest program of each kind makes. Raises OpError."""
    choose = partial(resolve, "jax", config.op_priority, enable=config.enable_ops)
    base = choose()
    kinds = {kind: choose(calls=record(base, model, config, kind).by_op()) for kind in ("decode", "mixed", "sample")}
    return Plans(kinds)


def record(plan: Plan, model: ModelConfig, config: ResolvedConfig, kind: str) -> Recorder:
    """Trace the largest program of a kind and record the shapes and dtypes of each op's arguments on one shard."""
    recorder = Recorder(keep=_shape)
    if kind != "sample":
        model = local_config(model, config.tensor_parallel_size)
    shape = StepShape(config.pages_per_request, config.max_num_seqs, config.max_model_len, model.vocab_size)
    ops = plan.bind(recorder.wrap)
    tools = programs.Model(model, {"decode": ops, "mixed": ops, "sample": ops}, shape, scan=False)
    dtype = jnp.dtype(config.dtype)

    def array(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    table = decoder.abstract(model)
    top = {p.name: array(*p.shape, dtype=dtype) for p in table.values() if not p.layered}
    last = array(config.max_num_seqs + 1)
    if kind == "sample":
        rows, requests = array(config.max_num_seqs, model.hidden_size, dtype=dtype), config.max_num_seqs
        buffers = array(sampling_layout(requests).size), array(processor_layout(requests, shape).size)
        jax.eval_shape(partial(programs.sampler, tools, "processed", requests), top, last, rows, *buffers)
        jax.eval_shape(partial(programs.sampler, tools, "greedy", requests), top, last, rows, buffers[0])
        jax.eval_shape(partial(programs.logprobs, tools), top, rows, array(requests))
        return recorder
    layer = {p.name: array(1, *p.shape, dtype=dtype) for p in table.values() if p.layered}
    weights = {**top, "segments": [layer] * model.num_layers}
    angles = array(config.max_model_len, decoder.rotary_tables(model, 1)[0].shape[1], dtype=jnp.float32)
    kv = array(2 * model.num_layers, config.page_size, 2 * model.num_kv_heads, model.head_dim, dtype=dtype)
    descriptor = max((d for d in config.table() if d.kind == kind), key=lambda d: d.tokens)
    buffer = array(batch_layout(descriptor, shape).size)
    jax.eval_shape(partial(programs.backbone, tools, descriptor), weights, (angles, angles), kv, last, buffer)
    return recorder


def _shape(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if isinstance(value, jax.Array) else value
