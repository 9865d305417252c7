"""Puts weights on the devices as programs want them: stacked by block of layers, each shard read
for its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from ..ops.namespaces import namespace
from ..shared.checkpoint import Checkpoint
from ..shared.models.blocks import Block
from ..shared.models.config import ModelConfig
from ..shared.models.placement import Placement, place
from ..shared.models.quantization import pieces_of
from ..shared.models.spec import Narrow
from ..shared.models.table import Parameter, ParameterTable, piece_name
from ..shared.narrow_checkpoint import open_checkpoint
from ..shared.progress import Progress
from ..shared.shard_reading import read_shard
from ..shared.weights import check_checkpoint, dummy_parameter, is_made, pieces
from .sharding import as_read, on, partition


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
    """The weights of a model as a tree (see `programs.Model`), in `dtype` on `mesh`. Raises
    CheckpointError, and ConfigError for entries that `dtype` does not hold.
    """
    checkpoint = None
    if load_format != "dummy":
        checkpoint = open_checkpoint(folder, model, np.dtype(dtype))
        check_checkpoint(checkpoint, table)
    shards = mesh.shape["tp"]

    def maker(parameter: Parameter) -> Callable[[range], jax.Array]:
        placement, kind = place(parameter, model, shards), jnp.dtype(parameter.dtype_in(dtype.name))
        if checkpoint is None:
            return _dummy(parameter, placement, seed, kind, mesh)
        return partial(_read, checkpoint, parameter, placement, kind, mesh)

    def arrays_of(parameter: Parameter) -> Callable[[range], dict[str, jax.Array]]:
        if is_made(checkpoint, parameter):
            return partial(_made, parameter, maker, model, mesh)
        make = maker(parameter)
        return lambda layers: {parameter.name: make(layers)}

    weights: dict[str, Any] = {
        "blocks": [tuple({} for _ in range(block.period)) for block in blocks]
    }
    for done, parameter in enumerate(table):
        arrays = arrays_of(parameter)
        if parameter.layers is None:
            weights |= arrays(range(1))
        for layers, of_layers in _stacks(blocks, weights["blocks"]):
            # The layers of a stack are of one kind, and have the same parameters.
            if parameter.layers is not None and layers[0] in parameter.layers:
                of_layers |= arrays(layers)
        progress("weights", done + 1, len(table.parameters))
    return weights


def _stacks(
    blocks: Sequence[Block], stacked: Sequence[Any]
) -> Iterator[tuple[range, dict[str, Any]]]:
    """The layers whose weights are stacked together, and what holds these weights."""
    for block, of_block in zip(blocks, stacked, strict=True):
        for position, of_layers in enumerate(of_block):
            yield block.layers_at(position), of_layers


def _made(
    parameter: Parameter,
    maker: Callable[[Parameter], Callable[[range], jax.Array]],
    model: ModelConfig,
    mesh: Mesh,
    layers: range,
) -> dict[str, jax.Array]:
    """The pieces of a weight of some layers, quantised on its devices, a layer at a time; nothing
    for a parameter that is made together with its values.
    """
    of = parameter.piece_of
    if of is None or of.piece != "values":
        return {}
    make = maker(of.wide)
    each = [_pieces_of(make(range(i, i + 1)), parameter.name, of.narrow) for i in layers]
    found = {}
    for piece in pieces_of(of.wide, of.narrow):
        placement = place(piece, model, mesh.shape["tp"])
        lies = as_read(piece, placement, on(mesh, partition(placement, True)))
        parts = [layer.pop(piece.name) for layer in each]
        found[piece.name] = jax.jit(jnp.concatenate, out_shardings=lies)(parts)
    return found


@partial(jax.jit, static_argnames=("name", "narrow"))
def _pieces_of(wide: jax.Array, name: str, narrow: Narrow) -> dict[str, jax.Array]:
    """The pieces of one layer's weight [1 n k], each [1 n m], by name."""
    made = pieces(namespace("jax"), wide[0], narrow)
    return {piece_name(name, piece): array[None] for piece, array in made.items()}


def _read(
    checkpoint: Checkpoint,
    parameter: Parameter,
    placement: Placement,
    dtype: Any,
    mesh: Mesh,
    layers: range,
) -> jax.Array:
    """One parameter of some layers. The host never holds more of it than one device does."""
    stacked = (len(layers),) if parameter.layered else ()
    shape, sharding = (
        (*stacked, *placement.shape),
        on(mesh, partition(placement, parameter.layered)),
    )
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part = np.empty((len(layers), *sharding.shard_shape(shape)[len(stacked) :]), dtype)
        for layer, out in zip(layers, part, strict=True):
            read_shard(checkpoint, parameter, placement, layer, index[len(stacked) :], out)
        place_of = as_read(parameter, placement, SingleDeviceSharding(device))
        arrays.append(jax.device_put(part if parameter.layered else part[0], place_of))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _dummy(
    parameter: Parameter, placement: Placement, seed: int, dtype: Any, mesh: Mesh
) -> Callable[[range], jax.Array]:
    """Makes random weights of a range of layers where they lie: the same numbers on any number of
    shards.

    One program for all ranges of a length: with unrolled layers, for all layers.
    """
    dims, axis, source = placement.shape, placement.axis, placement.source

    def one(layer: jax.Array) -> jax.Array:
        at = [jax.lax.broadcasted_iota(jnp.int32, dims, dim) for dim in range(len(dims))]
        real: Any = True
        if (
            axis is not None
            and source is not None
            and not np.array_equal(source, np.arange(dims[axis]))
        ):
            along = np.asarray(source, np.int32).reshape(
                [-1 if dim == axis else 1 for dim in range(len(dims))]
            )
            at[axis] = jnp.broadcast_to(along, dims)
            real = at[axis] >= 0
        index = at[0]
        for size, place_in in zip(parameter.shape[1:], at[1:], strict=True):
            index = index * size + place_in
        values = dummy_parameter(namespace("jax"), parameter, layer, seed, index)
        return jnp.where(real, values, jnp.float32(parameter.padding)).astype(dtype)

    def stack(first: jax.Array, step: jax.Array, count: int) -> jax.Array:
        if not parameter.layered:
            return one(first)
        return jax.lax.map(one, first + step * jnp.arange(count, dtype=jnp.int32))

    program = jax.jit(
        stack,
        static_argnames="count",
        out_shardings=as_read(
            parameter, placement, on(mesh, partition(placement, parameter.layered))
        ),
    )
    return lambda layers: program(np.int32(layers.start), np.int32(layers.step), count=len(layers))
