"""Where arrays live: the mesh, and the shardings of weights on it. Which entries a shard has:
`models/placement.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def partition(placement: Placement, layered: bool) -> P:
    """The partition of a parameter, stacked over layers if it is layered."""
    axes: list[str | None] = [None] * len(placement.shape)
    if placement.axis is not None:
        axes[placement.axis] = "tp"
    while axes and axes[-1] is None:
        axes.pop()
    return P(*([None] if layered and axes else []), *axes)


def in_rows(parameter: Parameter, placement: Placement, sharding: Sharding) -> Sharding | Format:
    """How a parameter lies: the weights of experts in rows, as the kernel reads them, which would
    get a copy of all layers in each step.
    """
    if parameter.axes[0] != WHOLE_EXPERTS:
        return sharding
    return lying_in_rows(sharding, *(1,) * parameter.layered, *placement.shape)


def lying_in_rows(sharding: Sharding, *dims: int) -> Sharding | Format:
    """The sharding, with row-major memory where a TPU would lay an array of `dims` out otherwise:
    its rows are no whole registers, and columns that are need no padding.
    """
    (device, *_) = sharding.device_set
    if device.platform != "tpu" or dims[-1] % LANES == 0:
        return sharding
    return Format(Layout(major_to_minor=tuple(range(len(dims)))), sharding)
