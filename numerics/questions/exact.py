"""Mode X: the exact probes of `numerics/questions/exact_probes.py`, run and compared bit for bit.

For a model: what the step says (page table, slots, lengths, rotary angles) must have reached the
device as it is, and every op of every program must give the bits of the reference on probes of the
shapes that it is called with, under the plan that the model runs under. Ops run one by one here;
that they do the same inside of the model's compiled programs is what modes S and P look at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from ...ops import REGISTRY, Plan
from ...ops.cases import load_all
from ...ops.plan import COMPOSITION, NATIVE
from ...ops.testing import TESTING, Arguments, Verdict, ci_cases, oracle, run
from ...shared.models import decoder
from ...shared.step import StepInput
from ..errors import NotComparable
from ..faults.planting import FaultyPlan
from ..judging.diff import Diff, Finding
from ..judging.metrics import measure
from ..judging.weights import check_weights
from ..sides.environment import describe
from ..sides.one_op import FRAMEWORKS, run_op
from ..sides.reference import Reference, cache_shapes, step_batch
from ..sides.runners import Fault, Program, Runner, plan_of
from ..sides.steps import pages_of, real_tokens
from ..sides.subject import HostWeights, Subject
from ..sides.taps import Call, declare
from .exact_probes import probes

SAMPLING = "greedy_sample", "quantize_logits", "penalties", "sample"
"""Ops behind the model: probed by their own cases, which are judged bit for bit."""


def expected(op: str, arguments: Arguments, like: Sequence[Any]) -> list[np.ndarray]:
    """The bits that an op must give: the oracle's numbers, rounded to float32 and then to the
    dtypes of `like`.
    """
    with np.errstate(all="ignore"):
        outputs = [np.asarray(out) for out in oracle(op, arguments)]
        wide = [out.astype(np.float32) if out.dtype == np.float64 else out for out in outputs]
        return [out.astype(dtype) for out, dtype in zip(wide, like, strict=True)]


class ExactJudge:
    """Compares outputs with the bits that they must have. Zeros are equal whatever their sign;
    NaN is like NaN.
    """

    def __init__(self, op: str, arguments: Arguments) -> None:
        load_all()
        with np.errstate(all="ignore"):
            like = [out.dtype for out in run(op, "numpy", None, arguments)]
            free = TESTING[op].free if op in TESTING else None
            marks = free(arguments) if free is not None else None
        self.wanted = expected(op, arguments, like)
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
    """Probes runners of one subject. What was run once for a fault, or without one, is not run
    again.
    """

    def __init__(
        self,
        subject: Subject,
        runners: Mapping[str, Runner],
        seeds: Sequence[int] = (0, 1),
        *,
        sampling: bool = True,
    ) -> None:
        self.subject, self.runners, self.seeds, self.sampling = (
            subject,
            dict(runners),
            tuple(seeds),
            sampling,
        )
        self.model = subject.model
        self.weights = HostWeights(subject)
        self._tables = decoder.rotary_tables(self.model, subject.max_model_len)
        self._reference = Reference(self.model, self._tables, exact=False)
        self._bound: dict[Any, Any] = {}
        self._known: dict[Any, list[Finding]] = {}
        self._judges: dict[Any, tuple[Arguments, ExactJudge]] = {}

    def another_seed(
        self, subject: Subject, runners: Mapping[str, Runner], seed: int
    ) -> ExactComparison:
        """One of other weights, steps and probes, but of the same sizes and plans: what is compiled
        is used again.

        Sampling is left out: its cases know no seed.
        """
        other = ExactComparison(subject, runners, (seed,), sampling=False)
        other._bound = self._bound
        return other

    def run(
        self, steps: Sequence[StepInput], layers: Sequence[int] | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> Diff:  # fmt: skip
        """Probe at the shapes of the first step of each kind. Raises NotComparable if there is
        no step.
        """
        if not steps:
            raise NotComparable("there are no steps to compare")
        started = time.perf_counter()
        diff = Diff(tuple(self.runners))
        first = {
            step.descriptor.kind: (number, step)
            for number, step in reversed(list(enumerate(steps)))
        }
        judged = range(self.model.num_layers) if layers is None else layers
        for side, runner in self.runners.items():
            runner.allocate(pages_of(steps))
            check_weights(diff, side, runner.weights, self.weights, self.model.num_layers)
        for kind, (number, step) in sorted(first.items(), key=lambda entry: entry[1][0]):
            calls = self._calls(step, pages_of(steps), judged)
            for side, runner in self.runners.items():
                progress(f"{side}: {kind}")
                diff.findings += self._fields(side, runner, number, step, judged)
                for layer, program, made in calls:
                    plan = plan_of(runner.plans, kind, program)
                    for call, tap in _under(plan, made):
                        diff.findings += self._call(side, runner, plan, number, layer, call, tap)
        for side, runner in self.runners.items():
            for op in SAMPLING if self.sampling else ():
                diff.findings += self._sampling(side, runner, op)
        diff.environment = describe(self.subject, self.runners, steps)
        diff.seconds = time.perf_counter() - started
        return diff

    def _calls(
        self, step: StepInput, pages: int, layers: Sequence[int]
    ) -> list[tuple[int, Program, list[Call]]]:
        """(layer, program, calls) of the reference: they say which ops there are, and their
        shapes.
        """
        reference, top = self._reference, self.weights.top()
        reference.begin(step)
        hidden = reference.embed(top)
        found: list[tuple[int, Program, list[Call]]] = [(-1, "embed", reference.calls)]
        shapes = cache_shapes(self.model, pages, self.subject.page_size)
        for layer in layers:
            kv = np.zeros(shapes[layer], hidden.dtype)
            reference.layer(layer, self.weights.layer(layer), (hidden, hidden, kv))
            found.append((layer, reference.spec.layers[layer], reference.calls))
        rows = reference.finish(top, hidden, hidden)
        found.append((-1, "finish", reference.calls))
        reference.head(top, rows)
        return [*found, (-1, "head", reference.calls)]

    def _fields(
        self, side: str, runner: Runner, number: int, step: StepInput, layers: Sequence[int]
    ) -> Iterator[Finding]:
        """What layers are given besides activations and weights, as it lies on the device."""
        runner.begin(step)
        real, right = real_tokens(step), step_batch(step, self._tables).arrays()
        for layer in layers:
            given = runner.inputs(layer)
            for name, want in right.items():
                rows = slice(real) if name in ("cos", "sin") else slice(None)
                wrong = given[name][rows] != want[rows]
                yield self._finding(
                    side, number, layer, name, "", given[name][rows], want[rows], wrong, "step"
                )

    def _call(
        self, side: str, runner: Runner, plan: Plan, number: int, layer: int, call: Call, tap: str
    ) -> list[Finding]:
        """The probes of one call; those that were run are said again for this layer."""
        fault = (
            runner.fault
            if runner.fault.at(layer) and _touches(runner.fault, plan, call.op)
            else None
        )
        key = (side, plan.hash, fault and fault.name, call.op, tap, _signature(call.arguments))
        if key not in self._known:
            functions = self._functions(runner, plan, fault)
            self._known[key] = [
                finding
                for seed in self.seeds
                for name, arguments, judge in self._probes(call.op, call.arguments, seed)
                for finding in self._judge(
                    side, runner, plan, functions, call.op, tap, name, arguments, judge
                )
            ]
        return [_at(finding, number, layer) for finding in self._known[key]]

    def _sampling(self, side: str, runner: Runner, op: str) -> list[Finding]:
        plan = runner.plans["sample"]
        fault = runner.fault if op in runner.fault.ops else None
        key = (side, plan.hash, fault and fault.name, op)
        if key not in self._known:
            load_all()
            functions = self._functions(runner, plan, fault)
            self._known[key] = [
                finding
                for case in ci_cases(TESTING[op], "float32")
                for finding in self._judge(
                    side,
                    runner,
                    plan,
                    functions,
                    op,
                    op,
                    case.name,
                    case.arguments,
                    ExactJudge(op, case.arguments),
                )
            ]
        return self._known[key]

    def _probes(
        self, op: str, arguments: Mapping[str, Any], seed: int
    ) -> Iterator[tuple[str, Arguments, ExactJudge]]:
        """Probes and their judges; both sides use the same."""
        for place, probe in enumerate(probes(op, dict(arguments), seed)):
            key = op, seed, place, _signature(arguments)
            if key not in self._judges:
                self._judges[key] = probe.arguments, ExactJudge(op, probe.arguments)
            yield probe.name, *self._judges[key]

    def _functions(self, runner: Runner, plan: Plan, fault: Fault | None) -> Any:
        """The plan as the framework's binding calls it, with the fault in it."""
        key = runner.target.backend, plan.hash, fault and fault.name
        if key not in self._bound:
            framework = FRAMEWORKS[runner.target.backend]
            binding = import_module(f"...ops.bindings.{framework}", __package__)
            chosen = (
                plan if fault is None else FaultyPlan(plan.framework, plan.choices, fault=fault)
            )
            self._bound[key] = binding.bind(chosen)
        return self._bound[key]

    def _judge(
        self, side: str, runner: Runner, plan: Plan, functions: Any, op: str, tap: str, name: str,
        arguments: Arguments, judge: ExactJudge,
    ) -> Iterator[Finding]:  # fmt: skip
        provider = plan[op].provider
        known = None if provider in (NATIVE, COMPOSITION) else provider
        outputs = run_op(
            runner.target.backend,
            op,
            known,
            arguments,
            runner.device.platform,
            lambda _: getattr(functions, op),
        )
        for index, (got, wrong) in enumerate(zip(outputs, judge.unequal(outputs), strict=True)):
            label = tap if len(outputs) == 1 else f"{tap}#{index}"
            yield self._finding(side, 0, -1, label, provider, got, judge.wanted[index], wrong, name)

    @staticmethod
    def _finding(
        side: str, number: int, layer: int, tap: str, provider: str, got: np.ndarray,
        want: np.ndarray,
        wrong: np.ndarray, probe: str,
    ) -> Finding:  # fmt: skip
        places = np.argwhere(wrong)
        complaints: tuple[str, ...] = ()
        where = ""
        if len(places):
            complaints = (
                f"probe '{probe}': {len(places)} of {wrong.size} elements are not the reference's",
            )
            where = f"element {tuple(int(i) for i in places[0])}"
        same = got.shape == want.shape
        # What may differ does not count, so that the metrics say what the complaint says.
        shown = np.where(wrong, got, want) if same and complaints else want
        return Finding(
            side,
            "X",
            "op",
            number,
            layer,
            tap,
            provider,
            measure(shown, want, want),
            complaints,
            None,
            where,
        )


def _under(plan: Plan, calls: Sequence[Call]) -> list[tuple[Call, str]]:
    """The calls that a plan makes, with the names of their taps."""
    by_key = {call.key: call for call in calls}
    return [(by_key[tap.key], tap.key) for tap in declare(calls, plan)]


def _touches(fault: Fault, plan: Plan, op: str) -> bool:
    """Whether the fault is in an op, or in one that it is composed of under the plan."""
    inside = REGISTRY[op].composition if plan[op].provider == COMPOSITION else ()
    return op in fault.ops or any(_touches(fault, plan, name) for name in inside)


def _signature(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shapes, dtypes and values that are not arrays: what a probe is made after, but for tables
    of one step.
    """
    return tuple(
        (name, value.shape, str(value.dtype)) if isinstance(value, np.ndarray) else (name, value)
        for name, value in arguments.items()
    )


def _at(finding: Finding, number: int, layer: int) -> Finding:
    return replace(finding, step=number, layer=layer)
