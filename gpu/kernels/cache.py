"""write_kv and norm_rope_write_kv by one Triton kernel each; norm_rope by the latter."""

from __future__ import annotations

import torch
import triton

from ...ops.declare import Array, OpError, dtype_name
from ...ops.implement import Refusal
from .cache_kernels import norm_rope_write_kernel, write_kernel
from .launch import (
    FLOATS,
    asks_ahead,
    carve_out,
    config,
    head_scales,
    kind_of,
    overlap,
    power_of_2,
    refused_cache,
    triton_kernel,
)

KINDS = {"int8": kind_of("int8"), "float8_e4m3fn": "fp8"}
"""What the kernels call a cache that is narrower than the model's dtype."""


def _takes_write(
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> bool | Refusal:
    return _takes_dtypes(k, kv)


def _takes_dtypes(x: Array, kv: Array) -> bool | Refusal:
    if dtype_name(x) not in FLOATS or dtype_name(kv) not in (dtype_name(x), *KINDS):
        return False
    refusal = refused_cache(kv)
    return True if refusal is None else refusal


@triton_kernel("write_kv", supports_args=_takes_write, inplace=True, row_invariant=True)
def write_kv(
    kv: Array,
    k: Array,
    v: Array,
    slots: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> Array:
    """Write the rows of K and V into their slots, in place; rows with slot -1 write nothing."""
    setting, heads, size = config("write_kv"), k.shape[1], k.shape[2]
    _check(kv)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    block = min(setting["block_h"], power_of_2(heads))
    scales = head_scales(k_scale, v_scale)
    write_kernel[(k.shape[0], triton.cdiv(heads, block))](
        kv, k, v, slots, *(scales or (kv, kv)), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1),
        HEADS=heads, SIZE=size, KIND=KINDS.get(dtype_name(kv), ""), SCALED=scales is not None,
        BLOCK_H=block, BLOCK_D=power_of_2(size),
        num_warps=setting["warps"], **overlap(),
    )  # fmt: skip
    return kv


def _takes_all(
    qkv: Array,
    kv: Array,
    q_weight: Array | None,
    k_weight: Array | None,
    cos: Array,
    sin: Array,
    slots: Array,
    eps: float,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    v_norm: bool = False,
    norm_behind: bool = False,
) -> bool | Refusal:
    weights = [x for x in (q_weight, k_weight) if x is not None]
    known = all(dtype_name(x) in FLOATS for x in weights)
    return known and _takes_dtypes(qkv, kv)


@triton_kernel("norm_rope_write_kv", supports_args=_takes_all, inplace=True, row_invariant=True)
def norm_rope_write_kv(
    qkv: Array,
    kv: Array,
    q_weight: Array | None,
    k_weight: Array | None,
    cos: Array,
    sin: Array,
    slots: Array,
    eps: float,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    v_norm: bool = False,
    norm_behind: bool = False,
) -> tuple[Array, Array]:
    """See the op: the roundings of its finer ops, none of their traffic. The cache is written in
    place.
    """
    size, kv_heads = kv.shape[3], kv.shape[2] // 2
    setting = config("norm_rope_write_kv", str(size))
    heads = qkv.shape[1] // size - 2 * kv_heads
    half = cos.shape[1]
    _check(kv)
    qkv, cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (qkv, cos, sin))
    q_weight, k_weight = (
        x if x is None or x.stride(0) == 1 else x.contiguous() for x in (q_weight, k_weight)
    )
    scales = head_scales(k_scale, v_scale)
    q = torch.empty((qkv.shape[0], heads, size), dtype=qkv.dtype, device=qkv.device)
    # Few tokens need many programs, many tokens large ones.
    block_h = setting["block_h" if qkv.shape[0] < setting["many"] else "many_h"]
    launched = norm_rope_write_kernel[(qkv.shape[0], triton.cdiv(heads + 2 * kv_heads, block_h))](
        qkv, kv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, cos,
        sin, slots, q,
        *(scales or (kv, kv)), eps, qkv.stride(0), cos.stride(0), sin.stride(0),
        HAS_Q=q_weight is not None, HAS_K=k_weight is not None, HAS_V=v_norm,
        BEHIND=norm_behind,
        HEADS=heads, KV_HEADS=kv_heads,
        SIZE=size, HALF=half,
        KIND=KINDS.get(dtype_name(kv), ""), SCALED=scales is not None, BLOCK_H=block_h,
        BLOCK_R=power_of_2(half),
        BLOCK_REST=power_of_2(max(1, size - 2 * half)), num_warps=setting["warps"],
        **overlap(early=asks_ahead(q, kv, qkv.shape[0], scales is not None)),
    )  # fmt: skip
    carve_out(launched, setting)
    return q, kv


def _takes_queries(q: Array, weight: Array | None, cos: Array, sin: Array, eps: float) -> bool:
    return dtype_name(q) in FLOATS and (weight is None or dtype_name(weight) in FLOATS)


@triton_kernel("norm_rope", supports_args=_takes_queries, row_invariant=True)
def norm_rope(q: Array, weight: Array | None, cos: Array, sin: Array, eps: float) -> Array:
    """See the op: the kernel of norm_rope_write_kv, for queries alone."""
    tokens, heads, size = q.shape
    setting, half, out = (
        config("norm_rope_write_kv"),
        cos.shape[1],
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
    )
    q, cos, sin = (
        x if x.stride(1) == 1 else x.contiguous() for x in (q.reshape(tokens, -1), cos, sin)
    )
    weight = weight if weight is None or weight.stride(0) == 1 else weight.contiguous()
    given = q if weight is None else weight
    block_h = setting["block_h" if tokens < setting["many"] else "many_h"]
    norm_rope_write_kernel[(tokens, triton.cdiv(heads, block_h))](
        q, q, given, given, cos, sin, q, out, q, q, eps, q.stride(0), cos.stride(0),
        sin.stride(0),
        HAS_Q=weight is not None, HAS_K=False, HAS_V=False, BEHIND=False, HEADS=heads,
        KV_HEADS=0, SIZE=size, HALF=half, KIND="", SCALED=False, BLOCK_H=block_h,
        BLOCK_R=power_of_2(half),
        BLOCK_REST=power_of_2(max(1, size - 2 * half)), num_warps=setting["warps"], **overlap(),
    )  # fmt: skip
    return out


def _check(kv: torch.Tensor) -> None:
    if not kv.is_contiguous():
        raise OpError(
            f"a KV cache of shape {tuple(kv.shape)} must be contiguous to be written in place"
        )
