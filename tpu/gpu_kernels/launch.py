"""Launch configurations and small helpers of the GPU kernels."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ...ops.namespaces.jax_ import ALGORITHMS

LOG2_E = 1.4426950408889634
PROCESSORS = 132
"""Multiprocessors that the split of long requests is made for: those of an H100 or H200. XLA
does not say how many.
"""
LOWEST = float("-inf")
FLOATS = ("float32", "bfloat16", "float16")


@cache
def config(kernel: str, dtype: str) -> dict[str, int]:
    """The launch configuration of a kernel, for the dtype if it has one of its own."""
    table = json.loads(Path(__file__).with_name("launch.json").read_text(encoding="utf-8"))
    return dict(table.get(f"{kernel}/{dtype}", table[kernel]))


def on_gpu() -> bool:
    """Whether programs run on an NVIDIA GPU from Ampere on."""
    device = jax.devices()[0]
    return device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) >= 8.0


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of 2 that is at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def cdiv(a: Any, b: int) -> Any:
    """a / b rounded up, for numbers that are not negative."""
    return jax.lax.div(a + (b - 1), jnp.int32(b)) if isinstance(a, jax.Array) else -(-a // b)


def product(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """a [m k] by b, whose axis `contract` has length k, in float32."""
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(
        a, b, dims, precision=ALGORITHMS[a.dtype.name], preferred_element_type=jnp.float32
    )


def zero_of(ref: Any) -> int | float:
    """What a masked load gives: a Python number, which takes the dtype of the array."""
    return 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0


def head_scales(
    k_scale: jax.Array | None, v_scale: jax.Array | None, heads: int
) -> tuple[jax.Array, ...]:
    """Scales of K and V [heads] as inputs of a kernel; none where neither is given."""
    if k_scale is None and v_scale is None:
        return ()
    ones = jnp.ones(heads, jnp.float32)
    return tuple(ones if x is None else x.astype(jnp.float32) for x in (k_scale, v_scale))


def call(
    kernel: Any,
    grid: tuple[int, ...],
    out: Any,
    setting: dict[str, int],
    interpret: bool,
    **more: Any,
) -> Any:
    """`pallas_call` on whole arrays through Triton."""
    parameters = plgpu.CompilerParams(num_warps=setting["warps"], num_stages=setting["stages"])
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out,
        compiler_params=parameters,
        interpret=interpret,
        name=kernel.__name__,
        **more,
    )
