"""Triton kernels as implementations of ops: provider "triton". Importing this registers them,
where Triton is there.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("triton") is not None:
    from . import launch
    from .parsing import parse_in_turn

    parse_in_turn()
    if launch.INTERPRETED:
        from .interpreter import repair

        repair()
    from . import (  # noqa: F401
        attention,
        cache,
        gemv,
        latent,
        moe,
        moe_narrow,
        narrow,
        narrow_mlp,
        reduce,
        rows,
        sampling,
        scaling,
    )
