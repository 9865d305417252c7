"""The inputs of a step on the device: one static buffer that all programs read, filled by one copy a step.

A graph reads fixed addresses, so each program's fields lie at fixed places of one buffer. Page tables stay on the
device, one permanent row per request: a step sends only the entries that changed, and one kernel scatters them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..bucketing import Descriptor, Table
from ..shared.errors import OutsideTable
from ..shared.step import StepInput, StepShape, batch_layout, sampling_layout

ALIGNMENT = 16
"""int32 entries between the starts of fields: 64 bytes, so that vectorised loads are aligned in every program."""
RING = 4
"""Pinned buffers: more than steps in flight, so that none is written while the device still reads it."""
OF_TOKENS = ("token_ids", "positions", "slots")
OF_REQUESTS = ("query_start", "kv_lens", "rows", "sample_index", "counts")
ON_HOST = ("query_start", "kv_lens", "counts")
"""What implementations with `host_metadata` read on the host."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One field: where it lies in a buffer of the step, and in the static buffer."""

    from_sampling: bool
    source: slice
    target: slice


@dataclass(frozen=True, slots=True)
class _Places:
    """The fields of one program in the static buffer."""

    size: int
    copies: tuple[_Copy, ...]
    fields: dict[str, tuple[int, tuple[int, ...], bool]]
    page_table: slice
    page_index: slice
    page_value: slice


class _Slot:
    """One pinned buffer and the event behind the copy that last read it."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.array = self.tensor.numpy()
        self.read = torch.cuda.Event() if pinned else None


class StepInputs:
    """Fills the static buffer from `StepInput`s, in order; hands out views of it by program."""

    def __init__(self, table: Table, shape: StepShape, page_size: int, device: torch.device) -> None:
        self._shape, self._page_size = shape, page_size
        self._cuda = device.type == "cuda"
        self._places = {d: _places(d, shape, page_size) for d in table}
        size = max(places.size for places in self._places.values())
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self.pages = torch.zeros((shape.max_rows + 1, shape.pages_per_request), dtype=torch.int32, device=device)
        self._flat_pages = self.pages.view(-1)
        self._mirror = np.zeros((shape.max_rows + 1, shape.pages_per_request), np.int32)
        self._slots = [_Slot(size, self._cuda) for _ in range(RING if self._cuda else 1)]
        self._next = 0
        # For implementations that read lengths on the host; a copy, as a call that was captured keeps its arguments.
        self._on_host = torch.zeros(size, dtype=torch.int32)
        self._views: dict[Descriptor, dict[str, torch.Tensor]] = {}
        self._host_views: dict[Descriptor, dict[str, torch.Tensor]] = {}

    def fields(self, descriptor: Descriptor) -> dict[str, torch.Tensor]:
        """The program's fields on the device: those of the batch but its page table, of sampling, and page changes."""
        if descriptor not in self._views:
            self._views[descriptor] = self._cut(self.buffer, descriptor)
        return self._views[descriptor]

    def host_fields(self, descriptor: Descriptor) -> dict[str, torch.Tensor]:
        """The lengths on the host."""
        if descriptor not in self._host_views:
            views = self._cut(self._on_host, descriptor)
            self._host_views[descriptor] = {name: views[name] for name in ON_HOST}
        return self._host_views[descriptor]

    def _cut(self, buffer: torch.Tensor, descriptor: Descriptor) -> dict[str, torch.Tensor]:
        views = {}
        for name, (offset, shape, floating) in self._places[descriptor].fields.items():
            part = buffer[offset : offset + int(np.prod(shape))].view(shape)
            views[name] = part.view(torch.float32) if floating else part
        return views

    def fill(self, step: StepInput, host: bool = False) -> None:
        """Bring a step's inputs to the device without waiting for it; `host` keeps the lengths here too.

        Raises OutsideTable for a program that was not in the table.
        """
        places = self._places.get(step.descriptor)
        if places is None:
            raise OutsideTable(f"no program for {step.descriptor}: the table was frozen at start")
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.read is not None:
            slot.read.synchronize()  # long done: at most two steps are in flight
        for copy in places.copies:
            slot.array[copy.target] = (step.sampling if copy.from_sampling else step.batch)[copy.source]
        self._stage_pages(step, places, slot.array)
        if host:
            self._on_host.numpy()[: places.size] = slot.array[: places.size]
        self.buffer[: places.size].copy_(slot.tensor[: places.size], non_blocking=True)
        if slot.read is not None:
            slot.read.record()

    def _stage_pages(self, step: StepInput, places: _Places, target: np.ndarray) -> None:
        """Write the changed entries of the page table, flat index and value, into the step's fields."""
        width = self._shape.pages_per_request
        index, value = target[places.page_index], target[places.page_value]
        index[:] = self._mirror.size - 1  # scratch, read by nobody
        value[:] = 0
        count = int(step.field("counts")[1])
        if count == 0:
            return
        rows = step.field("rows")[:count]
        used = -(-int(step.field("kv_lens")[:count].max()) // self._page_size)
        table = step.batch[places.page_table].reshape(-1, width)[:count, :used]
        request, column = np.nonzero(table != self._mirror[rows, :used])
        if not request.size:
            return
        pages, flat = table[request, column], rows[request] * width + column
        self._mirror.reshape(-1)[flat] = pages
        if request.size <= index.size:
            index[: request.size] = flat
            value[: request.size] = pages
        else:
            self._flat_pages.index_put_((self._send(flat),), self._send(pages))

    def _send(self, x: np.ndarray) -> torch.Tensor:
        """A copy on the device: through pinned memory, which torch keeps until it was read."""
        host = torch.empty(x.shape, dtype=torch.int32, pin_memory=self._cuda)
        host.numpy()[...] = x
        return host.to(self.buffer.device, non_blocking=True)

    def apply_page_changes(self, fields: dict[str, torch.Tensor]) -> None:
        """Scatter the changed entries: part of every program."""
        self._flat_pages.index_put_((fields["page_index"],), fields["page_value"])


def _places(d: Descriptor, shape: StepShape, page_size: int) -> _Places:
    """What depends on the number of requests stands first, so that it lies alike in all programs of that number."""
    batch, sampling = batch_layout(d, shape), sampling_layout(d.requests)
    copies, fields = [], {}
    offset = 0

    def place(name: str, field_shape: tuple[int, ...], floating: bool = False) -> slice:
        nonlocal offset
        fields[name] = (offset, field_shape, floating)
        size = int(np.prod(field_shape))
        start, offset = offset, offset + -(-size // ALIGNMENT) * ALIGNMENT
        return slice(start, start + size)

    for layout, names in ((sampling, tuple(sampling.fields)), (batch, OF_REQUESTS), (batch, OF_TOKENS)):
        for name in names:
            field = layout.fields[name]
            target = place(name, field.shape, field.floating)
            source = slice(field.offset, field.offset + field.size)
            copies.append(_Copy(layout is sampling, source, target))
    changes = (2 * d.requests + -(-d.tokens // page_size),)
    table = batch.fields["page_table"]
    return _Places(
        page_table=slice(table.offset, table.offset + table.size),
        page_index=place("page_index", changes),
        page_value=place("page_value", changes),
        size=offset,
        copies=tuple(copies),
        fields=fields,
    )
