"""Keeps steps of a live engine as bundles: those of a request, some steps, those with a NaN, or
those that another backend computes otherwise. It is on only where an engine has the option
`capture`; an engine without it has no part of this.

What is kept is what the step itself did, by the program that served it: the stream before the
layers and behind each, what it wrote to the cache, its tokens and their log-probabilities. So all
steps bring their streams to the host. A step that is kept costs besides: the cache that it reads is
copied, and the next step waits. With `nan` and `mismatch` every step costs that (with `every=N`
each N-th), with `mismatch` a run on the other backend and of the references too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...shared.config import EngineConfig
from ...shared.errors import ConfigError
from ...shared.packer import histories_of, page_table_of
from ...shared.step import StepInput, StepOutput, batch_layout, history_rows
from ..bundles.bundle import Bundle, try_folder, write
from ..bundles.capturing import LOGPROBS, keep_layers
from ..bundles.steps import Recorded, filled, renumbered, used_pages
from ..sides.environment import describe_side
from ..sides.sampling import sampled_rows
from ..sides.side import finished_rows, own_cache
from ..sides.steps import groups_of, real_tokens
from ..sides.subject import Subject, Target, check_recordable, parse_target
from .replay import replay

GRAMMAR = (
    "DIR followed by some of request=ID, step=N, nan, mismatch=BACKEND:DEVICE, most=N, "
    "every=N, after commas"
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep: `most` bundles in `folder`. `every`: of steps, for `nan` and `mismatch`."""

    folder: str
    requests: frozenset[str] = frozenset()
    steps: frozenset[int] = frozenset()
    nan: bool = False
    mismatch: Target | None = None
    most: int = 4
    every: int = 1


def parse_policy(text: str) -> Policy:
    """A policy from `DIR,request=ID,step=N,nan,mismatch=torch:cpu,most=4,every=1`. Raises
    ConfigError.
    """
    folder, *words = text.split(",")
    requests, steps, rest = set[str](), set[int](), dict[str, Any]()
    for word in words:
        name, sign, value = word.partition("=")
        number = int(value) if value.isdecimal() else -1
        if name == "nan" and not sign:
            rest[name] = True
        elif name == "mismatch" and value:
            rest[name] = parse_target(value)
        elif name == "request" and value:
            requests.add(value)
        elif name == "step" and number >= 0:
            steps.add(number)
        elif name in ("most", "every") and number > 0:
            rest[name] = number
        else:
            raise ConfigError(f"capture: got {word!r} in {text!r}, allowed is {GRAMMAR}")
    if not folder or not (requests or steps or {"nan", "mismatch"} & rest.keys()):
        raise ConfigError(f"capture: got {text!r}, which captures nothing; allowed is {GRAMMAR}")
    return Policy(folder, frozenset(requests), frozenset(steps), **rest)


def attach(engine: Any, config: EngineConfig, folder: str) -> Camera:
    """Let `engine` keep what its option `capture` asks for. Raises ConfigError for what cannot
    be kept.
    """
    policy = parse_policy(str(config.capture))
    wanted = {"tensor_parallel_size": 1, "decode_steps": 1, "kv_cache_dtype": engine.config.dtype}
    for name, value in wanted.items():
        if getattr(engine.config, name) != value:
            raise ConfigError(
                f"capture: got {name} {getattr(engine.config, name)}, allowed is {value}"
            )
    if any(Path(policy.folder).glob("step-*")):
        raise ConfigError(
            f"capture: {policy.folder} holds bundles of an earlier run; give another folder"
        )
    try_folder("capture", Path(policy.folder))
    engine.worker = camera = Camera(engine, policy, config.model, folder)
    return camera


class _Handle:
    """A step's handle whose result may be asked for twice."""

    def __init__(self, step: StepInput, handle: Any) -> None:
        self.step, self._handle = step, handle

    @cached_property
    def _output(self) -> StepOutput:
        return self._handle.result()

    def result(self) -> StepOutput:
        return self._output


class Camera:
    """A worker that keeps some of the steps that it passes on. All else is the worker's. `kept`
    are folders.
    """

    def __init__(self, engine: Any, policy: Policy, model: str, folder: str) -> None:
        self._worker, self._policy, self._engine = engine.worker, policy, engine
        config = engine.config
        self._subject = Subject(
            model, folder, engine.model, config.dtype, config.load_format, config.seed,
            config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens,
            config.page_size,
        )  # fmt: skip
        check_recordable(self._subject, "a capture")
        self._layout = self._subject.layout
        self._last: dict[int, int] = {}
        self._open: deque[_Handle] = deque()
        self._seen = 0
        self.kept: list[Path] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def execute(self, step: StepInput) -> Any:
        """Start a step; keep it if it is to be kept."""
        self._seen += 1
        why = self._asked_for(step)
        looked_at = (
            self._policy.nan or self._policy.mismatch is not None
        ) and self._seen % self._policy.every == 0
        if len(self.kept) >= self._policy.most or not (why or looked_at):
            return self._started(step)
        known = self._known(step)
        pages = used_pages(known, self._layout.groups)
        before = self._pages(pages)
        handle = self._started(step)
        output = handle.result()
        if not why and self._policy.nan and _is_broken(known, output):
            why = "nan"
        if not why and self._policy.mismatch is None:
            return handle
        bundle = self._bundle(known, pages, before, self._pages(pages), output)
        if not why:
            why = self._mismatch(bundle)
        if why:
            bundle.source |= {"why": why}
            name = f"step-{step.step_id:06d}-{why.split()[0].rstrip(':')}"
            self.kept.append(write(bundle, str(Path(self._policy.folder) / name)))
        return handle

    def _pages(self, pages: np.ndarray) -> np.ndarray:
        """Some pages of the cache [layer page slot 2*kvhead hdim]."""
        layers = range(self._engine.model.num_layers)
        return np.stack([self._worker.read_pages(layer, pages) for layer in layers])

    def _asked_for(self, step: StepInput) -> str:
        if step.step_id in self._policy.steps:
            return "step"
        if not self._policy.requests:
            return ""
        rows = step.field("rows")[: int(step.field("counts")[1])]
        running = self._engine.scheduler.table.requests
        named = [running[row].request_id for row in rows.tolist() if running[row] is not None]
        return "request" if self._policy.requests.intersection(named) else ""

    def _started(self, step: StepInput) -> _Handle:
        handle = _Handle(step, self._worker.execute(step))
        self._open.append(handle)
        # At most two steps are in flight: those before are read, and reading them again costs
        # nothing.
        while len(self._open) > 2:
            self._read(self._open.popleft())
        return handle

    def _read(self, handle: _Handle) -> None:
        rows = handle.step.field("rows")
        for row, token in zip(rows.tolist(), handle.result().tokens.tolist(), strict=False):
            self._last[row] = token

    def _known(self, step: StepInput) -> StepInput:
        """The step with the tokens that only the device has, and with its page table and its
        histories: waits for the steps before.
        """
        while self._open:
            self._read(self._open.popleft())
        batch = step.batch.copy()
        views = batch_layout(step.descriptor, step.shape).views(batch)
        for i in np.flatnonzero(views["token_ids"] < 0).tolist():
            views["token_ids"][i] = self._last[int(views["rows"][i])]
        rows, table = views["rows"][: int(views["counts"][1])], self._engine.scheduler.table
        pages = page_table_of(rows, step.descriptor.requests, table, step.shape)
        remembered = history_rows(step)
        histories = histories_of(np.array(remembered), table) if remembered else None
        return replace(
            step, batch=batch, new_pages=None, page_table=pages, new_tokens=None,
            histories=histories,
        )  # fmt: skip

    def _bundle(
        self, step: StepInput, pages: np.ndarray, before: np.ndarray, after: np.ndarray,
        output: StepOutput,
    ) -> Bundle:  # fmt: skip
        config, groups = self._engine.config, self._layout.groups
        compact = renumbered(step, pages, config.page_size)
        # What no token of the step's requests was written to says nothing, and is not theirs.
        start = np.where(
            filled(compact, groups, len(pages))[None, :, :, None, None], before, np.nan
        ).astype(before.dtype)
        subject = replace(self._subject, num_pages=max(len(pages), 1))
        target = f"{config.backend}:{config.platform}"
        source = describe_side(target, self._worker.device, self._worker.plans())
        recorded, count = Recorded(compact), int(step.field("counts")[1])
        own = [
            own_cache(compact, self._layout, layer, *caches)
            for layer, caches in enumerate(zip(before, before, after, strict=True))
        ]
        keep_layers(recorded, _streams(output), list(before), own, groups_of(subject))
        recorded.arrays["tokens"] = np.asarray(output.tokens[:count], np.int32)
        if output.logprobs is not None:
            top = output.logprobs
            served = (x[:count] for x in (top.top_ids, top.top, top.chosen))
            recorded.arrays |= zip(LOGPROBS, served, strict=True)
        return Bundle(subject, [recorded], source, start)

    def _mismatch(self, bundle: Bundle) -> str:
        """What another backend computes otherwise, or ""."""
        diff = replay(bundle, [self._policy.mismatch])  # type: ignore[list-item]
        return f"mismatch: {'; '.join(diff.wrong()[:3])}" if diff.is_wrong else ""


def _streams(output: StepOutput) -> np.ndarray:
    """Hidden and residual before the layers and behind each [layer + 1, 2, tok, dim] of a step."""
    if output.streams is None:
        raise RuntimeError("an engine with captures has programs that give streams")
    streams: np.ndarray = output.streams[0]
    return streams


def _is_broken(step: StepInput, output: StepOutput) -> bool:
    """Whether something that the step computed is not finite: the stream of a token behind a layer
    that did not drop it, or a logit of a request that is sampled, which then has no token.
    """
    if any(output.tokens[request] < 0 for request, _ in sampled_rows(step)):
        return True
    streams = _streams(output)[:, :, : real_tokens(step)].astype(np.float32)
    last = finished_rows(step, streams[-1])
    finite = np.isfinite(streams[:-1]).all() and np.isfinite(streams[-1][:, last]).all()
    return not finite
