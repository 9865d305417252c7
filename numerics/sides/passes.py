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
    layers. `sources` says which layer's cache each layer reads.
    """

    sources: Sequence[int]
    start: Callable[[], Streams]
    layer: Callable[[int, Streams, Any], tuple[Streams, Any]]
    end: Callable[[Streams], Any]

    @property
    def blocks(self) -> Sequence[Block]:
        """Every layer by itself."""
        return single_blocks(len(self.sources))

    def embed(self) -> Streams:
        return self.start()

    def layers(
        self, block: Block, stream: Streams, cache: Caches, rows: Any
    ) -> tuple[Streams, Caches]:
        index, source = block.first, self.sources[block.first]
        stream, cache[source] = self.layer(index, stream, cache[source])
        return stream, cache

    def finish(self, stream: Streams) -> Any:
        return self.end(stream)

    def run(self, caches: Sequence[Any]) -> tuple[Any, Caches]:
        """(what `end` gives, the caches behind the pass)."""
        return decoder.forward(self, list(caches))
