"""The piecewise program of a model as it runs: instructions in order, for every kind and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...shared.errors import OutsideTable
from ...shared.models import decoder
from .decorate import Given, Place, Size, Static


@dataclass(frozen=True, slots=True)
class Instruction:
    """Call `function` with the values at `inputs`, put the results at `outputs`, forget the
    values at `dead`. `single`: the result is one value, not a tuple.
    """

    function: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    single: bool
    dead: tuple[int, ...] = ()


class Stitched:
    """The parts of one traced graph for one number of tokens, called one after the other."""

    def __init__(
        self,
        bindings: Sequence[Static | Given | Size],
        steps: Sequence[Instruction],
        result: int,
        slots: int,
    ) -> None:
        self._steps, self._result = steps, result
        self._values: list[Any] = [None] * slots
        self._given = [(i, b.place) for i, b in enumerate(bindings) if isinstance(b, Given)]
        self._sizes = [(i, b.place, b.dim) for i, b in enumerate(bindings) if isinstance(b, Size)]
        for index, binding in enumerate(bindings):
            if isinstance(binding, Static):
                self._values[index] = binding.value

    def __call__(self, tensors: Mapping[Place, torch.Tensor]) -> torch.Tensor:
        """Hidden states for the tensors at their places."""
        values = self._values.copy()
        for index, place in self._given:
            values[index] = tensors[place]
        for index, place, dim in self._sizes:
            values[index] = tensors[place].shape[dim]
        for step in self._steps:
            results = step.function(*[values[i] for i in step.inputs])
            if step.single:
                values[step.outputs[0]] = results
            else:
                for slot, output in zip(step.outputs, results, strict=True):
                    values[slot] = output
            for index in step.dead:
                values[index] = None
        result: torch.Tensor = values[self._result]
        return result


class Piecewise:
    """All programs. Call it as the module: (token_ids, kv, batch, kind, max_query_len) -> hidden
    states [tok dim].
    """

    def __init__(self, layers: int) -> None:
        self.programs: dict[tuple[str, int], Stitched] = {}
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.notes: list[str] = []
        self.pieces: dict[str, int] = {}
        self._caches: tuple[Any, tuple[torch.Tensor, ...]] = (None, ())
        self._places = [("kv", index) for index in range(layers)]

    def __call__(
        self, token_ids: torch.Tensor, kv: Any, batch: decoder.Batch, kind: str, max_query_len: int
    ) -> torch.Tensor:
        """Raises OutsideTable for a size that was not built."""
        tokens = token_ids.shape[0]
        program = self.programs.get((kind, tokens))
        if program is None or max_query_len != (1 if kind == "decode" else tokens):
            raise OutsideTable(
                f"no pieces for {kind}[{tokens}], queries of {max_query_len}: the table was "
                "frozen at start"
            )
        if self._caches[0] is not kv:
            self._caches = (kv, tuple(kv))
        tensors: dict[Place, torch.Tensor] = dict(zip(self._places, self._caches[1], strict=True))
        tensors["token_ids", None] = token_ids
        for name, value in batch.arrays().items():
            tensors[name, None] = value
        return program(tensors)


def with_lifetimes(steps: Sequence[Instruction], fixed: int, result: int) -> list[Instruction]:
    """Instructions that forget each value after its last use, but for the first `fixed` values and
    the `result`.
    """
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        last |= dict.fromkeys((*step.inputs, *step.outputs), number)

    def dead(number: int, step: Instruction) -> tuple[int, ...]:
        ended = {slot for slot in (*step.inputs, *step.outputs) if last[slot] == number}
        return tuple(sorted(slot for slot in ended if slot >= fixed and slot != result))

    return [replace(step, dead=dead(number, step)) for number, step in enumerate(steps)]
