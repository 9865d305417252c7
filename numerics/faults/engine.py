"""Faults of what an engine keeps between steps: a worker reads something other than what the step
says.

Each step by itself looks right, so a comparison that is given steps cannot see them; the invariants
can, as what is stale depends on the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...shared.page_groups import PageGroup
from ...shared.step import NewPages, StepInput, batch_layout
from ...shared.worker import Worker
from ..sides.fault import Edit

Views = dict[str, np.ndarray]
Kept = dict[str, Any]
ENTRIES = "new_rows", "new_columns", "new_pages"


@dataclass(frozen=True, slots=True)
class Tables:
    """The page tables of a worker: the page groups, and how many rows each has on the device."""

    groups: tuple[PageGroup, ...]
    rows: int


class EditedSteps:
    """A worker of some page groups that gets its steps changed by `edit(views, kept, tables)`.

    `views` are the fields of a step, to be written; `kept` is kept from one step to the next. The
    page table of a step stands among the fields as `page_table`, new entries of it as `new_rows`,
    `new_columns` and `new_pages`: a step has one or the other.
    """

    def __init__(self, worker: Worker, groups: Sequence[PageGroup], edit: Edit) -> None:
        self.worker = worker
        self._groups, self._edit = tuple(groups), edit
        self._kept: Kept = {}
        self._num_entries = 0

    def execute(self, step: StepInput) -> Any:
        return self.worker.execute(self._changed(step))

    def logits(self, step: StepInput) -> np.ndarray:
        return self.worker.logits(self._changed(step))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def _changed(self, step: StepInput) -> StepInput:
        new = step.new_pages
        if new is not None and new.start == 0 and len(new):
            self._kept, self._num_entries = {}, 0  # another scheduler, whose tables begin anew
        batch = step.batch.copy()
        views = batch_layout(step.descriptor, step.shape).views(batch)
        if new is None:
            views["page_table"] = step.field("page_table").copy()
        else:
            views |= zip(
                ENTRIES, (new.rows.copy(), new.columns.copy(), new.pages.copy()), strict=True
            )
        self._edit(views, self._kept, Tables(self._groups, step.shape.max_rows + 1))
        if new is None:
            return replace(step, batch=batch, page_table=views["page_table"])
        # Numbered as the worker expects: a difference that is lost would be an error, not wrong
        # tokens.
        rows, columns, pages = (views[name] for name in ENTRIES)
        entries = NewPages(self._num_entries, rows, columns, pages, new.tenants)
        self._num_entries += len(entries)
        return replace(step, batch=batch, new_pages=entries)


def stale(field: str) -> Edit:
    """The field is that of the step before."""

    def edit(views: Views, kept: Kept, tables: Tables) -> None:
        now, before = views[field].copy(), kept.get(field)
        kept[field] = now
        if before is not None and before.shape == now.shape:
            views[field][...] = before

    return edit
