"""Steps as a whole by the exact reference, or by one whose inputs are a little off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...shared.step import StepInput
from .reference import Reference, total
from .subject import HostWeights


def run_whole(
    reference: Reference, weights: HostWeights, start: Sequence[np.ndarray],
    steps: Sequence[StepInput],
) -> list[np.ndarray]:  # fmt: skip
    """Run `steps` from the caches `start` by a reference, whose tracer may be a Jitter. Of the last
    step, the streams [tok dim] behind each layer, and last the logits [tok vocab].
    """
    top, caches = weights.top(), list(start)
    for step in steps:
        streams: list[np.ndarray] = []
        reference.begin(step)
        keep = lambda state, streams=streams: streams.append(total(state))  # noqa: E731
        rows, caches = reference.run(top, weights.layer, caches, keep)
    return [*streams, reference.head(top, rows)]
