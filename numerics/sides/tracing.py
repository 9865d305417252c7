"""The calls that each program of a step makes, from a dry run of the reference, and the taps
that backends give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .reference import Reference
from .runners import Program, plan_of
from .subject import HostWeights
from .taps import Call, Declared, declare


def traced(
    reference: Reference, weights: HostWeights, caches: Sequence[np.ndarray]
) -> dict[Program, list[Call]]:
    """The calls of each program, from a dry run of the reference on the step that it was given.
    `caches` are those of each layer.
    """
    calls: dict[Program, list[Call]] = {}
    top, layers = weights.top(), reference.spec.layers
    hidden = reference.embed(top)
    calls["embed"] = reference.calls
    for kind in reference.spec.kinds:
        index = layers.index(kind)
        reference.layer(index, weights.layer(index), (hidden, hidden, caches[index]))
        calls[kind] = reference.calls
    rows = reference.finish(top, hidden, hidden)
    calls["finish"] = reference.calls
    reference.head(top, rows)
    calls["head"] = reference.calls
    return calls


def declare_programs(
    calls: Mapping[Program, list[Call]], plans: Any, kind: str, patterns: Sequence[str]
) -> dict[Program, tuple[Declared, ...]]:
    """The taps of each program of a backend for steps of a kind, from the reference's calls."""
    return {
        program: declare(found, plan_of(plans, kind, program), patterns)
        for program, found in calls.items()
    }
