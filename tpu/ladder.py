"""All programs of an engine, described before anything is compiled: from shapes and shardings
alone.

The worker and the ahead-of-time compiler build the same list, so that what one compiled the other
can load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..bucketing import Descriptor, Table
from ..ops import BoundPlans, Plans
from ..ops.bindings.jax import bind
from ..ops.plan import COMPOSITION, NATIVE
from ..shared.config import ResolvedConfig
from ..shared.models import decoder
from ..shared.models.blocks import Block
from ..shared.models.caches import layout_of, step_shape
from ..shared.models.config import ModelConfig
from ..shared.models.placement import physical_config, place
from ..shared.models.stages import any_replaced
from ..shared.models.table import Parameter
from ..shared.step import PROCESSING, SAMPLERS, histories_shape, processor_layout
from ..shared.step_difference import (
    PICKED,
    diff_layout,
    sampler_size,
    span_layout,
    update_layout,
)
from . import kv_buffer, programs
from .binding import bind_on
from .sharding import REPLICATED, as_read, lying_in_rows, on, partition
from .state import State, state_shapes, update


@dataclass(frozen=True, slots=True)
class Job:
    """A program to build: a pure function, the arguments that it may overwrite, and the shapes of
    all (with shardings).

    `results` are the shardings of what it returns: pinned, since the next program's arguments are
    pinned too.
    """

    name: str
    function: Callable[..., Any]
    donate: tuple[int, ...]
    arguments: tuple[Any, ...]
    results: Any


class Shapes(NamedTuple):
    """What lives on the devices: `jax.ShapeDtypeStruct`s with shardings, or the arrays
    themselves.
    """

    weights: Any
    head: Any
    angles: Any
    kv: Any
    state: Any
    last_tokens: Any
    histories: Any


def program_model(
    model: ModelConfig, config: ResolvedConfig, plans: Plans, mesh: Mesh
) -> programs.Model:
    """What the programs of a model are made of."""
    physical = physical_config(model, config.tensor_parallel_size)
    ops = BoundPlans(plans, lambda kind, plan: bind_on(plan, mesh))
    cache_dtype = jnp.dtype(config.kv_cache_dtype)
    return programs.Model(
        physical,
        ops,
        step_shape(model, config),
        config.scan_layers,
        cache_dtype,
        layout_of(model, config),
        mesh,
        bind(plans["sample"]),
        config.tensor_parallel_size,
        config.decode_steps,
        config.demand,
        config.scan_layers and _reads_in_place(model, plans, mesh),
    )


def _reads_in_place(model: ModelConfig, plans: Plans, mesh: Mesh) -> bool:
    """Whether a loop over layers had better find each layer's matrices apart: on a CPU, where a
    slice is a copy.

    Only our own stages pass matrices on to nothing but ops that know what to do with them; those
    of experts do not, nor do those of narrow weights.
    """
    if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return False
    every = [plan for kind in plans.by_kind for plan in plans.every(kind)]
    if model.quantization or any(
        "grouped_matmul" in plan or "moe_experts" in plan for plan in every
    ):
        return False
    products = [plan[op] for plan in every for op in ("linear", "gated_mlp") if op in plan]
    native = all(choice.provider in (NATIVE, COMPOSITION) for choice in products)
    return native and not any_replaced(decoder.model_of(model))


def describe(
    model: ModelConfig, config: ResolvedConfig, blocks: Sequence[Block], num_pages: int, mesh: Mesh
) -> Shapes:
    """The shapes and shardings of everything that lives on `mesh`; `num_pages` without the
    scratch page.
    """
    shards = config.tensor_parallel_size

    def array(dims: tuple[int, ...], kind: Any, spec: Any = REPLICATED) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, kind, sharding=on(mesh, spec))

    weights: dict[str, Any] = {
        "blocks": [tuple({} for _ in range(block.period)) for block in blocks]
    }

    def shape(parameter: Parameter, *stacked: int) -> jax.ShapeDtypeStruct:
        placement = place(parameter, model, shards)
        kind = jnp.dtype(parameter.dtype_in(config.dtype))
        lies = on(mesh, partition(placement, parameter.layered))
        return jax.ShapeDtypeStruct(
            (*stacked, *placement.shape), kind, sharding=as_read(parameter, placement, lies)
        )

    table = decoder.parameters_of(model)
    weights |= {name: shape(parameter) for name, parameter in table.top.items()}
    for block, stacked in zip(blocks, weights["blocks"], strict=True):
        for position, of_layers in enumerate(stacked):
            parameters = table.layer(block.first + position)
            of_layers |= {
                name: shape(parameter, block.repeats) for name, parameter in parameters.items()
            }
    head = "embed" if model.tie_embeddings else "head"
    dims = config.max_model_len, 2 * decoder.rotary_tables(model, 1)[0].shape[1]
    return Shapes(
        weights,
        {head: weights[head]},
        jax.ShapeDtypeStruct(dims, jnp.float32, sharding=lying_in_rows(on(mesh), *dims)),
        kv_buffer.buffer(model, config, num_pages, jnp.dtype(config.kv_cache_dtype), mesh),
        State(*(array(x.shape, x.dtype) for x in state_shapes(step_shape(model, config)))),
        array((config.max_num_seqs + 1,), jnp.int32),
        array(histories_shape(step_shape(model, config), config.demand.samplers), jnp.int32),
    )


def bytes_per_device(shapes: Any) -> int:
    """Bytes that arrays of these shapes take on one device."""
    total = 0
    for leaf in jax.tree.leaves(shapes):
        shard = leaf.sharding.shard_shape(leaf.shape)
        size = leaf.dtype.itemsize
        for side in shard:
            size *= side
        total += size
    return total


def kind_of(key: Any) -> Any:
    """The kind of the program that is looked up with `key`: those of one kind differ in size
    alone.
    """
    if isinstance(key, Descriptor):
        return key.kind
    return key[:-1] if isinstance(key, tuple) else key


def is_step(key: Any) -> bool:
    """Whether a program has the KV cache among its arguments."""
    return isinstance(key, Descriptor) or kind_of(key)[0] == "loop"


def largest(work: Mapping[Any, Job]) -> dict[Any, Job]:
    """The programs of a table that need most memory: the largest of each kind.

    Of samplers, alone or in loops, only the one that can do all that the others do.
    """
    last = {kind_of(key): key for key in work}  # sizes of a kind rise
    loops = [("loop", variant) for variant in programs.LOOP_SAMPLERS if ("loop", variant) in last]
    samplers = [(variant,) for variant in SAMPLERS if (variant,) in last]
    lesser = {*loops[:-1], *samplers[:-1]}
    small = {"update", "remember"}
    return {key: work[key] for kind, key in last.items() if kind not in lesser | small}


def jobs(
    model: programs.Model, table: Table, shapes: Shapes, dtype: Any, mesh: Mesh
) -> dict[Any, Job]:
    """Every program of the table that the model's demand needs, by what the worker looks it up
    with.
    """
    found: dict[Any, Job] = {}
    for d in table:
        found |= _backbone_jobs(model, table, d, shapes, dtype, mesh)
        if d.kind == "decode" and model.decode_steps > 1:
            found |= _loop_jobs(model, d, shapes, mesh)
    replicated = on(mesh)
    arguments = (shapes.state, _array(mesh, update_layout().size))
    found["update"] = Job("update", update, (0,), arguments, State(replicated, replicated))
    if "processed" in model.demand.samplers:
        remember = partial(programs.remember, model.shape)
        arguments = (shapes.histories, _array(mesh, span_layout(model.shape).size))
        found["remember"] = Job("remember", remember, (0,), arguments, replicated)
    for requests in sorted({sampler_size(d.requests, table.max_requests) for d in table}):
        found |= _sampler_jobs(model, requests, shapes, dtype, mesh)
    return found


def _array(mesh: Mesh, *dims: int, kind: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """An argument that is the same on all of `mesh`."""
    return jax.ShapeDtypeStruct(dims, kind, sharding=on(mesh))


def _backbone_jobs(
    model: programs.Model, table: Table, d: Descriptor, shapes: Shapes, dtype: Any, mesh: Mesh
) -> dict[Any, Job]:
    """The backbone, and beside it what takes the rows of prompts whose log-probabilities are
    asked for.
    """
    replicated, demand = on(mesh), model.demand
    weights, _, angles, kv, state, last, _ = shapes
    # last_tokens is read here and written by the sampler: only the cache and the state are donated.
    arguments = (weights, angles, kv, state, last, _array(mesh, diff_layout(d, model.shape).size))
    results = (
        kv.format,
        State(replicated, replicated),
        replicated,
        replicated,
        {name: replicated for name in PICKED},
        replicated if demand.streams else None,
    )
    function = partial(programs.backbone, model, d)
    is_single = table.has_single_tokens(d)
    name = f"backbone_{'single' if is_single else d.kind}_{d.tokens}"
    found: dict[Any, Job] = {d: Job(name, function, (2, 3), arguments, results)}
    if d.kind == "mixed" and not is_single and demand.prompt_logprobs:
        take = partial(programs.take_rows, table.max_requests)
        rows = (_array(mesh, d.tokens, model.config.hidden_size, kind=dtype), _array(mesh))
        found["take", d.tokens] = Job(f"take_rows_{d.tokens}", take, (), rows, replicated)
    return found


def _loop_jobs(model: programs.Model, d: Descriptor, shapes: Shapes, mesh: Mesh) -> dict[Any, Job]:
    """Several decode steps in one, with each sampler that may be in a loop."""
    replicated = on(mesh)
    halted, difference = (
        _array(mesh, kind=jnp.bool_),
        _array(mesh, diff_layout(d, model.shape, True).size),
    )
    weights, _, angles, kv, state, last, _ = shapes
    arguments = (weights, angles, kv, state, last, halted, difference)
    streams = replicated if model.demand.streams else None
    results = (kv.format, State(replicated, replicated), *(replicated,) * 3, streams)
    return {
        ("loop", variant, d.requests): Job(
            f"loop_{variant}_{d.tokens}",
            partial(programs.loop, model, variant, d),
            (2, 3, 4, 5),
            arguments,
            results,
        )
        for variant in programs.loop_samplers(model.demand)
    }


def _sampler_jobs(
    model: programs.Model, requests: int, shapes: Shapes, dtype: Any, mesh: Mesh
) -> dict[Any, Job]:
    """What samples for `requests` requests, and what computes their log-probabilities."""
    replicated, demand = on(mesh), model.demand
    rows = _array(mesh, requests, model.config.hidden_size, kind=dtype)
    picked = {name: _array(mesh, requests) for name in PICKED}
    found: dict[Any, Job] = {}
    for variant in demand.samplers:
        arguments: tuple[Any, ...] = (
            shapes.head,
            shapes.last_tokens,
            shapes.state.parameters,
            rows,
            picked,
        )
        donated: tuple[int, ...] = (1,)
        results: tuple[Any, ...] = replicated, replicated
        if variant in PROCESSING:
            layout = processor_layout(requests, model.shape, variant)
            arguments += (_array(mesh, layout.size),)
        if variant == "processed":
            donated, results = (1, len(arguments)), (*results, replicated)
            arguments += (shapes.histories, _array(mesh, 2, requests))
        sampler = partial(programs.sampler, model, variant, requests)
        found[variant, requests] = Job(
            f"sample_{variant}_{requests}", sampler, donated, arguments, results
        )
    if demand.logprobs or demand.prompt_logprobs:
        arguments = (shapes.head, rows, _array(mesh, requests))
        function = partial(programs.logprobs, model)
        found["logprobs", requests] = Job(
            f"logprobs_{requests}", function, (), arguments, replicated
        )
    return found
