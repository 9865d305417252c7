"""Finds the smallest set of an engine's switches that makes its worker fail: compilation, CUDA
graphs, implementations.

The suspect's worker differs from the plainest one (eager, no graphs, every op native) in some
switches. Workers with some of them on run the same steps through `execute`, graphs and samplers
included. The log-probabilities where tokens are sampled are judged against both references, until
the verdict hangs on one switch or on a few together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from ...ops.plan import COMPOSITION, NATIVE
from ...shared.errors import ConfigError
from ..judging.gates import Mode, longest_sum
from ..judging.metrics import measure
from ..judging.outputs import gate_for
from ..progress import Progress, silent
from ..sides.environment import describe_side
from ..sides.fault import Fault
from ..sides.subject import Subject, Target
from .bench import Bench, Schedule
from .bisect import BisectReport, Culprit
from .invariants import SPARE, References

COMPILED, GRAPHS, SCAN = "compiled", "graphs", "scan_layers"


def smallest(units: Sequence[Any], fails: Callable[[list[Any]], bool]) -> list[Any]:
    """A smallest part of `units` that fails: without any one of it, it passes. All of them together
    must fail.

    Takes log2(n) + 1 runs for each unit that it finds; more units than needed may fail with them,
    never fewer.
    """
    found: list[Any] = []
    end = len(units)
    while end and not (found and fails(found)):
        low, high = 0, end
        # found + units[:low] passes, found + units[:high] fails.
        while high - low > 1:
            middle = (low + high) // 2
            if fails(found + list(units[:middle])):
                high = middle
            else:
                low = middle
        found.append(units[high - 1])
        end = high - 1
    return found


def _bound(units: int, found: int) -> int:
    """Runs that a search in halves takes at most for `found` of `units`."""
    return found * (math.ceil(math.log2(max(units, 2))) + 1)


class _Engines:
    """Workers of a target with some of its switches on. `runs` counts them."""

    def __init__(
        self, subject: Subject, target: Target, prompts: Sequence[np.ndarray], mode: Mode,
        fault: Fault | None
    ) -> None:  # fmt: skip
        self.subject, self.target, self.prompts = subject, target, prompts
        self.mode, self.fault = mode, fault
        self.lengths = [len(p) + SPARE for p in prompts]
        self.runs, self.notes = 0, list[str]()
        self._references: References | None = None
        self.units: list[str] = []
        with closing(self._open()) as bench:
            self._describe(bench)
            self.whole = self._fails(bench)

    def _open(self, **options: Any) -> Bench:
        return Bench(self.subject, self.target, self.lengths, self.fault, **options)

    def fails(self, on: Sequence[str]) -> bool:
        """Whether a worker with these switches on, and no others, fails. One that cannot be
        built passes.
        """
        try:
            with closing(self._open(**self._options(on))) as bench:
                return self._fails(bench)
        except ConfigError as error:
            self.notes.append(f"with {', '.join(on) or 'none'} alone there is no engine: {error}")
            return False

    def _options(self, on: Sequence[str]) -> dict[str, Any]:
        """Engine options that leave only these switches of the target on."""
        off = [unit.partition("=")[0] for unit in self.units if "=" in unit and unit not in on]
        options: dict[str, Any] = {"enable_ops": ("all", *(f"-{op}" for op in off))}
        if self.target.backend == "jax":
            return options | {"scan_layers": SCAN in on}
        if self.target.backend != "torch":
            return options
        level = min(self.level, 2) if COMPILED in on else 0
        if GRAPHS in on and level:
            level = 3
        elif GRAPHS in on:
            options |= {"enforce_eager": False, "cudagraph_mode": self.graphs}
        return options | {"compile_level": level}

    def _describe(self, bench: Bench) -> None:
        """The switches of the whole suspect."""
        plans, config = bench.worker.plans(), bench.config
        self.environment = describe_side(self.target, bench.worker.device, plans)
        self.level = config.compile_level
        self.graphs = config.compilation.cudagraph_mode.name
        if self.level:
            self.units.append(COMPILED)
        if self.graphs != "NONE":
            self.units.append(GRAPHS)
        if config.scan_layers:
            self.units.append(SCAN)
        chosen = {
            f"{op}={choice.provider}"
            for plan in plans.by_kind.values()
            for op, choice in plan.choices.items()
            if choice.provider not in (NATIVE, COMPOSITION)
        }
        self.units += sorted(chosen)

    def _fails(self, bench: Bench) -> bool:
        self.runs += 1
        rows = bench.outputs(Schedule(), self.prompts)
        if self._references is None:
            self._references = References(self.subject, rows, bench.layout)
        width, model = rows.values[0].shape[-1], self.subject.model
        right, noisy = (self._references.rows(rows.keys, width, x) for x in (True, False))
        m = measure(np.stack(rows.values), right, noisy)
        reduction = longest_sum(model)
        return any(gate_for(self.mode, "logits", m, reduction, model.num_layers).complaints(m))


def bisect_knobs(
    subject: Subject, target: Target, prompts: Sequence[np.ndarray], *,
    modes: Sequence[Mode] = ("S", "P"),
    fault: Fault | None = None, progress: Progress = silent,
) -> BisectReport:  # fmt: skip
    """Find the switches of `target` that its failure hangs on, in float32 first, then in the run
    dtype.
    """
    report, started = BisectReport(str(target), verdict="engine"), time.perf_counter()
    for mode in modes:
        where = subject.for_mode(mode)
        progress(f"mode {mode}: {target}")
        engines = _Engines(where, target, prompts, mode, fault)
        progress(
            f"mode {mode}: {'fails' if engines.whole else 'passes'}; switches: "
            f"{', '.join(engines.units) or 'none'}"
        )
        report.compared, report.mode = True, mode
        report.environment = {"model": subject.name, "dtype": where.dtype} | engines.environment

        def fails(on: list[str], engines: _Engines = engines, mode: Mode = mode) -> bool:
            result = engines.fails(on)
            progress(
                f"mode {mode}: with {', '.join(on) or 'none'}: {'fails' if result else 'passes'}"
            )
            return result

        found: list[str] = []
        if engines.whole:
            report.units = len(engines.units)
            report.bound += 2
            if fails([]):
                report.problems.append(
                    "it fails with every switch off too: look for the layer and the op (without "
                    "--over)"
                )
            else:
                found = smallest(engines.units, fails)
                report.bound += _bound(len(engines.units), len(found))
        else:
            report.bound += 1
        report.runs += engines.runs
        report.notes += engines.notes
        for unit in found:
            op, _, provider = unit.partition("=") if "=" in unit else ("", "", "")
            what = "the failure hangs on it" + (
                f", together with {len(found) - 1} more" if len(found) > 1 else ""
            )
            report.culprits.append(Culprit(-1, unit, op, "", provider, what))
        if engines.whole:
            break
    report.seconds = time.perf_counter() - started
    return report
