"""The plans of a model on JAX, from shapes alone: no weight is loaded and nothing is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..ops import Choice, Plan, Plans, Recorder, resolve
from ..ops.plan import DISABLED
from ..shared.config import ResolvedConfig
from ..shared.errors import ConfigError
from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from ..shared.step import StepShape, processor_layout
from . import (
    gpu_kernels,  # noqa: F401 - registers the providers for NVIDIA GPUs
    kernels,  # noqa: F401 - registers the Pallas providers
    kv_buffer,
    programs,
)
from .sharding import local_config
from .state import State, diff_layout, state_shapes

PREFERRED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cuda": {"paged_attention": ("pallas_triton",), "norm_rope_write_kv": ("pallas_triton",)},
    "tpu": {"paged_attention": ("pallas",), "write_kv": ("pallas",)},
}
"""By platform, the providers that are tried after the user's."""

REQUIRED: Mapping[str, tuple[str, ...]] = {"tpu": ("paged_attention", "write_kv")}
"""By platform, ops that run as preferred or as the user says. What refuses them is an error there: natively, attention
lays the whole cache out anew in each layer."""


def make_plans(model: ModelConfig, config: ResolvedConfig) -> Plans:
    """Choose implementations for the calls that the largest program of each kind makes. Raises OpError, ConfigError."""
    asked, preferred = config.op_priority, PREFERRED.get(config.platform, {})
    order = {**asked, **{op: (*asked.get(op, ()), *providers) for op, providers in preferred.items()}}
    choose = partial(resolve, "jax", order, enable=config.enable_ops)
    base = resolve("jax", asked, enable=config.enable_ops)
    kinds = {kind: choose(calls=record(base, model, config, kind).by_op()) for kind in ("decode", "mixed", "sample")}
    for op in REQUIRED.get(config.platform, ()):
        for kind, plan in kinds.items():
            _require(plan[op], kind, asked.get(op, ()))
    return Plans(kinds)


def _require(choice: Choice, kind: str, asked: Sequence[str]) -> None:
    """Raise ConfigError if a choice is neither what the platform prefers nor what the user says."""
    refused = [f"{provider}: {why}" for provider, why in choice.passed_over if why != DISABLED]
    if refused and choice.provider not in asked:
        how = f"op_priority {choice.op}={choice.provider} runs it without a kernel"
        raise ConfigError(f"{choice.op} in {kind} programs: {'; '.join(refused)} ({how})")


def record(plan: Plan, model: ModelConfig, config: ResolvedConfig, kind: str) -> Recorder:
    """Trace the largest program of a kind and record the shapes and dtypes of each op's arguments on one shard."""
    recorder = Recorder(keep=_shape)
    if kind != "sample":
        model = local_config(model, config.tensor_parallel_size)
        # Layers with the same window make the same calls: one of each is traced.
        windows = tuple(dict.fromkeys(model.layer_windows))
        model = replace(model, num_layers=len(windows), layer_windows=windows)
    shape = StepShape(config.pages_per_request, config.max_num_seqs, config.max_model_len, model.vocab_size)
    ops = plan.bind(recorder.wrap)
    tools = programs.Model(
        model, {"decode": ops, "mixed": ops, "sample": ops}, shape, False, jnp.dtype(config.kv_cache_dtype)
    )
    dtype = jnp.dtype(config.dtype)

    def array(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    table = decoder.abstract(model)
    top = {p.name: array(*p.shape, dtype=dtype) for p in table.values() if not p.layered}
    last = array(config.max_num_seqs + 1)
    if kind == "sample":
        rows, requests = array(config.max_num_seqs, model.hidden_size, dtype=dtype), config.max_num_seqs
        picked = {name: array(requests) for name in programs.PICKED}
        known = last, state_shapes(shape).parameters, rows, picked
        processors = array(processor_layout(requests, shape).size)
        jax.eval_shape(partial(programs.sampler, tools, "processed", requests), top, *known, processors)
        jax.eval_shape(partial(programs.sampler, tools, "greedy", requests), top, *known)
        jax.eval_shape(partial(programs.logprobs, tools), top, rows, array(requests))
        return recorder
    layer = {p.name: array(1, *p.shape, dtype=dtype) for p in table.values() if p.layered}
    weights = {**top, "segments": [layer] * model.num_layers}
    angles = array(config.max_model_len, decoder.rotary_tables(model, 1)[0].shape[1], dtype=jnp.float32)
    cache = jnp.dtype(config.kv_cache_dtype)
    kv = array(2 * model.num_layers, config.page_size, *kv_buffer.local_dims(model, 1, cache), dtype=cache)
    descriptor = max((d for d in config.table() if d.kind == kind), key=lambda d: d.tokens)
    state, buffer = State(*state_shapes(shape)), array(diff_layout(descriptor, shape).size)
    jax.eval_shape(partial(programs.backbone, tools, descriptor), weights, (angles, angles), kv, state, last, buffer)
    return recorder


def _shape(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if isinstance(value, jax.Array) else value
