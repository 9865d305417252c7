"""The sampler once more, from its description, in float64: what its definition is judged by.

Nothing here is taken from `ops.reference`. A row is one request's words: `far` [vocab] are their
distances to the best in log2 units, infinity for a masked word. Fixed point has only as many bits,
so words may be kept or drawn that float64 would not, and the other way: every answer says which
words are within reach of that rounding.
"""

from __future__ import annotations

import numpy as np

NOISE_ERROR = 1.4e-4
"""How far the noise of the sampler may be off, in log2 units."""
WEIGHT_ERROR = 6e-5
"""How far the weight of a word in top-p may be off, as a share of it. Powers of two are exact."""
MASS_BITS = 28
"""Bits of a sum of weights that the sampler compares."""
LOW = np.uint64(0xFFFFFFFF)


def _times(x: np.ndarray, factor: int) -> np.ndarray:
    """The low 32 bits of a product, [...] uint64."""
    return (x * np.uint64(factor)) & LOW


def _finalise(x: np.ndarray) -> np.ndarray:
    """`fmix32`, the finaliser of MurmurHash3: [...] uint64 below 2^32 -> the same."""
    x = _times(x ^ (x >> np.uint64(16)), 0x85EBCA6B)
    x = _times(x ^ (x >> np.uint64(13)), 0xC2B2AE35)
    return np.asarray(x ^ (x >> np.uint64(16)))


def random_bits(token: np.ndarray, position: int, seed: int) -> np.ndarray:
    """31 bits for each token [vocab] at a position, of a seed of 64 bits -> [vocab] int64."""
    place, low, high = (
        np.asarray([x & 0xFFFFFFFF], np.uint64) for x in (position, seed, seed >> 32)
    )
    key = _finalise(low ^ _finalise((_times(place, 0x3C6EF372) + np.uint64(0x1B873593)) & LOW))
    other = _finalise((high + _times(key, 0x2C1B3C6D) + np.uint64(0x165667B1)) & LOW)
    words = (_times(token.astype(np.uint64), 0x9E3779B1) + key) & LOW
    return (_finalise(_finalise(words) ^ other) >> np.uint64(1)).astype(np.int64)


def gumbel(bits: np.ndarray) -> np.ndarray:
    """-log2(-log2 u) of u = (bits + 1/2) / 2^31 in (0, 1): [...] float64."""
    distance = ((1 << 31) - bits - 0.5) / 2.0**31
    return np.asarray(-np.log2(-np.log1p(-distance) / np.log(2.0)))


def kept(
    far: np.ndarray,
    min_p: float,
    top_k: int,
    top_p: float,
    error: float = 0.0,
    share_error: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Words that min-p, top-k and top-p keep: those that they keep in any case, and those that
    rounding may let them keep, [vocab] bool each.

    `min_p` is a distance. `top_k` 0 and `top_p` 1 keep all. Words of equal distance are kept
    together. `error`: how far any distance may be off, `share_error`: the same of `top_p`.
    """
    order = np.argsort(far, kind="stable")
    near = far[order]
    masked = ~np.isfinite(near)
    sure, maybe = ((near <= min_p + sign * error) & ~masked for sign in (-1, 1))
    # How many words are nearer: at least `first`, and at most `last`, with the word itself if
    # its distance may be off.
    first, last = (np.searchsorted(near, near + sign * 2 * error, side="left") for sign in (-1, 1))
    itself = error > 0.0
    if top_k > 0:
        sure &= last - itself < top_k
        maybe &= first < top_k
    if top_p < 1.0:
        least, most = _weights(np.where(masked, np.inf, near), error)
        least, most = np.where(sure, least, 0.0), np.where(maybe, most, 0.0)
        from_least, from_most = (np.concatenate([[0.0], np.cumsum(x)]) for x in (least, most))
        # Sums of more bits lose the low ones.
        unit = 2.0 ** max(0, int(from_most[-1]).bit_length() - MASS_BITS)
        inner = from_most[last] - itself * most, from_least[first]
        outer = from_least[-1] - from_least[last] + itself * least, from_most[-1] - from_most[first]
        low, high = top_p - share_error, top_p + share_error
        # A word is kept where the nearer ones do not hold `top_p` of the mass without it.
        sure &= inner[0] * (1.0 - low) < low * outer[0] - 3.0 * unit
        maybe &= inner[1] * (1.0 - high) < high * outer[1] + unit * (unit > 1.0)
    answers = np.zeros((2, len(far)), bool)
    answers[:, order] = sure, maybe
    # The best word is kept whatever is asked.
    answers[:, order[0]] = not masked[0]
    return answers[0], answers[1]


def _weights(far: np.ndarray, error: float) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest weight of words at distances [vocab], as whole numbers: 2^-far in
    Q26, below 1, in Q25 of more than 2^18 words; bits behind are cut.
    """
    bits = 25 if len(far) > 1 << 18 else 26
    exact = np.exp2(bits - far)
    # Of one bit less, the largest weight loses its lowest bit as the others do.
    largest = 2.0**bits - 1
    share = np.where((far == np.floor(far)) & (error == 0.0), 0.0, WEIGHT_ERROR + 2 * error)
    whole = np.floor(np.where(np.isfinite(far), far, 0.0))

    def cut(weight: np.ndarray) -> np.ndarray:
        return np.asarray(np.floor(np.minimum(weight, np.exp2(-whole) * largest)))

    return cut(exact * (1.0 - share)), cut(exact * (1.0 + share))


def draw(
    far: np.ndarray, noise: np.ndarray, sure: np.ndarray, maybe: np.ndarray, error: float = 0.0
) -> tuple[int, np.ndarray]:
    """The word with the largest noise [vocab] less its distance, of those kept, and all words that
    it may be within the rounding of both: token, [vocab] bool.

    `error`: how far any distance may be off.
    """
    value = np.where(maybe, noise - far, -np.inf)
    reach = NOISE_ERROR + error
    best = np.where(sure, value, -np.inf)
    return int(np.argmax(best)), maybe & (value + reach >= best.max() - reach)
