"""The sampler's definition for requests of a step: which token it takes from which logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...ops.declare import REGISTRY
from ...ops.namespaces import namespace
from ...shared.sampling_encoding import has_filters
from ...shared.step import StepInput, sampling_layout

FIELDS = ("position", "seed_lo", "seed_hi", "greedy", "scale", "top_k", "top_p", "min_p")
"""Of a request, in the order in which the op `sample` takes them."""


def sampling_field(step: StepInput, name: str) -> np.ndarray:
    """A field of the sampling parameters of a step, [R]."""
    return sampling_layout(step.descriptor.requests).view(step.sampling, name)


def sampled_rows(step: StepInput) -> Iterator[tuple[int, int]]:
    """(request, row) of the tokens that a step samples from: the last of each request that gets
    one. Not by `sample_index`, which may be what is wrong.
    """
    ends, kept = step.field("query_start")[1:], sampling_field(step, "sample_rows")
    for request in range(int(step.field("counts")[1])):
        if kept[request] < step.shape.max_rows:
            yield request, int(ends[request]) - 1


def chooser_of(step: StepInput, request: int) -> Callable[[np.ndarray], np.ndarray]:
    """What takes the tokens [row] for a request without processors, given logits [row vocab]."""
    values = {name: sampling_field(step, name)[request] for name in FIELDS}

    def choose(logits: np.ndarray) -> np.ndarray:
        return sample(logits, REGISTRY["quantize_logits"].reference(XP, logits), values)

    return choose


XP = namespace("numpy")


def sample(logits: np.ndarray, scores: Any, values: dict[str, Any]) -> np.ndarray:
    """The tokens [row] of the op `sample`, with the same parameters `values` for all rows."""
    count = len(logits)
    columns = {
        name: np.full(count, values[name], np.float32 if name == "scale" else np.int32)
        for name in FIELDS
    }
    # In numpy they take most of the time, also where nobody asks for them.
    filtered = not values["greedy"] and has_filters(values)
    tokens: np.ndarray = REGISTRY["sample"].reference(
        XP, logits, scores, *columns.values(), filtered
    )
    return tokens
