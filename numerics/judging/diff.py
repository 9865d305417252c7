"""What a comparison found: rows of findings, a verdict, and where the first fault is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import FAILED, NOT_COMPARED, NotComparable
from .gates import Family, Mode, Scope
from .metrics import Metrics, fields_json, jsonable
from .record import Report

BEHIND = "fused_add_rms_norm", "logits"
"""Ops outside of layers that stand behind them."""
ORDER: dict[Scope, int] = {"op": 0, "layer": 1, "inherited": 2, "logits": 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """One tensor of one side, compared. `layer` is -1 outside of layers.

    `scope`: `op`, judged on that op's own inputs; `layer`, on the reference's inputs of the layer;
    `inherited`, in the run as a whole; `logits`, its end. `contract` is the error in units of what
    the op's contract allows, `shares` are metrics in units of their gates, `place` says where the
    largest error is.
    """

    side: str
    mode: Mode
    scope: Scope
    step: int
    layer: int
    tap: str
    implementation: str
    metrics: Metrics
    complaints: tuple[str, ...] = ()
    contract: float | None = None
    place: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.complaints

    @property
    def name(self) -> str:
        """`layer.7.linear[qkv]`, or the tap alone outside of layers."""
        return f"layer.{self.layer}.{self.tap}" if self.layer >= 0 else self.tap

    @property
    def row(self) -> float:
        """The layer; outside of layers -1 before them, and infinity behind them."""
        if self.layer >= 0:
            return self.layer
        is_behind = self.scope == "logits" or self.tap.split("[")[0] in BEHIND
        return float("inf") if is_behind else -1

    def to_json(self) -> dict[str, Any]:
        return {
            **fields_json(self), "metrics": fields_json(self.metrics),
            "shares": {name: jsonable(share) for name, share in self.shares.items()},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogitsFinding:
    """The ends of two runs: KL in nats both ways and of the noise, flips, and agreement of the 5
    best tokens.

    `step` is the step's number, -1 for rows of several steps.
    """

    rows: int
    kl_ab: float
    kl_ba: float
    kl_a: float
    kl_b: float
    kl_noise: float
    argmax_equal: int
    top5: float
    ties: int
    real: int
    flips: tuple[Mapping[str, Any], ...] = ()
    complaints: tuple[str, ...] = ()
    mode: str = ""
    step: int = -1


@dataclass(frozen=True, slots=True)
class ServedFinding:
    """One run of one engine: what it did, and how far off what it served is.

    `steps` counts steps by kind (mixed, decode, loop); `cached` prompt tokens came from the prefix
    cache. `sigma` is the error of the log-probabilities of all `positions` over what rounding makes
    of them, `limit` what is allowed; `worst` is the largest share that one position, `worst_place`,
    takes of its limit. Of `tokens`, `ties` differ from the reference's where rounding decides, and
    `flips` elsewhere.

    `streams` are the error over the noise of what the engine's programs had before the layers and
    behind each, over all their tokens; `first_wrong` says where they are wrong first.
    """

    side: str
    run: str
    mode: Mode
    requests: int
    steps: Mapping[str, int]
    preemptions: int
    cached: int
    positions: int
    sigma: float
    limit: float
    worst: float
    worst_place: str
    tokens: int
    ties: int
    flips: tuple[Mapping[str, Any], ...] = ()
    complaints: tuple[str, ...] = ()
    streams: tuple[float, ...] = ()
    first_wrong: str = ""


ENDS: dict[str, type[Any]] = {"logits": LogitsFinding, "served": ServedFinding}
"""What a comparison holds beside findings of tensors, by field."""


@dataclass(slots=True)
class Diff(Report):
    """All findings of one comparison. `problems` are failures that are no tensor's: unequal
    weights, unequal bits.
    """

    kind = "diff"
    sides: tuple[str, ...]
    findings: list[Finding] = field(default_factory=list)
    logits: list[LogitsFinding] = field(default_factory=list)
    served: list[ServedFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def extend(self, other: Diff) -> None:
        """Take over the findings of another comparison of the same sides."""
        for name in ("findings", "logits", "served", "problems", "missing", "notes"):
            getattr(self, name).extend(getattr(other, name))
        self.seconds += other.seconds

    @property
    def failures(self) -> list[Finding]:
        """Findings with complaints, in the order in which the model computes them; local ones
        first.
        """
        return sorted((f for f in self.findings if not f.passed), key=_order)

    def wrong(self) -> list[str]:
        """What is wrong, in words: findings as in `failures`, problems, and the ends."""
        found = [
            f"{f.side}, mode {f.mode}, {f.name}: {'; '.join(f.complaints)}" for f in self.failures
        ]
        ends: list[Any] = [*self.logits, *self.served]
        return [*found, *self.problems, *(text for entry in ends for text in entry.complaints)]

    @property
    def is_wrong(self) -> bool:
        return bool(self.wrong())

    @property
    def has_compared(self) -> bool:
        return bool(self.findings or self.served)

    def first_divergence(self, side: str | None = None) -> Finding | None:
        """The earliest tap that is wrong by itself: its own inputs are right. None if there is
        none.

        A finding on an op's own inputs goes before one that only shows what came before it.
        """
        failures = [f for f in self.failures if side is None or f.side == side]
        return failures[0] if failures else None

    def worst(self, count: int = 5) -> list[Finding]:
        """The findings with the largest sigma, one per side, tap and layer."""
        best: dict[Any, Finding] = {}
        for f in sorted(self.findings, key=_severity, reverse=True):
            best.setdefault((f.side, f.mode, f.scope, f.layer, f.tap), f)
        return list(best.values())[:count]

    def assert_ok(self) -> None:
        """Raise AssertionError with the first things that are wrong, NotComparable if not
        everything was compared.
        """
        if self.exit_code == FAILED:
            raise AssertionError("\n".join(self.wrong()[:10]))
        if self.exit_code == NOT_COMPARED:
            raise NotComparable("not compared: " + (", ".join(self.missing[:5]) or "anything"))

    def body(self) -> dict[str, Any]:
        first = self.first_divergence()
        return {
            "sides": self.sides,
            "first_divergence": None if first is None else first.to_json(),
            "notes": self.notes,
            **{name: [fields_json(entry) for entry in getattr(self, name)] for name in ENDS},
            "findings": [f.to_json() for f in self.findings],
        }

    def cases(self) -> dict[tuple[str, str], list[str]]:
        """A case for each side, mode, scope and tap (or implementation of an op)."""
        cases: dict[tuple[str, str], list[str]] = {}
        for f in self.findings:
            case = cases.setdefault((f"{f.side}.{f.mode}.{f.scope}", f.name), [])
            case += [f"step {f.step}: {complaint}" for complaint in f.complaints]
        for index, entry in enumerate(self.logits):
            cases[("logits", f"comparison {index}")] = list(entry.complaints)
        for run in self.served:
            cases[(f"{run.side}.{run.mode}.served", run.run)] = list(run.complaints)
        for problem in self.problems:
            cases[("problems", problem)] = [problem]
        return cases


def load(record: Mapping[str, Any]) -> Diff:
    """The comparison that `dumps` wrote. Raises NotComparable if something is missing."""
    try:
        findings = [
            Finding(**{
                **{name: raw[name] for name in Finding.__dataclass_fields__},
                "metrics": Metrics(**{name: _value(value) for name,
                value in raw["metrics"].items()}),
                "complaints": tuple(raw["complaints"]),
                "contract": _number(raw["contract"]),
                "shares": {name: _number(value) for name, value in raw["shares"].items()},
            })
            for raw in record["findings"]
        ]  # fmt: skip
        ends = {
            name: [
                kind(**{k: _value(raw[k], k) for k in kind.__dataclass_fields__})
                for raw in record[name]
            ]
            for name, kind in ENDS.items()
        }
        lists = {name: list(record[name]) for name in ("problems", "missing", "notes")}
        environment, seconds = dict(record["environment"]), float(record["seconds"])
        return Diff(
            tuple(record["sides"]),
            findings,
            environment=environment,
            seconds=seconds,
            **ends,
            **lists,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotComparable(
            f"the result is damaged or of another version: {type(error).__name__} {error}"
        ) from None


def _value(value: Any, name: str = "") -> Any:
    """A field from JSON, where tuples are lists."""
    return tuple(value) if isinstance(value, list) else _number(value, name)


TEXTS = ("mode", "side", "run", "worst_place", "first_wrong")


def _number(value: Any, name: str = "") -> Any:
    """A number from JSON, where infinities and NaN are text."""
    return float(value) if isinstance(value, str) and name not in TEXTS else value


def _severity(f: Finding) -> float:
    return max(
        f.metrics.sigma if f.mode != "S" else 0.0, f.contract or 0.0, float(len(f.complaints))
    )


def _order(f: Finding) -> tuple[Any, ...]:
    """Local before inherited; then as the model computes: by step and layer."""
    return (f.scope not in ("op", "layer"), f.step, f.row, ORDER[f.scope])


POOLED_SIGMA = 1.05
"""Allowed to a layer over all steps, where chance is left less."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """A layer over all steps. `sigma` is its error over its noise.

    `excess` is the mean of Metrics.row_excess over all `rows`, `wander` the root of the sum of its
    squares, over `rows`. Every row is one number, as all of it may move with one rounding where
    attention is sharp; and every row counts alike, as the noise of a few may be nearly all of it.
    """

    sigma: float
    excess: float
    wander: float
    rows: int

    @property
    def row_sigma(self) -> float:
        """Sigma of a row, as the mean of all rows has it."""
        return _sigma(self.excess)

    def limit(self, family: Family) -> float:
        """What row_sigma may be. Without a fault, chance decides whether error or noise is the
        larger one in a row: signs of excesses are random, whatever elements of a row share.
        """
        return max(POOLED_SIGMA, _sigma(family.signs * self.wander))

    def smallest(self, family: Family) -> float:
        """The smallest fault that exceeds the limit, if it adds to all rows in proportion to their
        noise: its root mean square over that. Infinite where rows are too few for any.
        """
        left = 1.0 - family.signs**2 / max(self.rows, 1)
        wander = self.wander / left**0.5 if left > 0.0 else float("inf")
        sigma = max(POOLED_SIGMA, _sigma(family.signs * wander))
        return (sigma * sigma - 1.0) ** 0.5


def _sigma(excess: float) -> float:
    """The root of e / n from (e - n) / (e + n)."""
    return ((1.0 + excess) / (1.0 - excess)) ** 0.5 if excess < 1.0 else float("inf")


def pooled_layers(diff: Diff, side: str, scope: Scope = "layer") -> dict[int, Pooled]:
    """Each layer of a side over all steps of mode P."""
    of_layer: dict[int, list[Metrics]] = {}
    for f in diff.findings:
        if (f.side, f.scope, f.mode) == (side, scope, "P") and f.layer >= 0:
            of_layer.setdefault(f.layer, []).append(f.metrics)
    return {layer: pool(of_layer[layer]) for layer in sorted(of_layer)}


def pool(steps: Sequence[Metrics]) -> Pooled:
    """A layer over steps."""
    error, noise = (sum(getattr(m, name) for m in steps) for name in ("error_power", "noise_power"))
    rows = sum(m.rows for m in steps)
    return Pooled(
        sigma=(error / noise) ** 0.5 if noise else 1.0,
        excess=sum(m.row_excess for m in steps) / max(rows, 1),
        wander=sum(m.row_squares for m in steps) ** 0.5 / max(rows, 1),
        rows=rows,
    )


def layer_sigmas(diff: Diff, side: str, scope: Scope = "layer") -> dict[int, float]:
    """Sigma of each layer of a side in mode P, over all steps."""
    return {layer: found.sigma for layer, found in pooled_layers(diff, side, scope).items()}


def pooled_sides(diff: Diff) -> tuple[Family, dict[tuple[str, int], Pooled]]:
    """Each layer of each side over all steps of mode P, and the family of these."""
    found = {
        (side, layer): pooled
        for side in diff.sides
        for layer, pooled in pooled_layers(diff, side).items()
    }
    return Family(len(found)), found


def pooled_problems(diff: Diff) -> list[str]:
    """Layers whose rows exceed their limit over all steps."""
    family, found = pooled_sides(diff)
    return [
        f"{side}: layer.{layer} sigma of rows {pooled.row_sigma:.3f} over all steps > {limit:.3g}"
        for (side, layer), pooled in found.items()
        if not pooled.row_sigma <= (limit := pooled.limit(family))
    ]


def beyond_dtype(diff: Diff, dtype: str) -> list[str]:
    """What the run dtype cannot hold, by side: nobody can say whether it is right."""
    found: dict[str, list[Finding]] = {}
    for f in diff.findings:
        if f.metrics.beyond:
            found.setdefault(f.side, []).append(f)
    return [
        f"{side}: {len(beyond)} tensors have numbers that {dtype} cannot hold, the first is "
        f"{beyond[0].name} of step {beyond[0].step} with {beyond[0].metrics.beyond}"
        for side, beyond in found.items()
    ]
