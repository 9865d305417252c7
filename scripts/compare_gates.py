"""Are the gates of `twinfer numerics model` as sensitive as the fixed ones that they replaced?

    python scripts/compare_gates.py [--backend torch] [--only NAME ...] [--json FILE]

Each fault of the catalogue that is in a model is planted in the self-test's model, in modes S and
P. What a finding makes of its limit is its sensitivity: how many times a metric is over the
limit, by the gates of today and by those of 2026-11-22, on the same errors. A fault is worse seen
if its largest share is less by more than a thousandth. Contracts of ops are the same in both and
left out. Exit code 1 if a fault is worse seen, or one that the fixed gates saw is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import twinfer.tests.numerics.faults  # noqa: F401 - it adds to the catalogue
from twinfer.numerics.faults.catalogue import CATALOGUE
from twinfer.numerics.judging.diff import Finding
from twinfer.numerics.judging.gates import HALF_ULP32, Gate, longest_sum
from twinfer.numerics.judging.metrics import DEVIATIONS
from twinfer.numerics.questions.model import compare_model
from twinfer.numerics.questions.selftest_model import LAYER, open_model
from twinfer.numerics.sides.steps import default_prompts, make_steps
from twinfer.numerics.sides.subject import parse_target
from twinfer.serving.parser import OneLineParser, output_file
from twinfer.serving.program import run_program

SEED = 1
SAME = 0.999
BINS = 100
MOST = 1e9
"""Shares beyond it, such as that of a result that is not finite, are no larger for that."""


def fixed_gate(f: Finding, reduction: int, depth: int) -> Gate:
    """The gate that a finding had on 2026-11-22: no limit of it follows from what a run shows, but
    for 4 / sqrt(n).
    """
    sums = 2.0 * HALF_ULP32 * reduction**0.5
    is_sum = f.mode == "S" or "relative error" in f.shares
    if is_sum and f.scope in ("op", "layer"):
        slope = 1e-6 if f.mode == "S" else max(1e-6, reduction * HALF_ULP32 / 16)
        return Gate(rel_l2=sums, slope=slope)
    if is_sum:
        return Gate(rel_l2=sums * 2.0 * (1 + depth), slope=1e-5)
    chance = DEVIATIONS / max(f.metrics.effective, 1.0) ** 0.5
    if f.scope in ("op", "layer"):
        return Gate(1.0 + max(0.05, chance), 1.0, 3.0, max(0.02, chance))
    overlap = 0.97 - BINS / (4.0 * max(f.metrics.count, 1))
    return Gate(sigma=1.15 + chance, excess=2.0, overlap=overlap)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The largest share of a limit that a fault takes, by both sets of gates, and where."""

    fault: str
    mode: str
    today: float
    fixed: float
    where: str

    @property
    def is_worse(self) -> bool:
        """Whether today's gates see less of it."""
        return self.fixed > 1.0 and self.today < SAME * self.fixed


def largest(shares: Iterable[float]) -> float:
    """The largest share."""
    return min(max(shares, default=0.0), MOST)


def look(name: str, backend: str, folder: Path) -> list[Sensitivity]:
    """What both sets of gates make of one fault."""
    entry = CATALOGUE[name]
    subject = open_model(folder, SEED)
    model = subject.model
    steps = make_steps(subject, default_prompts(subject, SEED))[:1]
    fault = replace(entry, layer=LAYER) if entry.place == "layer" else entry
    diff = compare_model(subject, [parse_target(f"{backend}:cpu")], steps, faults={"a": fault})
    reduction = longest_sum(model)
    found = []
    for mode in ("S", "P"):
        judged = [f for f in diff.findings if f.mode == mode and f.shares]
        today = {f.name: largest(f.shares.values()) for f in judged}
        fixed = {
            f.name: largest(fixed_gate(f, reduction, model.num_layers).shares(f.metrics).values())
            for f in judged
        }
        where = max(fixed, key=lambda key: fixed[key])
        found.append(
            Sensitivity(name, mode, largest(today.values()), largest(fixed.values()), where)
        )
    return found


def main() -> int:
    """Print the table."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults (default: all)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the table")
    arguments = parser.parse_args()
    names = [name for name, entry in CATALOGUE.items() if entry.place in ("layer", "top")]
    if unknown := set(arguments.only or ()) - set(names):
        parser.error(f"--only: got {', '.join(sorted(unknown))}, allowed are {', '.join(names)}")
    rows: list[Sensitivity] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or names:
            for row in look(name, arguments.backend, Path(folder) / name):
                rows.append(row)
                word = "WORSE" if row.is_worse else ""
                print(
                    f"{row.fault:28} {row.mode}  today {row.today:10.4g}  fixed {row.fixed:10.4g}  "
                    f"{row.where} {word}",
                    flush=True,
                )
    worse = [row for row in rows if row.is_worse]
    seen = {row.fault for row in rows if row.fixed > 1.0}
    lost = seen - {row.fault for row in rows if row.today > 1.0}
    print(
        f"{len(rows)} cells, {len(seen)} faults seen by the fixed gates: {len(worse)} cells worse "
        f"seen, {len(lost)} faults not seen any more"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 1 if worse or lost else 0


if __name__ == "__main__":
    sys.exit(run_program(main))
