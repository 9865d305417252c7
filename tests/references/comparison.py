"""A reference beside transformers: logits of one prompt, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from twinfer.ops.declare import Array

from .configurations import ROWS, prompt, transformers_logits, transformers_model
from .decoder import Cache, forward
from .maths import Maths
from .tensors import Built, Tensors

GATE = 1e-4
"""Relative L2 of the logits at the worst position, as in test_parity_transformers.py: transformers
computes in float32.
"""
LENGTH = 45
CHUNKS = 13, 20, 1, 1, 10
"""Across the borders of windows and chunks of 8, and of convolutions; single tokens among them."""
MATHS = Maths()


@cache
def oracle(name: str) -> tuple[Built, Array]:
    """(the reference, transformers' logits [tok vocab]) of a row."""
    row = ROWS[name]
    model = transformers_model(row)
    return row.build(model.config, Tensors.of(model)), transformers_logits(model, prompt(LENGTH))


def logits(built: Built, maths: Maths = MATHS, chunks: Sequence[int] = (LENGTH,)) -> Array:
    """Of the prompt in pieces, each of which finds the caches as the one before it left them."""
    caches: list[Cache] = [{} for _ in built.model.layers]
    ids, start, parts = prompt(LENGTH), 0, []
    for size in chunks:
        piece = ids[start : start + size]
        parts.append(forward(built.model, built.weights, piece, caches, start, maths))
        start += size
    return np.concatenate(parts)


def worst(got: Array, want: Array) -> float:
    """The relative L2 distance at the worst position."""
    distance = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    return float(distance.max())
