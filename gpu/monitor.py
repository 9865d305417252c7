"""Counts compilations in this process: graphs of Dynamo, code of Inductor, kernels and
autotuning of Triton.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

_lock = threading.Lock()
_triton_kernels = 0
_watching = False


def watch_triton() -> None:
    """Count the kernels that Triton compiles from now on; several calls do what one does."""
    global _watching
    try:
        from triton import knobs
    except ImportError:  # no Triton, or one older than 3.4, which has no hook
        return
    with _lock:
        if _watching:
            return
        _watching = True
    others = knobs.runtime.jit_post_compile_hook

    def count(*args: Any, **kwargs: Any) -> Any:
        global _triton_kernels
        _triton_kernels += 1
        return others(*args, **kwargs) if others is not None else None

    knobs.runtime.jit_post_compile_hook = count


def count_late(execute: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's `execute`, which adds what is compiled in the process while it runs to the
    worker's `num_late`.

    Only then: another engine that starts, or the user's own code, compiles too.
    """

    @wraps(execute)
    def counted(worker: Any, step: Any) -> Any:
        before = total_compilations()
        try:
            return execute(worker, step)
        finally:
            worker.num_late += total_compilations() - before

    return counted


def total_compilations() -> int:
    """How much was compiled so far in this process."""
    return sum(compilations().values())


def compilations() -> dict[str, int]:
    """How much was compiled so far in this process, by what."""
    # Importing Dynamo takes seconds; where nobody has, it has compiled nothing.
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = dynamo.counters if dynamo is not None else {}
    inductor = counters.get("inductor", {})
    caches = ("fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass")
    return {
        "dynamo": int(counters.get("stats", {}).get("unique_graphs", 0)),
        "inductor": sum(int(inductor.get(name, 0)) for name in caches),
        "triton": _triton_kernels,
        "autotune": int(inductor.get("select_algorithm_autotune", 0)),
    }
