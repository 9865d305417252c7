"""How much of a weight [n k] the kernels of products bring into vector memory at a time: whole rows
of it, so that a product has one step. By arithmetic alone: nothing here was timed on a TPU.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from .cache import LANES

BLOCK = 4 << 20
"""Bytes of a block of a weight. Two of them are there at a time, so that half of the 16 MiB of a v4
is left for rows and results.
"""
SPARE = 4 << 20
"""Bytes that the compiler may use besides what the kernels say they need."""


def lanes_of(entries: int) -> int:
    """Entries as they lie in vector memory: registers of 128 lanes."""
    return -(-entries // LANES) * LANES


def columns_at_once(n: int, row_bytes: int) -> int:
    """How many of the n rows of a weight, which are columns of the result, are in a block: all, or
    whole registers of columns, as even as they can be.
    """
    most = max(BLOCK // row_bytes // LANES, 1) * LANES
    if n <= most:
        return n
    parts = -(-n // most)
    return -(-n // parts // LANES) * LANES


def in_memory(stack: jax.Array, interpret: Any) -> jax.Array:
    """A stack of all layers as a kernel's argument. XLA brings one that fits into vector memory
    there before the call: all layers, in each of them.
    """
    if interpret or len(stack) == 1:
        return stack
    kept: jax.Array = pltpu.with_memory_space_constraint(stack, pltpu.HBM)
    return kept
