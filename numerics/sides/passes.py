"""A forward pass of a comparison: one layer at a time, each by whatever the comparison wants to
run there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...shared.models import decoder
from ...shared.models.blocks import Block, single_blocks

Streams = Any
"""What is carried from layer to layer: a stream, or those of several sides."""
Caches = list[Any]
"""For each layer its cache, or those of several sides."""


@dataclass(frozen=True)
class Stepwise:
    """An `Execution` (shared/models/decoder.py) of three functions: before, for and behind the
    layers.
    """

    num_layers: int
    start: Callable[[], Streams]
    layer: Callable[[int, Streams, Any], tuple[Streams, Any]]
    end: Callable[[Streams], Any]

    @property
    def blocks(self) -> Sequence[Block]:
        """Every layer by itself."""
        return single_blocks(self.num_layers)

    def embed(self) -> Streams:
        """See `Execution`."""
        return self.start()

    def layers(
        self, block: Block, stream: Streams, cache: Caches, rows: Any
    ) -> tuple[Streams, Caches]:
        """See `Execution`."""
        index = block.first
        stream, cache[index] = self.layer(index, stream, cache[index])
        return stream, cache

    def finish(self, stream: Streams) -> Any:
        """See `Execution`."""
        return self.end(stream)


def run_stepwise(
    start: Callable[[], Streams],
    layer: Callable[[int, Streams, Any], tuple[Streams, Any]],
    end: Callable[[Streams], Any],
    caches: Sequence[Any],
) -> tuple[Any, Caches]:
    """(what `end` gives, the caches behind the pass)."""
    return decoder.forward(Stepwise(len(caches), start, layer, end), list(caches))
