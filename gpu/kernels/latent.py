"""Multi-head latent attention by Triton kernels: `latent_attention`, which reads nothing on the
host, and `norm_rope_write_latents` in one launch. The products of heads are cuBLAS's.

The kernels have run in Triton's interpreter and were compiled for NVIDIA chips, but on no GPU yet:
their blocks in `configs.json` are those whose registers and shared memory suffice, and were not
measured. Hopper's take up to 180 KiB, those for other chips less than the 99 KiB that all have.
"""

from __future__ import annotations

import torch
import triton

from ...ops.declare import Array, OpError, dtype_name
from .attention import splitting
from .decode_kernel import ALL, WHOLE
from .latent_kernels import (
    latent_decode_kernel,
    latent_merge_kernel,
    latent_prefill_kernel,
    norm_rope_write_latents_kernel,
)
from .launch import (
    FLOATS,
    INTERPRETED,
    config,
    hopper,
    overlap,
    power_of_2,
    triton_kernel,
)

MAX_RANK = 512
MAX_TURN = 64
WIDE = 64
"""Rows of a block on Hopper, whose tensor cores want as many. Elsewhere registers have no room for
the sums of more than NARROW.
"""
NARROW = 32
MOST_ROWS = {"float32": 16}


def _takes_heads(x: Array, weight: Array) -> bool:
    return dtype_name(x) in FLOATS and dtype_name(weight) == dtype_name(x)


def _takes_to(q: Array, weight: Array) -> bool:
    return _takes_heads(q, weight)


@triton_kernel("to_latents", supports_args=_takes_to)
def to_latents(q: Array, weight: Array) -> Array:
    """See the op: by cuBLAS, into rows of tokens."""
    return _by_head(q, weight)


def _takes_from(y: Array, weight: Array) -> bool:
    return _takes_heads(y, weight)


@triton_kernel("from_latents", supports_args=_takes_from)
def from_latents(y: Array, weight: Array) -> Array:
    """See the op: by cuBLAS, into rows of tokens, so that the heads of one lie side by side."""
    return _by_head(y, weight.transpose(1, 2))


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tok head k] by weight [head k n] -> [tok head n]."""
    shape = x.shape[0], x.shape[1], weight.shape[2]
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if x.is_cuda:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    elif not x.is_meta:  # sums of 16 bits are not in float32 in every library for CPUs
        wide = x.to(torch.float32).transpose(0, 1) @ weight.to(torch.float32)
        out.copy_(wide.transpose(0, 1))
    return out


def _takes_write(
    latents: Array,
    cache: Array,
    weight: Array,
    cos: Array,
    sin: Array,
    slots: Array,
    eps: float,
) -> bool:
    known = dtype_name(latents) in FLOATS and dtype_name(weight) in FLOATS
    return known and dtype_name(cache) == dtype_name(latents)


@triton_kernel(
    "norm_rope_write_latents", supports_args=_takes_write, inplace=True, row_invariant=True
)
def norm_rope_write_latents(
    latents: Array,
    cache: Array,
    weight: Array,
    cos: Array,
    sin: Array,
    slots: Array,
    eps: float,
) -> Array:
    """See the op: without the roundings between its finer ops. Rows with slot -1 write nothing."""
    _check("norm_rope_write_latents", cache)
    rank, half, turn = weight.shape[0], cos.shape[1], cache.shape[3] - weight.shape[0]
    latents, cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (latents, cos, sin))
    weight = weight if weight.stride(0) == 1 else weight.contiguous()
    norm_rope_write_latents_kernel[(latents.shape[0],)](
        latents, cache, weight, cos, sin, slots, eps, latents.stride(0), cos.stride(0),
        sin.stride(0), RANK=rank, TURN=turn, HALF=half, COPIES=cache.shape[2],
        BLOCK_D=power_of_2(rank), BLOCK_R=power_of_2(max(1, half)),
        BLOCK_REST=power_of_2(max(1, turn - 2 * half)),
        num_warps=config("norm_rope_write_latents")["warps"], **overlap(),
    )  # fmt: skip
    return cache


def _takes_attention(
    q: Array,
    rotated: Array,
    cache: Array,
    page_table: Array,
    query_start: Array,
    kv_lens: Array,
    counts: Array,
    scale: float,
    max_query_len: int,
) -> bool:
    alike = dtype_name(q) == dtype_name(rotated) == dtype_name(cache)
    fits = q.shape[2] <= MAX_RANK and rotated.shape[2] <= MAX_TURN
    return dtype_name(q) in FLOATS and alike and fits


@triton_kernel("latent_attention", supports_args=_takes_attention)
def latent_attention(
    q: Array,
    rotated: Array,
    cache: Array,
    page_table: Array,
    query_start: Array,
    kv_lens: Array,
    counts: Array,
    scale: float,
    max_query_len: int,
) -> Array:
    """See the op. Scores and softmax in float32, weights not normalised and rounded to q's dtype,
    one rounding.
    """
    _check("latent_attention", cache)
    q, rotated = (x if x.stride(2) == 1 else x.contiguous() for x in (q, rotated))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    mixed = max_query_len > 1
    _decode(q, rotated, cache, page_table, kv_lens, counts, out, float(scale), mixed)
    if mixed:
        tensors = q, rotated, cache, page_table, query_start, kv_lens, counts, out
        _prefill(*tensors, float(scale))
    return out


def _shape(q: torch.Tensor, rotated: torch.Tensor, cache: torch.Tensor) -> dict[str, int]:
    return {
        "HEADS": q.shape[1],
        "RANK": q.shape[2],
        "TURN": rotated.shape[2],
        "ROW": cache.shape[2] * cache.shape[3],
        "PAGE": cache.shape[1],
        "BLOCK_D": power_of_2(q.shape[2], 16),
        "BLOCK_T": power_of_2(rotated.shape[2], 16),
    }


def _strides(q: torch.Tensor, rotated: torch.Tensor, table: torch.Tensor) -> tuple[int, ...]:
    of_rotated = rotated.stride(0), rotated.stride(1)
    return q.stride(0), q.stride(1), *of_rotated, table.stride(0)


def most_rows(dtype: str) -> int:
    """Rows of a block, at most."""
    return MOST_ROWS.get(dtype, WIDE if hopper() or INTERPRETED else NARROW)


def setting_of(kernel: str, dtype: str, rows: int) -> dict[str, int]:
    """The launch configuration for blocks of so many rows, or of float32."""
    if dtype == "float32":
        return config(kernel, dtype)
    return config(kernel, *([f"{rows}/hopper"] if hopper() else []), str(rows))


def _decode(
    q: torch.Tensor, rotated: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor,
    kv_lens: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, scale: float, mixed: bool,
) -> None:  # fmt: skip
    shape, requests, dtype = _shape(q, rotated, cache), kv_lens.shape[0], dtype_name(q)
    tokens = min(q.shape[0], requests) if mixed else q.shape[0]
    heads, size = shape["HEADS"], shape["BLOCK_D"]
    rows = min(most_rows(dtype), power_of_2(heads, 16))
    setting, blocks = setting_of("latent_decode", dtype, rows), triton.cdiv(heads, rows)
    slots = page_table.shape[1] * shape["PAGE"]
    split, wanted, parts = splitting(tokens, blocks, slots, 0, setting)
    sums = marks = splits = out
    if split != WHOLE.value:
        sums = torch.empty(parts * heads * size, dtype=torch.float32, device=q.device)
        marks = torch.empty(parts * heads * 2, dtype=torch.float32, device=q.device)
        splits = torch.empty(tokens * 2, dtype=torch.int32, device=q.device)
    latent_decode_kernel[(blocks, parts)](
        q, rotated, cache, page_table, kv_lens, counts, out, sums, marks, splits, scale,
        *_strides(q, rotated, page_table), wanted, tokens, requests,
        MIXED=mixed, LEAST=setting["chunk"], MOST=setting["most"], BLOCK_H=rows,
        BLOCK_N=setting["block_n"],
        BLOCK_R=power_of_2(requests, 2) if split == ALL.value else 2, STAGES=setting["stages"],
        SPLIT=split, num_warps=setting["warps"], **shape, **overlap(),
    )  # fmt: skip
    if split == WHOLE.value:
        return
    merge = config("latent_merge")
    each = 1 if tokens * heads < merge["many"] else merge["rows"]
    latent_merge_kernel[(tokens, triton.cdiv(heads, each))](
        sums, marks, splits, counts, out, MIXED=mixed, HEADS=heads, RANK=shape["RANK"],
        BLOCK_D=size, ROWS=each, PARTS=merge["loads"] // each, num_warps=merge["warps"],
        **overlap(),
    )  # fmt: skip


def _prefill(
    q: torch.Tensor, rotated: torch.Tensor, cache: torch.Tensor, page_table: torch.Tensor,
    query_start: torch.Tensor, kv_lens: torch.Tensor, counts: torch.Tensor, out: torch.Tensor,
    scale: float,
) -> None:  # fmt: skip
    shape, tokens, requests = _shape(q, rotated, cache), q.shape[0], kv_lens.shape[0]
    rows = most_rows(dtype_name(q))
    setting = setting_of("latent_prefill", dtype_name(q), rows)
    blocks = triton.cdiv(tokens * shape["HEADS"], rows) + requests
    latent_prefill_kernel[(blocks,)](
        q, rotated, cache, page_table, query_start, kv_lens, counts, out, scale,
        *_strides(q, rotated, page_table), tokens, requests, BLOCK_M=rows,
        BLOCK_N=setting["block_n"], BLOCK_R=power_of_2(requests + 1), STAGES=setting["stages"],
        num_warps=setting["warps"], **shape, **overlap(),
    )  # fmt: skip


def _check(op: str, cache: torch.Tensor) -> None:
    if not cache.is_contiguous():
        raise OpError(f"{op}: cache of shape {tuple(cache.shape)} must be contiguous")
