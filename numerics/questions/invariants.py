"""Metamorphic relations: what must not change a model's logits, on one backend. No other backend is
needed.

Each relation is promised *bitwise* or up to *rounding*. Rounding is judged in float32 by the
relative error that sums in another order may have (mode S), in the run dtype against the noise of
the faithful reference (mode P): two runs whose roundings are independent differ by sqrt(2) of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

import numpy as np

from ...ops.testing import limits
from ...shared.errors import ConfigError, TwinferError
from ...shared.models.caches import CacheLayout
from ..errors import EQUAL, FAILED
from ..judging.amplification import TRIES, amplification
from ..judging.gates import (
    HALF_ULP32,
    MODES,
    Amplified,
    Family,
    Gate,
    Mode,
    longest_sum,
    precision,
    walk,
)
from ..judging.metrics import Metrics, fields_json, log_softmax, measure
from ..judging.record import Report
from ..progress import Progress, silent
from ..showing.terminal import LINES
from ..sides.environment import describe_side
from ..sides.fault import Fault
from ..sides.jitter import Jitter
from ..sides.reference import Reference, storage_dtype
from ..sides.steps import pages_of, real_tokens
from ..sides.subject import HostWeights, Subject, Target
from ..sides.taps import Tracer
from .bench import Bench, Rows, Schedule, permuted_pages

SPARE = 8
"""Tokens that a request may grow by when it runs free."""
Promise = Literal["bitwise", "rounding"]
DECODED = 24
"""Tokens of a request that are decoded where requests are to outgrow their pages."""
LEVELS = {"traced": 1, "compiled": 2, "graphs": 3}


@dataclass(frozen=True, slots=True)
class Relation:
    """What must not matter. `reason` says why it is promised bitwise, or why it cannot be.

    `run` gives the pair (as usual, the other way). `refuses` says why it does not apply to a
    target and a model, or "".
    """

    name: str
    promise: Promise
    reason: str
    run: Callable[[Lab], tuple[Rows, Rows]]
    refuses: Callable[[Lab], str] = lambda lab: ""
    costly: tuple[str, ...] = ()
    """The backends that take it on a CPU only where it is named."""


@dataclass(slots=True)
class Result:
    """One relation in one mode. `figure` is the error in units of what is allowed (0 if bitwise
    equal).
    """

    relation: str
    mode: Mode
    promise: Promise
    reason: str = ""
    compared: int = 0
    figure: float = 0.0
    detail: str = ""
    complaints: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class InvariantsReport(Report):
    """All results. `absent` are relations that do not apply and why."""

    kind = "invariants"
    target: str
    results: list[Result] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Result]:
        """Relations that do not hold."""
        return [r for r in self.results if r.complaints]

    @property
    def has_compared(self) -> bool:
        return bool(self.results)

    def body(self) -> dict[str, Any]:
        results = [fields_json(result) for result in self.results]
        return {"sides": [self.target], "results": results, "absent": self.absent}

    def cases(self) -> dict[tuple[str, str], list[str]]:
        return {(f"{self.target}.{r.mode}", r.relation): r.complaints for r in self.results}


class Lab:
    """What the relations of one target and mode share: the worker, the usual run, the prompts."""

    def __init__(
        self, subject: Subject, target: Target, prompts: Sequence[np.ndarray], fault: Fault | None
    ) -> None:
        self.subject, self.target, self.prompts, self.fault = subject, target, prompts, fault
        # As few pages as hold everything: each run begins with other tokens all over them.
        self.lengths = [len(p) + SPARE for p in prompts]
        # One short prompt alone would have one page, in which nothing can be preempted.
        self.lengths[0] = max(self.lengths[0], subject.page_size + SPARE)
        self.bench = Bench(subject, target, self.lengths, fault)
        self.usual = self.bench.logits(Schedule(), prompts)

    def other(self, usual: bool = True, **options: Any) -> Rows:
        """The usual schedule on another worker: its logits, or, not `usual`, what `execute`
        gives.
        """
        with closing(
            Bench(self.subject, self.target, self.lengths, self.fault, **options)
        ) as bench:
            run = bench.logits if usual else bench.outputs
            return run(Schedule(), self.prompts)


# --- the relations
# --------------------------------------------------------------------------------------------------


def _scheduled(schedule: Callable[[Lab], Schedule]) -> Callable[[Lab], tuple[Rows, Rows]]:
    """Another schedule on the same worker."""
    return lambda lab: (lab.usual, lab.bench.logits(schedule(lab), lab.prompts))


def _with_option(option: str, value: Any) -> Callable[[Lab], tuple[Rows, Rows]]:
    """The usual schedule on a worker with another engine option."""
    return lambda lab: (lab.usual, lab.other(**{option: value}))


def _company(lab: Lab) -> tuple[Rows, Rows]:
    """Every request but the first and third has other tokens."""
    vocab, rng = lab.subject.model.vocab_size, np.random.default_rng(7)
    kept = {0, 2} if len(lab.prompts) > 2 else {0}
    others = [
        p if i in kept else rng.integers(0, vocab, len(p)).astype(np.int32) for i,
        p in enumerate(lab.prompts)
    ]  # fmt: skip
    rows = lab.bench.logits(Schedule(), others)
    return lab.usual, _only(rows, lambda key: key[0] in kept)


def _moved_pages(lab: Lab) -> Schedule:
    """Pages lie elsewhere."""
    return Schedule(change=permuted_pages(lab.bench.pages, lab.bench.layout.groups, seed=3))


def _prefix(lab: Lab) -> tuple[Rows, Rows]:
    rows = lab.bench.logits(Schedule(prefix=True, rounds=2), lab.prompts)
    if not rows.cached:
        raise _Empty("no prefix was found in the cache")
    return lab.usual, rows


def _preemption(lab: Lab) -> tuple[Rows, Rows]:
    """The prompts in as few pages as preempt one; others if these never do."""
    for prompts in (lab.prompts, _outgrowing(lab)):
        longest = lab.bench.pages_of(max(len(p) for p in prompts))
        for pages in range(min(longest + 2, lab.bench.pages), longest - 1, -1):
            rows = lab.bench.logits(Schedule(pages=pages, decoded=DECODED), prompts)
            if rows.preemptions and prompts is lab.prompts:
                return lab.usual, rows
            if rows.preemptions:
                return lab.bench.logits(Schedule(alone=True, decoded=DECODED), prompts), rows
    raise _Empty("no request was preempted")


def _outgrowing(lab: Lab) -> list[np.ndarray]:
    """Two prompts or more that begin on one page and decode beyond it: one must make room."""
    length = lab.subject.page_size + SPARE
    prompts = list(lab.prompts) if len(lab.prompts) > 1 else list(lab.prompts) * 2
    return [np.resize(p, length) for p in prompts]


def _overlap(lab: Lab) -> tuple[Rows, Rows]:
    return lab.bench.generate(lab.prompts, 1), lab.bench.generate(lab.prompts, 2)


def _scan(lab: Lab) -> tuple[Rows, Rows]:
    return lab.usual, lab.other(scan_layers=not lab.bench.config.scan_layers)


def _level(name: str) -> Callable[[Lab], tuple[Rows, Rows]]:
    def run(lab: Lab) -> tuple[Rows, Rows]:
        if lab.bench.config.compile_level != 0:
            usual = lab.other(False, compile_level=0)
        else:
            usual = lab.bench.outputs(Schedule(), lab.prompts)
        return usual, lab.other(False, compile_level=LEVELS[name])

    return run


def _jax_only(lab: Lab) -> str:
    backend = lab.target.backend
    return "" if backend == "jax" else f"the {backend} backend does not have it"


def _torch_only(lab: Lab) -> str:
    if lab.target.backend != "torch":
        return f"the {lab.target.backend} backend compiles everything"
    return "the target names a level" if "compile_level" in lab.target.options else ""


def _compiles(lab: Lab) -> str:
    invariant = lab.target.options.get("row_invariant")
    return _torch_only(lab) or ("row_invariant compiles nothing" if invariant else "")


def _shards_here(lab: Lab) -> str:
    if lab.target.backend not in ("jax", "torch"):
        return "it runs on one device"
    if lab.target.options.get("row_invariant"):
        return "row_invariant runs on one device"
    if lab.target.backend == "torch" and lab.bench.worker.device.platform == "cpu":
        return ""
    of_framework = {"jax": "jax", "torch": "torch.cuda"}[lab.target.backend]
    several = import_module(of_framework).device_count() > 1
    return "" if several else "there is one device only"


def _graphs_here(lab: Lab) -> str:
    is_cuda = lab.bench.worker.device.platform == "cuda"
    return _compiles(lab) or ("" if is_cuda else "CUDA graphs need a cuda device")


def _windows_here(lab: Lab) -> str:
    windows = any(group.window for group in lab.bench.layout.groups)
    return "" if windows else "every layer keeps all tokens"


SAME = "the same programs on the same numbers"
OTHER_SHAPE = "another program shape: products are summed in another order"
OWN_SHAPE = "row_invariant: no sum depends on the program's shape"
OTHER_ORDER = "fused kernels sum in another order"
RELATIONS = {
    r.name: r
    for r in (
        Relation(
            "repeat", "bitwise", f"{SAME}; nothing is left to chance",
            _scheduled(lambda lab: Schedule()),
        ),
        Relation("company", "bitwise", f"{SAME}: rows know only their own", _company),
        Relation(
            "page-permutation", "bitwise", f"{SAME}, gathered from elsewhere",
            _scheduled(_moved_pages),
        ),
        Relation("overlap", "bitwise", f"{SAME}; only the host waits less", _overlap),
        Relation(
            "batch", "rounding", OTHER_SHAPE, _scheduled(lambda lab: Schedule(alone=True))
        ),
        Relation(
            "chunks", "rounding", OTHER_SHAPE,
            _scheduled(lambda lab: Schedule(budget=lab.subject.max_num_seqs)),
        ),
        Relation("prefix-cache", "rounding", OTHER_SHAPE, _prefix),
        Relation("preemption", "rounding", OTHER_SHAPE, _preemption),
        Relation(
            "padding", "rounding", OTHER_SHAPE, _scheduled(lambda lab: Schedule(large=True))
        ),
        Relation(
            "decode-prefill", "rounding", OTHER_SHAPE,
            _scheduled(lambda lab: Schedule(decoded=1 << 20)),
        ),
        Relation(
            "page-groups", "rounding", OTHER_SHAPE, _with_option("page_groups", False),
            _windows_here,
        ),
        Relation("scan", "rounding", "XLA fuses it otherwise", _scan, _jax_only),
        Relation(
            "tensor-parallel", "rounding", "partial sums are added up",
            _with_option("tensor_parallel_size", 2), _shards_here, ("torch",),
        ),
        Relation("traced", "bitwise", "the same kernels", _level("traced"), _torch_only),
        Relation(
            "compiled", "rounding", OTHER_ORDER, _level("compiled"), _compiles, ("torch",)
        ),
        Relation("graphs", "rounding", OTHER_ORDER, _level("graphs"), _graphs_here),
    )
}  # fmt: skip
"""What must not matter; docs/numerics.md says of each what it is."""


class _Empty(Exception):
    """A run did not do what it is about."""


def promised(relation: Relation, target: Target) -> Relation:
    """The relation as a target promises it: with `row_invariant`, the shape of a program is one
    more thing that changes no bit.
    """
    if relation.reason == OTHER_SHAPE and target.options.get("row_invariant"):
        return replace(relation, promise="bitwise", reason=OWN_SHAPE)
    return relation


def _only(rows: Rows, keep: Callable[[tuple[int, int]], bool]) -> Rows:
    chosen = [i for i, key in enumerate(rows.keys) if keep(key)]
    return Rows([rows.keys[i] for i in chosen], [rows.values[i] for i in chosen])


# --- judging
# --------------------------------------------------------------------------------------------------

FAMILY = Family(3 * len(MODES) * len(RELATIONS))
"""The limits of a run: three of a relation in a mode."""


_Judged = tuple[float, str, list[str]]
"""A relation up to rounding: the largest share of a limit, and what was found."""


class Judge:
    """Judges a pair of runs. Noise is that of the references over the steps of the first of them,
    whose pages lie as `layout` says.
    """

    def __init__(self, subject: Subject, mode: Mode, layout: CacheLayout) -> None:
        self._subject, self._mode, self._layout = subject, mode, layout
        self._references = References(subject, Rows(), layout)
        # In float32 the noise of a reference is one order of sums: mode P is mode S.
        self._gates: Mode = "S" if subject.dtype == "float32" else mode

    def __call__(self, relation: Relation, pair: tuple[Rows, Rows]) -> Result:
        """The result of a relation."""
        if pair[0] is not self._references.usual:
            self._references = References(self._subject, pair[0], self._layout)
        one, other = pair[0].first(), pair[1]
        result = Result(relation.name, self._mode, relation.promise, relation.reason)
        both = [(key, v) for key, v in zip(other.keys, other.values, strict=True) if key in one]
        keys = [key for key, _ in both]
        result.compared = len(keys)
        a, b = np.zeros((2, 0, 1))
        if both:
            a, b = np.stack([one[key] for key in keys]), np.stack([value for _, value in both])
        lost = set(one) - set(other.keys)
        if lost and relation.name != "company":
            result.complaints.append(f"{len(lost)} of {len(one)} rows were not computed")
        if relation.promise == "bitwise":
            self._bitwise(result, keys, a, b)
        elif keys:
            self._rounding(result, keys, a, b)
        return result

    def _bitwise(
        self, result: Result, keys: list[tuple[int, int]], a: np.ndarray, b: np.ndarray
    ) -> None:
        unequal = (
            a.view(np.uint8).reshape(len(a), -1) != b.view(np.uint8).reshape(len(b), -1)
        ).any(axis=1)
        result.detail = f"{len(keys)} rows, bitwise"
        if unequal.any():
            with np.errstate(invalid="ignore"):
                off = float(np.nanmax(np.abs(a - b), initial=0.0))
            result.figure = float("inf")
            result.detail = f"{int(unequal.sum())} of {len(keys)} rows differ, by {off:.3g} at most"
            result.complaints.append(
                f"{result.detail}; first {_place(keys[int(unequal.argmax())])}"
            )

    def _rounding(
        self, result: Result, keys: list[tuple[int, int]], a: np.ndarray, b: np.ndarray
    ) -> None:
        judge = self._semantics if self._gates == "S" else self._precision
        figure, detail, complaints = judge(keys, a, b, None)
        if 1.0 < figure < np.inf:
            # However far it is: the limit is that of a row, and one row in which attention is all
            # but tied may be any number, beside others of full precision.
            of_dtype = limits(storage_dtype(self._subject.dtype)).half_ulp
            half_ulp = HALF_ULP32 if self._gates == "S" else of_dtype
            for tries in TRIES:
                amplified = self._references.amplified(keys, a.shape[1], half_ulp, tries)
                figure, detail, complaints = judge(keys, a, b, amplified)
                if complaints:
                    break
        result.figure, result.detail = figure, f"{len(keys)} rows, {detail}"
        result.complaints += complaints

    def _semantics(
        self, keys: list[tuple[int, int]], a: np.ndarray, b: np.ndarray, amplified: Amplified | None
    ) -> _Judged:
        """Each of the two runs is off by what a float32 sum of so many terms may be, in each layer,
        or by what the run makes of errors of its ops' inputs.
        """
        model = self._subject.model
        reduction = longest_sum(model)
        of_all = 2.0 * HALF_ULP32 * (reduction * 2 * (1 + model.num_layers)) ** 0.5
        of_rows = np.full(len(a), ROW_FACTOR * of_all)
        size = float((a.astype(np.float64) ** 2).mean()) ** 0.5
        if amplified is not None:
            n, tries, times = amplified.numbers, amplified.tries, 2**0.5 * walk(reduction)
            of_all = max(of_all, times * amplified.rel_l2 * FAMILY.spread(n, n * tries))
            times *= Family(FAMILY.comparisons * len(a)).spread(1, tries) / size
            of_rows = np.maximum(of_rows, times * np.sqrt((amplified.elements**2).mean(1)))
        m, gate = measure(b, a, a), Gate(rel_l2=of_all)
        with np.errstate(invalid="ignore", divide="ignore"):
            rows = np.sqrt(((b - a).astype(np.float64) ** 2).mean(1)) / size
        rows = np.where(np.isfinite(rows), rows, np.inf)
        shares = rows / of_rows
        worst = int(shares.argmax())
        found = self._complaints(gate, m, keys)
        if shares[worst] > 1.0:
            row = f"worst row {rows[worst]:.3g} > {of_rows[worst]:.3g} at {_place(keys[worst])}"
            found.append(row)
        detail = f"relative error {m.rel_l2:.2g}, worst row {rows.max():.2g}"
        return max(m.rel_l2 / of_all, float(shares[worst])), detail, found

    def _precision(
        self, keys: list[tuple[int, int]], a: np.ndarray, b: np.ndarray, amplified: Amplified | None
    ) -> _Judged:
        """The two runs differ by the noise of two roundings of the run dtype."""
        right, noisy = (self._references.rows(keys, a.shape[1], exact) for exact in (True, False))
        m = measure(b, a, a + 2**0.5 * (noisy - right))
        if amplified is not None:
            amplified = replace(amplified, rel_l2=2**0.5 * amplified.rel_l2)
        numbers = float(len(a) * self._subject.model.hidden_size)
        gate = precision("logits", m, FAMILY, numbers, len(a), amplified)
        gate = replace(gate, overlap=None)
        complaints = self._complaints(gate, m, keys)
        return max(gate.shares(m).values()), f"sigma {m.sigma:.3f}", complaints

    def _complaints(self, gate: Gate, m: Metrics, keys: list[tuple[int, int]]) -> list[str]:
        place = _place(keys[m.worst[0]]) if m.worst else ""
        return [f"{complaint}; largest error at {place}" for complaint in gate.complaints(m)]


ROW_FACTOR = 4.0
"""A row may be off by so many times what all rows together may."""


class References:
    """Both references over the steps of a run, whose pages lie as `layout` says: by (request,
    position) of each of its tokens.
    """

    def __init__(self, subject: Subject, usual: Rows, layout: CacheLayout) -> None:
        self._subject, self._layout, self.usual = subject, layout, usual
        self._known: dict[bool, dict[tuple[int, int], np.ndarray]] = {}
        self._amplified: dict[Any, Amplified] = {}

    def rows(self, keys: Sequence[tuple[int, int]], width: int, exact: bool) -> np.ndarray:
        """Rows [key width] of one reference: logits, or their best log-probabilities if there are
        fewer.
        """
        if exact not in self._known:
            self._known[exact] = self._run(exact)
        return _of_width(np.stack([self._known[exact][key] for key in keys]), width)

    def amplified(
        self, keys: Sequence[tuple[int, int]], width: int, half_ulp: float, tries: int
    ) -> Amplified:
        """What the run makes of errors of its ops' inputs. The references take as long as the runs:
        this is asked only if the limits without are exceeded, and once for all relations.
        """
        asked = (*keys, width, half_ulp, tries)
        if asked not in self._amplified:

            def run(rng: np.random.Generator) -> list[np.ndarray]:
                found = self._run(True, Jitter(rng, half_ulp))
                return [_of_width(np.stack([found[key] for key in keys]), width)]

            (found,) = amplification(run, [self.rows(keys, width, True)], tries)
            self._amplified[asked] = found
        return self._amplified[asked]

    def _run(self, exact: bool, tracer: Tracer | None = None) -> dict[tuple[int, int], np.ndarray]:
        model, steps, weights = self._subject.model, self.usual.steps, HostWeights(self._subject)
        groups = [place.group for place in self._layout.places]
        reference = Reference(
            model, self._subject.rotary_tables(), exact=exact, groups=groups, tracer=tracer
        )
        dtype = np.float64 if exact else weights.top()["embed"].dtype
        shapes = [(pages_of(steps), *self._layout.page_shape(i)) for i in range(model.num_layers)]
        caches = [np.full(shape, np.nan, dtype) for shape in shapes]
        rows: list[np.ndarray] = []
        ran = reference.run_steps(weights, caches, steps)
        for step, (*_, logits) in zip(steps, ran, strict=True):
            rows += list(logits[: real_tokens(step)])
        return dict(zip(self.usual.computed, rows, strict=True))


def _of_width(logits: np.ndarray, width: int) -> np.ndarray:
    """Logits [row vocab] in float64, or as many of their best log-probabilities, falling."""
    if width == logits.shape[1]:
        return logits.astype(np.float64)
    best: np.ndarray = -np.sort(-log_softmax(logits), axis=1)[:, :width]
    return best


def _place(key: tuple[int, int]) -> str:
    return f"request {key[0]}, position {key[1]}"


# --- the command
# --------------------------------------------------------------------------------------------------


def check_invariants(
    subject: Subject, target: Target, prompts: Sequence[np.ndarray], *, names: Sequence[str] = (),
    modes: Sequence[Mode] = ("S", "P"), fault: Fault | None = None, progress: Progress = silent,
) -> InvariantsReport:  # fmt: skip
    """Check relations (`names`; none: all that apply and are not costly) on `target`.

    `fault` is planted in the worker. Raises ConfigError.
    """
    for name in names:
        if name not in RELATIONS:
            raise ConfigError(f"relation: got {name!r}, allowed are {', '.join(RELATIONS)}")
    report, started = InvariantsReport(str(target)), time.perf_counter()
    for mode in modes:
        where = subject.for_mode(mode)
        progress(f"mode {mode}: loading")
        lab = Lab(where, target, prompts, fault)
        report.environment = {"model": subject.name, "dtype": subject.dtype} | describe_side(
            target, lab.bench.worker.device, lab.bench.worker.plans()
        )
        with closing(lab.bench):
            judge = Judge(where, mode, lab.bench.layout)
            for one in _chosen(names, lab, report):
                relation = promised(one, target)
                progress(f"mode {mode}: {relation.name}")
                _check(report, judge, relation, lab)
    report.seconds = time.perf_counter() - started
    return report


def _chosen(names: Sequence[str], lab: Lab, report: InvariantsReport) -> Iterator[Relation]:
    platform = lab.bench.worker.device.platform
    for relation in RELATIONS.values():
        if names and relation.name not in names:
            continue
        why = relation.refuses(lab)
        costly = lab.target.backend in relation.costly and platform == "cpu"
        if not why and costly and not names:
            why = "takes minutes on a CPU; name it to have it"
        if not why:
            yield relation
            continue
        # Who asks for it by name must not get a pass without it.
        entry, kept = f"{relation.name}: {why}", report.missing if names else report.absent
        if entry not in kept:
            kept.append(entry)


def _check(report: InvariantsReport, judge: Judge, relation: Relation, lab: Lab) -> None:
    started = time.perf_counter()
    try:
        result = judge(relation, relation.run(lab))
    except (_Empty, TwinferError) as error:
        report.missing.append(f"{relation.name}: {error}")
        return
    result.seconds = time.perf_counter() - started
    if not result.compared:
        report.missing.append(f"{relation.name}: no row was computed both ways")
        return
    report.results.append(result)


def render(report: InvariantsReport) -> str:
    """The verdict and a line a relation: at most 25 lines."""
    word = {EQUAL: "ALL HOLD", FAILED: "BROKEN"}.get(report.exit_code, report.word)
    e, names = report.environment, list(dict.fromkeys(r.relation for r in report.results))
    lines = [
        f"{word}: {len(names)} relations of {e.get('model')} on {report.target}, "
        f"{report.seconds:.1f} s",
        f"{e.get('device')}, plan {e.get('plan')}; modes: S float32, P {e.get('dtype')}",
    ]
    for name in names:
        mine = [r for r in report.results if r.relation == name]
        bad = next((r for r in mine if r.complaints), None)
        verdict = f"BROKEN in mode {bad.mode}" if bad else "holds"
        found = (
            bad.complaints[0]
            if bad
            else "; ".join(f"{r.mode}: {r.detail}" for r in mine if mine[0].promise != "bitwise")
        )
        lines.append(
            f"{name:16} {mine[0].promise:9}{verdict:17} {found or mine[0].detail}"[:150].rstrip()
        )
    lines += [f"not compared: {entry}"[:150] for entry in report.missing[:3]]
    lines += [f"does not apply: {entry}"[:150] for entry in report.absent[: LINES - len(lines)]]
    return "\n".join(lines[:LINES])
