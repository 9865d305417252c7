"""Judges taps: an op's outputs against both references on that op's own inputs, and its
contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops import REGISTRY
from ...ops.cases import load_all
from ...ops.testing import TESTING, Judge, Verdict, limits
from ..sides.jitter import HALF_ULP32, Jitter
from ..sides.narrow_cache import HeldEntries, is_narrow
from ..sides.reference import evaluate
from ..sides.taps import Call, Declared
from .amplification import HOPELESS, TRIES, amplification, worth_trying
from .gates import Amplified, Family, Gate, Mode, accumulated, precision, semantics, walk
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
    rows: int = 1,
    amplified: Amplified | None = None,
) -> Gate:
    """The gate of a mode and scope. `noise` is the relative error of the faithful reference in
    other steps of the run, `numbers` the most independent numbers that one has in all `rows`.
    """
    if mode == "P":
        return precision(scope, m, family, numbers, rows, amplified)
    return semantics(
        scope,
        reduction,
        depth,
        noise=max(noise, m.rel_noise),
        numbers=m.effective,
        amplified=amplified,
        family=family,
    )


FEW = 64.0
"""With fewer independent numbers the noise of one op may be small by luck: it is drawn again."""


@dataclass(slots=True)
class JudgedOutput:
    """One output. No `gate`: nothing may be rounded. No `verdict`: its op has no contract."""

    name: str
    dtype: np.dtype[Any]
    metrics: Metrics
    gate: Gate | None
    verdict: Verdict | None

    @property
    def bound(self) -> float | None:
        """The error over the contract's."""
        return None if self.verdict is None else max(self.verdict.error, self.verdict.gain)

    @property
    def shares(self) -> Mapping[str, float]:
        """Those of the gate."""
        return self.gate.shares(self.metrics) if self.gate else {}

    @property
    def complaints(self) -> tuple[str, ...]:
        """What is wrong by the gate, and by the contract."""
        m, verdict = self.metrics, self.verdict
        found = list(self.gate.complaints(m)) if self.gate else []
        if self.gate is None and (m.max_abs or m.special):
            found.append(f"off by {m.max_abs:.3g}, nothing may be rounded here")
        if verdict is not None and not verdict.passed:
            found.append(f"contract exceeded {self.bound:.3g} times at {verdict.where}")
        return tuple(found)


class OpJudge:
    """Judges the calls of one program of one side. `calls` are the reference's, by key, on the
    layer's true inputs.
    """

    def __init__(
        self, mode: Mode, calls: Sequence[Call], real: int, reduction: int,
        family: Family = Family(),  # noqa: B008 - it is frozen
    ) -> None:  # fmt: skip
        self.mode = mode
        self._calls = {call.key: call for call in calls}
        self._real = real
        self._reduction = reduction
        self._family = family

    def __call__(
        self, declared: Declared, kept: Mapping[str, np.ndarray], outputs: Sequence[np.ndarray]
    ) -> list[JudgedOutput]:
        """The verdict on each output.

        The activations are the side's own; weights, tables, page tables and scalars are the
        reference's, so an op that is called with wrong ones is wrong.
        """
        call = self._calls[declared.key]
        arguments = {**call.arguments, **kept}
        exact = evaluate(call.op, arguments, exact=True)
        faithful = evaluate(call.op, arguments, exact=False)
        contract = _contract(call.op, arguments)
        ties = _ties(call.op, arguments, outputs)
        judged = outputs
        if ties and contract is not None:
            # The contract's oracle rounds keys before it writes them, the exact reference does not.
            judged, outputs = (_settled(outputs, ties, right) for right in (contract.wanted, exact))
        verdict = contract(judged) if contract is not None else None
        found = [
            self._output(declared, call, index, verdict, *three)
            for index, three in enumerate(zip(outputs, exact, faithful, strict=True))
        ]
        if self._may_be_amplified(found, verdict):
            narrow = [x.dtype for x in found if x.gate is not None and not self._is_wide(x.dtype)]
            half_ulp = limits(narrow[0]).half_ulp if narrow else HALF_ULP32
            for tries in TRIES:
                of_rows, of_all = self._amplified(call, arguments, exact, tries, half_ulp)
                for output, amplified in zip(found, of_rows, strict=True):
                    output.gate = self._gate(output.metrics, output.dtype, amplified)
                if contract is not None and not narrow:
                    more = [
                        self._more(output, amplified, contract.testing.bitwise)
                        for output, amplified in zip(found, of_all, strict=True)
                    ]
                    verdict = contract(judged, more)
                    for output in found:
                        output.verdict = verdict
                if any(output.complaints for output in found):
                    break
        return found

    def _output(
        self, declared: Declared, call: Call, index: int, verdict: Verdict | None, got: np.ndarray,
        right: np.ndarray, noisy: np.ndarray,
    ) -> JudgedOutput:  # fmt: skip
        one = len(call.outputs) == 1
        name = declared.key if one else f"{declared.key}#{index}"
        if got.shape != right.shape:
            raise ValueError(f"{name}: shape {got.shape}, the reference has {right.shape}")
        metrics = measure(*(self._rows(x, call, index) for x in (got, right, noisy)))
        return JudgedOutput(name, got.dtype, metrics, self._gate(metrics, got.dtype), verdict)

    def _may_be_amplified(self, found: Sequence[JudgedOutput], verdict: Verdict | None) -> bool:
        """Whether something fails, and float32 roundings may be why."""
        for x in found:
            may = self._is_wide(x.dtype) or x.metrics.effective < FEW
            if x.gate is not None and may and worth_trying(x.gate, x.metrics):
                return True
        wide = [x for x in found if x.gate is not None and self._is_wide(x.dtype)]
        # Bits that differ are infinitely off; their gates say how much.
        over = 0.0 if verdict is None else max(verdict.error, verdict.gain)
        within = over < HOPELESS or over == np.inf
        return bool(wide) and over > 1.0 and within and not any(x.metrics.special for x in wide)

    def _is_wide(self, dtype: np.dtype[Any]) -> bool:
        return self.mode == "S" or dtype.itemsize == 4

    def _rows(self, x: np.ndarray, call: Call, index: int) -> np.ndarray:
        """Rows of real tokens, all of an output whose rows are no tokens; of a cache, the slots but
        for the scratch one.
        """
        if x.ndim == 4:
            return x.reshape(-1, *x.shape[2:])[:-1]
        return x if _sorted_by_expert(call.op, index) else x[: self._real]

    def _amplified(
        self,
        call: Call,
        arguments: Mapping[str, Any],
        exact: Sequence[np.ndarray],
        tries: int,
        half_ulp: float,
    ) -> tuple[list[Amplified], list[Amplified]]:
        """What the op makes of errors of its inputs: of the rows of each output that are judged,
        and of all.
        """

        def both(outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [*(self._rows(x, call, i) for i, x in enumerate(outputs)), *outputs]

        found = amplification(
            lambda rng: both(
                evaluate(call.op, arguments, exact=True, tracer=Jitter(rng, half_ulp))
            ),
            both(exact),
            tries,
        )
        return found[: len(exact)], found[len(exact) :]

    def _more(self, output: JudgedOutput, amplified: Amplified, bitwise: bool) -> np.ndarray | None:
        """What each element may be off besides its contract [...]: roundings that the op amplifies.

        A contract of bits holds for inputs as they are rounded. Within a program float32 inputs
        need not be: a product and the sum that reads it may be one operation.
        """
        if output.gate is None or (bitwise and output.dtype.itemsize < 4):
            return None
        elements = amplified.elements
        chance = Family(self._family.comparisons * elements.size).spread(1, amplified.tries)
        more: np.ndarray = chance * walk(2 if bitwise else self._reduction) * elements
        return more

    def _gate(
        self, m: Metrics, dtype: np.dtype[Any], amplified: Amplified | None = None
    ) -> Gate | None:
        """None where nothing is rounded: what comes out was put in, or counted."""
        if not m.rel_noise or dtype.kind in "iub":
            return None
        if self.mode == "P" and dtype.itemsize == 4:
            return accumulated(self._reduction, amplified, self._family)
        return gate_for(
            self.mode, "op", m, self._reduction, amplified=amplified, family=self._family
        )


def _ties(
    op: str, arguments: Mapping[str, Any], outputs: Sequence[np.ndarray]
) -> dict[int, np.ndarray]:
    """By output that is a cache of one byte an entry, which entries [...] roundings of the op's
    contract explain: an op that norms and rotates keys may be a unit off before it writes them,
    which may be the other side of a tie. The op that only writes may not.
    """
    declared, testing = REGISTRY[op], TESTING.get(op)
    narrow = [i for i, x in enumerate(outputs) if x.ndim == 4 and is_narrow(x)]
    if not narrow or not declared.state or not declared.composition or testing is None:
        return {}
    bound, kind = testing.bound, next(x.dtype for x in outputs if not is_narrow(x))
    roundings = bound.roundings + bound.inner + 2.0 * bound.ties
    share = roundings * limits(kind).half_ulp + bound.accumulated * HALF_ULP32
    found: dict[int, np.ndarray] = {}
    for index in narrow:
        entries = HeldEntries(share, outputs[index])
        explained = evaluate(op, arguments, exact=True, choices=(entries,))[index]
        found[index] = explained.view(np.uint8) == outputs[index].view(np.uint8)
    return found


def _settled(
    outputs: Sequence[np.ndarray], ties: Mapping[int, np.ndarray], right: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The outputs with the entries of `right` where ties explain them."""
    return [
        np.where(ties[index], right[index], x) if index in ties else x
        for index, x in enumerate(outputs)
    ]


def _contract(op: str, arguments: Mapping[str, Any]) -> Judge | None:
    load_all()  # the bounds: an op that has none is from another package
    return Judge(op, dict(arguments)) if op in TESTING else None


def _sorted_by_expert(op: str, index: int) -> bool:
    """Whether the rows of an op's output are those of experts, or the experts."""
    shapes = REGISTRY[op].shapes
    if shapes is None or not shapes.results[index].axes.dimensions:
        return False
    return not {"choice", "k", "num_experts"}.isdisjoint(
        shapes.results[index].axes.dimensions[0].names
    )
