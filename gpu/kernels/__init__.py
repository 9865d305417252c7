"""Triton kernels as implementations of ops: provider "triton". Importing this registers them, where Triton is there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

PROVIDER = "triton"
PREFERRED: tuple[str, ...] = ()
"""The ops whose kernels plans for a CUDA device try first."""

if find_spec("triton") is not None:
    from . import launch

    if launch.INTERPRETED:
        from .interpreter import repair

        repair()
    from . import attention, cache, gemv, rows  # noqa: F401

    PREFERRED = (
        *("paged_attention", "norm_rope_write_kv", "write_kv", "rms_norm", "fused_add_rms_norm", "silu_and_mul"),
        *("linear", "logits", "greedy_sample"),
    )


def preferred(priorities: Mapping[str, tuple[str, ...]], platform: str) -> Mapping[str, tuple[str, ...]]:
    """The user's priorities and, for a CUDA device, the kernels after them."""
    if platform != "cuda":
        return priorities
    return {**priorities, **{op: (*priorities.get(op, ()), PROVIDER) for op in PREFERRED}}
