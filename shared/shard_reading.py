"""Reads one shard of a parameter: the slices that it has, and nothing else of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from .checkpoint import Checkpoint, take
from .models.placement import Placement, rows_of
from .models.table import Parameter, keys
from .weights import parts_in, read_entries, read_parts

Place = tuple[slice, ...]
"""Where entries belong in a parameter, or in a shard of it, along its first axes."""
Entries = Iterable[tuple[Place, np.ndarray]]
"""Entries of a parameter, and the place of each."""
Run = tuple[int, int, np.ndarray]
"""Entries `start` to `stop` of an axis of a shard, and what they are."""


def read_shard(
    checkpoint: Checkpoint,
    parameter: Parameter,
    placement: Placement,
    layer: int,
    index: tuple[slice, ...],
    out: np.ndarray,
) -> None:
    """Fill `out` with one shard of one layer's parameter. See `shard_entries`."""
    for place, values in shard_entries(checkpoint, parameter, placement, layer, index, out.dtype):
        out[place] = values


def whole_entries(
    checkpoint: Checkpoint, parameter: Parameter, layer: int, dtype: np.dtype[Any]
) -> Entries:
    """As `shard_entries`, of all of a parameter: its parts, one behind the other."""
    first = 0
    for values in read_parts(checkpoint, parameter, layer, dtype):
        yield (slice(first, first + len(values)),), values
        first += len(values)


def shard_entries(
    checkpoint: Checkpoint,
    parameter: Parameter,
    placement: Placement,
    layer: int,
    index: tuple[slice, ...],
    dtype: np.dtype[Any],
) -> Entries:
    """All entries of one shard of one layer's parameter, and where each belongs: `index` says which
    entries of the placed shape it has. Raises what `read_parameter` raises, for `dtype`.
    """
    axis, source = placement.axis, placement.source
    shape = [len(range(size)[part]) for size, part in zip(placement.shape, index, strict=True)]
    if parameter.value is not None:
        yield (), np.broadcast_to(np.float32(parameter.value), shape)
        return
    if axis is None or source is None:
        yield from whole_entries(checkpoint, parameter, layer, dtype)
        return
    entries = source[index[axis]]
    parts, offset = parts_in(checkpoint, parameter, layer), 0
    for part, key in zip(parts, keys(parts, layer), strict=True):
        read = partial(read_entries, checkpoint, parameter, key, dtype=dtype)
        if axis == 0:
            # Parts are stacked along this dimension: those of the shard's entries that lie in this
            # part.
            # Parts in another order than their tensors have no long runs of rows.
            gather = _gather if part.order is None else _gather_mixed
            for start, stop, values in gather(read, 0, rows_of(part, entries, offset)):
                yield (slice(start, stop),), values
        else:
            rows = slice(offset, offset + part.rows)
            for start, stop, values in _gather(partial(read, part=part), axis, entries):
                yield (rows, *(slice(None),) * (axis - 1), slice(start, stop)), values
        offset += part.rows
    for start, stop in _runs(entries < 0):
        if entries[start] < 0:
            shape[axis] = stop - start
            padding = np.broadcast_to(np.asarray(parameter.padding, dtype), shape)
            yield (*(slice(None),) * axis, slice(start, stop)), padding


def _runs(apart: np.ndarray, breaks: np.ndarray | None = None) -> Iterator[tuple[int, int]]:
    """Where neighbours are alike, from each change to the next; `breaks` are more changes."""
    changes = np.diff(apart) if breaks is None else np.diff(apart) | breaks
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(apart)]
    return ((start, stop) for start, stop in pairwise(edges) if start < stop)


def _gather(
    read: Callable[[int, int, int], np.ndarray], axis: int, entries: np.ndarray
) -> Iterator[Run]:
    """The `entries` of a tensor's axis, by runs of neighbours; those of -1 are left out.
    `read(axis, start, stop)`.
    """
    for start, stop in _runs(entries >= 0, np.diff(entries) != 1):
        if entries[start] >= 0:
            first = int(entries[start])
            yield start, stop, read(axis, first, first + stop - start)


def _gather_mixed(
    read: Callable[[int, int, int], np.ndarray], axis: int, entries: np.ndarray
) -> Iterator[Run]:
    """As `_gather`, by one read of all that lies between the first entry and the last one."""
    inside = entries >= 0
    if not inside.any():
        return
    wanted = entries[inside]
    first = int(wanted.min())
    values = read(axis, first, int(wanted.max()) + 1)
    for start, stop in _runs(inside):
        if inside[start]:
            yield start, stop, take(values, entries[start:stop] - first, axis)
