"""Puts weights on the devices as programs want them: stacked by block of layers, each shard read for its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..ops.namespaces import namespace
from ..shared.checkpoint import Checkpoint
from ..shared.models.blocks import Block
from ..shared.models.config import ModelConfig
from ..shared.models.table import Parameter, ParameterTable
from ..shared.weights import check_checkpoint, dummy_parameter
from ..shared.worker import Progress
from .sharding import Placement, on, place


def load_weights(
    folder: str,
    load_format: str,
    model: ModelConfig,
    table: ParameterTable,
    blocks: Sequence[Block],
    dtype: Any,
    seed: int,
    mesh: Mesh,
    progress: Progress,
) -> dict[str, Any]:
    """The weights of a model as a tree (see `programs.Model`), in `dtype` on `mesh`. Raises CheckpointError."""
    checkpoint = None
    if load_format != "dummy":
        checkpoint = Checkpoint(folder)
        check_checkpoint(checkpoint, table, model.num_layers)
    shards = mesh.shape["tp"]

    def maker(parameter: Parameter) -> Callable[[range], jax.Array]:
        placement = place(parameter, model, shards)
        if checkpoint is None:
            return _dummy(parameter, placement, seed, dtype, mesh)
        return partial(_read, checkpoint, parameter, placement, dtype, mesh)

    weights: dict[str, Any] = {"blocks": [tuple({} for _ in range(block.period)) for block in blocks]}
    for done, parameter in enumerate(table.values()):
        make = maker(parameter)
        if parameter.layered:
            for block, stacked in zip(blocks, weights["blocks"], strict=True):
                for position, of_layers in enumerate(stacked):
                    of_layers[parameter.name] = make(block.layers_at(position))
        else:
            weights[parameter.name] = make(range(1))
        progress("weights", done + 1, len(table))
    return weights


def _read(
    checkpoint: Checkpoint, parameter: Parameter, placement: Placement, dtype: Any, mesh: Mesh, layers: range
) -> jax.Array:
    """One parameter of some layers. The host never holds more of it than one device does."""
    stacked = (len(layers),) if parameter.layered else ()
    shape, sharding = (*stacked, *placement.shape), on(mesh, placement.spec(parameter.layered))
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part = np.empty((len(layers), *sharding.shard_shape(shape)[len(stacked) :]), dtype)
        for layer, out in zip(layers, part, strict=True):
            _read_layer(checkpoint, parameter, placement, layer, index[len(stacked) :], out)
        arrays.append(jax.device_put(part if parameter.layered else part[0], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_layer(
    checkpoint: Checkpoint,
    parameter: Parameter,
    placement: Placement,
    layer: int,
    index: tuple[slice, ...],
    out: np.ndarray,
) -> None:
    """Fill `out` with one shard of one layer's parameter: `index` says which entries of the placed shape it has."""
    offset = 0
    for part, key in zip(parameter.parts, parameter.keys(layer), strict=True):
        shape = parameter.part_shape(part)
        if placement.axis is None or placement.source is None:
            out[offset : offset + part.rows] = checkpoint.read(key)
        elif placement.axis == 0:
            # Parts are stacked along this dimension: those of the shard's entries that lie in this part.
            _gather(checkpoint, key, 0, placement.source[index[0]] - offset, shape[0], out)
        else:
            _gather(checkpoint, key, 1, placement.source[index[1]], shape[1], out)
        offset += part.rows
    if placement.axis is not None and placement.source is not None:
        zeros = placement.source[index[placement.axis]] < 0
        out[(slice(None),) * placement.axis + (zeros,)] = 0


def _gather(checkpoint: Checkpoint, key: str, axis: int, wanted: np.ndarray, size: int, out: np.ndarray) -> None:
    """Copy the entries `wanted` of a tensor's axis that are within [0, size) to their places in `out`."""
    inside = (wanted >= 0) & (wanted < size)
    breaks = np.flatnonzero((np.diff(wanted) != 1) | np.diff(inside)) + 1
    edges = [0, *breaks.tolist(), len(wanted)]
    for start, stop in pairwise(edges):
        if start < stop and inside[start]:
            first = int(wanted[start])
            here = (slice(None),) * axis + (slice(start, stop),)
            out[here] = checkpoint.read_slice(key, axis, first, first + stop - start)


def _dummy(
    parameter: Parameter, placement: Placement, seed: int, dtype: Any, mesh: Mesh
) -> Callable[[range], jax.Array]:
    """Makes random weights of a range of layers where they lie: the same numbers on any number of shards.

    One program for all ranges of a length: with unrolled layers, for all layers.
    """
    dims, axis, source = placement.shape, placement.axis, placement.source

    def one(layer: jax.Array) -> jax.Array:
        at = [jax.lax.broadcasted_iota(jnp.int32, dims, dim) for dim in range(len(dims))]
        real: Any = True
        if axis is not None and not np.array_equal(source, np.arange(dims[axis])):
            along = np.asarray(source, np.int32).reshape([-1 if dim == axis else 1 for dim in range(len(dims))])
            at[axis] = jnp.broadcast_to(along, dims)
            real = at[axis] >= 0
        index = at[0] if len(dims) == 1 else at[0] * parameter.shape[1] + at[1]
        values = dummy_parameter(namespace("jax"), parameter, layer, seed, index)
        return jnp.where(real, values, jnp.float32(0)).astype(dtype)

    def stack(first: jax.Array, step: jax.Array, count: int) -> jax.Array:
        if not parameter.layered:
            return one(first)
        return jax.lax.map(one, first + step * jnp.arange(count, dtype=jnp.int32))

    program = jax.jit(stack, static_argnames="count", out_shardings=on(mesh, placement.spec(parameter.layered)))
    return lambda layers: program(np.int32(layers.start), np.int32(layers.step), count=len(layers))
