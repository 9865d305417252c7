"""How an op's implementations are judged: cases, a bound derived from the rounding contract,
mutants to be rejected.

The oracle is the reference under numpy in float64, on exactly the inputs that the implementation
gets; between the finer ops of a coarse one it rounds to the storage dtype, as their contracts do.
An output element may be off by

    roundings * u |want|  +  (inner + ties) * u * rounded  +  accumulated * 2^-24 * magnitude

u is half a unit in the last place of the output's dtype (2^-24 float32, 2^-11 float16, 2^-8
bfloat16, 2^-4 e4m3); `roundings` is how often the contract rounds the result to the storage dtype;
`accumulated` counts float32 operations in a chain (with headroom for any order), each off by 2^-24
of `magnitude`: what was added up, in absolute values, |want| unless the op says otherwise; `inner`
is how often the contract rounds values to the storage dtype on the way, and `rounded` what a
relative error of 1 in those would do. (Values below the dtype's smallest normal number are off by
half of its smallest number, and not by u of themselves: what that may do is `small`, which an op
whose values on the way are that small adds.) Where the oracle rounds on the way too, a value beside
a tie may fall to its other side, which is 2 u and not u: `ties` is 1. Few do, so what follows
leaves it out. On top of it the *gain* of each row, sum(got want) / sum(want^2), must be 1 to what
independent roundings allow: a scale that is off by half a percent hides inside the rounding of
every bfloat16 element, but not in their sum. Integers, and every output of an op that is judged
`bitwise`, must be equal. So must a cache of fp8 that an op writes: the oracle writes it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .declare import REGISTRY, Op, OpError
from .implement import IMPLEMENTATIONS, Framework, Implementation
from .plan import COMPOSITION, NATIVE, resolve

Arguments = dict[str, Any]
FLOATS = ("float32", "float16", "bfloat16")
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One set of arguments, by name: numpy arrays, None, and Python scalars. `tags`: ci, bench.

    `source` may be a function that makes them, for large ones that most users of the cases skip.
    """

    name: str
    source: Arguments | Callable[[], Arguments]
    tags: tuple[str, ...] = ("ci",)

    @property
    def arguments(self) -> Arguments:
        """The arguments."""
        return self.source() if callable(self.source) else self.source


@dataclass(frozen=True, slots=True)
class Bound:
    """How far an implementation may be off (see above). `reason` says why it is wider than the
    contract alone gives.
    """

    roundings: float = 1.0
    accumulated: float = 8.0
    inner: float = 0.0
    ties: float = 0.0
    gain: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Testing:
    """What an op's implementations are judged by.

    `cases(dtype)` makes the cases for a storage dtype; `mutants` are wrong references with the
    reference's signature, each of which the bound must reject in at least one case.
    `magnitude(arguments)` gives, for each output, what was added up in absolute values (None:
    |want|), `rounded` the same for inner roundings (None: the magnitude). `small(arguments, least)`
    is how far each output may be off, in absolute terms, where inner roundings are off by `least`,
    half of the storage dtype's smallest number. `flips(arguments, dtype)` is how far it may be off
    by values that are quantised on the way, where a rounding to the storage dtype decides.

    `bitwise`: the oracle runs in the dtypes of the arguments, and outputs must equal it bit for
    bit. `free(arguments)` marks, for each output, elements that the contract leaves open. `rows`
    names the arguments whose first axis is the row of which the contract says that it depends on no
    other. `dots`: by the name of other products that an implementation may have (`dot`), how far
    each output may be off on top, in absolute terms. `truth` is the op written apart from
    its reference, of which it calls nothing: it must pass, or one of both is wrong. Most mutants
    are made of it.
    """

    cases: Callable[[str], Iterable[Case]]
    bound: Bound = Bound()
    mutants: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    magnitude: Callable[[Arguments], Any] | None = None
    rounded: Callable[[Arguments], Any] | None = None
    small: Callable[[Arguments, float], Any] | None = None
    flips: Callable[[Arguments, Any], Any] | None = None
    dtypes: tuple[str, ...] = FLOATS
    bitwise: bool = False
    free: Callable[[Arguments], Any] | None = None
    rows: tuple[str, ...] = ()
    truth: Callable[..., Any] | None = None
    dots: Mapping[str, Callable[[Arguments], Any]] = field(default_factory=dict)


TESTING: dict[str, Testing] = {}


def judged_by(op: str, testing: Testing) -> None:
    """Attach `testing` to an op. Raises OpError if the op is unknown or has one already."""
    REGISTRY[op]
    if op in TESTING:
        raise OpError(f"op {op!r} has cases already")
    TESTING[op] = testing


# --- the oracle
# --------------------------------------------------------------------------------------------------


def oracle(
    op: str, arguments: Arguments, reference: Callable[..., Any] | None = None
) -> tuple[np.ndarray, ...]:
    """The reference (or a mutant of it) under numpy: in float64, or in the arguments' dtypes for
    a bitwise op.
    """
    declared, testing = REGISTRY[op], TESTING.get(op)
    exact = testing is not None and testing.bitwise
    given = arguments if exact else widened(declared, arguments)
    function = reference or declared.reference
    first = _rounding_ops(_storage(arguments), exact) if declared.level == "coarse" else _numpy()
    with np.errstate(all="ignore"):
        return _tuple(function(first, **given))


def run_mutant(
    op: str, mutant: Callable[..., Any], arguments: Arguments, like: Iterable[Any]
) -> list[np.ndarray]:
    """A mutant, its outputs rounded once to the dtypes of `like`: a perfect implementation of
    wrong mathematics.
    """
    with np.errstate(all="ignore"):
        return [
            np.asarray(out).astype(dtype)
            for out, dtype in zip(oracle(op, arguments, mutant), like, strict=True)
        ]


def _rounding_ops(storage: Any, exact: bool) -> SimpleNamespace:
    """The finer ops under numpy. A result that its contract rounds is rounded to `storage` where
    another op reads it: the last one is judged.

    `rounded(x)` does the same, for mutants.
    """
    space, made = SimpleNamespace(), list[Any]()

    def rounded(x: Any) -> Any:
        floating = isinstance(x, np.ndarray) and x.dtype.kind not in "iub"
        return x.astype(storage).astype(x.dtype) if floating and storage is not None else x

    def read(x: Any) -> Any:
        return rounded(x) if any(x is y for y in made) else x

    def bound(op: Op) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            first = space if op.level == "coarse" else _numpy()
            out = op.reference(first, *map(read, args), **{n: read(v) for n, v in kwargs.items()})
            if not exact and not op.contract.rounds.startswith("nowhere"):
                made.extend(_tuple(out))
            return out

        return call

    for op in REGISTRY:
        setattr(space, op.name, bound(op))
    space.rounded = rounded
    return space


def _storage(arguments: Arguments) -> Any:
    """The dtype of the first floating array, which is the activation."""
    return next(
        (
            v.dtype
            for v in arguments.values()
            if isinstance(v, np.ndarray) and v.dtype.kind not in "iub"
        ),
        None,
    )


def _numpy() -> Any:
    from .namespaces import namespace

    return namespace("numpy")


def _widen(value: Any) -> Any:
    """float64 for floating arrays; everything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "iub":
        return value.astype(np.float64)
    return value


def widened(op: Op, arguments: Arguments) -> Arguments:
    """The arguments in float64, but for a state of one byte an entry: its dtype says how the op
    stores a number.
    """
    narrow = {name for name in op.state if _is_narrow(arguments.get(name))}
    return {name: value if name in narrow else _widen(value) for name, value in arguments.items()}


def _is_narrow(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.itemsize == 1


def _tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple) else (out,)


# --- judging
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far outputs are off, in units of what is allowed (at most 1 passes), and where it is
    worst.
    """

    error: float
    gain: float
    where: str

    @property
    def passed(self) -> bool:
        """Whether both are within their bounds. NaN is not."""
        return self.error <= 1.0 and self.gain <= 1.0


class Limits(NamedTuple):
    """Half a unit in the last place of numbers in [1, 2), the smallest normal and the largest
    number of a dtype.
    """

    half_ulp: float
    tiny: float
    largest: float


def limits(dtype: Any) -> Limits:
    """The limits of a floating dtype."""
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return Limits(float(info.eps) / 2, float(info.tiny), float(info.max))


class Judge:
    """Judges outputs for one set of arguments; the oracle runs once. `testing`: another one than
    the op's own.
    """

    def __init__(
        self, op: str, arguments: Arguments, testing: Testing | None = None, dot: str = ""
    ) -> None:
        """`dot`: the products that an implementation has in place of the op's."""
        self.testing = testing or TESTING[op]
        self.wanted = oracle(op, arguments)
        wide = {name: _widen(value) for name, value in arguments.items()}
        with np.errstate(all="ignore"):
            self.magnitudes = self._each(self.testing.magnitude, wide)
            self.rounded = self._each(self.testing.rounded or self.testing.magnitude, wide)
            small, flips, storage = self.testing.small, self.testing.flips, _storage(arguments)
            least = 0.0 if storage is None else limits(storage).half_ulp * limits(storage).tiny
            self.small = self._each(None if small is None else lambda a: small(a, least), wide)
            self.flips = self._each(None if flips is None else lambda a: flips(a, storage), wide)
        self.free = self._each(self.testing.free, arguments)
        self.by_dot = self._each(self.testing.dots[dot] if dot else None, wide)

    def _each(
        self, function: Callable[[Arguments], Any] | None, arguments: Arguments
    ) -> tuple[Any, ...]:
        return _tuple(function(arguments)) if function is not None else (None,) * len(self.wanted)

    def __call__(
        self, outputs: Iterable[np.ndarray], more: Sequence[np.ndarray | None] = ()
    ) -> Verdict:
        """Compare outputs, numpy arrays in their own dtypes, with the oracle.

        `more` [...] is what each element of an output may be off besides, in absolute terms. An
        output with it is not judged by its bits.
        """
        worst = Verdict(0.0, 0.0, "nothing compared")
        parts = zip(
            outputs, self.wanted, self.magnitudes, self.rounded, self.small, self.free, self.flips,
            self.by_dot, strict=True,
        )  # fmt: skip
        for index, (got, want, magnitude, rounded, small, free, *besides) in enumerate(parts):
            got, want = np.asarray(got), np.asarray(want)
            if free is not None and got.shape == want.shape:
                got = np.where(np.broadcast_to(free, got.shape), want.astype(got.dtype), got)
            besides = [x for x in (*besides, more[index] if more else None) if x is not None]
            extra = sum(besides) if besides else None
            verdict = _judge_one(got, want, magnitude, rounded, small, self.testing, extra)
            if not (verdict.error <= worst.error and verdict.gain <= worst.gain):
                where = f"output {index}, {verdict.where}"
                worst = Verdict(
                    _worse(worst.error, verdict.error), _worse(worst.gain, verdict.gain), where
                )
        return worst


def judge(op: str, arguments: Arguments, outputs: Iterable[np.ndarray]) -> Verdict:
    """Compare outputs, numpy arrays in their own dtypes, with the oracle."""
    return Judge(op, arguments)(outputs)


def _judge_equal(got: np.ndarray, want: np.ndarray) -> Verdict:
    with np.errstate(invalid="ignore"):
        differs = (got != want) & ~((got != got) & (want != want))
    wrong = np.flatnonzero(differs)
    return Verdict(
        np.inf if len(wrong) else 0.0, 0.0, _place(wrong[0], got.shape) if len(wrong) else ""
    )


def _judge_one(
    got: np.ndarray, want: np.ndarray, magnitude: Any, rounded: Any, small: Any, testing: Testing,
    more: np.ndarray | None = None,
) -> Verdict:  # fmt: skip
    if got.shape != want.shape:
        return Verdict(np.inf, np.inf, f"shape {got.shape}, wanted {want.shape}")
    if (testing.bitwise and more is None) or got.dtype.kind in "iub" or _is_narrow(want):
        return _judge_equal(got, want)
    bound, wide = testing.bound, got.astype(np.float64)
    u, tiny, largest = limits(got.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        # What is off before the last rounding, in absolute terms.
        size, inner = (
            np.abs(want) if m is None else np.broadcast_to(m, want.shape)
            for m in (magnitude, rounded)
        )
        before = bound.inner * u * inner + bound.accumulated * 2.0**-24 * size
        before = before if small is None else before + bound.inner * small
        before = before if more is None else before + more
    special = ~np.isfinite(want)
    same = np.where(np.isnan(want), np.isnan(wide), wide == want)
    # What does not fit the dtype may be infinite or the largest number.
    overflows = ~special & (np.abs(want) > largest * (1 - u))
    same_overflow = (
        overflows & (np.sign(wide) == np.sign(want)) & (np.abs(wide) >= largest * (1 - 4 * u))
    )
    with np.errstate(invalid="ignore", over="ignore"):
        allowed = (
            bound.roundings * u * np.maximum(np.abs(want), tiny) + before + bound.ties * u * inner
        )
        error = np.abs(wide - want) / np.maximum(allowed, tiny * u)
    error = np.where(special, np.where(same, 0.0, np.inf), np.where(same_overflow, 0.0, error))
    error = np.where(np.isnan(error), np.inf, error)
    if not error.size:
        return Verdict(0.0, 0.0, "")
    out = special | overflows
    gain = 0.0
    if bound.gain:
        inside = np.where(out, 0.0, want)
        gain = _gain(
            np.where(out, 0.0, wide),
            inside,
            inside.astype(got.dtype).astype(np.float64),
            before,
            u,
            bound,
        )
    return Verdict(float(error.max()), gain, _place(int(error.argmax()), want.shape))


def _gain(
    got: np.ndarray, want: np.ndarray, nearest: np.ndarray, before: np.ndarray, u: float,
    bound: Bound
) -> float:  # fmt: skip
    """The worst row's |gain - 1| over what independent roundings and float32 sums allow.

    Roundings are not independent where a row of few bits is scaled by almost a power of two: all go
    the same way. So the gain may also be that of `nearest`, which is `want` rounded.
    """
    if want.ndim == 0 or want.shape[-1] < 16:
        return 0.0
    power = (want**2).sum(-1)
    used = power > 0
    power = np.where(used, power, 1.0)
    with np.errstate(invalid="ignore", over="ignore"):
        slope = ((got - want) * want).sum(-1) / power
        slope = np.minimum(np.abs(slope), np.abs(slope - ((nearest - want) * want).sum(-1) / power))
        # Roundings are independent: their share of the slope is a random walk, six standard
        # deviations of it are allowed, and never more than each of them can give.
        walk = 6.0 / np.sqrt(3.0) * np.sqrt((want**4).sum(-1)) / power
        walk = bound.roundings * u * np.minimum(walk, 1.0)
    # What is rounded or summed before reaches many elements of a row alike, so no walk can be
    # assumed.
    common = (np.where(np.isnan(before), 0.0, before) * np.abs(want)).sum(-1) / power
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(slope > 0, slope / (walk + common), 0.0)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    return float(np.where(used, ratio, 0.0).max(initial=0.0))


def _worse(a: float, b: float) -> float:
    return b if not b <= a else a


def _place(index: int, shape: tuple[int, ...]) -> str:
    return (
        f"element {tuple(int(i) for i in np.unravel_index(index, shape))}"
        if shape
        else "the only element"
    )


# --- mutants
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Detection:
    """The case that rejects a mutant most clearly, in one dtype."""

    op: str
    mutant: str
    dtype: str
    case: str
    verdict: Verdict

    @property
    def by(self) -> str:
        """What saw it: the error of an element, the gain of a row, or a value that had to be
        equal.
        """
        if not np.isfinite(max(self.verdict.error, self.verdict.gain)):
            return "unequal"
        return "error" if self.verdict.error > 1.0 else "gain"

    @property
    def factor(self) -> float:
        """By how much the bound is exceeded."""
        return max(self.verdict.error, self.verdict.gain)


def detect(op: str, testing: Testing | None = None) -> Iterator[tuple[str, str, Detection | None]]:
    """For each dtype and mutant of an op, (mutant, dtype, the clearest detection), None where no
    ci case rejects it.
    """
    testing = testing or TESTING[op]
    for dtype in testing.dtypes:
        cases = ci_cases(testing, dtype)
        judges = [Judge(op, case.arguments, testing) for case in cases]
        likes = [[out.dtype for out in run(op, "numpy", None, case.arguments)] for case in cases]
        for name, mutant in testing.mutants.items():
            best: Detection | None = None
            for case, judge_, like in zip(cases, judges, likes, strict=True):
                verdict = judge_(run_mutant(op, mutant, case.arguments, like))
                found = Detection(op, name, dtype, case.name, verdict)
                # A number says more than an infinity: a case that only shows NaN is taken last.
                if not verdict.passed and (best is None or _clearer(found, best)):
                    best = found
            yield name, dtype, best


def undetected(op: str, testing: Testing | None = None) -> list[str]:
    """Mutants of an op that no case rejects in any dtype."""
    testing = testing or TESTING[op]
    found = {name for name, _, detection in detect(op, testing) if detection is not None}
    return [name for name in testing.mutants if name not in found]


def ci_cases(testing: Testing, dtype: str) -> list[Case]:
    """The cases small enough for every test run."""
    return [case for case in testing.cases(dtype) if "ci" in case.tags]


def _clearer(a: Detection, b: Detection) -> bool:
    if np.isfinite(a.factor) != np.isfinite(b.factor):
        return bool(np.isfinite(a.factor))
    return a.factor > b.factor


# --- running
# --------------------------------------------------------------------------------------------------


def providers(op: str, framework: Framework) -> dict[str, Implementation | None]:
    """All providers of an op in a framework, registered ones and the fallback; None stands for
    the latter.
    """
    resolve(framework)  # imports the native implementations
    fallback = COMPOSITION if REGISTRY[op].level == "coarse" else NATIVE
    return {fallback: None, **IMPLEMENTATIONS.get((op, framework), {})}


FUNCTIONS_KEPT = 8
"""So many bound functions are kept: those of an op's implementations, and its oracle."""


@lru_cache(maxsize=FUNCTIONS_KEPT)
def bound_function(op: str, framework: Framework, provider: str | None) -> Callable[..., Any]:
    """What the framework's binding makes of one provider of an op; None: the fallback. Raises
    OpError.

    With a function of JAX stay the programs that it was compiled to: see `forget_programs`.
    """
    if provider is None:
        provider = COMPOSITION if REGISTRY[op].level == "coarse" else NATIVE
    plan = resolve(framework, {op: (provider,)})
    if plan[op].provider != provider:
        raise OpError(
            f"op {op!r}: {provider!r} for {framework} was passed over: {plan[op].passed_over}"
        )
    if framework == "jax":
        from .bindings import jax as jax_binding

        return getattr(jax_binding.bind(plan), op)  # type: ignore[no-any-return]
    return getattr(plan.bind(), op)  # type: ignore[no-any-return]


def forget_programs() -> None:
    """Let go of all functions that were bound, and of what they were compiled to.

    JAX keeps a program for each form of the arguments. The 206 that attention's cases have hold
    26 000 memory maps on a CPU. Linux gives a process 65 530, and one that needs more ends in a
    segmentation fault.
    """
    bound_function.cache_clear()


def run(
    op: str, framework: Framework, provider: str | None, arguments: Arguments, device: str = "cpu",
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """The outputs of one implementation as numpy arrays. Arguments are copied; strides survive
    where torch has them.

    `wrap` wraps the implementation: to plant a fault.
    """
    function = bound_function(op, framework, provider)
    function = wrap(function) if wrap is not None else function
    implementation = IMPLEMENTATIONS.get((op, framework), {}).get(provider or NATIVE)
    on_host = implementation is not None and implementation.host_metadata
    return call(function, framework, arguments, device, REGISTRY[op].host if on_host else ())


def call(
    function: Callable[..., Any], framework: Framework, arguments: Arguments, device: str,
    host: Sequence[str] = (),
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """The outputs of a bound op as numpy arrays. Arguments are copied to the device; those that
    `host` names stay on the host, for torch.
    """
    if framework == "numpy":
        with np.errstate(all="ignore"):
            copies = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in arguments.items()}
            return tuple(np.asarray(out) for out in _tuple(function(**copies)))
    if framework == "jax":
        import jax

        where = jax.devices({"cuda": "gpu"}.get(device, device))[0]
        given = {
            n: jax.device_put(v, where) if isinstance(v, np.ndarray) else v
            for n, v in arguments.items()
        }
        return tuple(np.asarray(out) for out in _tuple(function(**given)))
    moved = {n: _to_torch(v, "cpu" if n in host else device) for n, v in arguments.items()}
    from .namespaces.torch_ import to_numpy

    return tuple(to_numpy(out) for out in _tuple(function(**moved)))


def _to_torch(value: Any, device: str) -> Any:
    """A tensor with the strides of an array, which `from_numpy` would lose."""
    if not isinstance(value, np.ndarray):
        return value
    import torch

    from .namespaces.torch_ import from_numpy

    tensor = from_numpy(value.copy())
    if value.flags.c_contiguous:
        return tensor.to(device)
    strides: Sequence[int] = [stride // value.itemsize for stride in value.strides]
    return torch.empty_strided(value.shape, strides, dtype=tensor.dtype, device=device).copy_(
        tensor
    )
