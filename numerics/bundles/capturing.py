"""Captures a run of a model on one backend: each step, what every layer gave, and the taps of
its ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...shared.models import decoder
from ...shared.step import StepInput
from ..errors import NotComparable
from ..sides.environment import describe_side
from ..sides.passes import run_stepwise
from ..sides.reference import Reference, storage_dtype
from ..sides.runners import Fault, Runner, TapValues, create_runner
from ..sides.steps import pages_of, real_tokens
from ..sides.subject import HostWeights, Subject, Target, check_recordable
from ..sides.taps import Declared
from ..sides.tracing import declare_programs, traced
from .bundle import Bundle
from .steps import Recorded

Progress = Callable[[str], None]


def capture_model(
    subject: Subject, target: Target, steps: Sequence[StepInput], *, taps: Sequence[str] = ("*",),
    fault: Fault | None = None, progress: Progress = lambda text: None,
) -> Bundle:  # fmt: skip
    """Run `steps` on `target` and keep what came out; `taps` are patterns of op calls, none for
    layers only.

    Raises NotComparable if there are no steps.
    """
    if not steps:
        raise NotComparable("there are no steps to capture")
    check_recordable(subject, "a bundle")
    runner = create_runner(subject, target, fault)
    try:
        camera = _Camera(subject, runner, pages_of(steps), taps)
        recorded = []
        for number, step in enumerate(steps):
            progress(f"step {number + 1} of {len(steps)}, {step.descriptor}")
            recorded.append(camera.take(step))
        return Bundle(subject, recorded, describe_side(runner.target, runner.device, runner.plans))
    finally:
        runner.close()


class _Camera:
    """Runs steps one after the other, each on the cache that the one before left."""

    def __init__(self, subject: Subject, runner: Runner, pages: int, taps: Sequence[str]) -> None:
        self._runner, self._taps, self._model = runner, tuple(taps), subject.model
        self._weights = HostWeights(subject)
        self._tracer = Reference(
            self._model, decoder.rotary_tables(self._model, subject.max_model_len), exact=True
        )
        c = self._model
        empty = np.full(
            (pages, subject.page_size, 2 * c.num_kv_heads, c.head_dim),
            np.nan,
            storage_dtype(subject.dtype),
        )
        runner.allocate(pages)
        self._host = [empty] * c.num_layers
        self._kv = [runner.upload(empty) for _ in range(c.num_layers)]

    def take(self, step: StepInput) -> Recorded:
        """Run one step."""
        runner, found = self._runner, Recorded(step)
        self._tracer.begin(step)
        calls = traced(self._tracer, self._weights, self._host)
        declared = declare_programs(calls, runner.plans, step.descriptor.kind, self._taps)
        runner.prepare(step, declared)
        runner.begin(step)

        def start() -> tuple[Any, Any]:
            hidden, taps = runner.embed()
            found.arrays["embed.hidden"] = runner.download(hidden)
            keep_taps(found, "embed", declared["embed"], taps)
            return hidden, runner.upload(np.zeros_like(found.arrays["embed.hidden"]))

        def layer(index: int, stream: tuple[Any, Any], cache: Any) -> tuple[tuple[Any, Any], Any]:
            name, before = f"layer.{index}", self._host[index]
            (hidden, residual, cache), taps = runner.layer(index, *stream, cache)
            after = runner.download(cache)
            found.arrays |= {
                f"{name}.hidden": runner.download(hidden),
                f"{name}.residual": runner.download(residual),
            }
            keep_cache(found, name, before, after)
            keep_taps(
                found,
                name,
                declared[runner.spec.layers[index]],
                taps,
                {"kv_in": before, "kv_out": after},
            )
            self._host[index] = after
            return (hidden, residual), cache

        def end(stream: tuple[Any, Any]) -> Any:
            rows, taps = runner.finish(*stream)
            found.arrays["finish.rows"] = runner.download(rows)
            keep_taps(found, "finish", declared["finish"], taps)
            return rows

        rows, self._kv = run_stepwise(start, layer, end, self._kv)
        logits, taps = runner.head(rows)
        found.arrays["logits"] = runner.download(logits)[: real_tokens(step)]
        keep_taps(found, "head", declared["head"], taps)
        return found


def keep_cache(found: Recorded, name: str, before: np.ndarray, after: np.ndarray) -> None:
    """Keep the rows that a layer wrote; if it wrote anywhere else, the whole cache."""
    slots = found.step.field("slots")
    slots = slots[slots >= 0]
    rows = after.reshape(-1, *after.shape[2:])[slots]
    if same(with_rows(before, slots, rows), after):
        found.arrays[f"{name}.kv_rows"] = rows
    else:
        found.arrays[f"{name}.kv"] = after


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
    found: Recorded, program: str, declared: Sequence[Declared], taps: TapValues,
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
    for tap, values in zip(declared, taps, strict=True):
        if values is None:
            continue
        kept, outputs = values
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
