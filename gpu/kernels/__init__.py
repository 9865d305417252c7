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
    from . import attention, cache, gemv, rows, sampling, scaling  # noqa: F401

    PREFERRED = (
        *("paged_attention", "norm_rope_write_kv", "write_kv", "rms_norm", "fused_add_rms_norm", "silu_and_mul"),
        *("linear", "logits", "gated_mlp", "greedy_sample", "quantize_logits", "penalties", "sample", "scale"),
    )


def preferred(platform: str) -> Mapping[str, tuple[str, ...]]:
    """The providers that a platform prefers, for plans."""
    return dict.fromkeys(PREFERRED, (PROVIDER,)) if platform == "cuda" else {}
