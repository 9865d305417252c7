"""The inputs of a step on the device: one static buffer that all programs read, filled at once
before each step.

A graph reads fixed addresses, so each program's fields lie at fixed places of one buffer. Page
tables stay on the device, one permanent row per request: a step brings only the entries that are
new, and one kernel scatters them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..bucketing import Descriptor, Table
from ..shared.compilation_config import CUDAGraphMode
from ..shared.errors import InternalError, OutsideTable
from ..shared.page_groups import PageGroup
from ..shared.step import (
    HOST_LENGTHS,
    HistoryEntries,
    Layout,
    PageEntries,
    Sampler,
    StepInput,
    StepShape,
    batch_layout,
    histories_shape,
    processor_layout,
    sampling_layout,
    tables_of,
    with_masks,
)
from .graphs import GraphRecorder, Replay, alias_of

ALIGNMENT = 16
"""int32 entries between the starts of fields: 64 bytes, so that vectorised loads are aligned in
every program.
"""
RING = 4
"""Pinned buffers: more than steps in flight, so that none is written while the device still
reads it.
"""
OF_TOKENS = ("token_ids", "positions", "slots")
OF_REQUESTS = ("query_start", "kv_lens", "rows", "sample_index", "counts")
OF_HISTORIES = ("new_column", "new_token")
"""Fields [R] of the static buffer: where a request's history gets a token, -1: nowhere; and the
token.
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """Fields of equal size, one behind the other in a buffer of the step, and where their first
    one goes.
    """

    from_sampling: bool
    source: slice
    shape: tuple[int, int]
    target: int
    stride: int

    def of(self, buffer: np.ndarray) -> np.ndarray:
        """Their places in the static buffer: [field entry]."""
        fields, entries = self.shape
        return buffer[self.target : self.target + fields * self.stride].reshape(
            fields, self.stride
        )[:, :entries]


@dataclass(frozen=True, slots=True)
class _Places:
    """The fields of one program in the static buffer."""

    size: int
    runs: tuple[_Run, ...]
    fields: dict[str, tuple[int, tuple[int, ...], bool]]
    page_index: slice
    page_value: slice
    new_column: slice
    new_token: slice

    @property
    def rounded(self) -> int:
        """The size, rounded up to a power of two: programs of similar sizes share a graph."""
        return 1 << (self.size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Target:
    """One program's part of one pinned buffer: all views that a step needs, made once."""

    runs: tuple[np.ndarray, ...]
    page_index: np.ndarray
    page_value: np.ndarray
    new_column: np.ndarray
    new_token: np.ndarray
    host: torch.Tensor
    device: torch.Tensor


class _Slot:
    """One pinned buffer and the event behind what last read it; on a CPU the static buffer
    itself.
    """

    def __init__(self, static: torch.Tensor) -> None:
        cuda = static.device.type == "cuda"
        self.tensor = (
            torch.zeros(len(static), dtype=torch.int32, pin_memory=True) if cuda else static
        )
        self.array = self.tensor.numpy()
        self.read = torch.cuda.Event() if cuda else None
        self.targets: dict[Descriptor, _Target] = {}
        self.graphs: dict[int, Replay] = {}
        """What brings the first entries of the buffer to the device, by their number."""

    def capture(
        self, recorder: GraphRecorder, d: Descriptor, static: torch.Tensor, sizes: Collection[int]
    ) -> None:
        """Make `graphs` of these sizes."""
        held = self.tensor
        seen = alias_of(held.data_ptr(), held.shape, held.dtype, static.device.index, held)
        for size in sizes:
            bring = partial(torch.bitwise_or, seen[:size], 0, out=static[:size])
            bring()
            self.graphs[size], _ = recorder.capture(d, CUDAGraphMode.FULL, bring)

    def target(self, d: Descriptor, places: _Places, device: torch.Tensor) -> _Target:
        """The program's views, of this buffer and of the static one."""
        made = self.targets.get(d)
        if made is None:
            runs = tuple(run.of(self.array) for run in places.runs)
            made = _Target(
                runs,
                self.array[places.page_index],
                self.array[places.page_value],
                self.array[places.new_column],
                self.array[places.new_token],
                self.tensor[: places.size],
                device[: places.size],
            )
            self.targets[d] = made
        return made


class StepInputs:
    """Fills the static buffer from `StepInput`s, in order; hands out views of it by program."""

    def __init__(
        self,
        table: Table,
        shape: StepShape,
        groups: Sequence[PageGroup],
        device: torch.device,
    ) -> None:
        self._shape = shape
        self.page_sizes = tuple(group.page_size for group in groups)
        """Tokens of a page, by group."""
        self._cuda = device.type == "cuda"
        self._places = {d: _places(d, shape, self.page_sizes) for d in table}
        self._by_requests = {d.requests: d for d in table}
        size = max(places.rounded for places in self._places.values())
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self.pages = torch.zeros(
            (shape.table_rows, shape.pages_per_request), dtype=torch.int32, device=device
        )
        self._flat_pages = self.pages.view(-1)
        self._entries = PageEntries(shape)
        self.histories = torch.zeros(histories_shape(shape), dtype=torch.int32, device=device)
        """The tokens of each row that were read back, where its request has penalties: see
        `NewTokens`.
        """
        self._no_histories = self.histories.new_zeros(histories_shape(shape, ()))
        self._history_entries = HistoryEntries()
        self._slots = [_Slot(self.buffer) for _ in range(RING if self._cuda else 1)]
        self._next = 0
        # For implementations that read lengths on the host; a copy, as a call that was captured
        # keeps its arguments.
        self._on_host = torch.zeros(size, dtype=torch.int32)
        layout = processor_layout(table.max_requests, shape)
        self._processors = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self._sent: tuple[Layout, np.ndarray] | None = None
        """What the fields before the tables hold."""
        self._filled: np.ndarray | None = None
        """The buffer that fields and tables are filled from, if nobody can have written to it."""
        self._awaited: torch.Tensor | None = None
        """Where the masks go that are all that a step waits for: [k, W]."""
        # They come beside the model, which may run still; behind the sampler that read the last.
        self._beside = torch.cuda.Stream() if self._cuda else None
        self._were_read, self._there = (
            torch.cuda.Event() if self._cuda else None for _ in range(2)
        )
        self._views: dict[Descriptor, dict[str, torch.Tensor]] = {}
        self._host_views: dict[Descriptor, dict[str, torch.Tensor]] = {}

    def capture(self, recorder: GraphRecorder) -> None:
        """Let graphs bring the inputs from now on, each of one kernel that reads the host's memory.

        The copy engine keeps the graph behind it waiting for some 10 us. A kernel of torch outside
        of graphs would leave the device in the state of which `TorchWorker.warm_up` tells. On a CPU
        the host fills the static buffer itself.
        """
        if not self._cuda:
            return
        sizes = {places.rounded for places in self._places.values()}
        for slot in self._slots:
            slot.capture(recorder, next(iter(self._places)), self.buffer, sizes)

    def fields(self, descriptor: Descriptor) -> dict[str, torch.Tensor]:
        """The program's fields on the device: those of the batch, of sampling, and the new
        entries of page tables.
        """
        if descriptor not in self._views:
            self._views[descriptor] = self._cut(self.buffer, descriptor)
        return self._views[descriptor]

    def host_fields(self, descriptor: Descriptor) -> dict[str, torch.Tensor]:
        """The lengths on the host."""
        if descriptor not in self._host_views:
            views = self._cut(self._on_host, descriptor)
            self._host_views[descriptor] = {name: views[name] for name in HOST_LENGTHS}
        return self._host_views[descriptor]

    def processors(self, requests: int, sampler: Sampler) -> dict[str, torch.Tensor]:
        """The fields of `processor_layout` for a number of requests, on the device, and the
        histories with what is new to them.
        """
        layout = processor_layout(requests, self._shape, sampler)
        fields = layout.unpack(self._processors, lambda bits: bits.view(torch.float32))
        of_step = self.fields(self._by_requests[requests])
        fields |= {name: of_step[name] for name in OF_HISTORIES}
        histories = self.histories if sampler == "processed" else self._no_histories
        return fields | {"histories": histories}

    def fill_processors(self, requests: int, sampler: Sampler, processors: np.ndarray) -> None:
        """Bring what samplers with processors read to the device without waiting for it: of the
        tables, the entries that there are. Steps share what did not change: it is there already.
        """
        if processors is self._filled:
            return
        layout = processor_layout(requests, self._shape, sampler)
        self._fill_tables(layout, processors, tables_of(layout, processors))
        if not processors.flags.writeable:
            self._filled = processors

    def fill_around_masks(self, step: StepInput) -> None:
        """The same of a step whose requests wait for masks, but for those: `fill_masks` is next."""
        if step.processors is None or step.waiting is None:
            raise InternalError(f"step {step.step_id} has no masks")
        layout = processor_layout(step.descriptor.requests, self._shape, step.sampler)
        tables = tables_of(layout, step.processors)
        masks = tables.pop("masks")
        self._fill_tables(layout, step.processors[: step.processors.size - masks.size], tables)
        rows = layout.view(step.processors, "mask_row")[step.waiting]
        self._awaited = None
        if len(rows) == len(masks) and (rows == np.arange(len(masks))).all():
            place = layout.fields["masks"].offset
            self._awaited = self._processors[place : place + masks.size].view(masks.shape)

    def fill_masks(
        self, step: StepInput, masks: np.ndarray, stream: torch.cuda.Stream | None
    ) -> None:
        """Bring the masks [k, W] that a step waited for. Where they are all that it has, they are
        sent as they are: from `new_masks`, without a copy on the host. `stream` is that of the
        steps.
        """
        if self._awaited is None or self._awaited.shape != masks.shape:
            processors = with_masks(step, masks)
            self.fill_processors(step.descriptor.requests, step.sampler, processors)
            return
        held: Any = masks
        while isinstance(held, np.ndarray):
            held = held.base
        if not isinstance(held, torch.Tensor) or held.data_ptr() != masks.ctypes.data:
            held = self._pinned(masks)
        if self._beside is None or self._were_read is None or self._there is None or stream is None:
            self._awaited.copy_(held[: len(masks)])
            return
        self._beside.wait_event(self._were_read)
        torch.cuda.set_stream(self._beside)
        try:
            self._awaited.copy_(held[: len(masks)], non_blocking=True)
        finally:
            torch.cuda.set_stream(stream)
        self._there.record(self._beside)
        stream.wait_event(self._there)

    def processors_were_read(self, stream: torch.cuda.Stream | None) -> None:
        """The sampler that reads the processors was started on the stream of the steps."""
        if self._were_read is not None:
            self._were_read.record(stream)

    def new_masks(self, count: int, words: int) -> np.ndarray:
        """Memory [count, words] int32 that masks can be sent from. What nobody refers to any more
        is given out again once the device has read it.
        """
        made = torch.empty((count, words), dtype=torch.int32, pin_memory=self._cuda)
        return made.numpy()

    def _fill_tables(
        self, layout: Layout, processors: np.ndarray, tables: Mapping[str, np.ndarray]
    ) -> None:
        at = layout.fields["bias_ids"].offset
        head, self._filled = processors[:at], None
        if self._sent is None or self._sent[0] is not layout or (head != self._sent[1]).any():
            self._sent = layout, head.copy()
        elif not any(entries.size for entries in tables.values()):
            return  # requests that only wait for masks mostly are those of the step before
        given = self._pinned(processors)
        self._processors[:at].copy_(given[:at], non_blocking=True)
        for name, entries in tables.items():
            size = entries.size
            if size:
                place = layout.fields[name].offset
                part = given[at : at + size]
                self._processors[place : place + size].copy_(part, non_blocking=True)
                at += size

    def _cut(self, buffer: torch.Tensor, descriptor: Descriptor) -> dict[str, torch.Tensor]:
        views = {}
        for name, (offset, shape, floating) in self._places[descriptor].fields.items():
            part = buffer[offset : offset + int(np.prod(shape))].view(shape)
            views[name] = part.view(torch.float32) if floating else part
        return views

    def fill(
        self, step: StepInput, stream: torch.cuda.Stream | None = None, host: bool = False
    ) -> None:
        """Bring a step's inputs to the device without waiting for it; `host` keeps the lengths here
        too. `stream` is that of the steps; None: the current one.

        Raises OutsideTable for a program that was not in the table, InternalError if a step was
        lost.
        """
        places = self._places.get(step.descriptor)
        if places is None:
            raise OutsideTable(f"no program for {step.descriptor}: the table was frozen at start")
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.read is not None:
            slot.read.synchronize()  # long done: at most two steps are in flight
        target = slot.target(step.descriptor, places, self.buffer)
        for run, view in zip(places.runs, target.runs, strict=True):
            view[:] = (step.sampling if run.from_sampling else step.batch)[run.source].reshape(
                run.shape
            )
        self._stage_pages(step, target)
        target.new_column[:] = -1  # other programs have other fields there
        if step.sampler == "processed":
            self._stage_tokens(step, target)
        if host:
            self._on_host.numpy()[: places.size] = slot.array[: places.size]
        if slot.read is not None:
            bring = slot.graphs.get(places.rounded)
            if bring is None:
                target.device.copy_(target.host, non_blocking=True)
            else:
                bring()
            slot.read.record(stream)

    def _stage_pages(self, step: StepInput, target: _Target) -> None:
        """Write the new entries of page tables, flat index and page, into the step's fields."""
        index, pages = self._entries.take(step)
        target.page_index[:] = self.pages.numel() - 1  # scratch, read by nobody
        if len(index) <= len(target.page_index):
            target.page_index[: len(index)] = index
            target.page_value[: len(index)] = pages
        else:
            self._flat_pages.index_put_((self._send(index),), self._send(pages))

    def _stage_tokens(self, step: StepInput, target: _Target) -> None:
        """Write the tokens that are new to histories, one a request, into the step's fields; send
        those of requests that have more.
        """
        changes = self._history_entries.take(step)
        target.new_column[changes.indices] = changes.columns
        target.new_token[changes.indices] = changes.tokens
        for row, first, tokens in changes.spans:
            last = first + len(tokens)
            self.histories[row, first:last].copy_(self._pinned(tokens), non_blocking=True)
            self.histories[row, last:] = -1

    def _send(self, x: np.ndarray) -> torch.Tensor:
        return self._pinned(x).to(self.buffer.device, non_blocking=True)

    def _pinned(self, x: np.ndarray) -> torch.Tensor:
        """A copy in pinned memory, which torch keeps until the device has read it."""
        host = torch.empty(x.shape, dtype=torch.int32, pin_memory=self._cuda)
        host.numpy()[...] = x
        return host


def _places(d: Descriptor, shape: StepShape, page_sizes: Sequence[int]) -> _Places:
    """What depends on the number of requests stands first, so that it lies alike in all programs
    of that number.
    """
    batch, sampling = batch_layout(d, shape), sampling_layout(d.requests)
    runs: list[_Run] = []
    fields: dict[str, tuple[int, tuple[int, ...], bool]] = {}
    offset = 0

    def place(name: str, field_shape: tuple[int, ...], floating: bool = False) -> slice:
        nonlocal offset
        fields[name] = (offset, field_shape, floating)
        size = int(np.prod(field_shape))
        start, offset = offset, offset + -(-size // ALIGNMENT) * ALIGNMENT
        return slice(start, start + size)

    for layout, names in (
        (sampling, tuple(sampling.fields)),
        (batch, OF_REQUESTS),
        (None, OF_HISTORIES),
        (batch, OF_TOKENS),
    ):
        if layout is None:
            new_column, new_token = (place(name, (d.requests,)) for name in names)
            continue
        for name in names:
            field, start = layout.fields[name], offset
            place(name, field.shape, field.floating)
            source = slice(field.offset, field.offset + field.size)
            last = runs[-1] if runs and name != names[0] else None
            if last and last.shape[1] == field.size and last.source.stop == field.offset:
                runs[-1] = replace(
                    last,
                    source=slice(last.source.start, source.stop),
                    shape=(last.shape[0] + 1, field.size),
                )
            else:
                runs.append(
                    _Run(layout is sampling, source, (1, field.size), start, offset - start)
                )
    changes = (sum(2 * d.requests + -(-d.tokens // size) for size in page_sizes),)

    return _Places(
        page_index=place("page_index", changes),
        page_value=place("page_value", changes),
        new_column=new_column,
        new_token=new_token,
        size=offset,
        runs=tuple(runs),
        fields=fields,
    )
