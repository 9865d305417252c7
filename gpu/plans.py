"""The plans of a model on torch, from shapes alone: tensors on the meta device, no weight is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..ops import Op, Plan, Plans, Recorder, resolve
from ..ops.reference.sampling import TOP
from ..shared.config import ResolvedConfig
from ..shared.models import decoder
from ..shared.models.config import ModelConfig
from .kernels import preferred
from .module import Decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = DTYPES | {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
HISTORY = 64


def make_plans(model: ModelConfig, config: ResolvedConfig) -> Plans:
    """Choose implementations for the calls that the largest program of each kind makes. Raises OpError."""
    choose = partial(resolve, "torch", preferred(config.op_priority, config.platform), enable=config.enable_ops)
    base = resolve("torch", enable=("none",))  # kernels do not run on the meta device
    kinds = {kind: choose(calls=record(base, model, config, kind).by_op()) for kind in ("decode", "mixed", "sample")}
    return Plans(kinds)


def record(plan: Plan, model: ModelConfig, config: ResolvedConfig, kind: str) -> Recorder:
    """Run the largest program of a kind on the meta device and record each op's arguments, which hold no data."""
    recorder = Recorder()
    dtype, device = DTYPES[config.dtype], torch.device("meta")
    ops = plan.bind(lambda op, function: recorder.wrap(op, _without_data(op, function)))
    module = Decoder(model, decoder.abstract(model), dict.fromkeys(("decode", "mixed", "sample"), ops), dtype, device)
    module.freeze()

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device)

    if kind == "sample":
        requests, vocab = config.max_num_seqs, model.vocab_size
        logits = module.logits(torch.empty((requests, model.hidden_size), dtype=dtype, device=device))
        row, wide = ints(requests), ints(requests, HISTORY)
        mask = ints(requests, -(-vocab // 32))
        ops.quantize_logits(logits)
        rates = floats(requests), floats(requests)
        scores = ops.penalties(logits, wide, row, row, row, *rates, wide, wide, mask)
        ops.sample(logits, scores, row, row, row, row, floats(requests), row, row, row, True)
        ops.top_logprobs(logits, ops.greedy_sample(logits))
        return recorder
    d = max((d for d in config.table() if d.kind == kind), key=lambda d: d.tokens)
    half = decoder.rotary_tables(model, 1)[0].shape[1]
    kv = torch.empty(
        (model.num_layers, 2, config.page_size, 2 * model.num_kv_heads, model.head_dim),
        dtype=CACHE_DTYPES[config.kv_cache_dtype],
        device=device,
    )
    metadata = ints(d.requests, config.pages_per_request), ints(d.requests + 1), ints(d.requests), ints(2)
    batch = decoder.Batch(floats(d.tokens, half), floats(d.tokens, half), ints(d.tokens), *metadata)
    module(ints(d.tokens), kv, batch, d.kind, d.max_query_len)
    return recorder


def _without_data(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or its results' shapes: where there is no entry it runs on the meta device, where torch's own
    shape functions are in Python and import Dynamo, which takes seconds."""
    return RESULTS.get(op.name, function)


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _scores(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape, dtype=torch.int32)


def _tokens(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def _top(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    rows, best = logits.shape[0], (min(TOP, logits.shape[1]),)
    shapes = (), (), best, best
    dtypes = (torch.float32, torch.int32, torch.int32, torch.float32)
    return tuple(logits.new_empty((rows, *rest), dtype=dtype) for rest, dtype in zip(shapes, dtypes, strict=True))


RESULTS: dict[str, Callable[..., Any]] = {
    "embedding": lambda ids, table: table.new_empty((ids.shape[0], table.shape[1])),
    "add": _like,
    "linear": lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[0])),
    "logits": lambda x, weight: x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32),
    "rms_norm": _like,
    "rotary_embedding": lambda q, k, *_: (_like(q), _like(k)),
    "silu_and_mul": lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    "write_kv": lambda kv, *_: kv,
    "paged_attention": _like,
    "quantize_logits": _scores,
    "penalties": _scores,
    "sample": _tokens,
    "greedy_sample": _tokens,
    "top_logprobs": _top,
}
