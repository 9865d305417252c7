"""Rows that ranks send into each other's memory, for a few rows, whose time is that of the way.

Every value travels in a word of twice its size, whose other half is the number of the exchange. A
reader looks at its own memory until all words have that number: no flag, and nothing that waits
for writes to have arrived before a flag may say so. It is twice the bytes, and half the time where
there are few.

Each row has a count of its exchanges, which all ranks keep alike, as they make the same calls. Its
words lie in one of two places by turns. Two are enough: who has begun the exchange after the next
one of a row has heard from all that they have ended this one.
"""

import triton
import triton.language as tl

from .overlap import wait

SPINS = tl.constexpr(20_000_000)
"""How often a program looks for a peer that does not come: ten seconds or more. Whoever started
the ranks has ended them by then.
"""


@triton.jit
def _numbered(values, number):
    """Values of 16 or 32 bits as words of twice that, with the number above."""
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.uint16, bitcast=True).to(tl.uint32)
        return bits | (number.to(tl.uint32) << 16)
    else:
        bits = values.to(tl.uint32, bitcast=True).to(tl.uint64)
        return bits | (number.to(tl.uint32).to(tl.uint64) << 32)


@triton.jit
def _behind(words, number, mask, BITS: tl.constexpr):
    """1 if any of the words is of another exchange, else 0."""
    upper = number.to(tl.uint32).to(words.dtype) << BITS
    return tl.max((mask & (((words ^ upper) >> BITS) != 0)).to(tl.int32), 0)


@triton.jit
def _awaited(place, number, mask, dtype: tl.constexpr):
    """(values, 1 if they never came, else 0) of the words of exchange `number` at `place`."""
    bits: tl.constexpr = dtype.primitive_bitwidth
    words = tl.load(place, mask=mask, other=0, volatile=True)
    behind = _behind(words, number, mask, bits)
    spins = 0
    while (behind > 0) & (spins < SPINS):
        words = tl.load(place, mask=mask, other=0, volatile=True)
        behind = _behind(words, number, mask, bits)
        spins += 1
    if bits == 16:
        return words.to(tl.uint16).to(dtype, bitcast=True), behind
    else:
        return words.to(tl.uint32).to(dtype, bitcast=True), behind


@triton.jit
def _words_of(boxes, rank, BITS: tl.constexpr):
    """Where a rank's words lie. The compiler has to be told that wide loads may read them."""
    if BITS == 16:
        return tl.multiple_of(tl.load(boxes + rank).to(tl.pointer_type(tl.uint32)), 16)
    else:
        return tl.multiple_of(tl.load(boxes + rank).to(tl.pointer_type(tl.uint64)), 16)


@triton.jit(do_not_specialize=["max_rows"])
def reduce_few_kernel(
    x, residual, weight, boxes, counts, late, eps, x_stride, residual_stride, max_rows,
    N: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row). x becomes the sum of x over all ranks, in their order; with NORM the residual
    becomes its sum with that, and x the norm of it.

    `boxes` [rank] int64 are addresses on each rank, of [2, rank, max_rows, N] words. `counts`
    [max_rows] int32: how many sums each row had, which wraps. `late` [1] int32 is 1 once a peer did
    not come, after which all sums are NaN.
    """
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)
    mask = n < N
    dtype: tl.constexpr = x.dtype.element_ty
    bits: tl.constexpr = dtype.primitive_bitwidth
    if NORM:
        w = tl.load(weight + n, mask=mask, other=0.0).to(tl.float32)
    mine = _words_of(boxes, RANK, bits)
    wait(OVERLAP)
    number = tl.load(counts + row) + 1
    turn = (number & 1).to(tl.int64) * WORLD
    at_x = x + row.to(tl.int64) * x_stride + n
    own = tl.load(at_x, mask=mask, other=0.0)
    words = _numbered(own, number)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            place = ((turn + RANK) * max_rows + row) * N + n
            tl.store(_words_of(boxes, peer, bits) + place, words, mask=mask)
    at_residual = residual + row.to(tl.int64) * residual_stride + n
    before = tl.zeros([BLOCK_N], tl.float32)
    if NORM:
        before = tl.load(at_residual, mask=mask, other=0.0).to(tl.float32)
    missing = tl.load(late)
    total = tl.zeros([BLOCK_N], tl.float32)
    for peer in tl.static_range(WORLD):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            place = ((turn + peer) * max_rows + row) * N + n
            part, never = _awaited(mine + place, number, mask, dtype)
            missing = tl.maximum(missing, never)
            total += part.to(tl.float32)
    tl.store(counts + row, number)
    if missing > 0:
        tl.store(late, 1)
    total = tl.where(missing > 0, float("nan"), total)
    if NORM:
        # As the parts rounded to what a sum of its own would give.
        total = total.to(dtype).to(tl.float32) + before
        rounded = total.to(residual.dtype.element_ty)
        tl.store(at_residual, rounded, mask=mask)
        y = tl.where(mask, rounded.to(tl.float32), 0.0)
        scale = tl.rsqrt(tl.sum(y * y, 0) / N + eps)
        total = y * scale * w
    tl.store(at_x, total.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows", "words", "stride", "max_rows"])
def best_kernel(
    tokens, logits, out, boxes, counts, late, rows, words, stride, max_rows, RANK: tl.constexpr,
    WORLD: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (block of rows). out [row]: the most probable of all words, the first of equal ones,
    from that of each shard's words, `tokens` (-1: a logit was not finite), and this shard's
    `logits` [row words]. -1 if any shard says so, or does not come.

    `boxes`: addresses of [2, rank, value or word, max_rows] words; `counts` and `late` as above.
    """
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < rows
    mine = _words_of(boxes, RANK, 32)
    wait(OVERLAP)
    number = tl.load(counts + r, mask=mask, other=0) + 1
    turn = (number & 1) * WORLD
    token = tl.load(tokens + r, mask=mask, other=0)
    # A start runs this without the kernels that are not compiled yet: tokens are anything then.
    near = tl.minimum(tl.maximum(token, 0), words - 1)
    own = tl.load(logits + r.to(tl.int64) * stride + near, mask=mask, other=0.0)
    own_word = tl.where(token < 0, -1, token + RANK * words)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            there = _words_of(boxes, peer, 32) + (turn + RANK) * 2 * max_rows + r
            tl.store(there, _numbered(own, number), mask=mask)
            tl.store(there + max_rows, _numbered(own_word, number), mask=mask)
    missing = tl.load(late)
    best_value, best = own, own_word
    failed = own_word < 0
    for peer in tl.static_range(WORLD):
        value, word = own, own_word
        if peer != RANK:
            place = mine + (turn + peer) * 2 * max_rows + r
            value, no_value = _awaited(place, number, mask, tl.float32)
            word, no_word = _awaited(place + max_rows, number, mask, tl.int32)
            missing = tl.maximum(missing, tl.maximum(no_value, no_word))
            failed = failed | (word < 0)
        if peer == 0:
            best_value, best = value, word
        else:
            better = value > best_value
            best_value, best = tl.where(better, value, best_value), tl.where(better, word, best)
    tl.store(counts + r, number, mask=mask)
    if missing > 0:
        tl.store(late, 1)
    tl.store(out + r, tl.where(failed | (missing > 0), -1, best), mask=mask)
