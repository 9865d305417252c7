"""What the host sends for a step to a worker whose page tables and sampling parameters stay on the
device: one packed buffer with what is the step's own, the new entries of page tables, and the
parameters of requests that are new.

A step with a page table of its own sends all of that. Workers whose programs are compiled by XLA
read it: `tpu/`, `xla/`.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ..bucketing import Descriptor
from .request_table import padding_column
from .step import (
    STOP_SLOTS,
    TABLES,
    HistoryEntries,
    Layout,
    PageEntries,
    Sampler,
    StepInput,
    StepShape,
    batch_layout,
    processor_layout,
    sampling_layout,
    with_all_entries,
)

MOVING = ("sample_rows", "position")
PARAMETERS = tuple(sampling_layout(1).fields)[len(MOVING) :]
"""Fields of the sampling buffer that a request keeps; they stand behind those that change with
each step.
"""
NEW_ROWS = 8
"""Requests whose sampling parameters fit into the buffer of a step."""
LEAST_PAGES = 16
CHUNK_PAGES, CHUNK_ROWS = 2048, 256
"""What one call of the program `update` takes, for what does not fit into the buffer of a step."""


_NO_ROWS = np.zeros(0, np.int32), np.zeros((len(PARAMETERS), 0), np.int32)


PICKED = ("rows", "sample_rows", "position")
"""Fields of a step's difference that a sampler reads, each [S]."""


def sampler_size(requests: int, max_requests: int) -> int:
    """Rows S of the sampler that serves `requests` rows: the next power of two, or all rows.

    Samplers take longest to compile, so there are fewer of them than backbones.
    """
    return min(1 << (requests - 1).bit_length(), max_requests)


def initial_tables(shape: StepShape) -> tuple[np.ndarray, np.ndarray]:
    """The page tables and the sampling parameters before the first step: no pages, and the
    parameters of padding in all rows.
    """
    parameters = np.zeros((len(PARAMETERS), shape.max_rows + 1), np.int32)
    parameters[:] = padding_column(shape.max_rows)[len(MOVING) :, None]
    return np.zeros((shape.table_rows, shape.pages_per_request), np.int32), parameters


def _changes(pages: int, rows: int) -> list[tuple[str, tuple[int, ...], type]]:
    return [
        ("page_at", (pages,), int),
        ("page", (pages,), int),
        ("new_rows", (rows,), int),
        ("new_parameters", (len(PARAMETERS), rows), int),
    ]


@cache
def update_layout() -> Layout:
    """What the program `update` reads: see `diff_layout`."""
    return Layout(*_changes(CHUNK_PAGES, CHUNK_ROWS))


@cache
def diff_layout(descriptor: Descriptor, shape: StepShape, loop: bool = False) -> Layout:
    """What a step sends: fields of the batch (see `batch_layout`), `sample_rows` and `position` of
    the sampling buffer, and changes of the tables. Of a loop also `stop_ids`, and `limits`: steps,
    and whether it is chained.

    page_at [D]           row * P + column of a page table entry that becomes page [D]; beyond the
                          table: unused
    new_rows [K]          a row that gets new_parameters [:, K]; beyond the table: unused
    """
    batch = batch_layout(descriptor, shape).fields
    requests = descriptor.requests
    chunks = 0 if descriptor.kind == "decode" else descriptor.tokens // 8
    pages = max(LEAST_PAGES, shape.num_groups * (requests + chunks))
    fields: list[tuple[str, tuple[int, ...], type]] = [
        (name, field.shape, int) for name, field in batch.items()
    ]
    fields += [(name, (requests,), int) for name in MOVING]
    fields += _changes(pages, NEW_ROWS)
    if loop:
        fields += [("stop_ids", (requests, STOP_SLOTS), int), ("limits", (2,), int)]
    return Layout(*fields)


@cache
def _places(
    descriptor: Descriptor, shape: StepShape, loop: bool
) -> tuple[Layout, np.ndarray, slice, slice]:
    """(layout, a buffer that changes nothing, the place of the batch in it, that of the sampling
    fields that move).
    """
    layout = diff_layout(descriptor, shape, loop)
    buffer = layout.allocate()
    _clear(layout, buffer, shape)
    size = batch_layout(descriptor, shape).size
    return layout, buffer, slice(0, size), slice(size, size + len(MOVING) * descriptor.requests)


def _clear(layout: Layout, buffer: np.ndarray, shape: StepShape) -> None:
    layout.view(buffer, "page_at")[:] = shape.table_rows * shape.pages_per_request
    layout.view(buffer, "new_rows")[:] = shape.max_rows + 1


class StepBuffers:
    """Packs the buffer that each step sends. Steps pass here in the order in which they run."""

    def __init__(self, shape: StepShape) -> None:
        self._shape = shape
        self._entries = PageEntries(shape)

    def pack(self, step: StepInput) -> tuple[list[np.ndarray], np.ndarray]:
        """(buffers for the program `update`, to be run first, as a rule none; the buffer of the
        step).

        Raises InternalError if a step was lost.
        """
        d, loop = step.descriptor, step.loop
        layout, empty, batch, moving = _places(d, self._shape, loop is not None)
        buffer = empty.copy()
        buffer[batch] = step.batch
        buffer[moving] = step.sampling[: len(MOVING) * d.requests]
        if loop is not None:
            layout.view(buffer, "stop_ids")[:] = loop.stop_ids
            layout.view(buffer, "limits")[:] = loop.steps, loop.chained
        at, page = self._entries.take(step)
        rows, parameters = _new_parameters(step)
        spilled = []
        while len(at) > layout.fields["page_at"].size or len(rows) > NEW_ROWS:
            chunk = self.nothing()
            _fill(update_layout(), chunk, at[:CHUNK_PAGES], page, rows[:CHUNK_ROWS], parameters)
            spilled.append(chunk)
            at, page = at[CHUNK_PAGES:], page[CHUNK_PAGES:]
            rows, parameters = rows[CHUNK_ROWS:], parameters[:, CHUNK_ROWS:]
        _fill(layout, buffer, at, page, rows, parameters)
        return spilled, buffer

    def nothing(self) -> np.ndarray:
        """A buffer for `update` that changes nothing."""
        buffer = update_layout().allocate()
        _clear(update_layout(), buffer, self._shape)
        return buffer


def _new_parameters(step: StepInput) -> tuple[np.ndarray, np.ndarray]:
    """(rows, their parameters [field, row]) that this step brings: of requests that are new to
    their row.
    """
    new = step.new_pages
    if new is not None and not len(new.tenants):
        return _NO_ROWS
    rows = step.field("rows")[: int(step.field("counts")[1])]
    index = np.arange(len(rows))
    if new is not None:
        index = np.flatnonzero(np.isin(rows, new.tenants))
    parameters = step.sampling.reshape(-1, step.descriptor.requests)[len(MOVING) :]
    return rows[index], parameters[:, index]


def _fill(
    layout: Layout,
    buffer: np.ndarray,
    at: np.ndarray,
    page: np.ndarray,
    rows: np.ndarray,
    parameters: np.ndarray,
) -> None:
    """Put changes into a buffer that had none; of `page` and `parameters` as many as there are
    places and rows.
    """
    if len(at):
        layout.view(buffer, "page_at")[: len(at)] = at
        layout.view(buffer, "page")[: len(at)] = page[: len(at)]
    if len(rows):
        layout.view(buffer, "new_rows")[: len(rows)] = rows
        layout.view(buffer, "new_parameters")[:, : len(rows)] = parameters[:, : len(rows)]


class SamplerBuffers:
    """Packs what the samplers with processors get. Steps pass here in the order in which they
    run.
    """

    def __init__(self, shape: StepShape) -> None:
        self._shape = shape
        self._entries = HistoryEntries()
        self._shared: np.ndarray | None = None
        self._wider = np.zeros(0, np.int32)

    def processors(self, step: StepInput, processors: np.ndarray) -> np.ndarray:
        """`processors` of the step as its sampler reads them: see `wider_processors`. Of a buffer
        that steps share, the same array for all of them.
        """
        if processors is not self._shared:
            requests = step.descriptor.requests
            size = sampler_size(requests, self._shape.max_rows)
            self._wider = wider_processors(processors, requests, size, self._shape, step.sampler)
            self._shared = None if processors.flags.writeable else processors
        return self._wider

    def histories(self, step: StepInput) -> tuple[list[np.ndarray], np.ndarray]:
        """What a step whose sampler is `processed` sends for the histories on the device.

        (Buffers for the program `remember`, to be run first, as a rule none; what the sampler gets:
        [2, S] the place and the id of the one token that a request's history got, -1: none).

        Raises InternalError if a step was lost.
        """
        changes = self._entries.take(step)
        size = sampler_size(step.descriptor.requests, self._shape.max_rows)
        new_tokens = np.full((2, size), -1, np.int32)
        new_tokens[0, changes.indices] = changes.columns
        new_tokens[1, changes.indices] = changes.tokens
        return [self._span(*span) for span in changes.spans], new_tokens

    def _span(self, row: int, first: int, tokens: np.ndarray) -> np.ndarray:
        layout = span_layout(self._shape)
        buffer = layout.allocate()
        place = slice(first, first + len(tokens))
        layout.view(buffer, "span")[:] = row, place.start, place.stop
        layout.view(buffer, "tokens")[place] = tokens
        return buffer


@cache
def span_layout(shape: StepShape) -> Layout:
    """What the program `remember` reads.

    span    [3]  a row of the histories, and the places from and up to which it gets new tokens;
                 those behind are unused then
    tokens  [H]  at their places
    """
    return Layout(("span", (3,), int), ("tokens", (shape.max_model_len,), int))


def wider_processors(
    buffer: np.ndarray, requests: int, size: int, shape: StepShape, sampler: Sampler
) -> np.ndarray:
    """What a sampler with processors reads beside histories, with all entries of the tables, and
    for `size` rows instead of `requests`; those behind have no processors.
    """
    given = processor_layout(requests, shape, sampler)
    buffer = with_all_entries(given, buffer)
    if size == requests:
        return buffer
    layout = processor_layout(size, shape, sampler)
    wider = layout.allocate()
    fields = layout.views(wider)
    for name in ("bias_ids", "masks", "history_row", *TABLES.values()):
        fields[name][requests:] = -1
    fields["rows"][requests:] = shape.max_rows
    for name, values in given.views(buffer).items():
        fields[name][:requests] = values
    return wider
