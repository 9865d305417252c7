"""Sampling by integers, as `ops/reference/sampling.py` defines it, bit for bit.

A row is split among programs. What one launch finds out about the parts of a row, each program of
the next launch adds up for itself: integers have no order, so nothing depends on who did it.
"""

import triton
import triton.language as tl

from .overlap import wait

ONE = tl.constexpr(1 << 16)
FAR = tl.constexpr(1 << 22)
MASKED = tl.constexpr(-(2**31) + 1)
LEAST = tl.constexpr(-(2**31))
"""Below every score: what entries hold that are no words."""
MAX_SCORE = tl.constexpr(8192.0 * 65536.0)
MAX_COUNT = tl.constexpr(4096)
FULL_WEIGHTS = tl.constexpr(1 << 18)
"""The largest vocabulary whose weights have 26 bits; those of a larger one have 25."""
SEEN = tl.constexpr(1 << 30)
"""The bit of a count that says that the word was in the history at all."""
NOT_FINITE = tl.constexpr(2**31 - 1)
"""Above every key of a word: the key of a word whose logit is not finite."""
LEVELS = tl.constexpr(6)
"""Launches that find a limit in [0, FAR], each by 15 thresholds: 19 low bits are left to find,
then 15, 11, 7, 3, 0.
"""
COLUMNS = tl.constexpr(16)
TOTAL = tl.constexpr(15)
"""The column behind those of the thresholds: the sum over all words that were kept, in the first
launch only.
"""


@triton.jit
def nearest(x):
    """The nearest integer to a float32, ties to even, as int32; its magnitude is below 2^31."""
    size = tl.abs(x)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size).to(tl.int32)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def quantized(x, factor):
    """x [float32] times factor in Q16, NaN as MASKED."""
    number = tl.where(x == x, x * factor, 0.0)
    number = tl.minimum(tl.maximum(number, -MAX_SCORE), MAX_SCORE)
    return tl.where(x == x, nearest(number), MASKED)


@triton.jit
def quantize_kernel(
    logits, scores, logits_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Grid (row, block of words)."""
    wait(OVERLAP)
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * logits_stride + word, mask=word < VOCAB, other=0.0)
    tl.store(scores + row * VOCAB + word, quantized(x, 65536.0), mask=word < VOCAB)


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["history", "prompt_len"])
def count_kernel(
    history,
    prompt_len,
    counts,
    length,
    history_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (row, block of the history): how often each word occurs in the output, and whether in
    the history at all.
    """
    wait(OVERLAP)
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(history + row * history_stride + place, mask=place < length, other=-1)
    counts += row * VOCAB + tl.maximum(word, 0)
    tl.atomic_or(counts, SEEN, mask=word >= 0, sem="relaxed")
    output = place >= tl.load(prompt_len + row)
    tl.atomic_add(counts, 1, mask=(word >= 0) & output, sem="relaxed")


@triton.jit
def _allowed(mask, word, real):
    return ((tl.load(mask + (word >> 5), mask=real, other=0) >> (word & 31)) & 1) != 0


@triton.jit(
    do_not_specialize_on_alignment=[
        "presence",
        "frequency",
        "repetition",
        "repetition_inverse",
        "mask",
    ]
)
def penalty_kernel(
    logits, counts, presence, frequency, repetition, repetition_inverse, mask, scores,
    logits_stride, mask_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of words): all but the bias."""
    wait(OVERLAP)
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = word < VOCAB
    x = tl.load(logits + row * logits_stride + word, mask=real, other=0.0)
    count = tl.load(counts + row * VOCAB + word, mask=real, other=0)
    seen, count = count != 0, tl.minimum(count & (SEEN - 1), MAX_COUNT)
    factor = tl.where(x > 0, tl.load(repetition_inverse + row), tl.load(repetition + row)) * 65536.0
    score = quantized(x, tl.where(seen, factor, 65536.0))
    taken = tl.load(frequency + row) * count + tl.where(count > 0, tl.load(presence + row), 0)
    score = tl.where(
        _allowed(mask + row * mask_stride, word, real) & (score != MASKED), score - taken, MASKED
    )
    tl.store(scores + row * VOCAB + word, score, mask=real)


@triton.jit(
    do_not_specialize=["length"], do_not_specialize_on_alignment=["bias_ids", "bias", "mask"]
)  # fmt: skip
def bias_kernel(
    logits, bias_ids, bias, mask, scores, length, logits_stride, ids_stride, bias_stride,
    mask_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, block of the bias): adds it to the words that are not masked."""
    wait(OVERLAP)
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bias_ids + row * ids_stride + place, mask=place < length, other=-1)
    value = tl.load(bias + row * bias_stride + place, mask=place < length, other=0)
    x = tl.load(logits + row * logits_stride + word, mask=word >= 0, other=0.0)
    real = (word >= 0) & (x == x) & _allowed(mask + row * mask_stride, word, word >= 0)
    tl.atomic_add(scores + row * VOCAB + word, value, mask=real, sem="relaxed")


@triton.jit
def _far(score, best, scale):
    """The distance of scores to the best one, in Q16 of log2 units."""
    gap = best - tl.maximum(score, best - (1 << 24))
    return nearest(tl.minimum(gap.to(tl.float32) * scale, 4194304.0))


@triton.jit
def _best(bests, parts, BLOCK_PARTS: tl.constexpr):
    """The largest score of a row."""
    p = tl.arange(0, BLOCK_PARTS)
    return tl.max(tl.load(bests + p, mask=p < parts, other=LEAST), 0)


@triton.jit(do_not_specialize=["parts", "size"])
def best_kernel(
    scores,
    bests,
    row_stride,
    parts,
    size,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (row, part of the words): the largest score of each part."""
    wait(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], LEAST, tl.int32)
    for start in tl.range(part * size, tl.minimum(part * size + size, VOCAB), BLOCK):
        word = start + tl.arange(0, BLOCK)
        best = tl.maximum(
            best, tl.load(scores + row * row_stride + word, mask=word < VOCAB, other=LEAST)
        )
    tl.store(bests + row * parts + part, tl.max(best, 0))


@triton.jit
def _horner(x, value, a):
    return ((value * x) >> 15) + a


@triton.jit
def exp2_negative(x):
    """2^-x in Q26 for x >= 0 in Q16."""
    fraction = (x & (ONE - 1)) >> 1
    bend = (fraction * ((1 << 15) - fraction)) >> 13
    curve = _horner(fraction, _horner(fraction, fraction * 0 + 449, -3049), 12656)
    power = ONE - fraction - ((curve * bend) >> 17)
    return tl.minimum(power << 10, (1 << 26) - 1) >> tl.minimum(x >> 16, 31)


@triton.jit
def _weights(far, VOCAB: tl.constexpr):
    """What words at distances `far` weigh in top-p."""
    weight = exp2_negative(far)
    if VOCAB > FULL_WEIGHTS:
        weight = weight >> 1
    return weight


@triton.jit
def _reduced(mass, drop):
    """A sum of weights in the 28 bits that the total leaves."""
    high, low = (mass >> 13).to(tl.int32), (mass & 8191).to(tl.int32)
    few, many = tl.minimum(drop, 13), tl.maximum(drop - 13, 0)
    return ((high >> many) << (13 - few)) | tl.where(drop < 13, low >> few, 0)


@triton.jit
def _enough(sums, total, wanted, MASS: tl.constexpr):
    """Which sums [8] reach what top-k (a number of words) or, with MASS, top-p (Q16) wants of
    `total`.
    """
    if MASS:
        high, drop = (total >> 13).to(tl.int32), 0
        for bit in tl.static_range(15, 31):
            drop += (high >= (1 << bit)).to(tl.int32)
        whole = _reduced(total, drop)
        least = (((whole >> 14) * wanted) >> 2) + (((whole & 16383) * wanted) >> 16)
        return _reduced(sums, drop) >= least
    else:
        return sums >= tl.minimum(total, wanted.to(tl.int64))


@triton.jit
def _bits_after(level):
    """The low bits of a limit that are open after a launch."""
    return tl.maximum(19 - 4 * level, 0)


@triton.jit
def _limit_before(sums, found, level, wanted, parts, MASS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """What the launches before `level` found: all smaller limits are not enough. Before LEVELS,
    this is the limit.
    """
    p, column = tl.arange(0, BLOCK_PARTS), tl.arange(0, COLUMNS)
    place = sums + ((level - 1) * parts + p[:, None]) * COLUMNS + column[None, :]
    each = tl.sum(tl.load(place, mask=(p < parts)[:, None] & (level > 0), other=0), 0)
    total = tl.sum(tl.load(sums + p * COLUMNS + TOTAL, mask=(p < parts) & (level > 0), other=0), 0)
    short = (column < TOTAL) & (_enough(each, total, wanted, MASS) == 0)
    steps = tl.sum(short.to(tl.int32), 0)
    return tl.load(found + level - 1, mask=level > 0, other=0) + (steps << _bits_after(level - 1))


@triton.jit
def _limit(sums, found, wanted, wants, row, parts, MASS: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """The largest distance that a row keeps."""
    limit = tl.full((), FAR, tl.int32)
    if wants:
        sums += row * (LEVELS * parts * COLUMNS)
        limit = _limit_before(sums, found + row * LEVELS, LEVELS, wanted, parts, MASS, BLOCK_PARTS)
    return limit


@triton.jit(
    do_not_specialize=["parts", "size", "level"],
    do_not_specialize_on_alignment=["greedy", "scale", "top_k", "top_p", "min_p"],
)
def narrow_kernel(
    scores, bests, k_sums, k_found, p_sums, p_found, greedy, scale, top_k, top_p, min_p, row_stride,
    parts, size, level,
    MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, part of the words): words (MASS: weights) within each threshold of `level`, for
    top-k (top-p).
    """
    wait(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    wants = (p < ONE) if MASS else (k > 0)
    if (wants == 0) | (tl.load(greedy + row) > 0):
        return
    most = tl.load(min_p + row)
    if MASS:
        most = tl.minimum(most, _limit(k_sums, k_found, k, k > 0, row, parts, False, BLOCK_PARTS))
    sums, found = (p_sums, p_found) if MASS else (k_sums, k_found)
    sums += row * (LEVELS * parts * COLUMNS)
    found += row * LEVELS
    base = _limit_before(sums, found, level, p if MASS else k, parts, MASS, BLOCK_PARTS)
    if part == 0:
        tl.store(found + level, base)
    column = tl.arange(0, COLUMNS)
    threshold = base + ((column + 1) << _bits_after(level)) - 1
    if level == 0:
        threshold = tl.where(column == TOTAL, FAR, threshold)
    else:
        most = tl.minimum(most, tl.max(threshold, 0))
    best, factor = _best(bests + row * parts, parts, BLOCK_PARTS), tl.load(scale + row)
    acc = tl.zeros([BLOCK, COLUMNS], tl.int64)
    for start in tl.range(part * size, tl.minimum(part * size + size, VOCAB), BLOCK):
        word = start + tl.arange(0, BLOCK)
        score = tl.load(scores + row * row_stride + word, mask=word < VOCAB, other=MASKED)
        far = _far(score, best, factor)
        keep = (score > MASKED) & (far <= most)
        # After the first launch most words of most rows are beyond what is still looked for.
        if tl.max(keep.to(tl.int32), 0) > 0:
            weight = tl.where(keep, _weights(far, VOCAB) if MASS else 1, 0)
            acc += tl.where(far[:, None] <= threshold[None, :], weight[:, None], 0)
    tl.store(sums + (level * parts + part) * COLUMNS + column, tl.sum(acc, 0))


@triton.jit
def _mix(x):
    x = (x ^ _shifted(x, 16)) * -0x7A143595
    x = (x ^ _shifted(x, 13)) * -0x3D4D51CB
    return x ^ _shifted(x, 16)


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (32 - BITS)) - 1)


@triton.jit
def _log2(x):
    """log2 of a positive int32 in Q16."""
    exponent, rest = x * 0, x
    for bits in tl.static_range(4, -1, -1):
        large = rest >= (1 << (1 << bits))
        exponent += tl.where(large, 1 << bits, 0)
        rest = tl.where(large, rest >> (1 << bits), rest)
    fraction = ((x << (30 - exponent)) & ((1 << 30) - 1)) >> 15
    bend = (fraction * ((1 << 15) - fraction)) >> 13
    curve = _horner(fraction, _horner(fraction, fraction * 0 + 1722, -6448), 12115)
    curve = _horner(fraction, _horner(fraction, curve, -18136), 29010)
    return (exponent << 16) + (fraction << 1) + ((curve * bend) >> 17)


@triton.jit
def gumbel_log2(bits):
    """-log2(-log2 u) in Q16 for u = (bits + 1/2) / 2^31."""
    near = bits >= (1 << 30)
    doubled = tl.where(near, 2 * ((2**31 - 1) - bits) + 1, 2 * bits + 1)
    distance = (32 << 16) - _log2(doubled)
    x = doubled >> 16
    smooth = _horner(x, _horner(x, x * 0 + 1699, 157), 5458)
    smooth = _horner(x, _horner(x, smooth, 23565), 34655)
    return tl.where(near, distance - smooth, (16 << 16) - _log2(distance))


@triton.jit(
    do_not_specialize=["parts", "size"],
    do_not_specialize_on_alignment=[
        "position",
        "seed_lo",
        "seed_hi",
        "greedy",
        "scale",
        "top_k",
        "top_p",
        "min_p",
    ],
)
def draw_kernel(
    logits, scores, bests, k_sums, k_found, p_sums, p_found, position, seed_lo, seed_hi, greedy,
    scale, top_k, top_p,
    min_p, keys, ids, arrived, out, logits_stride, row_stride, parts, size,
    FILTERED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, part of the words): the last program of a row to arrive takes the best of all
    parts.
    """
    wait(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, factor = _best(bests + row * parts, parts, BLOCK_PARTS), tl.load(scale + row)
    first_wins = tl.load(greedy + row) > 0
    most = tl.full((), FAR, tl.int32)
    if FILTERED:  # noqa: SIM102 (only this one is known to the compiler)
        if first_wins == 0:
            k, p = tl.load(top_k + row), tl.load(top_p + row)
            most = tl.minimum(
                tl.load(min_p + row),
                _limit(k_sums, k_found, k, k > 0, row, parts, False, BLOCK_PARTS),
            )
            most = tl.minimum(
                most, _limit(p_sums, p_found, p, p < ONE, row, parts, True, BLOCK_PARTS)
            )
    key = _mix(tl.load(seed_lo + row) ^ _mix(tl.load(position + row) * 0x3C6EF372 + 0x1B873593))
    other = _mix(tl.load(seed_hi + row) + key * 0x2C1B3C6D + 0x165667B1)
    top = tl.full([BLOCK], LEAST, tl.int32)
    top_word = tl.full([BLOCK], VOCAB, tl.int32)
    for start in tl.range(part * size, tl.minimum(part * size + size, VOCAB), BLOCK):
        word = start + tl.arange(0, BLOCK)
        real = word < VOCAB
        score = tl.load(scores + row * row_stride + word, mask=real, other=MASKED)
        x = tl.load(logits + row * logits_stride + word, mask=real, other=0.0)
        finite = tl.abs(x) < float("inf")
        if first_wins:
            x = tl.where(score == best, x, float("-inf"))
            bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
            value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # ordered as the numbers are
        else:
            far = _far(score, best, factor)
            noise = gumbel_log2(_shifted(_mix(_mix(word * -0x61C8864F + key) ^ other), 1))
            value = tl.where((score > MASKED) & (far <= most), noise - far, MASKED)
        value = tl.where(finite, value, NOT_FINITE)
        value = tl.where(real, value, LEAST)
        larger = value > top
        top, top_word = tl.where(larger, value, top), tl.where(larger, word, top_word)
    most_of_all = tl.max(top, 0)
    first = tl.min(tl.where(top == most_of_all, top_word, VOCAB), 0)
    if parts == 1:
        tl.store(out + row, tl.where(most_of_all == NOT_FINITE, -1, first))
    else:
        tl.store(keys + row * parts + part, most_of_all)
        tl.store(ids + row * parts + part, first)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + row, 0)
            p = tl.arange(0, BLOCK_PARTS)
            value = tl.load(
                keys + row * parts + p, mask=p < parts, other=LEAST, cache_modifier=".cg"
            )
            word = tl.load(ids + row * parts + p, mask=p < parts, other=VOCAB, cache_modifier=".cg")
            most_of_all = tl.max(value, 0)
            first = tl.min(tl.where(value == most_of_all, word, VOCAB), 0)
            tl.store(out + row, tl.where(most_of_all == NOT_FINITE, -1, first))
