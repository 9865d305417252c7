"""The two references: exact (float64, no rounding) and faithful (the run dtype, rounded where the
contracts say so).

The exact one says what is right; the faithful one says how far a correct implementation in the run
dtype may be off. Both are the model of `shared/models/decoder.py` over the ops' references, in
numpy, and take one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...ops import REGISTRY, Op, Plan, resolve
from ...ops.namespaces import namespace
from ...ops.reference.paged import check_reach, oldest_seen
from ...ops.testing import widened
from ...shared.models import decoder
from ...shared.models.config import ModelConfig
from ...shared.models.spec import source_of
from ...shared.step import StepInput
from .narrow_cache import RoundingChoice, is_narrow
from .passes import Stepwise
from .subject import HostWeights, Subject
from .taps import Call, Tracer

State = tuple[np.ndarray, np.ndarray, np.ndarray]
"""hidden, residual [tok dim], and the layer's cache [page slot 2*kvhead hdim]."""


FIELDS = "positions", "slots", "page_table", "query_start", "kv_lens", "counts"


def step_batch(step: StepInput, tables: tuple[np.ndarray, np.ndarray]) -> decoder.Batch:
    """What a step gives every layer besides weights and activations, in numpy."""
    fields: dict[str, Any] = {name: np.array(step.field(name)) for name in FIELDS}
    positions = fields.pop("positions")
    cos, sin = (table[positions] for table in tables)
    return decoder.Batch(cos, sin, **fields, max_query_len=step.descriptor.max_query_len)


def sources_of(model: ModelConfig) -> list[int]:
    """The layer whose cache each layer reads."""
    return [source_of(layer, i) for i, layer in enumerate(decoder.model_of(model).layers)]


class Reference:
    """A model in numpy, one program (embed, layer, finish, head) at a time. `calls` are those of
    the last program.

    `groups` is the page group of each layer in the steps that it runs; none: they have one page
    table. `tracer` sees its ops' calls. `choices` stand for ops where rounding has a choice.
    """

    def __init__(
        self, model: ModelConfig, tables: tuple[np.ndarray, np.ndarray], *, exact: bool,
        groups: Sequence[int] = (), tracer: Tracer | None = None,
        choices: Sequence[RoundingChoice] = (),
    ) -> None:  # fmt: skip
        self.model = model
        self._groups = groups or [0] * model.num_layers
        self.spec = decoder.model_of(model)
        self.exact = exact
        self._tables = tables
        self._tracer = Tracer() if tracer is None else tracer
        self._choices = choices
        self._ops = bound(exact, self._tracer, choices)

    @property
    def calls(self) -> list[Call]:
        """The calls of the last program, in the order in which they began."""
        return self._tracer.calls

    def widen(self, x: np.ndarray) -> np.ndarray:
        """An activation in the dtype that this reference computes in."""
        return x.astype(np.float64) if self.exact else x

    def begin(self, step: StepInput) -> None:
        """Take the step that the next programs belong to."""
        self._batch, self._num_groups = step_batch(step, self._tables), step.shape.num_groups
        self._ids = np.array(step.field("token_ids"))

    def embed(self, top: Mapping[str, np.ndarray]) -> np.ndarray:
        """Hidden states [tok dim]. Layers that have inputs of their own get those of this call."""
        self._tracer.start(top, {"token_ids": self._ids})
        given = self._ops, self.spec, top, self._ids
        with np.errstate(all="ignore"):
            hidden = self.widen(decoder.embed(*given))
            inputs = decoder.layer_input(*given, hidden)
        self._batch = self._batch._replace(layer_input=inputs)
        return hidden

    def layer(self, index: int, weights: Mapping[str, np.ndarray], state: State) -> State:
        """One layer. What is given is widened first, but for a cache whose dtype says how it holds
        a number.
        """
        hidden, residual = (self.widen(x) for x in state[:2])
        kv = state[2] if is_narrow(state[2]) else self.widen(state[2])
        for choice in self._choices:
            choice.layer = index
        batch = self._batch.of_group(self._groups[index], self._num_groups).of_layer(index)
        self._tracer.start(weights, batch.arrays())
        with np.errstate(all="ignore"):
            stream, kv = decoder.layer(
                self._ops,
                self.spec.layers[index],
                weights,
                decoder.Stream(hidden, residual),
                kv,
                batch,
            )
        return stream.hidden, stream.residual, kv

    def finish(
        self, top: Mapping[str, np.ndarray], hidden: np.ndarray, residual: np.ndarray
    ) -> np.ndarray:
        """Finished hidden states [tok dim]."""
        self._tracer.start(top, {})
        with np.errstate(all="ignore"):
            stream = decoder.Stream(self.widen(hidden), self.widen(residual))
            return np.asarray(decoder.finish(self._ops, self.spec, top, stream))

    def run_steps(
        self, weights: HostWeights, start: Sequence[np.ndarray], steps: Sequence[StepInput]
    ) -> Iterator[list[np.ndarray]]:
        """Run `steps` from the caches `start`. Of each, the streams [tok dim] behind each layer,
        and the logits [tok vocab].
        """
        top, caches, found = weights.top(), list(start), list[np.ndarray]()

        def begin() -> Any:
            hidden = self.embed(top)
            return hidden, np.zeros_like(hidden)

        def layer(index: int, stream: Any, cache: np.ndarray) -> Any:
            *stream, cache = self.layer(index, weights.layer(index), (*stream, cache))
            found.append(total(stream))
            return stream, cache

        def end(stream: Any) -> np.ndarray:
            return self.head(top, self.finish(top, *stream))

        walk = Stepwise(sources_of(self.model), begin, layer, end)
        for step in steps:
            self.begin(step)
            found.clear()
            logits, caches = walk.run(caches)
            yield [*found, logits]

    def traced(
        self, top: Mapping[str, np.ndarray], weights: Callable[[int], Mapping[str, np.ndarray]],
        layers: Iterable[int], given: Callable[[int, np.ndarray], State],
        end: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Iterator[tuple[str | int, list[Call]]]:  # fmt: skip
        """One program after another, each with its calls: `embed`, some layers by number, `finish`,
        `head`. `given` says what a layer is given, by the embedded tokens where nothing else is
        known, as is `end`, what is behind the layers.
        """
        hidden = self.embed(top)
        yield "embed", self.calls
        for index in layers:
            self.layer(index, weights(index), given(index, hidden))
            yield index, self.calls
        rows = self.finish(top, *((hidden, hidden) if end is None else end))
        yield "finish", self.calls
        self.head(top, rows)
        yield "head", self.calls

    def head(self, top: Mapping[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
        """Logits [tok vocab]."""
        self._tracer.start(top, {})
        with np.errstate(all="ignore"):
            return np.asarray(decoder.head(self._ops, self.spec, top, self.widen(rows)))


def reference_of(
    subject: Subject, *, exact: bool, tracer: Tracer | None = None,
    tables: tuple[np.ndarray, np.ndarray] | None = None, choices: Sequence[RoundingChoice] = (),
) -> Reference:  # fmt: skip
    """The reference of a subject, for its steps; `tables` stand for its rotary tables, `choices`
    for ops where rounding has a choice.
    """
    groups = [place.group for place in subject.layout.places]
    tables = subject.rotary_tables() if tables is None else tables
    return Reference(
        subject.model, tables, exact=exact, groups=groups, tracer=tracer, choices=choices
    )


def bound(exact: bool, tracer: Tracer | None = None, choices: Sequence[RoundingChoice] = ()) -> Any:
    """The numpy ops, exact or faithful."""

    def wrap(op: Op, function: Any) -> Any:
        if op.name in FAITHFUL and not exact:
            function = FAITHFUL[op.name]
        for choice in choices:
            function = choice.wrap(op.name, function)
        return tracer.wrap(op, function) if tracer is not None else function

    return _plan().bind(wrap)


@cache
def _plan() -> Plan:
    return resolve("numpy", enable=("none",))


@cache
def _ops(exact: bool) -> SimpleNamespace:
    space: SimpleNamespace = bound(exact)
    return space


def evaluate(
    op: str, arguments: Mapping[str, Any], *, exact: bool, tracer: Tracer | None = None,
    choices: Sequence[RoundingChoice] = (),
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """One op: exactly, on float64 copies of its floating arguments, or faithfully, in the dtypes
    that they have. `tracer` sees its calls, `choices` stand for ops where rounding has a choice.
    """
    plain = tracer is None and not choices
    ops = _ops(exact) if plain else bound(exact, tracer, choices)
    given = widened(REGISTRY[op], dict(arguments)) if exact else arguments
    with np.errstate(all="ignore"):
        out = getattr(ops, op)(**given)
    return out if isinstance(out, tuple) else (out,)


def faithful_attention(
    q: Any, kv: Any, page_table: Any, query_start: Any, kv_lens: Any, counts: Any, scale: float,
    window: int,
    soft_cap: float, max_query_len: int, k_scale: Any = None, v_scale: Any = None,
    sinks: Any = None, chunk: int = 0,
) -> np.ndarray:  # fmt: skip
    """`paged_attention` with the rounding that its contract has besides the output's: softmax
    weights to q's dtype.

    They are rounded before they are normalised, as every implementation does: a row's largest
    weight is 1 there, exact, so normalised weights would be off by up to a fifth more in rows that
    see few slots.
    """
    check_reach(window, chunk)
    _, page_size, kv_heads, size = kv.shape
    group = q.shape[1] // (kv_heads // 2)
    out = np.zeros_like(q)
    for i in range(int(counts[1])):
        start, stop, length = int(query_start[i]), int(query_start[i + 1]), int(kv_lens[i])
        pages = page_table[i, : -(-length // page_size)]
        cache_ = kv[pages].reshape(-1, kv_heads, size)[:length].astype(np.float32)
        keys, values = (cache_[:, j::2].repeat(group, axis=1) for j in (0, 1))
        scores = np.einsum("thd,shd->hts", q[start:stop].astype(np.float32), keys)
        scores *= np.float32(scale)
        if k_scale is not None:
            scores *= k_scale.astype(np.float32).repeat(group)[:, None, None]
        if soft_cap > 0:
            scores = soft_cap * np.tanh(scores / soft_cap)
        position = np.arange(length - (stop - start), length)[:, None]
        slot = np.arange(length)[None, :]
        seen = (slot <= position) & (slot >= oldest_seen(position, window, chunk))
        scores = np.where(seen, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        if sinks is not None:
            sink = sinks.astype(np.float32)[:, None, None]
            top = np.maximum(top, sink)
        weights = np.exp(scores - top)
        total = weights.sum(-1)
        if sinks is not None:
            total = total + np.exp(sink - top)[..., 0]
        total = total.T[:, :, None]
        if v_scale is not None:
            total = total / v_scale.astype(np.float32).repeat(group)[:, None]
        # What nobody sees may be of a page that is another's by now, or NaN.
        values = np.where(seen.any(0)[:, None, None], values, np.float32(0.0))
        product = np.einsum("hts,shd->thd", weights.astype(q.dtype).astype(np.float32), values)
        out[start:stop] = (product / total).astype(q.dtype)
    return out


def faithful_latent_attention(
    q: Any, rotated: Any, cache: Any, page_table: Any, query_start: Any, kv_lens: Any, counts: Any,
    scale: float, max_query_len: int,
) -> np.ndarray:  # fmt: skip
    """`latent_attention` likewise: as that of one head, which is K and V."""
    both, kv = np.concatenate([q, rotated], axis=-1), cache[:, :, :1].repeat(2, axis=2)
    step = page_table, query_start, kv_lens, counts
    found = faithful_attention(both, kv, *step, scale, 0, 0.0, max_query_len)
    return found[..., : q.shape[2]]


FAITHFUL = {
    "paged_attention": faithful_attention,
    "latent_attention": faithful_latent_attention,
}
"""Ops that round on the way, as their contracts say."""


def total(state: Sequence[np.ndarray]) -> np.ndarray:
    """hidden + residual in float64: the state of the model at a layer's end."""
    summed: np.ndarray = state[0].astype(np.float64) + state[1].astype(np.float64)
    return summed


def storage_dtype(name: str) -> Any:
    """The numpy dtype of that name."""
    return namespace("numpy").float_dtype(name)
