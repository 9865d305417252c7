"""The numpy namespace: the oracle. Run it on float64 inputs."""

from __future__ import annotations

from typing import Any

import array_api_compat.numpy as base
import numpy as np


class NumpyNamespace:
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
    def loop(start: int, stop: int, body: Any, state: Any) -> Any:
        """state after state = body(i, state) for each i."""
        for i in range(start, stop):
            state = body(i, state)
        return state
