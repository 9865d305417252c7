"""Packs a scheduled step into a `StepInput`: gathers from the request table, padded to the step's program."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..bucketing import Descriptor
from .errors import InternalError
from .request_table import POSITION, PROCESSED, PROCESSOR_FIELDS, SAMPLE_ROWS, RequestTable, ScheduledStep
from .sampling_encoding import encode_mask
from .step import SAMPLERS, STOP_SLOTS, DecodeLoop, StepInput, StepShape, batch_layout, processor_layout

PENDING = -2
"""Stands in the history for the token that the device has and the host has not."""


def pack(step: ScheduledStep, table: RequestTable, shape: StepShape, step_id: int) -> StepInput:
    """The input of `step`, in new buffers. Changes nothing.

    Valid only between the `schedule` that made the step and the next call to the scheduler, as the table is read as it
    stands. Raises InternalError if a request of the step has left its row, or the table does not fit `shape`.
    """
    if (
        shape.max_rows != table.max_rows
        or shape.max_model_len != table.max_model_len
        or shape.pages_per_request < table.pages_per_row
    ):
        raise InternalError(f"a table of {table.tokens.shape} tokens and {table.pages.shape} pages is not for {shape}")
    if (table.epoch[step.rows] != step.epochs).any():
        raise InternalError("a step was packed too late: one of its requests has left its row")
    sampled = step.rows if step.decode_only else step.rows[step.samples]
    level = _level(step, table, sampled)
    return StepInput(
        step_id=step_id,
        descriptor=step.descriptor,
        shape=shape,
        sampler=SAMPLERS[level],
        batch=_batch(step, table, shape),
        sampling=_sampling(step, table),
        processors=_processors(step, table, shape) if level == PROCESSED else None,
        logprobs=bool(table.logprobs[sampled].any()),
        prompt_targets=None if step.decode_only else _prompt_targets(step, table),
        loop=DecodeLoop(step.steps, step.chained, _stop_ids(step, table)) if step.steps else None,
    )


def _stop_ids(step: ScheduledStep, table: RequestTable) -> np.ndarray:
    """`[R, STOP_SLOTS]` stop ids; none for a request that has more."""
    ids = np.full((step.descriptor.requests, STOP_SLOTS), -1, np.int32)
    held = table.stop_ids[step.rows]
    few = (held[:, STOP_SLOTS:] < 0).all(axis=1)
    width = min(STOP_SLOTS, held.shape[1])
    ids[: len(held), :width] = np.where(few[:, None], held[:, :width], -1)
    return ids


def _level(step: ScheduledStep, table: RequestTable, sampled: np.ndarray) -> int:
    """The first of SAMPLERS that serves all requests that sample."""
    if not sampled.size:
        return 0
    ends = step.ends if step.decode_only else step.ends[step.samples]
    if (ends < table.min_total[sampled]).any():
        return PROCESSED
    return int(table.level[sampled].max())


@cache
def _batch_fields(descriptor: Descriptor, shape: StepShape) -> tuple[int, tuple[slice, ...]]:
    """Size of the batch buffer, and the place of each field in it, in the order of the layout."""
    layout = batch_layout(descriptor, shape)
    return layout.size, tuple(slice(field.offset, field.offset + field.size) for field in layout.fields.values())


def _batch(step: ScheduledStep, table: RequestTable, shape: StepShape) -> np.ndarray:
    size, places = _batch_fields(step.descriptor, shape)
    buffer = np.zeros(size, np.int32)
    token_ids, positions, slots, pages, query_start, kv_lens, rows, sample_index, counts = (buffer[p] for p in places)
    num_requests, num_tokens, page_size = len(step.rows), step.num_tokens, table.page_size
    # Of each token: its row and position.
    if step.decode_only:
        token_rows, token_positions = step.rows, step.starts
        query_start[:num_requests] = np.arange(num_requests)
        sample_index[:num_requests] = query_start[:num_requests]
    else:
        lengths = step.ends - step.starts
        last = np.cumsum(lengths)
        token_rows = step.rows.repeat(lengths)
        token_positions = np.arange(num_tokens) + (step.ends - last).repeat(lengths)
        query_start[1 : num_requests + 1] = last
        sample_index[:num_requests] = (last - 1) * step.samples
    token_ids[:num_tokens] = table.tokens_flat[token_rows * table.max_model_len + token_positions]
    positions[:num_tokens] = token_positions
    page_index = token_positions // page_size
    page = table.pages_flat[token_rows * table.pages_per_row + page_index]
    slots[:num_tokens] = page * page_size + (token_positions - page_index * page_size)
    slots[num_tokens:] = -1
    # Few columns are in use as a rule; the others are 0 already.
    width = int(table.num_pages[step.rows].max())
    pages.reshape(-1, shape.pages_per_request)[:num_requests, :width] = table.pages[step.rows, :width]
    query_start[num_requests:] = num_tokens
    kv_lens[:num_requests] = step.ends
    rows[:num_requests] = step.rows
    rows[num_requests:] = table.max_rows
    counts[:] = step.num_single, num_requests
    return buffer


def _padded_rows(step: ScheduledStep, table: RequestTable) -> np.ndarray:
    """`[R]` rows of the padded batch: those behind the real ones are the padding row of the table's columns."""
    rows = np.full(step.descriptor.requests, table.max_rows)
    rows[: len(step.rows)] = step.rows
    return rows


def _sampling(step: ScheduledStep, table: RequestTable) -> np.ndarray:
    buffer = table.sampling.take(_padded_rows(step, table), axis=1)
    count = len(step.rows)
    buffer[POSITION, :count] = step.ends
    if not step.decode_only:
        silent = np.flatnonzero(~step.samples)
        buffer[SAMPLE_ROWS, silent] = table.max_rows
        buffer[POSITION, silent] = 0
    return buffer.reshape(-1)


def _processors(step: ScheduledStep, table: RequestTable, shape: StepShape) -> np.ndarray:
    layout = processor_layout(step.descriptor.requests, shape)
    buffer = np.full(layout.size, -1, np.int32)
    rows, count = step.rows, len(step.rows)
    padded = _padded_rows(step, table)

    history = layout.view(buffer, "history")
    known = table.known[rows]
    width = int(known.max())
    history[:count, :width] = table.tokens[rows, :width]
    pending = np.flatnonzero(known == step.starts)
    history[pending, known[pending]] = PENDING

    layout.view(buffer, "prompt_len")[:] = 0
    layout.view(buffer, "prompt_len")[:count] = table.prompt_len[rows]
    layout.view(buffer, "rows")[:] = padded
    numbers = table.processors.take(padded, axis=1)
    for name, values in zip(PROCESSOR_FIELDS, numbers, strict=True):
        layout.view(buffer, name).view(np.int32)[:] = values
    bias = layout.view(buffer, "bias")
    bias[:] = 0
    bias_ids, mask = layout.view(buffer, "bias_ids"), layout.view(buffer, "mask")
    masked = step.ends < table.min_total[rows]
    for index, row in enumerate(rows.tolist()):
        if row in table.biases:
            ids, values = table.biases[row]
            bias_ids[index, : len(ids)] = ids
            bias[index, : len(ids)] = values
        if row in table.masks:
            mask[index] = _base_mask(table, row, shape.vocab_size)
        if masked[index]:
            _ban(mask[index], table.stop_ids[row], shape.vocab_size)
    return buffer


def _base_mask(table: RequestTable, row: int, vocab_size: int) -> np.ndarray | None:
    """The row's mask of allowed minus banned tokens, encoded once."""
    request = table.requests[row]
    if table.masks[row] is None and request is not None:
        table.masks[row] = encode_mask(request.params, vocab_size)
    return table.masks[row]


def _ban(words: np.ndarray, tokens: np.ndarray, vocab_size: int) -> None:
    """Clear the bits of `tokens` in the mask `words [W]`. Tokens that do not exist need no ban."""
    bits = words.view(np.uint32)
    for token in tokens[(tokens >= 0) & (tokens < vocab_size)].tolist():
        bits[token // 32] &= ~np.uint32(1 << token % 32)


def _prompt_targets(step: ScheduledStep, table: RequestTable) -> np.ndarray | None:
    wanted = table.prompt_logprobs[step.rows] & (step.starts + 1 < table.prompt_len[step.rows])
    if not wanted.any():
        return None
    targets = np.full(step.descriptor.tokens, -1, np.int32)
    first = np.cumsum(step.ends - step.starts) - (step.ends - step.starts)
    for index in np.flatnonzero(wanted).tolist():
        row, start = step.rows[index], int(step.starts[index])
        # The last position of the prompt is followed by a sampled token.
        end = min(int(step.ends[index]) + 1, int(table.prompt_len[row]))
        targets[first[index] : first[index] + end - start - 1] = table.tokens[row, start + 1 : end]
    return targets
