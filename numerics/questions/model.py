"""The comparison of whole models, layer by layer: every side runs the same steps in lockstep with
both references.

At each layer a side runs twice: on the exact reference's inputs, rounded to the run dtype (*local*:
what this layer does wrong by itself), and on its own (*inherited*: what it has become by now).
Within the local run each op is judged on its own inputs. Nothing is kept but the findings, so
memory does not grow with the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...ops.testing import limits
from ...shared.models import decoder
from ...shared.step import StepInput
from ..errors import NotComparable
from ..judging.amplification import TRIES, amplification, worth_trying
from ..judging.diff import Diff, Finding, beyond_dtype, pooled_problems
from ..judging.gates import Amplified, Family, Gate, Mode
from ..judging.logits_metrics import compare_logits
from ..judging.metrics import Metrics, measure
from ..judging.outputs import FEW, OpJudge, gate_for
from ..judging.power import power
from ..judging.weights import check_weights
from ..sides.environment import describe
from ..sides.jitter import HALF_ULP32, Jitter
from ..sides.jittered_run import run_whole
from ..sides.passes import run_stepwise
from ..sides.reference import Reference, State, cache_shapes, sources_of, storage_dtype, total
from ..sides.runners import Fault, Program, Runner, create_runner, plan_of
from ..sides.steps import pages_of, place, real_tokens
from ..sides.subject import HostWeights, Subject, Target
from ..sides.taps import Declared, Tracer
from ..sides.tracing import declare_programs, traced
from .exact import ExactComparison

OUTSIDE = "embed", "finish", "head"
"""Programs that are not layers."""
LIMITS = 5
"""Of a tensor, on average: mode S has two, mode P four for an op and three for a run."""
AMPLIFIED = 4.0
"""So many times the power that layers make of noise by themselves: what is carried through a stream
adds up to about once.
"""
Progress = Callable[[str], None]
Streams = dict[bool, tuple[np.ndarray, np.ndarray]]
"""hidden and residual of the exact reference (True) and of the faithful one."""
Caches = dict[bool, np.ndarray]
"""The cache of a layer in both references."""


@dataclass(slots=True)
class _Side:
    """One backend under comparison, its carried state, and the taps of each program."""

    runner: Runner
    name: str
    kv: list[Any]
    hidden: Any = None
    residual: Any = None
    rows: Any = None
    logits: Any = None


class Comparison:
    """Compares runners on one subject. Use `compare_model`."""

    def __init__(
        self, subject: Subject, runners: Mapping[str, Runner], mode: Mode, *,
        layers: Sequence[int] | None = None, taps: Sequence[str] = ("*",),
    ) -> None:  # fmt: skip
        self.subject, self.mode, self.taps = subject, mode, tuple(taps)
        self.dtype = storage_dtype(subject.dtype)
        self.model = subject.model
        self.layers = set(range(self.model.num_layers) if layers is None else layers)
        self.weights = HostWeights(subject)
        self.sources = sources_of(self.model)
        tables = decoder.rotary_tables(self.model, subject.max_model_len)
        self._tables = tables
        self.exact = Reference(self.model, tables, exact=True)
        self.faithful = Reference(self.model, tables, exact=False)
        self.local = Reference(self.model, tables, exact=True)
        self.local_faithful = Reference(self.model, tables, exact=False)
        self.sides = [_Side(runner, name, []) for name, runner in runners.items()]
        self.diff = Diff(tuple(runners))
        self.reduction = max(self.model.hidden_size, self.model.intermediate_size)
        # In float32 a faithful reference has one order of sums where a backend has another: there
        # is no rounding that both make, and mode P is mode S.
        self.gates: Mode = "S" if subject.dtype == "float32" else mode
        self.family = Family()
        self._half_ulp = HALF_ULP32 if self.gates == "S" else limits(self.dtype).half_ulp
        self._run_amplified: tuple[tuple[int, int], list[Amplified]] = (-1, 0), []
        self._numbers = float("inf")
        self._made: dict[int, float] = {}
        self._noise: dict[tuple[str, int], tuple[float, float]] = {}

    # --- weights
    # ----------------------------------------------------------------------------------------------

    def check_weights(self) -> None:
        """Every side's weights must be those of the checkpoint, bit for bit."""
        for side in self.sides:
            check_weights(
                self.diff, side.name, side.runner.weights, self.weights, self.model.num_layers
            )

    # --- what layers are given; a replay gives what was recorded
    # -----------------------------------------------------

    def start(self, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """The cache of each layer before the first step."""
        # Layers of one shape share what nobody has written yet.
        empty = {shape: np.full(shape, np.nan, self.dtype) for shape in shapes}
        return [empty[shape] for shape in shapes]

    def given(self, index: int, cache: np.ndarray) -> State:
        """What a layer is given in a local run, where the exact reference has this cache."""
        hidden, residual = self.given_end()
        return hidden, residual, cache.astype(self.dtype)

    def given_end(self) -> tuple[np.ndarray, np.ndarray]:
        """What the final norm is given."""
        hidden, residual = self._streams[True]
        return hidden.astype(self.dtype), residual.astype(self.dtype)

    def given_rows(self, exact: np.ndarray) -> np.ndarray:
        """What the head is given, where the exact reference has `exact`."""
        return exact.astype(self.dtype)

    # --- a step
    # ----------------------------------------------------------------------------------------------

    def run(self, steps: Sequence[StepInput], progress: Progress = lambda text: None) -> Diff:
        """Compare all steps. Raises NotComparable if there are none, or a program calls other
        ops.
        """
        if not steps:
            raise NotComparable("there are no steps to compare")
        started = time.perf_counter()
        pages = pages_of(steps)
        # Slots that nobody wrote hold NaN: whoever reads one shows it.
        start = self.start(cache_shapes(self.model, pages, self.subject.page_size))
        self._kv = [{True: x.astype(np.float64), False: x} for x in start]
        self._steps, self._start = steps, start
        for side in self.sides:
            side.runner.allocate(pages)
            side.kv = [side.runner.upload(x) for x in start]
        self.check_weights()
        self.steps = len(steps)
        for number, step in enumerate(steps):
            progress(f"step {number + 1} of {len(steps)}, {step.descriptor}")
            self._step(number, step)
        self.diff.environment = describe(
            self.subject, {s.name: s.runner for s in self.sides}, steps
        )
        self.diff.problems += pooled_problems(self.diff) if self.gates == "P" else []
        self.diff.missing += beyond_dtype(self.diff, self.subject.dtype)
        self.diff.seconds = time.perf_counter() - started
        return self.diff

    def _step(self, number: int, step: StepInput) -> None:
        self.number, self.step, self.real = number, step, real_tokens(step)
        for reference in (self.exact, self.faithful, self.local, self.local_faithful):
            reference.begin(step)
        declared = self._declare()
        for side in self.sides:
            side.runner.prepare(step, declared[side.name])
            side.runner.begin(step)
        self._declared = declared
        self.family = Family(self.steps * self._comparisons(declared))
        self._numbers, self._made = float(self.real * self.model.hidden_size), {}
        _, self._kv = run_stepwise(self._embed, self._layer, self._end, self._kv, self.sources)

    def _declare(self) -> dict[str, dict[Program, tuple[Declared, ...]]]:
        """The taps of each side's programs."""
        calls = traced(self.local, self.weights, [cache[True] for cache in self._kv])
        return {
            side.name: declare_programs(
                calls, side.runner.plans, self.step.descriptor.kind, self.taps
            )
            for side in self.sides
        }

    def _comparisons(self, declared: Mapping[str, Mapping[Program, Sequence[Declared]]]) -> int:
        """Limits in a step, of all sides."""
        layers = len(self.layers)
        tensors = 0
        for programs in declared.values():
            taps = {program: len(found) for program, found in programs.items()}
            outside = sum(taps.get(name, 0) for name in OUTSIDE)
            inside = max((n for name, n in taps.items() if name not in OUTSIDE), default=0)
            tensors += outside + 1 + layers * (inside + 2)
        return max(tensors * LIMITS, 1)

    def _embed(self) -> Streams:
        top = self.weights.top()
        hidden = {True: self.exact.embed(top), False: self.faithful.embed(top)}
        for reference in (self.local, self.local_faithful):
            reference.embed(top)  # for layers that have inputs of their own
        self._streams: Streams = {exact: (x, np.zeros_like(x)) for exact, x in hidden.items()}
        for side in self.sides:
            side.hidden, taps = side.runner.embed()
            side.residual = side.runner.upload(np.zeros(hidden[False].shape, self.dtype))
            self._ops(side, "embed", -1, self.exact.calls, taps)
        return self._streams

    def _layer(self, index: int, streams: Streams, caches: Caches) -> tuple[Streams, Caches]:
        weights, inputs = self.weights.layer(index), self.given(index, caches[True])
        source = self.sources[index]
        after, written = {}, {}
        for exact, reference in ((True, self.exact), (False, self.faithful)):
            *stream, cache = reference.layer(index, weights, (*streams[exact], caches[exact]))
            after[exact], written[exact] = (stream[0], stream[1]), cache
        self._streams = after
        judged = index in self.layers
        if judged:
            expected = total(self.local.layer(index, weights, inputs))
            noisy = total(self.local_faithful.layer(index, weights, inputs))
            calls = self.local.calls
        for side in self.sides:
            runner = side.runner
            if judged:
                out, taps = runner.layer(index, *(runner.upload(x) for x in inputs))
                self._ops(side, self.exact.spec.layers[index], index, calls, taps)
                output = total(tuple(runner.download(x) for x in out[:2]))
                self._find(
                    side.name, "layer", index, "output", output, expected, noisy,
                    lambda tries: self._amplified(index, weights, inputs, expected, tries),
                )  # fmt: skip
            (side.hidden, side.residual, side.kv[source]), _ = runner.layer(
                index, side.hidden, side.residual, side.kv[source]
            )
            if judged:
                inherited = total(tuple(runner.download(x) for x in (side.hidden, side.residual)))
                run_expected, run_noisy = (total(after[exact]) for exact in (True, False))
                self._find(
                    side.name, "inherited", index, "output", inherited, run_expected, run_noisy
                )
        return after, written

    def _amplified(
        self, index: int, weights: Mapping[str, np.ndarray], inputs: State, expected: np.ndarray,
        tries: int,
    ) -> Amplified:  # fmt: skip
        """What a layer makes of errors of its ops' inputs."""

        def run(rng: np.random.Generator) -> list[np.ndarray]:
            jitter = Jitter(rng, self._half_ulp)
            reference = Reference(self.model, self._tables, exact=True, tracer=jitter)
            reference.begin(self.step)
            reference.embed(self.weights.top())  # for layers that have inputs of their own
            return [total(reference.layer(index, weights, inputs))[: self.real]]

        return amplification(run, [expected[: self.real]], tries)[0]

    def _carried(self, layer: int, tries: int) -> Amplified:
        """What the run so far makes of errors of its ops' inputs, behind a layer; -1: logits."""
        key = self.number, tries
        if self._run_amplified[0] != key:
            given = self.model, self._tables, self.weights, self._start
            steps = self._steps[: self.number + 1]

            def run(tracer: Tracer | None) -> list[np.ndarray]:
                return [x[: self.real] for x in run_whole(*given, steps, tracer)]

            found = amplification(lambda rng: run(Jitter(rng, self._half_ulp)), run(None), tries)
            self._run_amplified = key, found
        return self._run_amplified[1][layer]

    def _is_wrong_before(self, side: str) -> bool:
        """Whether an op or a layer of a side failed, which explains what is carried on."""
        return any(
            f.side == side and not f.passed and f.scope in ("op", "layer")
            for f in self.diff.findings
        )

    def _end(self, streams: Streams) -> None:
        top = self.weights.top()
        given = self.given_end()
        rows = {
            exact: reference.finish(top, *streams[exact])
            for exact, reference in ((True, self.exact), (False, self.faithful))
        }
        self.local.finish(top, *given)
        calls = self.local.calls
        for side in self.sides:
            runner = side.runner
            _out, taps = runner.finish(*(runner.upload(x) for x in given))
            self._ops(side, "finish", -1, calls, taps)
            side.rows, _ = runner.finish(side.hidden, side.residual)
        logits = {
            True: self.exact.head(top, rows[True]),
            False: self.faithful.head(top, rows[False]),
        }
        rounded = self.given_rows(rows[True])
        self.local.head(top, rounded)
        for side in self.sides:
            runner = side.runner
            _, taps = runner.head(runner.upload(rounded))
            self._ops(side, "head", -1, self.local.calls, taps)
            side.logits = runner.download(runner.head(side.rows)[0])
            self._find(
                side.name, "logits", -1, "final logits", side.logits, logits[True], logits[False]
            )
        self._logits(logits[True], logits[False])

    def _logits(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        real = self.real
        for other in self.sides[1:]:
            a, b = (side.logits[:real] for side in (self.sides[0], other))
            self.diff.logits.append(
                compare_logits(
                    a,
                    b,
                    exact[:real],
                    faithful[:real],
                    self.step,
                    self.mode,
                    family=self.family,
                    numbers=self._numbers,
                )
            )

    # --- findings
    # ----------------------------------------------------------------------------------------------

    def _ops(self, side: _Side, program: Program, layer: int, calls: Any, taps: Any) -> None:
        judge = OpJudge(self.gates, calls, self.real, self.reduction, self.family)
        plan = plan_of(side.runner.plans, self.step.descriptor.kind, program)
        for declared, tap in zip(self._declared[side.name][program], taps, strict=True):
            if tap is None:
                continue
            for found, output in zip(judge(declared, *tap), tap[1], strict=True):
                self.diff.findings.append(
                    Finding(
                        side.name,
                        self.mode,
                        "op",
                        self.number,
                        layer,
                        found.name,
                        plan[declared.op].provider,
                        found.metrics,
                        found.complaints,
                        found.bound,
                        place(self.step, found.metrics.worst, output.ndim, self.subject.page_size),
                        found.shares,
                    )
                )

    def _find(
        self, side: str, scope: Any, layer: int, tap: str, got: Any, right: Any, noisy: Any,
        amplified: Callable[[int], Amplified] | None = None,
    ) -> None:  # fmt: skip
        got, right, noisy = (x[: self.real] for x in (got, right, noisy))
        metrics = measure(got, right, noisy)
        gate = self.gate(scope, layer, metrics)
        if amplified is None and not self._is_wrong_before(side):
            amplified = partial(self._carried, layer)
        few = scope != "layer" or metrics.effective < FEW
        tried = self.gates == "S" or few
        if tried and amplified is not None and worth_trying(gate, metrics):
            for tries in TRIES:
                gate = self.gate(scope, layer, metrics, amplified(tries))
                if list(gate.complaints(metrics)):
                    break
        self.diff.findings.append(
            Finding(
                side,
                self.mode,
                scope,
                self.number,
                layer,
                tap,
                "",
                metrics,
                tuple(gate.complaints(metrics)),
                None,
                place(self.step, metrics.worst, got.ndim, self.subject.page_size),
                gate.shares(metrics),
            )
        )

    def gate(self, scope: Any, layer: int, m: Metrics, amplified: Amplified | None = None) -> Gate:
        """The gate of a layer's output, or of the logits."""
        noise, right = self._noise.get((scope, layer), (0.0, 0.0))
        if m.rel_noise:
            noise, right = noise + m.noise_power, right + m.noise_power / m.rel_noise**2
            self._noise[scope, layer] = noise, right
        return gate_for(
            self.gates,
            scope,
            m,
            self.reduction,
            self.model.num_layers,
            family=self.family,
            noise=(noise / right) ** 0.5 if right else 0.0,
            numbers=self._independent(scope, layer, m),
            rows=self.real,
            amplified=amplified,
        )

    def _independent(self, scope: Any, layer: int, m: Metrics) -> float:
        """Independent numbers that a run's noise has by now, at most: logits are made of a hidden
        state each. Noise that is more than what the layers made of it was amplified, as by sharp
        attention: a row of it moves as one, from there on.
        """
        if scope == "layer":
            self._made[layer] = m.noise_power
        all_judged = scope == "inherited" and len(self._made) == layer + 1
        if all_judged and m.noise_power > AMPLIFIED * sum(self._made.values()):
            self._numbers = min(self._numbers, max(m.effective, 1.0))
        return self._numbers


def compare_model(
    subject: Subject,
    targets: Sequence[Target],
    steps: Sequence[StepInput],
    *,
    modes: Sequence[Mode] = ("S", "P"),
    layers: Sequence[int] | None = None,
    taps: Sequence[str] = ("*",),
    faults: Mapping[str, Fault] | None = None,
    progress: Progress = lambda text: None,
) -> Diff:
    """Compare `targets` on `subject` in the given modes. `faults` plants faults by side (`a`,
    `b`, ...): for tests.
    """

    names = [f"{chr(ord('a') + i)} {target}" for i, target in enumerate(targets)]
    merged = Diff(tuple(names))
    for mode in modes:
        where_ = subject if mode != "S" else subject.with_dtype("float32")
        progress(f"mode {mode}: loading")
        runners: dict[str, Runner] = {}
        try:
            for name, target in zip(names, targets, strict=True):
                runners[name] = create_runner(where_, target, (faults or {}).get(name[0]))

            def tell(text: str, mode: str = mode) -> None:
                progress(f"mode {mode}: {text}")

            if mode == "X":
                diff = ExactComparison(where_, runners).run(steps, layers, tell)
            else:
                diff = Comparison(where_, runners, mode, layers=layers, taps=taps).run(steps, tell)
        finally:
            for runner in runners.values():
                runner.close()
        merged.extend(diff)
        merged.environment |= {
            k: v for k, v in diff.environment.items() if mode == "P" or k not in merged.environment
        }
    merged.environment["power"] = power(merged)
    return merged
