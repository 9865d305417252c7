"""Captures a run of a model on one backend: each step as its worker executed it, what went in and
out of every layer, and the ops of the layers, each run on what it was given there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...shared.step import StepInput
from ..errors import NotComparable
from ..progress import Progress, silent
from ..sides.environment import describe_side
from ..sides.fault import Fault
from ..sides.reference import reference_of
from ..sides.side import Executed, Tap, WorkerSide, open_sides
from ..sides.steps import empty_caches, groups_of, written_slots
from ..sides.subject import HostWeights, Subject, Target, check_recordable
from .bundle import Bundle
from .steps import Recorded

LOGPROBS = "logprobs.ids", "logprobs.values", "logprobs.chosen"
"""Names of the best tokens [request, 20] of a step that served log-probabilities, of theirs, and of
those of the tokens that it sampled [request].
"""


def capture_model(
    subject: Subject, target: Target, steps: Sequence[StepInput], *, taps: Sequence[str] = ("*",),
    fault: Fault | None = None, progress: Progress = silent,
) -> Bundle:  # fmt: skip
    """Run `steps` on `target` and keep what came out; `taps` are patterns of op calls, none for
    layers only.

    Raises NotComparable if there are no steps.
    """
    if not steps:
        raise NotComparable("there are no steps to capture")
    check_recordable(subject, "a bundle")
    groups, recorded = groups_of(subject), list[Recorded]()
    with open_sides(subject, {"a": target}, steps, {"a": fault} if fault else None) as sides:
        side, ops = sides["a"], _Ops(subject, taps)
        side.begin(empty_caches(subject, steps))
        for number, step in enumerate(steps):
            progress(f"step {number + 1} of {len(steps)}, {step.descriptor}")
            ran, found = side.execute(step), Recorded(step)
            keep_layers(found, ran.streams, ran.before, ran.after, groups)
            if ran.logits is not None:
                found.arrays["logits"] = ran.logits
            if taps:
                ops.keep(found, side, ran)
            recorded.append(found)
        return Bundle(subject, recorded, describe_side(side.target, side.device, side.plans))


class _Ops:
    """Keeps what ops give. The reference says which are called, and on what."""

    def __init__(self, subject: Subject, taps: Sequence[str]) -> None:
        self._taps, self._weights = tuple(taps), HostWeights(subject)
        self._reference = reference_of(subject, exact=False)

    def keep(self, found: Recorded, side: WorkerSide, ran: Executed) -> None:
        kind, weights = ran.step.descriptor.kind, self._weights
        self._reference.begin(ran.step)
        for program, calls in self._reference.traced(
            weights.top(), weights.layer, range(len(ran.before)),
            lambda index, hidden: ran.given(index, index), ran.given_end(),
        ):  # fmt: skip
            name, caches = program, None
            if isinstance(program, int):
                name = f"layer.{program}"
                caches = {"kv_in": ran.before[program], "kv_out": ran.after[program]}
            keep_taps(found, str(name), side.taps(kind, program, calls, self._taps), caches)


def keep_layers(
    found: Recorded, streams: np.ndarray, before: Sequence[np.ndarray],
    after: Sequence[np.ndarray], groups: Sequence[int],
) -> None:  # fmt: skip
    """Keep `streams` [layer + 1, 2, tok, dim], before the layers and behind each, and the rows that
    each layer, of a page group each, wrote to its cache; if it wrote anywhere else, the whole
    cache.
    """
    found.arrays["embed.hidden"] = streams[0, 0]
    for index, (hidden, residual) in enumerate(streams[1:]):
        name, cache = f"layer.{index}", after[index]
        slots = written_slots(found.step, groups[index])
        rows = cache.reshape(-1, *cache.shape[2:])[slots]
        is_all = same(with_rows(before[index], slots, rows), cache)
        kept = {f"{name}.kv_rows": rows} if is_all else {f"{name}.kv": cache}
        found.arrays |= {f"{name}.hidden": hidden, f"{name}.residual": residual} | kept


def with_rows(cache: np.ndarray, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A cache [page slot ...] with `rows` written at `slots`."""
    out = cache.copy()
    out.reshape(-1, *cache.shape[2:])[slots] = rows
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two caches have equal bits but for the last slot, which is scratch."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = (
        np.ascontiguousarray(x.reshape(-1, *x.shape[2:])[:-1]).view(np.uint8) for x in (a, b)
    )
    return bool(np.array_equal(left, right))


def keep_taps(
    found: Recorded, program: str, taps: Iterable[Tap],
    caches: dict[str, np.ndarray] | None = None,
) -> None:  # fmt: skip
    """Keep the taps of a program. What is a whole cache of its layer is only named."""

    def keep(name: str, value: np.ndarray) -> str:
        if value.ndim == 4:
            for place, cache in (caches or {}).items():
                if same(value, cache):
                    return place
        found.arrays[name] = value
        return ""

    entries: list[dict[str, Any]] = []
    for tap, kept, outputs in taps:
        name = f"{program}/{tap.key}"
        entries.append(
            {
                "op": tap.op,
                "key": tap.key,
                "arguments": {
                    argument: keep(f"{name}<{argument}", x) for argument, x in kept.items()
                },
                "outputs": [keep(f"{name}>{i}", x) for i, x in enumerate(outputs)],
            }
        )
    if entries:
        found.taps[program] = entries
