"""Packs a scheduled step into a `StepInput`: gathers from the request table, padded to the
step's program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ..bucketing import Descriptor
from .errors import InternalError
from .request_table import (
    MASKED,
    NO_STOP,
    POSITION,
    PROCESSED,
    PROCESSOR_FIELDS,
    SAMPLE_ROWS,
    UNKNOWN,
    RequestTable,
    ScheduledStep,
    padding_column,
)
from .sampling_encoding import encode_mask
from .step import (
    SAMPLERS,
    STOP_SLOTS,
    TABLES,
    DecodeLoop,
    Sampler,
    StepInput,
    StepShape,
    batch_layout,
    processor_layout,
    processors_for,
    tables_of,
)

_NOBODY, _NO_ROWS = np.zeros(0, np.bool_), np.zeros(0, np.int64)


def pack(
    step: ScheduledStep,
    table: RequestTable,
    shape: StepShape,
    step_id: int,
    with_page_table: bool = False,
) -> StepInput:
    """The input of `step`. Changes nothing. `with_page_table`: one that can be run
    by itself.

    Valid only between the `schedule` that made the step and the next call to the scheduler, as the
    table is read as it stands. Raises InternalError if a request has left its row since then, or
    the table does not fit `shape`.
    """
    if (
        shape.max_rows != table.max_rows
        or shape.max_model_len != table.max_model_len
        or shape.pages_per_request < table.pages_per_row
        or shape.num_groups != len(table.groups)
    ):
        raise InternalError(
            f"a table of {table.tokens.shape} tokens and {table.pages.shape} pages is not for "
            f"{shape}"
        )
    if table.num_releases != step.num_releases:
        raise InternalError(
            "a step was packed too late: a request has left its row since it was scheduled"
        )
    level = _level(step)
    waiting = processors = histories = None
    if level >= MASKED:
        processors, waiting = _processors(step, table, shape, SAMPLERS[level])
    if level == PROCESSED and with_page_table:
        histories = histories_of(step.group.remembered[1], table)
    return StepInput(
        step_id=step_id,
        descriptor=step.descriptor,
        shape=shape,
        sampler=SAMPLERS[level],
        batch=_batch(step, table, shape),
        sampling=_sampling(step, table),
        processors=processors,
        logprobs=step.group.logprobs,
        prompt_targets=None if step.decode_only else _prompt_targets(step, table),
        loop=None
        if step.loop is None
        else DecodeLoop(step.loop.steps, step.loop.chained, _stop_ids(step)),
        new_pages=None if with_page_table else step.new_pages,
        page_table=page_table_of(step.rows, step.descriptor.requests, table, shape)
        if with_page_table
        else None,
        waiting=waiting,
        new_tokens=None if with_page_table else step.new_tokens,
        histories=histories,
    )


def padding(descriptor: Descriptor, shape: StepShape) -> StepInput:
    """A step of no requests, which runs a program and leaves nothing behind."""
    batch = _batch_fields(descriptor, shape)[0].copy()
    sampling = padding_column(shape.max_rows).repeat(descriptor.requests)
    rows = shape.num_groups * descriptor.requests
    page_table = np.zeros((rows, shape.pages_per_request), np.int32)
    return StepInput(0, descriptor, shape, "greedy", batch, sampling, page_table=page_table)


def page_table_of(
    rows: np.ndarray, requests: int, table: RequestTable, shape: StepShape
) -> np.ndarray:
    """`[G requests, P]` pages of `rows` of the table, in order, one group's behind another's; 0
    elsewhere.
    """
    pages = np.zeros((shape.num_groups, requests, shape.pages_per_request), np.int32)
    tables = table.pages.reshape(shape.num_groups, table.max_rows, -1)
    pages[:, : len(rows), : table.pages_per_row] = tables[:, rows]
    return pages.reshape(-1, shape.pages_per_request)


def histories_of(rows: np.ndarray, table: RequestTable) -> np.ndarray:
    """`[k, H]` tokens of `rows` of the table that were read back; -1 behind them."""
    histories: np.ndarray = table.tokens[rows]
    places = np.arange(histories.shape[1])
    histories[places >= table.known[rows][:, None]] = UNKNOWN
    return histories


def _stop_ids(step: ScheduledStep) -> np.ndarray:
    """`[R, STOP_SLOTS]` stop ids; none for a request that has more."""
    ids = np.full((step.descriptor.requests, STOP_SLOTS), NO_STOP, np.int32)
    stop_ids = step.group.stop_ids
    is_few = (stop_ids[:, STOP_SLOTS:] == NO_STOP).all(axis=1)
    width = min(STOP_SLOTS, stop_ids.shape[1])
    ids[: len(stop_ids), :width] = np.where(is_few[:, None], stop_ids[:, :width], NO_STOP)
    return ids


def _level(step: ScheduledStep) -> int:
    """The first of SAMPLERS that serves all requests that sample."""
    group = step.group
    if group.longest_min_total and (step.samples & (step.ends < group.min_total)).any():
        return max(MASKED, group.level)
    return group.level


@cache
def _batch_fields(descriptor: Descriptor, shape: StepShape) -> tuple[np.ndarray, tuple[slice, ...]]:
    """A batch of padding alone, and the place of each field in it, in the order of the layout."""
    layout = batch_layout(descriptor, shape)
    buffer = layout.allocate()
    layout.view(buffer, "slots")[:] = -1
    layout.view(buffer, "rows")[:] = shape.max_rows
    return buffer, tuple(
        slice(field.offset, field.offset + field.size) for field in layout.fields.values()
    )


def _batch(step: ScheduledStep, table: RequestTable, shape: StepShape) -> np.ndarray:
    places = _batch_fields(step.descriptor, shape)[1]
    buffer = _rows_of(step, shape).copy()
    token_ids, positions, slots, query_start, kv_lens, _, sample_index, counts = (
        buffer[p] for p in places
    )
    group = step.group
    num_requests, num_tokens = len(group), step.num_tokens
    # Of each token: its position, and where its row begins in the tables.
    if step.decode_only:
        first_token, first_page, token_positions = group.first_token, group.first_page, step.starts
    else:
        lengths = step.ends - step.starts
        last = np.cumsum(lengths)
        owner = group.indices.repeat(lengths)
        first_token, first_page = group.first_token[owner], group.first_page[owner]
        token_positions = np.arange(num_tokens) + (step.ends - last)[owner]
        query_start[1 : num_requests + 1] = last
        query_start[num_requests:] = num_tokens
        sample_index[:num_requests] = last - 1
        counts[0] = step.num_single
    token_ids[:num_tokens] = table.tokens_flat.take(first_token + token_positions)
    if step.drafts is not None:
        token_ids[step.drafts.places] = step.drafts.tokens
    positions[:num_tokens] = token_positions
    for number, page_group in enumerate(table.groups):
        page_size, first_slot = page_group.page_size, number * step.descriptor.tokens
        columns, offsets = np.divmod(token_positions, page_size)
        entries = first_page + columns
        if number:
            entries += number * table.pages_per_group
        pages = table.pages_flat.take(entries)
        slots[first_slot : first_slot + num_tokens] = pages * page_size + offsets
    kv_lens[:num_requests] = step.ends
    return buffer


def _rows_of(step: ScheduledStep, shape: StepShape) -> np.ndarray:
    """The batch with the fields that say which rows it holds, as if all of them decoded; steps
    of a group share it.
    """
    group = step.group
    if group.batch is None or group.batch[0] != step.descriptor:
        buffer, count = _batch_fields(step.descriptor, shape)[0].copy(), len(group)
        fields = batch_layout(step.descriptor, shape).views(buffer)
        fields["query_start"][:count] = fields["sample_index"][:count] = group.indices
        fields["query_start"][count:] = count
        fields["rows"][:count] = group.rows
        fields["counts"][:] = count
        group.batch = step.descriptor, buffer
    return group.batch[1]


def _sampling(step: ScheduledStep, table: RequestTable) -> np.ndarray:
    """The sampling buffer: fields that stay, and the positions of the tokens that are sampled."""
    fields = step.group.sampling(step.descriptor.requests).copy()
    fields[POSITION, : len(step.group)] = (
        step.ends if step.decode_only else step.ends * step.samples
    )
    if step.drafts is not None:
        # What is sampled behind a guess may not be the last token of its row.
        fields[SAMPLE_ROWS, step.drafts.places] = table.max_rows
    return fields.reshape(-1)


@dataclass(frozen=True, slots=True)
class _Processors:
    """What the processors of a group are made of, while `made_for` stays as it is.

    `head` are the fields before the tables, `masked` and `biased` the requests with an entry of
    their own in these. `buffer`: all of it, for steps to share, if no mask changes with the tokens.
    """

    made_for: tuple[object, ...]
    head: np.ndarray
    masked: list[int]
    biased: list[int]
    buffer: np.ndarray | None


def _processors(
    step: ScheduledStep, table: RequestTable, shape: StepShape, sampler: Sampler
) -> tuple[np.ndarray, np.ndarray | None]:
    """(What `processor_layout` says, the requests that wait for masks, which are left open.)

    Steps of a group share a buffer, which nobody may write to, if no mask changes.
    """
    group, rows = step.group, step.rows
    pending = table.known[rows] == step.starts
    bans = _NOBODY
    if group.longest_min_total:
        bans = step.ends < group.min_total
    made_for = step.descriptor.requests, shape, sampler, pending.tobytes(), bans.tobytes()
    kept = group.processors
    if not isinstance(kept, _Processors) or kept.made_for != made_for:
        kept = group.processors = _kept_processors(step, table, made_for, pending, bans)
    if kept.buffer is not None:
        return kept.buffer, None
    # What may follow a token that was not read back is not known.
    waiting = group.matched[(pending & step.samples)[group.matched]]
    buffer = _with_entries(step, table, shape, sampler, kept, bans, set(waiting.tolist()))
    if not len(group.matched):
        buffer.flags.writeable = False
        group.processors = replace(kept, buffer=buffer)
    return buffer, waiting if len(waiting) else None


def _kept_processors(
    step: ScheduledStep,
    table: RequestTable,
    made_for: tuple[int, StepShape, Sampler, bytes, bytes],
    pending: np.ndarray,
    bans: np.ndarray,
) -> _Processors:
    """`pending` and `bans` [R] say of which requests the last token was not read back, and of which
    stop ids are banned; `bans` [0]: of none.
    """
    requests, shape, sampler, *_ = made_for
    layout = processor_layout(requests, shape, sampler)
    group, rows, count = step.group, step.rows, len(step.rows)
    is_masked = table.restricted[rows]
    if len(bans):
        is_masked |= bans
    masked, biased = np.flatnonzero(is_masked), _NO_ROWS
    head = np.full(layout.fields["bias_ids"].offset, -1, np.int32)
    fields = {name: layout.view(head, name) for name in layout.fields if name not in TABLES}
    if sampler == "processed":
        biased = group.biased
        remembered, their_rows = group.remembered
        fields["history_row"][remembered] = their_rows
    for name, which in (("bias_row", biased), ("mask_row", masked)):
        fields[name][which] = np.arange(len(which))
    fields["prompt_len"][:], fields["pending"][:], fields["rows"][:] = 0, 0, table.max_rows
    fields["prompt_len"][:count] = table.prompt_len[rows]
    fields["pending"][:count] = pending
    fields["rows"][:count] = rows
    for name, values in zip(PROCESSOR_FIELDS, table.processors, strict=True):
        field = fields[name].view(np.int32)
        field[:count], field[count:] = values[rows], values[-1]
    return _Processors(made_for, head, masked.tolist(), biased.tolist(), None)


def _with_entries(
    step: ScheduledStep,
    table: RequestTable,
    shape: StepShape,
    sampler: Sampler,
    kept: _Processors,
    bans: np.ndarray,
    waiting: set[int],
) -> np.ndarray:
    """A new buffer of a group's processors, with the entries of its tables. The masks of `waiting`
    requests are left open.
    """
    layout, rows = processor_layout(step.descriptor.requests, shape, sampler), step.rows
    sizes = {"bias_row": len(kept.biased), "mask_row": len(kept.masked)}
    buffer = processors_for(layout, {name: sizes[row] for name, row in TABLES.items()})
    buffer[: len(kept.head)] = kept.head
    entries = tables_of(layout, buffer)
    for index, mask in zip(kept.masked, entries["masks"], strict=True):
        if index in waiting:
            continue  # `with_masks` brings it
        row = int(rows[index])
        mask[:] = _base_mask(table, row, shape.vocab_size) if row in table.masks else -1
        if len(bans) and bans[index]:
            _ban(mask, table.stop_ids[row], shape.vocab_size)
    for index, ids, bias in zip(kept.biased, entries["bias_ids"], entries["bias"], strict=True):
        own, numbers = table.biases[int(rows[index])]
        ids[: len(own)], ids[len(own) :] = own, -1
        bias[: len(own)], bias[len(own) :] = numbers, 0
    return buffer


def _base_mask(table: RequestTable, row: int, vocab_size: int) -> np.ndarray | None:
    """The row's mask of allowed minus banned tokens, encoded once; or that of what may follow."""
    request = table.requests[row]
    if request is not None and request.matcher is not None:
        return request.matcher.mask
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
