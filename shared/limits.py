"""What a step must at least move and compute, and what a device was measured to do: together, a
share of the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .models import decoder
from .models.config import ModelConfig
from .models.table import Parameter, bytes_of


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates that simple programs reach on a device: bytes read and written per second by a copy,
    floating-point operations per second by a large matrix product in the model's dtype. None where
    `note` says why there is none.
    """

    copy_bytes_per_s: float | None
    matmul_flops_per_s: float | None
    note: str


def decode_bytes(
    model: ModelConfig, lengths: Sequence[float], itemsize: int, cache_itemsize: int
) -> float:
    """Bytes that one decode step reads: every weight once, and the cache of requests of `lengths`
    tokens.

    Entries of weights and of the cache have `itemsize` and `cache_itemsize` bytes. Of embedding
    tables that are not the head too, only the rows of the batch are read; of experts, as many as
    the batch chooses where all are as likely.
    """
    table, batch = decoder.parameters_of(model), len(lengths)
    sizes = [(p, bytes_of(p, itemsize) * (1 if p.layers is None else len(p.layers))) for p in table]
    weights: float = sum(size for _, size in sizes)
    if model.num_experts:
        idle = (1 - model.experts_per_token / model.num_experts) ** batch
        weights -= idle * sum(size for p, size in sizes if is_of_experts(p))
    tables = ("embed", "input_embed")[model.tie_embeddings :]
    for shape in (table.top[name].shape for name in tables if name in table.top):
        weights += itemsize * (batch * shape[1] - prod(shape))
    seen = 0.0
    for window in model.layer_windows:
        heads = model.heads(window)
        slots = sum(_seen(model, length, window) for length in lengths)
        seen += 2 * heads.kv * heads.size * slots
    return weights + cache_itemsize * seen


EXPERTS = ("experts_gate_up", "experts_down")


def is_of_experts(parameter: Parameter) -> bool:
    """Whether a parameter holds all experts of a layer."""
    plain = parameter if parameter.piece_of is None else parameter.piece_of.wide
    return plain.name in EXPERTS


def prefill_flops(model: ModelConfig, lengths: Sequence[int]) -> float:
    """Floating-point operations to compute whole prompts and the logits of each one's last token.

    Two per weight of a matrix and token, and four per head entry and (query, key) pair of causal
    attention. In the last layer only K and V are wanted of every token, all else of the last one.
    Of experts, those that a token goes through.
    """
    table = decoder.parameters_of(model)
    share = model.experts_per_token / model.num_experts if model.num_experts else 1.0
    layers = [table.layer(i).values() for i in range(model.num_layers)]
    *before, behind = [
        sum(p.entries * (share if p.name in EXPERTS else 1) for p in layer if len(p.shape) > 1)
        for layer in layers
    ]
    tokens, prompts = sum(lengths), len(lengths)
    *windows, last = model.layer_windows
    of_last = model.heads(last)
    keys = 0 if model.num_reading_layers else 2 * of_last.kv * of_last.size * model.hidden_size
    dense = 2.0 * ((sum(before) + keys) * tokens + (behind - keys) * prompts)
    head = 2.0 * model.vocab_size * model.hidden_size * prompts
    pairs = 0
    for window in windows:
        heads = model.heads(window)
        count = sum(_pairs(model, length, window) for length in lengths)
        pairs += heads.query * heads.size * count
    seen = sum(_seen(model, length, last) for length in lengths)
    return dense + head + 4.0 * (pairs + of_last.query * of_last.size * seen)


def _seen(model: ModelConfig, length: float, window: int) -> float:
    """Keys that the last of `length` tokens sees, itself among them: those of the window or of its
    chunk (0: all).
    """
    if model.windows_are_chunks and window and length > 0:
        return (length - 1) % window + 1
    return min(length, window) if window else length


def _pairs(model: ModelConfig, length: int, window: int) -> int:
    """(query, key) pairs of one causal prompt, keys within the window or the chunk (0: all)."""
    if model.windows_are_chunks and window:
        whole, rest = divmod(length, window)
        return (whole * window * (window + 1) + rest * (rest + 1)) // 2
    seen = min(length, window) if window else length
    return seen * (seen + 1) // 2 + (length - seen) * seen
