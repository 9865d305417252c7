"""Judges taps: an op's outputs against both references on that op's own inputs, and its
contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...ops import REGISTRY
from ...ops.cases import load_all
from ...ops.testing import TESTING, Judge
from ..sides.jitter import evaluate_jittered
from ..sides.reference import evaluate
from ..sides.taps import Call, Declared
from .amplification import amplification, worth_trying
from .gates import Amplified, Family, Gate, Mode, accumulated, precision, semantics
from .metrics import Metrics, measure


def gate_for(
    mode: Mode,
    scope: Any,
    m: Metrics,
    reduction: int,
    depth: int = 1,
    *,
    family: Family = Family(),  # noqa: B008 - it is frozen
    noise: float = 0.0,
    numbers: float = float("inf"),
    amplified: Amplified | None = None,
) -> Gate:
    """The gate of a mode and scope. `noise` is the relative error of the faithful reference in
    other steps of the run, `numbers` the most independent numbers that one has.
    """
    if mode == "P":
        return precision(scope, m, family, numbers)
    return semantics(
        scope,
        reduction,
        depth,
        noise=max(noise, m.rel_noise),
        numbers=m.effective,
        amplified=amplified,
        family=family,
    )


class Judged(NamedTuple):
    """One output: `bound` is the error over the contract's, None without one; `shares` are those
    of its gate.
    """

    name: str
    metrics: Metrics
    bound: float | None
    complaints: tuple[str, ...]
    shares: Mapping[str, float]


class OpJudge:
    """Judges the calls of one program of one side. `calls` are the reference's, by key, on the
    layer's true inputs.
    """

    def __init__(self, mode: Mode, calls: Sequence[Call], real: int, reduction: int) -> None:
        self.mode = mode
        self._calls = {call.key: call for call in calls}
        self._real = real
        self._reduction = reduction

    def __call__(
        self, declared: Declared, kept: Mapping[str, np.ndarray], outputs: Sequence[np.ndarray]
    ) -> list[Judged]:
        """The verdict on each output.

        The activations are the side's own; weights, tables, page tables and scalars are the
        reference's, so an op that is called with wrong ones is wrong.
        """
        call = self._calls[declared.key]
        arguments = {**call.arguments, **kept}
        exact = evaluate(call.op, arguments, exact=True)
        faithful = evaluate(call.op, arguments, exact=False)
        verdict = self._contract(call.op, arguments, outputs)
        found, amplified = [], list[Amplified]()
        for index, (got, right, noisy) in enumerate(zip(outputs, exact, faithful, strict=True)):
            name = declared.key if len(outputs) == 1 else f"{declared.key}#{index}"
            if got.shape != right.shape:
                raise ValueError(f"{name}: shape {got.shape}, the reference has {right.shape}")
            got, right, noisy = (self._rows(x, call, index) for x in (got, right, noisy))
            metrics = measure(got, right, noisy)
            gate = self._gate(metrics, got)
            wide = self.mode == "S" or got.dtype.itemsize == 4
            if wide and gate is not None and worth_trying(gate, metrics):
                amplified = amplified or self._amplified(call, arguments, exact)
                gate = self._gate(metrics, got, amplified[index])
            complaints = list(gate.complaints(metrics)) if gate else self._equal(metrics)
            if verdict is not None and not verdict.passed:
                worst = max(verdict.error, verdict.gain)
                complaints.append(f"contract exceeded {worst:.3g} times at {verdict.where}")
            bound = None if verdict is None else max(verdict.error, verdict.gain)
            found.append(
                Judged(
                    name, metrics, bound, tuple(complaints), gate.shares(metrics) if gate else {}
                )
            )
        return found

    def _rows(self, x: np.ndarray, call: Call, index: int) -> np.ndarray:
        """Rows of real tokens, all of an output whose rows are no tokens; of a cache, the slots but
        for the scratch one.
        """
        if x.ndim == 4:
            return x.reshape(-1, *x.shape[2:])[:-1]
        return x if _sorted_by_expert(call.op, index) else x[: self._real]

    def _amplified(
        self, call: Call, arguments: Mapping[str, Any], exact: Sequence[np.ndarray]
    ) -> list[Amplified]:
        """What the op makes of errors of its inputs, by output."""

        def run(rng: np.random.Generator) -> list[np.ndarray]:
            outputs = evaluate_jittered(call.op, arguments, rng)
            return [self._rows(x, call, index) for index, x in enumerate(outputs)]

        return amplification(run, [self._rows(x, call, i) for i, x in enumerate(exact)])

    def _gate(self, m: Metrics, got: np.ndarray, amplified: Amplified | None = None) -> Gate | None:
        """None where nothing is rounded: what comes out was put in, or counted."""
        if not m.rel_noise or got.dtype.kind in "iub":
            return None
        if self.mode == "P" and got.dtype.itemsize == 4:
            return accumulated(self._reduction, amplified)
        return gate_for(self.mode, "op", m, self._reduction, amplified=amplified)

    @staticmethod
    def _equal(m: Metrics) -> list[str]:
        return (
            [f"off by {m.max_abs:.3g}, nothing may be rounded here"]
            if m.max_abs or m.special
            else []
        )

    def _contract(
        self, op: str, arguments: Mapping[str, Any], outputs: Sequence[np.ndarray]
    ) -> Any:
        load_all()  # the bounds: an op that has none is from another package
        if op not in TESTING:
            return None
        return Judge(op, dict(arguments))(outputs)


def _sorted_by_expert(op: str, index: int) -> bool:
    """Whether the rows of an op's output are those of experts, or the experts."""
    shapes = REGISTRY[op].shapes
    if shapes is None or not shapes.results[index].axes.dimensions:
        return False
    return not {"choice", "k", "num_experts"}.isdisjoint(
        shapes.results[index].axes.dimensions[0].names
    )
