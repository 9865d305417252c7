"""Kernels whose programs take whole rows: norms, gated activation, the largest logit."""

import triton
import triton.language as tl

from .arithmetic import activated, sigmoid
from .overlap import wait


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, weight, out, rows, eps, outer_stride, inner_stride, INNER: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of ROWS rows); row i lies at (i // INNER) outer_stride + (i % INNER)
    inner_stride.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (n < N)[None, :]
    place = (
        (row // INNER)[:, None] * outer_stride + (row % INNER)[:, None] * inner_stride + n[None, :]
    )
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    wait(OVERLAP)
    y = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, 1) / N + eps)
    y = y * scale[:, None] * w[None, :]
    tl.store(out + row[:, None] * N + n[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_pair_kernel(
    x, first, second, out, other, rows, eps, stride, N: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of ROWS rows): `out` and `other` are the norm of x with either weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (n < N)[None, :]
    a = tl.load(first + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(second + n, mask=n < N, other=0.0).to(tl.float32)
    wait(OVERLAP)
    y = tl.load(x + row[:, None] * stride + n[None, :], mask=mask, other=0.0).to(tl.float32)
    normed = y * tl.rsqrt(tl.sum(y * y, 1) / N + eps)[:, None]
    place = row[:, None] * N + n[None, :]
    tl.store(out + place, (normed * a[None, :]).to(out.dtype.element_ty), mask=mask)
    tl.store(other + place, (normed * b[None, :]).to(other.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x, x_weight, residual, weight, out, sums, rows, x_eps, eps, x_stride, residual_stride,
    out_stride, sums_stride, HAS_X_NORM: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of ROWS rows). `sums` is x + residual, `out` the norm of that; with HAS_X_NORM x
    is normed before. What is read again is read as it was rounded. `out` may be x, and `sums` the
    residual.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (n < N)[None, :]
    w = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    if HAS_X_NORM:
        of_x = tl.load(x_weight + n, mask=n < N, other=0.0).to(tl.float32)
    wait(OVERLAP)
    at_x = x + row[:, None] * x_stride + n[None, :]
    at_residual = residual + row[:, None] * residual_stride + n[None, :]
    total = tl.load(at_x, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(at_residual, mask=mask, other=0.0).to(tl.float32)
    if HAS_X_NORM:
        scale = tl.rsqrt(tl.sum(total * total, 1) / N + x_eps)
        normed = total * scale[:, None] * of_x[None, :]
        total = normed.to(x.dtype.element_ty).to(tl.float32)
    rounded = (total + before).to(residual.dtype.element_ty)
    tl.store(sums + row[:, None] * sums_stride + n[None, :], rounded, mask=mask)
    y = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, 1) / N + eps)
    y = (y * scale[:, None] * w[None, :]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * out_stride + n[None, :], y, mask=mask)


@triton.jit
def add_kernel(
    x, residual, out, x_stride, residual_stride, N: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of entries)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    wait(OVERLAP)
    total = tl.load(x + row * x_stride + n, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + row * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def act_and_mul_kernel(
    x, out, x_stride, INTER: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token, block of entries)."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < INTER
    wait(OVERLAP)
    gate = tl.load(x + t * x_stride + n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + t * x_stride + INTER + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + t * INTER + n, activated(gate, up, GELU).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gelu_gate_kernel(
    gate, x, out, gate_stride, x_stride, N: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of entries): out = gelu(gate) * x."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    wait(OVERLAP)
    a = tl.load(gate + row * gate_stride + n, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + row * x_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, activated(a, b, True).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_by_best_kernel(
    x, logits, out, x_stride, logits_stride, N: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of entries): out = x sigmoid(the largest logit of the row)."""
    row = tl.program_id(0).to(tl.int64)
    n, expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    mask, own = n < N, expert < EXPERTS
    wait(OVERLAP)
    all_of = logits + row * logits_stride + expert
    each = tl.load(all_of, mask=own, other=float("-inf")).to(tl.float32)
    g = tl.max(tl.where(each == each, each, float("-inf")), 0)
    share = tl.where(tl.max((each != each).to(tl.int32), 0) > 0, float("nan"), sigmoid(g))
    y = tl.load(x + row * x_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (share * y).to(out.dtype.element_ty), mask=mask)


@triton.jit
def relu2_kernel(x, out, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (row, block of entries): out = max(x, 0)^2."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    wait(OVERLAP)
    y = tl.load(x + row * x_stride + n, mask=mask, other=0.0).to(tl.float32)
    positive = tl.where(y < 0, 0.0, y)  # a comparison that keeps NaN
    tl.store(out + row * N + n, (positive * positive).to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_gated_kernel(
    x, y, gate, out, x_stride, y_stride, gate_stride, N: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of entries): out = x + sigmoid(gate of the row) y."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    wait(OVERLAP)
    g = tl.load(gate + row * gate_stride).to(tl.float32)
    share = sigmoid(g)
    a = tl.load(x + row * x_stride + n, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(y + row * y_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (a + share * b).to(out.dtype.element_ty), mask=mask)


@triton.jit
def wide_qk_norm_kernel(
    qkv, q_weight, k_weight, means, out, eps, qkv_stride, Q: tl.constexpr, KV: tl.constexpr,
    GIVEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token, q or k or v): v is copied. With GIVEN, the mean squares are `means` [tok 2]."""
    t, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, BLOCK)
    size = tl.where(which == 0, Q, KV)
    first = tl.where(which == 0, 0, tl.where(which == 1, Q, Q + KV))
    mask = n < size
    w = tl.load(q_weight + n, mask=mask & (which == 0), other=1.0).to(tl.float32)
    w *= tl.load(k_weight + n, mask=mask & (which == 1), other=1.0).to(tl.float32)
    wait(OVERLAP)
    y = tl.load(qkv + t * qkv_stride + first + n, mask=mask, other=0.0).to(tl.float32)
    if GIVEN:
        mean = tl.load(means + t * 2 + tl.minimum(which, 1))
    else:
        mean = tl.sum(y * y, 0) / size
    normed = y * tl.rsqrt(mean + eps) * w
    y = tl.where(which == 2, y, normed)
    place = out + t * (Q + 2 * KV) + first + n
    tl.store(place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def qk_mean_squares_kernel(
    qkv, out, q_entries, k_entries, qkv_stride, Q: tl.constexpr, KV: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token, q or k)."""
    t, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, BLOCK)
    mask = n < tl.where(which == 0, Q, KV)
    wait(OVERLAP)
    y = tl.load(qkv + t * qkv_stride + which * Q + n, mask=mask, other=0.0).to(tl.float32)
    entries = tl.where(which == 0, q_entries, k_entries).to(tl.float32)
    tl.store(out + t * 2 + which, tl.sum(y * y, 0) / entries)


@triton.jit(do_not_specialize=["parts", "size"])
def greedy_kernel(
    logits, out, values, ids, arrived, row_stride, parts, size, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, part of the words): the last program of a row to arrive takes the best of all
    parts.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, BLOCK)
    wait(OVERLAP)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK], VOCAB, tl.int32)
    for start in tl.range(part * size, tl.minimum(part * size + size, VOCAB), BLOCK):
        word = start + n
        x = tl.load(
            logits + row.to(tl.int64) * row_stride + word, mask=word < VOCAB, other=float("-inf")
        )
        # What is not finite beats everything, so that the row's winner says whether there was one.
        finite = (tl.abs(x) < float("inf")) | (word >= VOCAB)
        x = tl.where(finite, x, float("inf"))
        larger = (x > best) | ((best_id == VOCAB) & (word < VOCAB))
        best, best_id = tl.where(larger, x, best), tl.where(larger, word, best_id)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, best_id, VOCAB), 0)
    if parts == 1:
        tl.store(out + row, tl.where(top == float("inf"), -1, first))
    else:
        tl.store(values + row * parts + part, top)
        tl.store(ids + row * parts + part, first)
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + row, 0)
            p = tl.arange(0, BLOCK_PARTS)
            x = tl.load(
                values + row * parts + p, mask=p < parts, other=float("-inf"), cache_modifier=".cg"
            )
            word = tl.load(ids + row * parts + p, mask=p < parts, other=VOCAB, cache_modifier=".cg")
            top = tl.max(x, 0)
            first = tl.min(tl.where(x == top, word, VOCAB), 0)
            tl.store(out + row, tl.where(top == float("inf"), -1, first))
