"""The numbers of weights: what they become when they are loaded. Refused are those that are no
numbers, or would be infinite in the dtype that they are put into.
"""

from __future__ import annotations

from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from ..ops.namespaces import namespace
from ..ops.reference.narrow import widened_weight
from .checkpoint import ROWS, Checkpoint, view_of
from .errors import CheckpointError, ConfigError
from .models.calls import DTYPES
from .models.table import Parameter, PieceOf, is_power_of_two

FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)))
RUN_DTYPES = ("bfloat16", "float16", "float32")
BLOCK = 1 << 18
"""Entries that are looked at twice while they are in the processor's cache."""
LARGEST = {"int8": 128.0, "fp8": 448.0, "int4": 16.0, "fp4": 6.0}
"""How far from its zero a value of each kind may be."""


def adjusted(parameter: Parameter, values: np.ndarray) -> np.ndarray:
    """Values of a checkpoint plus the parameter's offset, times its factor: in float32 if there is
    an offset, or a factor that is no power of two.
    """
    if not is_power_of_two(parameter.factor):
        values = values.astype(np.float32)
    if parameter.offset:
        values = values.astype(np.float32) + np.float32(parameter.offset)
    return values if parameter.factor == 1.0 else values * values.dtype.type(parameter.factor)


def check_numbers(
    checkpoint: Checkpoint,
    parameter: Parameter,
    key: str,
    values: np.ndarray,
    dtype: np.dtype[Any] | None = None,
) -> None:
    """Raise CheckpointError if some `values` of the tensor `key` are NaN or infinite, ConfigError
    if they become so in `dtype` (None: they stay as they are), or if they are scales and entries
    of the weight become so in the run dtype.
    """
    if values.dtype not in FLOATS or not values.size:
        return
    found = _extremes(values)
    if not _holds(parameter, found, dtype or values.dtype):
        _refuse(checkpoint, parameter, key, dtype or values.dtype)
    of, run_dtype = parameter.piece_of, checkpoint.run_dtype
    if run_dtype is None or of is None or of.piece != "scale" or not of.is_widened:
        return
    largest = found.astype(np.float64).max() * LARGEST[of.narrow.kind]
    if not _is_held(largest, run_dtype):
        _check_widened(checkpoint, of, key.removesuffix(":scale"), run_dtype)


def _holds(parameter: Parameter, values: np.ndarray, dtype: np.dtype[Any]) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(adjusted(parameter, values).astype(dtype)).all())


def _is_held(numbers: Any, dtype: np.dtype[Any]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(numbers).astype(dtype)).all())


def _check_widened(checkpoint: Checkpoint, of: PieceOf, module: str, dtype: np.dtype[Any]) -> None:
    """Raise ConfigError if an entry of a module's weight is infinite in `dtype`, which its largest
    scale does not rule out.
    """
    names = ["values", "scale", *(["zero"] if of.narrow.zeros else [])]
    rows = len(checkpoint.read(f"{module}:scale"))
    for start in range(0, rows, ROWS):
        stop = min(start + ROWS, rows)
        values, scale, *zero = (
            checkpoint.read_slice(f"{module}:{name}", 0, start, stop) for name in names
        )
        wide = widened_weight(
            namespace("numpy"), values, scale, zero[0] if zero else None, of.narrow.kind
        )
        if _is_held(wide, dtype):
            continue
        row, column = np.unravel_index(np.abs(wide).argmax(), wide.shape)
        entry = wide[row, column]
        fits = [name for name in RUN_DTYPES if _is_held(entry, DTYPES[name])]
        raise ConfigError(
            f"dtype: got {dtype.name}, in which an entry of {checkpoint.where(f'{module}:values')} "
            f"would be infinite: with its scale it is {float(entry):.6g} at "
            f"{_place((start + row, column))}; allowed are {', '.join(fits)}"
        )


def _extremes(values: np.ndarray) -> np.ndarray:
    """Two entries, of which one is not finite if any is; else none is further from 0 than both.

    Floats of one sign are ordered as their bits are, infinity and NaN at the end. Read as signed
    integers the largest is a positive one if there is any, and unsigned a negative one: two passes
    over integers, for which processors have instructions.
    """
    size = values.dtype.itemsize
    # Columns of a tensor are no neighbours: they are gone through by rows, not moved together.
    flat = values.reshape(-1) if values.flags.c_contiguous or values.ndim == 1 else values
    step = max(1, BLOCK * len(flat) // flat.size)
    signed, unsigned = (flat.view(f"{sort}{size}") for sort in "iu")
    starts = range(0, len(flat), step)
    tops = [(signed[i : i + step].max(), unsigned[i : i + step].max()) for i in starts]
    positive, negative = (max(top) for top in zip(*tops, strict=True))
    bits = np.array([int(positive) % (1 << 8 * size), int(negative)], f"u{size}")
    return bits.view(values.dtype)


def _refuse(
    checkpoint: Checkpoint, parameter: Parameter, key: str, dtype: np.dtype[Any]
) -> NoReturn:
    """Say which entry of the tensor it is. All of it is read once more: a shard had a part."""
    values = checkpoint.read(view_of(key)[0])
    where = checkpoint.where(key)
    wrong = ~np.isfinite(values)
    if wrong.any():
        at = np.unravel_index(wrong.argmax(), wrong.shape)
        raise CheckpointError(
            f"{where} holds {float(values[at])} at {_place(at)}, must be finite numbers "
            f"({wrong.sum()} of {wrong.size} entries are not)"
        )
    wide = values.astype(np.float32)
    at = np.unravel_index(np.abs(wide).argmax(), wide.shape)
    entry = values[at].reshape(1)
    fits = [name for name in RUN_DTYPES if _holds(parameter, entry, DTYPES[name])]
    raise ConfigError(
        f"dtype: got {dtype.name}, in which an entry of {where} would be infinite: it holds "
        f"{float(wide[at]):.6g} at {_place(at)}; allowed are {', '.join(fits)}"
    )


def _place(at: tuple[Any, ...]) -> str:
    return str([int(index) for index in at])
