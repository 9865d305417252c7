"""The running requests as a structure of arrays: a step of 256 decodes costs some numpy calls, no
loop over requests.

A request gets a row when it starts and keeps it until it ends or is preempted. `last_tokens[row]`
on the device belongs to the same row. Each release of a row raises its epoch: a step in flight
knows by it that its token is for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..bucketing import Descriptor
from .drafts import Drafts
from .errors import InternalError
from .page_groups import PageGroup, base_page, widest
from .request import Request
from .sampling_encoding import encode_bias, encode_processors, encode_sampling, sampler_of
from .sampling_params import SamplingParams
from .step import SAMPLERS, NewPages, NewTokens, sampling_layout

UNKNOWN = -1
"""Stands in `tokens` where no token is known. Also what the batch wants there: the device has
that token.
"""

SAMPLING_FIELDS = tuple(sampling_layout(1).fields)
"""The fields of the sampling buffer, each one entry per request: the buffer is a matrix [field,
request].
"""
SAMPLE_ROWS = SAMPLING_FIELDS.index("sample_rows")
POSITION = SAMPLING_FIELDS.index("position")
PROCESSOR_FIELDS = ("presence", "frequency", "repetition", "repetition_inverse")
"""The processors that are one number per request, as they follow each other in the processor
buffer.
"""
MASKED, PROCESSED = SAMPLERS.index("masked"), SAMPLERS.index("processed")

_PADDING = SamplingParams(temperature=0.0)
NO_STOP = -1
"""Stands in `stop_ids` where there is none."""
_STOP_COLUMNS = 4
_NO_ENTRIES = np.zeros((4, 0), np.int32)
_NO_PAGES = np.zeros(0, np.int64)
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Loop:
    """`steps` decode steps in one. `chained`: it counts on all steps of the loop before it,
    which was not read yet.
    """

    steps: int
    chained: bool


class Group:
    """Requests of a step, aligned: their rows, and what stays as it is while they keep them. Steps
    share a group.

    Nobody may change its arrays, all [R]: int64, `samples` bool (whether the step samples a token
    of the request). `epochs` tell whether a row still has the same tenant.
    """

    def __init__(
        self,
        table: RequestTable,
        rows: np.ndarray,
        requests: Sequence[Request],
        samples: np.ndarray,
    ) -> None:
        self.rows, self.requests, self.samples = rows, requests, samples
        self.epochs = table.epoch[rows]
        self._table = table
        self._sampling: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int32))
        self.batch: tuple[Descriptor, np.ndarray] | None = None
        """What the packer keeps of a batch of these rows."""
        self.processors: object = None
        """What the packer keeps of their processors."""

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.requests)

    def select(self, indices: np.ndarray) -> Group:
        """The group of some of its requests."""
        requests = [self.requests[index] for index in indices.tolist()]
        return Group(self._table, self.rows[indices], requests, self.samples[indices])

    @cached_property
    def indices(self) -> np.ndarray:
        """0 to R - 1."""
        return np.arange(len(self.rows))

    @cached_property
    def first_token(self) -> np.ndarray:
        """Where each row begins in `tokens_flat`."""
        first: np.ndarray = self.rows * self._table.max_model_len
        return first

    @cached_property
    def first_page(self) -> np.ndarray:
        """Where each row begins in `pages_flat`, in the first group."""
        first: np.ndarray = self.rows * self._table.pages_per_row
        return first

    @cached_property
    def max_total(self) -> np.ndarray:
        """See `RequestTable`."""
        column: np.ndarray = self._table.max_total[self.rows]
        return column

    @cached_property
    def min_total(self) -> np.ndarray:
        """See `RequestTable`."""
        column: np.ndarray = self._table.min_total[self.rows]
        return column

    @cached_property
    def longest_min_total(self) -> int:
        """Behind it, no stop id of any request is masked."""
        return int(self.min_total.max(initial=0))

    @cached_property
    def stop_ids(self) -> np.ndarray:
        """`[R, n]` stop ids, -1 where there is none; n is the largest number of one request."""
        stop_ids: np.ndarray = self._table.stop_ids[self.rows]
        width = int((stop_ids != NO_STOP).sum(axis=1).max(initial=0))
        return stop_ids[:, :width]

    @cached_property
    def level(self) -> int:
        """Index in SAMPLERS of the first that serves all requests that sample, min_tokens aside."""
        return int(self._table.level[self.rows[self.samples]].max(initial=0))

    @cached_property
    def remembered(self) -> tuple[np.ndarray, np.ndarray]:
        """The requests that have penalties, which need their histories, and their rows."""
        indices: np.ndarray = np.flatnonzero(self._table.penalised[self.rows])
        return indices, self.rows[indices]

    @cached_property
    def biased(self) -> np.ndarray:
        """The requests that have a logit bias."""
        indices: np.ndarray = np.flatnonzero(self._table.biased[self.rows])
        return indices

    @cached_property
    def matched(self) -> np.ndarray:
        """The requests whose masks change with their tokens: their texts have a form."""
        found = [i for i, request in enumerate(self.requests) if request.matcher is not None]
        return np.array(found, np.int64)

    @cached_property
    def logprobs(self) -> bool:
        """Whether a request that samples wants log-probabilities."""
        return bool(self._table.logprobs[self.rows[self.samples]].any())

    def sampling(self, size: int) -> np.ndarray:
        """`[field, size]` sampling fields of its requests and of padding behind them, positions
        aside.
        """
        if self._sampling[0] != size:
            rows = np.full(size, self._table.max_rows)
            rows[: len(self.rows)] = self.rows
            fields = self._table.sampling.take(rows, axis=1)
            silent = np.flatnonzero(~self.samples)
            fields[SAMPLE_ROWS, silent] = self._table.max_rows
            self._sampling = size, fields
        return self._sampling[1]


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step, R requests in the order of the batch: those with exactly one query token stand
    first.

    Request i of the group computes positions `starts[i]` to `ends[i] - 1`; where
    `group.samples[i]`, it samples the token of position `ends[i]`. All arrays are `[R]`, and nobody
    may change them.

    `num_releases` is the request table's when the step was made: while that stays, so do all
    tenants. `new_pages` are the entries that page tables got for this step, `new_tokens` what
    histories got if its sampler reads them. Of a `loop`, all else says what its first step does.
    With `drafts` a request has several entries of the group.
    """

    descriptor: Descriptor
    group: Group
    starts: np.ndarray
    ends: np.ndarray
    num_single: int
    num_tokens: int
    decode_only: bool
    """Every request is a decode: one token each, and each samples."""
    num_releases: int
    new_pages: NewPages
    new_tokens: NewTokens | None = None
    loop: Loop | None = None
    drafts: Drafts | None = None

    @property
    def requests(self) -> Sequence[Request]:
        """The requests, in the order of the batch."""
        return self.group.requests

    @property
    def rows(self) -> np.ndarray:
        """Their rows in the request table."""
        return self.group.rows

    @property
    def samples(self) -> np.ndarray:
        """Whether the step samples a token of each."""
        return self.group.samples

    @property
    def num_iterations(self) -> int:
        """Decode steps of a loop; 1 of a plain step."""
        return 1 if self.loop is None else self.loop.steps


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What a step brought. `requests[i]` got the token `tokens[i]`, entry `indices[i]` of the
    step's output. In a loop a request appears once for each of its tokens, which follow one
    another.

    `finished` are those of `requests` that ended with it; their `finish_reason` is set and `output`
    complete. `failed` ended with ERROR and got no token at all. Requests that ended or were
    preempted while the step was in flight do not appear.
    """

    requests: Sequence[Request]
    tokens: np.ndarray
    indices: np.ndarray
    finished: Sequence[Request]
    failed: Sequence[Request] = ()


class RequestTable:
    """Rows of running requests. Written by the scheduler, read by the packer; nobody else touches
    it.

    Columns are int64 (what numpy indexes with) unless noted; those of a free row mean nothing,
    except `epoch`.

    tokens      [row, max_model_len] int32  token ids; -1 from `known` on
    known       [row]  tokens whose ids are on the host: prompt, and output that was read back
    computed    [row]  tokens whose keys and values are computed by the steps scheduled so far
    prompt_len  [row]
    max_total   [row]  see `Request.max_total`
    min_total   [row]  before position `min_total` stop ids are masked (0: never)
    pages       [group * row, pages_per_row] int32  page tables of all groups, one group's rows
                behind another's; 0 before `dropped` and from `num_pages` on
    num_pages   [group, row]  columns that have a page or had one
    dropped     [group, row]  columns at the front that no query reads any more: they have no page
    capacity    [row]  tokens that the pages of all groups hold
    registered  [row]  how many times `page_size` tokens were offered to the prefix cache
    epoch       [row]  how often the row was released
    stop_ids    [row, any] int32  -1 where there is none
    level       [row]  index in SAMPLERS of the first program that serves the request, min_tokens
                       aside
    sent        [row]  tokens of the history that steps have brought to the device (0: none yet)
    penalised, biased, restricted [row] bool  whether there are penalties, a logit bias, or tokens
                                              that are not allowed
    logprobs, prompt_logprobs [row] bool  whether they are wanted
    alone       [row] bool  the host need not look between two tokens: no stop strings,
                            log-probabilities, processors
    sampling    [field, row + 1] int32, processors [field, row + 1] int32  encoded parameters; the
                                                                           last row is padding
    """

    def __init__(self, max_rows: int, max_model_len: int, groups: Sequence[PageGroup]) -> None:
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.groups = tuple(groups)
        self.page_size = base_page(groups)
        self.pages_per_row = widest(groups, max_model_len)
        # Not filled: a row that was never used costs no memory.
        self.tokens = np.empty((max_rows, max_model_len), np.int32)
        self.tokens_flat = self.tokens.reshape(-1)
        self.pages = np.zeros((len(groups) * max_rows, self.pages_per_row), np.int32)
        self.pages_flat = self.pages.reshape(-1)
        self.pages_per_group = max_rows * self.pages_per_row
        """Entries of `pages_flat` that belong to a group."""
        self.known, self.computed, self.prompt_len = _columns(3, max_rows)
        self.max_total, self.min_total = _columns(2, max_rows)
        self.capacity, self.registered = _columns(2, max_rows)
        self.num_pages, self.dropped = np.zeros((2, len(groups), max_rows), np.int64)
        self.epoch, self.level = _columns(2, max_rows)
        self.logprobs, self.prompt_logprobs, self.alone = np.zeros((3, max_rows), np.bool_)
        self.penalised, self.biased, self.restricted = np.zeros((3, max_rows), np.bool_)
        (self.sent,) = _columns(1, max_rows)
        self.stop_ids = np.full((max_rows, _STOP_COLUMNS), NO_STOP, np.int32)
        self.sampling = np.zeros((len(SAMPLING_FIELDS), max_rows + 1), np.int32)
        self.processors = np.zeros((len(PROCESSOR_FIELDS), max_rows + 1), np.int32)
        self.requests: list[Request | None] = [None] * max_rows
        self.num_releases = 0
        """How often a row was released: while it stays, every row keeps its tenant."""
        self.biases: dict[int, tuple[list[int], list[int]]] = {}
        """Token ids and Q16 values, of the rows that have a logit bias."""
        self.masks: dict[int, np.ndarray | None] = {}
        """Rows that allow or ban tokens; the packer puts the bit mask there when it first needs
        it.
        """
        self._free = list(range(max_rows))[::-1]
        # (rows, columns, pages) of each append since `take_new_pages`. The device's tables are made
        # of nothing else.
        self._appended: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._tenants: list[int] = []
        self._no_pages = NewPages(0, *_NO_ENTRIES)
        self._num_sent = 0
        self._encode(max_rows, _PADDING, 0)

    @property
    def num_free(self) -> int:
        """Rows without a request."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows with a request."""
        return self.max_rows - len(self._free)

    def assign(self, request: Request, tokens: np.ndarray) -> int:
        """Give `request`, whose known tokens are `tokens`, a row without pages; nothing is computed
        yet.

        Raises InternalError if all rows are taken.
        """
        if not self._free:
            raise InternalError("all rows of the request table are taken")
        row = self._free.pop()
        params, count = request.params, len(tokens)
        self.tokens[row, :count] = tokens
        self.tokens[row, count:] = UNKNOWN
        self.known[row] = count
        self.computed[row] = self.capacity[row] = 0
        self.num_pages[:, row] = self.dropped[:, row] = 0
        self.prompt_len[row] = request.num_prompt_tokens
        self.max_total[row] = request.max_total
        # With no stop ids min_tokens masks nothing, and the cheaper samplers will do.
        self.min_total[row] = (
            request.num_prompt_tokens + params.min_tokens if request.stop_ids else 0
        )
        self.logprobs[row] = params.logprobs is not None
        self.prompt_logprobs[row] = params.prompt_logprobs is not None
        self._set_stop_ids(row, request.stop_ids)
        self._encode(row, params, request.seed)
        self.level[row] = SAMPLERS.index(sampler_of(params))
        self.alone[row] = not params.stop and params.logprobs is None and self.level[row] < MASKED
        self.sent[row] = 0
        self.penalised[row] = (self.processors[:, row] != self.processors[:, -1]).any()
        self.biased[row] = bool(params.logit_bias)
        if params.logit_bias:
            self.biases[row] = encode_bias(params)
        self.restricted[row] = (
            params.allowed_token_ids is not None
            or bool(params.banned_token_ids)
            or request.matcher is not None
        )
        if self.restricted[row]:
            self.masks[row] = None
        self.requests[row], self.registered[row] = request, 0
        self._tenants.append(row)
        request.row, request.source = row, self
        return row

    def release(self, row: int) -> np.ndarray:
        """Take the row from its request, which gets its output to keep, and return its pages in
        order (`int64`).
        """
        request = self.requests[row]
        if request is None:
            raise InternalError(f"row {row} was released but is free")
        if self._appended:
            # The next tenant's entries would stand beside this one's in the same difference.
            raise InternalError(f"row {row} was released while a step is being built")
        pages = np.array(self.pages_of(row), np.int64)
        for number in range(len(self.groups)):
            self.pages[self.table_row(number, row), : self.num_pages[number, row]] = 0
        request.saved_output = self.output_of(row)
        request.row, request.source = -1, None
        self.requests[row] = None
        self.biases.pop(row, None)
        self.masks.pop(row, None)
        self.epoch[row] += 1
        self.num_releases += 1
        self._free.append(row)
        return pages

    def table_row(self, group: int, row: int) -> int:
        """The row of `pages` that is the page table of `row` in a group."""
        return group * self.max_rows + row

    def begin_pages(self, group: int, row: int, column: int) -> None:
        """Let the page table of a new request begin at `column`: no query reads the ones before."""
        self.num_pages[group, row] = self.dropped[group, row] = column

    def append_pages(self, group: int, row: int, pages: np.ndarray) -> None:
        """Add `pages` at the end of the row's page table in a group."""
        first = int(self.num_pages[group, row])
        last = first + len(pages)
        self.pages[self.table_row(group, row), first:last] = pages
        self.num_pages[group, row] = last
        self.capacity[row] = self._capacity(row)
        self._append(group, np.full(len(pages), row), np.arange(first, last), pages)

    def append_page_each(self, group: int, rows: np.ndarray, pages: np.ndarray) -> None:
        """Add one page to each of `rows`, all different, in a group: `pages[i]` to `rows[i]`."""
        columns = self.num_pages[group, rows]
        places = (rows + group * self.max_rows) * self.pages_per_row + columns
        self.pages_flat[places] = pages
        self.num_pages[group, rows] = columns + 1
        self.capacity[rows] = self._capacity(rows)
        self._append(group, rows, columns, pages)

    def _append(self, group: int, rows: np.ndarray, columns: np.ndarray, pages: np.ndarray) -> None:
        # On the device each group's tables have one row more, for padding.
        self._appended.append((rows + group * (self.max_rows + 1), columns, pages))

    def _capacity(self, rows: int | np.ndarray) -> np.ndarray:
        """Tokens that the pages of `rows` hold in every group."""
        held = [self.num_pages[n, rows] * group.page_size for n, group in enumerate(self.groups)]
        capacity: np.ndarray = held[0]
        for other in held[1:]:
            capacity = np.minimum(capacity, other)
        return capacity

    def drop_front(self, group: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Take the pages before column `columns[i]` from each of `rows` in a group, and return
        them. A page that several requests hold may be there more than once.
        """
        first = self.dropped[group, rows]
        counts = np.maximum(columns - first, 0)
        total = int(counts.sum())
        if not total:
            return _NO_PAGES
        owner = np.arange(len(rows)).repeat(counts)
        within = np.arange(total) - (np.cumsum(counts) - counts)[owner]
        table_rows = rows[owner] + group * self.max_rows
        places = table_rows * self.pages_per_row + first[owner] + within
        pages: np.ndarray = self.pages_flat[places].astype(np.int64)
        self.pages_flat[places] = 0
        self.dropped[group, rows] = first + counts
        return pages

    def take_new_pages(self) -> NewPages:
        """The entries that were appended since this was last called, for the step that is being
        built.
        """
        if not self._appended:
            return self._no_pages
        tenants = np.array(self._tenants, np.int32)
        self._tenants.clear()
        entries = self._appended[0]
        if len(self._appended) > 1:
            rows, columns, pages = (
                np.concatenate(part) for part in zip(*self._appended, strict=True)
            )
            entries = rows, columns, pages
        rows, columns, pages = (part.astype(np.int32) for part in entries)
        new = NewPages(self._no_pages.start, rows, columns, pages, tenants)
        self._appended.clear()
        self._no_pages = NewPages(new.start + len(pages), *_NO_ENTRIES)
        return new

    def take_new_tokens(self, group: Group) -> NewTokens:
        """The tokens that the histories of `group` got since this was last called for them, for the
        step that is being built.
        """
        indices, rows = group.remembered
        firsts, ends = self.sent[rows], self.known[rows]
        counts = ends - firsts
        total, start = int(counts.sum()), self._num_sent
        if not total:
            return NewTokens(start, _NO_TOKENS, _NO_TOKENS, _NO_TOKENS, _NO_TOKENS)
        if not counts.all():
            grown = counts.nonzero()[0]
            indices, rows, firsts = indices[grown], rows[grown], firsts[grown]
            ends, counts = ends[grown], counts[grown]
        places = rows * self.max_model_len + firsts
        if total > len(rows):
            before = np.cumsum(counts) - counts
            places = (places - before).repeat(counts) + np.arange(total)
        self.sent[rows] = ends
        self._num_sent += total
        indices, firsts, ends = (part.astype(np.int32) for part in (indices, firsts, ends))
        return NewTokens(start, indices, firsts, ends, self.tokens_flat.take(places))

    def pages_of(self, row: int) -> list[int]:
        """The pages of `row` in order, one group's behind another's, as a new list."""
        return [page for number in range(len(self.groups)) for page in self.pages_in(number, row)]

    def pages_in(self, group: int, row: int) -> list[int]:
        """The pages of `row` in a group, from column `dropped` on, as a new list."""
        first, last = self.dropped[group, row], self.num_pages[group, row]
        pages: list[int] = self.pages[self.table_row(group, row), first:last].tolist()
        return pages

    def output_of(self, row: int) -> list[int]:
        """The tokens of `row` that were sampled and read back, as a new list."""
        output: list[int] = self.tokens[row, self.prompt_len[row] : self.known[row]].tolist()
        return output

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_STOP)
        self.stop_ids[row] = NO_STOP
        self.stop_ids[row, : len(stop_ids)] = stop_ids

    def _encode(self, row: int, params: SamplingParams, seed: int) -> None:
        self.sampling[:, row] = _sampling_column(params, seed, row)
        numbers = encode_processors(params)
        numbers |= {
            name: _float_bits(numbers[name]) for name in ("repetition", "repetition_inverse")
        }
        self.processors[:, row] = [numbers[name] for name in PROCESSOR_FIELDS]

    def check_integrity(self, in_flight: int) -> None:
        """Raise InternalError, naming the fault, unless the rows are consistent. `in_flight`: steps
        not read back, of a loop all that it was to do.
        """
        if self._appended:
            raise InternalError("pages were appended that no step brings to the device")
        free = set(self._free)
        if len(free) != len(self._free) or free != {
            row for row, held in enumerate(self.requests) if held is None
        }:
            raise InternalError("the free rows are not those without a request")
        for row, request in enumerate(self.requests):
            if request is not None and (fault := self._fault(row, request, in_flight)):
                raise InternalError(f"row {row}, request {request.request_id}: {fault}")
        if not set(self.biases) | set(self.masks) <= {
            row for row in range(self.max_rows) if row not in free
        }:
            raise InternalError("a free row has a logit bias or a mask")

    def _fault(self, row: int, request: Request, in_flight: int) -> str | None:
        known, computed = int(self.known[row]), int(self.computed[row])
        # With the tokens that steps in flight sample.
        total = max(known, computed + 1)
        prompt = request.prompt
        checks = {
            f"its request has row {request.row}": request.row == row and request.source is self,
            f"known {known}, total {total}, max_total {request.max_total} are not in order": (
                len(prompt) <= known <= total <= request.max_total == self.max_total[row]
            ),
            f"{total - known} tokens are pending with {in_flight} steps in flight": total - known
            <= in_flight,
            f"computed {computed} is less than 0": computed >= 0,
            f"capacity {self.capacity[row]} is not that of its pages": (
                self.capacity[row] == self._capacity(row)
            ),
            f"its pages do not hold {computed} tokens": computed <= self.capacity[row],
            "a page table is not 0 outside of its pages": self._is_clean(row),
            "its first tokens are not its prompt": np.array_equal(
                self.tokens[row, : len(prompt)], prompt
            ),
            "a token is missing": bool((self.tokens[row, :known] >= 0).all()),
            "a token stands behind the known ones": bool(
                (self.tokens[row, known:] == UNKNOWN).all()
            ),
        }
        return next((fault for fault, holds in checks.items() if not holds), None)

    def _is_clean(self, row: int) -> bool:
        """Whether the page tables of a row are 0 where they have no page."""
        for number in range(len(self.groups)):
            entries = self.pages[self.table_row(number, row)]
            first, last = self.dropped[number, row], self.num_pages[number, row]
            if first > last or entries[:first].any() or entries[last:].any():
                return False
        return True


def padding_column(max_rows: int) -> np.ndarray:
    """`[field]` int32: the sampling fields of padding, a greedy request that nobody waits for."""
    return np.array(_sampling_column(_PADDING, 0, max_rows), np.int32)


def _sampling_column(params: SamplingParams, seed: int, row: int) -> list[int]:
    """The fields of `sampling_layout` of one request, before the position is known."""
    numbers = encode_sampling(params, seed)
    numbers |= {"sample_rows": row, "position": 0, "scale": _float_bits(numbers["scale"])}
    return [int(numbers[name]) for name in SAMPLING_FIELDS]


def _columns(count: int, max_rows: int) -> np.ndarray:
    return np.zeros((count, max_rows), np.int64)


def _float_bits(number: float) -> int:
    """The int32 that has the bits of `number` as a float32."""
    return int(np.float32(number).view(np.int32))
