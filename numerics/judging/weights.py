"""Whether a backend holds what it should, bit for bit: the checkpoint's weights, the rotary tables,
and the page tables of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...shared.page_groups import PageGroup
from ...shared.step import StepInput
from ...shared.worker import Worker
from ..sides.side import Side
from ..sides.steps import by_group, held_entries
from ..sides.subject import HostWeights
from .diff import Diff

Tables = tuple[np.ndarray, np.ndarray]
"""Rotary tables [position r]: cos and sin."""


def check_held(
    diff: Diff, side: str, holder: Side | Worker, weights: HostWeights
) -> tuple[dict[int, Mapping[str, np.ndarray]], Tables | None]:
    """Note in `diff` which weights and rotary tables of a side are not the checkpoint's and the
    definition's. Returns the weights of the layers that have a wrong one, and wrong tables.
    """
    wrong = _check_weights(diff, side, holder, weights)
    tables = holder.read_tables()
    differ = _check_tables(diff, side, tables, weights.subject.rotary_tables())
    return wrong, tables if differ else None


def _check_weights(
    diff: Diff, side: str, holder: Side | Worker, weights: HostWeights
) -> dict[int, Mapping[str, np.ndarray]]:
    wrong: dict[int, Mapping[str, np.ndarray]] = {}
    for layer in range(-1, weights.subject.model.num_layers):
        wanted = weights.top() if layer < 0 else weights.layer(layer)
        found = holder.read_weights(layer)
        for name, value in wanted.items():
            if name not in found or found[name].shape != value.shape:
                diff.missing.append(f"{side}: weight {name} of layer {layer}")
            elif not np.array_equal(_bits(found[name]), _bits(value)):
                where = f"layer.{layer}.{name}" if layer >= 0 else name
                share = float((_bits(found[name]) != _bits(value)).mean())
                diff.problems.append(
                    f"{side}: weights {where} differ in {share:.1%} of the elements"
                )
                wrong[layer] = found
    return wrong


def _check_tables(diff: Diff, side: str, found: Tables, wanted: Tables) -> bool:
    """Returns whether they differ anywhere."""
    before = len(diff.problems)
    for name, got, right in zip(("cos", "sin"), found, wanted, strict=True):
        if got.shape != right.shape or got.dtype != right.dtype:
            diff.problems.append(
                f"{side}: the rotary table {name} is {got.dtype} {got.shape}, not {right.dtype} "
                f"{right.shape}"
            )
            continue
        wrong = np.flatnonzero((got != right).any(1))
        if len(wrong):
            most = float(np.abs(got - right).max())
            diff.problems.append(
                f"{side}: the rotary table {name} is wrong at {len(wrong)} of {len(right)} "
                f"positions, the first {wrong[0]}, by {most:.3g} at most"
            )
    return len(diff.problems) > before


PAGE_TABLE = "the page table"


def check_page_tables(
    diff: Diff, side: str, step: StepInput, found: np.ndarray, groups: Sequence[PageGroup]
) -> None:
    """Note in `diff` the first entry of the page tables `found` [group row, P] of a side, after
    `step`, that is not the step's. Only those count that the step reads or writes.
    """
    count = int(step.field("counts")[1])
    rows, wanted = step.field("rows")[:count], by_group(step.field("page_table"), groups)
    held = by_group(found, groups)[:, rows]
    used = held_entries(step, groups)[:, :count]
    wrong = np.argwhere(used & (held != wanted[:, :count]))
    if len(wrong):
        group, request, column = place = tuple(wrong[0].tolist())
        of_group = f" in page group {group}" if len(groups) > 1 else ""
        diff.problems.append(
            f"{side}: {PAGE_TABLE} on the device is wrong in {len(wrong)} entries after step "
            f"{step.step_id}, the first that of page {column} of request {request}{of_group}: "
            f"{held[place]}, not {wanted[place]}"
        )


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)
