"""A forward pass as functions that are compiled by themselves: what is before the layers, and
each kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..bucketing import Descriptor
from ..shared.models.blocks import Block, single_blocks
from ..shared.models.decoder import Stream
from ..shared.models.stages import Batch, Rows
from .compilation import LayerCompiler
from .module import Decoder

Cache = Sequence[torch.Tensor]
"""[page slot 2*kvhead hdim] of each layer, written in place."""


class RegionalPass:
    """An `Execution` (shared/models/decoder.py) of one step.

    `start` gives the stream before the first layer, and what the layers of each page group read;
    `groups` are those of the layers. `drops`: whether the last layer
    finishes some rows only. `selects` are the tokens that the final norm is for, where the last
    layer does not drop the others. `keep` gets the stream before the layers, number 0, and behind
    each.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        module: Decoder,
        compiler: LayerCompiler,
        start: Callable[[], tuple[Stream, Sequence[Batch]]],
        groups: Sequence[int],
        *,
        drops: bool,
        selects: Any = None,
        every_layer: bool = True,
        before_layer: Callable[[Stream, Batch], None] | None = None,
        keep: Callable[[int, Stream], None] | None = None,
    ) -> None:
        self._descriptor, self._module, self._start = descriptor, module, start
        self._groups, self._keep = groups, keep
        self._selects, self._before_layer = selects, before_layer
        self._functions = compiler.functions(descriptor, drops)
        blocks = single_blocks(len(self._functions))
        if not every_layer:
            # One of each function and group, as kernels are compiled for how their arguments are
            # aligned; the last layer stays the last.
            different = {
                (id(self._functions[block.first]), groups[block.first]): block for block in blocks
            }
            blocks = tuple(different.values())
        self.blocks = blocks

    def embed(self) -> Stream:
        """See `Execution`."""
        stream, self._batches = self._start()
        if self._keep is not None:
            self._keep(0, stream)
        return stream

    def layers(
        self, block: Block, stream: Stream, cache: Cache, rows: Rows | None
    ) -> tuple[Stream, Cache]:
        """See `Execution`."""
        index = block.first
        run, weights = self._functions[index], self._module.joined_weights[index]
        more = () if rows is None else rows
        batch = self._batches[self._groups[index]].of_layer(index)
        if self._before_layer is not None:
            self._before_layer(stream, batch)
        stream = Stream(*run(weights, *stream, cache[index], batch, *more))
        if self._keep is not None:
            kind = self._descriptor.kind
            self._keep(index + 1, self._module.closed(kind, index, stream))
        return stream, cache

    def finish(self, stream: Stream) -> torch.Tensor:
        """See `Execution`."""
        if self._selects is not None:
            stream = Stream(stream.hidden[self._selects], stream.residual[self._selects])
        return self._module.finish(self._descriptor.kind, stream)
