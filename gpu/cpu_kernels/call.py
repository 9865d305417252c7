"""How the kernels are called: by address, for tensors that lie as they expect."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ...ops.declare import OpError
from ...ops.implement import Refusal, implement
from .build import library, supported

PROVIDER = "c"
DTYPES = ("float32", "bfloat16")
MAX_WIDTH = 16384
"""Entries of a row that a kernel keeps on its stack."""

cpu_kernel = partial(
    implement,
    provider=PROVIDER,
    framework="torch",
    supported=supported,
    opaque=True,
    row_invariant=True,
    preferred_on=("cpu",),
    only_on=("cpu",),
)
"""Registers the decorated function, which calls a kernel, as the implementation of an op that CPUs
prefer.
"""

AT, COUNT, NUMBER, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "rms_norm": (AT, AT, AT, COUNT, COUNT, NUMBER, INT),
    "add_rms_norm": (AT, AT, AT, COUNT, COUNT, NUMBER, INT),
    "silu_and_mul": (AT, AT, COUNT, COUNT, INT),
    "norm_rope_write_kv": (*(AT,) * 8, *(COUNT,) * 5, NUMBER, INT, INT),
    "paged_attention": (*(AT,) * 8, *(COUNT,) * 8, NUMBER, NUMBER, INT),
    "logits": (AT, AT, AT, COUNT, COUNT, COUNT, INT),
    "greedy_sample": (AT, COUNT, COUNT, AT, INT),
    "quantize_logits": (AT, COUNT, AT, INT),
    "sample": (*(AT,) * 10, COUNT, COUNT, INT, AT, INT),
}


@cache
def kernel(name: str, dtype: torch.dtype | None = None) -> Callable[..., int]:
    """The kernel of a name, for a dtype if it has several. Raises OpError."""
    found = library()
    if isinstance(found, Refusal):
        raise OpError(f"kernel {name!r}: {found}")
    suffix = "" if dtype is None else f"_{dtype}".replace("torch.", "")
    function = getattr(found, name + suffix)
    function.argtypes = SIGNATURES[name]
    return function


def dense(x: torch.Tensor) -> torch.Tensor:
    """x as a kernel reads it: without gaps, on the CPU. Raises OpError."""
    if not x.is_cpu:
        raise OpError(f"device: a kernel for CPUs got a tensor on {x.device}")
    return x if x.is_contiguous() else x.contiguous()


def address(x: torch.Tensor | None) -> int | None:
    """Where a tensor lies; None, the null pointer, for none."""
    return None if x is None else x.data_ptr()
