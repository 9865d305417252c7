"""Whether a backend holds the checkpoint's weights, bit for bit."""

from __future__ import annotations

import numpy as np

from ..sides.runners import Runner
from ..sides.subject import HostWeights
from .diff import Diff


def check_weights(diff: Diff, side: str, runner: Runner, weights: HostWeights, layers: int) -> None:
    """Note in `diff` which weights of a side, outside of layers and in all `layers`, are missing
    or differ.
    """
    for layer in range(-1, layers):
        wanted = weights.top() if layer < 0 else weights.layer(layer)
        found = runner.weights(layer)
        for name, value in wanted.items():
            if name not in found or found[name].shape != value.shape:
                diff.missing.append(f"{side}: weight {name} of layer {layer}")
            elif not np.array_equal(_bits(found[name]), _bits(value)):
                where = f"layer.{layer}.{name}" if layer >= 0 else name
                share = float((_bits(found[name]) != _bits(value)).mean())
                diff.problems.append(
                    f"{side}: weights {where} differ in {share:.1%} of the elements"
                )


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)
