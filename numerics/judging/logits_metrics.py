"""The ends of two runs: divergence, agreement, and the tokens that flip."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from ...shared.step import StepInput
from ..errors import NotComparable
from ..sides.steps import where
from .diff import LogitsFinding
from .gates import FEWEST, Family, Mode
from .metrics import Flip, agreement, divergence, flips, independent, log_softmax

KL_LIMIT = 1.3
"""Mean divergence of a side from the exact reference, over that of the noise, besides chance."""
KL_FLOOR = 1e-9
"""Nats below which a divergence is the rounding of its own computation."""


def compare_logits(
    a: np.ndarray, b: np.ndarray, exact: np.ndarray, faithful: np.ndarray, step: StepInput | None,
    mode: Mode,
    kl_limit_b: float = KL_LIMIT, *, family: Family | None = None, numbers: float = float("inf"),
) -> LogitsFinding:  # fmt: skip
    """Compare logits [row vocab] of two sides. `step` names the rows, if they are its tokens.

    `numbers` is the most independent numbers that logits are made of. A side b that keeps no
    contract (`kl_limit_b` above KL_LIMIT) is allowed more noise, and so are its ties. Rows that a
    reference does not know are left out. Raises NotComparable if there are no others.
    """
    rows = known_rows(exact, faithful)
    if not len(rows):
        raise NotComparable("logits: no row of the references is finite")
    if len(rows) < len(exact):
        a, b, exact, faithful = (x[rows] for x in (a, b, exact, faithful))
    kl = {
        name: float(divergence(exact, x).mean())
        for name, x in (("a", a), ("b", b), ("noise", faithful))
    }
    foreign = mode == "P" and kl_limit_b > KL_LIMIT
    family = family or Family()
    times = kl_limit_b**0.5 if foreign else 1.0
    found = flips(a, b, exact, faithful, times, family.reach)
    real = [flip for flip in found if not flip.tie]
    complaints = [f"{len(real)} tokens differ by more than rounding explains"] if real else []
    if mode == "P":
        noise, words = _expected(exact, faithful)
        logits = max(min(independent((faithful.astype(np.float64) - exact) ** 2), numbers), FEWEST)
        # A divergence is as the square of an error: few numbers may be off by the F distribution.
        chance = family.spread(min(words, logits), logits) ** 2
        for side, limit in (("a", KL_LIMIT), ("b", kl_limit_b)):
            limit *= chance
            if not kl[side] <= limit * noise + KL_FLOOR:
                complaints.append(f"{side}: KL {kl[side]:.3g} nats > {limit:.3g} x {noise:.3g}")
    return LogitsFinding(
        rows=len(a),
        kl_ab=float(divergence(a, b).mean()),
        kl_ba=float(divergence(b, a).mean()),
        kl_a=kl["a"],
        kl_b=kl["b"],
        kl_noise=kl["noise"],
        argmax_equal=int((a.argmax(-1) == b.argmax(-1)).sum()),
        top5=agreement(a, b),
        ties=len(found) - len(real),
        real=len(real),
        flips=tuple(flip_record(f, where(step, rows[f.row]) if step else "") for f in found[:50]),
        complaints=tuple(complaints),
        mode=mode,
        step=-1 if step is None else step.step_id - 1,
    )


def known_rows(exact: np.ndarray, faithful: np.ndarray) -> np.ndarray:
    """The rows of logits [row vocab] that are finite in both references."""
    return np.flatnonzero(np.isfinite(exact).all(-1) & np.isfinite(faithful).all(-1))


def named_divergence(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p || q) in nats of log-probabilities of some tokens, all others taken together."""
    p, q = (np.append(x, np.log(max(1.0 - float(np.exp(x).sum()), 1e-12))) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum())


def flip_record(f: Flip, place: str) -> dict[str, object]:
    """A token that differs, fit for JSON."""
    return asdict(f) | {"place": place, "tie": f.tie}


def _expected(exact: np.ndarray, faithful: np.ndarray) -> tuple[float, float]:
    """The mean divergence of the noise that the reference's is a draw of, and of how many
    independent numbers a draw is made.

    Noise of power s in all words of a row gives s (1 - sum p^2) / 2 nats. Where a row's probability
    is that of two words, one number decides it, whatever the vocabulary is; and few such rows may
    be nearly all of the mean.
    """
    p = np.exp(log_softmax(exact))
    noise = faithful.astype(np.float64) - exact
    together = (p * p).sum(-1)
    rows = noise.var(-1) * (1.0 - together) / 2.0
    power = float((rows * rows * together / np.maximum(1.0 - together, together)).sum())
    return float(rows.mean()), float(rows.sum()) ** 2 / power if power else float(noise.size)
