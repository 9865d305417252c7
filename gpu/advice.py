"""What to lower when the device's memory is too small for a start: torch's own error names no
option of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ..shared.config import ResolvedConfig
from ..shared.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def weights(config: ResolvedConfig) -> str:
    """Advice where the weights do not fit."""
    return (
        f"dtype: got {config.dtype}, too little memory for the weights; take a smaller dtype "
        "or a smaller model"
    )


def steps(config: ResolvedConfig) -> str:
    """Advice where the largest steps, or the graphs, do not fit."""
    return (
        f"max_num_batched_tokens: got {config.max_num_batched_tokens}, with max_num_seqs "
        f"{config.max_num_seqs}, too "
        "little memory for the largest steps and the graphs; lower one of both, or leave them "
        "more "
        "memory by a lower "
        "memory_utilization, kv_cache_memory or num_pages"
    )


def cache(config: ResolvedConfig) -> str:
    """Advice where the KV cache does not fit."""
    names = "num_pages", "kv_cache_memory", "memory_utilization"
    name = next(name for name in names if getattr(config, name) is not None)
    return (
        f"{name}: got {getattr(config, name)}, too little memory for such a KV cache; lower {name}"
    )


def advise(advice: Callable[[ResolvedConfig], str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a phase of the worker's start: where torch finds no memory, a ConfigError with
    the advice is raised.
    """

    def decorate(phase: Callable[P, R]) -> Callable[P, R]:
        @wraps(phase)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return phase(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                worker: Any = args[0]
                free, total = (size / 1e9 for size in torch.cuda.mem_get_info())
                raise ConfigError(
                    f"{advice(worker.config)} ({free:.1f} of {total:.1f} GB are free)"
                ) from error

        return run

    return decorate
