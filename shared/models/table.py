"""The parameter table: the one place that states each weight's name, shape, logical axes and checkpoint keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

Init = Literal["normal", "ones"]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint: `rows` rows of a parameter. `key` may hold `{layer}`; `axis` is logical."""

    key: str
    rows: int
    axis: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight. A layered one exists once per layer, and `shape` is that of one layer.

    `axes` names the logical axis of each dimension. `parts` are stacked along the first dimension, in order: q, k and v
    are one parameter here and three tensors in a checkpoint, since one product of the whole is faster.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    parts: tuple[Part, ...]
    layered: bool = True
    init: Init = "normal"

    def keys(self, layer: int) -> list[str]:
        """The checkpoint's names of the parts for one layer."""
        return [part.key.format(layer=layer) for part in self.parts]

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """The shape that `part` must have in the checkpoint."""
        return (part.rows, *self.shape[1:])


ParameterTable = Mapping[str, Parameter]


def expected_tensors(table: ParameterTable, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this table must have, with its shape."""
    expected = {}
    for parameter in table.values():
        for layer in range(num_layers if parameter.layered else 1):
            for part in parameter.parts:
                expected[part.key.format(layer=layer)] = parameter.part_shape(part)
    return expected


def parameter_count(table: ParameterTable, num_layers: int) -> int:
    """Weights of the whole model."""
    return sum(prod(p.shape) * (num_layers if p.layered else 1) for p in table.values())
