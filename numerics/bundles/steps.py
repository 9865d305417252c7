"""Steps in a bundle: as JSON and back, checked; and on a cache that holds their own pages only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ...bucketing import Descriptor
from ...shared.page_groups import PageGroup
from ...shared.step import (
    SAMPLERS,
    Layout,
    StepInput,
    StepShape,
    batch_layout,
    histories_shape,
    processor_layout,
    sampling_layout,
    with_all_entries,
)
from ..errors import NotComparable
from ..sides.steps import by_group, held_entries
from ..sides.subject import Subject

MAX_SIZE, MAX_BUFFER = 1 << 20, 1 << 28


@dataclass(slots=True)
class Recorded:
    """A step, the arrays that it brought, and the taps of its ops by program (`embed`, `layer.3`,
    ...).

    A tap is {"op", "key", "arguments": {name: place}, "outputs": [place]}; a place is "" for an
    array of its own, `kv_in` or `kv_out`.
    """

    step: StepInput
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    taps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def to_json(recorded: Recorded) -> dict[str, Any]:
    """A step, which has its page table, and its taps, fit for JSON."""
    step = recorded.step
    d, shape = step.descriptor, step.shape
    return {
        "step_id": step.step_id,
        "descriptor": [d.kind, d.tokens, d.requests, d.max_query_len],
        "shape": [getattr(shape, f.name) for f in fields(StepShape)],
        "sampler": step.sampler,
        "logprobs": step.logprobs,
        "batch": _lists(batch_layout(d, shape), step.batch)
        | {"page_table": step.field("page_table").ravel().tolist()},
        "sampling": _lists(sampling_layout(d.requests), step.sampling),
        "processors": None if step.processors is None else _processors(step, step.processors),
        "prompt_targets": None if step.prompt_targets is None else step.prompt_targets.tolist(),
        "taps": recorded.taps,
    }


def _processors(step: StepInput, buffer: np.ndarray) -> dict[str, Any]:
    """With all entries of the tables. The histories [R, H] stand among them: an entry for each
    request that has one, `history_row` says which.
    """
    layout = processor_layout(step.descriptor.requests, step.shape, step.sampler)
    fields_ = _lists(layout, with_all_entries(layout, buffer))
    histories = np.full((step.descriptor.requests, _history_length(step)), -1, np.int32)
    entries = np.full(step.descriptor.requests, -1, np.int32)
    if step.histories is not None:
        histories[: len(step.histories)] = step.histories
        remembers = layout.view(buffer, "history_row") >= 0
        entries[remembers] = np.arange(len(step.histories))
    return fields_ | {"history_row": entries.tolist(), "histories": histories.ravel().tolist()}


def _history_length(step: StepInput) -> int:
    return histories_shape(step.shape, (step.sampler,))[1]


def _lists(layout: Layout, buffer: np.ndarray) -> dict[str, Any]:
    """Fields by name, flat. Floats as the integers that have their bits: nothing is lost, not
    even a NaN.
    """
    return {
        name: layout.view(buffer, name).view(np.int32).reshape(-1).tolist()
        for name in layout.fields
    }


def from_json(line: Mapping[str, Any], where: str, subject: Subject) -> Recorded:
    """A step from JSON. `where` names the place. Raises NotComparable for what is none, or
    reaches outside.
    """
    numbers = _numbers(line.get("descriptor", [None])[1:], 3, f"{where}: descriptor")
    kind = line["descriptor"][0]
    if kind not in ("decode", "mixed"):
        raise NotComparable(
            f"{where}: descriptor is of kind {str(kind)[:20]!r}, allowed are decode and mixed"
        )
    descriptor = Descriptor(kind, *numbers)
    shape = StepShape(*_numbers(line.get("shape"), len(fields(StepShape)), f"{where}: shape"))
    if shape.vocab_size != subject.model.vocab_size:
        raise NotComparable(
            f"{where}: vocabulary of {shape.vocab_size}, the model has {subject.model.vocab_size}"
        )
    sampler = line.get("sampler")
    if sampler not in SAMPLERS:
        raise NotComparable(
            f"{where}: sampler is {str(sampler)[:20]!r}, allowed are {', '.join(SAMPLERS)}"
        )
    groups = len(subject.layout.groups)
    if shape.num_groups != groups:
        raise NotComparable(
            f"{where}: has {shape.num_groups} page tables a request, the model's layers have "
            f"{groups}"
        )
    batch, page_table = _batch(descriptor, shape, line.get("batch"), f"{where}: batch")
    sampling = _buffer(
        sampling_layout(descriptor.requests), line.get("sampling"), f"{where}: sampling"
    )
    targets = line.get("prompt_targets")
    if targets is not None:
        targets = _integers(targets, descriptor.tokens, f"{where}: prompt_targets")
    step = StepInput(
        int(line.get("step_id", 0)), descriptor, shape, sampler, batch, sampling,
        logprobs=bool(line.get("logprobs")), prompt_targets=targets, page_table=page_table,
    )  # fmt: skip
    if line.get("processors") is not None:
        step = _with_processors(step, line["processors"], f"{where}: processors")
    _check_ranges(step, subject, where)
    taps = line.get("taps", {})
    if not isinstance(taps, dict) or not all(isinstance(entry, list) for entry in taps.values()):
        raise NotComparable(f"{where}: taps must be lists by program")
    return Recorded(step, taps=taps)


def _numbers(value: Any, count: int, where: str) -> list[int]:
    found = _integers(value, count, where).tolist()
    if min(found) < 0 or max(found) > MAX_SIZE:
        raise NotComparable(f"{where} is {found}, allowed are sizes up to {MAX_SIZE}")
    return [int(number) for number in found]


def _integers(value: Any, count: int, where: str) -> np.ndarray:
    """`count` int32 numbers."""
    if not isinstance(value, list) or len(value) != count:
        size = len(value) if isinstance(value, list) else str(value)[:20]
        raise NotComparable(f"{where} has {size} numbers, must have {count}")
    if not all(type(number) is int and -(2**31) <= number < 2**31 for number in value):
        raise NotComparable(f"{where} holds what is no 32-bit integer")
    return np.asarray(value, np.int32)


def _batch(
    descriptor: Descriptor, shape: StepShape, value: Any, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """The buffer of the batch, and the page table [G R, P], which stands among its fields."""
    rows = shape.num_groups * descriptor.requests
    size = rows * shape.pages_per_request
    if size > MAX_BUFFER:
        raise NotComparable(f"{where}: page_table has {size} numbers, allowed are {MAX_BUFFER}")
    fields_ = dict(value) if isinstance(value, dict) else {}
    page_table = _integers(fields_.pop("page_table", None), size, f"{where}: page_table")
    buffer = _buffer(batch_layout(descriptor, shape), fields_, where)
    return buffer, page_table.reshape(rows, shape.pages_per_request)


def _with_processors(step: StepInput, value: Any, where: str) -> StepInput:
    """The step with what `_processors` made of its processors."""
    requests, length = step.descriptor.requests, _history_length(step)
    if requests * length > MAX_BUFFER:
        raise NotComparable(
            f"{where}: histories have {requests * length} numbers, allowed are {MAX_BUFFER}"
        )
    fields_ = dict(value) if isinstance(value, dict) else {}
    kept = _integers(fields_.pop("histories", None), requests * length, f"{where}: histories")
    layout = processor_layout(requests, step.shape, step.sampler)
    buffer = _buffer(layout, fields_, where)
    entries = layout.view(buffer, "history_row")
    if entries.min() < -1 or entries.max() >= requests:
        raise NotComparable(f"{where}: history_row must be -1 to {requests - 1}")
    remembers = np.flatnonzero(entries >= 0)
    histories = kept.reshape(requests, length)[entries[remembers]]
    rows = layout.view(buffer, "rows")[remembers]
    if ((rows < 0) | (rows >= step.shape.max_rows)).any():
        raise NotComparable(f"{where}: rows with a history must be 0 to {step.shape.max_rows - 1}")
    entries[remembers] = rows
    if not length:
        return replace(step, processors=buffer)
    return replace(step, processors=buffer, histories=histories)


def _buffer(layout: Layout, value: Any, where: str) -> np.ndarray:
    if not isinstance(value, dict) or set(value) != set(layout.fields):
        found = ", ".join(sorted(value))[:120] if isinstance(value, dict) else str(value)[:40]
        raise NotComparable(f"{where} has {found}, must have {', '.join(layout.fields)}")
    if layout.size > MAX_BUFFER:
        raise NotComparable(f"{where} has {layout.size} numbers, allowed are {MAX_BUFFER}")
    buffer = layout.allocate()
    for name, field_ in layout.fields.items():
        part = buffer[field_.offset : field_.offset + field_.size]
        part[:] = _integers(value[name], field_.size, f"{where}: {name}")
    return buffer


def _check_ranges(step: StepInput, subject: Subject, where: str) -> None:
    """Nothing may reach outside of the cache, the vocabulary or the tables, whoever wrote the
    numbers.
    """
    d, pages = step.descriptor, subject.num_pages * step.shape.num_groups
    limits = {
        "token_ids": (0, subject.model.vocab_size),
        "positions": (0, subject.max_model_len),
        "slots": (-1, subject.page_size * pages),
        "page_table": (0, pages),
        "query_start": (0, d.tokens + 1),
        "kv_lens": (0, step.shape.pages_per_request * subject.page_size + 1),
        "rows": (0, step.shape.max_rows + 1),
        "sample_index": (0, d.tokens),
        "counts": (0, d.requests + 1),
    }
    for name, (low, high) in limits.items():
        value = step.field(name)
        if value.size and (value.min() < low or value.max() >= high):
            found = f"{value.min()} to {value.max()}"
            raise NotComparable(f"{where}: {name} is {found}, allowed is {low} to {high - 1}")
    if (np.diff(step.field("query_start")) < 0).any():
        raise NotComparable(f"{where}: query_start falls")


def used_pages(step: StepInput, groups: Sequence[PageGroup]) -> np.ndarray:
    """The pages that a step's requests hold tokens in, sorted."""
    return np.unique(by_group(step.field("page_table"), groups)[held_entries(step, groups)])


def renumbered(step: StepInput, pages: Sequence[int] | np.ndarray, page_size: int) -> StepInput:
    """The step on a cache that holds only `pages`, in that order."""
    place = {int(page): index for index, page in enumerate(pages)}
    batch = step.batch.copy()
    slots = batch_layout(step.descriptor, step.shape).view(batch, "slots")
    for i in np.flatnonzero(slots >= 0).tolist():
        slots[i] = place[int(slots[i]) // page_size] * page_size + int(slots[i]) % page_size
    new_place = np.vectorize(lambda page: place.get(int(page), 0), otypes=[np.int32])
    return replace(step, batch=batch, page_table=new_place(step.field("page_table")))


def filled(step: StepInput, groups: Sequence[PageGroup], pages: int) -> np.ndarray:
    """Which slots [page slot] hold tokens before the step. Pages of all groups have one size."""
    page_size = groups[0].page_size
    known = np.zeros((pages, page_size), np.bool_)
    starts, tables = step.field("query_start"), by_group(step.field("page_table"), groups)
    for i in range(int(step.field("counts")[1])):
        length = int(step.field("kv_lens")[i]) - int(starts[i + 1] - starts[i])
        for group, table in zip(groups, tables, strict=True):
            position = np.arange(group.first_column(length) * page_size, length)
            known[table[i, position // page_size], position % page_size] = True
    return known
