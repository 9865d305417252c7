"""A worker on one of several GPUs: whatever it calls, the current CUDA device is its own.

torch, Triton and the CUDA driver allocate, launch and record on the current device, which belongs
to the thread and may be another engine's, or whatever the user has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch

from ..shared.config import DeviceInfo
from ..shared.worker import Worker

CALLS = (
    "load",
    "measure",
    "allocate_kv",
    "warm_up",
    "execute",
    "sample",
    "logits",
    "read_pages",
    "write_pages",
    "read_weights",
    "read_tables",
    "read_page_tables",
    "close",
)
"""What a worker does on its device. The other calls, and reading a step that was started, touch
none.
"""


def on_device(device: DeviceInfo, make: Callable[[], Worker]) -> Worker:
    """The worker that `make` returns. If the device has a number, it is made there and stays
    there.
    """
    if device.platform != "cuda" or device.index is None:
        return make()
    with torch.cuda.device(device.index):
        worker = make()
    return cast(Worker, OneDevice(worker, device.index))


class OneDevice:
    """A worker whose calls find its device current, and leave the caller's device as it was."""

    def __init__(self, worker: Worker, index: int) -> None:
        self._worker = worker
        for name in CALLS:
            setattr(self, name, _with_device(getattr(worker, name), index))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


def _with_device(call: Callable[..., Any], index: int) -> Callable[..., Any]:
    @wraps(call)
    def there(*arguments: Any) -> Any:
        with torch.cuda.device(index):
            return call(*arguments)

    return there
