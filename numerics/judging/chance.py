"""What chance leaves to a ratio of two root mean squares: quantiles of the F distribution."""

from __future__ import annotations

import math
from functools import cache

TINY = 1e-300
LARGEST = 1e6
"""More independent numbers than this leave nothing to chance."""


@cache
def ratio_limit(numbers: float, beside: float, tail: float) -> float:
    """The ratio of two root mean squares of independent normal errors, of `numbers` and `beside` of
    them, that is exceeded with the chance `tail`.
    """
    m, n = (min(x, LARGEST) for x in (numbers, beside))
    low, high = 0.0, 1.0
    while _exceeding(high, m, n) > tail:
        high *= 2.0
        if high > 1e60:
            return math.inf
    while high - low > 1e-6 * high:
        middle = (low + high) / 2.0
        if _exceeding(middle, m, n) > tail:
            low = middle
        else:
            high = middle
    return high**0.5


def _exceeding(f: float, m: float, n: float) -> float:
    """The chance that the F distribution with m and n degrees of freedom exceeds f."""
    return incomplete_beta(n / 2.0, m / 2.0, n / (n + m * f))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (DLMF 8.17.22), which
    converges fast below the mean.
    """
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    # Lentz's method.
    c, d = 1.0, 1.0 / _nonzero(1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for k in range(1, 10_000):
        even = k * (b - k) * x / ((a + 2 * k - 1.0) * (a + 2 * k))
        odd = -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1.0))
        step = 1.0
        for term in (even, odd):
            d = 1.0 / _nonzero(1.0 + term * d)
            c = _nonzero(1.0 + term / c)
            step = c * d
            fraction *= step
        if abs(step - 1.0) < 1e-12:
            break
    return math.exp(log_front) * fraction / a


def _nonzero(x: float) -> float:
    return x if abs(x) > TINY else TINY
