"""Finds the smallest part of a backend that makes it fail: which layer, which op in it, and why.

The suspect's programs and ops are exchanged for those of the faithful reference, half of what is
left at a time, until the verdict hangs on one of them (or on a few that fail together only). The
verdict is that of `twinfer numerics model`, by what it needs: each layer on the exact reference's
inputs; if all pass so, each op in them; if these pass too, the logits of the whole run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ...ops import REGISTRY
from ...ops.testing import providers
from ...shared.models import decoder
from ...shared.models.spec import Layer
from ...shared.step import StepInput
from ..errors import EQUAL, FAILED, NOT_COMPARED, NotComparable
from ..judging.gates import Mode
from ..judging.metrics import measure
from ..judging.outputs import OpJudge, gate_for
from ..judging.record import dumps
from ..showing.terminal import LINES
from ..sides.environment import describe_side
from ..sides.passes import run_stepwise
from ..sides.reference import Reference, State, evaluate, step_batch, storage_dtype, total
from ..sides.runners import Fault, Program, Runner, create_runner, plan_of
from ..sides.steps import pages_of, real_tokens
from ..sides.subject import HostWeights, Subject, Target, check_recordable
from ..sides.taps import Call, Declared
from ..sides.tracing import declare_programs, traced
from .ops_check import INTERPRETED

Progress = Callable[[str], None]
Verdict = Literal["layers", "ops", "logits"]
"""What is looked at, from the cheapest and most local to what only the whole run shows."""
VERDICTS: tuple[Verdict, ...] = ("layers", "ops", "logits")
EMBED, FINISH, HEAD = -1, -2, -3
"""Places outside of layers; layers are numbers from 0."""
_Stream = tuple[np.ndarray, np.ndarray]
"""hidden and residual."""
_Streams = tuple[_Stream, _Stream]
"""Those of the exact reference, and of the faithful one."""
NAMES = {EMBED: "embed", FINISH: "finish", HEAD: "head"}


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
class BisectReport:
    """What was found. `runs` are those that gave a verdict, `bound` how many a search in halves
    may take.
    """

    target: str
    culprits: list[Culprit] = field(default_factory=list)
    mode: str = ""
    verdict: str = ""
    runs: int = 0
    bound: int = 0
    units: int = 0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    compared: bool = False
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 nothing fails, 1 something does, 3 nothing was compared."""
        if self.culprits or self.problems:
            return FAILED
        return EQUAL if self.compared else NOT_COMPARED

    def dumps(self) -> str:
        """JSON text."""
        record = {
            name: getattr(self, name)
            for name in BisectReport.__dataclass_fields__
            if name not in ("target", "verdict", "culprits")
        }
        culprits = [
            {name: getattr(c, name) for name in Culprit.__dataclass_fields__} | {"name": c.name}
            for c in self.culprits
        ]
        head = {"exit_code": self.exit_code, "sides": [self.target], "looked_at": self.verdict}
        return dumps("bisect", {**head, "culprits": culprits, **record})


def smallest(units: Sequence[Any], fails: Callable[[list[Any]], bool]) -> list[Any]:
    """A smallest part of `units` that fails: without any one of it, it passes. All of them together
    must fail.

    Takes log2(n) + 1 runs for each unit that it finds; more units than needed may fail with them,
    never fewer.
    """
    found: list[Any] = []
    end = len(units)
    while end and not (found and fails(found)):
        low, high = 0, end
        # found + units[:low] passes, found + units[:high] fails.
        while high - low > 1:
            middle = (low + high) // 2
            if fails(found + list(units[:middle])):
                high = middle
            else:
                low = middle
        found.append(units[high - 1])
        end = high - 1
    return found


@dataclass(slots=True)
class _Expected:
    """What is right at one place of one step: what goes in, what comes out, and how far rounding
    may be off.
    """

    inputs: Any
    exact: np.ndarray
    faithful: np.ndarray
    calls: list[Call]


class Oracle:
    """The references' run over the steps, kept, so that every verdict after it runs the suspect
    only.
    """

    def __init__(
        self, subject: Subject, steps: Sequence[StepInput], mode: Mode,
        start: np.ndarray | None = None
    ) -> None:  # fmt: skip
        """`start` [layer page slot 2*kvhead hdim] is the cache before the first step. Raises
        NotComparable.
        """
        if not steps:
            raise NotComparable("there are no steps to compare")
        check_recordable(subject, "a search")
        self.subject, self.steps, self.mode, self.model = subject, list(steps), mode, subject.model
        self.weights = HostWeights(subject)
        self.dtype = storage_dtype(subject.dtype)
        self.tables = decoder.rotary_tables(subject.model, subject.max_model_len)
        self.reduction = max(self.model.hidden_size, self.model.intermediate_size)
        self.places = [EMBED, *range(self.model.num_layers), FINISH, HEAD]
        self.pages, c = pages_of(steps), self.model
        empty = np.full(
            (self.pages, subject.page_size, 2 * c.num_kv_heads, c.head_dim), np.nan, self.dtype
        )
        self.start = [empty.copy() for _ in range(c.num_layers)]
        for cache, content in zip(self.start, () if start is None else start, strict=False):
            cache[: len(content)] = content.astype(self.dtype)
        self.faithful = Reference(self.model, self.tables, exact=False)
        self.expected: list[dict[int, _Expected]] = []
        self.logits: list[tuple[np.ndarray, np.ndarray]] = []
        self.calls: list[dict[Program, list[Call]]] = []
        self._run()

    def _run(self) -> None:
        exact, local = (Reference(self.model, self.tables, exact=True) for _ in range(2))
        kv = [cache.astype(np.float64) for cache in self.start]
        faithful_kv = list(self.start)
        for step in self.steps:
            for reference in (exact, local, self.faithful):
                reference.begin(step)
            self.calls.append(traced(local, self.weights, self.start))
            kv, faithful_kv = self._step(exact, local, kv, faithful_kv)

    def _step(
        self,
        exact: Reference,
        local: Reference,
        exact_kv: list[np.ndarray],
        faithful_kv: list[np.ndarray],
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Run the step that the references have begun; returns their caches behind it."""
        top, faithful = self.weights.top(), self.faithful
        expected: dict[int, _Expected] = {}

        def start() -> _Streams:
            hidden, faithful_hidden = exact.embed(top), faithful.embed(top)
            expected[EMBED] = _Expected(None, hidden, faithful_hidden, exact.calls)
            return (hidden, np.zeros_like(hidden)), (
                faithful_hidden,
                np.zeros_like(faithful_hidden),
            )

        def layer(index: int, streams: _Streams, caches: Any) -> tuple[_Streams, Any]:
            (hidden, residual), (faithful_hidden, faithful_residual) = streams
            kv, faithful_kv = caches
            weights = self.weights.layer(index)
            inputs: State = (
                hidden.astype(self.dtype), residual.astype(self.dtype), kv.astype(self.dtype)
            )  # fmt: skip
            hidden, residual, kv = exact.layer(index, weights, (hidden, residual, kv))
            out = total(local.layer(index, weights, inputs))
            noisy = total(faithful.layer(index, weights, inputs))
            expected[index] = _Expected(inputs, out, noisy, local.calls)
            faithful_hidden, faithful_residual, faithful_kv = faithful.layer(
                index, weights, (faithful_hidden, faithful_residual, faithful_kv)
            )
            return ((hidden, residual), (faithful_hidden, faithful_residual)), (kv, faithful_kv)

        def end(streams: _Streams) -> None:
            (hidden, residual), faithful_stream = streams
            inputs = hidden.astype(self.dtype), residual.astype(self.dtype)
            rows = local.finish(top, *inputs)
            expected[FINISH] = _Expected(inputs, rows, faithful.finish(top, *inputs), local.calls)
            rows = rows.astype(self.dtype)
            expected[HEAD] = _Expected(
                rows, local.head(top, rows), faithful.head(top, rows), local.calls
            )
            self.expected.append(expected)
            exact_logits = exact.head(top, exact.finish(top, hidden, residual))
            self.logits.append(
                (exact_logits, faithful.head(top, faithful.finish(top, *faithful_stream)))
            )

        _, caches = run_stepwise(start, layer, end, list(zip(exact_kv, faithful_kv, strict=True)))
        return [kv for kv, _ in caches], [kv for _, kv in caches]


class Suspect:
    """A backend whose parts can be exchanged for the reference's. `runs` counts verdicts."""

    def __init__(self, oracle: Oracle, runner: Runner) -> None:
        self.oracle, self.runner, self.runs = oracle, runner, 0
        runner.allocate(oracle.pages)
        self._declared: list[dict[Program, tuple[Declared, ...]]] = [
            declare_programs(calls, runner.plans, step.descriptor.kind, ("*",))
            for calls, step in zip(oracle.calls, oracle.steps, strict=True)
        ]

    # --- parts
    # ----------------------------------------------------------------------------------------------

    def _layer(self, place: int) -> Layer:
        return self.runner.spec.layers[place]

    def sites(self, place: int, inside: str = "") -> list[str]:
        """Keys of the op calls of a layer, or of those directly inside of one."""
        prefix = f"{inside}/" if inside else ""
        keys = [tap.key for tap in self._declared[0][self._layer(place)]]
        return [
            k for k in keys if k.startswith(prefix) and "/" not in k[len(prefix) :] and k != inside
        ]

    def op_of(self, place: int, key: str) -> str:
        """The op of a call in a layer."""
        return next(tap.op for tap in self._declared[0][self._layer(place)] if tap.key == key)

    def provider(self, op: str, place: int) -> str:
        """Which implementation of an op runs at a place."""
        program = NAMES[place] if place < 0 else self._layer(place)
        plans = [
            plan_of(self.runner.plans, step.descriptor.kind, program) for step in self.oracle.steps
        ]
        return "+".join(dict.fromkeys(plan[op].provider for plan in plans))

    # --- verdicts
    # ----------------------------------------------------------------------------------------------

    def fails(
        self, verdict: Verdict, places: Collection[int], trusted: Collection[str] | None = None
    ) -> bool:
        """Whether the run fails if the suspect computes `places` only.

        With `trusted`, layers run as their ops one by one, and the reference computes the calls of
        these keys.
        """
        self.runs += 1
        if verdict == "logits":
            return self._whole(places, trusted)
        for number in range(len(self.oracle.steps)):
            self._begin(number)
            if any(
                self._local(verdict, number, place, trusted)
                for place in self.oracle.places
                if place in places
            ):
                return True
        return False

    def _begin(self, number: int) -> None:
        step = self.oracle.steps[number]
        self.runner.prepare(step, self._declared[number])
        self.runner.begin(step)

    def _replaced(self, place: int, trusted: Collection[str]) -> dict[str, Callable[..., Any]]:
        return {key: self._reference_of(self.op_of(place, key)) for key in trusted}

    def _reference_of(self, op: str) -> Callable[..., Any]:
        """An op as the faithful reference computes it, on arrays of the device."""
        runner, names = self.runner, tuple(REGISTRY[op].signature.parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            arguments = {
                n: runner.download(x) if hasattr(x, "dtype") and x.ndim else x
                for n, x in arguments.items()
            }
            out = tuple(runner.upload(x) for x in evaluate(op, arguments, exact=False))
            return out if len(out) > 1 else out[0]

        return call

    def _compute(self, place: int, inputs: Any, trusted: Collection[str] | None) -> tuple[Any, Any]:
        """What the suspect computes at a place, on the host, and the taps."""
        runner = self.runner
        if place == EMBED:
            out, taps = runner.embed()
            return runner.download(out), taps
        if place == HEAD:
            out, taps = runner.head(runner.upload(inputs))
            return runner.download(out), taps
        on_device = [runner.upload(x) for x in inputs]
        if place == FINISH:
            out, taps = runner.finish(*on_device)
            return runner.download(out), taps
        if trusted is None:
            out, taps = runner.layer(place, *on_device)
        else:
            hidden, residual, kv = on_device
            out, taps = runner.by_op(place, hidden, residual, kv, self._replaced(place, trusted))
        return tuple(runner.download(x) for x in out), taps

    def _local(
        self, verdict: Verdict, number: int, place: int, trusted: Collection[str] | None
    ) -> bool:
        oracle, expected = self.oracle, self.oracle.expected[number][place]
        num_tokens = real_tokens(oracle.steps[number])
        out, taps = self._compute(place, expected.inputs, trusted)
        output = total(out) if place >= 0 else out
        if verdict == "layers":
            m = measure(
                output[:num_tokens], expected.exact[:num_tokens], expected.faithful[:num_tokens]
            )
            return any(gate_for(oracle.mode, "layer", m, oracle.reduction).complaints(m))
        judge = OpJudge(oracle.mode, expected.calls, num_tokens, oracle.reduction)
        declared = self._declared[number][NAMES[place] if place < 0 else self._layer(place)]
        pairs = zip(declared, taps, strict=True)
        return any(
            found.complaints
            for tap, values in pairs
            if values is not None
            for found in judge(tap, *values)
        )

    def _whole(self, places: Collection[int], trusted: Collection[str] | None) -> bool:
        """The verdict on the logits of the whole run."""
        oracle, model, top = self.oracle, self.oracle.model, self.oracle.weights.top()
        kv = list(oracle.start)
        for number, step in enumerate(oracle.steps):
            self._begin(number)
            oracle.faithful.begin(step)
            rows, kv = self._rows(kv, places, trusted)
            logits = (
                self._compute(HEAD, rows, None)[0]
                if HEAD in places
                else oracle.faithful.head(top, rows)
            )
            num_tokens = real_tokens(step)
            m = measure(logits[:num_tokens], *(x[:num_tokens] for x in oracle.logits[number]))
            if any(
                gate_for(oracle.mode, "logits", m, oracle.reduction, model.num_layers).complaints(m)
            ):
                return True
        return False

    def _rows(
        self, caches: list[np.ndarray], places: Collection[int], trusted: Collection[str] | None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Finished hidden states of the step under way, computed by the suspect at `places` and
        else faithfully.
        """
        faithful, weights = self.oracle.faithful, self.oracle.weights
        top = weights.top()

        def start() -> _Stream:
            hidden = self._compute(EMBED, None, None)[0] if EMBED in places else faithful.embed(top)
            return hidden, np.zeros_like(hidden)

        def layer(index: int, stream: _Stream, cache: np.ndarray) -> tuple[_Stream, np.ndarray]:
            state = (*stream, cache)
            if index in places:
                hidden, residual, cache = self._compute(index, state, trusted)[0]
            else:
                hidden, residual, cache = faithful.layer(index, weights.layer(index), state)
            return (hidden, residual), cache

        def end(stream: _Stream) -> np.ndarray:
            rows: np.ndarray = (
                self._compute(FINISH, stream, None)[0]
                if FINISH in places
                else faithful.finish(top, *stream)
            )
            return rows

        return run_stepwise(start, layer, end, caches)

    # --- what is no op
    # ---------------------------------------------------------------------------------------------

    def wrong_weights(self) -> list[str]:
        """Weights that are not those of the checkpoint."""
        names = []
        for layer in range(-1, self.oracle.model.num_layers):
            expected = self.oracle.weights.top() if layer < 0 else self.oracle.weights.layer(layer)
            actual = self.runner.weights(layer)
            for name, value in expected.items():
                if name not in actual or not _equal(actual[name], value):
                    names.append(f"layer.{layer}.{name}" if layer >= 0 else name)
        return names

    def wrong_fields(self, layer: int) -> list[str]:
        """What a layer reads of a step (rotary tables, page table, ...) and is not what the step
        says.
        """
        wrong: list[str] = []
        for number, step in enumerate(self.oracle.steps):
            self._begin(number)
            expected = step_batch(step, self.oracle.tables).arrays()
            actual = self.runner.inputs(layer)
            wrong += [name for name in expected if not _equal(actual[name], expected[name])]
        return list(dict.fromkeys(wrong))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return (
        a.shape == b.shape
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )


# --- the search
# --------------------------------------------------------------------------------------------------


def bisect_model(
    subject: Subject, target: Target, steps: Sequence[StepInput], *,
    modes: Sequence[Mode] = ("S", "P"),
    start: np.ndarray | None = None, fault: Fault | None = None, planted: str = "",
    progress: Progress = lambda text: None,
) -> BisectReport:  # fmt: skip
    """Find what makes `target` fail on `subject`: in float32 first, where semantics show, then in
    the run dtype.

    `start` is the cache before the first step, as in a bundle; `planted` is the text that `fault`
    is planted with, for the commands that are printed.
    """
    report, started = BisectReport(str(target)), time.perf_counter()
    for mode in modes:
        where = subject if mode != "S" else subject.with_dtype("float32")
        progress(f"mode {mode}: references")
        oracle = Oracle(where, steps, mode, start)
        progress(f"mode {mode}: {target}")
        runner = create_runner(where, target, fault)
        try:
            suspect = Suspect(oracle, runner)
            _Search(report, suspect, progress).run()
            _try_others(report, suspect, subject, target, fault)
            report.environment = {"model": subject.name, "dtype": where.dtype} | describe_side(
                runner.target, runner.device, runner.plans
            )
        finally:
            runner.close()
        report.compared = True
        if report.culprits or report.problems:
            break
    if report.culprits:
        report.notes.append(_kind(report, modes))
        report.commands = list(_commands(report, subject, target, planted))
    report.seconds = time.perf_counter() - started
    return report


class _Search:
    """One search in one mode."""

    def __init__(self, report: BisectReport, suspect: Suspect, progress: Progress) -> None:
        self._report, self._suspect, self._progress = report, suspect, progress
        self._mode = suspect.oracle.mode

    def run(self) -> None:
        """Fill the report."""
        report, suspect = self._report, self._suspect
        places = suspect.oracle.places
        if wrong := suspect.wrong_weights():
            report.mode = self._mode
            report.problems.append(f"weights differ from the checkpoint's: {', '.join(wrong)}")
            self._add(
                _layer_of(wrong[0]),
                "",
                "",
                "the weights, as the device holds them, are not the checkpoint's",
            )
            return
        verdict = next((v for v in VERDICTS if self._fails(v, places)), None)
        report.runs += suspect.runs
        suspect.runs = 0
        if verdict is None:
            return
        report.mode, report.verdict = self._mode, verdict
        failing = smallest(places, lambda part: self._fails(verdict, part))
        report.units += len(places)
        report.bound += VERDICTS.index(verdict) + 1 + _bound(len(places), len(failing))
        for place in failing:
            self._within(verdict, place, [p for p in failing if p != place])
        report.runs += suspect.runs
        suspect.runs = 0

    def _fails(
        self, verdict: Verdict, places: Collection[int], trusted: Collection[str] | None = None
    ) -> bool:
        result = self._suspect.fails(verdict, places, trusted)
        names = ", ".join(NAMES.get(p, str(p)) for p in list(places)[:6]) + (
            ", ..." if len(places) > 6 else ""
        )
        parts = "" if trusted is None else f", {len(trusted)} op calls by the reference"
        self._progress(
            f"mode {self._mode}, {verdict}: suspect computes {names}{parts}: "
            f"{'fails' if result else 'passes'}"
        )
        return result

    def _within(self, verdict: Verdict, place: int, others: list[int]) -> None:
        """Find the op at a place."""
        if place < 0:
            key = {EMBED: "embedding", FINISH: "fused_add_rms_norm", HEAD: "logits"}[place]
            self._add(place, key, key, "this op fails")
            return
        self._report.bound += 1
        if not self._fails(verdict, [place, *others], ()):
            what = "its ops pass one by one: it is how they are compiled together"
            self._add(place, "", "", what)
            return
        self._descend(verdict, place, others, "", [])

    def _descend(
        self, verdict: Verdict, place: int, others: list[int], inside: str, held: list[str]
    ) -> None:
        """Find the calls within a layer (or within one of its calls) that it hangs on; `held`
        are the reference's.
        """
        suspect, report = self._suspect, self._report
        sites = suspect.sites(place, inside)

        def fails(part: Collection[str]) -> bool:
            return self._fails(
                verdict, [place, *others], [*held, *(site for site in sites if site not in part)]
            )

        if fails(()):
            # Whatever computes the calls inside, it fails.
            report.bound += 1
            if inside:
                self._add(
                    place,
                    suspect.op_of(place, inside),
                    inside,
                    "this op fails, whoever computes what it calls",
                )
            elif wrong := suspect.wrong_fields(place):
                self._add(
                    place, "", "", f"what the layer reads of the step is wrong: {', '.join(wrong)}"
                )
            else:
                self._add(place, "", "", "the layer fails, whoever computes its ops")
            return
        keys = smallest(sites, fails)
        report.units += len(sites)
        report.bound += 1 + _bound(len(sites), len(keys))
        for key in keys:
            # Only one call is searched into at a time, so the others of a set stay as they are.
            if suspect.sites(place, key) and len(keys) == 1:
                self._descend(
                    verdict, place, others, key, [*held, *(site for site in sites if site != key)]
                )
            else:
                self._add(place, suspect.op_of(place, key), key, "this op fails")

    def _add(self, place: int, op: str, tap: str, what: str) -> None:
        provider = self._suspect.provider(op, place) if op else ""
        self._report.culprits.append(
            Culprit(max(place, -1), NAMES.get(place, "layer"), op, tap, provider, what)
        )


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layer" else EMBED


def _bound(units: int, found: int) -> int:
    """Runs that a search in halves takes at most for `found` of `units`."""
    return found * (math.ceil(math.log2(max(units, 2))) + 1)


# --- what follows from it
# --------------------------------------------------------------------------------------------


def _try_others(
    report: BisectReport, suspect: Suspect, subject: Subject, target: Target, fault: Fault | None
) -> None:  # fmt: skip
    """Whether another implementation of the op that was found passes in its place."""
    oracle, platform = suspect.oracle, suspect.runner.device.platform
    for culprit in report.culprits:
        if not culprit.op:
            continue
        place = next((p for p, name in NAMES.items() if name == culprit.program), culprit.layer)
        available = providers(culprit.op, target.backend)  # type: ignore[arg-type]
        for name, implementation in available.items():
            usable = implementation is None or implementation.obstacle(platform) is None
            if (
                name in culprit.implementation.split("+")
                or name.endswith(INTERPRETED)
                or not usable
            ):
                continue
            other = replace(target, providers={**target.providers, culprit.op: (name,)})
            runner = create_runner(oracle.subject, other, fault)
            try:
                tried = Suspect(oracle, runner)
                if tried.provider(culprit.op, place) != name:
                    report.notes.append(f"{culprit.op}={name} does not take this model's calls")
                    continue
                fails = tried.fails(report.verdict or "layers", [place])  # type: ignore[arg-type]
            finally:
                runner.close()
            report.runs += 1
            report.bound += 1
            report.notes.append(
                f"{culprit.op}={name} {'fails too' if fails else 'passes'} in its place"
            )


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
    words = [
        "twinfer numerics model --model",
        subject.name,
        "--mode",
        report.mode,
        "--a",
        other,
        "--b",
        str(target),
    ]
    if subject.dtype != subject.model.dtype:
        words += ["--dtype", subject.dtype]
    if subject.load_format != "auto":
        words += ["--load-format", subject.load_format]
    if subject.seed:
        words += ["--seed", str(subject.seed)]
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
        f"verdict by {report.verdict or 'weights'}, {report.runs} runs (in halves {report.bound} "
        "at most)",
    ]
    for c in report.culprits[:8]:
        implementation = f" [{c.op}={c.implementation}]" if c.op else ""
        lines.append(f"{c.name}{implementation}: {c.what}")
    lines += [*report.problems, *report.notes[:6], *(f"$ {command}" for command in report.commands)]
    return "\n".join(lines[:LINES])
