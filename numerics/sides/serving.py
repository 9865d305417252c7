"""An engine that serves requests: what a user of a backend gets, and by which steps it came.

Nothing here is rebuilt for the comparison. Scheduler, packer, worker, samplers, decode loops,
prefix cache and preemption are the engine's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...shared.config import EngineConfig, resolve
from ...shared.engine import Engine, TokenLogprobs
from ...shared.models.caches import layout_of
from ...shared.page_groups import pages_for
from ...shared.progress import silent
from ...shared.request import FinishReason
from ...shared.sampling_params import SamplingParams
from ...shared.step import StepInput
from ...shared.worker import backend_module
from .environment import describe_side
from .subject import Subject, Target

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: prompt [tok] int32 and what is asked of the sampler, whose seed is given.

    Requests of a `wave` are added together, after those of the wave before have ended.
    """

    prompt: np.ndarray
    params: SamplingParams
    wave: int = 0


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
        """Prompt and tokens [tok] int32."""
        return np.concatenate([self.ask.prompt, np.asarray(self.tokens, np.int32)])


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


class _Watched:
    """A worker whose steps are counted. All else is the worker's."""

    def __init__(self, worker: Any, steps: Counter[str]) -> None:
        self._worker, self._steps = worker, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def execute(self, step: StepInput) -> Any:
        """Start a step."""
        self._steps["loop" if step.loop is not None else step.descriptor.kind] += 1
        return self._worker.execute(step)


def serve(
    subject: Subject, target: Target, asks: Sequence[Ask], *, tight: bool = False,
    progress: Progress = lambda text: None, **options: Any,
) -> Served:  # fmt: skip
    """Serve `asks` by an engine of `target`, with the engine options `options`.

    `tight`: with a cache that holds about half of the requests that run at once, so that some are
    preempted. Raises ConfigError, ModelError, BackendUnavailable, RequestError.
    """
    steps: Counter[str] = Counter()
    with _engine(subject, target, asks, tight, options) as engine:
        worker: Any = engine.worker
        engine.worker = _Watched(worker, steps)
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
        environment = describe_side(target, engine.device, worker.plans())
    return Served(
        list(answers.values()), steps, metrics.preemptions, metrics.prefix_hits, environment
    )


@contextmanager
def _engine(
    subject: Subject, target: Target, asks: Sequence[Ask], tight: bool, options: dict[str, Any]
) -> Iterator[Engine]:
    most = max(subject.tokens, subject.max_num_seqs)
    sizes: dict[str, Any] = {}
    if target.backend == "jax":
        # Few programs: each takes seconds to compile.
        sizes = {"decode_sizes": (subject.max_num_seqs,), "mixed_sizes": (most,)}
    values: dict[str, Any] = {
        "model": subject.name, "backend": target.backend, "device": target.device,
        "dtype": subject.dtype, "load_format": subject.load_format, "seed": subject.seed,
        "max_model_len": subject.max_model_len, "max_num_seqs": subject.max_num_seqs,
        "max_num_batched_tokens": most, "page_size": subject.page_size,
        "op_priority": dict(target.providers), **sizes, **target.options, **options,
    }  # fmt: skip
    device = backend_module(target.backend).find_device(target.device)
    resolved, _ = resolve(EngineConfig(**values), subject.model, device)
    groups = layout_of(subject.model, resolved).groups
    lengths = sorted((len(ask.prompt) + ask.params.max_tokens for ask in asks), reverse=True)
    held = [pages_for(groups, length, most) for length in lengths[: subject.max_num_seqs]]
    # Two steps in flight may hold a page more each.
    room = max(held[0] + 2, sum(held) // 2) if tight else 2 * sum(held)
    engine = Engine(
        EngineConfig(**values | {"num_pages": room}), subject.model, subject.folder, silent
    )
    try:
        yield engine
    finally:
        engine.close()
