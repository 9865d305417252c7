"""Steps as a whole by the exact reference, or by one whose inputs are a little off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...shared.models.config import ModelConfig
from ...shared.step import StepInput
from .reference import Reference, State, total
from .subject import HostWeights
from .taps import Tracer


class _Kept(Reference):
    """Keeps the streams behind its layers."""

    streams: list[np.ndarray]

    def layer(self, index: int, weights: Mapping[str, np.ndarray], state: State) -> State:
        state = super().layer(index, weights, state)
        self.streams.append(total(state))
        return state


def run_whole(
    model: ModelConfig, tables: tuple[np.ndarray, np.ndarray], weights: HostWeights,
    start: Sequence[np.ndarray], steps: Sequence[StepInput], tracer: Tracer | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Run `steps` from the caches `start`, with a tracer such as Jitter. Of the last step, the
    streams [tok dim] behind each layer, and last the logits [tok vocab].
    """
    reference = _Kept(model, tables, exact=True, tracer=tracer)
    top, caches = weights.top(), list(start)
    for step in steps:
        reference.streams = []
        reference.begin(step)
        rows, caches = reference.run(top, weights.layer, caches)
    return [*reference.streams, reference.head(top, rows)]
