"""The JAX functions that become programs: backbone, samplers, log-probabilities. Pure functions of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..bucketing import Descriptor
from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from ..shared.step import Sampler, StepShape, batch_layout, processor_layout, sampling_layout

Weights = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """What programs are built from. `ops` are the bound plans by kind (decode, mixed, sample); `scan` loops over
    stacked layers, else they are unrolled.

    Weights come as {"embed", "norm", ["head"], "segments": one dict of stacked weights [n, ...] per run of layers that
    share a window (or per layer, unrolled)}.
    """

    config: ModelConfig
    ops: Mapping[str, Any]
    shape: StepShape
    scan: bool

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """(first layer, last + 1, window) of each dict of stacked weights."""
        if self.scan:
            return decoder.layer_segments(self.config)
        return [(i, i + 1, window) for i, window in enumerate(self.config.layer_windows)]


def bits_to_float(x: jax.Array) -> jax.Array:
    """int32 read as float32."""
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def backbone(
    model: Model,
    descriptor: Descriptor,
    weights: Weights,
    tables: tuple[jax.Array, jax.Array],
    kv: jax.Array,
    last_tokens: jax.Array,
    buffer: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(kv, rows to sample [R dim], all hidden states [T dim]). kv is one buffer [L * P, page, 2 kvhead, hdim]."""
    f = batch_layout(descriptor, model.shape).unpack(buffer, bits_to_float)
    rows = _fit(f["rows"], descriptor.tokens, model.shape.max_rows)
    ids = jnp.where(f["token_ids"] < 0, last_tokens[rows], f["token_ids"])
    pages = kv.shape[0] // model.config.num_layers
    batch = decoder.Batch(
        tables[0][f["positions"]],
        tables[1][f["positions"]],
        f["slots"],
        f["page_table"],
        f["query_start"],
        f["kv_lens"],
        f["counts"],
    )
    ops = model.ops[descriptor.kind]
    hidden = decoder.embed(ops, weights, ids)
    state = (hidden, jnp.zeros_like(hidden), kv)
    for (first, last, window), stacked in zip(model.segments, weights["segments"], strict=True):
        body = partial(_layer, model, descriptor, batch, pages, window)
        if model.scan:
            state, _ = jax.lax.scan(body, state, (stacked, jnp.arange(first, last, dtype=jnp.int32)))
        else:
            state, _ = body(state, (jax.tree.map(lambda x: x[0], stacked), first))
    hidden, residual, kv = state
    hidden = decoder.finish(ops, model.config, weights, hidden, residual)
    return kv, hidden[f["sample_index"]], hidden


def _layer(
    model: Model, descriptor: Descriptor, batch: decoder.Batch, pages: int, window: int, state: Any, layer: Any
) -> tuple[Any, None]:
    weights, index = layer
    hidden, residual, kv = state
    # Layer l owns the pages [l * P, (l + 1) * P) of the one buffer: no slice of it is ever taken or put back.
    slots = jnp.where(batch.slots < 0, -1, batch.slots + index * pages * kv.shape[1])
    here = batch._replace(page_table=batch.page_table + index * pages, slots=slots)
    ops, query_len = model.ops[descriptor.kind], descriptor.max_query_len
    function = decoder.layer_function(model.config)
    return function(ops, model.config, weights, hidden, residual, kv, here, window, query_len), None


def _fit(rows: jax.Array, tokens: int, scratch: int) -> jax.Array:
    """The row of the request at each token's index; only the first tokens of a batch ever look at theirs."""
    missing = max(0, tokens - rows.shape[0])
    return jnp.pad(rows, (0, missing), constant_values=scratch)[:tokens]


def sampler(
    model: Model,
    variant: Sampler,
    requests: int,
    weights: Weights,
    last_tokens: jax.Array,
    rows: jax.Array,
    buffer: jax.Array,
    processors: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(last_tokens, tokens [R]) for finished hidden states `rows` [R dim]."""
    ops = model.ops["sample"]
    f = sampling_layout(requests).unpack(buffer, bits_to_float)
    logits = decoder.head(ops, weights, rows)
    if variant == "greedy":
        tokens = ops.greedy_sample(logits)
    else:
        if processors is None:
            scores = ops.quantize_logits(logits)
        else:
            p = processor_layout(requests, model.shape).unpack(processors, bits_to_float)
            history = jnp.where(p["history"] == -2, last_tokens[p.pop("rows")][:, None], p["history"])
            scores = ops.penalties(logits, **(p | {"history": history}))
        names = ("position", "seed_lo", "seed_hi", "greedy", "scale", "top_k", "top_p", "min_p")
        tokens = ops.sample(logits, scores, *(f[name] for name in names), variant != "random")
    return last_tokens.at[f["sample_rows"]].set(tokens), tokens


def logprobs(model: Model, weights: Weights, rows: jax.Array, chosen: jax.Array) -> tuple[jax.Array, ...]:
    """The op `top_logprobs` for finished hidden states `rows` [n dim] and the tokens `chosen` [n]."""
    ops = model.ops["sample"]
    return ops.top_logprobs(decoder.head(ops, weights, rows), chosen)


def take_rows(size: int, hidden: jax.Array, start: jax.Array) -> jax.Array:
    """`size` rows of hidden [T dim] from `start`, padded with zeros past the end."""
    padded = jnp.pad(hidden, ((0, size), (0, 0)))
    return jax.lax.dynamic_slice_in_dim(padded, start, size)


def named(name: str, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`function` with its first arguments bound, under a name that compiler dumps and profiles show."""
    bound = partial(function, *args)

    def program(*rest: Any) -> Any:
        return bound(*rest)

    program.__name__ = program.__qualname__ = name
    return program
