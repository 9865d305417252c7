"""What an engine served, against the reference's logits for the very tokens that were served.

A served position has log-probabilities of some tokens, a token, or both. The log-probabilities are
judged by their error over the noise of the faithful reference. A token is judged by the reference's
own choice from the exact logits: what else was chosen must be within reach of that noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .choice import Choice
from .diff import ServedFinding
from .gates import FEWEST, HALF_ULP32, Family, Mode
from .metrics import TIE_FACTOR, Flip, independent, log_softmax

Choose = Callable[[np.ndarray], np.ndarray]
"""The tokens [row] that the sampler takes for one position, given logits [row vocab] float32. A
`Choice` also says what its rounding may make of them.
"""

TRIES = 64
"""Logits with other noise that a drawn token is looked for in, if the exact ones give another."""


@dataclass(frozen=True, slots=True)
class Row:
    """One served position: errors [token] of the log-probabilities that were served, and `noise`,
    what rounding makes of any log-probability of this position. `own` is the same by the streams
    that the engine itself had behind its layers, one for each pass that finished the position.
    """

    place: str
    errors: np.ndarray
    noise: float
    flip: Flip | None = None
    problem: str = ""
    own: tuple[Row, ...] = ()

    @property
    def ratio(self) -> float:
        """The error over the noise of this position alone; infinity where it is not finite."""
        if not len(self.errors):
            return 0.0
        error = float(np.sqrt(np.mean(self.errors**2)))
        if not np.isfinite(error):
            return float("inf")
        if not self.noise:
            return float("inf") if error else 0.0
        return error / self.noise

    def may_be_wrong(self, mode: Mode) -> bool:
        """Whether the position may be off by more than it is allowed in a run of any length."""
        return self.ratio > OF_ROW[mode] * Family(1).deviations


def judge_row(
    place: str,
    exact: np.ndarray,
    faithful: np.ndarray,
    logprobs: Mapping[int, float],
    token: int | None,
    choose: Choose | None,
    by_logits: bool = False,
    ranks: Mapping[int, int] | None = None,
) -> Row:
    """Judge one position by logits [vocab] of both references. `logprobs` in nats and `ranks` by
    token, `choose` of a token that was sampled; `by_logits`: it takes the largest logit.
    """
    right, noisy = log_softmax(exact), log_softmax(faithful)
    # Logits and their log-probabilities are float32, whatever the run dtype is.
    unit = 2.0 * HALF_ULP32 * float(np.abs(exact).max(initial=0.0) + abs(right.min(initial=0.0)))
    noise = float(np.sqrt(np.mean((noisy - right) ** 2) + unit**2))
    ids = list(logprobs)
    errors = np.asarray([logprobs[i] for i in ids], np.float64) - right[ids]
    problem = ""
    if ids and not np.isfinite(errors).all():
        problem = f"{place}: a log-probability is not finite"
    elif wrong := _wrong_rank(exact, ranks or {}, noise):
        problem = f"{place}: {wrong}"
    flip = None
    if token is not None and choose is not None:
        expected = int(choose(exact[None].astype(np.float32))[0])
        if expected != token:
            margin = abs(float(exact[expected] - exact[token]))
            if not by_logits:
                margin = _reach(margin, exact, faithful, token, noise, choose)
            flip = Flip(0, token, expected, margin, noise, Family().reach)
    return Row(place, errors, noise, flip, problem)


def _wrong_rank(exact: np.ndarray, ranks: Mapping[int, int], noise: float) -> str:
    """The first rank that no rounding gives, or nothing. 1 is the rank of the largest of logits
    [vocab]; tokens within twice the reach of noise are before it or behind.
    """
    margin = 2.0 * Family().reach * noise
    for token, rank in ranks.items():
        least = 1 + int((exact > exact[token] + margin).sum())
        most = int((exact >= exact[token] - margin).sum())
        if not least <= rank <= most:
            right = str(least) if least == most else f"{least} to {most}"
            return f"token {token} has rank {rank}, its logit has {right}"
    return ""


def _reach(
    margin: float, exact: np.ndarray, faithful: np.ndarray, token: int, noise: float, choose: Choose
) -> float:
    """The margin in nats of a token that was drawn, where logits alone do not say it: at most the
    noise if noise makes the sampler take it, else more than a tie may have.
    """
    rng = np.random.default_rng(token)
    noisy = exact + TIE_FACTOR / 2 * noise * rng.standard_normal((TRIES, len(exact)))
    near = exact[None], faithful[None], 2.0 * exact[None] - faithful[None]
    tries = np.concatenate([*near, noisy]).astype(np.float32)
    if isinstance(choose, Choice):
        reached = bool(choose.takes(tries, token).any())
    else:
        reached = token in choose(tries).tolist()
    if reached:
        return min(margin, noise)
    return max(margin, 2.0 * Family().reach * noise)


POOLED = {"S": 3.0, "P": 1.15}
"""Allowed error of all log-probabilities together over their noise, times what is left to chance:
in float32 the order of sums is open, and the faithful reference has only one order.
"""
RUNS = 8
"""Limits of this kind in a run of two sides, two modes and two ways to serve."""
OF_ROW = {"S": 2.0, "P": 1.0}
"""The same of one position, in units of what chance leaves to one number among so many: the
log-probabilities of a position share their errors.
"""
BY_CHANCE = 2
"""Positions of a run for which the noise of the reference may be small by luck. They are then
judged by the engine's own streams. Where more are off, it is no luck.
"""


BEHIND = "behind the layers: the row that is sampled, the final norm, the head, or the sampler"
WITHOUT_STREAMS = "in the programs without streams, which users get"


def judge_rows(
    rows: Sequence[Row], mode: Mode, tokens: int, first_wrong: str = "", behind: str = BEHIND,
    **about: Any,
) -> ServedFinding:  # fmt: skip
    """The verdict on the positions of one run with `tokens` served tokens. `first_wrong` is where
    its layers are wrong, if they are, `behind` where it is wrong if they are not; `about` are the
    fields that say what ran.
    """
    measured = [row for row in rows if len(row.errors)]
    # A position's log-probabilities share their noise: each position counts once.
    power = np.asarray([row.noise**2 for row in measured])
    error = np.asarray([float(np.mean(row.errors**2)) for row in measured])
    sigma = limit = worst = 0.0
    place, complaints = "", [row.problem for row in rows if row.problem]
    if measured:
        sigma = float(np.sqrt(error.sum() / power.sum())) if power.any() else 0.0
        limit = POOLED[mode] * Family(RUNS).spread(max(independent(power), FEWEST))
        allowed = OF_ROW[mode] * Family(len(measured)).deviations
        shares = np.sqrt(error / np.maximum(power, power.mean())) / allowed
        wrong = np.flatnonzero(shares > 1.0)
        if not first_wrong and len(wrong) <= BY_CHANCE:
            # The noise of the reference at a position is one draw, which may be small by luck. The
            # streams have been judged by more draws; what is behind them is left to judge here.
            for i in wrong:
                own = (row.ratio / allowed for row in measured[i].own)
                shares[i] = min(own, default=shares[i])
        shares = np.nan_to_num(shares, nan=np.inf)
        worst, place = float(shares.max()), measured[int(shares.argmax())].place
        if not sigma <= limit:
            complaints.append(f"log-probabilities: sigma {sigma:.3g} > {limit:.3g}")
        if not worst <= 1.0:
            complaints.append(
                f"log-probabilities of {place}: {worst:.3g} of what a position may be off"
            )
    found = [(row.place, row.flip) for row in rows if row.flip is not None]
    real = [(place_, flip) for place_, flip in found if not flip.tie]
    if real:
        where, flip = real[0]
        complaints.append(
            f"{len(real)} of {tokens} tokens are not those of their logits; the first is {where}: "
            f"token {flip.a}, not {flip.b}, with a margin of {flip.margin:.3g} nats and noise of "
            f"{flip.noise:.3g}"
        )
    if complaints and not first_wrong:
        first_wrong = behind
    if first_wrong:
        complaints.insert(0, f"first wrong: {first_wrong}")
    flips = [
        {"place": place_, "served": f.a, "reference": f.b, "margin": f.margin, "noise": f.noise}
        for place_, f in real
    ]
    return ServedFinding(
        **about, mode=mode, positions=len(measured), tokens=tokens, sigma=sigma, limit=limit,
        worst=worst, worst_place=place, ties=len(found) - len(real), flips=tuple(flips),
        complaints=tuple(complaints), first_wrong=first_wrong,
    )  # fmt: skip
