"""The op `norm_rope_write_kv` on NVIDIA GPUs: one launch in place of the norms, the rotation and
the KV write.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ...ops.declare import Array
from ...ops.implement import implement
from .launch import FLOATS, call, config, on_gpu, power_of_2

MOST_HEADS = 8
MAX_HEAD_SIZE = 256


def takes(
    qkv: Array, kv: Array, q_weight: Array | None, k_weight: Array | None, cos: Array, sin: Array,
    slots: Array,
    eps: float, k_scale: Array | None = None, v_scale: Array | None = None, v_norm: bool = False,
    norm_behind: bool = False,
) -> bool:  # fmt: skip
    """What the kernel is for: whole heads rotated, the model's dtype in the cache, norms before
    the rotation and none of v.
    """
    size = kv.shape[3]
    return (
        not v_norm
        and not norm_behind
        and size == 2 * cos.shape[1] <= MAX_HEAD_SIZE
        and kv.dtype == qkv.dtype
        and qkv.dtype.name in FLOATS
    )


def write(
    qkv: jax.Array, kv: jax.Array, q_weight: jax.Array | None, k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array, slots: jax.Array, eps: float, interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The op; the cache is written in place."""
    tokens, size, kv_heads = qkv.shape[0], kv.shape[3], kv.shape[2] // 2
    heads = qkv.shape[1] // size - 2 * kv_heads
    # A block holds heads of q, of k or of v alone.
    block = gcd(heads, kv_heads, MOST_HEADS)
    normed = q_weight is not None, k_weight is not None
    kernel = partial(_write, heads, kv_heads, size, block, eps, normed)

    def norm_rope_write(*refs: Any) -> None:
        kernel(*refs)

    none = jnp.zeros(1, qkv.dtype)
    weights = none if q_weight is None else q_weight, none if k_weight is None else k_weight
    rows = kv.reshape(-1, size)
    out = (
        jax.ShapeDtypeStruct((tokens, heads, size), qkv.dtype),
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
    )
    grid = (tokens, (heads + 2 * kv_heads) // block)
    setting = config("norm_rope_write", qkv.dtype.name)
    run = call(norm_rope_write, grid, out, setting, interpret, input_output_aliases={1: 1})
    q, rows = run(qkv.reshape(tokens, heads + 2 * kv_heads, size), rows, *weights, cos, sin, slots)
    return q, rows.reshape(kv.shape)


def _write(
    heads: int, kv_heads: int, size: int, block: int, eps: float, normed: tuple[bool, bool],
    qkv: Any, rows: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, slots: Any, q: Any,
    out: Any,
) -> None:  # fmt: skip
    t, half = pl.program_id(0), size // 2
    head = pl.program_id(1) * block + jnp.arange(block)
    r = jnp.arange(power_of_2(half))
    lanes = (r < half)[None, :] & (head >= 0)[:, None]
    first = pl.program_id(1) * block
    is_q, is_k = first < heads, (first >= heads) & (first < heads + kv_heads)

    def take(at: jax.Array) -> jax.Array:
        return plgpu.load(qkv.at[t, head[:, None], at[None, :]], mask=lanes, other=0.0).astype(
            jnp.float32
        )

    def weight(ref: Any, at: jax.Array) -> jax.Array:
        return plgpu.load(ref.at[at], mask=r < half, other=0.0).astype(jnp.float32)

    a, b = take(r), take(r + half)
    scale = jax.lax.rsqrt(((a * a).sum(1) + (b * b).sum(1)) / size + eps)[:, None]
    for has, here, ref in zip(normed, (is_q, is_k), (q_weight, k_weight), strict=True):
        if has:
            a, b = (
                # Rounded as the norm rounds, before the rotation.
                jnp.where(
                    here,
                    (x * scale * weight(ref, at)[None, :]).astype(qkv.dtype).astype(jnp.float32),
                    x,
                )
                for x, at in ((a, r), (b, r + half))
            )
    c, s = (plgpu.load(ref.at[t, r], mask=r < half, other=0.0)[None, :] for ref in (cos, sin))
    turned = is_q | is_k
    a, b = jnp.where(turned, a * c - b * s, a), jnp.where(turned, b * c + a * s, b)
    slot = slots[t]
    entry = jnp.where(is_k, 2 * (head - heads), 2 * (head - heads - kv_heads) + 1)
    row = (slot * (2 * kv_heads) + entry)[:, None]
    written = lanes & ~is_q & (slot >= 0)
    for x, at in ((a, r), (b, r + half)):
        plgpu.store(q.at[t, head[:, None], at[None, :]], x.astype(q.dtype), mask=lanes & is_q)
        plgpu.store(out.at[row, at[None, :]], x.astype(out.dtype), mask=written)


@implement(
    "norm_rope_write_kv",
    provider="pallas_triton",
    framework="jax",
    supported=on_gpu,
    supports_args=takes,
    preferred_on=("cuda",),
)
def norm_rope_write_kv(
    qkv: Array, kv: Array, q_weight: Array | None, k_weight: Array | None, cos: Array, sin: Array,
    slots: Array,
    eps: float, k_scale: Array | None = None, v_scale: Array | None = None, v_norm: bool = False,
    norm_behind: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """See the op."""
    return write(qkv, kv, q_weight, k_weight, cos, sin, slots, eps, False)
