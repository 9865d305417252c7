"""The log-probabilities of a server over all positions: what single positions are too noisy for.

A server of another engine keeps no contract, so each of its numbers may be off by some of the
faithful reference's noise. Its errors are still roundings, as often up as down. A wrong scale, a
wrong rotation or a wrong dtype are not: pooled over hundreds of positions they stand out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .diff import Diff, LogitsFinding
from .gates import FOREIGN, Mode
from .logits_metrics import KL_FLOOR, flip_record, named_divergence
from .metrics import DEVIATIONS, TIE_FACTOR, Flip, independent, log_softmax, trend

MIN_ROWS = 8
"""Positions that a way of asking needs before it is judged by itself."""
SLOPE_FLOOR = 1e-5
"""Of log-probabilities in float32, as of logits in mode S (`gates.semantics`)."""
VALUE_FLOOR = 2e-6
"""Nats: two units of float32 at 16, where log-probabilities are subtracted from their norm."""
GROWTH = 0.04
"""Of the logarithm of sigma, by doubling of the position. transformers in bfloat16 reaches 0.02 on
the demo model, rotary frequencies that are off by 1 % reach 0.1 to 0.2.
"""
GROWTH_ROWS, GROWTH_OCTAVES = 64, 4.0
"""Positions, and doublings between the first and the last, that it needs to be judged."""
GREEDY_FLOOR = 1e-4
"""Nats that a token chosen at temperature 0 may lie below the best: printed digits, no dtype's."""


@dataclass(frozen=True, slots=True)
class NamedRow:
    """One position that a server was read at. Arrays [token] are log-probabilities of the tokens
    `ids` that it named; `logits` are those tokens' exact logits, `power` the mean square of the
    noise of the row's logits.

    `chosen` is the place, among these tokens, of what the server generated; -1 for none.
    """

    way: str
    prompt: int
    position: int
    ids: list[int]
    exact: np.ndarray
    faithful: np.ndarray
    got: np.ndarray
    logits: np.ndarray
    power: float
    chosen: int = -1

    @property
    def place(self) -> str:
        return f"prompt {self.prompt}, position {self.position}"


def named_row(
    way: str, where: tuple[int, int], top: Mapping[int, float], token: int | None,
    exact: np.ndarray, faithful: np.ndarray,
) -> NamedRow:  # fmt: skip
    """The row of `where`, (prompt, position), whose references have logits [vocab]."""
    ids = list(top)
    sides = [log_softmax(x)[ids] for x in (exact, faithful)]
    return NamedRow(
        way,
        *where,
        ids=ids,
        exact=sides[0],
        faithful=sides[1],
        got=np.asarray(list(top.values()), np.float64),
        logits=np.asarray(exact[ids], np.float64),
        power=float(((faithful.astype(np.float64) - exact) ** 2).mean()),
        chosen=-1 if token is None or token not in top else ids.index(token),
    )


def compare_named(
    logits: np.ndarray, exact: np.ndarray, rows: Sequence[NamedRow], places: Sequence[str],
    half_ulp: float, mode: Mode, step: int,
) -> LogitsFinding:  # fmt: skip
    """Compare a side's logits [row vocab] with what a server named at the same positions, `places`
    in words. `exact` are those of the reference.

    Divergences are of the named tokens and the rest as one. `half_ulp` is that of the run dtype:
    the server may round its logits to it, which is noise beside that of the faithful reference.
    """
    found: list[tuple[Flip, str]] = []
    errors, noises, shares, divergences = [], [], [], []
    for number, (row, own) in enumerate(zip(rows, logits, strict=True)):
        count = len(row.ids)
        rounding = half_ulp * float(np.abs(row.logits).max()) / 3**0.5
        noise = (row.power + rounding**2) ** 0.5
        errors.append((row.got - row.exact) ** 2)
        noises += [noise**2] * count
        best_ids = np.argpartition(-own, count - 1)[:count].tolist()
        shares.append(len(set(best_ids) & set(row.ids)) / count)
        a = log_softmax(own)[row.ids]
        pairs = (
            (a, row.got), (row.got, a), (row.exact, a), (row.exact, row.got),
            (row.exact, row.faithful),
        )  # fmt: skip
        divergences.append([named_divergence(p, q) for p, q in pairs])
        best_a, best_b = int(own.argmax()), row.ids[int(row.got.argmax())]
        if best_a != best_b:
            margin = abs(float(exact[number, best_a] - exact[number, best_b]))
            # What is allowed that noise in its values is allowed it in its choices.
            flip = Flip(number, best_a, best_b, margin, FOREIGN * noise)
            found.append((flip, places[number]))
    real = sum(not flip.tie for flip, _ in found)
    complaints = [f"{real} tokens differ by more than rounding explains"] if real else []
    error = float(np.mean(np.concatenate(errors))) ** 0.5
    allowed = TIE_FACTOR * float(np.mean(noises)) ** 0.5 + KL_FLOOR
    if not error <= allowed:
        complaints.append(
            f"b: log-probabilities are off by {error:.3g} nats, {allowed:.3g} are allowed"
        )
    kl_ab, kl_ba, kl_a, kl_b, kl_noise = (float(np.mean(x)) for x in zip(*divergences, strict=True))
    return LogitsFinding(
        rows=len(rows), kl_ab=kl_ab, kl_ba=kl_ba, kl_a=kl_a, kl_b=kl_b, kl_noise=kl_noise,
        argmax_equal=len(rows) - len(found), top5=float(np.mean(shares)), ties=len(found) - real,
        real=real, flips=tuple(flip_record(*pair) for pair in found[:50]),
        complaints=tuple(complaints), mode=mode, step=step,
    )  # fmt: skip


def judge_server(
    rows: Sequence[NamedRow], half_ulp: float, dtype: str, logits_dtype: str = "auto"
) -> Diff:
    """The problems and notes of the positions of one server together. `half_ulp` is that of the run
    dtype `dtype`.

    `logits_dtype` is what the server states that its logits are: rounded to anything narrower, they
    are a failure. With `auto` rounded ones are only noted, and their rounding allowed.
    """
    found = Diff(())
    rounded = dtype != "float32" and logits_rounded(rows, 2 * half_ulp)
    if rounded:
        words = f"b rounds its logits to {dtype}"
        (found.problems if logits_dtype == "float32" else found.notes).append(words)
    found.problems += _rounded_values(rows, dtype)
    found.problems += _not_greedy(rows)
    ways = sorted({row.way for row in rows})
    groups = {way: [row for row in rows if row.way == way] for way in ways}
    if len(ways) > 1:
        # One reading of each: several of one position say the same.
        groups["all"] = list({row.place: row for row in rows}.values())
    for way, group in groups.items():
        if len(group) >= MIN_ROWS:
            sigma, slope, kl, grown = _pool(group, half_ulp if rounded else 0.0, dtype)
            limited = {
                "sigma": sigma, "|slope - 1|": (abs(slope[0]), slope[1]), "KL": kl,
                "growth of sigma by doubling of the position": grown,
            }  # fmt: skip
            wrong = [
                f"{name} {value:.3g} > {limit:.3g}"
                for name, (value, limit) in limited.items()
                if not value <= limit
            ]
            if wrong:
                found.problems.append(f"b, {way} ({len(group)} positions): {'; '.join(wrong)}")
            found.notes.append(
                f"b, {way}: {len(group)} positions, sigma {sigma[0]:.2f} (allowed {sigma[1]:.2f}), "
                f"slope {1 + slope[0]:.4f} (1 +- {slope[1]:.2g}), KL {kl[0]:.2g} ({kl[1]:.2g}), "
                f"growth {grown[0]:.3f} ({grown[1]:.3f})"
            )
    return found


def _pool(rows: Sequence[NamedRow], half_ulp: float, dtype: str) -> Iterator[tuple[float, float]]:
    """What rows are together, each with what is allowed: the error of the log-probabilities over
    the noise (sigma); the slope of the server's against the exact ones, less 1; the mean divergence
    in nats of the named tokens from the exact ones; the growth of sigma along positions. Values of
    one row are alike, so rows are what is independent.
    """
    errors, noises, scores, slope_noises, spreads = np.zeros((5, len(rows)))
    kls, kl_noises, roundings, units = np.zeros((4, len(rows)))
    for i, row in enumerate(rows):
        rounding = _rounding(row.logits, half_ulp)
        error, noise = row.got - row.exact, row.faithful - row.exact
        errors[i] = (error**2).mean()
        noises[i] = (noise**2 + rounding).mean() + VALUE_FLOOR**2
        kls[i], kl_noises[i] = (named_divergence(row.exact, x) for x in (row.got, row.faithful))
        # KL is half the variance of the error under the distribution.
        roundings[i] = (np.exp(row.exact) * rounding).sum() / 2
        # Logits less their norm, in float32, do not sum to one as probabilities; where the tokens
        # that are not named share next to nothing, all of that is divergence.
        units[i] = np.spacing(np.float32(np.abs(row.logits).max())) / 2
        surely = _surely_named(row, rounding)
        if surely.sum() > 1:
            x = row.exact[surely] - row.exact[surely].mean()
            spreads[i] = (x * x).sum()
            scores[i] = (x * error[surely]).sum()
            slope_noises[i] = (x * noise[surely]).sum() ** 2 + (x * x * rounding[surely]).sum()
    total = max(float(spreads.sum()), 1e-30)
    chance = DEVIATIONS / independent(noises) ** 0.5
    kl_noise = kl_noises.mean() + 2 * kl_noises.std() / len(rows) ** 0.5 + roundings.mean()
    # In float32 only the order of sums is open, which no contract states either.
    sigma_limit = (TIE_FACTOR if dtype == "float32" else FOREIGN) + chance
    yield float((errors.sum() / noises.sum()) ** 0.5), sigma_limit
    slope_limit = DEVIATIONS * FOREIGN * float(slope_noises.sum()) ** 0.5 / total + SLOPE_FLOOR
    yield float(scores.sum()) / total, slope_limit
    yield float(kls.mean()), float(FOREIGN**2 * kl_noise + KL_FLOOR + units.mean())
    yield growth(rows)


def _rounding(logits: np.ndarray, half_ulp: float) -> np.ndarray:
    """The variance that rounding logits makes: uniform within half a unit of their binade."""
    exponent = np.floor(np.log2(np.maximum(np.abs(logits), 1e-30)))
    out: np.ndarray = np.ldexp(half_ulp, exponent.astype(int)) ** 2 / 3
    return out


def growth(rows: Sequence[NamedRow]) -> tuple[float, float]:
    """How much the logarithm of error over noise grows with each doubling of the position, and
    what is allowed; (0, 0) if the positions span too little to say.

    Roundings do not know their position; a wrong rotation turns further with each.
    """
    x = np.log2(1.0 + np.asarray([row.position for row in rows]))
    if len(rows) < GROWTH_ROWS or np.ptp(x) < GROWTH_OCTAVES:
        return 0.0, 0.0
    # The spread within a row: an error that all its log-probabilities share is the norm's.
    errors = np.asarray([(row.got - row.exact).std() for row in rows]) + VALUE_FLOOR
    noises = np.asarray([(row.faithful - row.exact).std() for row in rows]) + VALUE_FLOOR
    y = np.log(errors / noises)
    slope, scatter = trend(x, y)
    return slope, GROWTH + DEVIATIONS * scatter


def _surely_named(row: NamedRow, rounding: np.ndarray) -> np.ndarray:
    """Tokens that the server would name whatever its rounding.

    The last of those named are there because their errors are high, which would tilt the slope.
    """
    margin = TIE_FACTOR * FOREIGN * (row.power + rounding) ** 0.5
    sure: np.ndarray = row.exact >= row.got.min() + margin
    return sure


def logits_rounded(rows: Iterable[NamedRow], ulp: float) -> bool:
    """Whether differences of log-probabilities lie on the grid of logits with a relative unit
    `ulp`: those of logits in float32 do so by chance only.
    """
    shares = []
    for row in rows:
        best = int(row.got.argmax())
        size = np.minimum(np.abs(row.logits), np.abs(row.logits[best]))
        # Half a unit of the smaller number: its binade may be the next lower one when rounded.
        exponent = np.floor(np.log2(np.maximum(size, 1e-30)))
        unit = np.ldexp(ulp / 2, exponent.astype(int))
        steps = (row.got - row.got[best]) / unit
        # float32 of a log-probability: half a unit of it, of both, and the sum's rounding.
        width = np.maximum(np.abs(row.got), 1.0) * 2.0**-22 / unit
        usable = (width < 0.05) & (np.arange(len(steps)) != best)
        shares += (np.abs(steps - np.round(steps)) <= width)[usable].tolist()
    return len(shares) >= MIN_ROWS and float(np.mean(shares)) > 0.9


def _rounded_values(rows: Sequence[NamedRow], dtype: str) -> list[str]:
    """Log-probabilities that are numbers of the narrow run dtype: a softmax without float32."""
    if dtype == "float32":
        return []
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    values = np.concatenate([row.got for row in rows]).astype(np.float32)
    if len(values) < MIN_ROWS or not (values.astype(narrow).astype(np.float32) == values).all():
        return []
    return [f"b: all log-probabilities are {dtype} numbers: its softmax is not in float32"]


def _not_greedy(rows: Sequence[NamedRow]) -> list[str]:
    """Tokens chosen at temperature 0 that are not the best by the server's own log-probabilities:
    its sampler looks at other logits than it reports.
    """
    wrong = [
        row
        for row in rows
        if row.chosen >= 0 and row.got[row.chosen] < row.got.max() - GREEDY_FLOOR
    ]
    if not wrong:
        return []
    chosen = sum(row.chosen >= 0 for row in rows)
    first = f"{wrong[0].way}, {wrong[0].place}"
    return [
        f"b: {len(wrong)} of {chosen} tokens at temperature 0 are not the best of their own "
        f"log-probabilities, first {first}"
    ]
