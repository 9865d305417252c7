"""Triton kernels as implementations of ops: provider "triton". Importing this registers them, where Triton is there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from ...ops.declare import REGISTRY

PROVIDER = "triton"
PREFERRED: tuple[str, ...] = ()
"""The ops whose kernels plans for a CUDA device try first."""

if find_spec("triton") is not None:
    from . import launch

    if launch.INTERPRETED:
        from .interpreter import repair

        repair()
    from . import attention, cache, gemv, rows, sampling  # noqa: F401

    PREFERRED = (
        *("paged_attention", "norm_rope_write_kv", "write_kv", "rms_norm", "fused_add_rms_norm", "silu_and_mul"),
        *("linear", "logits", "gated_mlp", "greedy_sample", "quantize_logits", "penalties", "sample"),
    )


def preferred(priorities: Mapping[str, tuple[str, ...]], platform: str) -> Mapping[str, tuple[str, ...]]:
    """The user's priorities and, for a CUDA device, the kernels after them.

    Not that of a coarse op one of whose finer ops the user has chosen: it would not run.
    """
    if platform != "cuda":
        return priorities
    ours = [op for op in PREFERRED if not priorities.keys() & set(REGISTRY[op].composition)]
    return {**priorities, **{op: (*priorities.get(op, ()), PROVIDER) for op in ours}}
