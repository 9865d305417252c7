"""Where arrays live: the mesh, and the shardings of weights on it. Which entries a shard has:
`models/placement.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from ..shared.errors import ConfigError
from ..shared.models.placement import WHOLE_EXPERTS, Placement
from ..shared.models.table import Parameter
from .kernels.cache import LANES

AXES = ("dp", "tp")
"""Mesh axes. One process group holds one replica, so dp is 1; whoever runs several replicas runs
several engines.
"""

REPLICATED = P()
EMBEDDING = "embed"
"""The parameter whose rows are those of words."""
CACHE = P(None, None, "tp", None)


def make_mesh(devices: Sequence[Any], shards: int) -> Mesh:
    """A mesh over the first `shards` devices. Raises ConfigError if there are fewer."""
    if len(devices) < shards:
        raise ConfigError(f"tensor_parallel_size: got {shards}, there are {len(devices)} devices")
    grid = np.array(devices[:shards], object).reshape(1, shards)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_all_take_part(shards: int, whose: str, devices: int) -> None:
    """Raise ConfigError unless the mesh of `shards` is all the devices of several hosts: each
    runs every program.
    """
    if shards != devices:
        raise ConfigError(
            f"tensor_parallel_size: got {shards}; {whose} have {devices} devices, and all take part"
        )


def on(mesh: Mesh, spec: P = REPLICATED) -> NamedSharding:
    """The sharding of `spec` on `mesh`."""
    return NamedSharding(mesh, spec)


def partition_of_samples(rows: int, words: int, shards: int) -> P | None:
    """How logits [row vocab] lie when they are sampled: rows are dealt out, or, if there are fewer
    than shards, whole on each. None if they stay as the head gives them: a vocabulary that does
    not divide is whole on each shard, and more rows may not divide.
    """
    if shards == 1 or words % shards:
        return None
    if rows % shards == 0:
        return P("tp")
    return REPLICATED if rows < shards else None


def constrained(values: Any, mesh: Mesh, spec: P) -> Any:
    """A tree of values of a program, each of which lies as `spec` says."""
    return jax.lax.with_sharding_constraint(values, on(mesh, spec))


def partition(placement: Placement, layered: bool) -> P:
    """The partition of a parameter, stacked over layers if it is layered."""
    axes: list[str | None] = [None] * len(placement.shape)
    if placement.axis is not None:
        axes[placement.axis] = "tp"
    while axes and axes[-1] is None:
        axes.pop()
    return P(*([None] if layered and axes else []), *axes)


def as_read(parameter: Parameter, placement: Placement, sharding: Sharding) -> Sharding | Format:
    """How a parameter lies: embeddings and the weights of experts in rows, scales and zeros of
    experts with these rows along lanes, as gathers and kernels read them. They would get a copy of
    all of it in each step.
    """
    dims = (*(1,) * parameter.layered, *placement.shape)
    if parameter.name == EMBEDDING:
        return lying_in_rows(sharding, *dims)
    if parameter.axes[0] != WHOLE_EXPERTS:
        return sharding
    of = parameter.piece_of
    if of is None or of.piece == "values":
        return lying_in_rows(sharding, *dims)
    return _lying(sharding, *range(len(dims) - 2), len(dims) - 1, len(dims) - 2)


def lying_in_rows(sharding: Sharding, *dims: int) -> Sharding | Format:
    """The sharding, with row-major memory where a TPU would lay an array of `dims` out otherwise:
    its rows are no whole registers, and columns that are need no padding.
    """
    if dims[-1] % LANES == 0:
        return sharding
    return _lying(sharding, *range(len(dims)))


def _lying(sharding: Sharding, *order: int) -> Sharding | Format:
    """The sharding, on TPUs with dimensions in memory in this order."""
    (device, *_) = sharding.device_set
    if device.platform != "tpu":
        return sharding
    return Format(Layout(major_to_minor=order), sharding)
