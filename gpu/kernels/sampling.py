"""quantize_logits, penalties and sample by Triton kernels: some launches, whatever the rows ask
for.
"""

from __future__ import annotations

import torch
import triton

from ...ops.declare import Array, dtype_name
from .counters import COUNTERS, counters
from .launch import config, overlap, power_of_2, processors, triton_kernel
from .sample_kernels import (
    COLUMNS,
    LEVELS,
    best_kernel,
    bias_kernel,
    clear_kernel,
    count_kernel,
    draw_kernel,
    few_kernel,
    narrow_kernel,
    penalty_kernel,
    plain_kernel,
    quantize_kernel,
    total_kernel,
)


def _takes_logits(logits: Array) -> bool:
    return dtype_name(logits) == "float32"


@triton_kernel("quantize_logits", supports_args=_takes_logits, row_invariant=True)
def quantize_logits(logits: Array) -> Array:
    """See the op."""
    logits, setting = _dense(logits), config("words")
    (rows, vocab), block = logits.shape, setting["block"]
    scores = torch.empty((rows, vocab), dtype=torch.int32, device=logits.device)
    quantize_kernel[(rows, triton.cdiv(vocab, block))](
        logits,
        scores,
        logits.stride(0),
        VOCAB=vocab,
        BLOCK=block,
        num_warps=setting["warps"],
        **overlap(),
    )
    return scores


def _takes_penalties(
    logits: Array,
    history: Array,
    history_row: Array,
    last: Array,
    prompt_len: Array,
    presence: Array,
    frequency: Array,
    repetition: Array,
    repetition_inverse: Array,
    bias_ids: Array,
    bias: Array,
    mask: Array,
) -> bool:
    return dtype_name(logits) == "float32"


@triton_kernel("penalties", supports_args=_takes_penalties, row_invariant=True)
def penalties(
    logits: Array,
    history: Array,
    history_row: Array,
    last: Array,
    prompt_len: Array,
    presence: Array,
    frequency: Array,
    repetition: Array,
    repetition_inverse: Array,
    bias_ids: Array,
    bias: Array,
    mask: Array,
) -> Array:
    """See the op: the words of the history are counted, then all words, then those of the bias."""
    return _penalised(
        logits, history, history_row, last, prompt_len,
        (presence, frequency, repetition, repetition_inverse), bias_ids, bias, mask, None,
    )  # fmt: skip


def _penalised(
    logits: torch.Tensor,
    history: torch.Tensor,
    history_row: torch.Tensor,
    last: torch.Tensor,
    prompt_len: torch.Tensor,
    per_row: tuple[torch.Tensor, ...],
    bias_ids: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor,
    plain: torch.Tensor | None,
) -> torch.Tensor:
    """Scores [row vocab], but for rows that are `plain` [row]."""
    setting = config("words")
    logits, history, bias_ids, bias, mask = (
        _dense(x) for x in (logits, history, bias_ids, bias, mask)
    )
    kept = history_row.contiguous(), last.contiguous()
    per_row = tuple(x.contiguous() for x in per_row)
    (rows, vocab), block, warps = logits.shape, setting["block"], setting["warps"]
    counts = torch.empty((rows, vocab), dtype=torch.int32, device=logits.device)
    scores = torch.empty((rows, vocab), dtype=torch.int32, device=logits.device)
    blocks, length = triton.cdiv(vocab, block), history.shape[1]
    shares = min(blocks, setting["shares"])
    launch = {"VOCAB": vocab, "BLOCK": block, "num_warps": warps, **overlap()}
    # Few rows have a history, or scores: the programs of the others are few.
    clear_kernel[(rows, shares)](*kept, counts, **launch)
    count_kernel[(rows, max(1, min(triton.cdiv(length, block), setting["shares"])))](
        history, *kept, prompt_len.contiguous(), counts, length, history.stride(0), **launch
    )
    penalty_kernel[(rows, blocks if plain is None else shares)](
        logits, counts, *kept, *per_row, mask, scores, counts if plain is None else plain,
        logits.stride(0), mask.stride(0), SKIPS=plain is not None, **launch,
    )  # fmt: skip
    length = bias_ids.shape[1]
    if length == 0:
        return scores
    bias_kernel[(rows, max(1, triton.cdiv(length, block)))](
        logits, bias_ids, bias, mask, scores, length, logits.stride(0), bias_ids.stride(0),
        bias.stride(0),
        mask.stride(0), VOCAB=vocab, BLOCK=block, num_warps=warps, **overlap(),
    )  # fmt: skip
    return scores


def _takes_sample(
    logits: Array,
    scores: Array,
    position: Array,
    seed_lo: Array,
    seed_hi: Array,
    greedy: Array,
    scale: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    filtered: bool,
) -> bool:
    return dtype_name(logits) == "float32" and dtype_name(scores) == "int32"


@triton_kernel("sample", supports_args=_takes_sample, row_invariant=True)
def sample(
    logits: Array,
    scores: Array,
    position: Array,
    seed_lo: Array,
    seed_hi: Array,
    greedy: Array,
    scale: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    filtered: bool,
) -> Array:
    """See the op."""
    draws, filters = (position, seed_lo, seed_hi), (greedy, scale, top_k, top_p, min_p)
    return _sampled(logits, scores, draws, filters, filtered, None)


def _sampled(
    logits: torch.Tensor,
    scores: torch.Tensor,
    draws: tuple[torch.Tensor, ...],
    filters: tuple[torch.Tensor, ...],
    filtered: bool,
    plain: torch.Tensor | None,
) -> torch.Tensor:
    """Tokens [row]. Rows whose filters leave a few words are done in three launches. The limits of
    the others are found 4 bits a launch; rows that ask for none do nothing there. Rows that are
    `plain` [row] have no scores.
    """
    setting, device = config("sample"), logits.device
    logits, scores = _dense(logits), _dense(scores)
    draws, filters = (tuple(x.contiguous() for x in each) for each in (draws, filters))
    rows, vocab = logits.shape
    block, warps = setting["block"], setting["warps"]
    most = triton.cdiv(vocab, setting["least"])
    parts = max(1, min(setting["programs"] * processors() // rows, most)) if rows <= COUNTERS else 1
    size = triton.cdiv(triton.cdiv(vocab, parts), block) * block
    parts = triton.cdiv(vocab, size)
    grid, strides = (rows, parts), (logits.stride(0), scores.stride(0))
    launch = {"VOCAB": vocab, **overlap()}
    reads = {"SKIPS": plain is not None}
    split = launch | {"BLOCK_PARTS": power_of_2(most), "num_warps": warps}

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        # of one entry where nothing is written
        return torch.empty(shape if filtered else (2,), dtype=dtype, device=device)

    each = _round_to_16_bytes(rows * parts)
    bests, broken, keys, ids = torch.empty((4, each), dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int32, device=device)
    marks = out if plain is None else plain
    lanes = max(1, min(block, setting["groups"] // power_of_2(parts)))
    groups, done = room(rows, parts * lanes), room(rows)
    best_kernel[grid](
        logits, scores, marks, bests, groups, broken, *strides, parts, size,
        BLOCK=block, LANES=lanes, FILTERED=filtered, num_warps=warps, **reads, **launch,
    )  # fmt: skip
    sums = room(2, rows, LEVELS.value, parts, COLUMNS.value, dtype=torch.int64)
    found = room(2, _round_to_16_bytes(rows * LEVELS.value))
    limits = sums[0], found[0], sums[1], found[1]
    if filtered:
        totals = room(rows, parts, dtype=torch.int64)
        total_kernel[grid](
            scores,
            bests,
            totals,
            *filters,
            strides[1],
            parts,
            size,
            FEW=setting["few"],
            BLOCK=block,
            **split,
        )
        width = power_of_2(parts * lanes)
        few_kernel[(rows,)](
            logits, scores, marks, bests, groups, broken, totals, room(rows, width),
            room(rows, setting["listed"]), *draws, *filters, done, out, *strides, parts, size,
            lanes, FEW=setting["few"], LISTED=setting["listed"],
            WORDS=power_of_2(triton.cdiv(size, lanes)), BLOCK_GROUPS=width,
            **reads, **split | {"num_warps": setting["few_warps"]},
        )  # fmt: skip
        for mass in (False, True):
            for level in range(LEVELS.value):
                narrow_kernel[grid](
                    scores, bests, *limits, done, *filters, strides[1], parts, size, level,
                    MASS=mass, BLOCK=setting["narrow"], **split,
                )  # fmt: skip
    draw_kernel[grid](
        logits, scores, marks, bests, broken, *limits, done, *draws, *filters, keys, ids,
        counters(device), out, *strides, parts, size, FILTERED=filtered, BLOCK=block, **reads,
        **split,
    )  # fmt: skip
    return out


def _round_to_16_bytes(count: int) -> int:
    """The number of integers of 4 bytes from `count` on that fill multiples of 16: an array behind
    them is aligned, and needs no kernel of its own.
    """
    return triton.cdiv(count, 4) * 4


def _takes_penalised_sample(
    logits: Array,
    history: Array,
    history_row: Array,
    last: Array,
    prompt_len: Array,
    presence: Array,
    frequency: Array,
    repetition: Array,
    repetition_inverse: Array,
    bias_ids: Array,
    bias: Array,
    mask: Array,
    position: Array,
    seed_lo: Array,
    seed_hi: Array,
    greedy: Array,
    scale: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    filtered: bool,
) -> bool:
    return dtype_name(logits) == "float32"


@triton_kernel("penalised_sample", supports_args=_takes_penalised_sample, row_invariant=True)
def penalised_sample(
    logits: Array,
    history: Array,
    history_row: Array,
    last: Array,
    prompt_len: Array,
    presence: Array,
    frequency: Array,
    repetition: Array,
    repetition_inverse: Array,
    bias_ids: Array,
    bias: Array,
    mask: Array,
    position: Array,
    seed_lo: Array,
    seed_hi: Array,
    greedy: Array,
    scale: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    filtered: bool,
) -> Array:
    """See the op: logits alone are read of greedy rows whose scores nothing changes."""
    rows, vocab = logits.shape
    setting = config("words")
    bias_ids, mask, greedy = _dense(bias_ids), _dense(mask), greedy.contiguous()
    history_row, last = history_row.contiguous(), last.contiguous()
    plain = torch.empty(rows, dtype=torch.int32, device=logits.device)
    plain_kernel[(rows,)](
        history_row, last, bias_ids, mask, greedy, plain, bias_ids.shape[1], bias_ids.stride(0),
        mask.stride(0), VOCAB=vocab, BLOCK=setting["block"], num_warps=setting["warps"],
        **overlap(),
    )  # fmt: skip
    per_row = presence, frequency, repetition, repetition_inverse
    scores = _penalised(
        logits, history, history_row, last, prompt_len, per_row, bias_ids, bias, mask, plain
    )
    draws, filters = (position, seed_lo, seed_hi), (greedy, scale, top_k, top_p, min_p)
    return _sampled(logits, scores, draws, filters, filtered, plain)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
