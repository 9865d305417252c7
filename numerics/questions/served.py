"""What engines served: tokens and log-probabilities of whole runs, against the reference.

Every other question gives all sides the same tokens. Here each engine runs as for a user: chunks
and ragged batches, single decodes and decode loops, requests that are preempted, prompts found in
the prefix cache, greedy and drawn tokens. Then the references compute the sequences that came out,
and say of each position what its log-probabilities are and which token they give.

transformers, where it is installed, is asked whether the reference itself is right: what both
backends share, such as the model's definition, no comparison of them can show.
"""

from __future__ import annotations

import hashlib
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
from ...shared.errors import ConfigError
from ...shared.models import decoder
from ...shared.models.families import model_of
from ...shared.models.spec import Attention
from ...shared.request import FinishReason
from ...shared.sampling_params import SamplingParams
from ...shared.step import STOP_SLOTS
from ..errors import USERS, in_words
from ..judging.amplification import HOPELESS, TRIES
from ..judging.choice import Choice
from ..judging.diff import Diff
from ..judging.gates import MODES, Mode, semantics, walk
from ..judging.metrics import Flip, measure
from ..judging.served import BEHIND, WITHOUT_STREAMS, Row, judge_row, judge_rows
from ..judging.streams import StreamErrors, judge_streams
from ..judging.weights import check_held
from ..progress import Progress, silent
from ..sides.narrow_cache import ApartEntries, Writing
from ..sides.reference import bound, reference_of, total
from ..sides.serving import Answer, Ask, Served, refusal, serve
from ..sides.steps import (
    check_prompt,
    default_prompts,
    empty_caches,
    make_owned_steps,
    owned_rows,
)
from ..sides.subject import HostWeights, Subject, Target, name_sides, widened_layer
from .logits import TRANSFORMERS, transformers_embedding, transformers_logits
from .model import Caches, Comparison, Streams

Definition = Literal["auto", "transformers", "off"]

RUNS: dict[str, dict[str, Any]] = {
    "steps": {"tight": True, "decode_steps": 1, "wide": True},
    "loops": {"tight": False, "decode_steps": 4},
    "plain": {"tight": True, "decode_steps": 1, "wide": True, "streams": False},
}
"""How an engine runs: with a cache for half of the requests, with decode loops, and once more as
the first by the programs that users get, which give no streams.
"""
NEW_TOKENS = 24
LONG_TOKENS = 48
"""The same of the one request that fills the context: it goes on when the others have ended."""
BEST = 8
"""Log-probabilities of a position that are asked for."""
SPREAD = 0x9E3779B97F4A7C15 >> 12
"""Seeds are multiples of it, so that both halves of each say something."""
ASKED = 16
"""Positions of a run whose log-probabilities are computed from the engine's own streams too. Where
more are off, it is no luck, and the head of a large vocabulary for each would take long.
"""
DEFINED = 6
"""Sequences that transformers is asked for."""
SAME = 1e-6
"""Relative error of logits that are of the same numbers in float64, but for scales in float32."""
ENGINE_FAILED = "the engine failed with"
ENDED_BY_ERROR = "ended by error"
LISTED = "list of log-probabilities"
"""Words of what is missing or wrong, by which `check` sorts causes."""


def workload(
    subject: Subject, prompts: Sequence[np.ndarray] | None = None, loops: bool = False
) -> list[Ask]:
    """Requests that reach every kind of step. `prompts` stand for those of its own. `loops`: none
    asks for what the host must see between two tokens.

    The first wave has more requests than run at once. Its first fills the context, holds the first
    page, and ends last. In it are two whose second pages are equal and whose first are not. The
    second wave begins with what the first computed.

    Raises ConfigError for a context that is too short for these, RequestError for a prompt that
    is too long for it.
    """
    rng, page = np.random.default_rng(subject.seed), subject.page_size
    longest = subject.max_model_len - NEW_TOKENS
    if subject.max_model_len <= 2 * page:
        raise ConfigError(
            f"max_model_len: got {subject.max_model_len}, allowed is at least {2 * page + 1} to "
            "serve: prompts of two pages and a token"
        )
    if prompts is None:
        given = [ids[:longest] for ids in default_prompts(subject, subject.seed)]
    else:
        given = list(prompts)
        for index, ids in enumerate(given):
            check_prompt(ids, index, subject, 1, longest)
    words = np.concatenate(given)

    def some(count: int) -> np.ndarray:
        """Tokens of the prompts in another order."""
        return rng.choice(words, max(count, 0)).astype(np.int32)

    room = longest - 2 * page
    shared = some(page)
    twins = [np.concatenate([some(page), shared, some(min(5, room))]) for _ in range(2)]
    after = min(LONG_TOKENS, subject.max_model_len // 2)
    context = some(subject.max_model_len - after)
    first = [context, *given, *twins, *(some(min(n, longest)) for n in (2 * page + 3, 7, page))]
    again = [np.concatenate([ids[:-1], some(6)])[:longest] for ids in (*twins, *given[:4])]
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.9, "min_p": 0.3},
    ]
    if not loops:
        bias = {int(word): 4.0 for word in words[:3]}
        settings += [
            {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
            {"temperature": 0.7, "presence_penalty": 0.3, "logit_bias": bias},
        ]
    asks: list[Ask] = []
    for wave, group in enumerate((first, again)):
        for prompt in group:
            index = len(asks)
            params = SamplingParams(
                seed=(1000 + index) * SPREAD, ignore_eos=True,
                max_tokens=NEW_TOKENS - index % 9 if index else after,
                # The programs without log-probabilities run too, and those of prompts.
                logprobs=BEST if wave == 0 and not loops else None,
                # The first two fill more than a step: one of their prompts is read in parts.
                prompt_logprobs=BEST if wave == 0 and not loops and index % 4 < 2 else None,
                **settings[index % len(settings)],
            )  # fmt: skip
            asks.append(Ask(prompt, params, wave))
    for extra in _particular(words, rng, subject.model.vocab_size, loops):
        index = len(asks)
        common = {"seed": (1000 + index) * SPREAD, "max_tokens": 12, "ignore_eos": True}
        params = SamplingParams(**common | extra)
        asks.append(Ask(some(min(9, longest)), params, 1, drawn_seed(subject.seed, index)))
    return asks


def _particular(
    words: np.ndarray, rng: np.random.Generator, vocab: int, loops: bool
) -> Iterator[dict[str, Any]]:
    """What the last requests ask for: no seed, stop ids, and masks. One stops for sure, by a bias,
    as soon as it may. Of four tokens, those that may follow change with each token.
    """
    yield {"seed": None}
    # As many as a loop of decode steps stops early for.
    few = sorted({*words.tolist()})[: min(STOP_SLOTS, vocab // 4)]
    yield {"min_tokens": 3, "stop_token_ids": few}
    if loops:
        return
    stop = int(words[-1])
    yield {
        "temperature": 0.0, "min_tokens": 4, "stop_token_ids": [stop], "logit_bias": {stop: 100.0},
    }  # fmt: skip
    yield {"allowed_token_ids": sorted({*rng.integers(0, vocab, 12).tolist()})}
    few = rng.choice(vocab, 4, replace=False).tolist()
    banned = [*((token, token) for token in few), (few[0], few[1]), (few[2], few[3], few[0])]
    yield {"allowed_token_ids": few, "banned_sequences": banned}


def drawn_seed(seed: int, number: int) -> int:
    """What an engine with `seed` draws for its request `number`, which names none: 64 bits."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


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
        rounded = asks and where.dtype != "float32"
        diff = _check(where, named, mode, runs, prompts, said, own, rounded, progress)
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
    if runs and narrow:
        positions.check_narrow()
    if runs and embedding and positions.faithful.spec.embedding_scale != 1.0:
        positions.check_embedding()
    if definition is None and not runs:
        definition = "not checked, no engine served"
    elif definition is None:
        progress(f"asking {TRANSFORMERS} about the definition")
        definition = positions.check_definition()
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
        mixers = [sub.mixer for layer in model_of(self.subject.model).kinds for sub in layer]
        keeps = not all(mixer.window for mixer in mixers if isinstance(mixer, Attention))
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

    def check_definition(self) -> str:
        """Compare the exact reference with transformers in float32; what is to be said of it."""
        some = self.sequences[:DEFINED]
        logits, about = transformers_logits(self.subject, some, wide=True)
        places = sorted(self.kept)
        kept, alone = self.kept, self.subject.weights_alone
        if alone.model != self.model or alone.cache_dtype != self.subject.cache_dtype:
            # Of tokens and caches that are narrow it knows nothing: `check_narrow` looks at them.
            kept = exact_logits(alone, some)
        got = np.stack([logits[prompt][position] for prompt, position in places])
        right = np.stack([kept[place] for place in places])
        m = measure(got, right, right)
        gate = replace(semantics("logits", self.reduction, self.model.num_layers), slope=None)
        found = [*gate.complaints(m)]
        if found:
            prompt, position = places[m.worst[0]]
            self.diff.problems.append(
                f"our definition: {TRANSFORMERS} {about['plan']} gives other logits ({found[0]}), "
                f"most at position {position} of sequence {prompt}; what all sides share is wrong, "
                "or theirs is"
            )
        return (
            f"{TRANSFORMERS} {about['plan']} in float32, {len(places)} positions, relative error "
            f"{m.rel_l2:.2g} (limit {gate.rel_l2:.2g})"
        )

    def check_embedding(self) -> None:
        """Compare the embedding of the faithful reference with that of transformers in the run
        dtype, where it is multiplied by a number that may be rounded: in float32 it is the same.
        """
        ids = self.sequences[0]
        theirs = transformers_embedding(self.subject.plain, ids)
        given = bound(exact=False), self.faithful.spec, self.weights.top(), ids
        ours = decoder.embed(*given).astype(np.float32)
        wrong = int((ours != theirs).any(1).sum())
        if wrong:
            self.diff.problems.append(
                f"our definition: {TRANSFORMERS} gives {wrong} of {len(ids)} tokens another "
                f"embedding in {self.subject.dtype}; what all sides share is wrong, or theirs is"
            )

    def check_narrow(self) -> None:
        """Compare the definitions of narrow weights and of a narrow cache with what is made apart
        from the ops: both sides and both references share them.
        """
        subject = self.subject
        if subject.quantization is not None:
            self._check_narrow_weights()
        if subject.cache_dtype == subject.dtype:
            return

        def scales(layer: int) -> Mapping[str, np.ndarray]:
            held, given = self.weights.layer(layer), subject.kv_cache_scales
            heads = subject.layout.page_shape(layer)[1] // 2
            pairs = zip(("k_scale", "v_scale"), given or (1.0, 1.0), strict=True)
            if given is None and self.model.kv_scales is not None:
                return held
            return {name: np.full(heads, value, np.float32) for name, value in pairs}

        apart = ApartEntries(subject.cache_dtype, scales)
        found = exact_logits(subject.plain_cache, self.sequences[:DEFINED], apart)
        places = sorted(self.kept)
        got, right = (np.stack([x[place] for place in places]) for x in (self.kept, found))
        m = measure(got, right, right)
        if not m.rel_l2 <= SAME:
            prompt, position = places[m.worst[0]]
            self.diff.problems.append(
                "our definition: keys and values that a cache of "
                f"{subject.cache_dtype} holds, made apart from the ops, give other logits "
                f"(relative error {m.rel_l2:.3g} > {SAME:g}), most at position {position} of "
                f"sequence {prompt}; what all sides share is wrong"
            )

    def _check_narrow_weights(self) -> None:
        plain = HostWeights(self.subject.plain)
        for layer in range(self.model.num_layers):
            for name, (wide, step) in widened_layer(self.weights, layer).items():
                off = np.abs(wide - plain.layer(layer)[name].astype(np.float64))
                wrong = off > 0.51 * step
                if wrong.any():
                    self.diff.problems.append(
                        f"our definition: layer.{layer}.{name} in {self.subject.quantization} is "
                        f"off by more than half a step in {wrong.mean():.1%} of the elements"
                    )


def exact_logits(
    subject: Subject, sequences: Sequence[np.ndarray], writing: Writing | None = None
) -> dict[tuple[int, int], np.ndarray]:
    """Logits [vocab] of the exact reference by (sequence, position)."""
    owned = [*make_owned_steps(subject, sequences, 1)]
    steps = [step for step, _ in owned]
    reference = reference_of(subject, exact=True, writing=writing)
    runs = reference.run_steps(HostWeights(subject), empty_caches(subject, steps), steps)
    return {
        place: found[-1][row]
        for (step, owners), found in zip(owned, runs, strict=True)
        for row, place in enumerate(owned_rows(step, owners))
    }


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
