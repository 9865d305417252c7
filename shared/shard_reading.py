"""Reads one shard of a parameter: the slices that it has, and nothing else of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from .checkpoint import Checkpoint
from .models.placement import Placement, rows_of
from .models.table import Parameter, keys
from .weights import parts_in, read_entries, read_rows


def read_shard(
    checkpoint: Checkpoint,
    parameter: Parameter,
    placement: Placement,
    layer: int,
    index: tuple[slice, ...],
    out: np.ndarray,
) -> None:
    """Fill `out` with one shard of one layer's parameter: `index` says which entries of the
    placed shape it has. Raises what `read_parameter` raises, for the dtype of `out`.
    """
    if parameter.value is not None:
        out[...] = parameter.value
        return
    axis, source = placement.axis, placement.source
    parts, offset = parts_in(checkpoint, parameter, layer), 0
    for part, key in zip(parts, keys(parts, layer), strict=True):
        read = partial(read_entries, checkpoint, parameter, key, dtype=out.dtype)
        if axis is None or source is None:
            rows = read_rows(checkpoint, parameter, part, key, out.dtype)
            out[offset : offset + part.rows] = rows
        elif axis == 0:
            # Parts are stacked along this dimension: those of the shard's entries that lie in this
            # part.
            # Parts in another order than their tensors have no long runs of rows.
            gather = _gather if part.order is None else _gather_mixed
            gather(read, 0, rows_of(part, source[index[0]], offset), out)
        else:
            rows = out[offset : offset + part.rows]
            _gather(partial(read, part=part), axis, source[index[axis]], rows)
        offset += part.rows
    if axis is not None and source is not None:
        out[(slice(None),) * axis + (source[index[axis]] < 0,)] = parameter.padding


def _gather(
    read: Callable[[int, int, int], np.ndarray], axis: int, entries: np.ndarray, out: np.ndarray
) -> None:
    """Put the entries of a tensor's axis to their places in `out`; those of -1 stay. `read(axis,
    start, stop)`.
    """
    inside = entries >= 0
    breaks = np.flatnonzero((np.diff(entries) != 1) | np.diff(inside)) + 1
    edges = [0, *breaks.tolist(), len(entries)]
    for start, stop in pairwise(edges):
        if start < stop and inside[start]:
            first = int(entries[start])
            here = (slice(None),) * axis + (slice(start, stop),)
            out[here] = read(axis, first, first + stop - start)


def _gather_mixed(
    read: Callable[[int, int, int], np.ndarray], axis: int, entries: np.ndarray, out: np.ndarray
) -> None:
    """As `_gather`, by one read of all that lies between the first entry and the last one."""
    inside = entries >= 0
    if not inside.any():
        return
    wanted = entries[inside]
    first = int(wanted.min())
    values = read(axis, first, int(wanted.max()) + 1)
    out[(slice(None),) * axis + (inside,)] = values.take(wanted - first, axis)
