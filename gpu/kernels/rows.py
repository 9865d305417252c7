"""Norms, sums, gated activations and greedy sampling by Triton kernels."""

from __future__ import annotations

import torch
import triton

from ...ops.declare import Array, dtype_name
from .counters import COUNTERS, counters
from .launch import FLOATS, config, overlap, power_of_2, processors, triton_kernel
from .row_kernels import (
    act_and_mul_kernel,
    add_gated_kernel,
    add_kernel,
    add_rms_norm_kernel,
    gate_by_best_kernel,
    gelu_gate_kernel,
    greedy_kernel,
    qk_mean_squares_kernel,
    relu2_kernel,
    rms_norm_kernel,
    rms_norm_pair_kernel,
    wide_qk_norm_kernel,
)

MAX_WIDTH = 16384
"""The widest row that one program holds."""


def _blocks(n: int, rows: int, setting: dict[str, int]) -> tuple[int, int]:
    """(rows, entries) of a program's block: several short rows, but none where there are not
    rows enough to share.
    """
    width = power_of_2(n)
    several = max(1, min(setting["entries"] // width, power_of_2(max(1, rows // processors()))))
    return several, width


def _warps(entries: int) -> int:
    return min(8, max(1, entries // 512))


def _takes_norm(x: Array, weight: Array, eps: float) -> bool:
    return (
        dtype_name(x) in FLOATS
        and dtype_name(weight) in FLOATS
        and x.ndim in (2, 3)
        and x.shape[-1] <= MAX_WIDTH
    )


@triton_kernel("rms_norm", supports_args=_takes_norm)
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """See the op: one pass, float32 between."""
    x, weight = (y if y.stride(-1) == 1 else y.contiguous() for y in (x, weight))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = x.shape[1] if x.ndim == 3 else 1
    rows, n = x.numel() // x.shape[-1], x.shape[-1]
    several, width = _blocks(n, rows, config("rows"))
    rms_norm_kernel[(triton.cdiv(rows, several),)](
        x, weight, out, rows, eps, x.stride(0), x.stride(1) if x.ndim == 3 else 0,
        INNER=inner, N=n, ROWS=several, BLOCK_N=width, num_warps=_warps(several * width),
        **overlap(early=True),
    )  # fmt: skip
    return out


def _takes_norms(x: Array, first: Array, second: Array, eps: float) -> bool:
    return x.ndim == 2 and _takes_norm(x, first, eps) and dtype_name(second) in FLOATS


@triton_kernel("rms_norm_pair", supports_args=_takes_norms)
def rms_norm_pair(x: Array, first: Array, second: Array, eps: float) -> tuple[Array, Array]:
    """See the op: x is read once."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, n = x.shape
    out, other = (torch.empty((rows, n), dtype=x.dtype, device=x.device) for _ in range(2))
    several, width = _blocks(n, rows, config("rows"))
    rms_norm_pair_kernel[(triton.cdiv(rows, several),)](
        x, first.contiguous(), second.contiguous(), out, other, rows, eps, x.stride(0),
        N=n, ROWS=several, BLOCK_N=width, num_warps=_warps(several * width), **overlap(early=True),
    )  # fmt: skip
    return out, other


def takes_add_norm(x: Array, residual: Array, weight: Array, eps: float) -> bool:
    return _takes_norm(x, weight, eps) and x.ndim == 2 and dtype_name(residual) == dtype_name(x)


@triton_kernel("fused_add_rms_norm", supports_args=takes_add_norm, inplace=True)
def fused_add_rms_norm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """See the op: in place, x becomes the norm and residual the sum."""
    if x.stride(1) != 1 or residual.stride(1) != 1:
        y, total = fused_add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
        return x.copy_(y), residual.copy_(total)
    _add_and_norm(x, None, residual, weight, 0.0, eps, x, residual)
    return x, residual


def sum_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_add_rms_norm` into memory of its own."""
    x, residual = (y if y.stride(1) == 1 else y.contiguous() for y in (x, residual))
    out, sums = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _add_and_norm(x, None, residual, weight, 0.0, eps, out, sums)
    return out, sums


def _add_and_norm(
    x: torch.Tensor,
    x_weight: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    x_eps: float,
    eps: float,
    out: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """What `norm_add_rms_norm` gives goes to `out` and `sums`, which may be x and residual; without
    `x_weight` x is added as it is.
    """
    rows, n = x.shape
    several, width = _blocks(n, rows, config("rows"))
    weight = weight.contiguous()
    of_x = weight if x_weight is None else x_weight.contiguous()
    add_rms_norm_kernel[(triton.cdiv(rows, several),)](
        x, of_x, residual, weight, out, sums, rows, x_eps, eps, x.stride(0), residual.stride(0),
        out.stride(0), sums.stride(0), HAS_X_NORM=x_weight is not None, N=n, ROWS=several,
        BLOCK_N=width, num_warps=_warps(several * width), **overlap(early=True),
    )  # fmt: skip


def _takes_norm_add(
    x: Array,
    x_weight: Array,
    residual: Array,
    weight: Array,
    x_eps: float,
    eps: float,
) -> bool:
    return dtype_name(x_weight) in FLOATS and takes_add_norm(x, residual, weight, eps)


@triton_kernel("norm_add_rms_norm", supports_args=_takes_norm_add, inplace=True)
def norm_add_rms_norm(
    x: Array,
    x_weight: Array,
    residual: Array,
    weight: Array,
    x_eps: float,
    eps: float,
) -> tuple[Array, Array]:
    """See the op: in place, x becomes the norm and residual the sum."""
    if x.stride(1) != 1 or residual.stride(1) != 1:
        dense = x.contiguous(), x_weight, residual.contiguous(), weight
        y, total = norm_add_rms_norm(*dense, x_eps, eps)
        return x.copy_(y), residual.copy_(total)
    _add_and_norm(x, x_weight, residual, weight, x_eps, eps, x, residual)
    return x, residual


def _takes_add(x: Array, residual: Array) -> bool:
    return dtype_name(x) in FLOATS and dtype_name(residual) == dtype_name(x)


@triton_kernel("add", supports_args=_takes_add, row_invariant=True)
def add(x: Array, residual: Array) -> Array:
    """See the op: for layers without a norm that makes the sum on its way."""
    x, residual = (y if y.stride(1) == 1 else y.contiguous() for y in (x, residual))
    setting = config("silu_and_mul")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_kernel[(x.shape[0], triton.cdiv(x.shape[1], setting["block"]))](
        x, residual, out, x.stride(0), residual.stride(0),
        N=x.shape[1], BLOCK=setting["block"], num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
    return out


def _takes_wide_norm(qkv: Array, q_weight: Array, k_weight: Array, eps: float) -> bool:
    same = dtype_name(q_weight) in FLOATS and dtype_name(k_weight) in FLOATS
    widest = max(q_weight.shape[0], k_weight.shape[0])
    return same and dtype_name(qkv) in FLOATS and widest <= MAX_WIDTH


@triton_kernel("wide_qk_norm", supports_args=_takes_wide_norm)
def wide_qk_norm(qkv: Array, q_weight: Array, k_weight: Array, eps: float) -> Array:
    """See the op."""
    return _wide_qk_norm(qkv, None, q_weight, k_weight, eps)


def _takes_means(qkv: Array, means: Array, q_weight: Array, k_weight: Array, eps: float) -> bool:
    return _takes_wide_norm(qkv, q_weight, k_weight, eps)


@triton_kernel("norm_qk_by_means", supports_args=_takes_means)
def norm_qk_by_means(
    qkv: Array, means: Array, q_weight: Array, k_weight: Array, eps: float
) -> Array:
    """See the op."""
    return _wide_qk_norm(qkv, means.contiguous(), q_weight, k_weight, eps)


def _wide_qk_norm(
    qkv: torch.Tensor,
    means: torch.Tensor | None,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q, kv = q_weight.shape[0], k_weight.shape[0]
    out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    width = power_of_2(max(q, kv))
    wide_qk_norm_kernel[(qkv.shape[0], 3)](
        qkv, q_weight.contiguous(), k_weight.contiguous(), qkv if means is None else means, out,
        eps, qkv.stride(0), Q=q, KV=kv, GIVEN=means is not None, BLOCK=width,
        num_warps=_warps(width), **overlap(early=True),
    )  # fmt: skip
    return out


def _takes_squares(
    qkv: Array, q_weight: Array, k_weight: Array, q_entries: int, k_entries: int
) -> bool:
    return _takes_wide_norm(qkv, q_weight, k_weight, 0.0)


@triton_kernel("qk_mean_squares", supports_args=_takes_squares)
def qk_mean_squares(
    qkv: Array, q_weight: Array, k_weight: Array, q_entries: int, k_entries: int
) -> Array:
    """See the op."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q, kv = q_weight.shape[0], k_weight.shape[0]
    out = torch.empty((qkv.shape[0], 2), dtype=torch.float32, device=qkv.device)
    width = power_of_2(max(q, kv))
    qk_mean_squares_kernel[(qkv.shape[0], 2)](
        qkv, out, q_entries, k_entries, qkv.stride(0),
        Q=q, KV=kv, BLOCK=width, num_warps=_warps(width), **overlap(early=True),
    )  # fmt: skip
    return out


def _takes_gate(x: Array) -> bool:
    return dtype_name(x) in FLOATS and x.ndim == 2


@triton_kernel("silu_and_mul", supports_args=_takes_gate, row_invariant=True)
def silu_and_mul(x: Array) -> Array:
    """See the op."""
    return _act_and_mul(x, gelu=False)


def _takes_gelu(x: Array, approximate: str) -> bool:
    return approximate == "tanh" and _takes_gate(x)


@triton_kernel("gelu_and_mul", supports_args=_takes_gelu, row_invariant=True)
def gelu_and_mul(x: Array, approximate: str) -> Array:
    """See the op: the gelu of tanh alone."""
    return _act_and_mul(x, gelu=True)


def _act_and_mul(x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    inter, setting = x.shape[1] // 2, config("silu_and_mul")
    out = torch.empty((x.shape[0], inter), dtype=x.dtype, device=x.device)
    act_and_mul_kernel[(x.shape[0], triton.cdiv(inter, setting["block"]))](
        x,
        out,
        x.stride(0),
        INTER=inter,
        GELU=gelu,
        BLOCK=setting["block"],
        num_warps=setting["warps"],
        **overlap(early=True),
    )
    return out


def _takes_gelu_gate(gate: Array, x: Array) -> bool:
    return dtype_name(gate) in FLOATS and dtype_name(x) == dtype_name(gate)


@triton_kernel("gelu_gate", supports_args=_takes_gelu_gate, row_invariant=True)
def gelu_gate(gate: Array, x: Array) -> Array:
    """See the op."""
    n, setting = gate.shape[-1], config("silu_and_mul")
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, x = (y.reshape(-1, n) for y in (gate, x))
    gate, x = (y if y.stride(1) == 1 else y.contiguous() for y in (gate, x))
    gelu_gate_kernel[(gate.shape[0], triton.cdiv(n, setting["block"]))](
        gate, x, out, gate.stride(0), x.stride(0), N=n, BLOCK=setting["block"],
        num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
    return out


def _takes_floats(x: Array) -> bool:
    return dtype_name(x) in FLOATS


@triton_kernel("relu2", supports_args=_takes_floats, row_invariant=True)
def relu2(x: Array) -> Array:
    """See the op."""
    n, setting = x.shape[-1], config("silu_and_mul")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x.reshape(-1, n)
    x = x if x.stride(1) == 1 else x.contiguous()
    relu2_kernel[(x.shape[0], triton.cdiv(n, setting["block"]))](
        x, out, x.stride(0), N=n, BLOCK=setting["block"], num_warps=setting["warps"],
        **overlap(early=True),
    )  # fmt: skip
    return out


def _takes_best(x: Array, logits: Array) -> bool:
    known = dtype_name(x) in FLOATS and dtype_name(logits) in FLOATS
    return known and logits.shape[1] <= MAX_WIDTH


@triton_kernel("gate_by_best", supports_args=_takes_best, row_invariant=True)
def gate_by_best(x: Array, logits: Array) -> Array:
    """See the op."""
    x, logits = (y if y.stride(1) == 1 else y.contiguous() for y in (x, logits))
    n, setting = x.shape[1], config("silu_and_mul")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gate_by_best_kernel[(x.shape[0], triton.cdiv(n, setting["block"]))](
        x, logits, out, x.stride(0), logits.stride(0), N=n, EXPERTS=logits.shape[1],
        BLOCK=setting["block"], BLOCK_E=power_of_2(logits.shape[1]), num_warps=setting["warps"],
        **overlap(early=True),
    )  # fmt: skip
    return out


def _takes_add_gated(x: Array, y: Array, gate: Array) -> bool:
    return dtype_name(x) in FLOATS and dtype_name(y) == dtype_name(x) and dtype_name(gate) in FLOATS


@triton_kernel("add_gated", supports_args=_takes_add_gated, row_invariant=True)
def add_gated(x: Array, y: Array, gate: Array) -> Array:
    """See the op."""
    x, y = (z if z.stride(1) == 1 else z.contiguous() for z in (x, y))
    n, setting = x.shape[1], config("silu_and_mul")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add_gated_kernel[(x.shape[0], triton.cdiv(n, setting["block"]))](
        x, y, gate, out, x.stride(0), y.stride(0), gate.stride(0), N=n, BLOCK=setting["block"],
        num_warps=setting["warps"], **overlap(early=True),
    )  # fmt: skip
    return out


def _takes_logits(logits: Array) -> bool:
    return dtype_name(logits) == "float32"


@triton_kernel("greedy_sample", supports_args=_takes_logits, row_invariant=True)
def greedy_sample(logits: Array) -> Array:
    """See the op: ties go to the lower id, in whatever parts a row is taken."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocab), setting = logits.shape, config("greedy_sample")
    most = triton.cdiv(vocab, setting["least"])
    parts = max(1, min(setting["programs"] * processors() // rows, most)) if rows <= COUNTERS else 1
    size = triton.cdiv(triton.cdiv(vocab, parts), setting["block"]) * setting["block"]
    parts = triton.cdiv(vocab, size)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows * parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows * parts, dtype=torch.int32, device=logits.device)
    greedy_kernel[(rows, parts)](
        logits, out, values, ids, counters(logits.device), logits.stride(0), parts, size,
        VOCAB=vocab,
        BLOCK=setting["block"], BLOCK_PARTS=power_of_2(most), num_warps=setting["warps"],
        **overlap(early=True),
    )  # fmt: skip
    return out
