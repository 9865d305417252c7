"""What a run would have seen: the smallest faults that its own gates tell from rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .diff import Diff, Finding, pooled_sides

FIELDS = {"relative error": "rel_l2", "|slope|": "slope", "sigma": "sigma", "|bias|": "bias"}
"""Limited metrics that say how large a fault of an op is, and their fields."""


def power(diff: Diff) -> dict[str, dict[str, Any]]:
    """By mode, the smallest fault of an op that exceeds its limit: the median over all calls of
    ops, the largest of them, and where that is.

    Mode S: `relative error` of an output; `|slope|`, a scale that is off by so much. Mode P, in
    units of the rounding that contracts state: `sigma` is the root mean square of an error that is
    added to it in one step; `pooled`, of one that a layer makes in all steps; `|bias|`, the mean of
    an error. Mode P of a float32 model has the gates of mode S, and its figures.
    """
    found: dict[str, dict[str, Any]] = {}
    for mode in ("S", "P"):
        ops = [f for f in diff.findings if f.mode == mode and f.scope == "op"]
        for fault in FIELDS:
            limits = [(limit, f) for f in ops if (limit := _smallest(f, fault)) is not None]
            if limits:
                worst, where = max(limits, key=lambda pair: pair[0])
                median = float(np.median([limit for limit, _ in limits]))
                entry = {"median": median, "largest": worst, "at": where.name}
                found.setdefault(mode, {})[fault] = entry
    pooled = list(_of_layers(diff))
    if "sigma" in found.get("P", {}) and pooled:
        found["P"]["pooled"] = {"median": float(np.median(pooled)), "largest": max(pooled)}
    return found


def _smallest(f: Finding, fault: str) -> float | None:
    """The limit that a finding had: its value over its share. None if it says nothing."""
    share = f.shares.get(fault)
    if not share or not np.isfinite(share):
        return None
    value = abs(getattr(f.metrics, FIELDS[fault]))
    limit = float(value / share)
    return _added(limit) if fault == "sigma" else limit


def _of_layers(diff: Diff) -> Iterator[float]:
    """The root mean square of the smallest fault of each layer in all steps: that of all steps
    together, or of the one that shows most.
    """
    family, layers = pooled_sides(diff)
    found = {key: pooled.smallest(family) for key, pooled in layers.items()}
    for f in diff.findings:
        of_step = _smallest(f, "sigma") if (f.scope, f.mode) == ("layer", "P") else None
        if of_step is not None:
            found[f.side, f.layer] = min(found[f.side, f.layer], of_step)
    return (size for size in found.values() if np.isfinite(size))


def _added(sigma: float) -> float:
    """What must be added to noise of 1, as squares add up, to reach `sigma`."""
    return float(max(sigma * sigma - 1.0, 0.0) ** 0.5)


def told(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines for a terminal, at most one a mode."""
    for mode, entries in found.items():
        if "sigma" in entries:  # only its float32 results have limits of the other kind
            entries = {name: x for name, x in entries.items() if name not in FLOAT32}
        parts = [
            text.format(_range(entries[name])) for name, text in WORDS.items() if name in entries
        ]
        if parts:
            yield f"would have seen, mode {mode}: {'; '.join(parts)}"


FLOAT32 = "relative error", "|slope|"
WORDS = {
    "sigma": "an error of {} of an op's rounding",
    "pooled": "{} of it in all steps of a layer",
    "|bias|": "a bias of {}",
    "relative error": "a relative error of {} in an op",
    "|slope|": "a scale off by {}",
}
"""The faults of `power` in words."""


def _range(entry: Mapping[str, Any]) -> str:
    median, largest = entry["median"], entry["largest"]
    if largest <= 1.05 * median:
        return f"{median:.2g}"
    return f"{median:.2g} (at worst {largest:.2g})"
