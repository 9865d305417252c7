"""The numpy namespace: the oracle. Run it on float64 inputs."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.numpy as base
import ml_dtypes
import numpy as np

from .eager import EagerLoop

ERF = np.vectorize(math.erf, otypes=[np.float64])


class NumpyNamespace(EagerLoop):
    """Array API functions of numpy and the extra words of this package."""

    name = "numpy"

    def __getattr__(self, name: str) -> Any:
        return getattr(base, name)

    @staticmethod
    def accumulate(x: np.ndarray) -> np.ndarray:
        """x in its accumulation dtype."""
        return x if x.dtype == np.float64 else x.astype(np.float32)

    def linear_accumulated(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """x [..., k] by w [n, k] in the accumulation dtype."""
        return self.accumulate(x) @ self.accumulate(w).T

    def linear(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """x [..., k] by w [n, k] plus bias, rounded once."""
        y = self.linear_accumulated(x, w)
        return (y if bias is None else y + self.accumulate(bias)).astype(x.dtype)

    def head_linear(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """x [tok head k] by w [head n k], rounded once: [tok head n]."""
        heads = self.accumulate(x).swapaxes(0, 1), self.accumulate(w).swapaxes(1, 2)
        return np.matmul(*heads).swapaxes(0, 1).astype(x.dtype)

    @staticmethod
    def rsqrt(x: np.ndarray) -> np.ndarray:
        """1 / sqrt(x)."""
        return 1.0 / np.sqrt(x)

    @staticmethod
    def to_int(x: np.ndarray) -> np.ndarray:
        """The nearest int32, ties to even."""
        return np.rint(x).astype(np.int32)

    @staticmethod
    def count_tokens(ids: np.ndarray, size: int) -> np.ndarray:
        """How often each id occurs in each row."""
        counts = np.zeros((ids.shape[0], size), np.int32)
        row, column = np.nonzero(ids >= 0)
        np.add.at(counts, (row, ids[row, column]), 1)
        return counts

    @staticmethod
    def add_at(x: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
        """x plus values at ids of each row."""
        x = x.copy()
        row, column = np.nonzero(ids >= 0)
        np.add.at(x, (row, ids[row, column]), values[row, column])
        return x

    @staticmethod
    def top(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k largest and their indices, ties by the lower index."""
        ids = np.argsort(-x, axis=-1, kind="stable")[..., :k]
        return np.take_along_axis(x, ids, -1), ids.astype(np.int32)

    @staticmethod
    def erf(x: np.ndarray) -> np.ndarray:
        """The error function."""
        return ERF(x).astype(x.dtype)

    @staticmethod
    def linear_int32(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """x [tok k] int8 by w [n k] int8, exact: sums are below 2^53."""
        return (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.int32)

    @staticmethod
    def float_dtype(name: str) -> Any:
        """The dtype of that name."""
        return np.dtype(getattr(ml_dtypes, name, name))

    @staticmethod
    def bits(x: np.ndarray) -> np.ndarray:
        """float32 as int32 of the same bits."""
        return x.view(np.int32)

    @staticmethod
    def from_bits(x: np.ndarray) -> np.ndarray:
        """int32 as float32 of the same bits."""
        return x.view(np.float32)
