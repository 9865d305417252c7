"""How an op's implementations are judged: cases, a bound derived from the rounding contract, and mutants it must reject.

The oracle is the reference under numpy in float64, on exactly the inputs that the implementation gets. An output element
may be off by

    roundings * u |want|  +  accumulated * 2^-24 * magnitude

u is half a unit in the last place of the output's dtype (2^-24 float32, 2^-11 float16, 2^-9 bfloat16, 2^-4 e4m3 ...);
`roundings` is how often the contract rounds to the storage dtype; `accumulated` counts float32 operations in a chain
(with headroom for any order), each off by 2^-24 of `magnitude`: what was added up, in absolute values, |want| unless the
op says otherwise. On top of it the *gain* of each row, sum(got want) / sum(want^2), must be 1 to what independent
roundings allow: a scale that is off by half a percent hides inside the rounding of every bfloat16 element, but not in
their sum. Integers must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .declare import REGISTRY, OpError
from .plan import resolve

Arguments = dict[str, Any]
FLOATS = ("float32", "bfloat16")
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One set of arguments, by name: numpy arrays, None, and Python scalars. `tags`: ci, bench."""

    name: str
    arguments: Arguments
    tags: tuple[str, ...] = ("ci",)


@dataclass(frozen=True, slots=True)
class Bound:
    """How far an implementation may be off (see above). `reason` says why it is wider than the contract alone gives."""

    roundings: float = 1.0
    accumulated: float = 8.0
    gain: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Testing:
    """What an op's implementations are judged by.

    `cases(dtype)` makes the cases for a storage dtype; `mutants` are wrong references with the reference's signature,
    each of which the bound must reject in at least one case; `magnitude(arguments)` gives, for each output, what was
    added up in absolute values. `outputs` limits the judgement to some outputs (None: all).
    """

    cases: Callable[[str], Iterable[Case]]
    bound: Bound = Bound()
    mutants: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    magnitude: Callable[[Arguments], Any] | None = None
    dtypes: tuple[str, ...] = FLOATS


TESTING: dict[str, Testing] = {}


def judged_by(op: str, testing: Testing) -> None:
    """Attach `testing` to an op. Raises OpError if the op is unknown or has one already."""
    REGISTRY[op]
    if op in TESTING:
        raise OpError(f"op {op!r} has cases already")
    TESTING[op] = testing


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far outputs are off, in units of what is allowed (at most 1 passes), and where it is worst."""

    error: float
    gain: float
    where: str

    @property
    def passed(self) -> bool:
        """Whether both are within their bounds. NaN is not."""
        return self.error <= 1.0 and self.gain <= 1.0


def oracle(op: str, arguments: Arguments, reference: Callable[..., Any] | None = None) -> tuple[np.ndarray, ...]:
    """The reference (or a mutant of it) under numpy in float64."""
    declared = REGISTRY[op]
    wide = {name: _widen(value) for name, value in arguments.items()}
    if reference is None:
        out = getattr(resolve("numpy").bind(), op)(**wide)
    elif declared.level == "coarse":
        out = reference(resolve("numpy").bind(), **wide)
    else:
        from .namespaces import namespace

        out = reference(namespace("numpy"), **wide)
    return tuple(out) if isinstance(out, tuple) else (out,)


def judge(op: str, arguments: Arguments, outputs: Iterable[np.ndarray], dtype: str) -> Verdict:
    """Compare outputs, numpy arrays in their own dtypes, with the oracle."""
    testing = TESTING[op]
    wanted = oracle(op, arguments)
    magnitudes: Any = [None] * len(wanted)
    if testing.magnitude is not None:
        made = testing.magnitude({name: _widen(value) for name, value in arguments.items()})
        magnitudes = made if isinstance(made, tuple) else (made,)
    worst = Verdict(0.0, 0.0, "nothing compared")
    for index, (got, want, magnitude) in enumerate(zip(outputs, wanted, magnitudes, strict=True)):
        verdict = _judge_one(np.asarray(got), np.asarray(want), magnitude, testing.bound)
        if not (verdict.error <= worst.error and verdict.gain <= worst.gain):
            where = f"output {index}, {verdict.where}"
            worst = Verdict(_worse(worst.error, verdict.error), _worse(worst.gain, verdict.gain), where)
    return worst


def run_mutant(op: str, mutant: Callable[..., Any], arguments: Arguments, like: Iterable[Any]) -> list[np.ndarray]:
    """A mutant in float64, its outputs rounded once to the dtypes of `like`: a perfect implementation of wrong maths."""
    return [np.asarray(out).astype(dtype) for out, dtype in zip(oracle(op, arguments, mutant), like, strict=True)]


def half_ulp(dtype: np.dtype[Any]) -> float:
    """Half a unit in the last place of numbers in [1, 2)."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def _judge_one(got: np.ndarray, want: np.ndarray, magnitude: Any, bound: Bound) -> Verdict:
    if got.shape != want.shape:
        return Verdict(np.inf, np.inf, f"shape {got.shape}, wanted {want.shape}")
    if got.dtype.kind in "iub":
        wrong = np.flatnonzero((got != want).ravel())
        return Verdict(np.inf if len(wrong) else 0.0, 0.0, _place(wrong[0], got.shape) if len(wrong) else "")
    u, wide = half_ulp(got.dtype), got.astype(np.float64)
    special = ~np.isfinite(want)
    same = np.where(np.isnan(want), np.isnan(wide), wide == want)
    smallest = float(ml_dtypes.finfo(got.dtype).tiny)
    size = np.abs(want) if magnitude is None else np.broadcast_to(magnitude, want.shape)
    with np.errstate(invalid="ignore"):
        allowed = bound.roundings * u * np.maximum(np.abs(want), smallest) + bound.accumulated * 2.0**-24 * size
        error = np.where(special, np.where(same, 0.0, np.inf), np.abs(wide - want) / np.maximum(allowed, smallest * u))
    error = np.where(np.isnan(error), np.inf, error)
    if not error.size:
        return Verdict(0.0, 0.0, "")
    at = int(error.argmax())
    gain = _gain(np.where(special, 0.0, wide), np.where(special, 0.0, want), size, u, bound) if bound.gain else 0.0
    return Verdict(float(error.max()), gain, _place(at, want.shape))


def _gain(got: np.ndarray, want: np.ndarray, size: np.ndarray, u: float, bound: Bound) -> float:
    """The worst row's |gain - 1| over what independent roundings and float32 sums allow."""
    if want.ndim == 0 or want.shape[-1] < 16:
        return 0.0
    power = (want**2).sum(-1)
    used = power > 0
    power = np.where(used, power, 1.0)
    slope = np.abs((got * want).sum(-1) / power - 1.0)
    # Roundings are independent: their share of the slope is a random walk, six standard deviations of it are allowed.
    walk = 6.0 * bound.roundings * u / np.sqrt(3.0) * np.sqrt((want**4).sum(-1)) / power
    sums = bound.accumulated * 2.0**-24 * (np.where(np.isfinite(size), size, 0.0) * np.abs(want)).sum(-1) / power
    return float(np.where(used, slope / (walk + sums), 0.0).max())


def _worse(a: float, b: float) -> float:
    return b if not b <= a else a


def _place(index: int, shape: tuple[int, ...]) -> str:
    return f"element {tuple(int(i) for i in np.unravel_index(index, shape))}" if shape else "the only element"


def _widen(value: Any) -> Any:
    """float64 for floating arrays; everything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "iub":
        return value.astype(np.float64)
    return value
