"""Finds the first cause of a backend's failure: what its programs are given, an op, a layer, or the
run as a whole.

The worker executes the steps as `twinfer numerics model` has them executed, once in each mode, and
what fails by itself is told from what only fails behind it. An op runs by itself, and so does each
op that it is made of: the innermost that fails is the cause. A layer that fails, and whose ops pass
one by one, fails by how they are compiled together, or by what it reads of the step. If no layer
fails by itself, the run as a whole does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ...ops import OpError
from ...ops.testing import providers
from ...shared.errors import ConfigError
from ...shared.step import StepInput
from ..errors import EQUAL, FAILED, NotComparable
from ..judging.diff import Finding
from ..judging.gates import Mode
from ..judging.metrics import fields_json
from ..judging.outputs import OpJudge
from ..judging.record import Report
from ..progress import Progress, silent
from ..showing.terminal import LINES
from ..sides.environment import describe_side
from ..sides.fault import Fault
from ..sides.one_op import FRAMEWORKS, PlannedOps
from ..sides.side import Program, Side, WorkerSide, plan_of, plans_of
from ..sides.steps import real_tokens
from ..sides.subject import Subject, Target, check_recordable
from ..sides.taps import Call, Declared
from .model import Comparison, Judged
from .ops_check import INTERPRETED

CULPRITS = 8
"""Culprits that are named at most."""


@dataclass(slots=True)
class Culprit:
    """What makes the verdict fail. `layer` is -1 outside of layers, `op` "" if it is not one op."""

    layer: int
    program: str
    op: str
    tap: str
    implementation: str
    what: str

    @property
    def name(self) -> str:
        """`layer.3.rms_norm`."""
        place = f"layer.{self.layer}" if self.layer >= 0 else self.program
        return f"{place}.{self.tap}" if self.tap else place


@dataclass(slots=True)
class BisectReport(Report):
    """What was found. `runs` are those that gave a verdict, `bound` how many a search in halves
    may take.
    """

    kind = "bisect"
    target: str
    culprits: list[Culprit] = field(default_factory=list)
    mode: str = ""
    verdict: str = ""
    runs: int = 0
    bound: int = 0
    units: int = 0
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    compared: bool = False

    @property
    def failures(self) -> list[Culprit]:
        return self.culprits

    @property
    def has_compared(self) -> bool:
        return self.compared

    def cases(self) -> dict[tuple[str, str], list[str]]:
        cases = {(self.target, culprit.name): [culprit.what] for culprit in self.culprits}
        return cases or {(self.target, "bisect"): self.problems}

    def body(self) -> dict[str, Any]:
        own = fields_json(self)
        culprits = [asdict(culprit) | {"name": culprit.name} for culprit in self.culprits]
        head = {"sides": [own.pop("target")], "looked_at": own.pop("verdict")}
        return head | {"culprits": culprits} | {n: own[n] for n in own if n != "culprits"}


@dataclass(frozen=True, slots=True)
class _Failure:
    """A call of an op that failed: where, under which plan, and on what."""

    program: Program
    tap: Declared
    provider: str
    calls: Sequence[Call]
    arguments: Mapping[str, Any]
    kept: Mapping[str, np.ndarray]
    kind: str
    num_tokens: int


class _Search(Comparison):
    """A comparison of one side that keeps the calls that fail."""

    def __init__(self, subject: Subject, side: Side, mode: Mode, start: np.ndarray | None) -> None:
        super().__init__(subject, {"suspect": side}, mode, start=start)
        self.failures: dict[tuple[Program, str], _Failure] = {}

    def _op(
        self, judged: Judged, program: Program, calls: Sequence[Call], own: Sequence[Call],
        tap: Declared, kept: Mapping[str, np.ndarray], outputs: Sequence[np.ndarray],
    ) -> list[Finding]:  # fmt: skip
        found = super()._op(judged, program, calls, own, tap, kept, outputs)
        if not all(finding.passed for finding in found):
            arguments = next(call.arguments for call in own if call.key == tap.key)
            failure = _Failure(
                program, tap, found[0].implementation, calls, arguments, kept,
                self.step.descriptor.kind, real_tokens(self.step),
            )  # fmt: skip
            self.failures.setdefault((program, tap.key), failure)
        return found


def bisect_model(
    subject: Subject, target: Target, steps: Sequence[StepInput], *,
    modes: Sequence[Mode] = ("S", "P"),
    start: np.ndarray | None = None, fault: Fault | None = None, planted: str = "",
    progress: Progress = silent,
) -> BisectReport:  # fmt: skip
    """Find what makes `target` fail on `subject`: in float32 first, where semantics show, then in
    the run dtype.

    `start` is the cache before the first step, as in a bundle; `planted` is the text that `fault`
    is planted with, for the commands that are printed.
    """
    if not steps:
        raise NotComparable("there are no steps to compare")
    check_recordable(subject, "a search")
    report, started = BisectReport(str(target)), time.perf_counter()
    for mode in modes:
        where = subject.for_mode(mode)
        progress(f"mode {mode}: {target}")
        side = WorkerSide(where, target, steps, fault)
        try:
            search = _Search(where, side, mode, start)
            diff = search.run(steps, lambda text, mode=mode: progress(f"mode {mode}: {text}"))  # type: ignore[misc]
            report.runs += 1
            report.bound = len(modes)
            report.units += len({(f.scope, f.layer, f.tap) for f in diff.findings})
            _name_causes(report, search)
            for culprit, failure in _failed_ops(report, search):
                report.notes += _try_others(search, where, side, fault, culprit, failure)
            report.environment = {"model": subject.name, "dtype": where.dtype} | describe_side(
                side.target, side.device, side.plans
            )
        finally:
            side.close()
        report.compared = True
        if report.culprits or report.problems:
            report.mode = mode
            break
    if report.culprits:
        report.notes.append(_kind(report, modes))
        report.commands = list(_commands(report, subject, target, planted))
    report.seconds = time.perf_counter() - started
    return report


def _name_causes(report: BisectReport, search: _Search) -> None:
    """Fill in what fails by itself: what lies deepest first."""
    judged, diff = search.sides[0], search.diff
    for layer in judged.weights:
        what = "the weights, as the device holds them, are not the checkpoint's"
        report.culprits.append(Culprit(layer, "layer" if layer >= 0 else "embed", "", "", "", what))
    if judged.tables is not None:
        what = "the rotary tables cos, sin, as the device holds them, are not the definition's"
        report.culprits.append(Culprit(-1, "embed", "", "", "", what))
    report.problems += [text.removeprefix("suspect: ") for text in diff.problems]
    if report.culprits:
        report.verdict = "weights"
        return
    innermost = [
        failure
        for (program, key), failure in search.failures.items()
        if not any(p == program and k.startswith(f"{key}/") for p, k in search.failures)
    ]
    ops: dict[tuple[Any, ...], list[_Failure]] = {}
    for failure in innermost:
        outside = failure.program if isinstance(failure.program, str) else ""
        ops.setdefault((outside, failure.tap.key, failure.provider), []).append(failure)
    for (outside, key, provider), failures in ops.items():
        layers = sorted(f.program for f in failures if isinstance(f.program, int))
        what = "this op fails" + (f" in {len(layers)} layers" if len(layers) > 1 else "")
        place = layers[0] if layers else -1
        report.culprits.append(
            Culprit(place, outside or "layer", failures[0].tap.op, key, provider, what)
        )
    wrong = [f for f in diff.failures if f.scope == "layer"]
    explained = {program for program, _ in search.failures}
    for layer in sorted({f.layer for f in wrong} - explained):
        what = (
            "its ops pass one by one: it is how they are compiled together, or what they read of "
            "the step"
        )
        report.culprits.append(Culprit(layer, "layer", "", "", "", what))
    report.culprits.sort(key=lambda c: (c.program in ("finish", "head"), c.layer))
    report.verdict = "ops" if report.culprits and report.culprits[0].op else "layers"
    if not report.culprits and diff.failures:
        first = diff.failures[0]
        what = f"fails in the run as a whole only: {first.name} {first.complaints[0]}"
        report.culprits.append(Culprit(first.layer, "head", "", "", "", what))
        report.verdict = "logits"


def _failed_ops(report: BisectReport, search: _Search) -> Iterator[tuple[Culprit, _Failure]]:
    for culprit in report.culprits[:CULPRITS]:
        program: Program = culprit.layer if culprit.layer >= 0 else culprit.program
        failure = search.failures.get((program, culprit.tap))
        if failure is not None:
            yield culprit, failure


# --- what follows from it
# --------------------------------------------------------------------------------------------------


def _try_others(
    search: _Search, subject: Subject, side: WorkerSide, fault: Fault | None, culprit: Culprit,
    failure: _Failure,
) -> Iterator[str]:  # fmt: skip
    """Whether another implementation of the op that was found passes in its place."""
    target, platform, op = side.target, side.device.platform, culprit.op
    available = providers(op, FRAMEWORKS[target.backend])
    for name, implementation in available.items():
        usable = implementation is None or implementation.obstacle(platform) is None
        if name == culprit.implementation or name.endswith(INTERPRETED) or not usable:
            continue
        other = replace(target, providers={**target.providers, op: (name,)})
        try:
            plans = plans_of(subject, other, fault)
        except (ConfigError, OpError):
            continue
        plan = plan_of(plans, side.spec, failure.kind, failure.program)
        if plan[op].provider != name:
            yield f"{op}={name} does not take this model's calls"
            continue
        outputs = PlannedOps(target.backend, plan, platform)(op, failure.arguments)
        judge = OpJudge(search.gates, failure.calls, failure.num_tokens, search.reduction)
        fails = any(found.complaints for found in judge(failure.tap, failure.kept, outputs))
        yield f"{op}={name} {'fails too' if fails else 'passes'} in its place"


def _kind(report: BisectReport, modes: Sequence[Mode]) -> str:
    if report.mode == "S":
        return "it fails in float32 too, so the rounding of the run dtype is not the reason"
    if "S" in modes:
        return "it passes in float32 and fails in the run dtype: too little precision"
    return "only the run dtype was tried"


def _commands(
    report: BisectReport, subject: Subject, target: Target, planted: str
) -> Iterator[str]:
    """Commands that show what was found."""
    first = report.culprits[0]
    other = "torch:cpu" if target.backend == "jax" else "jax:cpu"
    words = ["twinfer numerics model --model", subject.name, "--mode", report.mode]
    words += ["--a", other, "--b", str(target), *subject.flags()]
    if first.layer >= 0:
        words += ["--layers", str(first.layer)]
    yield " ".join([*words, *([f"--plant b={planted}"] if planted else [])])
    if first.op and not planted:
        yield (
            f"twinfer numerics ops --a {other} --b {target.backend}:{target.device} --op {first.op}"
        )


def render(report: BisectReport) -> str:
    """What was found, at most 25 lines."""
    e = report.environment
    if report.exit_code != FAILED:
        word = "NOTHING FAILS" if report.exit_code == EQUAL else "NOT COMPARED"
        return (
            f"{word}: {e.get('model')} on {report.target}, {report.runs} runs, "
            f"{report.seconds:.1f} s"
        )
    where = f"{e.get('model')} on {report.target}, mode {report.mode}, {report.seconds:.1f} s"
    lines = [
        f"FOUND: {len(report.culprits)} of {report.units} parts of {where}",
        f"verdict by {report.verdict or 'weights'}, {report.runs} runs (at most {report.bound})",
    ]
    for c in report.culprits[:8]:
        implementation = f" [{c.op}={c.implementation}]" if c.op else ""
        lines.append(f"{c.name}{implementation}: {c.what}")
    lines += [*report.problems, *report.notes[:6], *(f"$ {command}" for command in report.commands)]
    return "\n".join(lines[:LINES])
