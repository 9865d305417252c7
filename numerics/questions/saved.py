"""Compares what was found before: results that `--json` wrote, and bundles that `capture` wrote.

Two runs on two machines need not meet: each was judged against the same references, so their
findings stand side by side as soon as model, steps and dtype are the same. A side that is in both
and does worse in the second is a drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..bundles.bundle import Bundle, read
from ..errors import NotComparable
from ..judging.diff import Diff, layer_sigmas, load
from ..judging.logits_metrics import compare_logits
from ..progress import Progress, silent
from ..showing.report import read_record
from .replay import RECORDED, FromStart, Recording

DRIFT = 1.05
"""Sigma of a layer in a later run over that of an earlier one: correct runs keep it to a few
thousandths.
"""
SAME = "model_hash", "steps_hash", "dtype"
Item = Diff | Bundle | str | Path


def compare(*items: Item, model: str | None = None, progress: Progress = silent) -> Diff:
    """One comparison of all sides of `items`: results, bundles, or their paths. `model`: the
    bundles' model's folder.

    Raises NotComparable if they are of other models, steps or dtypes, or damaged.
    """
    if len(items) < 2:
        raise NotComparable("compare: needs two results or bundles")
    opened = [_open(item, model) for item in items]
    bundles = [item for item in opened if isinstance(item, Bundle)]
    if bundles:
        _check_steps(bundles)
    diffs, before = [], list[Bundle]()
    for item in opened:
        diffs.append(judge_bundle(item, before, progress) if isinstance(item, Bundle) else item)
        before += [item] if isinstance(item, Bundle) else []
    labels = [
        Path(item).stem if isinstance(item, str | Path) else str(i + 1)
        for i, item in enumerate(items)
    ]
    return merge(diffs, labels)


def _open(item: Item, model: str | None) -> Diff | Bundle:
    if not isinstance(item, str | Path):
        return item
    if Path(item).is_dir():
        return read(str(item), model)
    record = read_record(str(item))
    if record["kind"] != "diff":
        raise NotComparable(f"{item}: kind is {record['kind']!r}, compare takes 'diff' only")
    return load(record)


def _check_steps(bundles: Sequence[Bundle]) -> None:
    first = bundles[0]
    for other in bundles[1:]:
        if (first.subject.identity, first.subject.dtype) != (
            other.subject.identity,
            other.subject.dtype,
        ):
            raise NotComparable(f"the bundles are of {_what(first)} and {_what(other)}")
        same = len(first.steps) == len(other.steps) and all(
            a.descriptor == b.descriptor and np.array_equal(a.batch, b.batch)
            for a, b in zip(first.inputs, other.inputs, strict=True)
        )
        if not same:
            raise NotComparable(
                "the bundles hold other steps: capture both with the same prompts, seed and tokens"
            )


def _what(bundle: Bundle) -> str:
    return f"{bundle.subject.name} ({bundle.subject.identity}) in {bundle.subject.dtype}"


class _Beside(FromStart):
    """Judges a bundle; logits are compared with those of bundles of the same steps."""

    def __init__(self, bundle: Bundle, others: Sequence[Bundle]) -> None:
        super().__init__(bundle, {f"{RECORDED} {bundle.name}": Recording(bundle)})
        self._others = others

    def _logits(self, exact: np.ndarray, faithful: np.ndarray) -> None:
        super()._logits(exact, faithful)
        if not self._others or not len(self._known(exact, faithful)):
            return
        own = self.sides[0].ran.logits
        for other in self._others:
            logits = other.steps[self.number].arrays.get("logits")
            if own is None or logits is None:
                self._miss(other, own is not None, logits is not None)
                continue
            if logits.shape != own.shape:
                raise NotComparable(
                    f"step {self.number}: logits of {other.name} are {list(logits.shape)}, those "
                    f"of {self.name} {list(own.shape)}"
                )
            ends = exact[: self.real], faithful[: self.real]
            self.diff.logits.append(compare_logits(logits, own, *ends, self.step, self.mode))

    def _miss(self, other: Bundle, has_own: bool, other_has: bool) -> None:
        """Name logits that one of two bundles has not, or both."""
        before = f"the one of {other.name} before it"
        who = "this bundle lacks" if other_has else f"{before} lacks"
        if not has_own and not other_has:
            who = f"this bundle and {before} lack"
        self.diff.missing.append(
            f"final logits of step {self.number}: {who} them; a live engine keeps tokens and "
            "log-probabilities, which are judged against the references"
        )


def judge_bundle(
    bundle: Bundle, others: Sequence[Bundle] = (), progress: Progress = silent
) -> Diff:
    """Judge what a bundle recorded against both references, and its logits against those of
    other bundles.
    """
    return _Beside(bundle, others).run(bundle.inputs, progress)


def merge(diffs: Sequence[Diff], labels: Sequence[str]) -> Diff:
    """All sides of several comparisons in one. Raises NotComparable if they are not of the same
    thing.
    """
    for name in SAME:
        values = [str(diff.environment.get(name)) for diff in diffs]
        if len(set(values)) > 1 or values[0] == "None":
            raise NotComparable(f"the results differ in {name}: {', '.join(values)}")
    whole = Diff((), environment={**diffs[0].environment, "sides": {}})
    whole.environment.pop("command", None)
    for diff, label in zip(diffs, labels, strict=True):
        names = {}
        for side in diff.sides:
            _letter, _, rest = side.partition(" ")
            names[side] = f"{chr(ord('a') + len(whole.sides))} {rest or side} in {label}"
            whole.sides += (names[side],)
            info = diff.environment.get("sides", {}).get(side, {})
            about = {
                "versions": diff.environment.get("versions", {}),
                "machine": diff.environment.get("machine", ""),
            }
            whole.environment["sides"][names[side]] = {**about, **info}
        whole.findings += [replace(f, side=names[f.side]) for f in diff.findings]
        whole.logits += diff.logits
        whole.problems += [f"{label}: {problem}" for problem in diff.problems]
        whole.missing += [f"{label}: {name}" for name in diff.missing]
        whole.notes += diff.notes
        whole.seconds += diff.seconds
    whole.problems += _drifts(whole)
    return whole


def _drifts(diff: Diff) -> list[str]:
    """Layers that do worse in a later result than the same target did in an earlier one."""
    found = []
    sigmas = {side: layer_sigmas(diff, side) for side in diff.sides}
    target = {side: side.partition(" ")[2].rpartition(" in ")[0] for side in diff.sides}
    for index, before in enumerate(diff.sides):
        for after in diff.sides[index + 1 :]:
            if target[before] != target[after]:
                continue
            for layer in sorted(set(sigmas[before]) & set(sigmas[after])):
                old, new = sigmas[before][layer], sigmas[after][layer]
                if not new <= DRIFT * max(old, 1.0):
                    found.append(f"{after}: layer.{layer} sigma {new:.3f}, it was {old:.3f}")
    return found
