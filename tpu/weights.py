"""Puts weights on the devices as programs want them: stacked by block of layers, each shard read
for its device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from math import prod
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
from ..shared.models.table import Parameter, ParameterTable, PieceOf, piece_name
from ..shared.narrow_checkpoint import open_checkpoint
from ..shared.progress import Progress
from ..shared.reading_ahead import Begun, finish_ahead, readers
from ..shared.shard_reading import read_shard
from ..shared.weights import check_checkpoint, dummy_parameter, is_made, pieces
from .sharding import as_read, on, partition

Put = Callable[[dict[str, jax.Array]], object]
"""Takes arrays by name."""
Maker = Callable[[range, Put], Iterator[Begun]]
"""Begins to make one parameter of a range of layers, and hands it on once it is there."""
ALIGNMENT = 64
"""Where it does not begin at a multiple of so many bytes, JAX copies an array of the host."""
AHEAD = 2 << 30
"""Bytes of weights that the host has beside those that it waits for: no more than a device's part
of one parameter where that is larger.
"""


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
    pool = ThreadPoolExecutor(readers(), "weights")

    def maker(parameter: Parameter) -> Maker:
        if is_made(checkpoint, parameter) and parameter.piece_of is not None:
            of = parameter.piece_of
            if of.piece != "values":
                return lambda layers, put: iter(())  # made together with its values
            return partial(_begin_made, parameter.name, of, maker(of.wide), model, mesh)
        placement = place(parameter, model, mesh.shape["tp"])
        kind = jnp.dtype(parameter.dtype_in(dtype.name))
        if checkpoint is None:
            program = _dummy(parameter, placement, seed, kind, mesh)
            return partial(_begin_dummy, parameter.name, program)
        return partial(_begin_read, checkpoint, parameter, placement, kind, mesh, pool)

    weights: dict[str, Any] = {
        "blocks": [tuple({} for _ in range(block.period)) for block in blocks]
    }

    def begin() -> Iterator[Begun]:
        for done, parameter in enumerate(table):
            make = maker(parameter)
            for layers, of_layers in _stacks(parameter, blocks, weights):
                yield from make(layers, of_layers.update)
            yield Begun(0, partial(progress, "weights", done + 1, len(table.parameters)))

    try:
        deque(finish_ahead(begin(), AHEAD), maxlen=0)
    finally:
        pool.shutdown(cancel_futures=True)
    return weights


def _stacks(
    parameter: Parameter, blocks: Sequence[Block], weights: dict[str, Any]
) -> Iterator[tuple[range, dict[str, jax.Array]]]:
    """The layers whose weights of a parameter are stacked together, and what holds these."""
    if parameter.layers is None:
        yield range(1), weights
        return
    for block, of_block in zip(blocks, weights["blocks"], strict=True):
        for position, of_layers in enumerate(of_block):
            layers = block.layers_at(position)
            # The layers of a stack are of one kind, and have the same parameters.
            if layers[0] in parameter.layers:
                yield layers, of_layers


def _begin_made(
    name: str,
    of: PieceOf,
    make: Maker,
    model: ModelConfig,
    mesh: Mesh,
    layers: range,
    put: Put,
) -> Iterator[Begun]:
    """Begin to read a weight of some layers that is quantised on its devices, a layer at a time."""
    each: list[dict[str, jax.Array]] = []

    def quantise(wide: dict[str, jax.Array]) -> None:
        each.append(_pieces_of(wide[of.wide.name], name, of.narrow))

    def stack() -> None:
        for piece in pieces_of(of.wide, of.narrow):
            placement = place(piece, model, mesh.shape["tp"])
            lies = as_read(piece, placement, on(mesh, partition(placement, True)))
            parts = [layer.pop(piece.name) for layer in each]
            put({piece.name: jax.jit(jnp.concatenate, out_shardings=lies)(parts)})

    for layer in layers:
        yield from make(range(layer, layer + 1), quantise)
    yield Begun(0, stack)


@partial(jax.jit, static_argnames=("name", "narrow"))
def _pieces_of(wide: jax.Array, name: str, narrow: Narrow) -> dict[str, jax.Array]:
    """The pieces of one layer's weight [1 n k], each [1 n m], by name."""
    made = pieces(namespace("jax"), wide[0], narrow)
    return {piece_name(name, piece): array[None] for piece, array in made.items()}


def _begin_read(
    checkpoint: Checkpoint,
    parameter: Parameter,
    placement: Placement,
    dtype: Any,
    mesh: Mesh,
    pool: Executor,
    layers: range,
    put: Put,
) -> Iterator[Begun]:
    """Begin to read one parameter of some layers, for one device after the other."""
    stacked = (len(layers),) if parameter.layered else ()
    shape = (*stacked, *placement.shape)
    sharding = on(mesh, partition(placement, parameter.layered))
    arrays: list[jax.Array] = []

    def finish(device: jax.Device, part: np.ndarray, reads: Sequence[Future[None]]) -> None:
        for read in reads:
            read.result()
        place_of = as_read(parameter, placement, SingleDeviceSharding(device))
        arrays.append(jax.device_put(part if parameter.layered else part[0], place_of))

    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part = _empty((len(layers), *sharding.shard_shape(shape)[len(stacked) :]), dtype)
        of_layer = index[len(stacked) :]
        reads = [
            pool.submit(read_shard, checkpoint, parameter, placement, layer, of_layer, out)
            for layer, out in zip(layers, part, strict=True)
        ]
        yield Begun(part.nbytes, partial(finish, device, part, reads))

    def join() -> None:
        whole = jax.make_array_from_single_device_arrays(shape, sharding, arrays)
        put({parameter.name: whole})

    yield Begun(0, join)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array with whatever is there, which JAX's device of the host takes as it lies."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _begin_dummy(
    name: str, program: Callable[[range], jax.Array], layers: range, put: Put
) -> Iterator[Begun]:
    """Random weights of some layers, which are made when they are waited for."""
    yield Begun(0, lambda: put({name: program(layers)}))


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
