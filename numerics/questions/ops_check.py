"""`twinfer numerics ops`: every implementation of every op against the oracle, over the op's own
cases.

In float32 an op keeps its contract's bound (`ops/testing.py`): mode S; in the narrower dtypes that
is mode P. Mode X asks for equal bits: of ops that are judged bitwise on their own cases, of the
others on exact probes of the same shapes (`numerics/questions/exact_probes.py`). No model and no
weights are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ...ops import REGISTRY, resolve
from ...ops.cases import load_all
from ...ops.implement import Implementation
from ...ops.plan import COMPOSITION, NATIVE
from ...ops.plugins import load_plugins
from ...ops.testing import (
    FLOATS,
    TESTING,
    Arguments,
    Case,
    Judge,
    ci_cases,
    forget_programs,
    providers,
    run,
    run_mutant,
)
from ...shared.errors import ConfigError, InternalError
from ...shared.worker import backend_module
from ..judging.gates import ALL_MODES, Mode, mode_of
from ..judging.metrics import fields_json
from ..judging.record import Report
from ..progress import Progress, silent
from ..showing.terminal import LINES
from ..sides.environment import versions
from ..sides.fault import Fault, faulty
from ..sides.one_op import FRAMEWORKS, PLATFORMS, run_op
from ..sides.reference import bound
from ..sides.subject import Target, name_sides
from ..sides.taps import Tracer
from .exact import ExactJudge
from .exact_probes import probes

DEFINITION = "our definition"
"""The side of what all implementations are judged by."""
INTERPRETED = "_interpret"
"""Implementations whose name ends so run another chip's kernel in an interpreter: only where a
target names them.
"""


@dataclass(slots=True)
class OpResult:
    """One implementation of an op in one dtype. `error` and `gain` are the worst ones, in units of
    what is allowed.

    `refused` counts cases that the implementation does not take, or that no engine has. `raised`
    are cases that ended in an exception.
    """

    side: str
    op: str
    provider: str
    dtype: str
    mode: str
    compared: int = 0
    refused: int = 0
    error: float = 0.0
    gain: float = 0.0
    case: str = ""
    complaints: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`rms_norm=native`."""
        return f"{self.op}={self.provider}"

    @property
    def factor(self) -> float:
        return max(self.error, self.gain)


@dataclass(slots=True)
class OpsReport(Report):
    """All results. `absent` are implementations that were not judged and why, `undefined` ops whose
    definition nothing was compared with.
    """

    kind = "ops"
    sides: tuple[str, ...]
    devices: dict[str, str]
    results: list[OpResult] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    undefined: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[OpResult]:
        """Results with complaints."""
        return [r for r in self.results if r.complaints]

    @property
    def compared(self) -> int:
        """How many cases were compared."""
        return sum(r.compared for r in self.results)

    @property
    def has_compared(self) -> bool:
        return self.compared > 0

    def body(self) -> dict[str, Any]:
        return {
            "sides": self.sides, "devices": self.devices,
            "environment": {"versions": versions(), **self.environment},
            "compared": self.compared, "absent": self.absent, "undefined": self.undefined,
            "results": [fields_json(result) for result in self.results],
        }  # fmt: skip

    def cases(self) -> dict[tuple[str, str], list[str]]:
        return {(f"{r.side}.{r.mode}.{r.dtype}", r.name): r.complaints for r in self.results}


def check_ops(
    targets: Sequence[Target], names: Sequence[str] = (), faults: Mapping[str, Fault] | None = None,
    modes: Sequence[Mode] = ALL_MODES, dtypes: Sequence[str] | None = None, planned: bool = False,
    sides: Sequence[str] | None = None, caches: Mapping[str, Collection[str]] | None = None,
    progress: Progress = silent,
) -> OpsReport:  # fmt: skip
    """Judge all implementations of `names` (none: all ops) on `targets`, in `dtypes` (None: all).
    `faults` plants faults by side (`a`, `b`). `planned`: only the providers that a target names,
    and an op without cases is no gap. `sides` are the targets' names, where what they name is long.
    `caches` are the dtypes of KV caches that no engine of a side has: such cases are not taken.

    Raises ConfigError, BackendUnavailable.
    """
    load_all()
    load_plugins()  # whose ops are judged if they bring cases, or are asked for
    known = sorted(op.name for op in REGISTRY)
    for name in names:
        if name not in known:
            raise ConfigError(f"op: got {name!r}, allowed are {', '.join(known)}")
    for target in targets:
        if target.options:
            raise ConfigError(
                f"target: {target} has {', '.join(target.options)}, which single ops do not know"
            )
    found = {
        name: (target, backend_module(target.backend).find_device(target.device))
        for name, target in zip(sides or name_sides(targets), targets, strict=True)
    }
    devices = {name: f"{device.platform} {device.name}" for name, (_, device) in found.items()}
    report = OpsReport(tuple(found), devices)
    started = time.perf_counter()
    for target in targets:
        backend_module(target.backend, "plans")  # registers the kernels
    for name in names or known:
        progress(f"op {name}")
        if name not in TESTING:
            # Who asks for it by name must not get a pass without it.
            asked = names and not planned
            (report.missing if asked else report.absent).append(f"{name} has no cases")
            continue
        cases = _probes(name, modes, dtypes)
        if not cases:
            report.absent.append(f"{name} has no case in mode {', '.join(modes)}")
            continue
        _check_definition(report, name, cases)
        for side, (target, device) in found.items():
            if planned and name not in target.providers:
                continue
            for provider, implementation in _runnable(name, target, device.platform, side, report):
                fault = (faults or {}).get(side[0])
                runs = partial(_run, target.backend, device.platform, fault)
                unknown = (caches or {}).get(side, ())
                try:
                    _check(report, side, runs, provider, implementation, cases, unknown)
                except InternalError as error:
                    report.missing.append(f"{side}: {name}={provider} did not run: {error}")
                forget_programs()
    report.seconds = time.perf_counter() - started
    return report


Run = Callable[[str, str | None, Arguments], tuple[np.ndarray, ...]]
"""The outputs of an op by a provider, None is the fallback, for arguments."""


def _run(
    backend: str, device: str, fault: Fault | None, op: str, provider: str | None,
    arguments: Arguments,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    wrap = None if fault is None else partial(faulty, fault, FRAMEWORKS[backend], op)
    return run_op(backend, op, provider, arguments, device, wrap)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A case with its judge, and the dtypes that outputs must have."""

    op: str
    mode: Mode
    dtype: str
    case: Case
    judge: Judge | ExactJudge
    like: tuple[Any, ...]

    @property
    def cache(self) -> str:
        """The dtype of the KV cache that the case has; "" without one."""
        return str(self.case.arguments["kv"].dtype) if "kv" in self.case.arguments else ""


def _probes(op: str, modes: Sequence[Mode], dtypes: Sequence[str] | None) -> list[_Probe]:
    made: list[_Probe] = []
    for dtype in TESTING[op].dtypes:
        if dtypes is not None and dtype not in dtypes and dtype in FLOATS:
            continue
        mode = _mode(op, dtype)
        for case in ci_cases(TESTING[op], dtype):
            if mode in modes:
                made.append(
                    _Probe(op, mode, dtype, case, Judge(op, case.arguments), _like(op, case))
                )
            if mode != "X" and "X" in modes:
                for exact in probes(op, case.arguments):
                    named = Case(f"{case.name}, {exact.name}", exact.arguments)
                    made.append(
                        _Probe(
                            op, "X", dtype, named, ExactJudge(op, exact.arguments), _like(op, exact)
                        )
                    )
    return made


def _mode(op: str, dtype: str) -> Mode:
    """The mode that judges the cases of `op` in `dtype`."""
    return "X" if TESTING[op].bitwise else mode_of(dtype)


def _like(op: str, case: Case) -> tuple[Any, ...]:
    return _dtypes(run(op, "numpy", None, case.arguments))


def _dtypes(outputs: Sequence[np.ndarray]) -> tuple[Any, ...]:
    return tuple(out.dtype for out in outputs)


def _runnable(
    op: str, target: Target, platform: str, side: str, report: OpsReport
) -> Iterator[tuple[str, Implementation | None]]:
    """The implementations to judge: those that the target names, or all. Raises ConfigError for
    an unknown one.
    """
    framework = FRAMEWORKS[target.backend]
    available = providers(op, framework)
    wanted = target.providers.get(op, ())
    plan = resolve(framework, platform=PLATFORMS.get(target.backend, ""))
    why = plan.unavailable.get(op)
    if why is not None and not wanted:
        report.absent.append(f"{side}: {why}")
        return
    # Of those that are not for XLA's programs some would fail there, or read the host.
    runs = available if target.backend != "torch-xla" else (plan[op].provider,)
    for provider in wanted or runs:
        if provider not in available:
            raise ConfigError(
                f"target {target}: {op} has no provider {provider!r}, known are "
                f"{', '.join(available)}"
            )
        implementation = available[provider]
        if not wanted and provider.endswith(INTERPRETED):
            report.absent.append(
                f"{side}: {op}={provider} is interpreted; name it in the target to judge it"
            )
            continue
        obstacle = None if implementation is None else implementation.obstacle(platform)
        if obstacle is None:
            yield provider, implementation
        else:
            # Who asks for it by name must not get a pass without it.
            (report.missing if wanted else report.absent).append(
                f"{side}: {op}={provider} cannot run on this machine: {obstacle}"
            )


def _check(
    report: OpsReport, side: str, runs: Run, provider: str,
    implementation: Implementation | None,
    cases: Sequence[_Probe], unknown_caches: Collection[str],
) -> None:  # fmt: skip
    """Judge one implementation in all dtypes."""
    takes = implementation.supports_args if implementation is not None else None
    results: dict[tuple[str, str], OpResult] = {}
    for probe in cases:
        key = probe.dtype, probe.mode
        result = results.setdefault(
            key, OpResult(side, probe.op, provider, probe.dtype, probe.mode)
        )
        no_engine = probe.cache in unknown_caches
        if no_engine or (takes is not None and not takes(**probe.case.arguments)):
            result.refused += 1
        else:
            _judge(result, probe, runs)
    report.results.extend(results.values())
    report.missing += [
        f"{side}: {r.name}, {r.dtype}, {entry}" for r in results.values() for entry in r.raised
    ]
    if not any(r.compared or r.raised for r in results.values()):
        report.missing.append(f"{side}: {cases[0].op}={provider} takes no case")


def parts_of(op: str) -> set[str]:
    """The ops that the reference of an op calls in its float32 cases. A backend that has the op as
    one piece runs none of them, and their definitions are part of what it is judged by.
    """
    load_all()
    found, tracer = set[str](), Tracer()
    function = getattr(bound(False, tracer), op)
    for case in ci_cases(TESTING[op], "float32") if op in TESTING else ():
        tracer.start({}, {})
        with np.errstate(all="ignore"):
            function(**case.arguments)
        found |= {made.op for made in tracer.calls}
    return found - {op}


def can_show(result: OpResult, target: Target, fault: Fault) -> bool:
    """Whether a case that an implementation takes shows a fault: in the reference it does."""
    implementation = providers(result.op, FRAMEWORKS[target.backend])[result.provider]
    takes = implementation.supports_args if implementation is not None else None
    wrap = partial(faulty, fault, "numpy", result.op)
    for probe in _probes(result.op, ALL_MODES, (result.dtype,)):
        if probe.mode != result.mode:
            continue
        arguments = probe.case.arguments
        if takes is not None and not takes(**arguments):
            continue
        if not probe.judge(run(result.op, "numpy", None, arguments, wrap=wrap)).passed:
            return True
    return False


def _check_definition(report: OpsReport, op: str, cases: Sequence[_Probe]) -> None:
    """Judge the op's definition itself, where its cases bring another one that was written apart:
    a mistake in the reference, which many implementations run, is none of theirs.
    """
    truth = TESTING[op].truth
    if truth is None:
        report.undefined.append(op)
        return
    result = OpResult(DEFINITION, op, "reference", "", "")
    for probe in cases:
        if isinstance(probe.judge, Judge):
            result.dtype, result.mode = probe.dtype, probe.mode
            _note(result, probe, run_mutant(op, truth, probe.case.arguments, probe.like))
    # Exact probes are judged by bits alone, which no other way to the result has.
    if result.compared:
        report.results.append(result)


def _judge(result: OpResult, probe: _Probe, runs: Run) -> None:
    """Run one case. An implementation may raise anything; what it could not compute was not
    compared.
    """
    name = None if result.provider in (NATIVE, COMPOSITION) else result.provider
    try:
        outputs = runs(probe.op, name, probe.case.arguments)
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        result.raised.append(f"case {probe.case.name} raised {type(error).__name__}: {line[:120]}")
        return
    _note(result, probe, outputs)


def _note(result: OpResult, probe: _Probe, outputs: Sequence[np.ndarray]) -> None:
    """Judge the outputs of one case."""
    result.compared += 1
    if _dtypes(outputs) != probe.like:
        got, want = (", ".join(map(str, dtypes)) for dtypes in (_dtypes(outputs), probe.like))
        result.complaints.append(f"case {probe.case.name}: dtypes {got}, wanted {want}")
        return
    verdict = probe.judge(outputs)
    if not (result.case and max(verdict.error, verdict.gain) <= result.factor):
        result.error, result.gain, result.case = verdict.error, verdict.gain, probe.case.name
    if not verdict.passed:
        what = (
            "is not bitwise equal"
            if result.mode == "X"
            else f"error {verdict.error:.3g}, gain {verdict.gain:.3g}"
        )
        result.complaints.append(f"case {probe.case.name}: {what} at {verdict.where}")


# --- the view
# --------------------------------------------------------------------------------------------------


def render(report: OpsReport) -> str:
    """The verdict, what is wrong, and the rows with the largest errors: at most 25 lines."""
    failing, sides = report.failures, report.sides
    lines = [
        f"{report.word}: {report.compared} cases of "
        f"{len({r.op for r in report.results})} ops, {report.seconds:.1f} s"
    ]
    for side in sides:
        mine = [r for r in report.results if r.side == side]
        bad = sum(bool(r.complaints) for r in mine)
        refused = sum(r.refused for r in mine)
        lines.append(
            f"{side} on {report.devices[side]}: {len({r.name for r in mine})} implementations, "
            f"{sum(r.compared for r in mine)} cases compared, {refused} not taken, {bad} rows fail"
        )
    if report.absent:
        lines += [f"not judged: {entry}" for entry in report.absent[:3]]
        more = len(report.absent) - 3
        lines += (
            [f"not judged: {more} more implementations (--json names them)"] if more > 0 else []
        )
    lines += [f"not compared: {entry[:150]}" for entry in report.missing[:4]]
    if len(report.missing) > 4:
        lines.append(f"not compared: {len(report.missing) - 4} more")
    lines += [f"wrong: {r.side}, {r.name}, {r.dtype}: {r.complaints[0]}"[:160] for r in failing[:5]]
    rows = sorted(report.results, key=lambda r: (not r.complaints, -r.factor))
    lines.append(
        f"{'op=implementation':44} {'side':4} mode {'dtype':14} cases  error   gain   (1 is what "
        "is allowed)"
    )
    room = LINES - 1 - len(lines)
    for r in rows[:room]:
        worst = "FAIL" if r.complaints else ""
        numbers = f"{r.compared:5} {r.error:6.2f} {r.gain:6.2f}"
        lines.append(
            f"{r.name:44.44} {r.side[:1]:4} {r.mode:4} {r.dtype:14} {numbers}   {worst}".rstrip()
        )
    if len(rows) > room:
        lines.append(f"... and {len(rows) - room} rows with smaller errors (--json has everything)")
    return "\n".join(lines)
