"""Sampling in integers: with the same logits and the same integers every backend returns the same
token.

Floating `exp`, `log`, division and sums differ in the last bit between numpy, XLA, Inductor and
Triton; integers do not. So logits are rounded once to fixed point (Q16: 16 fractional bits) by a
single float32 product, and everything after that is int32: distances to the best token in log2
units, noise from an integer hash, masses as sums of integers (which have no order). Ties break by
the lower token id.

A draw takes the token with the largest `log2 p + noise`, noise = -log2(-log2 u), which is Gumbel
noise in log2 units (up to a constant that moves no maximum). u is a hash of (seed, position, token
id), so a token does not depend on the batch, on preemption or on the backend.

A row with a logit that is not finite (NaN or an infinity) names no token: the result is -1, and
whoever reads it ends the request. A token of such a row would be an accident of the comparison.

What is lost: logits are kept to 2^-16 and within +-8192, the noise to 1.4e-4 in log2 units; gaps to
the best token are cut at 256 in logits and at 64 in log2 units (a token 2^-38 as probable as the
best can never win), and probabilities below 2^-26 of the best count as 0 in top-p (below 2^-25 in
vocabularies over 2^18, whose weights have one bit less).

Shapes: `row` sampled requests, `vocab` at most 2^19.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..declare import Array, Contract, define
from ..namespaces import device_of

ONE = 1 << 16
FAR = 1 << 22
MAX_LOGIT = 8192.0
MAX_COUNT = 4096
FULL_WEIGHTS = 1 << 18
"""The largest vocabulary whose weights in top-p have 26 bits. Those of a larger one have 25: so
twice as many add up exactly.
"""
MASKED = -(2**31) + 1
TOP = 20
INTEGER = Contract(
    rounds="logits once to Q16 (nearest, ties to even), then integers",
    accumulate="int32, exact",
    nan="counts as masked",
)
NO_TOKEN = -1
"""What a row with a logit that is not finite gets instead of a token."""
NO_TOKEN_FOR_NAN = "a row with a NaN or an infinity gives -1"


@define(
    shapes="logits [row vocab] -> [row] int32",
    shards=(),
    contract=Contract(rounds="nowhere", accumulate="none", nan=NO_TOKEN_FOR_NAN),
)
def greedy_sample(xp: Any, logits: Array) -> Array:
    """The first of the largest logits, -1 if one is not finite: [row vocab] float32 -> [row]
    int32.
    """
    return _if_finite(xp, logits, xp.argmax(logits, axis=-1))


def _if_finite(xp: Any, logits: Array, token: Array) -> Array:
    """`token` [row] of the rows whose logits are all finite, else -1."""
    finite = xp.all(xp.isfinite(logits), axis=-1)
    return xp.astype(xp.where(finite, token, NO_TOKEN), xp.int32)


@define(shapes="logits [row vocab] -> [row vocab] int32", shards=(), contract=INTEGER)
def quantize_logits(xp: Any, logits: Array) -> Array:
    """Logits [row vocab] float32 in Q16, NaN as masked -> scores [row vocab] int32."""
    return _quantize(xp, logits, logits * float(ONE))


@define(
    shapes="logits [row vocab], history [kept len], history_row [row], last [row], "
    "prompt_len [row], presence [row], frequency [row], repetition [row], "
    "repetition_inverse [row], bias_ids [row n], bias [row n], mask [row words] "
    "-> [row vocab] int32",
    shards=(),
    contract=INTEGER,
)
def penalties(
    xp: Any,
    logits: Array,
    history: Array,
    history_row: Array,
    last: Array,
    prompt_len: Array,
    presence: Array,
    frequency: Array,
    repetition: Array,
    repetition_inverse: Array,
    bias_ids: Array,
    bias: Array,
    mask: Array,
) -> Array:
    """Scores [row vocab] int32 in Q16 after penalties, bias and mask, in this order.

    The history of a row is entry `history_row` of `history` [kept len] (-1 unused; a row of -1 has
    none) and the token `last` behind it (-1: none). The repetition penalty divides positive and
    multiplies negative logits of its tokens; frequency times the count in the output (from
    `prompt_len` on) and presence are taken off; `bias` [row n] is added at `bias_ids` (-1 unused);
    tokens whose bit in `mask` [row words] is 0 are masked. Counts stop at 4096.
    """
    vocab = logits.shape[1]
    own = xp.take(history, xp.maximum(history_row, _int(xp, 0, history_row)), axis=0)
    history = xp.where(history_row[:, None] < 0, -1, own)
    place = xp.arange(history.shape[1], dtype=xp.int32, device=device_of(history))[None, :]
    output = xp.where(place >= prompt_len[:, None], history, -1)
    ended = xp.count_tokens(last[:, None], vocab)
    count = xp.minimum(xp.count_tokens(output, vocab) + ended, _int(xp, MAX_COUNT, history))
    seen = xp.count_tokens(history, vocab) + ended > 0
    factor = xp.where(logits > 0, repetition_inverse[:, None], repetition[:, None]) * float(ONE)
    scores = _quantize(xp, logits, logits * xp.where(seen, factor, float(ONE)))
    taken = frequency[:, None] * count + xp.where(count > 0, presence[:, None], 0)
    masked = scores == MASKED
    scores = xp.add_at(xp.where(masked, 0, scores - taken), bias_ids, bias)
    token = xp.arange(vocab, dtype=xp.int32, device=device_of(history))
    allowed = (xp.take(mask, token >> 5, axis=1) >> (token & 31)[None, :]) & 1
    return xp.where(masked | (allowed == 0), MASKED, scores)


def _quantize(xp: Any, logits: Array, scaled: Array) -> Array:
    limit = MAX_LOGIT * ONE
    number = xp.where(xp.isnan(logits), 0.0, scaled)
    return xp.where(xp.isnan(logits), MASKED, xp.to_int(xp.clip(number, -limit, limit)))


@define(
    shapes="logits [row vocab], scores [row vocab], position [row], seed_lo [row], seed_hi [row], "
    "greedy [row], scale [row], top_k [row], top_p [row], min_p [row] -> [row] int32",
    shards=(),
    contract=replace(INTEGER, nan=NO_TOKEN_FOR_NAN),
)
def sample(
    xp: Any,
    logits: Array,
    scores: Array,
    position: Array,
    seed_lo: Array,
    seed_hi: Array,
    greedy: Array,
    scale: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    filtered: bool,
) -> Array:
    """One token a row, -1 if a logit is not finite -> [row] int32. See `shared/step.py` for the
    encoded parameters.

    A greedy row takes the largest score, among equal scores the largest of `logits`. `filtered` off
    skips min-p, top-k and top-p, for steps in which no row asks for them. They apply in this order,
    each to what the one before it left.
    """
    best = xp.max(scores, axis=-1, keepdims=True)
    keep = scores > MASKED
    gap = best - xp.maximum(scores, best - (1 << 24))
    far = xp.to_int(xp.minimum(xp.astype(gap, xp.float32) * scale[:, None], _float(xp, FAR, scale)))
    if filtered:
        keep = keep & (far <= min_p[:, None])
        keep = keep & (far <= _top_k_limit(xp, far, keep, top_k)[:, None])
        keep = keep & (far <= _top_p_limit(xp, far, keep, top_p)[:, None])
    token = xp.arange(scores.shape[1], dtype=xp.int32, device=device_of(scores))
    noise = gumbel_log2(
        xp, hash_tokens(xp, token[None, :], position[:, None], seed_lo[:, None], seed_hi[:, None])
    )
    drawn = xp.argmax(xp.where(keep, noise - far, MASKED), axis=-1)
    first = xp.argmax(xp.where(scores == best, logits, -float("inf")), axis=-1)
    return _if_finite(xp, logits, xp.where(greedy > 0, first, drawn))


@define(
    shapes="logits [row vocab], history [kept len], history_row [row], last [row], "
    "prompt_len [row], presence [row], frequency [row], repetition [row], "
    "repetition_inverse [row], bias_ids [row n], bias [row n], mask [row words], position [row], "
    "seed_lo [row], seed_hi [row], greedy [row], scale [row], top_k [row], top_p [row], "
    "min_p [row] -> [row] int32",
    shards=(),
    level="coarse",
    composition=("penalties", "sample"),
    contract=replace(INTEGER, nan=NO_TOKEN_FOR_NAN),
)
def penalised_sample(
    ops: Any,
    logits: Array,
    history: Array,
    history_row: Array,
    last: Array,
    prompt_len: Array,
    presence: Array,
    frequency: Array,
    repetition: Array,
    repetition_inverse: Array,
    bias_ids: Array,
    bias: Array,
    mask: Array,
    position: Array,
    seed_lo: Array,
    seed_hi: Array,
    greedy: Array,
    scale: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    filtered: bool,
) -> Array:
    """One token a row, -1 if a logit is not finite -> [row] int32: `sample` with the scores of
    `penalties`, whose arguments stand first. Most rows of a batch have neither penalties nor a
    bias nor a mask: a greedy one of them takes its largest logit, and needs no scores.
    """
    scores = ops.penalties(
        logits, history, history_row, last, prompt_len, presence, frequency, repetition,
        repetition_inverse, bias_ids, bias, mask,
    )  # fmt: skip
    return ops.sample(
        logits, scores, position, seed_lo, seed_hi, greedy, scale, top_k, top_p, min_p, filtered
    )


def _top_k_limit(xp: Any, far: Array, keep: Array, top_k: Array) -> Array:
    """The distance of the k-th best token: [row]. Tokens as far as it are kept with it."""
    wanted = xp.where(top_k > 0, top_k, keep.shape[1])
    kept = xp.sum(xp.astype(keep, xp.int32), axis=-1, dtype=xp.int32)
    wanted = xp.minimum(wanted, kept)
    far = xp.where(keep, far, FAR + 1)  # further than any limit

    def enough(limit: Array) -> Array:
        near = xp.astype(far <= limit[:, None], xp.int32)
        return xp.sum(near, axis=-1, dtype=xp.int32) >= wanted

    return _smallest(xp, enough, wanted)


def _top_p_limit(xp: Any, far: Array, keep: Array, top_p: Array) -> Array:
    """The smallest distance within which the tokens hold `top_p` of the mass: [row]."""
    return _mass_limit(xp, far, xp.where(keep, _weights(xp, far), 0), top_p)


def _mass_limit(xp: Any, far: Array, weight: Array, top_p: Array) -> Array:
    """The smallest distance within which lies `top_p` of the weights [row vocab]: [row]."""
    high_total, _ = _mass(xp, weight)
    # Sums have up to 44 bits: the total decides how many low bits are dropped so that 28 are left.
    drop = xp.zeros_like(high_total)
    for bit in range(15, 31):
        drop = drop + xp.astype(high_total >= (1 << bit), xp.int32)
    few, many = xp.minimum(drop, _int(xp, 13, drop)), xp.maximum(drop - 13, _int(xp, 0, drop))
    up, keeps_low = 13 - few, drop < 13

    def mass(part: Array) -> Array:
        high, low = _mass(xp, part)
        return ((high >> many) << up) | xp.where(keeps_low, low >> few, 0)

    total = mass(weight)
    wanted = (((total >> 14) * top_p) >> 2) + (((total & 16383) * top_p) >> 16)
    wanted = xp.where(top_p >= ONE, total, wanted)

    def enough(limit: Array) -> Array:
        # Not by `where`: torch takes ten times as long for it on a CPU.
        near = xp.astype(far <= limit[:, None], xp.int32)
        return mass(weight * near) >= wanted

    return xp.where(top_p >= ONE, FAR, _smallest(xp, enough, top_p))


def _weights(xp: Any, far: Array) -> Array:
    """What words at distances `far` [row vocab] weigh in top-p: 2^-far, in Q26 or in Q25."""
    weight = exp2_negative(xp, far)
    return weight >> 1 if far.shape[-1] > FULL_WEIGHTS else weight


def _mass(xp: Any, weight: Array) -> tuple[Array, Array]:
    """The sum of each row as (sum >> 13, sum & 8191): exact for up to 2^18 weights below 2^26, and
    for up to 2^19 below 2^25.
    """
    low = xp.sum(weight & 8191, axis=-1, dtype=xp.int32)
    high = xp.sum(weight >> 13, axis=-1, dtype=xp.int32)
    # More than 2^18 low parts may reach bit 31, which is then a bit like the others.
    carry = _shift(low, 13) if weight.shape[-1] > FULL_WEIGHTS else low >> 13
    return high + carry, low & 8191


def _smallest(xp: Any, enough: Any, like: Array) -> Array:
    """The smallest limit in [0, FAR] for which `enough` holds, by bisection: 23 passes over the
    row.
    """
    zero = xp.zeros_like(like)

    def halve(i: Any, limit: Array) -> Array:
        lower = limit - (FAR >> i)
        return xp.where((lower >= 0) & enough(xp.maximum(lower, zero)), lower, limit)

    return xp.loop(0, 23, halve, zero + FAR)


def hash_tokens(xp: Any, token: Array, position: Array, seed_lo: Array, seed_hi: Array) -> Array:
    """31 random bits for each (seed, position, token): int32 in [0, 2^31). Products wrap;
    murmur3's finaliser mixes.
    """
    key = _mix(xp, seed_lo ^ _mix(xp, position * 0x3C6EF372 + 0x1B873593))
    other = _mix(xp, seed_hi + key * 0x2C1B3C6D + 0x165667B1)
    return _shift(_mix(xp, _mix(xp, token * -0x61C8864F + key) ^ other), 1)


def _mix(xp: Any, x: Array) -> Array:
    x = (x ^ _shift(x, 16)) * -0x7A143595
    x = (x ^ _shift(x, 13)) * -0x3D4D51CB
    return x ^ _shift(x, 16)


def _shift(x: Array, bits: int) -> Array:
    """Logical shift to the right of an int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def gumbel_log2(xp: Any, bits: Array) -> Array:
    """-log2(-log2 u) in Q16 for u = (bits + 1/2) / 2^31, to 1.4e-4.

    For u near 1 that is -log2(d) - log2(-log2(1 - d) / d) with d = 1 - u, whose second term is
    smooth; else the two logarithms are taken one after the other.
    """
    near = bits >= (1 << 30)
    doubled = xp.where(near, 2 * ((2**31 - 1) - bits) + 1, 2 * bits + 1)
    distance = (32 << 16) - log2(xp, doubled)
    smooth = _horner(doubled >> 16, 34655, 23565, 5458, 157, 1699)
    return xp.where(near, distance - smooth, (16 << 16) - log2(xp, distance))


def log2(xp: Any, x: Array) -> Array:
    """log2 of a positive int32 in Q16: f + f (1 - f) q(f) on the mantissa 1 + f, q a minimax
    polynomial.
    """
    exponent = xp.zeros_like(x)
    rest = x
    for step in (16, 8, 4, 2, 1):
        # Not by `where`: torch takes ten times as long for it on a CPU.
        shift = xp.astype(rest >= (1 << step), xp.int32) * step
        exponent = exponent + shift
        rest = rest >> shift
    fraction = ((x << (30 - exponent)) & ((1 << 30) - 1)) >> 15
    bend = (fraction * ((1 << 15) - fraction)) >> 13
    return (
        (exponent << 16)
        + (fraction << 1)
        + ((_horner(fraction, 29010, -18136, 12115, -6448, 1722) * bend) >> 17)
    )


def exp2_negative(xp: Any, x: Array) -> Array:
    """2^-x in Q26 for x >= 0 in Q16, at most 2^26 - 1; 0 from x = 26 on (and a little before)."""
    whole, fraction = x >> 16, (x & (ONE - 1)) >> 1
    bend = (fraction * ((1 << 15) - fraction)) >> 13
    power = ONE - fraction - ((_horner(fraction, 12656, -3049, 449) * bend) >> 17)
    top = xp.minimum(power << 10, _int(xp, (1 << 26) - 1, power))
    return top >> xp.minimum(whole, _int(xp, 31, whole))


def _horner(x: Array, *coefficients: int) -> Array:
    """The polynomial with Q16 coefficients, constant first, at x in Q15."""
    value = x * 0 + coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = ((value * x) >> 15) + coefficient
    return value


def _best(vocab: int, **_: Any) -> dict[str, int]:
    return {"best": min(TOP, vocab)}


@define(
    shapes="logits [row vocab], chosen [row] -> [row] float32, [row] int32, [row best] int32, "
    "[row "
    "best] float32",
    choose=_best,
    contract=Contract(rounds="nowhere", accumulate="float32, any order"),
    sums=True,
)
def top_logprobs(xp: Any, logits: Array, chosen: Array) -> tuple[Array, Array, Array, Array]:
    """Log-probabilities [row], rank [row] of `chosen` [row], and the 20 best: ids [row 20] and
    values [row 20].

    Rank 1 is the most probable token; equal logits rank by token id.
    """
    best = xp.max(logits, axis=-1, keepdims=True)
    norm = best[:, 0] + xp.log(xp.sum(xp.exp(logits - best), axis=-1))
    token = xp.arange(logits.shape[1], dtype=xp.int32, device=device_of(chosen))[None, :]
    at = xp.sum(xp.where(token == chosen[:, None], logits, 0.0), axis=-1)
    before = (logits > at[:, None]) | ((logits == at[:, None]) & (token < chosen[:, None]))
    rank = 1 + xp.sum(xp.astype(before, xp.int32), axis=-1, dtype=xp.int32)
    top, ids = xp.top(logits, min(TOP, logits.shape[1]))
    return at - norm, rank, ids, top - norm[:, None]


def _int(xp: Any, value: int, like: Array) -> Array:
    return xp.asarray(value, dtype=xp.int32, device=device_of(like))


def _float(xp: Any, value: float, like: Array) -> Array:
    return xp.asarray(value, dtype=xp.float32, device=device_of(like))
