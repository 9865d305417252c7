"""Mode X: the exact probes of `numerics/questions/exact_probes.py`, run and compared bit for bit.

For a model: weights, rotary tables and the page tables of each step must have reached the device as
they are, and every op of every program must give the bits of the reference on probes of the shapes
that it is called with, under the plan that the model runs under. Ops run one by one here; that they
do the same inside of the model's compiled programs is what modes S and P look at.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...ops import Plan
from ...ops.testing import TESTING, Arguments, Case, Verdict, ci_cases, oracle, run
from ...shared.step import StepInput
from ..errors import NotComparable
from ..judging.diff import Diff, Finding
from ..judging.metrics import measure
from ..judging.weights import check_held, check_page_tables
from ..progress import Progress, silent
from ..sides.environment import describe
from ..sides.reference import State, reference_of
from ..sides.side import Program, WorkerSide, plan_of
from ..sides.steps import cache_shapes, empty_caches, pages_of
from ..sides.subject import HostWeights, Subject
from ..sides.taps import Call, declare
from .exact_probes import probes

SEEDS = 0, 1
"""Of probes."""
SAMPLING = "greedy_sample", "quantize_logits", "penalties", "sample", "penalised_sample"
"""Ops behind the model: probed by their own cases, which are judged bit for bit."""


class ExactJudge:
    """Compares outputs with the bits that they must have: the oracle's numbers, rounded to float32
    and then to the dtypes of the op. Zeros are equal whatever their sign; NaN is like NaN.
    """

    def __init__(self, op: str, arguments: Arguments) -> None:
        with np.errstate(all="ignore"):
            like = [out.dtype for out in run(op, "numpy", None, arguments)]
            free = TESTING[op].free if op in TESTING else None
            marks = free(arguments) if free is not None else None
            outputs = [np.asarray(out) for out in oracle(op, arguments)]
            wide = [out.astype(np.float32) if out.dtype == np.float64 else out for out in outputs]
            self.wanted = [out.astype(dtype) for out, dtype in zip(wide, like, strict=True)]
        self.free = marks if isinstance(marks, tuple) else (marks,) * len(like)

    def unequal(self, outputs: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """For each output, where it differs. An output of another shape or dtype differs
        everywhere.
        """
        for got, want, free in zip(outputs, self.wanted, self.free, strict=True):
            if got.shape != want.shape or got.dtype != want.dtype:
                yield np.ones(want.shape, bool)
                continue
            with np.errstate(invalid="ignore"):
                differs = (got != want) & ~((got != got) & (want != want))
            yield differs if free is None else differs & ~np.broadcast_to(free, differs.shape)

    def __call__(self, outputs: Sequence[np.ndarray]) -> Verdict:
        """As the judge of a bound says it."""
        for index, wrong in enumerate(self.unequal(outputs)):
            if wrong.any():
                where = tuple(int(i) for i in np.argwhere(wrong)[0])
                return Verdict(np.inf, 0.0, f"output {index}, element {where}")
        return Verdict(0.0, 0.0, "")


class ExactComparison:
    """Probes sides of one subject. What was run once under a plan is not run again."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.weights = HostWeights(subject)
        self._reference = reference_of(subject, exact=False)
        self._known: dict[Any, list[Finding]] = {}
        self._judges: dict[Any, list[tuple[Case, ExactJudge]]] = {}

    def run(
        self, sides: Mapping[str, WorkerSide], steps: Sequence[StepInput],
        layers: Sequence[int] | None = None, progress: Progress = silent,
    ) -> Diff:  # fmt: skip
        """Probe at the shapes of the first step of each kind. Raises NotComparable if there is
        no step.
        """
        if not steps:
            raise NotComparable("there are no steps to compare")
        started = time.perf_counter()
        diff = Diff(tuple(sides))
        first = {
            step.descriptor.kind: (number, step)
            for number, step in reversed(list(enumerate(steps)))
        }
        judged = range(self.subject.model.num_layers) if layers is None else layers
        for name, side in sides.items():
            check_held(diff, name, side, self.weights)
            self._check_page_tables(diff, name, side, steps)
        for kind, (number, step) in sorted(first.items(), key=lambda entry: entry[1][0]):
            calls = self._calls(step, pages_of(steps), judged)
            for name, side in sides.items():
                progress(f"{name}: {kind}")
                for program, made in calls:
                    plan = plan_of(side.plans, side.spec, kind, program)
                    layer = program if isinstance(program, int) else -1
                    for call, tap in _under(plan, made):
                        diff.findings += self._call(name, side, plan, number, layer, call, tap)
        for name, side in sides.items():
            for op in SAMPLING:
                diff.findings += self._sampling(name, side, op)
        diff.environment = describe(self.subject, sides, steps)
        diff.seconds = time.perf_counter() - started
        return diff

    def _check_page_tables(
        self, diff: Diff, name: str, side: WorkerSide, steps: Sequence[StepInput]
    ) -> None:
        """Run the steps: what a step says of pages must be what the device has of them."""
        side.begin(empty_caches(self.subject, steps))
        for step in steps:
            found = side.execute(step).page_tables
            if found is not None:
                check_page_tables(diff, name, step, found, self.subject.layout.groups)

    def _calls(
        self, step: StepInput, pages: int, layers: Sequence[int]
    ) -> list[tuple[Program, list[Call]]]:
        """The calls of each program in the reference: they say which ops there are, and their
        shapes.
        """
        shapes = cache_shapes(self.subject, pages)

        def given(layer: int, hidden: np.ndarray) -> State:
            return hidden, hidden, np.zeros(shapes[layer], hidden.dtype)

        self._reference.begin(step)
        weights = self.weights
        return list(self._reference.traced(weights.top(), weights.layer, layers, given))

    def _call(
        self, name: str, side: WorkerSide, plan: Plan, number: int, layer: int, call: Call, tap: str
    ) -> list[Finding]:
        """The probes of one call; those that were run are said again for this layer."""
        key = (name, plan.hash, call.op, tap, _signature(call.arguments))
        if key not in self._known:
            self._known[key] = [
                finding
                for case, judge in self._probes(call.op, call.arguments)
                for finding in self._judge(name, side, plan, call.op, tap, case, judge)
            ]
        return [replace(finding, step=number, layer=layer) for finding in self._known[key]]

    def _sampling(self, name: str, side: WorkerSide, op: str) -> Iterator[Finding]:
        plan = side.plans["sample"]
        for case in ci_cases(TESTING[op], "float32"):
            judge = ExactJudge(op, case.arguments)
            yield from self._judge(name, side, plan, op, op, case, judge)

    def _probes(self, op: str, arguments: Mapping[str, Any]) -> list[tuple[Case, ExactJudge]]:
        """Probes and their judges; all sides use the same."""
        key = op, _signature(arguments)
        if key not in self._judges:
            cases = [case for seed in SEEDS for case in probes(op, dict(arguments), seed)]
            self._judges[key] = [(case, ExactJudge(op, case.arguments)) for case in cases]
        return self._judges[key]

    def _judge(
        self, side: str, worker: WorkerSide, plan: Plan, op: str, tap: str, case: Case,
        judge: ExactJudge,
    ) -> Iterator[Finding]:  # fmt: skip
        """Outside of a step and a layer: both are filled in where the op is called."""
        provider = plan[op].provider
        outputs = worker.run_op(plan, op, case.arguments)
        for index, (got, wrong) in enumerate(zip(outputs, judge.unequal(outputs), strict=True)):
            label = tap if len(outputs) == 1 else f"{tap}#{index}"
            want, places = judge.wanted[index], np.argwhere(wrong)
            complaints: tuple[str, ...] = ()
            where, shown = "", want
            if len(places):
                what = f"{len(places)} of {wrong.size} elements are not the reference's"
                complaints = (f"probe '{case.name}': {what}",)
                where = f"element {tuple(places[0].tolist())}"
                # What may differ does not count, so that the metrics say what the complaint says.
                shown = np.where(wrong, got, want) if got.shape == want.shape else want
            metrics = measure(shown, want, want)
            yield Finding(side, "X", "op", 0, -1, label, provider, metrics, complaints, None, where)


def _under(plan: Plan, calls: Sequence[Call]) -> list[tuple[Call, str]]:
    """The calls that a plan makes, with the names of their taps."""
    by_key = {call.key: call for call in calls}
    return [(by_key[tap.key], tap.key) for tap in declare(calls, plan)]


def _signature(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shapes, dtypes and values that are not arrays: what a probe is made after, but for tables
    of one step.
    """
    return tuple(
        (name, value.shape, str(value.dtype)) if isinstance(value, np.ndarray) else (name, value)
        for name, value in arguments.items()
    )
