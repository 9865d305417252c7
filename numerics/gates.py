"""What is allowed. The numbers are defaults for a mode and a dtype; the reasons stand beside them.

Two modes: S, semantics, in float32, where a wrong epsilon or a scale off by 0.1 % cannot hide behind rounding; P,
precision, in the run dtype, against the noise of a faithful reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .metrics import BINS, DEVIATIONS, Metrics

Mode = Literal["S", "P"]
MODES: tuple[Mode, ...] = ("S", "P")
Scope = Literal["op", "layer", "inherited", "logits"]

HALF_ULP32 = 2.0**-24


@dataclass(frozen=True, slots=True)
class Gate:
    """Upper limits of one kind of comparison; None is not limited. `reason` says where they come from."""

    sigma: float | None = None
    excess: float | None = None
    linf: float | None = None
    bias: float | None = None
    slope: float | None = None
    rel_l2: float | None = None
    overlap: float | None = None
    reason: str = ""

    def complaints(self, m: Metrics) -> Iterator[str]:
        """What is wrong with these metrics, in words."""
        if m.special:
            yield f"{m.special} elements are finite on one side only"
        limits = {
            "sigma": (m.sigma, self.sigma),
            "worst token": (m.excess, self.excess),
            "largest error": (m.linf, self.linf),
            "|bias|": (abs(m.bias), self.bias),
            "|slope|": (abs(m.slope), self.slope),
            "relative error": (m.rel_l2, self.rel_l2),
        }
        for name, (value, limit) in limits.items():
            if limit is not None and not value <= limit:
                yield f"{name} {value:.3g} > {limit:.3g}"
        if self.overlap is not None and not m.overlap >= self.overlap:
            yield f"overlap of error distributions {m.overlap:.3f} < {self.overlap:.3f}"


def precision(scope: Scope, m: Metrics) -> Gate:
    """Mode P. What is left to chance follows from how many independent numbers the noise is made of."""
    chance = DEVIATIONS / max(m.effective, 1.0) ** 0.5
    if scope in ("op", "layer"):
        return Gate(1.0 + max(0.05, chance), 1.0, 3.0, max(0.02, chance), reason="one op or one layer, inputs given")
    # Errors of one layer are alike in the next: fewer independent numbers, so wider limits. Two histograms of n numbers
    # overlap by about 1 - bins / (4 n) if they are of one distribution.
    overlap = 0.97 - BINS / (4.0 * max(m.count, 1))
    return Gate(sigma=1.15 + chance, excess=2.0, overlap=overlap, reason="errors carried through the model")


def semantics(scope: Scope, reduction: int, depth: int = 1) -> Gate:
    """Mode S: float32 sums of `reduction` terms in any order, `depth` layers of them."""
    allowed = 2.0 * HALF_ULP32 * reduction**0.5
    if scope in ("op", "layer"):
        return Gate(rel_l2=allowed, slope=1e-6, reason="2 * 2^-24 * sqrt(K), K terms in the longest sum")
    return Gate(rel_l2=allowed * 2.0 * (1 + depth), slope=1e-5, reason="as a layer, added up over the layers")
