"""Covers the layers of a model with repeated blocks, so that a compiler sees as few layer bodies as
possible.

A block is a period of layers that comes several times: 24 layers whose windows alternate are one
block of 2 layers, 12 times. JAX scans over the repeats; a block that comes once is unrolled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

MAX_PERIOD = 8
"""Longest period that is looked for: a compiler would gain little from a longer one."""


class Block(NamedTuple):
    """Layers `first` to `first + period * repeats - 1`; layer i is of the same kind as layer i -
    `period`.
    """

    first: int
    period: int
    repeats: int

    @property
    def stop(self) -> int:
        """The layer behind the last one."""
        return self.first + self.period * self.repeats

    def layers_at(self, position: int) -> range:
        """The layers that stand at a position of the period, one for each repeat."""
        return range(self.first + position, self.stop, self.period)


def single_blocks(num_layers: int) -> tuple[Block, ...]:
    """A block for each layer."""
    return tuple(Block(layer, 1, 1) for layer in range(num_layers))


def cover(layers: Sequence[Hashable]) -> tuple[Block, ...]:
    """The blocks, in order, with the fewest layer bodies (periods in sum), and of these the
    fewest blocks.
    """
    count = len(layers)
    # best[i]: (bodies, blocks) that cover the layers from i on, and the first of them.
    best: list[tuple[int, int, Block | None]] = [(0, 0, None)] * (count + 1)
    for first in reversed(range(count)):
        options = []
        for block in _blocks_from(layers, first):
            bodies, blocks, _ = best[block.stop]
            options.append((bodies + block.period, blocks + 1, block))
        best[first] = min(options, key=lambda option: option[:2])
    found: list[Block] = []
    head = best[0][2]
    while head is not None:
        found.append(head)
        head = best[head.stop][2]
    return tuple(found)


def _blocks_from(layers: Sequence[Hashable], first: int) -> list[Block]:
    """Every block that begins at a layer."""
    found = []
    for period in range(1, min(MAX_PERIOD, len(layers) - first) + 1):
        stop = first + period
        while stop < len(layers) and layers[stop] == layers[stop - period]:
            stop += 1
        most = (stop - first) // period
        # Fewer repeats may leave layers that begin a better block; without a repeat only a single
        # layer is one.
        least = 1 if period == 1 else 2
        found += [Block(first, period, repeats) for repeats in range(most, least - 1, -1)]
    return found
