"""Replays a bundle: what it recorded is one side of a comparison, and backends that run the same
steps are the others.

*Local*: each layer gets the inputs that it had in the recorded run, and so do both references; so
an op of the recorded side is judged on what it really got, and the other side shows whether it does
better with the same. *Inherited*: the runs as a whole. A bundle from a live engine has the cache
and the ends of its steps only; its layers are then judged on the exact reference's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...shared.config import DeviceInfo
from ...shared.errors import ConfigError
from ...shared.models import decoder
from ...shared.models.spec import Layer, Model
from ...shared.step import PROCESSING, StepInput
from ..bundles.bundle import Bundle, arrays_of
from ..bundles.capturing import with_rows
from ..bundles.steps import Recorded
from ..errors import NotComparable
from ..judging.diff import Diff, Finding
from ..judging.gates import Mode
from ..judging.logits_metrics import compare_logits
from ..judging.metrics import measure
from ..judging.outputs import gate_for
from ..judging.served import judge_row
from ..sides.reference import State
from ..sides.runners import Fault, Program, Runner, TapValues, create_runner
from ..sides.sampling import chooser_of, sampled_rows, sampling_field
from ..sides.steps import where
from ..sides.subject import HostWeights, Target
from ..sides.taps import Declared
from .model import Comparison

Progress = Callable[[str], None]
RECORDED = "recorded"


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
    """A `Runner` that computes nothing: it gives what was recorded, whatever it is given."""

    def __init__(self, bundle: Bundle) -> None:
        self.target: Any = bundle.name
        platform, _, name = str(bundle.source.get("device", "? ?")).partition(" ")
        self.device = DeviceInfo(platform, name, 0)
        self.spec = decoder.model_of(bundle.subject.model)
        self.plans: Any = RecordedPlans(bundle.source, self.spec)
        self.config: Any = None
        self._bundle = bundle
        self._weights = HostWeights(bundle.subject)
        self._by_id = {id(recorded.step): recorded for recorded in bundle.steps}

    def allocate(self, pages: int) -> None:
        """Start with the cache as it was."""
        c, subject = self._bundle.subject.model, self._bundle.subject
        self._shape = (pages, subject.page_size, 2 * c.num_kv_heads, c.head_dim)
        self._caches: dict[int, np.ndarray] = {}

    def prepare(self, step: StepInput, taps: Mapping[Program, Sequence[Declared]]) -> None:
        """Remember which taps are asked for."""
        self._declared = taps

    def begin(self, step: StepInput) -> None:
        """Take a step of the bundle."""
        self.step: Recorded = self._by_id[id(step)]
        self._before = dict(self._caches)

    def upload(self, x: np.ndarray) -> np.ndarray:
        """The array."""
        return x

    def download(self, x: np.ndarray) -> np.ndarray:
        """The array."""
        return x

    def weights(self, layer: int) -> Mapping[str, np.ndarray]:
        """The model's: the bundle's fingerprint vouches for them."""
        return self._weights.top() if layer < 0 else self._weights.layer(layer)

    def array(self, name: str) -> np.ndarray:
        """A recorded array of the step. Raises NotComparable."""
        arrays = self.step.arrays
        if name not in arrays:
            raise NotComparable(
                f"the bundle lacks {name} of step {self.step.step.step_id}; it has "
                f"{arrays_of(arrays)}"
            )
        return arrays[name]

    def before(self, index: int, empty: np.ndarray) -> np.ndarray:
        """The cache of a layer before the step, on top of `empty` at the start."""
        return self._before.get(index, empty)

    def after(self, index: int, before: np.ndarray) -> np.ndarray:
        """The cache of a layer after the step, which began with `before`."""
        whole = self.step.arrays.get(f"layer.{index}.kv")
        if whole is not None:
            return whole
        slots = self.step.step.field("slots")
        slots, rows = slots[slots >= 0], self.array(f"layer.{index}.kv_rows")
        if rows.shape != (len(slots), *before.shape[2:]):
            raise NotComparable(
                f"layer.{index}.kv_rows is {list(rows.shape)}, the step writes {len(slots)} slots"
            )
        return with_rows(before, slots, rows.astype(before.dtype))

    def embed(self) -> tuple[Any, TapValues]:
        """As recorded."""
        return self.array("embed.hidden"), self._taps("embed", "embed", {})

    def layer(self, index: int, hidden: Any, residual: Any, kv: Any) -> tuple[Any, TapValues]:
        """As recorded; `kv` is the cache before the step, at the first step whatever is given."""
        before = self._before.setdefault(index, kv)
        after = self._caches[index] = self.after(index, before)
        name = f"layer.{index}"
        state = self.array(f"{name}.hidden"), self.array(f"{name}.residual"), after
        return state, self._taps(name, self.spec.layers[index], {"kv_in": before, "kv_out": after})

    def finish(self, hidden: Any, residual: Any) -> tuple[Any, TapValues]:
        """As recorded."""
        return self.array("finish.rows"), self._taps("finish", "finish", {})

    def head(self, rows: Any) -> tuple[Any, TapValues]:
        """As recorded, padding rows as zeros."""
        logits = self.array("logits")
        out = np.zeros((self.step.step.descriptor.tokens, *logits.shape[1:]), logits.dtype)
        out[: len(logits)] = logits
        return out, self._taps("head", "head", {})

    def close(self) -> None:
        """Nothing to free."""

    def _taps(self, name: str, program: Program, caches: Mapping[str, np.ndarray]) -> TapValues:
        kept = {entry["key"]: entry for entry in self.step.taps.get(name, [])}

        def value(place: str, array: str) -> np.ndarray:
            if place and place not in caches:
                raise NotComparable(f"the bundle has no array {place} for {array}")
            return caches[place] if place else self.array(array)

        found: list[Any] = []
        for tap in self._declared[program]:
            entry = kept.get(tap.key)
            if entry is None:
                found.append(None)
                continue
            key = f"{name}/{tap.key}"
            arguments = {a: value(place, f"{key}<{a}") for a, place in entry["arguments"].items()}
            found.append(
                (arguments, tuple(value(p, f"{key}>{i}") for i, p in enumerate(entry["outputs"])))
            )
        return found


class _FromStart(Comparison):
    """A comparison that starts with the recorded cache. The ends that were recorded are judged
    beside the others.
    """

    def __init__(self, bundle: Bundle, runners: Mapping[str, Runner], mode: Mode) -> None:
        super().__init__(bundle.subject, runners, mode)
        self._bundle = bundle
        self._recorded = {id(recorded.step): recorded for recorded in bundle.steps}
        self.name = f"{RECORDED} {bundle.name}"

    def start(self, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """The recorded cache, if there is one."""
        start = super().start(shapes)
        for index, given in enumerate(() if self._bundle.start is None else self._bundle.start):
            start[index] = start[index].copy()
            start[index][: len(given)] = given.astype(self.dtype)
        return start

    def _logits(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        super()._logits(exact, faithful)
        self._tokens(exact, faithful)
        logits = self._recorded[id(self.step)].arrays.get("logits")
        if logits is None or self.name in self.diff.sides:
            return
        if logits.shape != exact[: self.real].shape:
            raise NotComparable(
                f"logits are {list(logits.shape)}, must be {list(exact[: self.real].shape)}"
            )
        right, noisy = exact[: self.real], faithful[: self.real]
        metrics = measure(logits, right, noisy)
        complaints = tuple(
            gate_for(
                self.mode, "logits", metrics, self.reduction, self.model.num_layers
            ).complaints(metrics)
        )
        place = where(self.step, metrics.worst[0]) if metrics.worst else ""
        self.diff.findings.append(
            Finding(
                self.name,
                self.mode,
                "logits",
                self.number,
                -1,
                "final logits",
                "",
                metrics,
                complaints,
                None,
                place,
            )
        )
        for side in self.sides:
            got = side.logits[: self.real]
            self.diff.logits.append(compare_logits(logits, got, right, noisy, self.step, self.mode))

    def _tokens(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        """Judge the tokens that the recorded engine served, if they are there: what it did behind
        the layers is in nothing else.
        """
        step = self.step
        tokens = self._recorded[id(step)].arrays.get("tokens")
        if tokens is None:
            return
        if step.sampler in PROCESSING:
            self.diff.notes.append(
                f"step {step.step_id}: tokens with penalties, bias or masks are not judged"
            )
            return
        for request, row in sampled_rows(step):
            token = int(tokens[request])
            place = f"step {step.step_id}, {where(step, row)}"
            if token < 0:
                self.diff.problems.append(f"{self.name}: {place}: a logit was not finite")
                continue
            choose = chooser_of(step, request)
            greedy = bool(sampling_field(step, "greedy")[request])
            judged = judge_row(place, exact[row], faithful[row], {}, token, choose, greedy)
            if judged.flip is not None and not judged.flip.tie:
                flip = judged.flip
                self.diff.problems.append(
                    f"{self.name}: {place}: token {flip.a} was served, {flip.b} is that of the "
                    f"logits, by a margin of {flip.margin:.3g} nats and noise of {flip.noise:.3g}"
                )


class Replayed(_FromStart):
    """A comparison whose local runs get what the recorded run had."""

    def __init__(
        self, bundle: Bundle, recording: Recording, runners: Mapping[str, Any], mode: Mode
    ) -> None:
        super().__init__(bundle, runners, mode)
        self._recording = recording

    def start(self, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """The recorded cache, if there is one."""
        self._empty = super().start(shapes)
        return self._empty

    def given(self, index: int, cache: np.ndarray) -> State:
        """What the layer had in the recorded run."""
        return *self._state(index), self._recording.before(index, self._empty[index])

    def given_end(self) -> tuple[np.ndarray, np.ndarray]:
        """What the final norm had in the recorded run."""
        return self._state(self.model.num_layers)

    def given_rows(self, exact: np.ndarray) -> np.ndarray:
        """What the head had in the recorded run."""
        return self._recording.array("finish.rows")

    def _state(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """hidden and residual before a layer."""
        array, name = self._recording.array, f"layer.{index - 1}"
        if index:
            return array(f"{name}.hidden"), array(f"{name}.residual")
        hidden = array("embed.hidden")
        return hidden, np.zeros_like(hidden)


def replay(
    bundle: Bundle, targets: Sequence[Target], *, faults: Mapping[str, Fault] | None = None,
    progress: Progress = lambda text: None,
) -> Diff:  # fmt: skip
    """Run a bundle's steps on `targets` and judge them and what was recorded. `faults` by target's
    place, a, b, ...

    Raises ConfigError without a target, NotComparable if the bundle lacks something.
    """
    if not targets:
        raise ConfigError("on: got no target, at least one is needed")
    subject = bundle.subject
    mode: Mode = "S" if subject.dtype == "float32" else "P"
    runners: dict[str, Any] = {}  # a `Recording` does what a `Runner` does
    layers = all(
        f"layer.{i}.hidden" in r.arrays
        for r in bundle.steps
        for i in range(subject.model.num_layers)
    )
    try:
        recording = Recording(bundle) if layers else None
        if recording is not None:
            runners[f"{RECORDED} {bundle.name}"] = recording
        for index, target in enumerate(targets):
            name = chr(ord("a") + index)
            progress(f"loading {target}")
            runners[f"{name} {target}"] = create_runner(subject, target, (faults or {}).get(name))
        comparison: _FromStart
        if recording is not None:
            comparison = Replayed(bundle, recording, runners, mode)
        else:
            comparison = _FromStart(bundle, runners, mode)
        diff = comparison.run(bundle.inputs, progress)
    finally:
        for runner in runners.values():
            runner.close()
    if not layers:
        diff.notes.append(f"{comparison.name}: only its logits were recorded")
        diff.sides = (comparison.name, *diff.sides)
        diff.environment["sides"][comparison.name] = bundle.source
    diff.environment["bundle"] = {"source": bundle.source, "steps": len(bundle.steps)}
    return diff
