"""An engine that serves requests: what a user of a backend gets, and by which steps it came.

Nothing here is rebuilt for the comparison. Scheduler, packer, worker, samplers, decode loops,
prefix cache and preemption are the engine's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...shared.config import EngineConfig, ResolvedConfig, resolve
from ...shared.demand import Demand
from ...shared.engine import Engine, TokenLogprobs
from ...shared.errors import ConfigError
from ...shared.models.caches import layout_of
from ...shared.page_groups import pages_for
from ...shared.progress import silent
from ...shared.request import FinishReason
from ...shared.sampling_params import SamplingParams
from ...shared.step import StepInput, StepOutput
from ...shared.worker import backend_module
from ..progress import Progress
from .environment import describe_side
from .steps import owned_rows
from .subject import Subject, Target


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: prompt [tok] int32 and what is asked of the sampler. Where that has no seed,
    `drawn` is the one that the engine is to draw.

    Requests of a `wave` are added together, after those of the wave before have ended.
    """

    prompt: np.ndarray
    params: SamplingParams
    wave: int = 0
    drawn: int = 0

    @property
    def seed(self) -> int:
        """That of the request's noise."""
        return self.drawn if self.params.seed is None else self.params.seed


@dataclass(slots=True)
class Answer:
    """What the engine gave one request."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and tokens [tok] int32. A 0 stands for the token that an error took the place of:
        the pass that should have given it is judged too.
        """
        lost = [0] if self.finish_reason is FinishReason.ERROR else []
        return np.concatenate([self.ask.prompt, np.asarray([*self.tokens, *lost], np.int32)])


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass that an engine made for its users: step `number` of the run, of a `kind`
    (mixed, decode, loop).

    `places` [tok] are the answer, by number, and the position of each token. `streams` [layer + 1,
    2, tok, dim], hidden and residual before the layers and behind each, are what the step's own
    program computed; NaN where a layer dropped a token.
    """

    number: int
    kind: str
    places: tuple[tuple[int, int], ...]
    streams: np.ndarray


@dataclass(slots=True)
class Served:
    """One run of an engine. `steps` counts its steps by what they were: mixed, decode, loop;
    `preemptions` of requests, `cached` prompt tokens that the prefix cache supplied.
    """

    answers: list[Answer]
    steps: Counter[str]
    preemptions: int
    cached: int
    environment: dict[str, Any]
    passes: list[Pass] = field(default_factory=list)


class _Watched:
    """A worker that notes the passes it makes. All else is the worker's."""

    def __init__(self, engine: Engine) -> None:
        self._worker: Any = engine.worker
        self._requests = engine.scheduler.table.requests
        self.steps: Counter[str] = Counter()
        self.passes: list[Pass] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def execute(self, step: StepInput) -> Any:
        """Start a step. Whose rows it has is known now: they may be another's when it is read."""
        kind = "loop" if step.loop is not None else step.descriptor.kind
        self.steps[kind] += 1
        count = int(step.field("counts")[1])
        tenants = [self._requests[row] for row in step.field("rows")[:count].tolist()]
        owners = [int(request.request_id) for request in tenants if request is not None]
        return _Noted(self._worker.execute(step), step, kind, owners, self)

    def note(self, step: StepInput, kind: str, owners: Sequence[int], streams: np.ndarray) -> None:
        """Take the streams [iteration, layer + 1, 2, tok, dim] of a step."""
        places = [*owned_rows(step, owners)]
        for iteration, of_pass in enumerate(streams):
            here = tuple((owner, position + iteration) for owner, position in places)
            self.passes.append(Pass(step.step_id, kind, here, of_pass[:, :, : len(here)]))


@dataclass(frozen=True, slots=True)
class _Noted:
    """A step's handle whose streams are kept when it is read."""

    handle: Any
    step: StepInput
    kind: str
    owners: list[int]
    watched: _Watched

    def result(self) -> StepOutput:
        output: StepOutput = self.handle.result()
        if output.streams is not None:
            self.watched.note(self.step, self.kind, self.owners, output.streams)
        return output


def serve(
    subject: Subject, target: Target, asks: Sequence[Ask], *, tight: bool = False,
    inspect: Callable[[Engine], None] = lambda engine: None, streams: bool = True,
    wide: bool = False,
    progress: Progress = lambda text: None, **options: Any,
) -> Served:  # fmt: skip
    """Serve `asks` by an engine of `target`, with the engine options `options`. `inspect` gets the
    engine before it serves.

    `streams`: its programs give what they pass from layer to layer. `tight`: with a cache that
    holds about half of the requests that run at once, so that some are preempted. `wide`: with
    steps of half as many tokens again, so that what is computed in parts of the usual size has a
    second. Raises ConfigError, ModelError, BackendUnavailable, RequestError.
    """
    most = subject.most_tokens * 3 // 2 if wide else subject.most_tokens
    with _engine(subject, target, asks, tight, streams, most, options) as engine:
        inspect(engine)
        watched: Any = _Watched(engine)
        engine.worker = watched
        answers = {str(i): Answer(ask) for i, ask in enumerate(asks)}
        for wave in sorted({ask.wave for ask in asks}):
            for name, answer in answers.items():
                if answer.ask.wave == wave:
                    engine.add(name, answer.ask.prompt, answer.ask.params)
            progress(f"{target}: serving wave {wave + 1}")
            while engine.has_work:
                for update in engine.step():
                    answer = answers[update.request_id]
                    answer.tokens += update.tokens
                    answer.logprobs += update.logprobs or []
                    answer.prompt_logprobs = update.prompt_logprobs or answer.prompt_logprobs
                    answer.finish_reason = update.finish_reason or answer.finish_reason
        metrics = engine.metrics()
        environment = describe_side(target, engine.device, watched.plans())
    return Served(
        list(answers.values()), watched.steps, metrics.preemptions, metrics.prefix_hits,
        environment, watched.passes,
    )  # fmt: skip


def refusal(subject: Subject, target: Target, **options: Any) -> str | None:
    """Why an engine of `target` cannot be configured with `options`; None where it can. Raises
    BackendUnavailable.
    """
    try:
        _configured(subject, target, options)
    except ConfigError as error:
        return str(error)
    return None


def _configured(
    subject: Subject, target: Target, options: dict[str, Any]
) -> tuple[EngineConfig, ResolvedConfig]:
    config = subject.engine_config(target, **options)
    device = backend_module(target.backend).find_device(target.device)
    return config, resolve(config, subject.model, device)[0]


@contextmanager
def _engine(
    subject: Subject, target: Target, asks: Sequence[Ask], tight: bool, streams: bool, most: int,
    options: dict[str, Any],
) -> Iterator[Engine]:  # fmt: skip
    options = {"max_num_batched_tokens": most} | options
    if target.backend == "jax":
        # Few programs: each takes seconds to compile.
        options = {"decode_sizes": (subject.max_num_seqs,), "mixed_sizes": (most,)} | options
    config, resolved = _configured(subject, target, options)
    groups = layout_of(subject.model, resolved).groups
    lengths = sorted((len(ask.prompt) + ask.params.max_tokens for ask in asks), reverse=True)
    lengths = lengths[: subject.max_num_seqs]
    held = [pages_for(groups, length, most) for length in lengths]
    room = 2 * sum(held)
    if tight:
        # While they decode: what windows leave behind of a prompt is another's by then. Two steps
        # in flight may hold a page more each.
        decoding = sum(pages_for(groups, length, 1) for length in lengths)
        room = max(held[0] + 2, decoding // 2)
    engine = Engine(
        replace(config, num_pages=room), subject.model, subject.folder, silent,
        Demand(streams=streams),
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()
