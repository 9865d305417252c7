"""The parameter table: the one place that states each weight's name, shape, logical axes and
checkpoint keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import frexp, prod
from typing import Literal

import numpy as np

from ..errors import InternalError
from .spec import Narrow

TOP = -1
"""The layer of what belongs to none."""
Init = Literal["normal", "ones", "zeros"]
ParameterDtype = Literal["model", "float32", "bfloat16", "int8", "float8_e4m3fn", "uint8"]
Piece = Literal["values", "scale", "zero", "input_scale"]
"""What a narrow weight is made of."""


@dataclass(frozen=True, slots=True)
class PairsToHalves:
    """Rows of heads that a rotary embedding turns in neighbouring pairs, in the order in which one
    that turns halves gives the same scores.

    With r = rotated / 2, row i < r of a head is row 2i of the tensor's head, and row r + i is its
    row 2i + 1. The rows behind them stay where they are, and the first `plain` ones, in front of
    them.
    """

    head_dim: int
    rotated: int
    plain: int = 0

    def tensor_rows(self, rows: np.ndarray) -> np.ndarray:
        """The row of the tensor that each of these rows is."""
        head, entry = np.divmod(rows, self.head_dim)
        place = entry - self.plain
        second, pair = np.divmod(place, self.rotated // 2)
        is_turned = (place >= 0) & (place < self.rotated)
        turned = np.where(is_turned, self.plain + 2 * pair + second, entry)
        return head * self.head_dim + turned


@dataclass(frozen=True, slots=True)
class Part:
    """`rows` rows of a parameter: a tensor of the checkpoint, or with `of`, those from `first` on
    of its `of` rows.

    `key` may hold `{layer}`; `axis` is logical. `order`: these rows lie in another order in the
    tensor.
    """

    key: str
    rows: int
    axis: str
    first: int = 0
    of: int | None = None
    order: PairsToHalves | None = None

    def rows_in_tensor(self, rows: np.ndarray) -> np.ndarray:
        """Where rows of this part lie in the tensor."""
        return self.first + (rows if self.order is None else self.order.tensor_rows(rows))

    @property
    def tensor_rows(self) -> int:
        """Rows of the tensor in the checkpoint."""
        return self.rows if self.of is None else self.of

    @property
    def is_selection(self) -> bool:
        """Whether the tensor has other rows too."""
        return self.rows != self.tensor_rows


@dataclass(frozen=True, slots=True)
class PieceOf:
    """Which piece of a narrow weight a parameter is, of the parameter `wide` in how many
    bits its checkpoint says.
    """

    piece: Piece
    wide: Parameter
    narrow: Narrow

    @property
    def is_widened(self) -> bool:
        """Whether a product takes entries of the run dtype: that of experts, and others unless
        tokens are quantised for it.
        """
        return self.narrow.activations is None or self.wide.name.startswith("experts_")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight of any rank. It exists once for each of `layers`, and `shape` is that of one
    layer; None: once in all.

    `axes` names the logical axis of each dimension. `parts` are stacked along the first dimension,
    in order: q, k and v are one parameter here and three tensors in most checkpoints, since one
    product of the whole is faster. `alternatives` are other parts: the first that a checkpoint has
    all of is read. `factor` multiplies what is read: a power of two, so that it is exact, or in
    float32 any number above 0. `dtype` float32: in models of any dtype. `offset` is added to what
    is read, before the factor, in float32: norms that multiply with 1 + weight are plain norms
    then. `is_scale`: positive factors, for all of which the tensor may hold one value. `value`:
    what all entries are, where none is read. `piece_of`: it is a piece of a narrow weight.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    parts: tuple[Part, ...]
    layers: Sequence[int] | None = None
    init: Init = "normal"
    dtype: ParameterDtype = "model"
    alternatives: tuple[tuple[Part, ...], ...] = ()
    factor: float = 1.0
    offset: float = 0.0
    is_scale: bool = False
    value: float | None = None
    piece_of: PieceOf | None = None

    def __post_init__(self) -> None:
        for parts in (self.parts, *self.alternatives):
            rows = sum(part.rows for part in parts)
            if rows != self.shape[0]:
                raise InternalError(
                    f"parameter {self.name}: the parts have {rows} rows, the shape {self.shape[0]}"
                )
        if not is_power_of_two(self.factor) and (self.dtype != "float32" or self.factor <= 0):
            raise InternalError(
                f"parameter {self.name}: factor is {self.factor}, dtype {self.dtype}; allowed are "
                "powers of two, and in float32 any number above 0"
            )
        if self.offset and self.dtype != "float32":
            raise InternalError(
                f"parameter {self.name}: offset is {self.offset}, which needs the dtype float32, "
                f"got {self.dtype}"
            )

    @property
    def layered(self) -> bool:
        """Whether it belongs to layers."""
        return self.layers is not None

    def dtype_in(self, model_dtype: str) -> str:
        """The dtype that it has in a model of `model_dtype`."""
        return model_dtype if self.dtype == "model" else self.dtype

    @property
    def entries(self) -> int:
        """Weights of the model that it holds in one layer: none where nothing is read."""
        if self.value is not None:
            return 0
        if self.piece_of is None:
            return prod(self.shape)
        return prod(self.piece_of.wide.shape) if self.piece_of.piece == "values" else 0

    @property
    def padding(self) -> float:
        """What the entries are that shards have beyond the model's."""
        return 1.0 if self.is_scale else 0.0

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """The shape that the tensor of `part` must have in the checkpoint."""
        return (part.tensor_rows, *self.shape[1:])


@dataclass(frozen=True)
class ParameterTable:
    """All parameters of a model. A name may stand for one parameter in some layers and for another
    in others.

    `ignored` are patterns (as of `fnmatch`) of tensors that a checkpoint may have and that nothing
    reads. `copies`: tensors that a checkpoint may have and that must equal that of a parameter.
    `ignored_beside`: patterns that may be ignored where a checkpoint has the tensor beside each.
    """

    parameters: tuple[Parameter, ...]
    ignored: tuple[str, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    ignored_beside: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        seen = set()
        for parameter, layer in self.placed():
            if (parameter.name, layer) in seen:
                raise InternalError(f"parameter {parameter.name}: stated twice for layer {layer}")
            seen.add((parameter.name, layer))

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.parameters)

    def placed(self) -> Iterator[tuple[Parameter, int]]:
        """Every (parameter, layer) of the model; `TOP` for what belongs to none."""
        for parameter in self.parameters:
            for layer in (TOP,) if parameter.layers is None else parameter.layers:
                yield parameter, layer

    @cached_property
    def _by_layer(self) -> dict[int, dict[str, Parameter]]:
        found: dict[int, dict[str, Parameter]] = {}
        for parameter, layer in self.placed():
            found.setdefault(layer, {})[parameter.name] = parameter
        return found

    @property
    def top(self) -> dict[str, Parameter]:
        """Parameters that belong to no layer, by name."""
        return self._by_layer.get(TOP, {})

    def layer(self, index: int) -> dict[str, Parameter]:
        """Parameters of one layer, by name."""
        return self._by_layer.get(index, {})


def is_power_of_two(x: float) -> bool:
    """Whether a product with `x` is exact in every binary floating-point format that holds it."""
    return x > 0 and frexp(x)[0] == 0.5


def keys(parts: Sequence[Part], layer: int) -> list[str]:
    """The checkpoint's names of parts for one layer."""
    return [part.key.format(layer=layer) for part in parts]


def parameter_count(table: ParameterTable) -> int:
    """Weights of the whole model."""
    return sum(p.entries * (1 if p.layers is None else len(p.layers)) for p in table)


BYTES_OF = {"model": 0, "float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "uint8": 1}


def bytes_of(parameter: Parameter, itemsize: int) -> int:
    """Bytes of one layer's parameter in a model whose dtype has `itemsize`."""
    return prod(parameter.shape) * (BYTES_OF[parameter.dtype] or itemsize)


def weight_bytes(table: ParameterTable, itemsize: int) -> int:
    """Bytes of the whole model in a dtype of `itemsize`."""
    return sum(bytes_of(p, itemsize) * (1 if p.layers is None else len(p.layers)) for p in table)


def piece_name(wide: str, piece: Piece) -> str:
    """What a piece of the narrow weight of this name is called."""
    return wide if piece == "values" else f"{wide}_{piece}"
