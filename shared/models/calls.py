"""The ops that a model's programs call, from shapes alone: no weight is loaded, no framework is
asked.

The decoder runs on numpy arrays that hold no data. That takes less than a millisecond a program, so
every program of the table is recorded, and a plan is made for what an engine really calls. A stage
from outside may do anything; backends trace it in their own framework (`gpu/recording.py`,
`tpu/plans.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from ...bucketing import Descriptor
from ...ops import Plan, Plans, Recorder
from ...ops.plan import plan_layers
from ...ops.recording import OUTSIDE, Call
from ...ops.shapes import recording_ops
from ...ops.source_hash import source_hash
from ..config import ResolvedConfig
from ..step import (
    SAMPLERS,
    Layout,
    StepShape,
    histories_shape,
    processor_layout,
    sampling_layout,
)
from . import decoder
from .blocks import Block
from .caches import CacheLayout, layout_of_shard
from .config import ModelConfig
from .sampler import OF_THE_OP, sample
from .sharding import rows_to_sample
from .spec import Layer, Model
from .stages import Rows, Weights, outside_stages
from .table import Parameter

LAYER_KINDS = ("decode", "mixed")
"""The kinds of programs that have layers."""
KINDS = (*LAYER_KINDS, "sample")
"""The kinds of programs that have a plan each."""

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
}
_ITEM = bytearray(8)


def without_data(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array all of whose elements are the same few bytes."""
    return np.ndarray(shape, DTYPES[dtype], _ITEM, strides=(0,) * len(shape))


def _empty(like: np.ndarray, shape: tuple[int, ...], dtype: str | None = None) -> np.ndarray:
    return np.ndarray(
        shape, DTYPES[dtype] if dtype else like.dtype, _ITEM, strides=(0,) * len(shape)
    )


@dataclass(frozen=True)
class ModelShapes:
    """The arrays of a model's programs, without data. `model` is what one device runs."""

    model: ModelConfig
    config: ResolvedConfig

    @cached_property
    def spec(self) -> Model:
        """The model with one layer of each kind: layers of a kind make the same calls."""
        whole = decoder.model_of(self.model)
        return replace(whole, layers=whole.kinds)

    @cached_property
    def last(self) -> Model:
        """The model with its last layer only."""
        whole = decoder.model_of(self.model)
        return replace(whole, layers=whole.layers[-1:])

    @cached_property
    def top(self) -> dict[str, np.ndarray]:
        """The weights that belong to no layer."""
        return self._without_data(decoder.parameters_of(self.model).top)

    @cached_property
    def layers(self) -> list[dict[str, np.ndarray]]:
        """The weights of a layer of each kind."""
        table, whole = decoder.parameters_of(self.model), decoder.model_of(self.model).layers
        return [self._without_data(table.layer(whole.index(kind))) for kind in self.spec.layers]

    def of_all_words(self, logits: np.ndarray) -> np.ndarray:
        """What samplers get: the logits of all shards, which each has a part of."""
        return without_data((len(logits), self.model.vocab_size), "float32")

    def _without_data(self, parameters: Mapping[str, Parameter]) -> dict[str, np.ndarray]:
        return {
            name: without_data(p.shape, p.dtype_in(self.config.dtype))
            for name, p in parameters.items()
        }

    def caches(self, model: Model) -> list[np.ndarray]:
        """The cache as each layer of `model` sees it; how many pages there will be is not known
        yet.
        """
        whole, pages = decoder.model_of(self.model).layers, 2 * len(self.spec.layers)
        shapes = [self._layout.page_shape(whole.index(layer)) for layer in model.layers]
        return [without_data((pages, *shape), self.config.kv_cache_dtype) for shape in shapes]

    @cached_property
    def _layout(self) -> CacheLayout:
        # The model is what one device runs, so it is not cut once more.
        return layout_of_shard(self.model, self.config)

    def batch(self, d: Descriptor) -> decoder.Batch:
        """What the layers of a program read."""
        angles = without_data((d.tokens, self._rotated), "float32")
        table = without_data((d.requests, self.config.pages_per_request), "int32")
        slots, starts = without_data((d.tokens,), "int32"), without_data((d.requests + 1,), "int32")
        lengths, counts = without_data((d.requests,), "int32"), without_data((2,), "int32")
        return decoder.Batch(angles, angles, slots, table, starts, lengths, counts, d.max_query_len)

    @cached_property
    def _rotated(self) -> int:
        """Half of the entries of a head that are rotated."""
        return int(decoder.rotary_tables(self.model, 1)[0].shape[1])

    def step(self) -> StepShape:
        """The sizes that all steps share. Samplers know nothing of page tables."""
        c = self.config
        return StepShape(
            c.pages_per_request, c.max_num_seqs, c.max_model_len, self.model.vocab_size
        )


def largest_first(config: ResolvedConfig, kind: str) -> list[Descriptor]:
    """The programs of a kind. The largest says best why it is refused."""
    return sorted((d for d in config.table() if d.kind == kind), key=lambda d: -d.tokens)


def plan_programs(
    model: ModelConfig, choose: Callable[..., Plan], record: Callable[[str], Sequence[Call]]
) -> Plans:
    """The plans of all programs. `choose(calls=...)` makes one, `record(kind)` gives the calls
    of a kind.
    """
    spec = decoder.model_of(model)
    layers = spec.kinds
    by_kind = {"sample": choose(calls=record("sample"))}
    by_layer = {}
    for kind in LAYER_KINDS:
        by_kind[kind], by_layer[kind] = plan_layers(choose, record(kind), layers)
    framework = by_kind["sample"].framework
    stages = {name: source_hash(one, framework) for name, one in outside_stages(spec).items()}
    return Plans({kind: by_kind[kind] for kind in KINDS}, by_layer, stages)


class RecordedCalls(decoder.PlainCalls):
    """Plain calls whose recorder is told which kind of layer each belongs to: its number in
    `kinds`.
    """

    def __init__(self, recorder: Recorder, kinds: Sequence[Layer], *parts: Any) -> None:
        super().__init__(*parts)
        self._recorder, self._kinds = recorder, kinds

    def cache_of(self, index: int) -> int:
        """Each of the kinds has a cache here, as that of its source has the same shape."""
        return index

    def layers(
        self, block: Block, stream: decoder.Stream, cache: Any, rows: Any
    ) -> tuple[decoder.Stream, Any]:
        """See `Execution`."""
        self._recorder.layer = self._kinds.index(self.model.layers[block.first])
        try:
            return super().layers(block, stream, cache, rows)
        finally:
            self._recorder.layer = OUTSIDE


def record_layers(
    recorder: Recorder,
    shapes: ModelShapes,
    kind: str,
    drops_rows: Callable[[Descriptor], bool] | None = None,
    joins: bool = False,
) -> None:
    """Record the programs of a kind of step, the largest first.

    `drops_rows` is for a backend that finishes the sampled tokens only: it says whose last layer
    drops the others. `joins` is for one whose walk joins layers.
    """
    ops, kinds = recording_ops(recorder, _empty), shapes.spec.layers

    def calls(model: Model, d: Descriptor) -> RecordedCalls:
        weights, ids = (
            [shapes.layers[kinds.index(kind)] for kind in model.layers],
            without_data((d.tokens,), "int32"),
        )
        parts = ops, model, shapes.top, weights, ids, shapes.batch(d), lambda hidden: hidden
        return RecordedCalls(recorder, kinds, *parts)

    for d in largest_first(shapes.config, kind):
        recorder.program = str(d)
        whole = calls(shapes.spec, d)
        finished, _ = decoder.forward(whole, shapes.caches(shapes.spec))
        if joins:
            record_joints(ops, shapes.spec, shapes.top, shapes.layers, finished)
        if drops_rows is None or d.requests == d.tokens:
            continue
        kept = slice(d.requests)
        if drops_rows(d):
            last = calls(shapes.last, d)
            rows = Rows(kept, last.batch.query_start, last.batch.counts)
            decoder.forward(last, shapes.caches(shapes.last), rows)
        else:
            whole.finish(decoder.Stream(finished[kept], finished[kept]))


def record_joints(
    ops: Any, model: Model, top: Weights, layers: Sequence[Weights], hidden: Any
) -> None:
    """Record what a walk that joins layers calls between them and behind the last one, beside the
    calls of layers by themselves, which comparisons run one at a time.
    """
    top, _ = decoder.with_joints(model, top, layers)
    for before in dict.fromkeys(norm for norm in decoder.joints(model) if norm is not None):
        decoder.finish(ops, model, top, decoder.Stream(hidden, hidden), before)


def record_samplers(
    recorder: Recorder, shapes: ModelShapes, prompt_rows: Sequence[int] = ()
) -> None:
    """Record what follows the layers, for each number of requests, and the log-probabilities of
    `prompt_rows` rows.
    """
    ops, step = recording_ops(recorder, _empty), shapes.step()
    numbers = sorted({d.requests for d in shapes.config.table()}, reverse=True)

    def logits(rows: int) -> np.ndarray:
        recorder.program = f"sample[{rows}]"
        hidden = without_data((rows, shapes.model.hidden_size), shapes.config.dtype)
        out: np.ndarray = decoder.head(ops, shapes.spec, shapes.top, hidden)
        if shapes.model.shard is not None and rows in numbers:
            ops.greedy_sample(out)  # of the words that a shard has
        return shapes.of_all_words(out)

    for requests in numbers:
        of_rows = logits(requests)
        share = rows_to_sample(requests, shapes.model.shard)
        settings = _fields(sampling_layout(share))
        for variant in SAMPLERS:
            fields = _fields(processor_layout(share, step, variant))
            names = (*OF_THE_OP, "bias_ids", "bias")
            history = without_data(histories_shape(step, (variant,)), "int32")
            known = {name: fields[name] for name in names} | {
                "history": history, "last": fields["rows"], "mask": fields["masks"]
            }  # fmt: skip
            sample(ops, variant, of_rows[:share], settings, known)
        ops.top_logprobs(of_rows, without_data((requests,), "int32"))
    for rows in sorted({*prompt_rows} - {*numbers}, reverse=True):
        ops.top_logprobs(logits(rows), without_data((rows,), "int32"))


def _fields(layout: Layout) -> dict[str, np.ndarray]:
    """Arrays without data for the fields of a buffer."""
    return {
        f.name: without_data(f.shape, "float32" if f.floating else "int32")
        for f in layout.fields.values()
    }
