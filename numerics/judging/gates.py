"""What is allowed. The numbers are defaults for a mode and a dtype; the reasons stand beside them.

Modes with gates: S, semantics, in float32, where a wrong epsilon or a scale off by 0.1 % cannot
hide behind rounding; P, precision, in the run dtype, against the noise of a faithful reference.
Mode X needs none: its probes are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from ...shared.errors import ConfigError
from ...shared.models.config import ModelConfig
from ..sides.jitter import HALF_ULP32 as HALF_ULP32
from .chance import ratio_limit
from .metrics import DEVIATIONS, TOKEN_LIMIT, Metrics, bins_of

Mode = Literal["S", "X", "P"]
MODES: tuple[Mode, ...] = ("S", "P")
"""What a comparison runs if nobody says; X is asked for."""
ALL_MODES: tuple[Mode, ...] = ("S", "X", "P")


def mode_of(dtype: str) -> Mode:
    """The mode that judges a run in `dtype`: in float32 the noise of a reference is one order of
    sums, and mode P is mode S.
    """
    return "S" if dtype == "float32" else "P"


def longest_sum(model: ModelConfig) -> int:
    """How many terms the longest sum of a model's products has: the `reduction` of its gates."""
    return max(model.hidden_size, model.intermediate_size)


Scope = Literal["op", "layer", "inherited", "logits"]

FALSE_ALARMS = 1e-3
"""Chance of an alarm in a whole run without a fault."""


@dataclass(frozen=True, slots=True)
class Family:
    """The comparisons of one run, each with a limit. What chance is left to one of them follows
    from their number.

    Every comparison may exceed its limit by chance with FALSE_ALARMS / comparisons (Bonferroni).
    This holds whatever the dependence between comparisons is, and errors of one op are the inputs
    of the next. It costs little: ten times the comparisons are 0.4 deviations.
    """

    comparisons: int = 10_000

    @property
    def deviations(self) -> float:
        """Standard deviations of a normal distribution beyond which that chance is left."""
        return NormalDist().inv_cdf(1.0 - FALSE_ALARMS / max(self.comparisons, 1))

    @property
    def signs(self) -> float:
        """A sum of numbers with random signs exceeds so many times the root of the sum of their
        squares with that chance at most, whatever the numbers are: x times is exceeded with at most
        3.18 of the chance that a normal number exceeds x (Bentkus and Dzindzalieta 2015).
        """
        return NormalDist().inv_cdf(1.0 - FALSE_ALARMS / (3.18 * max(self.comparisons, 1)))

    @property
    def reach(self) -> float:
        """So many times its noise two logits may lie apart and still change places: each is off by
        that noise, their difference by sqrt(2) of it.
        """
        return 2.0**0.5 * self.deviations

    def spread(self, numbers: float, beside: float | None = None) -> float:
        """The largest ratio that chance gives of two root mean squares: of `numbers` independent
        errors, and of `beside` others (None: as many).

        The ratio of their squares has the F distribution. It has a heavy tail: with few numbers the
        noise that an error is measured by may be small by luck.
        """
        tail = FALSE_ALARMS / max(self.comparisons, 1)
        n, m = (_rounded_down(x) for x in (numbers, numbers if beside is None else beside))
        return ratio_limit(n, m, tail)


def _rounded_down(numbers: float) -> float:
    """To two digits, so that few quantiles have to be found; fewer numbers allow more."""
    unit = 10.0 ** (math.floor(math.log10(max(numbers, 1.0))) - 1)
    return max(math.floor(numbers / unit) * unit, 1.0)


@dataclass(frozen=True, slots=True)
class Amplified:
    """What an op or a layer makes of errors of its inputs: root mean squares over `tries` random
    ones of at most a half float32 ulp. `rel_l2` and `slope` as in Metrics, `elements` [...] of each
    element in absolute terms. `numbers` are independent rows that `rel_l2` is made of.
    """

    rel_l2: float
    slope: float
    numbers: float
    tries: int
    elements: np.ndarray


def walk(reduction: int) -> float:
    """How much further `reduction` roundings of a float32 sum may lead than roundings of its terms.

    Terms that are off by up to half an ulp in both factors make an error of 2^-24 sqrt(2/3) times
    the root of their squares. The worst order of sums adds its largest term first: each of the
    other additions then rounds a number of that size, by 2^-24 / sqrt(3) of it.
    """
    return (reduction / 2.0) ** 0.5


@dataclass(frozen=True, slots=True)
class Gate:
    """Upper limits of one kind of comparison; None is not limited."""

    sigma: float | None = None
    excess: float | None = None
    linf: float | None = None
    bias: float | None = None
    slope: float | None = None
    rel_l2: float | None = None
    overlap: float | None = None

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


def precision(
    scope: Scope, m: Metrics, family: Family, numbers: float = float("inf"), rows: int = 1,
    amplified: Amplified | None = None,
) -> Gate:  # fmt: skip
    """Mode P. What is left to chance follows from how many independent numbers the noise is made
    of; `numbers` is what is known to be the most, in all `rows`.

    An op or a layer with given inputs makes nearly all roundings that the faithful reference makes,
    so the ratio wanders less than that of independent errors: DEVIATIONS / sqrt(n) are enough. In a
    run as a whole roundings have become independent.

    The faithful reference is one draw of the noise. Where it is made of few numbers and small by
    luck, `amplified` says what other draws give: of roundings to the run dtype, not to float32.
    """
    if amplified is not None:
        n, tries = amplified.numbers, amplified.tries
        drawn = amplified.rel_l2 / max(m.rel_noise, 1e-30)
        times = max(1.0, drawn * family.spread(n, n * tries))
        gate = precision(scope, m, family, numbers, rows)
        wider = {name: getattr(gate, name) for name in ("sigma", "excess", "linf")}
        wider = {name: limit and limit * times for name, limit in wider.items()}
        return replace(gate, **wider, overlap=None if times > 1.0 else gate.overlap)
    if scope in ("op", "layer"):
        chance = DEVIATIONS / max(m.effective, 1.0) ** 0.5
        return Gate(1.0 + max(0.05, chance), ROW_OF[scope], 3.0, max(0.02, chance))
    n = max(min(m.effective, numbers), FEWEST)
    sigma = 1.15 * family.spread(n)
    of_row = family.spread(max(n / rows, FEWEST)) / TOKEN_LIMIT
    # Normal distributions of this ratio overlap by the root; histograms of n numbers of one
    # distribution by about 1 - bins / (4 n). Errors of one layer are alike in the next: 3 times.
    alike = (2.0 * sigma / (1.0 + sigma**2)) ** 0.5
    overlap = min(0.97, alike) - 3.0 * bins_of(m.count) / (4.0 * n)
    return Gate(sigma=sigma, excess=max(2.0, of_row), overlap=max(overlap, 0.0))


ROW_OF: dict[str, float] = {"op": 1.0, "layer": 4.0 / 3.0}
"""How far a row may exceed what independent roundings leave to chance. Within a layer one rounding
that falls on the other side moves all that follows in its row, which so has fewer independent
numbers: 4 times fewer are allowed for.
"""
FEWEST = 8.0
"""Independent numbers that a run's noise has at least. A row of a run moves as one where attention
is sharp, so that its elements are few independent numbers; but roundings are bounded, and the ratio
of two has no tail like that of normal errors.
"""


def accumulated(
    reduction: int, amplified: Amplified | None = None, family: Family = Family()
) -> Gate:
    """Mode P, for a float32 result of narrower numbers: only the order of a sum is open, and how it
    is carried. More is allowed where a sum cancels, as in mode S.

    Tensor cores cut partial sums off instead of rounding them, which scales results by about K / 32
    halves of 2^-24: 0.8e-6 for K = 1024 on an H200. Four times that is allowed.
    """
    allowed = 2.0 * HALF_ULP32 * reduction**0.5
    slope = max(1e-6, reduction * HALF_ULP32 / 16)
    return _widened(allowed, slope, reduction, amplified, family)


def _widened(
    rel_l2: float, slope: float, reduction: int, amplified: Amplified | None, family: Family
) -> Gate:
    """The gate of float32 sums, or what chance makes of how an op amplifies errors of its inputs,
    where that is more: sqrt(K / 2) times that.
    """
    if amplified is None:
        return Gate(rel_l2=rel_l2, slope=slope)
    n, tries, times = amplified.numbers, amplified.tries, walk(reduction)
    return Gate(
        rel_l2=max(rel_l2, times * amplified.rel_l2 * family.spread(n, n * tries)),
        slope=max(slope, times * amplified.slope * family.spread(1, tries)),
    )


FOREIGN = 2.0
"""Sigma that is allowed to what is not made of our ops: it keeps no contract and rounds at more
places. transformers rounds rotary tables and normed values, and reaches 1.3 in bfloat16; in float32
the gates of mode S hold for it too.
"""


def foreign(mode: Mode, m: Metrics, reduction: int, depth: int) -> Gate:
    """Logits of a program that is not ours."""
    if mode == "S":
        return semantics("logits", reduction, depth, noise=m.rel_noise)
    return Gate(sigma=FOREIGN + DEVIATIONS / max(m.effective, 1.0) ** 0.5)


def semantics(
    scope: Scope,
    reduction: int,
    depth: int = 1,
    *,
    noise: float = 0.0,
    numbers: float = 1.0,
    amplified: Amplified | None = None,
    family: Family = Family(),
) -> Gate:
    """Mode S: float32 sums of `reduction` terms in any order, `depth` layers of them.

    These limits hold where errors are not amplified. Where they are (sharp attention, sums that
    cancel), more is allowed: by chance, and by what an op, a layer or a run makes of errors of its
    ops' inputs, `amplified`; for a run as a whole, what chance makes of `noise`, the relative error
    of the faithful float32 reference, which is made of so many independent `numbers`. Neither is
    ever below the limits without.
    """
    allowed = 2.0 * HALF_ULP32 * reduction**0.5  # K terms in the longest sum
    if scope in ("op", "layer"):
        return _widened(allowed, 1e-6, reduction, amplified, family)
    most = family.spread(FEWEST) * noise
    # Where one channel is nearly all of the stream, an error of it is a slope.
    share = min(max(numbers, 1.0), FEWEST) ** -0.5
    rel_l2, slope = max(allowed * 2.0 * (1 + depth), most), max(1e-5, most * share)
    return _widened(rel_l2, slope, reduction, amplified, family)


def parse_modes(text: str, allowed: Sequence[str] = ALL_MODES) -> tuple[Any, ...]:
    """Modes from `S,P`. Raises ConfigError."""
    modes = tuple(part.strip().upper() for part in text.split(","))
    if set(modes) - set(allowed):
        raise ConfigError(
            f"mode: got {text!r}, allowed are {', '.join(allowed)}, separated by commas"
        )
    return modes
