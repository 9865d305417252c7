"""What this device does at most, by measurement: the copy and the matrix product that figures
are held against.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from ..ops.namespaces import namespace
from ..shared.config import DeviceInfo
from ..shared.limits import Limits
from .platforms import local_devices

COPY_BYTES = 1 << 30
MATRIX = 8192
CALLS = 8
REPEATS = 5


def measure_limits(device: DeviceInfo, dtype: str) -> Limits:
    """Measure for a second. Call it while nothing else is on the device; what it allocates is
    freed.
    """
    if device.platform == "cpu":
        return Limits(
            None,
            None,
            "not measured on a CPU: its cores and caches are shared, so no rate is a limit",
        )
    kind = jnp.dtype(dtype)
    # the product that the ops use, at the precision that they ask for
    linear = namespace("jax").linear_accumulated
    with jax.default_device(local_devices(device.platform)[device.index or 0]):
        words = jnp.zeros(COPY_BYTES // 4, jnp.int32)
        copy = 2 * COPY_BYTES / _seconds(jax.jit(lambda x: x + 1), words)
        del words
        product = (
            2
            * MATRIX**3
            / _seconds(jax.jit(lambda x: linear(x, x)), jnp.ones((MATRIX, MATRIX), kind))
        )
    return Limits(
        copy,
        product,
        f"x + 1 on {COPY_BYTES >> 20} MiB, {dtype} product of {MATRIX}x{MATRIX} matrices",
    )


def _seconds(work: Any, x: jax.Array) -> float:
    """Median time of one call, several calls under way at a time so that the host is not
    measured.
    """
    jax.block_until_ready(work(x))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = None
        for _ in range(CALLS):
            result = work(x)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times)
