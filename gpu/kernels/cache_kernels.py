"""Kernels that write the KV cache `[page slot 2*kvhead hdim]`, whose entries 2h and 2h+1 of a
slot are K and V.
"""

import triton
import triton.language as tl

from .arithmetic import stored
from .overlap import wait


@triton.jit
def _inverse(scales, head, mask):
    """1 / scale of heads, 1 where there is none."""
    return tl.div_rn(1.0, tl.load(scales + head, mask=mask, other=1.0))


@triton.jit(do_not_specialize_on_alignment=["slots", "k_scale", "v_scale"])
def write_kernel(
    kv, k, v, slots, k_scale, v_scale, k_token_stride, k_head_stride, v_token_stride,
    v_head_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token, block of KV heads). Tokens with slot -1 write nothing. SCALED: by `k_scale` and
    `v_scale` [HEADS].
    """
    wait(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    if slot < 0:
        return
    head, d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (d < SIZE)[None, :]
    key = tl.load(k + t * k_token_stride + head[:, None] * k_head_stride + d[None, :], mask=mask)
    value = tl.load(v + t * v_token_stride + head[:, None] * v_head_stride + d[None, :], mask=mask)
    place = kv + slot.to(tl.int64) * (2 * HEADS * SIZE) + head[:, None] * (2 * SIZE) + d[None, :]
    if KIND == "":
        tl.store(place, key, mask=mask)
        tl.store(place + SIZE, value, mask=mask)
    else:
        k_inverse, v_inverse = 1.0, 1.0
        if SCALED:
            k_inverse = _inverse(k_scale, head, head < HEADS)[:, None]
            v_inverse = _inverse(v_scale, head, head < HEADS)[:, None]
        tl.store(place, stored(key.to(tl.float32), k_inverse, KIND), mask=mask)
        tl.store(place + SIZE, stored(value.to(tl.float32), v_inverse, KIND), mask=mask)


@triton.jit
def _normed(x, weight, scale, normed, dtype: tl.constexpr):
    """x * scale * weight in rows that are normed, rounded as rms_norm rounds; the others as they
    are.
    """
    return tl.where(normed[:, None], (x * scale[:, None] * weight).to(dtype).to(tl.float32), x)


@triton.jit
def _weights(q_weight, k_weight, is_q, is_k, d, mask, HAS_Q: tl.constexpr, HAS_K: tl.constexpr):
    """The norm's weights of each row of a block of heads: those of q, those of k, or 1."""
    of_q = tl.full([d.shape[0]], 1.0, tl.float32)
    of_k = tl.full([d.shape[0]], 1.0, tl.float32)
    if HAS_Q:
        of_q = tl.load(q_weight + d, mask=mask, other=0.0).to(tl.float32)
    if HAS_K:
        of_k = tl.load(k_weight + d, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], of_q[None, :], tl.where(is_k[:, None], of_k[None, :], 1.0))


@triton.jit
def _rotated(a, b, cos, sin, r, mask, turned):
    """Both halves of what is rotated, of a block of heads; those that are not `turned` stay."""
    x = tl.load(cos + r, mask=mask, other=0.0)[None, :]
    y = tl.load(sin + r, mask=mask, other=0.0)[None, :]
    return tl.where(turned, a * x - b * y, a), tl.where(turned, b * x + a * y, b)


@triton.jit
def _put(x, q, kv, head, slot, d, mask, is_q, is_k, inverse,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write a block of heads: q to its place, k and v to their slot if there is one; `inverse` is
    1 / scale of each.
    """
    x = x.to(q.dtype.element_ty)
    tl.store(q + head[:, None] * SIZE + d[None, :], x, mask=mask & is_q[:, None])
    entry = tl.where(is_k, 2 * (head - HEADS), 2 * (head - HEADS - KV_HEADS) + 1)
    place = kv + slot.to(tl.int64) * (2 * KV_HEADS * SIZE) + entry[:, None] * SIZE + d[None, :]
    if KIND == "":
        tl.store(place, x, mask=mask & (slot >= 0) & ~is_q[:, None])
    else:
        tl.store(
            place, stored(x.to(tl.float32), inverse, KIND), mask=mask & (slot >= 0) & ~is_q[:, None]
        )


@triton.jit(do_not_specialize_on_alignment=["slots", "k_scale", "v_scale"])
def norm_rope_write_kernel(
    qkv, kv, q_weight, k_weight, cos, sin, slots, q, k_scale, v_scale, eps, qkv_stride,
    cos_stride, sin_stride,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr,
    BEHIND: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (token, block of heads of q, k and v). HALF of the rotated entries are in each half,
    then the rest. SCALED: K and V are stored by `k_scale` and `v_scale` [KV_HEADS].
    HAS_Q and HAS_K: q and k are normed with weights, BEHIND the rotation or before it; HAS_V: v
    without. With KV_HEADS 0 there is q alone, and no slots.
    """
    dtype: tl.constexpr = qkv.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    head, r = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_R)
    real, is_q, is_k = (
        head < HEADS + 2 * KV_HEADS,
        head < HEADS,
        (head >= HEADS) & (head < HEADS + KV_HEADS),
    )
    normed = (is_q & HAS_Q) | (is_k & HAS_K) | (real & ~is_q & ~is_k & HAS_V)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    first_weight = _weights(q_weight, k_weight, is_q, is_k, r, r < HALF, HAS_Q, HAS_K)
    second_weight = _weights(
        q_weight + HALF, k_weight + HALF, is_q, is_k, r, r < HALF, HAS_Q, HAS_K
    )
    rest_weight = _weights(q_weight, k_weight, is_q, is_k, rest, rest < SIZE, HAS_Q, HAS_K)
    inverse = 1.0
    if SCALED:
        is_v, own = real & ~is_q & ~is_k, head - HEADS
        inverse = tl.where(
            is_k, _inverse(k_scale, own, is_k), _inverse(v_scale, own - KV_HEADS, is_v)
        )[:, None]
    wait(OVERLAP)
    slot = (t * 0 - 1).to(tl.int32)
    if KV_HEADS > 0:
        slot = tl.load(slots + t)
    mask, rest_mask = real[:, None] & (r < HALF)[None, :], real[:, None] & (rest < SIZE)[None, :]
    source = qkv + t * qkv_stride + head[:, None] * SIZE
    a = tl.load(source + r[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + r[None, :], mask=mask, other=0.0).to(tl.float32)
    c = tl.zeros([BLOCK_H, BLOCK_REST], tl.float32)
    if 2 * HALF < SIZE:
        c = tl.load(source + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    turned = (is_q | is_k)[:, None]
    if BEHIND:
        a, b = _rotated(a, b, cos + t * cos_stride, sin + t * sin_stride, r, r < HALF, turned)
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    if HAS_Q or HAS_K or HAS_V:
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        scale = tl.rsqrt(square / SIZE + eps)
        a = _normed(a, first_weight, scale, normed, dtype)
        b = _normed(b, second_weight, scale, normed, dtype)
        if 2 * HALF < SIZE:
            c = _normed(c, rest_weight, scale, normed, dtype)
    if not BEHIND:
        a, b = _rotated(a, b, cos + t * cos_stride, sin + t * sin_stride, r, r < HALF, turned)
    q += t * (HEADS * SIZE)
    _put(
        a,
        q,
        kv,
        head,
        slot,
        r,
        mask,
        is_q,
        is_k,
        inverse,
        HEADS,
        KV_HEADS,
        SIZE,
        KIND,
    )
    _put(
        b,
        q,
        kv,
        head,
        slot,
        HALF + r,
        mask,
        is_q,
        is_k,
        inverse,
        HEADS,
        KV_HEADS,
        SIZE,
        KIND,
    )
    if 2 * HALF < SIZE:
        _put(
            c,
            q,
            kv,
            head,
            slot,
            rest,
            rest_mask,
            is_q,
            is_k,
            inverse,
            HEADS,
            KV_HEADS,
            SIZE,
            KIND,
        )
