"""What ops give for what they get, in shapes and dtypes alone: to record the calls of a model without computing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from .choosing import named
from .declare import REGISTRY
from .recording import Recorder
from .reference.sampling import TOP

Empty = Callable[..., Any]
"""(like, shape, dtype=None): an array of that shape without data, of the named dtype or of that of `like`."""


def results(empty: Empty) -> Mapping[str, Callable[..., Any]]:
    """The fine ops of the decoder and its samplers, by name."""

    def same(x: Any, *_: Any) -> Any:
        return empty(x, x.shape)

    def scores(logits: Any, *_: Any, **__: Any) -> Any:
        return empty(logits, logits.shape, "int32")

    def tokens(logits: Any, *_: Any) -> Any:
        return empty(logits, logits.shape[:1], "int32")

    def linear(x: Any, weight: Any, _: Any) -> Any:
        return empty(x, (*x.shape[:-1], weight.shape[0]))

    def top_logprobs(logits: Any, _: Any) -> tuple[Any, ...]:
        rows, best = logits.shape[0], min(TOP, logits.shape[1])
        chosen, rank = empty(logits, (rows,), "float32"), empty(logits, (rows,), "int32")
        return chosen, rank, empty(logits, (rows, best), "int32"), empty(logits, (rows, best), "float32")

    return {
        "embedding": lambda ids, table: empty(table, (ids.shape[0], table.shape[1])),
        "add": same,
        "linear": linear,
        "logits": lambda x, weight: empty(x, (x.shape[0], weight.shape[0]), "float32"),
        "rms_norm": same,
        "scale": same,
        "rotary_embedding": lambda q, k, *_: (same(q), same(k)),
        "silu_and_mul": lambda x: empty(x, (*x.shape[:-1], x.shape[-1] // 2)),
        "write_kv": lambda kv, *_: kv,
        "paged_attention": same,
        "quantize_logits": scores,
        "penalties": scores,
        "sample": tokens,
        "greedy_sample": tokens,
        "top_logprobs": top_logprobs,
    }


def recording_ops(recorder: Recorder, empty: Empty) -> Any:
    """A namespace of these ops, and of the coarse ones as compositions of them, whose calls are recorded."""
    space, fine = SimpleNamespace(), results(empty)
    for op in REGISTRY:
        function = fine.get(op.name)
        if function is None and op.level == "coarse":
            function = named(op, partial(op.reference, space))
        if function is not None:
            setattr(space, op.name, recorder.wrap(op, function))
    return space
