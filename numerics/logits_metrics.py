"""The ends of two runs: divergence, agreement, and the tokens that flip."""

from __future__ import annotations

import numpy as np

from ..shared.step import StepInput
from .diff import LogitsFinding
from .gates import Mode
from .metrics import agreement, divergence, flips
from .steps import where

KL_LIMIT = 1.3
"""Mean divergence of a side from the exact reference, over that of the faithful reference."""
KL_FLOOR = 1e-9
"""Nats below which a divergence is the rounding of its own computation."""


def compare_logits(
    a: np.ndarray, b: np.ndarray, exact: np.ndarray, faithful: np.ndarray, step: StepInput | None, mode: Mode
) -> LogitsFinding:
    """Compare logits [row vocab] of two sides. `step` names the rows, if they are its tokens."""
    kl = {name: float(divergence(exact, x).mean()) for name, x in (("a", a), ("b", b), ("noise", faithful))}
    found = flips(a, b, exact, faithful)
    real = [flip for flip in found if not flip.tie]
    complaints = [f"{len(real)} tokens differ by more than rounding explains"] if real else []
    if mode == "P":
        limit = KL_LIMIT * (kl["noise"] + _spread(exact, faithful))
        for side in ("a", "b"):
            if kl[side] > limit + KL_FLOOR:
                complaints.append(f"{side}: KL {kl[side]:.3g} nats > {KL_LIMIT} x {kl['noise']:.3g}")
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
        flips=tuple(
            {
                "row": f.row,
                "place": where(step, f.row) if step is not None else "",
                "a": f.a,
                "b": f.b,
                "margin": f.margin,
                "noise": f.noise,
                "tie": f.tie,
            }
            for f in found[:50]
        ),
        complaints=tuple(complaints),
    )


def _spread(exact: np.ndarray, faithful: np.ndarray) -> float:
    """Twice the standard error of the noise's mean divergence: few rows say little."""
    values = divergence(exact, faithful)
    return 2.0 * float(values.std()) / max(len(values), 1) ** 0.5
