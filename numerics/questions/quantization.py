"""What a scheme of quantised weights costs: a model with them beside itself, on the reference in
float32, on given tokens. There is no verdict: how much is too much is the reader's.

Weights: how far those of a layer are from the plain ones. Output: how far what a layer adds to the
stream is, where both get the same. Alone: the divergence of the logits if this layer alone is
quantised. All but the time is the same whenever it is asked again, and hashed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ...ops.namespaces import namespace
from ...ops.reference.narrow import widened_weight
from ...shared.errors import ConfigError
from ...shared.models.quantization import WHEN_LOADED, Quantization
from ...shared.models.table import piece_name
from ...shared.step import StepInput
from ..judging.metrics import divergence, log_softmax
from ..judging.record import Report
from ..progress import Progress, silent
from ..sides.environment import steps_hash, versions
from ..sides.passes import Stepwise
from ..sides.reference import State, reference_of, sources_of, total
from ..sides.steps import cache_shapes, make_steps, pages_of, real_tokens
from ..sides.subject import HostWeights, Subject, check_recordable

CLEAR = 0.5
"""Nats by which the best token leads where it is a clear one."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Of one layer: relative errors, and the divergence of the logits by it alone, in nats."""

    layer: int
    weights: float
    output: float
    alone: float


@dataclass(slots=True)
class QuantizationReport(Report):
    """What a scheme costs: nothing is wrong or missing in it. `kl` and `worst_kl`: divergence of
    the logits from the plain model's, in nats, mean and largest over positions. `top1`: share of
    positions with the same best token; `clear_top1`: of those `clear` whose best token leads by at
    least `CLEAR`.
    """

    kind = "quantization"
    scheme: str
    positions: int = 0
    kl: float = 0.0
    worst_kl: float = 0.0
    top1: float = 0.0
    clear: int = 0
    clear_top1: float = 0.0
    layers: list[LayerCost] = field(default_factory=list)
    has_compared = True

    @property
    def ranked(self) -> list[LayerCost]:
        """Layers by what they add alone, the most expensive first."""
        return sorted(self.layers, key=lambda cost: -cost.alone)

    @property
    def digest(self) -> str:
        """Hex digest of the figures to five digits, the model, the tokens and the scheme."""
        figures = [getattr(self, name) for name in FIGURES]
        figures += [value for cost in self.layers for value in asdict(cost).values()]
        known = [self.scheme, *(self.environment.get(name) for name in ("model_hash", "steps"))]
        text = json.dumps([*known, *(f"{value:.5g}" for value in figures)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def body(self) -> dict[str, Any]:
        ranked = [cost.layer for cost in self.ranked]
        own = {"verdict": "measured", "sides": [self.scheme], "ranked": ranked}
        return asdict(self) | own | {"digest": self.digest}

    def cases(self) -> dict[tuple[str, str], list[str]]:
        return {}


FIGURES = ("positions", "kl", "worst_kl", "top1", "clear", "clear_top1")


def quantization_cost(
    subject: Subject,
    scheme: str,
    prompts: Sequence[np.ndarray],
    progress: Progress = silent,
) -> QuantizationReport:
    """Run the model plain, quantised, and with each layer alone quantised. Raises ConfigError for a
    scheme that is none, and for a checkpoint that is quantised already.
    """
    if scheme not in WHEN_LOADED:
        raise ConfigError(f"scheme: got {scheme!r}, allowed are {', '.join(WHEN_LOADED)}")
    if subject.model.quantization is not None:
        raise ConfigError(
            f"model: got {subject.name}, whose weights are quantised already "
            f"({subject.model.quantization.title}); allowed is the plain model"
        )
    check_recordable(subject, "this")
    began = time.perf_counter()
    subject = subject.with_dtype("float32")
    steps = make_steps(subject, prompts)
    pair = _Pair(subject, scheme, pages_of(steps))
    everything = range(subject.model.num_layers)
    progress("running the plain model")
    squares = np.zeros((len(everything), 2))
    plain = pair.logits(steps, (), squares)
    progress(f"running the model in {scheme}")
    narrow = pair.logits(steps, everything)
    report = QuantizationReport(scheme)
    report.environment = {
        "model": subject.name,
        "model_hash": subject.identity,
        "steps": steps_hash(steps),
        "versions": versions(),
    }
    apart, same, lead = compared(plain, narrow)
    clear = lead >= CLEAR
    report.positions, report.clear = len(apart), int(clear.sum())
    report.kl, report.worst_kl = float(apart.mean()), float(apart.max())
    report.top1 = float(same.mean())
    report.clear_top1 = float(same[clear].mean()) if clear.any() else 1.0
    outputs = np.sqrt(squares[:, 0] / np.maximum(squares[:, 1], 1e-300)).tolist()
    for layer in everything:
        progress(f"layer {layer} of {subject.model.num_layers} alone")
        alone = compared(plain, pair.logits(steps, (layer,)))[0].mean()
        weights = pair.weight_error(layer)
        report.layers.append(LayerCost(layer, weights, outputs[layer], float(alone)))
    report.seconds = time.perf_counter() - began
    return report


def compared(plain: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of logits [row vocab]: (divergence of the others, whether the best token is the same, nats
    by which it leads).
    """
    best = np.partition(log_softmax(plain), -2, axis=-1)[:, -2:]
    return divergence(plain, other), plain.argmax(-1) == other.argmax(-1), best[:, 1] - best[:, 0]


class _Pair:
    """A model and its quantised form on the reference, which can take layers of either."""

    def __init__(self, subject: Subject, scheme: str, pages: int) -> None:
        quantization = Quantization(WHEN_LOADED[scheme])
        narrow = replace(subject, model=replace(subject.model, quantization=quantization))
        self._shapes = cache_shapes(subject, pages)
        self._sources = sources_of(subject.model)
        self._plain, self._narrow = HostWeights(subject), HostWeights(narrow)
        self._sides = reference_of(subject, exact=False), reference_of(narrow, exact=False)

    def logits(
        self, steps: Sequence[StepInput], narrow: Collection[int], squares: np.ndarray | None = None
    ) -> np.ndarray:
        """Logits [row vocab] of all tokens, with these layers quantised.

        `squares` [layer 2], where given, gets by layer the squares of how far off the quantised one
        is on what this run gives it, and of what the layer adds to the stream.
        """
        plain, top, found = self._sides[0], self._plain.top(), []
        caches = [np.zeros(shape, np.float32) for shape in self._shapes]

        def start() -> tuple[np.ndarray, np.ndarray]:
            hidden, _ = (side.embed(top) for side in self._sides)
            return hidden, np.zeros_like(hidden)

        def layer(index: int, stream: tuple[np.ndarray, np.ndarray], cache: np.ndarray) -> Any:
            if squares is not None:
                other = self._layer(True, index, (*stream, cache.copy()))
            after = self._layer(index in narrow, index, (*stream, cache))
            if squares is not None:
                was, off, now = (total(x)[:count] for x in (stream, other, after))
                squares[index] += ((off - now) ** 2).sum(), ((now - was) ** 2).sum()
            return after[:2], after[2]

        walk = Stepwise(self._sources, start, layer, lambda stream: plain.finish(top, *stream))
        for step in steps:
            for side in self._sides:
                side.begin(step)
            count = real_tokens(step)
            finished, caches = walk.run(caches)
            found.append(plain.head(top, finished[:count]))
        return np.concatenate(found)

    def _layer(self, narrow: bool, index: int, state: State) -> State:
        weights = self._narrow if narrow else self._plain
        return self._sides[int(narrow)].layer(index, weights.layer(index), state)

    def weight_error(self, index: int) -> float:
        """How far a layer's quantised weights are off, relative to the plain ones."""
        plain, narrow = self._plain.layer(index), self._narrow.layer(index)
        off = size = 0.0
        for name, parameter in self._narrow.table.layer(index).items():
            of = parameter.piece_of
            if of is None or of.piece != "values":
                continue
            zero = narrow.get(piece_name(name, "zero"))
            scale = narrow[piece_name(name, "scale")]
            wide = widened_weight(namespace("numpy"), narrow[name], scale, zero, of.narrow.kind)
            exact = plain[name].astype(np.float64)
            off += float(((wide - exact) ** 2).sum())
            size += float((exact**2).sum())
        return float(np.sqrt(off / max(size, 1e-300)))


def render(report: QuantizationReport) -> str:
    """The report as text."""
    lines = [
        f"{report.environment['model']} in {report.scheme}, {report.positions} positions, against "
        "its own weights",
        f"  divergence of logits   {report.kl:.3g} nats, at most {report.worst_kl:.3g}",
        f"  same best token        {report.top1:.1%}; {report.clear_top1:.1%} of the "
        f"{report.clear} that lead by {CLEAR} nats",
        "  layer   weights    output     alone, nats   (relative errors; most expensive first)",
    ]
    lines += [
        f"  {cost.layer:5d}   {cost.weights:.2e}   {cost.output:.2e}   {cost.alone:.2e}"
        for cost in report.ranked
    ]
    return "\n".join([*lines, f"digest {report.digest}"])
