"""The comparison of whole models, layer by layer: every side's worker executes the same steps, in
lockstep with both references.

What a worker's programs passed from layer to layer is judged twice behind each layer: against
references that were given what the layer was given, stream and cache (*local*: what this layer does
wrong by itself), and against references that ran from the start (*inherited*: what it has become by
now). Then each op of the layer runs by itself, as the worker's plans have it, on what it is given
there. Nothing is kept but the findings, so memory does not grow with the model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ...ops.testing import limits
from ...shared.step import PROCESSING, StepInput
from ..errors import NotComparable
from ..judging.amplification import TRIES, amplification, worth_trying
from ..judging.diff import Diff, Finding, beyond_dtype, pooled_problems
from ..judging.gates import Amplified, Family, Gate, Mode, Scope, longest_sum, semantics
from ..judging.logits_metrics import compare_logits, known_rows
from ..judging.metrics import Metrics, measure
from ..judging.outputs import FEW, OpJudge, gate_for
from ..judging.power import power
from ..judging.served import judge_row
from ..judging.weights import check_held, check_page_tables
from ..progress import Progress, silent
from ..sides.environment import describe
from ..sides.fault import Fault
from ..sides.jitter import HALF_ULP32, Jitter
from ..sides.narrow_cache import HeldEntries, OtherNeighbours, RoundingChoice, doubt, is_narrow
from ..sides.narrow_inputs import HeldInputs, OtherInputs, TriedInputs, off_by, settle
from ..sides.passes import Stepwise
from ..sides.reference import State, reference_of, sources_of, storage_dtype, total
from ..sides.sampling import chooser_of, sampled_rows, sampling_field
from ..sides.side import Executed, Program, Side, open_sides, plan_of
from ..sides.steps import (
    empty_caches,
    owned_rows,
    place,
    real_tokens,
    rows_of_requests,
    where,
)
from ..sides.subject import HostWeights, Subject, Target, name_sides
from ..sides.taps import Call, Declared, Tracer, declare
from .exact import ExactComparison

LIMITS = 5
"""Of a tensor, on average: mode S has two, mode P four for an op and three for a run."""
AMPLIFIED = 4.0
"""So many times the power that layers make of noise by themselves: what is carried through a stream
adds up to about once.
"""
PATIENCE = 256
"""Runs of a layer that may look in vain for ties that explain what a side did: what is really wrong
would make a comparison many times as long.
"""
Streams = dict[bool, tuple[np.ndarray, np.ndarray]]
"""hidden and residual of the exact reference (True) and of the faithful one."""
Caches = dict[bool, np.ndarray]
"""The cache of a layer in both references."""


@dataclass(slots=True)
class Judged:
    """One side, what it did in the step under way, and what it holds that is not the checkpoint's
    or the definition's: weights by layer, and rotary tables.
    """

    side: Side
    name: str
    ran: Executed = field(init=False)
    weights: dict[int, Mapping[str, np.ndarray]] = field(default_factory=dict)
    tables: tuple[np.ndarray, np.ndarray] | None = None


class Comparison:
    """Compares sides on one subject. Use `compare_model`."""

    def __init__(
        self, subject: Subject, sides: Mapping[str, Side], mode: Mode, *,
        layers: Sequence[int] | None = None, taps: Sequence[str] = ("*",),
        start: Sequence[np.ndarray] | np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """`start` is the cache of each layer before the first step, as far as its pages were
        written.
        """
        self.subject, self.mode, self.taps = subject, mode, tuple(taps)
        self.dtype = storage_dtype(subject.dtype)
        self.model = subject.model
        self._cache_dtype = storage_dtype(subject.cache_dtype)
        self._given = () if start is None else start
        self.layers = set(range(self.model.num_layers) if layers is None else layers)
        self.weights = HostWeights(subject)
        self.sources = sources_of(self.model)
        self.reduction = longest_sum(self.model)
        # In float32 a faithful reference has one order of sums where a backend has another: there
        # is no rounding that both make, and mode P is mode S.
        self.gates: Mode = "S" if subject.dtype == "float32" else mode
        # In the run dtype the faithful reference is beside as many ties as a backend is.
        self._doubt = doubt(self.reduction, Family().deviations) if self.gates == "S" else 0.0
        self._patience = PATIENCE
        self._held: HeldEntries | None = None
        ties: list[RoundingChoice] = [OtherInputs(self._doubt)] if self._doubt else []
        if self._doubt and subject.cache_dtype != subject.dtype:
            self._held = HeldEntries(self._doubt)
            ties.append(OtherNeighbours(self._doubt))
        self._reference = partial(reference_of, subject)
        self.exact = self._reference(exact=True)
        self.faithful = self._reference(exact=False, choices=ties)
        self.local = self._reference(exact=True, choices=self._writing())
        self.local_faithful = self._reference(exact=False)
        self.sides = [Judged(side, name) for name, side in sides.items()]
        self.diff = Diff(tuple(sides))
        self.family = Family()
        self._half_ulp = HALF_ULP32 if self.gates == "S" else limits(self.dtype).half_ulp
        self._run_amplified: tuple[tuple[int, int], list[Amplified]] = (-1, 0), []
        self._numbers = float("inf")
        self._made: dict[int, float] = {}
        self._noise: dict[tuple[str, int], tuple[float, float]] = {}
        self._tensors: dict[str, int] = {}

    # --- weights
    # ----------------------------------------------------------------------------------------------

    def check_held(self) -> None:
        """What every side's programs are given must be the checkpoint's, and the definition's, bit
        for bit.
        """
        for judged in self.sides:
            judged.weights, judged.tables = check_held(
                self.diff, judged.name, judged.side, self.weights
            )

    def _first_caches(self, steps: Sequence[StepInput]) -> list[np.ndarray]:
        caches = empty_caches(self.subject, steps)
        for index, given in enumerate(self._given):
            caches[index] = caches[index].copy()
            caches[index][: len(given)] = given.astype(self._cache_dtype)
        return caches

    # --- a step
    # ----------------------------------------------------------------------------------------------

    def run(self, steps: Sequence[StepInput], progress: Progress = silent) -> Diff:
        """Compare all steps. Raises NotComparable if there are none."""
        if not steps:
            raise NotComparable("there are no steps to compare")
        started = time.perf_counter()
        start = self._first_caches(steps)
        self._kv = [{True: x if is_narrow(x) else x.astype(np.float64), False: x} for x in start]
        self._steps, self._start = steps, start
        for judged in self.sides:
            judged.side.begin(start)
        self.check_held()
        self.steps = len(steps)
        for number, step in enumerate(steps):
            progress(f"step {number + 1} of {len(steps)}, {step.descriptor}")
            self._step(number, step)
        self.diff.environment = describe(
            self.subject, {judged.name: judged.side for judged in self.sides}, steps
        )
        self.diff.problems += pooled_problems(self.diff) if self.gates == "P" else []
        self.diff.missing[:0] = beyond_dtype(self.diff, self.subject.dtype)
        self.diff.seconds = time.perf_counter() - started
        return self.diff

    def run_owned(
        self, owned: Iterable[tuple[StepInput, list[int]]], progress: Progress = silent
    ) -> Diff:
        """`run`, of steps with the prompts that their requests are of."""
        steps, self._owners = zip(*owned, strict=True)
        return self.run(steps, progress)

    def places(self) -> list[tuple[int, int]]:
        """(prompt, position) of each row of the step, in `run_owned`."""
        return list(owned_rows(self.step, self._owners[self.number]))

    def _step(self, number: int, step: StepInput) -> None:
        self.number, self.step, self.real = number, step, real_tokens(step)
        for reference in (self.exact, self.faithful, self.local, self.local_faithful):
            reference.begin(step)
        for judged in self.sides:
            judged.ran = ran = judged.side.execute(step)
            if ran.page_tables is not None:
                groups = self.subject.layout.groups
                check_page_tables(self.diff, judged.name, step, ran.page_tables, groups)
        self.family = Family(self.steps * max(self._comparisons(), 1))
        self._numbers, self._made = float(self.real * self.model.hidden_size), {}
        walk = Stepwise(self.sources, self._embed, self._layer, self._end)
        _, self._kv = walk.run(self._kv)

    def _comparisons(self) -> int:
        """Limits in a step, of all sides."""
        kind = self.step.descriptor.kind
        if kind not in self._tensors:
            calls = self._traced() if self.taps else {}
            self._tensors[kind] = sum(
                self._taps_of(judged.side, calls) + 2 + 2 * len(self.layers)
                for judged in self.sides
            )
        return LIMITS * self._tensors[kind]

    def _taps_of(self, side: Side, calls: Mapping[Program, Sequence[Call]]) -> int:
        """Taps in a step."""
        kind = self.step.descriptor.kind
        return sum(
            declared.kept
            for program, found in calls.items()
            for declared in declare(found, plan_of(side.plans, side.spec, kind, program), self.taps)
        )

    def _traced(self) -> dict[Program, list[Call]]:
        """The calls of each program in the step under way, from a dry run of the reference."""
        reference = self.local_faithful
        kinds = {index: reference.spec.layers[index] for index in sorted(self.layers)}
        first = {kind: index for index, kind in reversed(kinds.items())}

        def given(index: int, hidden: np.ndarray) -> State:
            return hidden, hidden, self._kv[self.sources[index]][False]

        calls = dict(
            reference.traced(self.weights.top(), self.weights.layer, sorted(first.values()), given)
        )
        return calls | {index: calls[first[kind]] for index, kind in kinds.items()}

    def _embed(self) -> Streams:
        top = self.weights.top()
        hidden = {True: self.exact.embed(top), False: self.faithful.embed(top)}
        self.local.embed(top)  # for layers that have inputs of their own
        self.local_faithful.embed(top)
        streams = {exact: (x, np.zeros_like(x)) for exact, x in hidden.items()}
        for judged in self.sides:
            self._ops(judged, "embed", self.local_faithful.calls)
            got = total(judged.ran.streams[0])
            right, noisy = (total(streams[exact]) for exact in (True, False))
            self._find(judged.name, "inherited", -1, "embedding", got, right, noisy)
        return streams

    def _layer(self, index: int, streams: Streams, caches: Caches) -> tuple[Streams, Caches]:
        weights = self.weights.layer(index)
        after, written = {}, {}
        for exact, reference in ((True, self.exact), (False, self.faithful)):
            *stream, cache = reference.layer(index, weights, (*streams[exact], caches[exact]))
            after[exact], written[exact] = (stream[0], stream[1]), cache
        for judged in self.sides if index in self.layers else ():
            ran = judged.ran
            inputs, rows = ran.given(index, self.sources[index]), ran.finished(index)
            output = total(ran.streams[index + 1])
            if not self._is_lost(inputs, streams):
                self._local(judged, index, weights, inputs, output, rows)
            right, noisy = (total(after[exact]) for exact in (True, False))
            amplified = self._amplified_run(judged.name, index)
            self._find(
                judged.name, "inherited", index, "output", output, right, noisy, amplified, rows
            )
        return after, written

    def _local(
        self, judged: Judged, index: int, weights: Mapping[str, np.ndarray], inputs: State,
        output: np.ndarray, rows: np.ndarray,
    ) -> None:  # fmt: skip
        """Judge a layer and its ops on what the layer was given."""
        if self._held is not None:
            self._held.held = judged.ran.after[self.sources[index]]
        expected = total(self.local.layer(index, weights, inputs))
        held: list[RoundingChoice] = []
        if self._doubt and self._patience > 0 and self._is_off(output[rows], expected[rows]):
            entries = self._settle_entries(judged, index, weights, inputs, output, rows)
            held = [HeldInputs(entries)]
            expected = total(self._alone(index, weights, inputs, held))
        noisy = total(self.local_faithful.layer(index, weights, inputs))
        self._ops(judged, index, self.local_faithful.calls, inputs)
        amplified = partial(self._amplified, index, weights, inputs, expected, rows, held)
        self._find(judged.name, "layer", index, "output", output, expected, noisy, amplified, rows)

    def _is_off(self, output: np.ndarray, expected: np.ndarray) -> bool:
        """Whether any row is further off than sums in another order explain."""
        return bool((off_by(output, expected) > self._layer_limit).any())

    @property
    def _layer_limit(self) -> float:
        """How far a row of a layer may be off by sums in another order."""
        return semantics("layer", self.reduction).rel_l2 or 0.0

    def _writing(self) -> list[RoundingChoice]:
        """How local references write a cache."""
        return [] if self._held is None else [self._held]

    def _alone(
        self, index: int, weights: Mapping[str, np.ndarray], inputs: State,
        choices: Sequence[RoundingChoice], tracer: Tracer | None = None,
    ) -> State:  # fmt: skip
        """What a layer gives by the exact reference with these choices."""
        choices = [*self._writing(), *choices]
        reference = self._reference(exact=True, tracer=tracer, choices=choices)
        reference.begin(self.step)
        reference.embed(self.weights.top())  # for layers that have inputs of their own
        return reference.layer(index, weights, inputs)

    def _settle_entries(
        self, judged: Judged, index: int, weights: Mapping[str, np.ndarray], inputs: State,
        output: np.ndarray, rows: np.ndarray,
    ) -> list[np.ndarray]:  # fmt: skip
        """The entries that go into a layer's products, with those that the side took at ties. What
        is seen of a token is what the layer wrote to the cache, then its output.
        """
        place = self.subject.layout.places[index].group
        tokens = len(output)
        slots = np.asarray(self.step.field("slots"))[place * tokens : place * tokens + self.real]

        def written(cache: np.ndarray) -> np.ndarray:
            return cache.reshape(-1, *cache.shape[2:])[slots]

        def run(tried: TriedInputs) -> list[np.ndarray]:
            *stream, cache = self._alone(index, weights, inputs, [tried])
            return [written(cache), total(stream)[: self.real]]

        known = np.full_like(output, np.nan)
        known[rows] = output[rows]
        seen = [written(judged.ran.after[self.sources[index]]), known[: self.real]]
        requests = rows_of_requests(self.step)
        given = run, self._doubt, seen, requests, self._layer_limit, self._patience
        entries, wasted = settle(*given)
        self._patience -= wasted
        return entries

    def _is_lost(self, inputs: State, streams: Streams) -> bool:
        """Whether a layer was given numbers that are not finite, and should not have been: nothing
        can be said of what it makes of them.
        """
        given = total(inputs)[: self.real]
        right = total(streams[False])[: self.real]
        return bool((np.isfinite(right) & ~np.isfinite(given)).any())

    def _amplified(
        self, index: int, weights: Mapping[str, np.ndarray], inputs: State, expected: np.ndarray,
        rows: np.ndarray, held: Sequence[RoundingChoice], tries: int,
    ) -> Amplified:  # fmt: skip
        """What a layer makes of errors of its ops' inputs. `held` went into its products."""

        def run(rng: np.random.Generator) -> list[np.ndarray]:
            jitter = Jitter(rng, self._half_ulp)
            return [total(self._alone(index, weights, inputs, held, jitter))[rows]]

        return amplification(run, [expected[rows]], tries)[0]

    def _carried(self, layer: int, tries: int) -> Amplified:
        """What the run so far makes of errors of its ops' inputs, behind a layer; -1: logits."""
        key = self.number, tries
        if self._run_amplified[0] != key:
            given = self.weights, self._start, self._steps[: self.number + 1]

            def run(tracer: Tracer | None) -> list[np.ndarray]:
                reference = self._reference(exact=True, tracer=tracer)
                last = deque(reference.run_steps(*given), maxlen=1).pop()
                return [x[: self.real] for x in last]

            found = amplification(lambda rng: run(Jitter(rng, self._half_ulp)), run(None), tries)
            self._run_amplified = key, found
        return self._run_amplified[1][layer]

    def _amplified_run(self, side: str, layer: int) -> Callable[[int], Amplified] | None:
        """`_carried` of a layer. None if an op or a layer of the side failed, which explains what
        is carried on.
        """
        is_explained = any(
            f.side == side and not f.passed and f.scope in ("op", "layer")
            for f in self.diff.findings
        )
        return None if is_explained else partial(self._carried, layer)

    def _end(self, streams: Streams) -> None:
        top = self.weights.top()
        logits = {}
        for exact, reference in ((True, self.exact), (False, self.faithful)):
            logits[exact] = reference.head(top, reference.finish(top, *streams[exact]))
        for judged in self.sides:
            self._ending(judged)
            if judged.ran.logits is not None:
                self._find(
                    judged.name, "logits", -1, "final logits", judged.ran.logits, logits[True],
                    logits[False], self._amplified_run(judged.name, -1),
                )  # fmt: skip
            if judged.ran.tokens is not None and not self._has_failed(judged.name):
                ends = logits[True], logits[False]
                self._tokens(judged.name, judged.ran.tokens, *ends, judged.ran.given_end())
        self._logits(logits[True], logits[False])

    def _ending(self, judged: Judged) -> None:
        """Judge the ops behind the layers on what they were given."""
        top, given = self.weights.top(), judged.ran.given_end()
        if not total(given).any():
            what = f"the ops behind the layers in step {self.number}: no stream is finite"
            self.diff.missing.append(f"{judged.name}: {what}")
            return
        rows = self.local_faithful.finish(top, *given)
        self._ops(judged, "finish", self.local_faithful.calls)
        self.local_faithful.head(top, rows)
        self._ops(judged, "head", self.local_faithful.calls)

    def _has_failed(self, side: str) -> bool:
        return any(f.side == side and not f.passed for f in self.diff.findings)

    def ends_of(self, hidden: np.ndarray, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits [tok vocab] that the exact reference and the faithful one make of a stream."""
        top = self.weights.top()
        given = hidden, residual
        exact, faithful = (
            reference.head(top, reference.finish(top, *given))
            for reference in (self.local, self.local_faithful)
        )
        return exact, faithful

    def _tokens(
        self, side: str, tokens: np.ndarray, exact: np.ndarray, faithful: np.ndarray,
        stream: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """Judge the tokens [request] that a side sampled: what it did behind the layers is in
        nothing else. One that is not that of the logits may be that of the side's own `stream`,
        hidden and residual [tok dim], which is judged by itself.
        """
        step = self.step
        if step.sampler in PROCESSING:
            self.diff.notes.append(
                f"step {step.step_id}: tokens with penalties, bias or masks are not judged"
            )
            return
        for request, row in sampled_rows(step):
            token = int(tokens[request])
            if token < 0 and not np.isfinite(faithful[row]).all():
                continue  # what the run dtype cannot hold, which is said of the logits
            place = f"step {step.step_id}, {where(step, row)}"
            if token < 0:
                self.diff.problems.append(f"{side}: {place}: a logit was not finite")
                continue
            choose = chooser_of(step, request)
            greedy = bool(sampling_field(step, "greedy")[request])
            judge = partial(judge_row, place, token=token, choose=choose, by_logits=greedy)
            flip = judge(exact[row], faithful[row], {}).flip
            if stream is not None and flip is not None and not flip.tie:
                own, noisy = self.ends_of(stream[0][[row]], stream[1][[row]])
                flip = judge(own[0], noisy[0], {}).flip
            if flip is not None and not flip.tie:
                self.diff.problems.append(
                    f"{side}: {place}: token {flip.a} was served, {flip.b} is that of the "
                    f"logits, by a margin of {flip.margin:.3g} nats and noise of {flip.noise:.3g}"
                )

    def _known(self, exact: np.ndarray, faithful: np.ndarray) -> np.ndarray:
        """The real rows of the references' logits that ends can be compared with. What they do not
        know is named.
        """
        real = self.real
        known = known_rows(exact[:real], faithful[:real])
        lost = np.setdiff1d(np.arange(real), known)
        if len(lost):
            self.diff.missing.append(
                f"final logits of step {self.number}: the references' are not finite in "
                f"{len(lost)} of {real} rows, the first is {where(self.step, int(lost[0]))}"
            )
        return known

    def _logits(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        real = self.real
        if len(self.sides) < 2 or not len(self._known(exact, faithful)):
            return
        for other in self.sides[1:]:
            a, b = self.sides[0].ran.logits, other.ran.logits
            if a is None or b is None:
                continue  # of what an engine served, tokens and log-probabilities are judged
            found = compare_logits(
                a, b, exact[:real], faithful[:real], self.step, self.gates,
                family=self.family, numbers=self._numbers,
            )  # fmt: skip
            self.diff.logits.append(replace(found, mode=self.mode))

    # --- findings
    # ----------------------------------------------------------------------------------------------

    def _ops(
        self, judged: Judged, program: Program, calls: Sequence[Call], inputs: State | None = None
    ) -> None:
        """Judge each op of a program on what it is given in `calls`, those of the reference.
        `inputs` are those of a layer.
        """
        kind = self.step.descriptor.kind
        own = self._as_held(judged, program, inputs) or calls
        for tap, kept, outputs in judged.side.taps(kind, program, own, self.taps):
            self.diff.findings += self._op(judged, program, calls, own, tap, kept, outputs)

    def _op(
        self, judged: Judged, program: Program, calls: Sequence[Call], own: Sequence[Call],
        tap: Declared, kept: Mapping[str, np.ndarray], outputs: Sequence[np.ndarray],
    ) -> list[Finding]:  # fmt: skip
        """Judge one op, which was given what it is in `own` and is called as in `calls`."""
        side, layer = judged.side, program if isinstance(program, int) else -1
        judge = OpJudge(self.gates, calls, self.real, self.reduction, self.family)
        plan = plan_of(side.plans, side.spec, self.step.descriptor.kind, program)
        provider = plan[tap.op].provider
        return [
            Finding(
                judged.name, self.mode, "op", self.number, layer, found.name, provider,
                found.metrics, found.complaints, found.bound,
                place(self.step, found.metrics.worst, output.ndim, self.subject, layer),
                found.shares,
            )
            for found, output in zip(judge(tap, kept, outputs), outputs, strict=True)
        ]  # fmt: skip

    def _as_held(self, judged: Judged, program: Program, inputs: State | None) -> list[Call] | None:
        """The calls of a program on the weights and tables that a side holds; None where these are
        right.
        """
        layer = program if isinstance(program, int) else -1
        wrong = judged.weights.get(layer)
        if wrong is None and (judged.tables is None or inputs is None):
            return None
        held = dict(wrong or {})
        top = self.weights.top() | ({} if layer >= 0 else held)
        reference = self._reference(exact=False, tables=judged.tables)
        reference.begin(self.step)
        programs = reference.traced(
            top, lambda index: {**self.weights.layer(index), **held},
            () if inputs is None else (layer,),
            lambda *_: inputs,  # type: ignore[arg-type]  # asked of a layer
            judged.ran.given_end(),
        )  # fmt: skip
        return next(calls for name, calls in programs if name == program)

    def _find(
        self, side: str, scope: Any, layer: int, tap: str, got: Any, right: Any, noisy: Any,
        amplified: Callable[[int], Amplified] | None = None, rows: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Judge the `rows` of a tensor [tok ...], all real ones by default. `amplified` says what
        is made of errors of ops' inputs, by the number of tries.
        """
        rows = np.arange(self.real) if rows is None else rows
        metrics = measure(got[rows], right[rows], noisy[rows])
        gate = self.gate(scope, layer, metrics)
        few = scope != "layer" or metrics.effective < FEW
        tried = self.gates == "S" or few
        if tried and amplified is not None and worth_trying(gate, metrics):
            for tries in TRIES:
                gate = self.gate(scope, layer, metrics, amplified(tries))
                if list(gate.complaints(metrics)):
                    break
        worst = (int(rows[metrics.worst[0]]), *metrics.worst[1:]) if metrics.worst else ()
        self._add(side, scope, layer, tap, metrics, gate, worst, got.ndim)

    def _add(
        self, side: str, scope: Scope, layer: int, tap: str, metrics: Metrics, gate: Gate,
        worst: tuple[int, ...], ndim: int,
    ) -> None:  # fmt: skip
        """Add what a gate says of a tensor of `ndim` dimensions, off most at `worst`."""
        where_ = place(self.step, worst, ndim, self.subject, layer)
        complaints, shares = tuple(gate.complaints(metrics)), gate.shares(metrics)
        self.diff.findings.append(
            Finding(
                side, self.mode, scope, self.number, layer, tap, "", metrics, complaints, None,
                where_, shares,
            )
        )  # fmt: skip

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
    progress: Progress = silent,
) -> Diff:
    """Compare `targets` on `subject` in the given modes. `faults` plants faults by side (`a`,
    `b`, ...): for tests.
    """

    named = name_sides(targets)
    merged = Diff(tuple(named))
    for mode in modes:
        where_ = subject.for_mode(mode)
        progress(f"mode {mode}: loading")

        def tell(text: str, mode: str = mode) -> None:
            progress(f"mode {mode}: {text}")

        with open_sides(where_, named, steps, faults) as sides:
            if mode == "X":
                diff = ExactComparison(where_).run(sides, steps, layers, tell)
            else:
                diff = Comparison(where_, sides, mode, layers=layers, taps=taps).run(steps, tell)
        merged.extend(diff)
        merged.environment |= {
            k: v for k, v in diff.environment.items() if mode == "P" or k not in merged.environment
        }
    merged.environment["power"] = power(merged)
    return merged
