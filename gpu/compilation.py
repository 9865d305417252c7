"""Regional compilation: the layer function, compiled by Inductor once per shape and window, reused by every layer."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.utils import counters

from ..bucketing import Descriptor


class LayerCompiler:
    """The layer function for each descriptor. Level 0 gives the plain function, level 2 a compiled one."""

    def __init__(self, layer: FunctionType, level: int) -> None:
        self._layer = layer
        self._level = level
        self._compiled: dict[Descriptor, Callable[..., Any]] = {}

    def build(self, descriptor: Descriptor) -> Callable[..., Any]:
        """Make the layer function of a descriptor; the first call with real tensors compiles it."""
        if self._level == 0:
            self._compiled[descriptor] = self._layer
        else:
            # Dynamo keeps the compiled versions of a function on its code object and tries them one after the other.
            # A copy of the code for each shape keeps that list at one entry per window, whatever the table holds.
            source = self._layer
            copy = FunctionType(
                source.__code__.replace(co_name=f"layer_{descriptor.kind}_{descriptor.tokens}"),
                source.__globals__,
                source.__name__,
                source.__defaults__,
                source.__closure__,
            )
            self._compiled[descriptor] = torch.compile(copy, fullgraph=True, dynamic=False)
        return self._compiled[descriptor]

    def __getitem__(self, descriptor: Descriptor) -> Callable[..., Any]:
        return self._compiled[descriptor]

    def __contains__(self, descriptor: Descriptor) -> bool:
        return descriptor in self._compiled


def compiled_graphs() -> int:
    """Graphs that Dynamo has handed to a compiler in this process."""
    return int(counters["stats"]["unique_graphs"])
