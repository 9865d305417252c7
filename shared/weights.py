"""Where weights come from: a checkpoint, read part by part, or a seeded integer hash, the same on every backend."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ..ops.reference.sampling import hash_tokens
from .checkpoint import Checkpoint
from .models.table import Parameter, ParameterTable, expected_tensors

DUMMY_STD = 0.02


def read_parameter(checkpoint: Checkpoint, parameter: Parameter, layer: int) -> np.ndarray:
    """One parameter of one layer in the checkpoint's dtype, its parts stacked."""
    parts = [checkpoint.read(key) for key in parameter.keys(layer)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)


def parameters_to_load(table: ParameterTable, num_layers: int) -> Iterator[tuple[Parameter, int]]:
    """Every (parameter, layer) of a model; layer 0 for what exists once."""
    for parameter in table.values():
        for layer in range(num_layers if parameter.layered else 1):
            yield parameter, layer


def check_checkpoint(checkpoint: Checkpoint, table: ParameterTable, num_layers: int) -> None:
    """Raise CheckpointError unless every tensor is there with the right shape."""
    checkpoint.check(expected_tensors(table, num_layers))


def dummy_parameter(xp: Any, parameter: Parameter, layer: int, seed: int, index: Any) -> Any:
    """Random float32 weights of one layer, flat: `index` is arange(size) int32 in the framework of `xp`.

    Uniform with standard deviation 0.02 (norms are 1), from 24 bits of an integer hash and one float32 product: bitwise
    the same on every backend.
    """
    if parameter.init == "ones":
        return xp.astype(index * 0 + 1, xp.float32)
    digest = hashlib.blake2b(parameter.name.encode(), digest_size=4).digest()
    name = int.from_bytes(digest, "little", signed=True)
    zero = index[:1] * 0  # what is the same for all elements is hashed once
    bits = hash_tokens(xp, index, zero + layer, zero + name, zero + seed_word(seed))
    centred = xp.astype((bits >> 7) - (1 << 23), xp.float32)
    return centred * float(np.float32(DUMMY_STD * 3**0.5 / (1 << 23)))


def dummy_size(parameter: Parameter) -> int:
    """Elements of one layer's parameter."""
    return prod(parameter.shape)


def seed_word(seed: int) -> int:
    """An int32 from a seed of any size."""
    return int(np.array([seed & 0xFFFFFFFF], np.uint32).view(np.int32)[0])
