"""Faults of what an engine keeps between steps: a worker reads something other than what the step
says.

Each step by itself looks right, so a comparison that is given steps cannot see them; the invariants
can, as what is stale depends on the schedule. `Planted` is a worker with such a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...shared.page_groups import PageGroup
from ...shared.step import NewPages, StepInput, batch_layout
from ...shared.worker import Worker

Views = dict[str, np.ndarray]
Kept = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tables:
    """The page tables of a worker: the page groups, and how many rows each has on the device."""

    groups: tuple[PageGroup, ...]
    rows: int


Edit = Callable[[Views, Kept, Tables], None]
"""Changes the fields of a step; the second argument is kept from one step to the next.

The page table of a step stands among the fields as `page_table`, new entries of it as `new_rows`,
`new_columns` and `new_pages`: a step has one or the other.
"""


@dataclass(frozen=True, slots=True)
class EngineFault:
    """A fault in the steps that a worker gets."""

    name: str
    what: str
    edit: Edit


class Planted:
    """A worker of some page groups that is started once, for many faults. `fault` is changed
    between runs; None is none.
    """

    def __init__(self, worker: Worker, groups: Sequence[PageGroup]) -> None:
        self.worker = worker
        self.fault: EngineFault | None = None
        self._groups = tuple(groups)
        self._kept: Kept = {}
        self._num_entries = 0
        self._ready: set[str] = set()

    def plant(self, fault: EngineFault | None) -> None:
        """Have this fault from now on."""
        self.fault, self._kept = fault, {}

    def load(self, progress: Any) -> None:
        self._once("load", lambda: self.worker.load(progress))

    def allocate_kv(self, pages: int) -> None:
        self._once("allocate", lambda: self.worker.allocate_kv(pages))

    def warm_up(self, table: Any, progress: Any) -> None:
        self._once("warm up", lambda: self.worker.warm_up(table, progress))

    def execute(self, step: StepInput) -> Any:
        return self.worker.execute(self._changed(step))

    def logits(self, step: StepInput) -> np.ndarray:
        return self.worker.logits(self._changed(step))

    def close(self) -> None:
        """Nothing: the next fault needs the worker."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def _once(self, name: str, run: Callable[[], Any]) -> None:
        if name not in self._ready:
            self._ready.add(name)
            run()

    def _changed(self, step: StepInput) -> StepInput:
        if self.fault is None:
            return step
        new = step.new_pages
        if new is not None and new.start == 0 and len(new):
            self._kept, self._num_entries = {}, 0  # another scheduler, whose tables begin anew
        batch = step.batch.copy()
        views = batch_layout(step.descriptor, step.shape).views(batch)
        if new is None:
            views["page_table"] = step.field("page_table").copy()
        else:
            views |= {
                "new_rows": new.rows.copy(),
                "new_columns": new.columns.copy(),
                "new_pages": new.pages.copy(),
            }
        self.fault.edit(views, self._kept, Tables(self._groups, step.shape.max_rows + 1))
        if new is None:
            return replace(step, batch=batch, page_table=views["page_table"])
        # Numbered as the worker expects: a difference that is lost would be an error, not wrong
        # tokens.
        entries = NewPages(
            self._num_entries,
            views["new_rows"],
            views["new_columns"],
            views["new_pages"],
            new.tenants,
        )
        self._num_entries += len(entries)
        return replace(step, batch=batch, new_pages=entries)


def _stale(field: str) -> Edit:
    """The field is that of the step before."""

    def edit(views: Views, kept: Kept, tables: Tables) -> None:
        now, before = views[field].copy(), kept.get(field)
        kept[field] = now
        if before is not None and before.shape == now.shape:
            views[field][...] = before

    return edit


def _late(views: Views, kept: Kept, tables: Tables) -> None:
    """What a step brings of page tables arrives with the step after it."""
    names = [
        name for name in ("page_table", "new_rows", "new_columns", "new_pages") if name in views
    ]
    now = {name: views[name].copy() for name in names}
    before = kept.get("pages")
    kept["pages"] = now
    for name in names:
        if before is None or name not in before:
            views[name] = now[name][:0] if name != "page_table" else now[name]
        elif name != "page_table" or before[name].shape == now[name].shape:
            views[name] = before[name]


def _short(views: Views, kept: Kept, tables: Tables) -> None:
    """One slot less than there is, where one token is decoded: the length that the step before
    had.
    """
    decoded = np.arange(len(views["kv_lens"])) < int(views["counts"][0])
    views["kv_lens"][...] = np.where(
        decoded & (views["kv_lens"] > 1), views["kv_lens"] - 1, views["kv_lens"]
    )


def _restarted(views: Views, kept: Kept, tables: Tables) -> None:
    for i in range(int(views["counts"][1])):
        start, stop = int(views["query_start"][i]), int(views["query_start"][i + 1])
        views["positions"][start:stop] = np.arange(stop - start)


def _moved(views: Views, kept: Kept, tables: Tables) -> None:
    """Every other step finds the page table's first two columns in the other order, of what it
    brings of them.
    """
    kept["steps"] = kept.get("steps", 0) + 1
    if kept["steps"] % 2:
        return
    if "new_columns" in views:
        rows, columns = views["new_rows"], views["new_columns"]
        both = np.isin(rows, np.intersect1d(rows[columns == 0], rows[columns == 1]))
        views["new_columns"] = np.where(both & (columns < 2), 1 - columns, columns)
    elif views["page_table"].shape[1] > 1:
        views["page_table"][:, :2] = views["page_table"][:, 1::-1].copy()


def _forgotten(views: Views, kept: Kept, tables: Tables) -> None:
    """The first token of each chunk that does not begin a prompt is not written to the cache."""
    of_groups = views["slots"].reshape(len(tables.groups), -1)
    for i in range(int(views["counts"][1])):
        start = int(views["query_start"][i])
        if views["positions"][start] > 0:
            of_groups[:, start] = -1


def _of_another_group(views: Views, kept: Kept, tables: Tables) -> None:
    """The last group reads the pages of the first one. That has them all: groups with windows
    stand behind.
    """
    last = len(tables.groups) - 1
    if "page_table" in views:
        of_groups = views["page_table"].reshape(len(tables.groups), -1)
        of_groups[last] = of_groups[0]
        return
    known = kept.setdefault("pages", {})
    rows, columns, pages = (views[name] for name in ("new_rows", "new_columns", "new_pages"))
    keys = list(zip((rows % tables.rows).tolist(), columns.tolist(), strict=True))
    for i in np.flatnonzero(rows < tables.rows).tolist():
        known[keys[i]] = pages[i]
    for i in np.flatnonzero(rows >= last * tables.rows).tolist():
        pages[i] = known.get(keys[i], pages[i])


def _freed_early(views: Views, kept: Kept, tables: Tables) -> None:
    """What no later step reads of a group with a window is given away before this one reads it:
    to the last request of the step, whose newest page it is.
    """
    count = int(views["counts"][1])
    slots = views["slots"].reshape(len(tables.groups), -1)
    for number, group in enumerate(tables.groups):
        taken = slots[number, views["query_start"][count] - 1] // group.page_size
        for i in range(count) if group.window else ():
            start = int(views["positions"][views["query_start"][i]])
            freed = group.first_column(start), group.first_column(int(views["kv_lens"][i]))
            _point(views, tables, number, i, range(*freed), int(taken))


def _point(
    views: Views, tables: Tables, group: int, request: int, columns: Iterable[int], page: int
) -> None:
    """Let columns of a request's page table in a group name this page."""
    if "page_table" in views:
        width = views["page_table"].shape[1]
        of_groups = views["page_table"].reshape(len(tables.groups), -1, width)
        of_groups[group, request, list(columns)] = page
        return
    row = group * tables.rows + int(views["rows"][request])
    for column in columns:
        here = (views["new_rows"] == row) & (views["new_columns"] == column)
        views["new_pages"][here] = page
        if not here.any():
            entry = {"new_rows": row, "new_columns": column, "new_pages": page}
            for name, value in entry.items():
                views[name] = np.append(views[name], np.int32(value))


_TABLE: dict[str, tuple[str, Edit]] = {
    "page-table-stale": ("what is new in the page tables arrives one step late", _late),
    "lengths-stale": ("a decoded token attends over the length of the step before it", _short),
    "slots-stale": ("a step writes K and V to the slots of the step before it", _stale("slots")),
    "positions-restart": ("positions count from the beginning of a chunk", _restarted),
    "pages-swapped": ("every other step brings the first two pages in the other order", _moved),
    "chunk-start-lost": ("K and V of the first token of a later chunk are not written", _forgotten),
    "table-of-another-group": (
        "layers of one page group read the page table of another",
        _of_another_group,
    ),
    "window-page-freed-early": (
        "a page of a layer with a window is another request's one step before its last reader",
        _freed_early,
    ),
}
ENGINE_FAULTS = {name: EngineFault(name, *entry) for name, entry in _TABLE.items()}
