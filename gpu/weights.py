"""Fills the torch module's weights, one parameter of one layer at a time: all of it, or what one
shard has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from ..ops.namespaces import namespace
from ..ops.namespaces.torch_ import from_numpy
from ..shared.checkpoint import Checkpoint
from ..shared.models.calls import DTYPES
from ..shared.models.config import ModelConfig
from ..shared.models.placement import Placement, place
from ..shared.models.spec import Shard
from ..shared.models.table import Parameter, ParameterTable, piece_name
from ..shared.narrow_checkpoint import open_checkpoint
from ..shared.progress import Progress
from ..shared.shard_reading import read_shard
from ..shared.weights import (
    check_checkpoint,
    dummy_parameter,
    is_made,
    pieces,
    read_parameter,
)
from .module import Decoder

DUMMY_ENTRIES = 1 << 24
"""How many dummy weights are made at a time. Each takes several words while it is made, and a
device may be nearly full of weights.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights come from: a checkpoint, or seeded numbers; and which shard's they are."""

    model: ModelConfig
    table: ParameterTable
    checkpoint: Checkpoint | None
    seed: int
    shard: Shard | None


def load_weights(
    module: Decoder,
    folder: str,
    load_format: str,
    table: ParameterTable,
    seed: int,
    progress: Progress,
    whole: ModelConfig | None = None,
) -> None:
    """Copy every weight into `module`. `table` is that of the whole model, whose config is `whole`
    if the module is that of one shard. Raises CheckpointError before anything is copied, but for
    entries that are no numbers; ConfigError for those that the dtype does not hold.
    """
    model = module.config if whole is None else whole
    checkpoint = None
    if load_format != "dummy":
        checkpoint = open_checkpoint(folder, model, _numpy_dtype(module.dtype))
        check_checkpoint(checkpoint, table)
    source = Source(model, table, checkpoint, seed, module.config.shard)
    todo = list(table.placed())
    with torch.no_grad():
        for done, (parameter, layer) in enumerate(todo):
            owner = module.layers[layer] if parameter.layered else module
            if is_made(checkpoint, parameter):
                _make(owner, parameter, source, layer, module.dtype)
            else:
                _fill(getattr(owner, parameter.name), parameter, source, layer)
            progress("weights", done + 1, len(todo))
    module.freeze()


def _fill(target: torch.Tensor, parameter: Parameter, source: Source, layer: int) -> None:
    """Put a parameter of one layer where it belongs."""
    if source.shard is not None:
        _fill_shard(target, parameter, source, layer, source.shard)
    elif source.checkpoint is None:
        for rows in _blocks(target):
            made = _dummy(parameter, rows, max(layer, 0), source.seed, target.device)
            target[rows].copy_(made)
    else:
        read = read_parameter(source.checkpoint, parameter, layer, _numpy_dtype(target.dtype))
        target.copy_(from_numpy(read))


def _fill_shard(
    target: torch.Tensor, parameter: Parameter, source: Source, layer: int, shard: Shard
) -> None:
    """Put a shard's part of a parameter where it belongs; the host never holds more of it."""
    if shard.index and _is_added_once(parameter, source, layer, shard):
        target.zero_()
        return
    placement = place(parameter, source.model, shard.count, pads_words=True)
    entries = [slice(0, size) for size in placement.shape]
    if placement.axis is not None:
        entries[placement.axis] = _share(placement.shape[placement.axis], shard)
    if source.checkpoint is None:
        of_shard = None
        if placement.source is not None and placement.axis is not None:
            of_shard = placement.source[entries[placement.axis]]
        numbers = max(layer, 0), source.seed
        for rows in _blocks(target):
            made = _dummy_shard(parameter, placement, of_shard, *numbers, target[rows], rows)
            target[rows].copy_(made)
        return
    held = np.empty(tuple(target.shape), _numpy_dtype(target.dtype))
    read_shard(source.checkpoint, parameter, placement, layer, tuple(entries), held)
    target.copy_(from_numpy(held))


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return DTYPES[str(dtype).removeprefix("torch.")]


def _is_added_once(parameter: Parameter, source: Source, layer: int, shard: Shard) -> bool:
    """Whether it is the bias of a product whose inputs are dealt out: the first shard's part of the
    sum has it.
    """
    if not parameter.name.endswith("_bias"):
        return False
    names = source.table.top if layer < 0 else source.table.layer(layer)
    weight = names.get(parameter.name.removesuffix("_bias"))
    return weight is not None and place(weight, source.model, shard.count).axis == 1


def _make(
    owner: torch.nn.Module, parameter: Parameter, source: Source, layer: int, dtype: torch.dtype
) -> None:
    """Quantise a weight on its device. All its pieces are filled with its values."""
    if parameter.piece_of is None or parameter.piece_of.piece != "values":
        return
    plain, narrow = parameter.piece_of.wide, parameter.piece_of.narrow
    device = getattr(owner, parameter.name).device
    shape, shard = list(plain.shape), source.shard
    # A scale may be of a whole row, of which a shard has some columns.
    every: list[Shard] = []
    if shard is not None:
        placement = place(plain, source.model, shard.count)
        shape = list(placement.shape)
        if placement.axis == 1 and not narrow.group:
            every = [Shard(index, shard.count) for index in range(shard.count)]
        elif placement.axis is not None:
            shape[placement.axis] //= shard.count
    wide = torch.empty(shape, dtype=dtype, device=device)
    for each in every:
        _fill_shard(wide[:, _share(shape[1], each)], plain, source, layer, each)
    if not every:
        _fill(wide, plain, source, layer)
    for piece, values in pieces(namespace("torch"), wide, narrow).items():
        target = getattr(owner, piece_name(parameter.name, piece))
        if shard is not None and values.shape != target.shape:
            values = values[:, _share(values.shape[1], shard)]
        target.copy_(values)


def _share(size: int, shard: Shard) -> slice:
    """A shard's part of so many entries, which are dealt out in order."""
    each = size // shard.count
    return slice(shard.index * each, (shard.index + 1) * each)


def _blocks(target: torch.Tensor) -> Iterator[slice]:
    """The rows of a parameter whose dummy weights are made at a time."""
    count, width = len(target), prod(target.shape[1:])
    rows = max(1, DUMMY_ENTRIES // max(1, width))
    for first in range(0, count, rows):
        yield slice(first, min(first + rows, count))


def _dummy(
    parameter: Parameter, rows: slice, layer: int, seed: int, device: torch.device
) -> torch.Tensor:
    """Rows of a layer's dummy weights."""
    shape = (rows.stop - rows.start, *parameter.shape[1:])
    first, size = rows.start * prod(shape[1:]), prod(shape)
    index = torch.arange(first, first + size, dtype=torch.int32, device=device)
    return dummy_parameter(namespace("torch"), parameter, layer, seed, index).view(shape)


def _dummy_shard(
    parameter: Parameter,
    placement: Placement,
    source: np.ndarray | None,
    layer: int,
    seed: int,
    target: torch.Tensor,
    rows: slice,
) -> torch.Tensor:
    """Rows of a shard of the numbers that `_dummy` makes, shaped as `target`; `source` are the
    entries of the placement's axis that the shard has, -1 for its padding.
    """
    index = torch.zeros((), dtype=torch.int32, device=target.device)
    real: torch.Tensor | None = None
    for axis, size in enumerate(parameter.shape):
        count = size if axis != placement.axis or source is None else len(source)
        entries = np.arange(count, dtype=np.int32)
        if axis == placement.axis and source is not None:
            entries = source.astype(np.int32)
        along = torch.from_numpy(entries[rows] if axis == 0 else entries).to(target.device)
        shape = [-1 if dim == axis else 1 for dim in range(target.ndim)]
        if axis == placement.axis and source is not None:
            real = (along >= 0).view(shape)
            along = along.clamp(min=0)
        index = index * size + along.view(shape)
    xp = namespace("torch")
    flat = index.expand(target.shape).reshape(prod(target.shape))
    made = dummy_parameter(xp, parameter, layer, seed, flat).view(target.shape)
    return made if real is None else torch.where(real, made, parameter.padding)
