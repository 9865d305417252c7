"""What a backend offers to a comparison: its worker, which runs steps by the programs that it
serves with.

Of a step come the stream before the layers and behind each, as the step's own program passed it on,
the cache that each layer found and left, and the logits. Ops are run one by one besides, as the
worker's plans have them: on what is given to them in the layer, they say which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ...bucketing import Table
from ...ops import Plan, Plans
from ...shared.config import DeviceInfo, ResolvedConfig
from ...shared.demand import Demand
from ...shared.models import decoder
from ...shared.models.caches import CacheLayout
from ...shared.models.spec import Model
from ...shared.progress import silent
from ...shared.step import PROCESSING, StepInput
from ...shared.worker import Worker, backend_module, create_worker
from ..progress import Progress
from .fault import Fault, faulty_checkpoint, planted
from .one_op import PlannedOps
from .reference import State, sources_of, total
from .sampling import sampled_rows, sampling_field
from .steps import pages_of, real_tokens, written_slots
from .subject import Subject, Target
from .taps import Call, Declared, declare

Program = str | int
"""`embed`, `finish`, `head`, or the number of a layer."""
Tap = tuple[Declared, Mapping[str, np.ndarray], tuple[np.ndarray, ...]]
"""A call of an op: the activations that it was given, and its outputs."""
DEMAND = Demand(samplers=("greedy",), logprobs=False, prompt_logprobs=False, streams=True)


@dataclass(frozen=True, slots=True)
class Executed:
    """What a step did. `tokens` are those that it sampled [request], if all are the best ones.
    `streams` [layer + 1, 2, tok, dim] are hidden and residual before the layers
    and behind each. `before` and `after` are the cache of each layer [page slot 2*kvhead hdim],
    `logits` those of each real token [tok vocab]: None of a step that an engine served, which
    brings out none. `rows` are the real tokens that the last layer finished; it may drop those that
    nothing is sampled from. `page_tables` are those on the device, None of a recorded step.
    """

    step: StepInput
    streams: np.ndarray
    before: Sequence[np.ndarray]
    after: Sequence[np.ndarray]
    logits: np.ndarray | None
    rows: np.ndarray
    tokens: np.ndarray | None = None
    page_tables: np.ndarray | None = None

    def given(self, index: int, source: int) -> State:
        """hidden, residual and the cache that a layer was given; `source` is the layer whose cache
        it reads.
        """
        hidden, residual = self.streams[index]
        return hidden, residual, (self.before if source == index else self.after)[source]

    def given_end(self) -> tuple[np.ndarray, np.ndarray]:
        """hidden and residual that the final norm was given. Zeros for tokens that it was not, and
        for those whose stream is not finite, which the judgement of the last layer says.
        """
        last = np.zeros_like(self.streams[-1])
        finite = np.isfinite(total(self.streams[-1][:, self.rows])).all(1)
        rows = self.rows[finite]
        last[:, rows] = self.streams[-1][:, rows]
        return last[0], last[1]

    def finished(self, index: int) -> np.ndarray:
        """The rows that layer `index` finished."""
        is_last = index == len(self.streams) - 2
        return self.rows if is_last else np.arange(real_tokens(self.step))


def finished_rows(step: StepInput, last: np.ndarray) -> np.ndarray:
    """The real tokens that the last layer finished, whose stream [2, tok, dim] is NaN for those
    that it dropped: all that nothing is sampled from. One that is sampled from is finished, or it
    is wrong.
    """
    real = np.arange(real_tokens(step))
    named = step.field("sample_index")[: int(step.field("counts")[1])]
    kept = np.union1d(named, [row for _, row in sampled_rows(step)]).astype(np.int64)
    others = np.setdiff1d(real, kept)
    dropped = len(others) > 0 and bool(np.isnan(last[:, others].astype(np.float32)).all())
    return np.intersect1d(real, kept) if dropped else real


def own_cache(
    step: StepInput, layout: CacheLayout, layer: int, own: np.ndarray, before: np.ndarray,
    after: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """The cache of a layer after a step; `own` is the one before it. A layer shares its buffer,
    which the step changed from `before` to `after`, with layers of other page groups: what these
    wrote to slots of theirs is left out.
    """
    if len(layout.groups) == 1:
        return after
    rows = [x.reshape(-1, *x.shape[2:]) for x in (own.copy(), before, after)]
    bits = [np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1) for x in rows[1:]]
    changed = (bits[0] != bits[1]).any(1)
    for number in range(len(layout.groups)):
        if number != layout.places[layer].group:
            changed[written_slots(step, number)] = False
    rows[0][changed] = rows[2][changed]
    return rows[0].reshape(own.shape)


class Side(Protocol):
    """A side of a comparison: a worker, or what one has left behind."""

    target: Any
    device: DeviceInfo
    plans: Any
    spec: Model

    def begin(self, start: Sequence[np.ndarray]) -> None:
        """Take the cache of each layer before the first step."""

    def execute(self, step: StepInput) -> Executed:
        """Run the next step."""

    def read_weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """The weights of a layer as the programs get them; -1: those outside of layers."""

    def read_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The rotary tables as the programs get them."""

    def taps(
        self, kind: str, program: Program, calls: Sequence[Call], patterns: Sequence[str]
    ) -> Iterator[Tap]:
        """The calls of ops in a program of a kind whose names match `patterns`, each on what it is
        given in `calls`.
        """

    def close(self) -> None:
        """Free the device."""


def plan_of(plans: Any, spec: Model, kind: str, program: Program) -> Any:
    """The plan that a program of a model runs under, in steps of a kind."""
    if isinstance(program, str):
        return plans["sample" if program == "head" else kind]
    return plans.of(kind, spec.layers[program])


def plans_of(subject: Subject, target: Target, fault: Fault | None) -> Plans:
    """The plans of a worker that is not there. Raises ConfigError, OpError, BackendUnavailable."""
    with planted(target.backend, fault):
        plans: Plans = backend_module(target.backend).make_plans(
            subject.model, subject.resolved(target)
        )
    return plans


def start_worker(
    subject: Subject, target: Target, config: ResolvedConfig, pages: int, table: Table,
    fault: Fault | None = None,
) -> Worker:  # fmt: skip
    """A worker that is loaded and compiled for the programs of `table`, with a cache of so many
    pages. One whose start fails is closed. Raises ModelError, BackendUnavailable.
    """
    device = backend_module(target.backend).find_device(target.device)
    with planted(target.backend, fault), faulty_checkpoint(subject, fault) as held:
        config = replace(config, load_format=held.load_format)
        worker = create_worker(subject.model, config, device, held.folder)
        try:
            worker.load(silent)
            worker.allocate_kv(pages)
            worker.warm_up(table, silent)
        except BaseException:
            # What it failed of is told, not what may come of that here.
            with suppress(Exception):
                worker.close()
            raise
    return worker


class WorkerSide:
    """A `Side` that runs a worker on some steps, in order."""

    def __init__(
        self, subject: Subject, target: Target, steps: Sequence[StepInput],
        fault: Fault | None = None,
    ) -> None:  # fmt: skip
        """Raises ConfigError, ModelError, BackendUnavailable."""
        self.target, self._shapes = target, {step.descriptor for step in steps}
        self._pages, self._layout = pages_of(steps), subject.layout
        self._ops: dict[str, PlannedOps] = {}
        self.config = subject.resolved(target, steps, DEMAND)
        self.device = backend_module(target.backend).find_device(target.device)
        if target.backend == "jax":
            # Of a rounding that is left out between ops, ops by themselves say nothing.
            backend_module("jax", "compilation").check_rounding(self.device)
        with planted(target.backend, fault):
            self.spec = decoder.model_of(subject.model)
        self._sources = sources_of(subject.model)
        # The last page is scratch.
        given = subject, target, self.config, self._pages - 1, self._table()
        self._worker: Any = start_worker(*given, fault)
        self.plans = self._worker.plans()

    def _table(self) -> Table:
        """The programs that the steps need, and no others. Torch builds all that it has."""
        if self.target.backend == "torch":
            return self.config.table()
        sizes = {
            kind: tuple(sorted({d.tokens for d in self._shapes if d.kind == kind}))
            for kind in ("decode", "mixed")
        }
        return Table(sizes["decode"], sizes["mixed"], self.config.max_num_seqs)

    def begin(self, start: Sequence[np.ndarray]) -> None:
        for layer, cache in enumerate(start):
            if self._sources[layer] == layer:
                self._worker.write_pages(layer, range(len(cache)), cache)
        self._buffers = self._own = list(start)

    def execute(self, step: StepInput) -> Executed:
        held, before = self._buffers, self._own
        # What is sampled changes nothing here, and a sampler more is a program more.
        plain = replace(
            step, sampler="greedy", logprobs=False, processors=None, prompt_targets=None,
            waiting=None,
        )  # fmt: skip
        output = self._worker.execute(plain).result()
        page_tables = np.array(self._worker.read_page_tables())
        pages = range(self._pages)
        found = {source: self._worker.read_pages(source, pages) for source in set(self._sources)}
        self._buffers = [found[source] for source in self._sources]
        self._own = after = [
            own_cache(step, self._layout, layer, *caches)
            for layer, caches in enumerate(zip(before, held, self._buffers, strict=True))
        ]
        # Written once more, the cache stays as it is.
        logits = np.asarray(self._worker.logits(plain))[: real_tokens(step)]
        streams = output.streams[0]
        rows = finished_rows(step, streams[-1])
        greedy = sampling_field(step, "greedy")[: int(step.field("counts")[1])]
        tokens = output.tokens if step.sampler not in PROCESSING and greedy.all() else None
        return Executed(
            step, streams, before, after, logits, rows, tokens, page_tables
        )  # fmt: skip

    def read_weights(self, layer: int) -> Mapping[str, np.ndarray]:
        return self._worker.read_weights(layer)

    def read_tables(self) -> tuple[np.ndarray, np.ndarray]:
        return self._worker.read_tables()

    def taps(
        self, kind: str, program: Program, calls: Sequence[Call], patterns: Sequence[str]
    ) -> Iterator[Tap]:
        plan, by_key = (
            plan_of(self.plans, self.spec, kind, program),
            {call.key: call for call in calls},
        )
        for declared in declare(calls, plan, patterns):
            if declared.kept:
                arguments = by_key[declared.key].arguments
                kept = {name: arguments[name] for name in declared.arguments}
                yield declared, kept, self.run_op(plan, declared.op, arguments)

    def run_op(self, plan: Plan, op: str, arguments: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        """The outputs of one op as a plan of the worker has it."""
        if plan.hash not in self._ops:
            self._ops[plan.hash] = PlannedOps(self.target.backend, plan, self.device.platform)
        return self._ops[plan.hash](op, arguments)

    def close(self) -> None:
        self._worker.close()
        self._ops.clear()


@contextmanager
def open_sides(
    subject: Subject, targets: Mapping[str, Target], steps: Sequence[StepInput],
    faults: Mapping[str, Fault] | None = None, progress: Progress = lambda text: None,
) -> Iterator[dict[str, WorkerSide]]:  # fmt: skip
    """Workers of `targets` by name, which are closed behind the block. `faults` by the first letter
    of a name. Raises as WorkerSide.
    """
    sides: dict[str, WorkerSide] = {}
    try:
        for name, target in targets.items():
            progress(f"loading {target}")
            sides[name] = WorkerSide(subject, target, steps, (faults or {}).get(name[0]))
        yield sides
    finally:
        for side in sides.values():
            side.close()
