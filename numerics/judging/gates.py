"""What is allowed. The numbers are defaults for a mode and a dtype; the reasons stand beside them.

Modes with gates: S, semantics, in float32, where a wrong epsilon or a scale off by 0.1 % cannot
hide behind rounding; P, precision, in the run dtype, against the noise of a faithful reference.
Mode X needs none: its probes are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...shared.errors import ConfigError
from .metrics import BINS, DEVIATIONS, Metrics

Mode = Literal["S", "X", "P"]
MODES: tuple[Mode, ...] = ("S", "P")
"""What a comparison runs if nobody says; X is asked for."""
ALL_MODES: tuple[Mode, ...] = ("S", "X", "P")
Scope = Literal["op", "layer", "inherited", "logits"]

HALF_ULP32 = 2.0**-24


@dataclass(frozen=True, slots=True)
class Gate:
    """Upper limits of one kind of comparison; None is not limited. `reason` says where they come
    from.
    """

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
        for name, (value, limit) in self._limited(m).items():
            if not value <= limit:
                yield f"{name} {value:.3g} > {limit:.3g}"
        if self.overlap is not None and not m.overlap >= self.overlap:
            yield f"overlap of error distributions {m.overlap:.3f} < {self.overlap:.3f}"

    def shares(self, m: Metrics) -> dict[str, float]:
        """Each limited metric as a share of its limit: above 1 fails."""
        shares = {name: value / limit for name, (value, limit) in self._limited(m).items()}
        if self.overlap is not None:
            shares["overlap"] = (1.0 - m.overlap) / (1.0 - self.overlap)
        return shares

    def _limited(self, m: Metrics) -> dict[str, tuple[float, float]]:
        """(value, upper limit) by name."""
        pairs = {
            "sigma": (m.sigma, self.sigma),
            "worst token": (m.excess, self.excess),
            "largest error": (m.linf, self.linf),
            "|bias|": (abs(m.bias), self.bias),
            "|slope|": (abs(m.slope), self.slope),
            "relative error": (m.rel_l2, self.rel_l2),
        }
        return {name: (value, limit) for name, (value, limit) in pairs.items() if limit is not None}


def precision(scope: Scope, m: Metrics) -> Gate:
    """Mode P. What is left to chance follows from how many independent numbers the noise is made
    of.
    """
    chance = DEVIATIONS / max(m.effective, 1.0) ** 0.5
    if scope in ("op", "layer"):
        return Gate(
            1.0 + max(0.05, chance),
            1.0,
            3.0,
            max(0.02, chance),
            reason="one op or one layer, inputs given",
        )
    # Errors of one layer are alike in the next: fewer independent numbers, so wider limits. Two
    # histograms of n numbers overlap by about 1 - bins / (4 n) if they are of one distribution.
    overlap = 0.97 - BINS / (4.0 * max(m.count, 1))
    return Gate(
        sigma=1.15 + chance, excess=2.0, overlap=overlap, reason="errors carried through the model"
    )


def accumulated(reduction: int) -> Gate:
    """Mode P, for a float32 result of narrower numbers: only the order of a sum is open, and how it
    is carried.

    Tensor cores cut partial sums off instead of rounding them, which scales results by about K / 32
    halves of 2^-24: 0.8e-6 for K = 1024 on an H200. Four times that is allowed.
    """
    return Gate(
        rel_l2=2.0 * HALF_ULP32 * reduction**0.5,
        slope=max(1e-6, reduction * HALF_ULP32 / 16),
        reason="a sum",
    )


FOREIGN = 2.0
"""Sigma that is allowed to what is not made of our ops: it keeps no contract and rounds at more
places. transformers rounds rotary tables and normed values, and reaches 1.3 in bfloat16; in float32
the gates of mode S hold for it too.
"""


def foreign(mode: Mode, m: Metrics, reduction: int, depth: int) -> Gate:
    """Logits of a program that is not ours."""
    if mode == "S":
        return semantics("logits", reduction, depth)
    return Gate(
        sigma=FOREIGN + DEVIATIONS / max(m.effective, 1.0) ** 0.5,
        reason="roundings that no contract states",
    )


def semantics(scope: Scope, reduction: int, depth: int = 1) -> Gate:
    """Mode S: float32 sums of `reduction` terms in any order, `depth` layers of them."""
    allowed = 2.0 * HALF_ULP32 * reduction**0.5
    if scope in ("op", "layer"):
        return Gate(
            rel_l2=allowed, slope=1e-6, reason="2 * 2^-24 * sqrt(K), K terms in the longest sum"
        )
    return Gate(
        rel_l2=allowed * 2.0 * (1 + depth),
        slope=1e-5,
        reason="as a layer, added up over the layers",
    )


def parse_modes(text: str, allowed: Sequence[str] = ALL_MODES) -> tuple[Any, ...]:
    """Modes from `S,P`. Raises ConfigError."""
    modes = tuple(part.strip().upper() for part in text.split(","))
    if set(modes) - set(allowed):
        raise ConfigError(
            f"mode: got {text!r}, allowed are {', '.join(allowed)}, separated by commas"
        )
    return modes
