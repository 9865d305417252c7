"""Norms, gated activations, logits and sampling by C kernels."""

from __future__ import annotations

import torch
from torch import get_num_threads

from ...ops.declare import Array, OpError, dtype_name
from .call import DTYPES, MAX_WIDTH, cpu_kernel, dense, kernel


def _takes_norm(x: Array, weight: Array, eps: float) -> bool:
    same = dtype_name(weight) == dtype_name(x)
    return same and dtype_name(x) in DTYPES and x.shape[-1] <= MAX_WIDTH


@cpu_kernel("rms_norm", supports_args=_takes_norm)
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """See the op."""
    x, weight = dense(x), dense(weight)
    out = torch.empty_like(x)
    n = x.shape[-1]
    run = kernel("rms_norm", x.dtype)
    run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // n, n, eps, get_num_threads())
    return out


def _takes_add_norm(x: Array, residual: Array, weight: Array, eps: float) -> bool:
    return _takes_norm(x, weight, eps) and dtype_name(residual) == dtype_name(x)


@cpu_kernel("fused_add_rms_norm", supports_args=_takes_add_norm, inplace=True)
def fused_add_rms_norm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """See the op: in place, x becomes the norm and residual the sum."""
    if not (x.is_contiguous() and residual.is_contiguous()):
        y, total = fused_add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
        return x.copy_(y), residual.copy_(total)
    x, residual, weight = dense(x), dense(residual), dense(weight)
    kernel("add_rms_norm", x.dtype)(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), *x.shape, eps, get_num_threads()
    )
    return x, residual


def _takes_gate(x: Array) -> bool:
    return dtype_name(x) in DTYPES


@cpu_kernel("silu_and_mul", supports_args=_takes_gate)
def silu_and_mul(x: Array) -> Array:
    """See the op."""
    x = dense(x)
    inter = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], inter), dtype=x.dtype)
    rows = out.numel() // inter
    kernel("silu_and_mul", x.dtype)(x.data_ptr(), out.data_ptr(), rows, inter, get_num_threads())
    return out


def _takes_logits(x: Array, weight: Array) -> bool:
    return dtype_name(x) == dtype_name(weight) == "bfloat16"


@cpu_kernel("logits", supports_args=_takes_logits)
def logits(x: Array, weight: Array) -> Array:
    """See the op. Of bfloat16 alone: torch would convert all of the weight in each call."""
    x, weight = dense(x), dense(weight)
    (rows, dim), vocab = x.shape, weight.shape[0]
    out = torch.empty((rows, vocab), dtype=torch.float32)
    run = kernel("logits", x.dtype)
    given = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    if run(*given, rows, dim, vocab, get_num_threads()):
        raise OpError(f"logits: no memory for {rows} rows of {dim} values")
    return out


def _takes_scores(logits: Array) -> bool:
    return dtype_name(logits) == "float32"


@cpu_kernel("greedy_sample", supports_args=_takes_scores)
def greedy_sample(logits: Array) -> Array:
    """See the op."""
    logits = dense(logits)
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    kernel("greedy_sample")(logits.data_ptr(), *logits.shape, out.data_ptr(), get_num_threads())
    return out


@cpu_kernel("quantize_logits", supports_args=_takes_scores)
def quantize_logits(logits: Array) -> Array:
    """See the op."""
    logits = dense(logits)
    out = torch.empty(logits.shape, dtype=torch.int32)
    kernel("quantize_logits")(logits.data_ptr(), logits.numel(), out.data_ptr(), get_num_threads())
    return out


def _takes_sample(
    logits: Array, scores: Array, position: Array, seed_lo: Array, seed_hi: Array, greedy: Array,
    scale: Array, top_k: Array, top_p: Array, min_p: Array, filtered: bool,
) -> bool:  # fmt: skip
    integers = scores, position, seed_lo, seed_hi, greedy, top_k, top_p, min_p
    floats = logits, scale
    return all(dtype_name(x) == "int32" for x in integers) and all(
        dtype_name(x) == "float32" for x in floats
    )


@cpu_kernel("sample", supports_args=_takes_sample)
def sample(
    logits: Array, scores: Array, position: Array, seed_lo: Array, seed_hi: Array, greedy: Array,
    scale: Array, top_k: Array, top_p: Array, min_p: Array, filtered: bool,
) -> Array:  # fmt: skip
    """See the op: limits are found in distances counted by their high bits, then by their low
    ones, and noise is made for words that may still be the one.
    """
    settings = position, seed_lo, seed_hi, greedy, scale, top_k, top_p, min_p
    arrays = [dense(x) for x in (logits, scores, *settings)]
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32)
    given = [x.data_ptr() for x in arrays]
    if kernel("sample")(*given, rows, vocab, int(filtered), out.data_ptr(), get_num_threads()):
        raise OpError(f"sample: no memory for a row of {vocab} words")
    return out
