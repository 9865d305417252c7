"""Replays a bundle: what it recorded is one side of a comparison, and backends that run the same
steps are the others.

*Local*: each layer of each side is judged on what it was given in that side's run, so that an op of
the recorded side is judged on what it really got. *Inherited*: the runs as a whole. A bundle from a
live engine has no ops and no logits: its layers, its tokens and their log-probabilities are judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...shared.config import DeviceInfo
from ...shared.errors import ConfigError
from ...shared.models import decoder
from ...shared.models.spec import Layer, Model
from ...shared.step import StepInput
from ..bundles.bundle import Bundle, arrays_of
from ..bundles.capturing import LOGPROBS, with_rows
from ..errors import NotComparable
from ..judging.diff import Diff
from ..judging.gates import mode_of
from ..judging.served import judge_row, judge_rows
from ..progress import Progress, silent
from ..sides.fault import Fault
from ..sides.sampling import sampled_rows
from ..sides.side import (
    Executed,
    Program,
    Side,
    Tap,
    finished_rows,
    open_sides,
    plan_of,
)
from ..sides.steps import groups_of, where, written_slots
from ..sides.subject import HostWeights, Target, name_sides
from ..sides.taps import Call, declare
from .model import Comparison

RECORDED = "recorded"
CACHES = "kv_in", "kv_out"
"""Names of a layer's cache before and after a step among the arrays of taps."""


class RecordedPlan:
    """The implementations of one kind of program, by name."""

    def __init__(self, providers: Mapping[str, str]) -> None:
        self.choices = {
            op: SimpleNamespace(provider=str(provider)) for op, provider in providers.items()
        }

    def __getitem__(self, op: str) -> Any:
        if op not in self.choices:
            raise NotComparable(f"the bundle does not say which implementation of {op} ran")
        return self.choices[op]


class RecordedPlans:
    """What a recorded side's plans were. A bundle that does not name those of layers has one for
    all of them.
    """

    def __init__(self, source: Mapping[str, Any], model: Model) -> None:
        self.hash = str(source.get("plan", ""))
        kinds = source.get("implementations")
        if not isinstance(kinds, dict) or not all(
            isinstance(entry, dict) for entry in kinds.values()
        ):
            raise NotComparable("the bundle's source names no implementations")
        self.by_kind = {kind: RecordedPlan(providers) for kind, providers in kinds.items()}
        self._kinds, self._titles = model.kinds, source.get("layer_plans", {})
        lists = self._titles.values() if isinstance(self._titles, dict) else [None]
        if not all(self._names_plans(titles) for titles in lists):
            raise NotComparable(
                f"the bundle's source must name a plan for each of {len(self._kinds)} kinds of "
                "layers"
            )

    def _names_plans(self, titles: Any) -> bool:
        """Whether this is a name for each kind of layer."""
        is_list = isinstance(titles, list) and len(titles) == len(self._kinds)
        return is_list and all(isinstance(title, str) for title in titles)

    def __getitem__(self, kind: str) -> RecordedPlan:
        if kind not in self.by_kind:
            raise NotComparable(f"the bundle's source names no implementations for {kind} steps")
        return self.by_kind[kind]

    def of(self, kind: str, layer: Layer) -> RecordedPlan:
        """The plan of a kind of layer in a kind of program."""
        titles = self._titles.get(kind)
        return self[kind] if titles is None else self[titles[self._kinds.index(layer)]]

    def titled(self) -> list[tuple[str, RecordedPlan]]:
        """The plans under their names, as `Plans` has it."""
        return list(self.by_kind.items())

    def layer_titles(self) -> dict[str, list[str]]:
        """By kind of program, the name of the plan of each kind of layer."""
        return dict(self._titles)


class Recording:
    """A `Side` that computes nothing: it gives what was recorded."""

    def __init__(self, bundle: Bundle) -> None:
        self.target: Any = bundle.name
        platform, _, name = str(bundle.source.get("device", "? ?")).partition(" ")
        self.device = DeviceInfo(platform, name, 0)
        self.spec = decoder.model_of(bundle.subject.model)
        self.plans: Any = RecordedPlans(bundle.source, self.spec)
        self._weights = HostWeights(bundle.subject)
        self._groups = groups_of(bundle.subject)
        self._by_id = {id(recorded.step): recorded for recorded in bundle.steps}

    def begin(self, start: Sequence[np.ndarray]) -> None:
        """Start with the cache as it was."""
        self._cache = list(start)

    def execute(self, step: StepInput) -> Executed:
        """A step of the bundle. Raises NotComparable if something of it is not there."""
        self._step = self._by_id[id(step)]
        before, layers = self._cache, range(len(self._cache))
        self._cache = [self._after(layer, before[layer]) for layer in layers]
        self._caches = [dict(zip(CACHES, pair)) for pair in zip(before, self._cache)]  # noqa: B905
        hidden = self.array("embed.hidden")
        passed = [(hidden, np.zeros_like(hidden))]
        for layer in layers:
            name = f"layer.{layer}"
            passed.append((self.array(f"{name}.hidden"), self.array(f"{name}.residual")))
        streams = np.stack([np.stack(stream) for stream in passed])
        rows = finished_rows(step, streams[-1])
        return Executed(step, streams, before, self._cache, self._step.arrays.get("logits"), rows)

    def read_weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """The model's: the bundle's fingerprint vouches for them."""
        return self._weights.top() if layer < 0 else self._weights.layer(layer)

    def read_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Those of the definition: a bundle has none."""
        return self._weights.subject.rotary_tables()

    def array(self, name: str) -> np.ndarray:
        """A recorded array of the step. Raises NotComparable."""
        arrays = self._step.arrays
        if name not in arrays:
            raise NotComparable(
                f"the bundle lacks {name} of step {self._step.step.step_id}; it has "
                f"{arrays_of(arrays)}"
            )
        return arrays[name]

    def _after(self, index: int, before: np.ndarray) -> np.ndarray:
        """The cache of a layer after the step, which began with `before`."""
        whole = self._step.arrays.get(f"layer.{index}.kv")
        if whole is not None:
            return whole
        slots = written_slots(self._step.step, self._groups[index])
        rows = self.array(f"layer.{index}.kv_rows")
        if rows.shape != (len(slots), *before.shape[2:]):
            raise NotComparable(
                f"layer.{index}.kv_rows is {list(rows.shape)}, the step writes {len(slots)} slots"
            )
        return with_rows(before, slots, rows.astype(before.dtype))

    def taps(
        self, kind: str, program: Program, calls: Sequence[Call], patterns: Sequence[str]
    ) -> Iterator[Tap]:
        """As recorded, whatever the calls are given."""
        name, caches = str(program), dict[str, np.ndarray]()
        if isinstance(program, int):
            name, caches = f"layer.{program}", self._caches[program]
        kept = {entry["key"]: entry for entry in self._step.taps.get(name, [])}

        def value(place: str, array: str) -> np.ndarray:
            if place and place not in caches:
                raise NotComparable(f"the bundle has no array {place} for {array}")
            return caches[place] if place else self.array(array)

        for tap in declare(calls, plan_of(self.plans, self.spec, kind, program), patterns):
            entry = kept.get(tap.key)
            if entry is None or not tap.kept:
                continue
            key = f"{name}/{tap.key}"
            arguments = {a: value(place, f"{key}<{a}") for a, place in entry["arguments"].items()}
            outputs = tuple(value(p, f"{key}>{i}") for i, p in enumerate(entry["outputs"]))
            yield tap, arguments, outputs

    def close(self) -> None:
        """Nothing to free."""


class FromStart(Comparison):
    """A comparison that starts with the recorded cache. The ends that were recorded are judged
    beside the others.
    """

    def __init__(self, bundle: Bundle, sides: Mapping[str, Side]) -> None:
        mode = mode_of(bundle.subject.dtype)
        super().__init__(bundle.subject, sides, mode, start=bundle.start)
        self._recorded = {id(recorded.step): recorded for recorded in bundle.steps}
        self.name = f"{RECORDED} {bundle.name}"

    def _logits(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        super()._logits(exact, faithful)
        arrays = self._recorded[id(self.step)].arrays
        # What the recorded engine did behind the layers is in nothing else.
        if "tokens" in arrays:
            stream = next((x.ran.given_end() for x in self.sides if x.name == self.name), None)
            self._tokens(self.name, arrays["tokens"], exact, faithful, stream)
        if set(LOGPROBS) <= set(arrays):
            self._logprobs(arrays, exact, faithful)

    def _logprobs(
        self, arrays: Mapping[str, np.ndarray], exact: np.ndarray, faithful: np.ndarray
    ) -> None:
        """Judge the log-probabilities that a step served."""
        ids, values, chosen = (arrays[name] for name in LOGPROBS)
        rows = []
        for request, row in sampled_rows(self.step):
            served = {int(arrays["tokens"][request]): float(chosen[request])}
            served |= zip(ids[request].tolist(), values[request].tolist(), strict=True)
            place = f"step {self.step.step_id}, {where(self.step, row)}"
            rows.append(judge_row(place, exact[row], faithful[row], served, None, None))
        found = judge_rows(
            rows, self.gates, 0, side=self.name, run=RECORDED, streams=(), requests=len(rows),
            steps={}, preemptions=0, cached=0,
        )  # fmt: skip
        self.diff.problems += [f"{self.name}: {text}" for text in found.complaints]


def replay(
    bundle: Bundle, targets: Sequence[Target], *, faults: Mapping[str, Fault] | None = None,
    progress: Progress = silent,
) -> Diff:  # fmt: skip
    """Run a bundle's steps on `targets` and judge them and what was recorded. `faults` by target's
    place, a, b, ...

    Raises ConfigError without a target, NotComparable if the bundle lacks something.
    """
    if not targets:
        raise ConfigError("on: got no target, at least one is needed")
    recorded: dict[str, Side] = {f"{RECORDED} {bundle.name}": Recording(bundle)}
    with open_sides(bundle.subject, name_sides(targets), bundle.inputs, faults, progress) as sides:
        diff = FromStart(bundle, recorded | sides).run(bundle.inputs, progress)
    diff.environment["bundle"] = {"source": bundle.source, "steps": len(bundle.steps)}
    return diff
