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
LEVELS = tl.constexpr(6)
"""Launches that find a limit in [0, FAR], each by 15 thresholds: 19 low bits are left to find,
then 15, 11, 7, 3, 0.
"""
COLUMNS = tl.constexpr(16)
AT_ONCE = tl.constexpr(8)
"""Groups whose words are looked at together."""
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


@triton.jit(
    do_not_specialize=["length"],
    do_not_specialize_on_alignment=["history_row", "last", "greedy", "bias_ids", "mask"],
)
def plain_kernel(
    history_row, last, bias_ids, mask, greedy, plain, length, ids_stride, mask_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row): whether a row is greedy and nothing changes its scores."""
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    changes = tl.zeros([BLOCK], tl.int32)
    if (tl.load(greedy + row) > 0) & (_remembers(history_row, last, row) == 0):
        for start in tl.range(0, length, BLOCK):
            place = start + tl.arange(0, BLOCK)
            word = tl.load(bias_ids + row * ids_stride + place, mask=place < length, other=-1)
            changes |= (word >= 0).to(tl.int32)
        for start in tl.range(0, (VOCAB + 31) // 32, BLOCK):
            place = start + tl.arange(0, BLOCK)
            real = place < (VOCAB + 31) // 32
            bits = tl.load(mask + row * mask_stride + place, mask=real, other=-1)
            changes |= (bits != -1).to(tl.int32)
    else:
        changes += 1
    tl.store(plain + row, (tl.max(changes, 0) == 0).to(tl.int32))


@triton.jit
def _remembers(history_row, last, row):
    """Whether a row has a history."""
    return (tl.load(history_row + row) >= 0) | (tl.load(last + row) >= 0)


@triton.jit(do_not_specialize_on_alignment=["history_row", "last"])
def clear_kernel(
    history_row, last, counts, VOCAB: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Grid (row, share of the words): counts of 0 for rows with a history; those of others are
    never read.
    """
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if _remembers(history_row, last, row):
        for start in tl.range(tl.program_id(1) * BLOCK, VOCAB, tl.num_programs(1) * BLOCK):
            word = start + tl.arange(0, BLOCK)
            tl.store(counts + row * VOCAB + word, tl.zeros([BLOCK], tl.int32), mask=word < VOCAB)


@triton.jit(
    do_not_specialize=["length"],
    do_not_specialize_on_alignment=["history", "history_row", "last", "prompt_len"],
)
def count_kernel(
    history, history_row, last, prompt_len, counts, length, history_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, share of the history): how often each word occurs in the output, and whether in
    the history at all. The last word is one of the output.
    """
    wait(OVERLAP)
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_row = counts + row * VOCAB
    end = tl.load(last + row)
    if (share == 0) & (end >= 0):
        tl.atomic_or(of_row + end, SEEN, sem="relaxed")
        tl.atomic_add(of_row + end, 1, sem="relaxed")
    kept = tl.load(history_row + row)
    if kept >= 0:
        own, prompt = history + kept.to(tl.int64) * history_stride, tl.load(prompt_len + row)
        for start in tl.range(share * BLOCK, length, tl.num_programs(1) * BLOCK):
            place = start + tl.arange(0, BLOCK)
            word = tl.load(own + place, mask=place < length, other=-1)
            of_word = of_row + tl.maximum(word, 0)
            tl.atomic_or(of_word, SEEN, mask=word >= 0, sem="relaxed")
            output = place >= prompt
            tl.atomic_add(of_word, 1, mask=(word >= 0) & output, sem="relaxed")


@triton.jit
def _allowed(mask, word, real):
    return ((tl.load(mask + (word >> 5), mask=real, other=0) >> (word & 31)) & 1) != 0


@triton.jit(
    do_not_specialize_on_alignment=[
        "history_row",
        "last",
        "presence",
        "frequency",
        "repetition",
        "repetition_inverse",
        "mask",
    ]
)
def penalty_kernel(
    logits, counts, history_row, last, presence, frequency, repetition, repetition_inverse, mask,
    scores, plain, logits_stride, mask_stride,
    SKIPS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, share of the words): all but the bias. SKIPS: rows that are `plain` get no
    scores.
    """
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    end = tl.where(_is_plain(plain, row, SKIPS), 0, VOCAB)
    for start in tl.range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        word = start + tl.arange(0, BLOCK)
        real = word < VOCAB
        x = tl.load(logits + row * logits_stride + word, mask=real, other=0.0)
        counted = real & _remembers(history_row, last, row)
        count = tl.load(counts + row * VOCAB + word, mask=counted, other=0)
        seen, count = count != 0, tl.minimum(count & (SEEN - 1), MAX_COUNT)
        factor = tl.where(x > 0, tl.load(repetition_inverse + row), tl.load(repetition + row))
        score = quantized(x, tl.where(seen, factor * 65536.0, 65536.0))
        taken = tl.load(frequency + row) * count + tl.where(count > 0, tl.load(presence + row), 0)
        allowed = _allowed(mask + row * mask_stride, word, real)
        score = tl.where(allowed & (score != MASKED), score - taken, MASKED)
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


@triton.jit
def _ordered(x):
    """Integers in the order of the float32 `x`, equal for zeros of both signs."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _is_plain(plain, row, SKIPS: tl.constexpr):
    """Whether a row has no scores of its own: see `plain_kernel`. None is without SKIPS."""
    found = tl.full((), 0, tl.int32)
    if SKIPS:
        found = tl.load(plain + row)
    return found > 0


@triton.jit
def _scores(scores, logits, word, real, other: tl.constexpr, is_plain, SKIPS: tl.constexpr):
    """The scores of words of a row, `other` where they are not `real`. Those of a plain row are
    integers in the order of its logits.
    """
    if SKIPS:
        score = tl.load(scores + word, mask=real & (is_plain == 0), other=other)
        x = tl.load(logits + word, mask=real & is_plain, other=0.0)
        score = tl.where(real & is_plain, _ordered(x), score)
    else:
        score = tl.load(scores + word, mask=real, other=other)
    return score


@triton.jit(do_not_specialize=["parts", "size"])
def best_kernel(
    logits, scores, plain, bests, groups, broken, logits_stride, row_stride, parts, size,
    SKIPS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    FILTERED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, part of the words): the largest score of each part, and how many of its logits
    are not finite. FILTERED: also the largest score of each of LANES groups of the part, whose
    words lie LANES apart. SKIPS: logits stand for the scores of rows that are `plain` (`_scores`).
    """
    wait(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_plain = _is_plain(plain, row, SKIPS)
    best = tl.full([BLOCK], LEAST, tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(part * size, tl.minimum(part * size + size, VOCAB), BLOCK):
        word = start + tl.arange(0, BLOCK)
        score = _scores(
            scores + row * row_stride, logits + row * logits_stride, word, word < VOCAB, LEAST,
            is_plain, SKIPS,
        )  # fmt: skip
        best = tl.maximum(best, score)
        x = tl.load(logits + row * logits_stride + word, mask=word < VOCAB, other=0.0)
        bad += (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
    tl.store(broken + row * parts + part, tl.sum(bad, 0))
    if FILTERED:
        best = tl.max(tl.reshape(best, [BLOCK // LANES, LANES]), 0)
        place = (row * parts + part) * LANES + tl.arange(0, LANES)
        tl.store(groups + place, best)
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
    scores, bests, k_sums, k_found, p_sums, p_found, done, greedy, scale, top_k, top_p, min_p,
    row_stride, parts, size, level,
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
    if (wants == 0) | (tl.load(greedy + row) > 0) | (tl.load(done + row) > 0):
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


@triton.jit
def _may_exceed(bits, least):
    """False where the noise of 31 random bits surely is not above `least`: it is below (32 - e)
    2^16 - 34655 for e the whole part of log2 of 2 (2^31 - 1 - bits) + 1, and below 2^16 for bits
    below 2^30.
    """
    whole = (least + 34655) >> 16
    rest = (2147483647 - bits) >> tl.minimum(tl.maximum(31 - whole, 0), 31)
    return (whole < 2) | (rest == 0)


@triton.jit
def _seeds(seed_lo, seed_hi, position, row):
    """What the hash of a row's words begins with."""
    key = _mix(tl.load(seed_lo + row) ^ _mix(tl.load(position + row) * 0x3C6EF372 + 0x1B873593))
    return key, _mix(tl.load(seed_hi + row) + key * 0x2C1B3C6D + 0x165667B1)


@triton.jit
def _bits(word, key, other):
    """31 random bits of words."""
    return _shifted(_mix(_mix(word * -0x61C8864F + key) ^ other), 1)


@triton.jit
def _is_few(k, FEW: tl.constexpr):
    return (k > 0) & (k <= FEW)


@triton.jit(
    do_not_specialize=["parts", "size"],
    do_not_specialize_on_alignment=["greedy", "scale", "top_k", "top_p", "min_p"],
)
def total_kernel(
    scores, bests, totals, greedy, scale, top_k, top_p, min_p, row_stride, parts, size,
    FEW: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, part of the words): what all words weigh, for rows with top-p whose top-k does
    not leave a few words.
    """
    wait(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    alone = (tl.load(top_p + row) < ONE) & (_is_few(tl.load(top_k + row), FEW) == 0)
    if (alone == 0) | (tl.load(greedy + row) > 0):
        return
    best, factor = _best(bests + row * parts, parts, BLOCK_PARTS), tl.load(scale + row)
    most = tl.load(min_p + row)
    acc = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(part * size, tl.minimum(part * size + size, VOCAB), BLOCK):
        word = start + tl.arange(0, BLOCK)
        score = tl.load(scores + row * row_stride + word, mask=word < VOCAB, other=MASKED)
        far = _far(score, best, factor)
        acc += tl.where((score > MASKED) & (far <= most), _weights(far, VOCAB), 0)
    tl.store(totals + row * parts + part, tl.sum(acc, 0))


@triton.jit
def _largest(x, count):
    """The largest number that `count` of x [n] int32 reach; LEAST if there are fewer."""
    found, step = tl.full((), LEAST, tl.int32), tl.full((), LEAST, tl.int32)
    for _ in range(32):
        larger = found + step  # wraps: LEAST + LEAST is 0
        found = tl.where(tl.sum((x >= larger).to(tl.int32), 0) >= count, larger, found)
        step = _shifted(step, 1)
    return found


@triton.jit
def _smallest(far, weight, total, wanted, MASS: tl.constexpr):
    """The smallest limit within which the weights [n] int64 of words at distances `far` [n] are
    enough.
    """
    limit, step = tl.full((), FAR, tl.int32), tl.full((), FAR, tl.int32)
    for _ in range(23):
        lower = limit - step
        held = tl.sum(tl.where(far <= lower, weight, 0), 0)
        limit = tl.where((lower >= 0) & _enough(held, total, wanted, MASS), lower, limit)
        step = step >> 1
    return limit


@triton.jit(
    do_not_specialize=["parts", "size", "lanes"],
    do_not_specialize_on_alignment=[
        "position", "seed_lo", "seed_hi", "greedy", "scale", "top_k", "top_p", "min_p",
    ],
)  # fmt: skip
def few_kernel(
    logits, scores, plain, bests, groups, broken, totals, chosen, listed, position, seed_lo,
    seed_hi, greedy, scale, top_k, top_p, min_p, done, out, logits_stride, row_stride, parts, size,
    lanes, SKIPS: tl.constexpr, FEW: tl.constexpr, LISTED: tl.constexpr, VOCAB: tl.constexpr,
    WORDS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row): the token of rows whose filters leave a few words; `done` [row] says of which.

    The best words of the k best groups are k words. So the k best words of the row are as near as
    the worst of those, and lie in groups whose best word is: only these groups are read. With a
    larger top-k or with none, the words that FEW groups vouch for must hold what top-p or min-p
    leaves; and LISTED words are looked at, no more. Rows of which this is not enough are not done.
    Groups are those of `best_kernel`, `lanes` of each part; WORDS: one has at most as many.
    `chosen` [row BLOCK_GROUPS] and `listed` [row LISTED] are room to work in.
    """
    wait(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_PARTS)
    bad = tl.load(broken + row * parts + part, mask=part < parts, other=0)
    if tl.max(bad, 0) > 0:
        tl.store(out + row, -1)
        tl.store(done + row, 1)
        return
    first_wins, factor = tl.load(greedy + row) > 0, tl.load(scale + row)
    is_plain = _is_plain(plain, row, SKIPS)
    k, p, most = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    if (first_wins == 0) & (k <= 0) & (p >= ONE) & (most >= FAR):
        tl.store(done + row, 0)  # nothing is filtered
        return
    best = _best(bests + row * parts, parts, BLOCK_PARTS)
    group = tl.arange(0, BLOCK_GROUPS)
    of_group = tl.load(
        groups + row * parts * lanes + group, mask=group < parts * lanes, other=LEAST
    )
    few = _is_few(k, FEW)
    bound = _largest(of_group, tl.where(few, k, FEW))
    # No word beyond `cut` is listed, and each within it.
    cut = tl.where(bound > MASKED, _far(bound, best, factor), FAR)
    near = tl.where(first_wins, of_group == best, _far(of_group, best, factor) <= cut)
    near = (near & (of_group > MASKED)).to(tl.int32)
    chosen += row * BLOCK_GROUPS
    tl.store(chosen + tl.cumsum(near, 0) - 1, group, mask=near > 0)
    tl.debug_barrier()  # all threads have written before one of them reads
    listed += row * LISTED
    scores += row * row_stride
    count = tl.zeros((), tl.int32)
    each, step = tl.arange(0, AT_ONCE)[:, None], tl.arange(0, WORDS)[None, :] * lanes
    wanted = tl.sum(near, 0)
    for start in tl.range(0, wanted, AT_ONCE):
        one = tl.load(chosen + start + each, mask=start + each < wanted, other=0)
        word = one // lanes * size + one % lanes + step
        real = (start + each < wanted) & (step < size) & (word < VOCAB)
        score = _scores(
            scores, logits + row * logits_stride, word, real, MASKED, is_plain, SKIPS
        )  # fmt: skip
        take = tl.where(first_wins, score == best, _far(score, best, factor) <= cut)
        take = tl.reshape((take & (score > MASKED)).to(tl.int32), [AT_ONCE * WORDS])
        place = count + tl.cumsum(take, 0) - 1
        word = tl.reshape(word, [AT_ONCE * WORDS])
        tl.store(listed + place, word, mask=(take > 0) & (place < LISTED))
        count += tl.sum(take, 0)
    if (count == 0) | (count > LISTED):
        tl.store(done + row, 0)
        return
    tl.debug_barrier()
    place = tl.arange(0, LISTED)
    real = place < count
    word = tl.load(listed + place, mask=real, other=VOCAB)
    if first_wins:
        value = _ordered(tl.load(logits + row * logits_stride + word, mask=real, other=0.0))
        found = tl.full((), 1, tl.int32)
    else:
        far = _far(tl.load(scores + word, mask=real, other=MASKED), best, factor)
        keep, known = real & (far <= most), most <= cut
        if k > 0:
            ones = keep.to(tl.int64)
            limit = _smallest(far, ones, tl.sum(ones, 0), k, False)
            most = tl.minimum(most, limit)
            keep, known = keep & (far <= limit), few
        if p < ONE:
            weight = tl.where(keep, _weights(far, VOCAB), 0).to(tl.int64)
            held = tl.sum(weight, 0)
            total = held
            if few == 0:
                total = tl.sum(tl.load(totals + row * parts + part, mask=part < parts, other=0), 0)
                known = (k <= 0) & _enough(held, total, p, True)
            keep = keep & (far <= _smallest(far, weight, total, p, True))
        key, other = _seeds(seed_lo, seed_hi, position, row)
        value = tl.where(keep, gumbel_log2(_bits(word, key, other)) - far, MASKED)
        found = known.to(tl.int32)
    value = tl.where(real, value, LEAST)
    tl.store(out + row, tl.min(tl.where(value == tl.max(value, 0), word, VOCAB), 0))
    tl.store(done + row, found)


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
    logits, scores, plain, bests, broken, k_sums, k_found, p_sums, p_found, done, position,
    seed_lo, seed_hi, greedy, scale, top_k, top_p,
    min_p, keys, ids, arrived, out, logits_stride, row_stride, parts, size,
    SKIPS: tl.constexpr, FILTERED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (row, part of the words): the last program of a row to arrive takes the best of all
    parts. FILTERED: rows that are `done` have their token. A part of a greedy row is read only
    where it has the best score. SKIPS is as in `best_kernel`.
    """
    wait(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if FILTERED:  # noqa: SIM102 (only this one is known to the compiler)
        if tl.load(done + row) > 0:
            return
    each = tl.arange(0, BLOCK_PARTS)
    bad = tl.load(broken + row * parts + each, mask=each < parts, other=0)
    if tl.max(bad, 0) > 0:
        if part == 0:
            tl.store(out + row, -1)
        return
    best, factor = _best(bests + row * parts, parts, BLOCK_PARTS), tl.load(scale + row)
    first_wins, is_plain = tl.load(greedy + row) > 0, _is_plain(plain, row, SKIPS)
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
    key, other = _seeds(seed_lo, seed_hi, position, row)
    # Where no word is kept, the first one has what each has.
    first_words = part * size + tl.arange(0, BLOCK)
    blank = (first_wins == 0) & (first_words < VOCAB)
    top, top_word = tl.where(blank, MASKED, LEAST), tl.where(blank, first_words, VOCAB)
    # The largest value so far of any thread: what cannot exceed it needs no noise.
    reached = tl.full((), LEAST, tl.int32)
    end = tl.minimum(part * size + size, VOCAB)
    if first_wins & (tl.load(bests + row * parts + part) < best):
        end = part * size
    for start in tl.range(part * size, end, BLOCK):
        word = start + tl.arange(0, BLOCK)
        real = word < VOCAB
        score = _scores(
            scores + row * row_stride, logits + row * logits_stride, word, real, MASKED, is_plain,
            SKIPS,
        )  # fmt: skip
        if first_wins:
            x = tl.load(logits + row * logits_stride + word, mask=real, other=0.0)
            value = _ordered(tl.where(score == best, x, float("-inf")))
            value = tl.where(real, value, LEAST)
            larger = value > top
            top, top_word = tl.where(larger, value, top), tl.where(larger, word, top_word)
        else:
            far, bits = _far(score, best, factor), _bits(word, key, other)
            keep = (score > MASKED) & (far <= most)
            may = keep & (_may_exceed(bits, reached + far) | (reached <= MASKED))
            if tl.max(may.to(tl.int32), 0) > 0:
                value = tl.where(keep, gumbel_log2(bits) - far, MASKED)
                value = tl.where(real, value, LEAST)
                larger = value > top
                top, top_word = tl.where(larger, value, top), tl.where(larger, word, top_word)
                reached = tl.maximum(reached, tl.max(value, 0))
    most_of_all = tl.max(top, 0)
    first = tl.min(tl.where(top == most_of_all, top_word, VOCAB), 0)
    if parts == 1:
        tl.store(out + row, first)
    else:
        tl.store(keys + row * parts + part, most_of_all)
        tl.store(ids + row * parts + part, first)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + row, 0)
            value = tl.load(
                keys + row * parts + each, mask=each < parts, other=LEAST, cache_modifier=".cg"
            )
            word = tl.load(
                ids + row * parts + each, mask=each < parts, other=VOCAB, cache_modifier=".cg"
            )
            most_of_all = tl.max(value, 0)
            tl.store(out + row, tl.min(tl.where(value == most_of_all, word, VOCAB), 0))
