"""A step is data: everything a worker needs to run one step, packed into flat int32 buffers with
named views.

The same `StepInput` runs on every backend. Only two things live on the device between steps: the KV
pages, and `last_tokens [max_rows + 1]`, the token that each row sampled last (the last entry is
scratch for padding).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from ..bucketing import Descriptor
from .errors import InternalError

Sampler = Literal["greedy", "random", "filtered", "masked", "processed"]
"""The sampler programs, each able to do all that the ones before it do: argmax only; a draw at a
temperature; top-k, top-p and min-p; masks; penalties and bias. A step takes the first that serves
all its requests. A request gets the same token from each program that can serve it.
"""

SAMPLERS: tuple[Sampler, ...] = ("greedy", "random", "filtered", "masked", "processed")
PROCESSING: tuple[Sampler, ...] = ("masked", "processed")
"""Those that read a buffer of processors."""
BIAS_SLOTS = 304
"""Logit-bias entries per request: the limit of 300, rounded up to a multiple of 8."""
"""Stands in the history for the token that the device has and the host has not."""
HOST_LENGTHS = ("query_start", "kv_lens", "counts")
"""Fields of the batch that implementations with `host_metadata` read on the host."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that all steps of one engine share.

    Page tables of all groups stand one behind another: on the device row `g * (max_rows + 1) + r`
    is that of row r in group g, and row max_rows of each group is for padding.
    """

    pages_per_request: int
    """Columns of a page table."""
    max_rows: int
    max_model_len: int
    vocab_size: int
    num_groups: int = 1

    @property
    def table_rows(self) -> int:
        """Rows of the device's page tables."""
        return self.num_groups * (self.max_rows + 1)


@dataclass(frozen=True, slots=True)
class Field:
    """One named view of a buffer. `floating` fields hold the bits of float32 values."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    floating: bool


class Layout:
    """Named, shaped views of one flat int32 buffer. Works on numpy, JAX and torch buffers alike."""

    def __init__(self, *fields: tuple[str, tuple[int, ...], type]) -> None:
        self.fields: dict[str, Field] = {}
        offset = 0
        for name, shape, kind in fields:
            size = int(np.prod(shape, dtype=np.int64))
            self.fields[name] = Field(name, shape, offset, size, kind is float)
            offset += size
        self.size = offset

    def allocate(self) -> np.ndarray:
        """A zeroed buffer of this layout."""
        return np.zeros(self.size, np.int32)

    def view(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """A writable numpy view of one field."""
        field = self.fields[name]
        part = buffer[field.offset : field.offset + field.size].reshape(field.shape)
        return part.view(np.float32) if field.floating else part

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable numpy views of all fields."""
        return {name: self.view(buffer, name) for name in self.fields}

    def unpack(self, buffer: Any, as_float: Callable[[Any], Any]) -> dict[str, Any]:
        """All fields of a device buffer; `as_float` reinterprets int32 as float32 in that
        framework.
        """
        parts = {}
        for name, field in self.fields.items():
            part = buffer[field.offset : field.offset + field.size].reshape(field.shape)
            parts[name] = as_float(part) if field.floating else part
        return parts


@cache
def batch_layout(descriptor: Descriptor, shape: StepShape) -> Layout:
    """What the backbone reads beside page tables. T tokens, R requests, padded; requests with one
    query token first. G page groups.

    token_ids      [T]     token id; -1 stands for the last token sampled by the row of request i,
                           at index i
    positions      [T]     position in the sequence; 0 for padding
    slots          [G T]   page * page_size + offset where K and V are written, of one page group
                           behind another; -1 for padding: nothing is written
    query_start    [R + 1] first token of each request; padding repeats the number of real tokens
    kv_lens        [R]     tokens in the cache after this step's are written; 0 for padding
    rows           [R]     permanent row of each request; max_rows for padding
    sample_index   [R]     index in [0, T) of each request's last token, whose logits are sampled if
                           any are; 0 for padding
    counts         [2]     requests with one query token (they stand first), requests
    """
    tokens, requests = descriptor.tokens, descriptor.requests
    return Layout(
        ("token_ids", (tokens,), int),
        ("positions", (tokens,), int),
        ("slots", (shape.num_groups * tokens,), int),
        ("query_start", (requests + 1,), int),
        ("kv_lens", (requests,), int),
        ("rows", (requests,), int),
        ("sample_index", (requests,), int),
        ("counts", (2,), int),
    )


@cache
def sampling_layout(requests: int) -> Layout:
    """What every sampler reads, one entry per request. `ops/reference/sampling.py` defines the
    fixed-point numbers.

    sample_rows  row of `last_tokens` that takes the token; max_rows where no later step reads it
                 there (padding, prompts, what is sampled behind a guess)
    position     position that the sampled token will have; the noise depends on it. 0 where
                 nothing is sampled
    seed_lo/hi   the request's 64-bit seed
    greedy       1: take the most probable token
    top_k        largest number of tokens kept; 0 is off
    top_p        Q16 probability mass kept; 65536 is off
    min_p        Q16 distance in log2 units from the most probable token; 2**22 is off
    scale        float32 log2(e) / temperature
    """
    names = ("sample_rows", "position", "seed_lo", "seed_hi", "greedy", "top_k", "top_p", "min_p")
    return Layout(*((name, (requests,), int) for name in names), ("scale", (requests,), float))


@cache
def processor_layout(requests: int, shape: StepShape, sampler: Sampler = "processed") -> Layout:
    """What only the samplers `masked` and `processed` read. For `masked` B is 0.

    Histories stay on the device: see `NewTokens`. The last fields, TABLES, have entries only for
    requests that need one; a buffer on its way is as short as that (`tables_of`).

    prompt_len   [R]     tokens of the prompt at the start of the history
    rows         [R]     as in the batch
    pending      [R]     1: a token that was not read back yet ends the history: the row's last one
    presence     [R]     Q16 presence penalty
    frequency    [R]     Q16 frequency penalty
    repetition   [R]     float32 repetition penalty, and its float32 reciprocal in
                         `repetition_inverse`
    history_row  [R]     row of the device's histories; -1: it has no penalties
    bias_row     [R]     which of the biases; -1: none
    mask_row     [R]     which of the masks; -1: it may have any token
    bias_ids     [R, B]  token ids of the logit bias; -1 unused
    bias         [R, B]  Q16 bias
    masks        [R, W]  bit b of word w is 1 if token 32 w + b may be sampled, W = ceil(vocab / 32)
    """
    slots = BIAS_SLOTS if sampler == "processed" else 0
    return Layout(
        ("prompt_len", (requests,), int),
        ("rows", (requests,), int),
        ("pending", (requests,), int),
        ("presence", (requests,), int),
        ("frequency", (requests,), int),
        ("repetition", (requests,), float),
        ("repetition_inverse", (requests,), float),
        ("history_row", (requests,), int),
        ("bias_row", (requests,), int),
        ("mask_row", (requests,), int),
        ("bias_ids", (requests, slots), int),
        ("bias", (requests, slots), int),
        ("masks", (requests, mask_words(shape.vocab_size)), int),
    )


TABLES = {
    "bias_ids": "bias_row",
    "bias": "bias_row",
    "masks": "mask_row",
}
"""The fields of `processor_layout` with an entry for each request that needs one, and the field
that says which.
"""


def tables_of(layout: Layout, processors: np.ndarray) -> dict[str, np.ndarray]:
    """The entries that a buffer of a `processor_layout` has of each of TABLES, one behind another;
    all of them in a buffer of the layout's whole size.
    """
    whole = processors.size == layout.size
    found, at = {}, layout.fields["bias_ids"].offset
    for name, row in TABLES.items():
        most, width = layout.fields[name].shape
        count = 0
        if width:
            count = most if whole else int(layout.view(processors, row).max()) + 1
        found[name] = processors[at : at + count * width].reshape(count, width)
        at += count * width
    return found


def processors_for(layout: Layout, counts: Mapping[str, int]) -> np.ndarray:
    """A buffer with room for so many entries of each of TABLES; all of it is left open."""
    size = sum(counts[name] * layout.fields[name].shape[1] for name in TABLES)
    return np.empty(layout.fields["bias_ids"].offset + size, np.int32)


def with_all_entries(layout: Layout, processors: np.ndarray) -> np.ndarray:
    """A buffer of the layout's whole size, with -1 where nobody needs an entry."""
    if processors.size == layout.size:
        return processors
    whole = np.full(layout.size, -1, np.int32)
    head = layout.fields["bias_ids"].offset
    whole[:head] = processors[:head]
    for name, entries in tables_of(layout, processors).items():
        layout.view(whole, name)[: len(entries)] = entries
    return whole


def mask_words(vocab_size: int) -> int:
    """int32 words of a bit mask over the vocabulary."""
    return -(-vocab_size // 32)


STOP_SLOTS = 8


@dataclass(frozen=True, slots=True)
class DecodeLoop:
    """Up to `steps` decode steps of the same requests in one `StepInput`; docs/adr/0005 says what
    each of them does.

    `stop_ids` [R, STOP_SLOTS] int32, -1 unused: a worker may stop after an iteration that sampled
    one of them. `chained`: the loop before this one was not read yet, and if it stopped early, this
    one does nothing.
    """

    steps: int
    chained: bool
    stop_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class NewPages:
    """Entries that page tables got since the step before: `pages[i]` stands at `columns[i]` of row
    `rows[i]` of the device's tables (see `StepShape`).

    All are [n] int32; no entry is there twice. `tenants` [k] int32 are the rows of requests that
    have a new request. `start` is the number of entries that all steps before brought: a worker
    that got another number has missed a step. 0 begins new tables.
    """

    start: int
    rows: np.ndarray
    columns: np.ndarray
    pages: np.ndarray
    tenants: np.ndarray

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.pages)


def histories_shape(shape: StepShape, samplers: Collection[Sampler] = SAMPLERS) -> tuple[int, int]:
    """[max_rows + 1, H] of the histories on a device: the tokens of each row that were read back,
    H = max_model_len; -1 behind them. The last row is scratch. Of `samplers` only `processed` reads
    them: without it H is 0.
    """
    return shape.max_rows + 1, shape.max_model_len if "processed" in samplers else 0


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that the histories of a step got since a step last brought theirs: those of request
    `indices[i]` stand at positions `firsts[i]` to `ends[i] - 1` of its row.

    `indices`, `firsts` and `ends` are [k] int32, `tokens` [n] int32 those of all, one request's
    behind another's. A history that begins at 0 is a new one: what else its row held is gone.
    `start` is the number of tokens that all steps before brought, as in `NewPages`.
    """

    start: int
    indices: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step, padded to `descriptor`. The buffers are never written again after packing.

    Page tables come in one of two forms. `new_pages` is the difference to the step before: such
    steps run once, in order. `page_table` [G R, P] int32 holds the pages of each request, one
    group's behind another's, unused entries 0: such a step can be run alone, again, and anywhere.

    `processors` is there only for the samplers PROCESSING; steps may share it. Histories, which
    `processed` reads, come as the difference `new_tokens` or, with a page table, as `histories`
    [k, H] int32 of the requests that have one, in order, -1 unused. `prompt_targets` ([T], the
    prompt token that follows each position, -1 where there is none) is there only if a request of
    the step wants the log-probabilities of its prompt. `loop` makes several steps of one; only a
    worker with `multi_step` gets that.

    `waiting` [k] int64 are the requests whose masks depend on tokens that the step before samples
    (docs/adr/0011). `execute` runs the backbone of such a step alone, `Worker.sample` brings the
    masks. None: no request waits.
    """

    step_id: int
    descriptor: Descriptor
    shape: StepShape
    sampler: Sampler
    batch: np.ndarray
    sampling: np.ndarray
    processors: np.ndarray | None = None
    logprobs: bool = False
    prompt_targets: np.ndarray | None = None
    loop: DecodeLoop | None = None
    new_pages: NewPages | None = None
    page_table: np.ndarray | None = None
    waiting: np.ndarray | None = None
    new_tokens: NewTokens | None = None
    histories: np.ndarray | None = None

    def field(self, name: str) -> np.ndarray:
        """A numpy view of a field of the batch, or `page_table`.

        Raises InternalError for the page table of a step that has a difference instead.
        """
        if name != "page_table":
            return batch_layout(self.descriptor, self.shape).view(self.batch, name)
        if self.page_table is None:
            raise InternalError(
                f"step {self.step_id} has new pages, not the page table of its requests"
            )
        return self.page_table


def with_masks(step: StepInput, masks: np.ndarray) -> np.ndarray:
    """The processors of a step whose requests wait for `masks` [k, W] int32: its own buffer, filled
    in, or a copy if that cannot be written.

    Raises InternalError if the step waits for none, or for others.
    """
    waiting, words = step.waiting, mask_words(step.shape.vocab_size)
    if waiting is None or step.processors is None or masks.shape != (len(waiting), words):
        count = 0 if waiting is None else len(waiting)
        raise InternalError(
            f"step {step.step_id} waits for {count} masks of {words} words, got {masks.shape}"
        )
    processors = step.processors if step.processors.flags.writeable else step.processors.copy()
    layout = processor_layout(step.descriptor.requests, step.shape, step.sampler)
    entries = tables_of(layout, processors)["masks"]
    entries[layout.view(processors, "mask_row")[waiting]] = masks
    return processors


class EntryCount:
    """How many entries of tables or histories steps have brought to a worker so far. Each step
    says how many it follows, 0 where all begin anew.
    """

    def __init__(self, what: str) -> None:
        self._what, self._count = what, 0

    def add(self, step_id: int, start: int, count: int) -> None:
        """Count the `count` entries of a step that follow `start` others.

        Raises InternalError if a step between was lost, or this one came before.
        """
        if start not in (self._count, 0):
            raise InternalError(
                f"step {step_id}: its new {self._what} follow {start}, {self._count} came: "
                "a step was lost or came twice"
            )
        self._count = start + count


class PageEntries:
    """What a worker writes into its page tables [row, P] before each step. All steps pass here,
    in order.
    """

    def __init__(self, shape: StepShape) -> None:
        self._width, self._stride = shape.pages_per_request, shape.max_rows + 1
        self._num_groups = shape.num_groups
        # At most the size of a page, so that no column of a table that came whole is left out.
        self._least_page_size = -(-shape.max_model_len // shape.pages_per_request)
        self._count = EntryCount("entries of page tables")

    def take(self, step: StepInput) -> tuple[np.ndarray, np.ndarray]:
        """(row * P + column, page) of the entries [n] that `step` needs and the steps before did
        not bring.

        Raises InternalError if a step between was lost, or `step` came before.
        """
        new = step.new_pages
        if new is None:
            return self._all_of(step)
        self._count.add(step.step_id, new.start, len(new.pages))
        return new.rows * self._width + new.columns, new.pages

    def _all_of(self, step: StepInput) -> tuple[np.ndarray, np.ndarray]:
        count = int(step.field("counts")[1])
        rows = step.field("rows")[:count]
        # A loop writes behind the tokens of its first step. Columns behind the longest request are
        # not read.
        later = step.loop.steps - 1 if step.loop is not None else 0
        longest = int(step.field("kv_lens")[:count].max(initial=0)) + later
        used = min(self._width, -(-longest // self._least_page_size))
        in_groups = np.arange(self._num_groups)[:, None] * self._stride + rows
        places = in_groups[:, :, None] * self._width + np.arange(used)
        tables = step.field("page_table").reshape(self._num_groups, -1, self._width)
        return places.reshape(-1), tables[:, :count, :used].reshape(-1)


@dataclass(frozen=True, slots=True)
class HistoryChanges:
    """What a worker writes into its histories before the sampler of a step reads them.

    Request `indices[i]` got one token, `tokens[i]` at `columns[i]` of its row: all [n] int32.
    `spans` are the others, as (row, column of the first, tokens); behind each stands nothing.
    """

    indices: np.ndarray
    columns: np.ndarray
    tokens: np.ndarray
    spans: Sequence[tuple[int, int, np.ndarray]] = ()


class HistoryEntries:
    """Says what a worker writes into its histories. All steps that bring some pass here, in
    order.
    """

    def __init__(self) -> None:
        self._count = EntryCount("tokens of histories")

    def take(self, step: StepInput) -> HistoryChanges:
        """The changes of `step`, whose sampler is `processed`.

        Raises InternalError if a step between was lost, or `step` came before, or it has none.
        """
        if step.histories is not None:
            return self._all_of(step, step.histories)
        new = step.new_tokens
        if new is None:
            raise InternalError(f"step {step.step_id} has neither new tokens nor histories")
        self._count.add(step.step_id, new.start, len(new.tokens))
        if len(new.tokens) == len(new.indices) and new.firsts.all():
            return HistoryChanges(new.indices, new.firsts, new.tokens)
        counts = new.ends - new.firsts
        stops = np.cumsum(counts)
        single = (counts == 1) & (new.firsts > 0)
        rows = step.field("rows")
        spans = []
        for i in np.flatnonzero(~single).tolist():
            tokens = new.tokens[stops[i] - counts[i] : stops[i]]
            spans.append((int(rows[new.indices[i]]), int(new.firsts[i]), tokens))
        ones = new.tokens[stops[single] - 1]
        return HistoryChanges(new.indices[single], new.firsts[single], ones, spans)

    def _all_of(self, step: StepInput, histories: np.ndarray) -> HistoryChanges:
        spans = [
            (row, 0, history[history >= 0])
            for row, history in zip(history_rows(step), histories, strict=True)
        ]
        return HistoryChanges(_NOTHING, _NOTHING, _NOTHING, spans)


def history_rows(step: StepInput) -> list[int]:
    """The rows of the requests of a step that have a history, in order."""
    if step.processors is None:
        return []
    layout = processor_layout(step.descriptor.requests, step.shape, step.sampler)
    rows = layout.view(step.processors, "history_row")
    return [row for row in rows.tolist() if row >= 0]


_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log-probabilities of a step, from the raw logits. N rows of requests or of prompt positions.

    chosen [N] float32, rank [N] (1 is the most probable), top_ids [N, 20] and top [N, 20] in
    falling order.
    """

    chosen: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What came back: `tokens [R]` by request (meaningless where nothing was sampled),
    log-probabilities if asked.

    A token of -1 says that a logit of its row was not finite.

    Of a loop that did m iterations, `tokens [m, R]`.

    `streams` [m, layer + 1, 2, T, dim] are there if the engine's demand has them: hidden and
    residual of each token before the layers and behind each, as the step's own program computed
    them, in the run dtype; m is 1 without a loop. NaN where a layer dropped a token; rows of
    padding mean nothing.
    """

    step_id: int
    tokens: np.ndarray
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    streams: np.ndarray | None = None
