"""Where weights come from: a checkpoint, read part by part, or a seeded integer hash, the same
on every backend.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from ..ops.reference import quantization
from ..ops.reference.sampling import hash_tokens
from .checkpoint import Checkpoint, take
from .config import DeviceInfo, ResolvedConfig
from .errors import CheckpointError, ConfigError
from .models.config import ModelConfig
from .models.decoder import parameters_of
from .models.spec import Narrow
from .models.table import (
    TOP,
    Parameter,
    ParameterTable,
    Part,
    Piece,
    keys,
    weight_bytes,
)
from .option_kinds import LEAST_SCALE
from .weight_numbers import adjusted, check_numbers

DUMMY_STD = 0.02
SCALES = (LEAST_SCALE, 1 / LEAST_SCALE)
"""What scales may be: neither they nor their reciprocals are subnormal."""


def check_memory(model: ModelConfig, config: ResolvedConfig, device: DeviceInfo) -> None:
    """Raise ConfigError where the weights are larger than a machine's memory. A GPU says so itself;
    on a CPU the system lets a process have more than there is, and kills it once that is used.
    """
    if device.platform != "cpu":
        return
    itemsize = 4 if config.dtype == "float32" else 2
    size = weight_bytes(parameters_of(model), itemsize)
    if size > device.memory:
        raise ConfigError(
            f"dtype: got {config.dtype}, in which the weights take {size / 2**30:.1f} GiB; this "
            f"machine has {device.memory / 2**30:.1f}: take a smaller dtype, --quantization or a "
            "smaller model"
        )


def is_made(checkpoint: Checkpoint | None, parameter: Parameter) -> bool:
    """Whether a parameter is a piece of a weight that is quantised when it is loaded: the
    checkpoint has the plain one, or nothing is read.
    """
    return parameter.piece_of is not None and not (checkpoint and checkpoint.holds_pieces)


def pieces(xp: Any, wide: Any, narrow: Narrow) -> dict[Piece, Any]:
    """What holds a weight [n k] of the run dtype: in every framework of the namespace `xp` the same
    bits.
    """
    group = narrow.group or wide.shape[1]
    if narrow.kind == "int4":
        values, scale = quantization.quantize_int4_dynamic(xp, wide, group)
    elif narrow.kind == "int8":
        values, scale = quantization.quantize_int8_dynamic(xp, wide, "block", group)
    elif narrow.kind == "fp8":
        values, scale = quantization.quantize_fp8_dynamic(xp, wide, "block", group)
    else:
        # Nothing is quantised to fp4: these are dummy weights.
        values, scale = quantization.quantize_int4_dynamic(xp, wide, group)
    scale = xp.astype(scale, xp.float_dtype(narrow.scale_dtype))
    found: dict[Piece, Any] = {"values": values, "scale": scale}
    if narrow.zeros:
        found["zero"] = xp.astype(scale * 0.0 + 8.0, xp.uint8)
    if narrow.static_activations:
        found["input_scale"] = scale[:1, :1] * 0.0 + 2.0**-4
    return found


def parts_in(
    checkpoint: Checkpoint, parameter: Parameter, layer: int, default: int = 0
) -> Sequence[Part]:
    """The first parts that the checkpoint has all of. If there are none, those of the number
    `default`, if there are so many: 0 are the usual ones, and 1 the first alternative.
    """
    whole, every = _whole(checkpoint, parameter, layer), (parameter.parts, *parameter.alternatives)
    number = whole[0] if whole else default
    return every[number] if number < len(every) else parameter.parts


def _whole(checkpoint: Checkpoint, parameter: Parameter, layer: int) -> list[int]:
    """The numbers of the parts that the checkpoint has all of. Parts may differ in how they view
    one tensor: those that have its shape come first.
    """
    every = (parameter.parts, *parameter.alternatives)
    found = [i for i, parts in enumerate(every) if all(map(checkpoint.has, keys(parts, layer)))]
    if len(found) < 2:
        return found
    return sorted(found, key=lambda i: not _fit(checkpoint, parameter, every[i], layer))


def _fit(checkpoint: Checkpoint, parameter: Parameter, parts: Sequence[Part], layer: int) -> bool:
    """Whether the tensors of parts have the shapes that these need."""
    return all(
        checkpoint.shape(key) == parameter.part_shape(part)
        for part, key in zip(parts, keys(parts, layer), strict=True)
    )


def _most_frequent(checkpoint: Checkpoint, table: ParameterTable) -> int:
    """The number of the parts that the checkpoint has for most parameters with alternatives."""
    several = [(parameter, layer) for parameter, layer in table.placed() if parameter.alternatives]
    found = Counter(
        number
        for parameter, layer in several
        for number in _whole(checkpoint, parameter, layer)[:1]
    )
    return max(found, key=lambda number: found[number], default=0)


def read_parameter(
    checkpoint: Checkpoint, parameter: Parameter, layer: int, dtype: np.dtype[Any] | None = None
) -> np.ndarray:
    """One parameter of one layer, its parts stacked: in the checkpoint's dtype, or in float32 if it
    has an offset or its parts have several dtypes. `dtype` is what it will be put into.

    Raises CheckpointError for what is no number, ConfigError for what `dtype` does not hold.
    """
    arrays = list(read_parts(checkpoint, parameter, layer, dtype))
    if len({array.dtype for array in arrays}) > 1:
        # numpy knows no common dtype of bfloat16 and float16; float32 has all numbers of both.
        arrays = [array.astype(np.float32) for array in arrays]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)


def read_parts(
    checkpoint: Checkpoint, parameter: Parameter, layer: int, dtype: np.dtype[Any] | None = None
) -> Iterator[np.ndarray]:
    """The parts of a parameter of one layer, which lie one behind the other along its first axis:
    each in the checkpoint's dtype, or in float32. See `read_parameter` for `dtype` and errors.
    """
    if parameter.value is not None:
        yield np.full(parameter.shape, parameter.value, np.float32)
        return
    parts = parts_in(checkpoint, parameter, layer)
    for part, key in zip(parts, keys(parts, layer), strict=True):
        yield read_rows(checkpoint, parameter, part, key, dtype)


def read_rows(
    checkpoint: Checkpoint,
    parameter: Parameter,
    part: Part,
    key: str,
    dtype: np.dtype[Any] | None = None,
) -> np.ndarray:
    """The rows of one part. See `read_parameter` for `dtype` and errors."""
    if part.is_selection:
        values = checkpoint.read_slice(key, 0, part.first, part.first + part.rows)
    else:
        values = _read_whole(checkpoint, parameter, key)
    check_numbers(checkpoint, parameter, key, values, dtype)
    return adjusted(parameter, in_order(part, values))


def _read_whole(checkpoint: Checkpoint, parameter: Parameter, key: str) -> np.ndarray:
    """A tensor; one value of a scale stands for all entries."""
    values = checkpoint.read(key)
    return np.array(np.broadcast_to(values, parameter.shape)) if parameter.is_scale else values


def in_order(part: Part, values: np.ndarray) -> np.ndarray:
    """The rows of a part as the parameter has them. They come in the order of the tensor."""
    if part.order is None:
        return values
    return take(values, part.order.tensor_rows(np.arange(part.rows)))


def read_entries(
    checkpoint: Checkpoint,
    parameter: Parameter,
    key: str,
    axis: int,
    start: int,
    stop: int,
    part: Part | None = None,
    dtype: np.dtype[Any] | None = None,
) -> np.ndarray:
    """Entries `start` to `stop` (exclusive) of one axis of a tensor, of the rows of this `part` if
    the axis is not the first. See `read_parameter` for `dtype` and errors.
    """
    if parameter.is_scale:
        return _read_whole(checkpoint, parameter, key)[start:stop]
    values = checkpoint.read_slice(key, axis, start, stop)
    if part is not None and part.is_selection:
        values = values[part.first : part.first + part.rows]
    check_numbers(checkpoint, parameter, key, values, dtype)
    if part is not None:
        values = in_order(part, values)
    return adjusted(parameter, values)


def check_checkpoint(checkpoint: Checkpoint, table: ParameterTable) -> None:
    """Raise CheckpointError unless every tensor is there with the right shape, and every other one
    may be ignored.

    What is missing is named as most of what is there. A scale has one value for all entries, or
    all; each is a positive number.
    """
    expected, spelling = {}, _most_frequent(checkpoint, table)
    scales: dict[str, int] = {}
    for parameter, layer in table.placed():
        if is_made(checkpoint, parameter) and parameter.piece_of is not None:
            parameter = parameter.piece_of.wide
        if parameter.value is not None:
            continue
        parts = parts_in(checkpoint, parameter, layer, spelling)
        for part, key in zip(parts, keys(parts, layer), strict=True):
            expected[key] = parameter.part_shape(part)
            if parameter.is_scale and checkpoint.has(key):
                scales[key] = part.rows
    copies = {
        name: keys(parts_in(checkpoint, table.top[of], TOP), TOP)[0] for name, of in table.copies
    }
    for key, size in scales.items():
        checkpoint.check_scales(key, size, *SCALES)
        expected[key] = checkpoint.shape(key)
    beside = (pattern for pattern, key in table.ignored_beside if checkpoint.has(key))
    checkpoint.check(expected, (*table.ignored, *beside), copies)
    _check_input_scales(checkpoint, table)


def _check_input_scales(checkpoint: Checkpoint, table: ParameterTable) -> None:
    """Raise CheckpointError where parts of one product quantise their tokens by other scales."""
    for parameter, layer in table.placed():
        of = parameter.piece_of
        if of is None or of.piece != "input_scale" or is_made(checkpoint, parameter):
            continue
        first, *others = keys(parts_in(checkpoint, parameter, layer), layer)
        scale = float(checkpoint.read(first)[0, 0])
        for other in others:
            found = float(checkpoint.read(other)[0, 0])
            if found != scale:
                raise CheckpointError(
                    f"{checkpoint.where(other.replace(':', '.'))} holds {found}, and "
                    f"{first.replace(':', '.')} {scale}: tokens of {of.wide.name}, which is one "
                    "product here, are quantised once"
                )


def dummy_parameter(xp: Any, parameter: Parameter, layer: int, seed: int, index: Any) -> Any:
    """Random float32 weights of one layer, flat: `index` is arange(size) int32 in the framework of
    `xp`.

    Uniform with standard deviation 0.02 (norms multiply with 1), from 24 bits of an integer hash
    and one float32 product: bitwise the same on every backend. For what belongs to no layer,
    `layer` is 0.
    """
    if parameter.value is not None:
        values = xp.astype(index * 0, xp.float32) + parameter.value
    elif parameter.init != "normal":
        values = xp.astype(index * 0 + (1 if parameter.init == "ones" else 0), xp.float32)
    else:
        digest = hashlib.blake2b(parameter.name.encode(), digest_size=4).digest()
        name = int.from_bytes(digest, "little", signed=True)
        zero = index[:1] * 0  # what is the same for all elements is hashed once
        bits = hash_tokens(xp, index, zero + layer, zero + name, zero + seed_word(seed))
        centred = xp.astype((bits >> 7) - (1 << 23), xp.float32)
        values = centred * float(np.float32(DUMMY_STD * 3**0.5 / (1 << 23)))
    if parameter.offset:
        values = values + parameter.offset
    return values if parameter.factor == 1.0 else values * float(np.float32(parameter.factor))


def dummy_size(parameter: Parameter) -> int:
    """Elements of one layer's parameter."""
    return prod(parameter.shape)


def seed_word(seed: int) -> int:
    """An int32 from a seed of any size."""
    return int(np.array([seed & 0xFFFFFFFF], np.uint32).view(np.int32)[0])
