"""`twinfer numerics check`: everything that can be asked about two backends and a model, with one
verdict, one first cause, and the command that shows it again.

The parts go from what users get to its pieces: what engines serve, the ops that their plans name,
the model layer by layer, and whether a run can be repeated. A cause that lies deeper is named
before one that it explains: a wrong definition is wrong on all sides, a wrong weight spoils every
op behind it, and a wrong op every layer.
"""

from __future__ import annotations

import shlex
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...ops import REGISTRY
from ...shared.errors import ConfigError
from ...shared.kv_config import NARROW
from ...shared.worker import backend_module
from ..errors import EQUAL, FAILED, NOT_COMPARED, USERS, in_words
from ..judging.diff import Diff
from ..judging.gates import MODES, Mode
from ..judging.record import Report
from ..judging.weights import PAGE_TABLE
from ..progress import Progress, silent
from ..sides.serving import refusal
from ..sides.steps import default_prompts, make_steps
from ..sides.subject import Subject, Target, name_sides
from .invariants import InvariantsReport, check_invariants
from .model import compare_model
from .ops_check import DEFINITION, OpsReport, check_ops, parts_of
from .served import ENDED_BY_ERROR, ENGINE_FAILED, LISTED, Definition, check_served

SECONDS = 900.0
"""Time that parts may be begun in. A part that has begun is finished."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that is wrong, and what shows it again. `depth`: smaller ones explain larger."""

    depth: int
    text: str
    again: str


@dataclass(frozen=True, slots=True)
class Part:
    """One question: its exit code, the seconds that it took, and what was compared, in words."""

    name: str
    exit_code: int
    seconds: float
    compared: str


Answer = tuple[Sequence[Report], str, list[Cause]]
"""What a part found: reports, what was compared in words, and causes."""


@dataclass(slots=True)
class CheckReport(Report):
    """The verdicts of all parts, and the causes of what is wrong, the deepest first."""

    kind = "check"
    sides: tuple[str, ...]
    parts: list[Part] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        return any(part.exit_code == FAILED for part in self.parts)

    @property
    def has_compared(self) -> bool:
        """Whether every part has."""
        return {part.exit_code for part in self.parts} == {EQUAL}

    @property
    def first_cause(self) -> str:
        """The deepest cause, "" if nothing is wrong."""
        return self.causes[0].text if self.causes else ""

    def body(self) -> dict[str, Any]:
        return {
            "sides": self.sides, "first_cause": self.first_cause,
            "causes": [asdict(cause) for cause in self.causes],
            "parts": [asdict(part) for part in self.parts],
        }  # fmt: skip

    def cases(self) -> dict[tuple[str, str], list[str]]:
        failed = [cause.text for cause in self.causes]
        return {
            ("check", part.name): failed if part.exit_code == FAILED else [] for part in self.parts
        }


def check(
    subject: Subject, targets: Sequence[Target], *, modes: Sequence[Mode] = MODES,
    prompts: Sequence[np.ndarray] | None = None, definition: Definition = "auto",
    seconds: float = SECONDS, progress: Progress = silent,
) -> CheckReport:  # fmt: skip
    """Ask everything about `targets`: a part after another, until `seconds` are over. What was not
    begun by then is missing.

    Raises ConfigError, ModelError, BackendUnavailable.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds: got {seconds}, allowed is more than 0")
    report = CheckReport(tuple(name_sides(targets)))
    asked = _Asked(subject, list(targets), modes, prompts, definition, progress)
    started = time.perf_counter()
    for name, ask in PARTS.items():
        before = time.perf_counter()
        if report.parts and before - started > seconds:
            report.missing.append(f"{name}: the {seconds:g} seconds were over")
            continue
        progress(f"check: {name}")
        try:
            found, compared, causes = ask(asked)
        except USERS:
            raise
        except Exception as error:
            # No verdict: what it would have said is missing.
            progress(traceback.format_exc())
            failure = f"ended with {in_words(error)}"
            took = time.perf_counter() - before
            report.parts.append(Part(name, NOT_COMPARED, took, failure))
            report.missing.append(f"{name}: {failure}")
            continue
        codes = {one.exit_code for one in found}
        code = FAILED if FAILED in codes else max(codes, default=NOT_COMPARED)
        report.parts.append(Part(name, code, time.perf_counter() - before, compared))
        report.causes += causes
        report.missing += [f"{name}: {text}" for one in found for text in one.missing]
        if name == "served":  # which says what ran
            report.environment |= found[0].environment
    report.causes.sort(key=lambda cause: cause.depth)
    report.seconds = time.perf_counter() - started
    return report


@dataclass(frozen=True, slots=True)
class _Asked:
    """What all parts are about."""

    subject: Subject
    targets: list[Target]
    modes: Sequence[Mode]
    prompts: Sequence[np.ndarray] | None
    definition: Definition
    progress: Progress

    @property
    def all_prompts(self) -> Sequence[np.ndarray]:
        """Those that were named, or the usual ones."""
        if self.prompts is not None:
            return self.prompts
        return default_prompts(self.subject, self.subject.seed)

    def again(self, command: str, *words: str, model: bool = True) -> str:
        """The command that asks one part alone."""
        named = ["--model", self.subject.name, *self.subject.flags()] if model else []
        return shlex.join(["twinfer", "numerics", command, *named, *words])

    def target(self, side: str) -> str:
        """The target of a side, whose name begins with a letter."""
        return str(self.targets[ord(side[0]) - ord("a")])

    def both(self) -> list[str]:
        """Flags for all targets, where there are a and b."""
        return ["--a", str(self.targets[0]), "--b", str(self.targets[-1])]


# --- the parts
# --------------------------------------------------------------------------------------------------


def _ask_served(asked: _Asked) -> Answer:
    diff = check_served(
        asked.subject, asked.targets, modes=asked.modes, prompts=asked.prompts,
        definition=asked.definition, progress=asked.progress,
    )  # fmt: skip
    tokens = sum(run.tokens for run in diff.served)
    steps = sum(sum(run.steps.values()) for run in diff.served)
    what = f"{tokens} tokens that engines served in {steps} steps"
    return [diff], what, list(_served_causes(asked, diff))


def _served_causes(asked: _Asked, diff: Diff) -> Iterator[Cause]:
    for text in diff.problems:
        ours = text.startswith(DEFINITION)
        side = "a" if ours else text
        again = asked.again("served", "--on", asked.target(side))
        if ours:
            depth = 1
        elif ENDED_BY_ERROR in text or LISTED in text:
            depth = 7  # a wrong op or layer, which explains it, stands before it
        else:
            depth = 2
        yield Cause(depth, text, again)
    for text in diff.missing:
        if ENGINE_FAILED in text:
            yield Cause(7, text, asked.again("served", "--on", asked.target(text)))
    for run in diff.served:
        if run.first_wrong:
            text = f"{run.side}, {run.run}, mode {run.mode}: {run.first_wrong}"
            again = asked.again("served", "--on", asked.target(run.side), "--mode", run.mode)
            yield Cause(5, text, again)


def _ask_ops(asked: _Asked) -> Answer:
    """The implementations that the plans name, in float32 and the run dtype."""
    wanted: dict[str, None] = {}
    planned: list[Target] = []
    named = name_sides(asked.targets)
    for target in asked.targets:
        chosen = _planned(asked.subject, target)
        planned.append(Target(target.backend, target.device, {}, chosen))
        wanted |= dict.fromkeys(chosen)
    parts = {part for op in wanted for part in parts_of(op)} - wanted.keys()
    names = sorted({*wanted, *parts})
    dtypes = dict.fromkeys(["float32", asked.subject.dtype])
    caches = {side: _no_caches(asked.subject, target) for side, target in named.items()}
    report = check_ops(
        planned, names, dtypes=tuple(dtypes), modes=(*asked.modes, "X"), planned=True,
        sides=tuple(named), caches=caches, progress=asked.progress,
    )  # fmt: skip
    what = f"{report.compared} cases of {len(names)} ops"
    return [report], what, list(_op_causes(asked, report))


def _no_caches(subject: Subject, target: Target) -> set[str]:
    """The dtypes of narrow KV caches that the configuration of a target refuses."""
    return {
        dtype for kind, dtype in NARROW.items()
        if refusal(subject, target, kv_cache_dtype=kind) is not None
    }  # fmt: skip


def _planned(subject: Subject, target: Target) -> dict[str, tuple[str, ...]]:
    """The providers of each op in the plans of a target, in any kind of program."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for dtype in dict.fromkeys(["float32", subject.dtype]):
        config = subject.with_dtype(dtype).resolved(target)
        plans = backend_module(target.backend, "plans").make_plans(subject.model, config)
        for kind in plans.by_kind:
            for plan in plans.every(kind):
                for op, choice in plan.choices.items():
                    found[op][choice.provider] = None
    return {op: tuple(providers) for op, providers in found.items()}


def _op_causes(asked: _Asked, report: OpsReport) -> Iterator[Cause]:
    # An op that is made of others is no cause beside them.
    failures = sorted(report.failures, key=lambda result: REGISTRY[result.op].level == "coarse")
    for result in failures:
        again = asked.again("ops", *asked.both(), "--op", result.op, model=False)
        ours = result.side == DEFINITION
        name = f"the op {result.op}" if ours else result.name
        text = f"{result.side}: {name}, {result.dtype}: {result.complaints[0]}"
        yield Cause(0 if ours else 3, text, again)


def _ask_model(asked: _Asked) -> Answer:
    subject, steps = asked.subject, make_steps(asked.subject, asked.all_prompts)
    diff = compare_model(subject, asked.targets, steps, modes=asked.modes, progress=asked.progress)
    what = f"{len(diff.findings)} tensors in {len(steps)} steps, layer by layer"
    causes = [
        Cause(2, text, asked.again("model", *asked.both(), "--mode", "S"))
        for text in diff.problems
        if PAGE_TABLE in text
    ]
    first = diff.first_divergence()
    if first is not None:
        again = asked.again("model", *asked.both(), "--mode", first.mode)
        text = (
            f"{first.side}, mode {first.mode}: {first.name} [{first.implementation or first.scope}]"
            f", {first.place or 'place unknown'}: {'; '.join(first.complaints)}"
        )
        # What is wrong in a layer, and in no op of it, engines showed where they served.
        depth = {"op": 4, "layer": 5}.get(first.scope, 6)
        causes.append(Cause(depth, text, again))
    elif diff.is_wrong:
        causes.append(Cause(6, diff.wrong()[0], asked.again("model", *asked.both())))
    return [diff], what, causes


def _ask_repeat(asked: _Asked) -> Answer:
    """Whether the same run gives the same bits."""
    reports: list[InvariantsReport] = []
    causes: list[Cause] = []
    for side, target in name_sides(asked.targets).items():
        found = check_invariants(
            asked.subject, target, asked.all_prompts, names=("repeat",), modes=asked.modes[-1:],
            progress=asked.progress,
        )  # fmt: skip
        reports.append(found)
        if found.failures:
            again = asked.again("invariants", "--on", str(target), "--relation", "repeat")
            causes.append(Cause(4, f"{side}: running the same again gives other bits", again))
    rows = sum(result.compared for found in reports for result in found.results)
    return reports, f"{rows} rows of logits, run again", causes


PARTS: dict[str, Callable[[_Asked], Answer]] = {
    "served": _ask_served,
    "ops": _ask_ops,
    "model": _ask_model,
    "repeat": _ask_repeat,
}
"""What is asked, in this order."""


# --- the view
# --------------------------------------------------------------------------------------------------


def render(report: CheckReport) -> str:
    """The verdict, the parts, and the first causes with what shows them again."""
    words = {EQUAL: "EQUAL", FAILED: "DIFFERENT"}
    e = report.environment
    lines = [
        f"{words.get(report.exit_code, 'NOT (fully) COMPARED')}: {e.get('model')} in "
        f"{e.get('dtype')} on {' and '.join(report.sides)}, {report.seconds:.1f} s"
    ]
    for part in report.parts:
        verdict = {EQUAL: "equal", FAILED: "DIFFERENT"}.get(part.exit_code, "not compared")
        lines.append(f"{part.name:7} {verdict:12} {part.compared}, {part.seconds:.1f} s")
    if "definition" in e:
        lines.append(f"definition: {e['definition']}")
    lines += [f"not compared: {text[:150]}" for text in report.missing[:4]]
    if report.causes:
        first, *others = report.causes
        lines += [f"first cause: {first.text}", f"see it again: {first.again}"]
        lines += [f"also: {cause.text[:150]}" for cause in others[:6]]
        if len(others) > 6:
            lines.append(f"also: {len(others) - 6} more (--json has everything)")
    return "\n".join(lines)
