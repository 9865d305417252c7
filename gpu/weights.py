"""Fills the torch module's weights, one parameter of one layer at a time: all of it, or what one
shard has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from ..ops.namespaces import namespace
from ..shared.checkpoint import Checkpoint
from ..shared.models.calls import DTYPES
from ..shared.models.config import ModelConfig
from ..shared.models.placement import Placement, place
from ..shared.models.spec import Shard
from ..shared.models.table import Parameter, ParameterTable, piece_name
from ..shared.narrow_checkpoint import open_checkpoint
from ..shared.progress import Progress
from ..shared.reading_ahead import Begun, finish_ahead
from ..shared.shard_reading import Entries, shard_entries, whole_entries
from ..shared.weights import (
    check_checkpoint,
    dummy_parameter,
    is_made,
    pieces,
)
from .module import Decoder
from .uploads import Uploads

AHEAD = 1 << 30
"""Bytes of weights that may be read while others are quantised: the device has them beside what
becomes of them.
"""
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
    # The largest first: at the end no thread is left alone with one of them.
    todo = sorted(table.placed(), key=lambda each: -prod(each[0].shape))
    with torch.no_grad(), Uploads(next(module.parameters()).device) as uploads:
        begun = (_begin(uploads, module, source, *each) for each in todo)
        for done, _ in enumerate(finish_ahead(begun, AHEAD)):
            progress("weights", done + 1, len(todo))
    module.freeze()


def _begin(
    uploads: Uploads, module: Decoder, source: Source, parameter: Parameter, layer: int
) -> Begun:
    """Begin to put a parameter of one layer where it belongs."""
    owner = module.layers[layer] if parameter.layered else module
    if is_made(source.checkpoint, parameter):
        return _begin_made(uploads, owner, parameter, source, layer, module.dtype)
    target = getattr(owner, parameter.name)
    return Begun(0, _fill(uploads, target, parameter, source, layer, source.shard))


def _fill(
    uploads: Uploads,
    target: torch.Tensor,
    parameter: Parameter,
    source: Source,
    layer: int,
    shard: Shard | None,
) -> Callable[[], object]:
    """Begin to fill a parameter, or what a shard has of it; returns what waits for the end.
    Seeded numbers are made at once.
    """
    if shard is not None and _is_left_to_the_first(parameter, source, layer, shard):
        target.zero_()
    elif source.checkpoint is None:
        _fill_dummy(target, parameter, source, layer, shard)
    else:
        of = source.checkpoint, parameter, source, layer, shard, _numpy_dtype(target.dtype)
        return uploads.start(target, partial(_entries, *of)).result
    return lambda: None


def _entries(
    checkpoint: Checkpoint,
    parameter: Parameter,
    source: Source,
    layer: int,
    shard: Shard | None,
    dtype: np.dtype[Any],
) -> Entries:
    """The entries of a parameter, or of a shard of it, as they lie in the checkpoint."""
    if shard is None:
        yield from whole_entries(checkpoint, parameter, layer, dtype)
        return
    placement, entries = _of_shard(parameter, source, shard)
    yield from shard_entries(checkpoint, parameter, placement, layer, entries, dtype)


def _of_shard(
    parameter: Parameter, source: Source, shard: Shard
) -> tuple[Placement, tuple[slice, ...]]:
    """How a parameter lies on the shards, and which entries one has."""
    placement = place(parameter, source.model, shard.count, pads_words=True)
    entries = [slice(0, size) for size in placement.shape]
    if placement.axis is not None:
        entries[placement.axis] = _share(placement.shape[placement.axis], shard)
    return placement, tuple(entries)


def _fill_dummy(
    target: torch.Tensor, parameter: Parameter, source: Source, layer: int, shard: Shard | None
) -> None:
    """Put seeded numbers into a parameter, or those of a shard."""
    numbers = max(layer, 0), source.seed
    if shard is None:
        for rows in _blocks(target):
            target[rows].copy_(_dummy(parameter, rows, *numbers, target.device))
        return
    placement, entries = _of_shard(parameter, source, shard)
    of_shard = None
    if placement.source is not None and placement.axis is not None:
        of_shard = placement.source[entries[placement.axis]]
    for rows in _blocks(target):
        made = _dummy_shard(parameter, placement, of_shard, *numbers, target[rows], rows)
        target[rows].copy_(made)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return DTYPES[str(dtype).removeprefix("torch.")]


def _is_left_to_the_first(parameter: Parameter, source: Source, layer: int, shard: Shard) -> bool:
    """Whether it is the bias of a product whose inputs are dealt out, of another shard than the
    first: that one's part of the sum has it.
    """
    if not shard.index or not parameter.name.endswith("_bias"):
        return False
    names = source.table.top if layer < 0 else source.table.layer(layer)
    weight = names.get(parameter.name.removesuffix("_bias"))
    return weight is not None and place(weight, source.model, shard.count).axis == 1


def _begin_made(
    uploads: Uploads,
    owner: torch.nn.Module,
    parameter: Parameter,
    source: Source,
    layer: int,
    dtype: torch.dtype,
) -> Begun:
    """Begin to read a weight that is quantised on its device. All its pieces are filled with its
    values.
    """
    of = parameter.piece_of
    if of is None or of.piece != "values":
        return Begun(0, lambda: None)
    plain = of.wide
    device = getattr(owner, parameter.name).device
    shape, shard = list(plain.shape), source.shard
    # A scale may be of a whole row, of which a shard has some columns.
    every: list[Shard] = []
    if shard is not None:
        placement = place(plain, source.model, shard.count)
        shape = list(placement.shape)
        if placement.axis == 1 and not of.narrow.group:
            every = [Shard(index, shard.count) for index in range(shard.count)]
        elif placement.axis is not None:
            shape[placement.axis] //= shard.count

    wide = torch.empty(shape, dtype=dtype, device=device)
    if every:
        waits = [
            _fill(uploads, wide[:, _share(shape[1], each)], plain, source, layer, each)
            for each in every
        ]
    else:
        waits = [_fill(uploads, wide, plain, source, layer, shard)]

    def finish() -> None:
        for wait in waits:
            wait()
        for piece, values in pieces(namespace("torch"), wide, of.narrow).items():
            target = getattr(owner, piece_name(parameter.name, piece))
            if shard is not None and values.shape != target.shape:
                values = values[:, _share(values.shape[1], shard)]
            target.copy_(values)

    return Begun(wide.nbytes, finish)


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
