"""Faults of what an engine keeps between steps: a worker reads something other than what the step
says.

Each step by itself looks right, so a comparison that is given steps cannot see them; the invariants
can, as what is stale depends on the schedule. `Planted` is a worker with such a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...shared.step import NewPages, StepInput, batch_layout
from ...shared.worker import Worker

Views = dict[str, np.ndarray]
Edit = Callable[[Views, dict[str, Any]], None]
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
    """A worker that is started once, for many faults. `fault` is changed between runs; None is
    none.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.fault: EngineFault | None = None
        self._kept: dict[str, Any] = {}
        self._num_entries = 0
        self._ready: set[str] = set()

    def plant(self, fault: EngineFault | None) -> None:
        """Have this fault from now on."""
        self.fault, self._kept = fault, {}

    def load(self, progress: Any) -> None:
        """As the worker, once."""
        self._once("load", lambda: self.worker.load(progress))

    def allocate_kv(self, pages: int) -> None:
        """As the worker, once."""
        self._once("allocate", lambda: self.worker.allocate_kv(pages))

    def warm_up(self, table: Any, progress: Any) -> None:
        """As the worker, once."""
        self._once("warm up", lambda: self.worker.warm_up(table, progress))

    def execute(self, step: StepInput) -> Any:
        """As the worker, on the changed step."""
        return self.worker.execute(self._changed(step))

    def logits(self, step: StepInput) -> np.ndarray:
        """As the worker, on the changed step."""
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
        self.fault.edit(views, self._kept)
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

    def edit(views: Views, kept: dict[str, Any]) -> None:
        now, before = views[field].copy(), kept.get(field)
        kept[field] = now
        if before is not None and before.shape == now.shape:
            views[field][...] = before

    return edit


def _late(views: Views, kept: dict[str, Any]) -> None:
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


def _short(views: Views, kept: dict[str, Any]) -> None:
    """One slot less than there is, where one token is decoded: the length that the step before
    had.
    """
    decoded = np.arange(len(views["kv_lens"])) < int(views["counts"][0])
    views["kv_lens"][...] = np.where(
        decoded & (views["kv_lens"] > 1), views["kv_lens"] - 1, views["kv_lens"]
    )


def _restarted(views: Views, kept: dict[str, Any]) -> None:
    for i in range(int(views["counts"][1])):
        start, stop = int(views["query_start"][i]), int(views["query_start"][i + 1])
        views["positions"][start:stop] = np.arange(stop - start)


def _moved(views: Views, kept: dict[str, Any]) -> None:
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


def _forgotten(views: Views, kept: dict[str, Any]) -> None:
    """The first token of each chunk that does not begin a prompt is not written to the cache."""
    for i in range(int(views["counts"][1])):
        start = int(views["query_start"][i])
        if views["positions"][start] > 0:
            views["slots"][start] = -1


ENGINE_FAULTS = {
    fault.name: fault
    for fault in (
        EngineFault(
            "page-table-stale", "what is new in the page tables arrives one step late", _late
        ),
        EngineFault(
            "lengths-stale", "a decoded token attends over the length of the step before it", _short
        ),
        EngineFault(
            "slots-stale",
            "a step writes K and V to the slots of the step before it",
            _stale("slots"),
        ),
        EngineFault(
            "positions-restart", "positions count from the beginning of a chunk", _restarted
        ),
        EngineFault(
            "pages-swapped",
            "every other step brings the first two pages in the other order",
            _moved,
        ),
        EngineFault(
            "chunk-start-lost",
            "K and V of the first token of a later chunk are not written",
            _forgotten,
        ),
    )
}
