"""Counts compilations in this process: graphs of Dynamo, code of Inductor, kernels and autotuning of Triton."""

from __future__ import annotations

import threading
from typing import Any

from torch._dynamo.utils import counters

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


def compilations() -> dict[str, int]:
    """How much was compiled so far in this process, by what."""
    inductor = counters["inductor"]
    return {
        "dynamo": int(counters["stats"]["unique_graphs"]),
        "inductor": int(
            inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_hit"] + inductor["fxgraph_cache_bypass"]
        ),
        "triton": _triton_kernels,
        "autotune": int(inductor["select_algorithm_autotune"]),
    }
