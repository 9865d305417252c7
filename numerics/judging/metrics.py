"""How far one tensor is off: against the exact reference, in units of what the faithful reference
is off.

Everything here takes `got` (a backend's), `exact` (float64) and `faithful` (rounded as the
contracts say), equal in shape; rows are the first axis. Elements where the exact reference is not
finite are left out, but must not be finite in `got` either. Where the faithful one alone is not,
the run dtype cannot hold what is right: nothing can be said of these.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

BINS = 100


def bins_of(count: int) -> int:
    """Bins of a histogram of so many numbers: 10 numbers in one on average, at most BINS."""
    return min(BINS, max(4, count // 10))


@dataclass(frozen=True, slots=True)
class Metrics:
    """Errors of one tensor.

    rel_l2        |got - exact| / |exact|
    rel_noise     the same of the faithful reference
    sigma         their ratio: 1 is what rounding alone does
    worst_token   the largest ratio of one row; a row's noise counts as at least the mean noise
    excess        the same over what is allowed for the row: 1.5, or more where few large errors
                  make up its noise
    linf          largest error over the largest error of the faithful reference
    bias          mean error over its root mean square; that of the error less the faithful
                  reference's, if that is less: what roundings of few values share is no bias
    slope         <got - exact, exact> / <exact, exact>: a scale that is off
    overlap       Bhattacharyya coefficient of both error histograms: 1 is the same distribution
    max_abs       largest error, at index `worst`
    special       elements that are finite on one side only, or infinite or NaN in different ways
    count         elements compared
    effective     independent numbers that the noise is made of: (sum n^2)^2 / sum n^4, one outlier
                  counts as one
    rows          rows in which anything is off; `row_excess` is the sum over them of (e - n) /
                  (e + n), e and n the powers of error and noise, and `row_squares` that of its
                  squares: to pool several steps
    """

    rel_l2: float
    rel_noise: float
    sigma: float
    worst_token: float
    excess: float
    linf: float
    bias: float
    slope: float
    overlap: float
    max_abs: float
    worst: tuple[int, ...]
    special: int
    count: int
    effective: float
    error_power: float
    noise_power: float
    rows: int = 0
    row_excess: float = 0.0
    row_squares: float = 0.0
    beyond: int = 0


def fields_json(entry: Any) -> dict[str, Any]:
    """The fields of a dataclass, fit for JSON."""
    return {f.name: jsonable(getattr(entry, f.name)) for f in fields(entry)}


def jsonable(value: Any) -> Any:
    """A number that JSON can hold, or its name."""
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def measure(got: np.ndarray, exact: np.ndarray, faithful: np.ndarray) -> Metrics:
    """The metrics of one tensor. Shapes must be equal."""
    wide, right, noisy = (np.asarray(x).astype(np.float64) for x in (got, exact, faithful))
    known = np.isfinite(right)
    usable = known & np.isfinite(noisy)
    both = usable & np.isfinite(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        special = int((usable & ~np.isfinite(wide)).sum() + (~known & np.isfinite(wide)).sum())
        error = np.where(both, wide - right, 0.0)
        noise = np.where(usable, noisy - right, 0.0)
    right = np.where(usable, right, 0.0)
    count = int(usable.sum())
    size = max(count, 1)
    e2, n2, r2 = (float((x * x).sum()) for x in (error, noise, right))
    index = int(np.abs(error).argmax()) if error.size else 0
    place = tuple(int(i) for i in np.unravel_index(index, error.shape)) if error.size else ()
    token, excess = worst_row(error, noise)
    excess_of_rows = row_excesses(error, noise)
    largest = float(np.abs(error).max(initial=0.0))
    return Metrics(
        rel_l2=_ratio(e2**0.5, r2**0.5),
        rel_noise=_ratio(n2**0.5, r2**0.5),
        sigma=_ratio(e2**0.5, n2**0.5),
        worst_token=token,
        excess=excess,
        linf=_ratio(largest, float(np.abs(noise).max(initial=0.0))),
        bias=_bias(error, noise, size),
        slope=float((error * right).sum()) / r2 if r2 else 0.0,
        overlap=overlap(error[usable], noise[usable]),
        max_abs=largest,
        worst=place,
        special=special,
        count=count,
        effective=independent(noise**2) if n2 else float(size),
        error_power=e2,
        noise_power=n2,
        rows=excess_of_rows.size,
        row_excess=float(excess_of_rows.sum()),
        row_squares=float((excess_of_rows**2).sum()),
        beyond=int((known & ~usable).sum()),
    )


def independent(power: np.ndarray) -> float:
    """Of how many independent numbers a sum of powers is made: one outlier counts as one."""
    squares = float((power * power).sum())
    return float(power.sum()) ** 2 / squares if squares else float(power.size)


def _ratio(a: float, b: float) -> float:
    """a / b; 1 if both are 0, infinite if only b is."""
    if b:
        return a / b
    return float("inf") if a else 1.0


def _bias(error: np.ndarray, noise: np.ndarray, size: int) -> float:
    """See Metrics: roundings repeat where a row has few values, or a small number is added."""
    rms = (float((error * error).sum()) / size) ** 0.5
    means = float(error.sum()) / size, float((error - noise).sum()) / size
    return min((_ratio(mean, rms) for mean in means), key=abs) if rms else 0.0


TOKEN_LIMIT = 1.5
DEVIATIONS = 4.0
"""A root mean square of n independent errors wanders by 1 / sqrt(2 n), the ratio of two by 1 /
sqrt(n): so many times that is left to chance, as there are thousands of rows.
"""


def worst_row(error: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    """The largest ratio of a row's error to its noise (or to the mean noise of all rows where that
    is more), and the largest ratio of that to what is allowed for the row.
    """
    if error.ndim < 2 or not error.size:
        ratio = _ratio(float(np.abs(error).max(initial=0.0)), float(np.abs(noise).max(initial=0.0)))
        return ratio, ratio / TOKEN_LIMIT
    axes = tuple(range(1, error.ndim))
    rows_e, rows_n, rows_4 = (error**2).sum(axes), (noise**2).sum(axes), (noise**4).sum(axes)
    used = rows_n > 0
    if not used.any():
        ratio = float("inf") if rows_e.any() else 1.0
        return ratio, ratio
    ratios = np.sqrt(rows_e / np.maximum(rows_n, rows_n[used].mean()))
    effective = np.where(used, rows_n**2 / np.where(used, rows_4, 1.0), np.inf)
    allowed = np.maximum(TOKEN_LIMIT, 1.0 + DEVIATIONS / np.sqrt(effective))
    return float(ratios.max()), float((ratios / allowed).max())


def row_excesses(error: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """(e - n) / (e + n) of each row in which anything is off, e and n the powers of its error and
    its noise.
    """
    axes = tuple(range(1, error.ndim))
    e, n = (np.atleast_1d((x * x).sum(axes)) for x in (error, noise))
    off = e + n > 0.0
    out: np.ndarray = (e[off] - n[off]) / (e[off] + n[off])
    return out


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Bhattacharyya coefficient of the histograms of two samples over a common range."""
    bins = bins_of(a.size)
    limit = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))
    if not limit or not a.size or not b.size:
        return 1.0 if not limit else 0.0
    p, _ = np.histogram(a, bins, (-limit, limit))
    q, _ = np.histogram(b, bins, (-limit, limit))
    return float(np.sqrt(p / p.sum() * (q / q.sum())).sum())


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Natural log-probabilities of logits [row vocab], float64."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    out: np.ndarray = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return out


def divergence(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """KL(a || b) in nats of logits [row vocab], by row. What a never says adds nothing."""
    p, q = log_softmax(a), log_softmax(b)
    with np.errstate(invalid="ignore"):
        terms = np.exp(p) * (p - q)
    out: np.ndarray = np.where(np.isneginf(p), 0.0, terms).sum(-1)
    return out


def trend(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The slope of the line through points [n], and its standard error."""
    x = x - x.mean()
    power = float((x * x).sum())
    slope = float((x * y).sum()) / power
    rest = y - y.mean() - slope * x
    return slope, float((rest * rest).sum() / (len(x) - 2) / power) ** 0.5


TIE_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Flip:
    """A row whose best token differs. `margin` is the exact reference's distance between the
    two, `noise` its noise, and rounding decides what is less than `reach` of that apart.
    """

    row: int
    a: int
    b: int
    margin: float
    noise: float
    reach: float = TIE_FACTOR

    @property
    def tie(self) -> bool:
        """Whether rounding alone can decide it."""
        return self.margin < self.reach * self.noise


def flips(
    a: np.ndarray, b: np.ndarray, exact: np.ndarray, faithful: np.ndarray, times: float = 1.0,
    reach: float = TIE_FACTOR,
) -> list[Flip]:  # fmt: skip
    """Rows of logits [row vocab] whose best tokens differ, each with the margin and the noise of
    a difference: `times` that of the faithful reference. `reach` as in Flip.
    """
    best_a, best_b = a.argmax(-1), b.argmax(-1)
    found = []
    for row in np.flatnonzero(best_a != best_b).tolist():
        i, j = int(best_a[row]), int(best_b[row])
        margin = abs(float(exact[row, i] - exact[row, j]))
        noise = float(np.sqrt(((faithful[row].astype(np.float64) - exact[row]) ** 2).mean()))
        found.append(Flip(row, i, j, margin, times * noise, reach))
    return found


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Mean share of the 5 best tokens that both sides have in common."""
    k = min(5, a.shape[-1])
    top = [np.argpartition(-x, k - 1, axis=-1)[:, :k] for x in (a, b)]
    return float(
        np.mean([len(set(x) & set(y)) / k for x, y in zip(*(t.tolist() for t in top), strict=True)])
    )
