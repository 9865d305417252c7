"""What engines served: tokens and log-probabilities of whole runs, against the reference.

Every other question gives all sides the same tokens. Here each engine runs as for a user: chunks
and ragged batches, single decodes and decode loops, requests that are preempted, prompts found in
the prefix cache, greedy and drawn tokens. Then the references compute the sequences that came out,
and say of each position what its log-probabilities are and which token they give.

What both backends share, such as the model's definition, no comparison of them can show:
`definition.py` looks at that.
"""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from ...shared.engine import Engine, TokenLogprobs
from ...shared.models.caches import cache_of
from ...shared.models.families import model_of
from ...shared.request import FinishReason
from ..errors import USERS, in_words
from ..judging.amplification import HOPELESS, TRIES
from ..judging.choice import Choice
from ..judging.diff import Diff
from ..judging.gates import MODES, Mode, walk
from ..judging.metrics import Flip
from ..judging.served import BEHIND, WITHOUT_STREAMS, Row, judge_row, judge_rows
from ..judging.streams import StreamErrors, judge_streams
from ..judging.weights import check_held
from ..progress import Progress, silent
from ..sides.reference import total
from ..sides.serving import Answer, Served, refusal, serve
from ..sides.steps import make_owned_steps
from ..sides.subject import HostWeights, Subject, Target, name_sides
from .definition import DEFINED, SharedDefinition
from .logits import TRANSFORMERS
from .model import Caches, Comparison, Streams
from .workload import workload

Definition = Literal["auto", "transformers", "off"]

RUNS: dict[str, dict[str, Any]] = {
    "steps": {"tight": True, "decode_steps": 1, "wide": True},
    "loops": {"tight": False, "decode_steps": 4},
    "plain": {"tight": True, "decode_steps": 1, "wide": True, "streams": False},
}
"""How an engine runs: with a cache for half of the requests, with decode loops, and once more as
the first by the programs that users get, which give no streams.
"""
ASKED = 16
"""Positions of a run whose log-probabilities are computed from the engine's own streams too. Where
more are off, it is no luck, and the head of a large vocabulary for each would take long.
"""
ENGINE_FAILED = "the engine failed with"
ENDED_BY_ERROR = "ended by error"
LISTED = "list of log-probabilities"
"""Words of what is missing or wrong, by which `check` sorts causes."""


def check_served(
    subject: Subject, targets: Sequence[Target], *, modes: Sequence[Mode] = MODES,
    prompts: Sequence[np.ndarray] | None = None, definition: Definition = "auto",
    progress: Progress = silent,
) -> Diff:  # fmt: skip
    """Serve the workload by an engine of each target, in each of RUNS, and judge what came out: in
    float32 (mode S), and in the run dtype (P) where that is another. Programs without streams run
    in the last of these alone.

    `definition` says whether transformers is asked about the reference; auto: if it is installed.
    Raises ConfigError, RequestError, ModelError, BackendUnavailable, NotComparable.
    """
    named = name_sides(targets)
    if definition == "auto" and find_spec(TRANSFORMERS) is None:
        said: str | None = f"not checked, {TRANSFORMERS} is not installed"
    else:
        said = "not checked" if definition == "off" else None
    asks = said is None
    whole = Diff(tuple(named))
    if subject.dtype == "float32" and "S" in modes:
        modes = [mode for mode in modes if mode != "P"]
    for mode in modes:
        where = subject.for_mode(mode)
        runs = RUNS if mode == modes[-1] else [run for run in RUNS if run != "plain"]
        own = definition != "off" and mode == modes[0]
        diff = _check(where, named, mode, runs, prompts, said, own, asks, progress)
        whole.extend(diff)
        whole.environment |= diff.environment
        said = whole.environment["definition"]
    return whole


def _check(
    subject: Subject, targets: Mapping[str, Target], mode: Mode, names: Iterable[str],
    prompts: Sequence[np.ndarray] | None, definition: str | None, narrow: bool,
    embedding: bool, progress: Progress,
) -> Diff:  # fmt: skip
    """The same in one dtype, in the runs `names`. `definition`: what is known of it; None: ask.
    `narrow`: look at the definitions of narrow weights and caches, `embedding`: at that of an
    embedding that is multiplied.
    """
    started = time.perf_counter()
    runs: dict[tuple[str, str], Served] = {}
    held = Diff(tuple(targets))
    for name, target in targets.items():
        for run in names:
            options = RUNS[run]
            steps = options["decode_steps"]
            if run == "loops" and (why := refusal(subject, target, decode_steps=steps)):
                held.notes.append(f"{name}: not run with loops of decode steps: {why}")
                continue
            progress(f"{subject.dtype}, {target}: starting, {run}")
            asks = workload(subject, prompts, loops=run == "loops")

            def inspect(engine: Engine, side: str = f"{name}, {run}") -> None:
                check_held(held, side, engine.worker, HostWeights(subject))

            try:
                runs[name, run] = serve(
                    subject, target, asks, inspect=inspect, progress=progress, **options
                )
            except USERS:
                raise
            except Exception as error:
                # No verdict, and the other runs are judged.
                where = f"{name}, {run}, mode {mode}"
                progress(traceback.format_exc())
                held.missing.append(f"{where}: {ENGINE_FAILED} {in_words(error)}")
    positions = _Positions(subject, mode, runs)
    diff = positions.judge(progress) if runs else Diff(tuple(targets))
    diff.extend(held)
    shared = SharedDefinition(subject, positions.weights, positions.sequences, positions.kept)
    if runs and narrow:
        shared.check_narrow()
    if runs and embedding:
        shared.check_embedding()
    if definition is None and not runs:
        definition = "not checked, no engine served"
    elif definition is None:
        progress(f"asking {TRANSFORMERS} about the definition")
        definition = shared.ask_transformers()
    diff.problems += shared.problems
    diff.environment["definition"] = definition
    diff.environment["sides"] = {side: served.environment for (side, _), served in runs.items()}
    diff.seconds = time.perf_counter() - started
    return diff


# --- what ran
# --------------------------------------------------------------------------------------------------


def _not_reached(run: str, served: Served, keeps: bool) -> Iterator[str]:
    """What a run was to show and did not; `keeps`: its cache keeps prefixes whatever its size."""
    wanted = {"mixed": served.steps["mixed"]}
    if keeps:
        wanted |= {"prefix cache": served.cached}
    if run == "loops":
        wanted |= {"loop": served.steps["loop"]}
    else:
        wanted |= {"decode": served.steps["decode"], "preemption": served.preemptions}
    yield from (f"{what}: none in the run {run!r}" for what, count in wanted.items() if not count)


def _wrong_ends(served: Served) -> Iterator[str]:
    """What did not end as its tokens say. Errors, which mostly have one cause, are told as one."""
    failed = [n for n, x in enumerate(served.answers) if x.finish_reason is FinishReason.ERROR]
    if failed:
        first = served.answers[failed[0]]
        yield (
            f"{len(failed)} of {len(served.answers)} requests {ENDED_BY_ERROR}; the first is "
            f"request {failed[0]} with {len(first.tokens)} of {first.ask.params.max_tokens} tokens"
        )
    for number, answer in enumerate(served.answers):
        if number in failed:
            continue
        reason, wanted = _right_end(answer)
        if answer.finish_reason is not reason or len(answer.tokens) != wanted:
            yield (
                f"request {number} ended by {answer.finish_reason} with {len(answer.tokens)} of "
                f"{wanted} tokens"
            )


def _right_end(answer: Answer) -> tuple[FinishReason, int]:
    """How an answer ends by its own tokens, and with how many: at the first stop id that may end
    it, else at its length. No request of the workload ends by the model's own stop ids.
    """
    params = answer.ask.params
    for index, token in enumerate(answer.tokens[: params.max_tokens]):
        if index >= params.min_tokens and token in params.stop_token_ids:
            return FinishReason.STOP, index + 1
    return FinishReason.LENGTH, params.max_tokens


def _wrong_lists(served: Served) -> Iterator[str]:
    """The first list of log-probabilities that lacks its token, or whose ranks are not in order."""
    for number, answer in enumerate(served.answers):
        params, prompt = answer.ask.params, answer.ask.prompt.tolist()
        lists = [
            *zip(answer.tokens, answer.logprobs, strict=False),
            *zip(prompt[1:], (answer.prompt_logprobs or [])[1:], strict=False),
        ]
        best = params.logprobs or params.prompt_logprobs or 0
        for token, top in lists:
            if top is None or token not in top:
                yield f"request {number}: token {token} is not in its {LISTED}"
                return
            ordered = sorted(top.values(), key=lambda found: found.rank)
            values = [found.logprob for found in ordered]
            ranks = [found.rank for found in ordered[:best]]
            if values != sorted(values, reverse=True) or ranks != [*range(1, best + 1)]:
                yield f"request {number}: token {token} has ranks {ranks} in its {LISTED}"
                return


# --- what it should have been
# --------------------------------------------------------------------------------------------------


def chooser(answer: Answer, index: int) -> Choice:
    """What should be token `index` of an answer, by what the user asked for."""
    ask = answer.ask
    return Choice(ask.params, ask.seed, ask.prompt, answer.tokens[:index])


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A served position: of which run and request, the token after it (None: of the prompt), and
    its log-probabilities and ranks.
    """

    run: tuple[str, str]
    place: str
    logprobs: Mapping[int, float]
    ranks: Mapping[int, int]
    answer: Answer
    index: int | None


class _Passes:
    """All passes of one run, as one. `sequences` are those of its answers."""

    def __init__(self, served: Served, sequences: Sequence[int]) -> None:
        # A run without a pass is missing all steps, which is said elsewhere.
        parts = [one.streams for one in served.passes]
        streams = np.concatenate(parts, 2) if parts else np.zeros((1, 2, 0, 1), np.float32)
        lasts = [len(answer.sequence) - 1 for answer in served.answers]
        tokens: list[str] = []
        kept: list[bool] = []
        self._at: dict[tuple[int, int], list[int]] = defaultdict(list)
        for one in served.passes:
            for request, position in one.places:
                # Steps in flight go on behind a stop id, which nobody gets.
                kept.append(position < lasts[request])
                if not kept[-1]:
                    continue
                self._at[sequences[request], position].append(len(tokens))
                step = f"step {one.number} ({one.kind})"
                tokens.append(f"{step}, request {request}, position {position}")
        self._streams = streams[:, :, kept] if kept else streams
        self.errors = StreamErrors(tokens, len(self._streams) - 1)

    def begin(self, places: Sequence[tuple[int, int]]) -> None:
        """Take the sequence and position of each row that the references compute next."""
        pairs = [(row, number) for row, at in enumerate(places) for number in self._at.get(at, ())]
        self._rows, self._numbers = np.asarray(pairs, np.int64).reshape(-1, 2).T

    def ends(self, row: int) -> np.ndarray:
        """Hidden and residual [2, pass, dim] behind the last layer at a row of the references, of
        the passes that finished it.
        """
        found: np.ndarray = self._streams[-1][:, self._numbers[self._rows == row]]
        return found[:, np.isfinite(found.astype(np.float32)).all((0, 2))]

    def look(
        self, layer: int, exact: np.ndarray, noisy: np.ndarray, mode: Mode,
        drawn: Callable[[], np.ndarray],
    ) -> None:  # fmt: skip
        """Compare with the references' streams [row dim] before layer `layer`. `drawn` gives the
        mean squares [row] of other draws of the noise.
        """
        if len(self._rows):
            got = self._streams[layer][:, self._numbers].astype(np.float64).sum(0)
            given = layer, self._numbers, got, exact[self._rows], noisy[self._rows]
            self.errors.look(*given)
            if layer and 1.0 < self.errors.over(layer, self._numbers, mode) < HOPELESS:
                self.errors.look(*given, drawn()[self._rows])


class _Positions(Comparison):
    """The references over all sequences that were served, each position judged as it passes."""

    def __init__(
        self, subject: Subject, mode: Mode, runs: Mapping[tuple[str, str], Served]
    ) -> None:
        super().__init__(subject, {}, mode, layers=(), taps=())
        self.runs = runs
        self.rows: dict[tuple[str, str], list[Row]] = {run: [] for run in runs}
        self.sequences: list[np.ndarray] = []
        self._wanted: dict[tuple[int, int], list[_Wanted]] = defaultdict(list)
        known: dict[bytes, int] = {}
        for run, served in runs.items():
            for number, answer in enumerate(served.answers):
                sequence = answer.sequence
                place = known.setdefault(sequence.tobytes(), len(known))
                if place == len(self.sequences):
                    self.sequences.append(sequence)
                for position, wanted in _wanted(run, number, answer):
                    self._wanted[place, position].append(wanted)
        self.kept: dict[tuple[int, int], np.ndarray] = {}
        self._passes = {
            run: _Passes(served, [known[answer.sequence.tobytes()] for answer in served.answers])
            for run, served in runs.items()
            if run[1] != "plain"
        }

    def judge(self, progress: Progress) -> Diff:
        """The verdicts on all runs."""
        owned = make_owned_steps(self.subject, self.sequences, 1)
        diff = self.run_owned(owned, lambda text: progress(f"reference: {text}"))
        # Of windows alone, a cache for half of the requests may keep no prefix that is whole.
        keeps = not all(cache_of(layer).window for layer in model_of(self.subject.model).kinds)
        left = sum(len(wanted) for wanted in self._wanted.values())
        if left:
            diff.missing.append(f"{left} served positions: the reference did not compute them")
        for (side, run), served in self.runs.items():
            tokens = sum(len(answer.tokens) for answer in served.answers)
            where = f"{side}, mode {self.mode}"
            sigmas: tuple[float, ...] = ()
            first_wrong, behind = "", WITHOUT_STREAMS
            if any(
                one.side == side and one.run == "steps" and one.complaints for one in diff.served
            ):
                behind = "as in the run 'steps'"
            if (side, run) in self._passes:
                errors = self._passes[side, run].errors
                sigmas, first_wrong = judge_streams(errors, self.mode)
                behind = BEHIND
                if errors.missing:
                    diff.missing.append(f"{where}: {errors.missing} tokens of the passes of {run}")
            found = judge_rows(
                self.rows[side, run], self.mode, tokens, first_wrong, behind, side=side, run=run,
                streams=sigmas, requests=len(served.answers), steps=dict(served.steps),
                preemptions=served.preemptions, cached=served.cached,
            )  # fmt: skip
            diff.served.append(found)
            wrong = *_wrong_ends(served), *_wrong_lists(served)
            diff.problems += [f"{where}, {run}: {text}" for text in wrong]
            diff.missing += [f"{where}: {text}" for text in _not_reached(run, served, keeps)]
        for side in dict.fromkeys(side for side, _ in self.runs) if not keeps else ():
            if not any(served.cached for (name, _), served in self.runs.items() if name == side):
                diff.missing.append(f"{side}, mode {self.mode}: prefix cache: none in any run")
        return diff

    def _embed(self) -> Streams:
        for passes in self._passes.values():
            passes.begin(self.places())
        streams = super()._embed()
        self._look(0, streams)
        return streams

    def _layer(self, index: int, streams: Streams, caches: Caches) -> tuple[Streams, Caches]:
        after, caches = super()._layer(index, streams, caches)
        self._look(index + 1, after)
        return after, caches

    def _look(self, layer: int, streams: Streams) -> None:
        exact, noisy = (total(streams[which]) for which in (True, False))
        for passes in self._passes.values():
            passes.look(layer, exact, noisy, self.mode, partial(self._drawn, layer))

    def _drawn(self, layer: int) -> np.ndarray:
        """Mean squares [row] of what roundings of this dtype make of the streams before a layer."""
        found = self._carried(layer - 1, TRIES[0])
        times = walk(self.reduction) if self.gates == "S" else 1.0
        out: np.ndarray = np.mean((times * found.elements) ** 2, 1)
        return out

    def _logits(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        for row, place in enumerate(self.places()):
            if place[0] < DEFINED:
                self.kept[place] = exact[row]
            for wanted in self._wanted.pop(place, ()):
                answer, index = wanted.answer, wanted.index
                choose = None if index is None else chooser(answer, index)
                token = None if index is None else answer.tokens[index]
                params = answer.ask.params
                by_logits = params.greedy and not params.needs_processors
                judge = partial(
                    judge_row, wanted.place, token=token, choose=choose, by_logits=by_logits
                )
                found = judge(exact[row], faithful[row], wanted.logprobs, ranks=wanted.ranks)
                if found.flip is not None and not found.flip.tie:
                    found = replace(found, flip=self._own_flip(wanted.run, row, judge, found.flip))
                if found.problem:
                    found = replace(found, problem=self._own_problem(wanted, row, judge, found))
                rows = self.rows[wanted.run]
                if found.may_be_wrong(self.mode) and sum(bool(x.own) for x in rows) < ASKED:
                    # What carried the error there is judged by itself: the stream of each layer.
                    ends_of_passes = self._own_ends(wanted.run, row)
                    own = tuple(judge(*ends, wanted.logprobs) for ends in ends_of_passes)
                    found = replace(found, own=own)
                rows.append(found)

    def _own_ends(self, run: tuple[str, str], row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Logits [vocab] of both references, of the streams that the engine itself had behind its
        layers at a row of this step: of each pass that finished it. A run without streams has those
        of the same steps with them.
        """
        side, name = run
        passes = self._passes.get((side, "steps" if name == "plain" else name))
        if passes is None:
            return []
        hidden, residual = passes.ends(row)
        return [*zip(*self.ends_of(hidden, residual), strict=True)] if len(hidden) else []

    def _own_problem(self, wanted: _Wanted, row: int, judge: Callable[..., Row], found: Row) -> str:
        """What is wrong with a row of this step: nothing where the engine's own stream says so."""
        for ends in self._own_ends(wanted.run, row):
            if not judge(*ends, wanted.logprobs, ranks=wanted.ranks).problem:
                return ""
        return found.problem

    def _own_flip(
        self, run: tuple[str, str], row: int, judge: Callable[..., Row], flip: Flip
    ) -> Flip | None:
        """The `flip` of a token at a row of this step, by the stream that the engine itself had
        behind its layers. The stream is judged by itself: where a rounding moves a whole row, the
        references' logits say nothing of what is behind.
        """
        for ends in self._own_ends(run, row):
            own = judge(*ends, {}).flip
            if own is None or own.tie:
                return own
        return flip


def _wanted(run: tuple[str, str], number: int, answer: Answer) -> Iterator[tuple[int, _Wanted]]:
    """(position, what was served there) of one answer."""
    start = len(answer.ask.prompt)
    for position, top in enumerate(answer.prompt_logprobs or ()):
        if top is not None:
            place = f"request {number}, prompt token {position}"
            yield position - 1, _Wanted(run, place, *_values(top), answer, None)
    for index in range(len(answer.tokens)):
        top = answer.logprobs[index] if index < len(answer.logprobs) else {}
        place = f"request {number}, token {index} (position {start + index})"
        yield start + index - 1, _Wanted(run, place, *_values(top), answer, index)


def _values(top: TokenLogprobs) -> tuple[dict[int, float], dict[int, int]]:
    """Log-probabilities and ranks by token."""
    return (
        {token: found.logprob for token, found in top.items()},
        {token: found.rank for token, found in top.items()},
    )
