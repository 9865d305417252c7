"""What this device does at most, by measurement: the copy and the matrix product that figures
are held against.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from ..shared.config import DeviceInfo
from ..shared.limits import Limits
from .recording import DTYPES

COPY_BYTES = 1 << 30
MATRIX = 8192
REPEATS = 10


def measure_limits(device: DeviceInfo, dtype: str) -> Limits:
    """Measure for a second. Call it while nothing else is on the device; what it allocates is
    freed.
    """
    if device.platform != "cuda":
        return Limits(
            None,
            None,
            "not measured on a CPU: its cores and caches are shared, so no rate is a limit",
        )
    with torch.cuda.device(device.index):  # None: whichever is current
        copy, product = (
            2 * COPY_BYTES / _seconds(_copy()),
            2 * MATRIX**3 / _seconds(_product(DTYPES[dtype])),
        )
        torch.cuda.empty_cache()
    return Limits(
        copy,
        product,
        f"copy of {COPY_BYTES >> 20} MiB, {dtype} product of {MATRIX}x{MATRIX} matrices",
    )


def _copy() -> Callable[[], object]:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(MATRIX, MATRIX, dtype=dtype, device="cuda") for _ in range(2))
    return lambda: torch.mm(a, b)


def _seconds(work: Callable[[], object]) -> float:
    """Median time on the device of one call."""
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
