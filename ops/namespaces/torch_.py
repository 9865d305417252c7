"""The torch namespace."""

from __future__ import annotations

from typing import Any

import array_api_compat.torch as base
import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F

from .eager import EagerLoop

TILE = 32
"""Entries of 16 bits that a processor's unit for products reads of a row at once."""


def from_numpy(x: np.ndarray) -> torch.Tensor:
    """A tensor of the same values; torch does not know numpy's bfloat16 and float8."""
    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(x)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """An array of the same values on the host; bfloat16 and float8 are those of ml_dtypes."""
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return np.asarray(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    if x.dtype == torch.float8_e4m3fn:
        return np.asarray(x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn))
    return np.asarray(x.numpy())


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """x [..., k] of 16 bits on a CPU with zeros between its rows, where they are no whole tiles.

    The units of some processors (AMX) read on into the next row, times 0: NaN there would be NaN
    here. Entries, shape and results are the same.
    """
    missing = -x.shape[-1] % TILE
    if not missing or x.dtype.itemsize != 2 or x.device.type != "cpu":
        return x
    return F.pad(x, (0, missing))[..., : x.shape[-1]]


class TorchNamespace(EagerLoop):
    """Array API functions of torch and the extra words of this package.

    float32 products are float32 (`torch.backends.*.allow_tf32` stays off: the worker sees to it),
    bfloat16 products accumulate in float32.
    """

    name = "torch"

    def __getattr__(self, name: str) -> Any:
        return getattr(base, name)

    @staticmethod
    def asarray(x: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        """x as a tensor. A number is filled in on the device: a copy from the host would wait
        for it.
        """
        if isinstance(x, (bool, int, float)):
            return torch.full((), x, dtype=dtype, device=device)
        return base.asarray(x, dtype=dtype, device=device)

    @staticmethod
    def take(x: torch.Tensor, indices: torch.Tensor, *, axis: int) -> torch.Tensor:
        """x at indices from 0 on. The Array API's, which may count from the end, takes three more
        launches.
        """
        return torch.index_select(x, axis, indices)

    @staticmethod
    def accumulate(x: torch.Tensor) -> torch.Tensor:
        """x in its accumulation dtype."""
        return x if x.dtype == torch.float64 else x.to(torch.float32)

    def linear_accumulated(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [..., k] by w [n, k] in the accumulation dtype."""
        if x.dtype in (torch.bfloat16, torch.float16) and x.is_cuda:
            return torch.mm(x, w.t(), out_dtype=torch.float32)
        return F.linear(self.accumulate(x), self.accumulate(w))

    @staticmethod
    def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., k] by w [n, k] plus bias, rounded once."""
        return F.linear(rows_apart(x), w, bias)

    def head_linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [tok head k] by w [head n k], rounded once: [tok head n]."""
        # On GPUs sums of 16 bits are in float32; on CPUs not in every library.
        wide = (lambda y: y) if x.is_cuda else self.accumulate
        by_head = torch.matmul(wide(x).transpose(0, 1), wide(w).mT)
        # As kernels give it: compilers take strides for what the reference has.
        return by_head.transpose(0, 1).to(x.dtype).contiguous()

    @staticmethod
    def rsqrt(x: torch.Tensor) -> torch.Tensor:
        """1 / sqrt(x)."""
        return torch.rsqrt(x)

    @staticmethod
    def sign(x: torch.Tensor) -> torch.Tensor:
        """-1, 0 or 1, and 0 for NaN: making it NaN takes three more operations."""
        return torch.sign(x)

    @staticmethod
    def to_int(x: torch.Tensor) -> torch.Tensor:
        """The nearest int32, ties to even."""
        return torch.round(x).to(torch.int32)

    @staticmethod
    def count_tokens(ids: torch.Tensor, size: int) -> torch.Tensor:
        """How often each id occurs in each row."""
        # One extra column takes the unused ids, so that the shape does not depend on the data.
        counts = torch.zeros((ids.shape[0], size + 1), dtype=torch.int32, device=ids.device)
        index = torch.where(ids < 0, size, ids).to(torch.int64)
        return counts.scatter_add_(1, index, torch.ones_like(ids))[:, :size]

    @staticmethod
    def add_at(x: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """x plus values at ids of each row."""
        wide = F.pad(x, (0, 1))
        index = torch.where(ids < 0, x.shape[1], ids).to(torch.int64)
        return wide.scatter_add_(1, index, values)[:, : x.shape[1]]

    @staticmethod
    def top(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest and their indices, ties by the lower index."""
        # topk leaves the order of ties open; a stable sort does not.
        values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :k], ids[..., :k].to(torch.int32)

    @staticmethod
    def erf(x: torch.Tensor) -> torch.Tensor:
        """The error function."""
        return torch.erf(x)

    @staticmethod
    def linear_int32(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [tok k] int8 by w [n k] int8, exact: sums are below 2^53. CUDA has no general
        integer product.
        """
        return F.linear(x.to(torch.float64), w.to(torch.float64)).to(torch.int32)

    @staticmethod
    def float_dtype(name: str) -> torch.dtype:
        """The dtype of that name."""
        return getattr(torch, name)

    @staticmethod
    def bits(x: torch.Tensor) -> torch.Tensor:
        """float32 as int32 of the same bits."""
        return x.view(torch.int32)

    @staticmethod
    def from_bits(x: torch.Tensor) -> torch.Tensor:
        """int32 as float32 of the same bits."""
        return x.view(torch.float32)
