"""`twinfer numerics selftest`: is what the comparison promises true? Every catalogued fault
planted, 20 clean runs. The package catalogues one of each kind, the tests all others.

A fault must be seen by at least one mode on every backend, and modes S and P must blame the layer
and the op that it is in. A clean run must not alarm. Faults of the model are planted in the last
layer of a small random model; faults of ops that a dense decoder does not call are judged by the
ops' own cases; faults of what an engine keeps between steps are planted in a worker, and what looks
for them are the invariants: mode I.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...shared.errors import ConfigError
from ..faults.catalogue import CATALOGUE, plant
from ..judging.diff import Diff
from ..judging.gates import ALL_MODES
from ..judging.record import Report
from ..progress import Progress, silent
from ..sides.environment import versions
from ..sides.fault import Fault
from ..sides.steps import default_prompts, make_steps
from ..sides.subject import Target, name_sides
from .invariants import check_invariants
from .model import compare_model
from .ops_check import can_show, check_ops
from .selftest_model import LAYER, open_model

MODES = (*ALL_MODES, "I")
RELATIONS = "company", "page-permutation", "batch", "chunks", "decode-prefill", "page-groups"
"""The invariants of mode I: those of one worker, and what a worker without page groups gives."""
SEEDS = 20
FIRST_SEED = 1


@dataclass(frozen=True, slots=True)
class Sight:
    """What one mode found on one side: its first finding, empty if there is none, and whether
    the fault is there.
    """

    side: str
    mode: str
    found: str = ""
    right_place: bool = True


@dataclass(slots=True)
class FaultResult:
    """One fault, looked at by each mode on each side."""

    name: str
    what: str
    place: str
    sights: list[Sight] = field(default_factory=list)

    def modes(self, side: str) -> list[str]:
        """The modes that saw it on a side."""
        return [s.mode for s in self.sights if s.side == side and s.found]

    def missed(self, sides: Sequence[str]) -> list[str]:
        """The sides on which no mode saw it, in words."""
        return [f"{side}: {self.name}" for side in sides if not self.modes(side)]

    @property
    def misplaced(self) -> list[str]:
        """Where a mode saw it, and it is not, in words."""
        return [
            f"{sight.side}: {self.name} in mode {sight.mode} at {sight.found}"
            for sight in self.sights
            if not sight.right_place
        ]


@dataclass(slots=True)
class SelfTest(Report):
    """All results. `alarms` are findings in clean runs, `clean` counts these (a seed, a mode and
    a side are one).
    """

    kind = "selftest"
    sides: tuple[str, ...]
    modes: tuple[str, ...]
    faults: list[FaultResult] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    clean: int = 0

    def by_name(self) -> dict[str, FaultResult]:
        return {fault.name: fault for fault in self.faults}

    @property
    def missed(self) -> list[str]:
        """Faults that no mode saw, by side."""
        return [text for fault in self.faults for text in fault.missed(self.sides)]

    @property
    def misplaced(self) -> list[str]:
        """Faults that a mode saw elsewhere."""
        return [text for fault in self.faults for text in fault.misplaced]

    @property
    def is_wrong(self) -> bool:
        return bool(self.missed or self.misplaced or self.alarms)

    @property
    def has_compared(self) -> bool:
        return bool(self.faults or self.clean)

    def body(self) -> dict[str, Any]:
        return {
            "sides": self.sides, "modes": self.modes,
            "environment": {"versions": versions(), **self.environment},
            "problems": [*self.missed, *self.misplaced, *self.alarms],
            "missed": self.missed, "misplaced": self.misplaced, "alarms": self.alarms,
            "clean_runs": self.clean,
            "faults": [
                {
                    "name": fault.name, "what": fault.what, "place": fault.place,
                    "seen": {side: fault.modes(side) for side in self.sides},
                    "findings": [asdict(sight) for sight in fault.sights],
                }
                for fault in self.faults
            ],
        }  # fmt: skip

    def cases(self) -> dict[tuple[str, str], list[str]]:
        found = {
            ("faults", fault.name): [*fault.missed(self.sides), *fault.misplaced]
            for fault in self.faults
        }
        return found | {("clean", "no false alarm"): list(self.alarms)}


def selftest(
    targets: Sequence[Target], *, names: Sequence[str] = (), modes: Sequence[str] = MODES,
    seeds: int = SEEDS,
    progress: Progress = silent,
) -> SelfTest:  # fmt: skip
    """Plant `names` (none: all of the catalogue) on every target, and run `seeds` clean models.

    Raises ConfigError for an unknown fault, BackendUnavailable.
    """
    for name in names:
        plant(name)
    if seeds < 0:
        raise ConfigError(f"seeds: got {seeds}, allowed is at least 0")
    in_steps, in_engine = set(modes) - {"I"}, "I" in modes
    faults = [
        fault
        for fault in CATALOGUE.values()
        if (in_engine if fault.place == "engine" else in_steps)
        and (not names or fault.name in names)
    ]
    sides = name_sides(targets)
    report = SelfTest(
        tuple(sides), tuple(modes), [FaultResult(f.name, f.what, f.place) for f in faults]
    )
    results = report.by_name()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="twinfer-selftest-") as folder:
        for mode in modes:
            kind = _Invariants if mode == "I" else _Bench
            bench = kind(Path(folder), sides, mode)
            for fault in faults:
                if fault.place in bench.places:
                    sights = bench.look(fault)
                    results[fault.name].sights += sights
                    progress(f"mode {mode}: {fault.name}: {_told(sights)}")
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                alarms = list(bench.clean(seed))
                report.alarms += alarms
                report.clean += len(sides)
                progress(f"mode {mode}: clean seed {seed}: {alarms or 'no alarm'}")
    for fault in faults:
        if fault.place == "ops":
            results[fault.name].sights += _look_at_ops(fault, sides, modes)
            progress(f"ops: {fault.name}: {_told(results[fault.name].sights)}")
    report.seconds = time.perf_counter() - started
    return report


def _told(sights: Sequence[Sight]) -> str:
    """For a progress line: a long run that is interrupted has said what it found."""
    return ", ".join(f"{s.side} {s.mode} {'seen' if s.found else 'not seen'}" for s in sights)


class _Bench:
    """Models of one mode. Each fault, and each clean run, has workers of its own."""

    places = "layer", "top"
    """Of the faults that it shows."""

    def __init__(self, folder: Path, targets: Mapping[str, Target], mode: str) -> None:
        self.folder, self.targets, self.mode = folder / mode, targets, mode

    def _compare(self, seed: int, fault: Fault | None = None) -> Diff:
        """The model of a seed, whole; with a fault one step, a ragged batch of prompts."""
        subject = open_model(self.folder, seed)
        steps = make_steps(subject, default_prompts(subject, seed))[: 1 if fault else None]
        faults = {side[0]: fault for side in self.targets} if fault else None
        targets = list(self.targets.values())
        return compare_model(subject, targets, steps, modes=(self.mode,), faults=faults)  # type: ignore[arg-type]

    def look(self, fault: Fault) -> list[Sight]:
        """Plant a fault in the last layer, or where it belongs."""
        planted = replace(fault, layer=LAYER) if fault.place == "layer" else fault
        diff = self._compare(FIRST_SEED, planted)
        return [self._sight(diff, side, planted) for side in self.targets]

    def _sight(self, diff: Diff, side: str, fault: Fault) -> Sight:
        first = diff.first_divergence(side)
        problem = next((text for text in diff.problems if text.startswith(side)), "")
        if first is None:
            return Sight(side, self.mode, problem)
        found = f"{first.name}: {first.complaints[0]}"
        if self.mode == "X":
            return Sight(side, self.mode, found)
        ops = (*fault.ops, *fault.shown_by)
        layer = fault.layer if fault.tables is None else 0  # all layers have the same tables
        return Sight(
            side, self.mode, found, first.layer == layer and any(op in first.tap for op in ops)
        )

    def clean(self, seed: int) -> Iterator[str]:
        """Run a model of another seed without a fault; yields what is found."""
        diff = self._compare(seed)
        for text in (*diff.wrong(), *diff.missing):
            yield f"mode {self.mode}, seed {seed}: {text}"


class _Invariants:
    """Mode I. Only prompts change with the seed."""

    places = ("engine",)

    def __init__(self, folder: Path, targets: Mapping[str, Target], mode: str) -> None:
        self.subject, self.targets = open_model(folder / mode, FIRST_SEED), targets

    def look(self, fault: Fault) -> list[Sight]:
        """What the invariants find first."""
        found = {side: next(self._run(side, FIRST_SEED, fault), "") for side in self.targets}
        return [Sight(side, "I", text) for side, text in found.items()]

    def clean(self, seed: int) -> Iterator[str]:
        """Run the prompts of a seed without a fault; yields what is found."""
        for side in self.targets:
            for text in self._run(side, seed):
                yield f"mode I, seed {seed}: {side}: {text}"

    def _run(self, side: str, seed: int, fault: Fault | None = None) -> Iterator[str]:
        report = check_invariants(
            self.subject, self.targets[side], default_prompts(self.subject, seed),
            names=RELATIONS, modes=("S",), fault=fault,
        )  # fmt: skip
        yield from (f"{result.relation}: {result.complaints[0]}" for result in report.failures)
        if fault is None:
            yield from report.missing


def _look_at_ops(
    fault: Fault, sides: Mapping[str, Target], modes: Sequence[str]
) -> Iterator[Sight]:
    """A fault of an op that the model does not call: its own cases, on every side, for every
    implementation.
    """
    looking = tuple(mode for mode in ALL_MODES if mode in modes)
    planted = {side[0]: fault for side in sides}
    report = check_ops(list(sides.values()), list(fault.ops), planted, looking)
    for side, target in sides.items():
        for mode in looking:
            rows = [row for row in report.results if row.side == side and row.mode == mode]
            # One that takes no case with the fault in it, such as no narrow cache, is no witness.
            rows = [row for row in rows if row.complaints or can_show(row, target, fault)]
            if rows:
                # An implementation of an op that lets it pass has not been seen through.
                wrong = [row for row in rows if row.complaints]
                seen = {row.name for row in wrong} == {row.name for row in rows}
                yield Sight(
                    side,
                    mode,
                    f"{wrong[0].name}: {wrong[0].complaints[0]}" if seen and wrong else "",
                )


def _marks(fault: FaultResult, side: str, modes: Sequence[str]) -> list[str]:
    """For each mode: its letter if it saw the fault, a dot if it looked and did not, else a
    blank.
    """
    looked = {s.mode for s in fault.sights if s.side == side}
    marks = {mode: "." for mode in looked} | {mode: mode for mode in fault.modes(side)}
    return [marks.get(mode, " ") for mode in modes]


def render(report: SelfTest) -> str:
    """The matrix, a line a fault, and what is wrong."""
    width = max([len(fault.name) for fault in report.faults], default=5)
    lines = [f"{'fault':{width}}  " + "  ".join(f"{side:20}" for side in report.sides)]
    for fault in report.faults:
        cells = []
        for side in report.sides:
            cells.append(f"{' '.join(_marks(fault, side, report.modes)):20}")
        lines.append(f"{fault.name:{width}}  {'  '.join(cells)}".rstrip())
    lines.append(
        f"{len(report.faults)} faults on {len(report.sides)} sides: {len(report.missed)} missed, "
        f"{len(report.misplaced)} blamed elsewhere; {report.clean} clean runs: "
        f"{len(report.alarms)} false alarms; "
        f"{report.seconds:.0f} s"
    )
    lines += [f"MISSED {text}" for text in report.missed]
    lines += [f"BLAMED ELSEWHERE {text}" for text in report.misplaced]
    lines += [f"FALSE ALARM {text}" for text in report.alarms[:20]]
    return "\n".join(lines)
