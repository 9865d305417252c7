"""Puts weights on the device as programs want them: stacked by run of layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops.namespaces import namespace
from ..shared.checkpoint import Checkpoint
from ..shared.models.table import Parameter, ParameterTable
from ..shared.weights import check_checkpoint, dummy_parameter, dummy_size, read_parameter
from ..shared.worker import Progress

Segments = list[tuple[int, int, int]]


def load_weights(
    folder: str,
    load_format: str,
    table: ParameterTable,
    num_layers: int,
    segments: Segments,
    dtype: Any,
    seed: int,
    device: jax.Device,
    progress: Progress,
) -> dict[str, Any]:
    """The weights of a model as a tree (see `programs.Model`), in `dtype` on `device`. Raises CheckpointError."""
    checkpoint = None
    if load_format != "dummy":
        checkpoint = Checkpoint(folder)
        check_checkpoint(checkpoint, table, num_layers)

    def make(parameter: Parameter, first: int, last: int) -> jax.Array:
        if checkpoint is None:
            return _dummy(parameter, first, last, seed, dtype, device)
        stacked = np.empty((last - first, *parameter.shape), dtype)
        for layer in range(first, last):
            stacked[layer - first] = read_parameter(checkpoint, parameter, layer)
        return jax.device_put(stacked if parameter.layered else stacked[0], device)

    weights: dict[str, Any] = {"segments": [{} for _ in segments]}
    for done, parameter in enumerate(table.values()):
        if parameter.layered:
            for (first, last, _), segment in zip(segments, weights["segments"], strict=True):
                segment[parameter.name] = make(parameter, first, last)
        else:
            weights[parameter.name] = make(parameter, 0, 1)
        progress("weights", done + 1, len(table))
    return weights


def _dummy(parameter: Parameter, first: int, last: int, seed: int, dtype: Any, device: jax.Device) -> jax.Array:
    def one(layer: jax.Array) -> jax.Array:
        index = jnp.arange(dummy_size(parameter), dtype=jnp.int32)
        values = dummy_parameter(namespace("jax"), parameter, layer, seed, index)
        return values.astype(dtype).reshape(parameter.shape)

    def stack() -> jax.Array:
        if not parameter.layered:
            return one(jnp.int32(0))
        return jax.lax.map(one, jnp.arange(first, last, dtype=jnp.int32))

    with jax.default_device(device):
        return jax.jit(stack)()
