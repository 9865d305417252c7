"""The running requests as a structure of arrays: a step of 256 decodes costs some numpy calls, no loop over requests.

A request gets a row when it starts and keeps it until it ends or is preempted. `last_tokens[row]` on the device belongs
to the same row. Each release of a row raises its epoch: a step in flight knows by it that its token is for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..bucketing import Descriptor
from .errors import InternalError
from .request import Request
from .sampling_encoding import encode_bias, encode_processors, encode_sampling, sampler_of
from .sampling_params import SamplingParams
from .step import SAMPLERS, sampling_layout

UNKNOWN = -1
"""Stands in `tokens` where no token is known. Also what the batch wants there: the device has that token."""

SAMPLING_FIELDS = tuple(sampling_layout(1).fields)
"""The fields of the sampling buffer, each one entry per request: the buffer is a matrix [field, request]."""
SAMPLE_ROWS = SAMPLING_FIELDS.index("sample_rows")
POSITION = SAMPLING_FIELDS.index("position")
PROCESSOR_FIELDS = ("presence", "frequency", "repetition", "repetition_inverse")
"""The processors that are one number per request, as they follow each other in the processor buffer."""
PROCESSED = SAMPLERS.index("processed")

_NO_STOP = -1
_STOP_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step, R requests in the order of the batch: those with exactly one query token stand first.

    Request i computes positions `starts[i]` to `ends[i] - 1`; where `samples[i]`, it samples the token of position
    `ends[i]`. `rows` are rows of the request table, `epochs` tell whether a row still has the same tenant.
    All arrays are `[R]`, int64 or bool. Nobody may change them or `requests`: steps share them.
    """

    descriptor: Descriptor
    requests: Sequence[Request]
    rows: np.ndarray
    epochs: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    samples: np.ndarray
    num_single: int
    num_tokens: int
    decode_only: bool
    """Every request is a decode: one token each, and each samples."""
    steps: int = 0
    """Of a loop, how many decode steps it does; what is said above is its first one. 0: a plain step."""
    chained: bool = False
    """This loop counts on all steps of the loop before it, which was not read yet."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What a step brought. `requests[i]` got the token `tokens[i]`, entry `indices[i]` of the step's output. In a loop
    a request appears once for each of its tokens, which follow one another.

    `finished` are those of `requests` that ended with it; their `finish_reason` is set and `output` complete.
    Requests that ended or were preempted while the step was in flight do not appear, nor those that it gave no token.
    """

    requests: Sequence[Request]
    tokens: np.ndarray
    indices: np.ndarray
    finished: Sequence[Request]


class RequestTable:
    """Rows of running requests. Written by the scheduler, read by the packer; nobody else touches it.

    Columns are int64 (what numpy indexes with) unless noted; those of a free row mean nothing, except `epoch`.

    tokens      [row, max_model_len] int32  token ids; -1 from `known` on
    known       [row]  tokens whose ids are on the host: prompt, and output that was read back
    total       [row]  `known` plus the tokens that steps in flight sample
    computed    [row]  tokens whose keys and values are computed by the steps scheduled so far
    prompt_len  [row]
    max_total   [row]  see `Request.max_total`
    min_total   [row]  before position `min_total` stop ids are masked (0: never)
    pages       [row, pages_per_row] int32  page table; 0 from `num_pages` on
    num_pages   [row]
    capacity    [row]  tokens that the pages hold
    epoch       [row]  how often the row was released
    stop_ids    [row, any] int32  -1 where there is none
    level       [row]  index in SAMPLERS of the first program that serves the request, min_tokens aside
    logprobs, prompt_logprobs [row] bool  whether they are wanted
    alone       [row] bool  the host need not look between two tokens: no stop strings, log-probabilities, processors
    sampling    [field, row + 1] int32, processors [field, row + 1] int32  encoded parameters; the last row is padding
    """

    def __init__(self, max_rows: int, max_model_len: int, page_size: int) -> None:
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.pages_per_row = -(-max_model_len // page_size)
        # Not filled: a row that was never used costs no memory.
        self.tokens = np.empty((max_rows, max_model_len), np.int32)
        self.tokens_flat = self.tokens.reshape(-1)
        self.pages = np.zeros((max_rows, self.pages_per_row), np.int32)
        self.pages_flat = self.pages.reshape(-1)
        self.known, self.total, self.computed = _columns(3, max_rows)
        self.prompt_len, self.max_total, self.min_total = _columns(3, max_rows)
        self.num_pages, self.capacity, self.epoch, self.level = _columns(4, max_rows)
        self.logprobs, self.prompt_logprobs, self.alone = np.zeros((3, max_rows), np.bool_)
        self.stop_ids = np.full((max_rows, _STOP_COLUMNS), _NO_STOP, np.int32)
        self.sampling = np.zeros((len(SAMPLING_FIELDS), max_rows + 1), np.int32)
        self.processors = np.zeros((len(PROCESSOR_FIELDS), max_rows + 1), np.int32)
        self.requests: list[Request | None] = [None] * max_rows
        self.registered = [0] * max_rows
        """Leading pages of each row that were offered to the prefix cache."""
        self.biases: dict[int, tuple[list[int], list[int]]] = {}
        """Token ids and Q16 values, of the rows that have a logit bias."""
        self.masks: dict[int, np.ndarray | None] = {}
        """Rows that allow or ban tokens; the packer puts the bit mask there when it first needs it."""
        self._free = list(range(max_rows))[::-1]
        self._encode(max_rows, SamplingParams(temperature=0.0), 0)

    @property
    def num_free(self) -> int:
        """Rows without a request."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows with a request."""
        return self.max_rows - len(self._free)

    def assign(self, request: Request, tokens: np.ndarray) -> int:
        """Give `request`, whose known tokens are `tokens`, a row without pages; nothing is computed yet.

        Raises InternalError if all rows are taken.
        """
        if not self._free:
            raise InternalError("all rows of the request table are taken")
        row = self._free.pop()
        params, count = request.params, len(tokens)
        self.tokens[row, :count] = tokens
        self.tokens[row, count:] = UNKNOWN
        self.known[row] = self.total[row] = count
        self.computed[row] = self.num_pages[row] = self.capacity[row] = 0
        self.prompt_len[row] = request.num_prompt_tokens
        self.max_total[row] = request.max_total
        # With no stop ids min_tokens masks nothing, and the cheaper samplers will do.
        self.min_total[row] = request.num_prompt_tokens + params.min_tokens if request.stop_ids else 0
        self.logprobs[row] = params.logprobs is not None
        self.prompt_logprobs[row] = params.prompt_logprobs is not None
        self._set_stop_ids(row, request.stop_ids)
        self._encode(row, params, request.seed)
        self.level[row] = SAMPLERS.index(sampler_of(params))
        self.alone[row] = not params.stop and params.logprobs is None and self.level[row] != PROCESSED
        if params.logit_bias:
            self.biases[row] = encode_bias(params)
        if params.allowed_token_ids is not None or params.banned_token_ids:
            self.masks[row] = None
        self.requests[row], self.registered[row] = request, 0
        request.row, request.source = row, self
        return row

    def release(self, row: int) -> np.ndarray:
        """Take the row from its request, which gets its output to keep, and return its pages in order (`int64`)."""
        request = self.requests[row]
        if request is None:
            raise InternalError(f"row {row} was released but is free")
        count = int(self.num_pages[row])
        pages = self.pages[row, :count].astype(np.int64)
        self.pages[row, :count] = 0
        request.saved_output = self.output_of(row)
        request.row, request.source = -1, None
        self.requests[row] = None
        self.biases.pop(row, None)
        self.masks.pop(row, None)
        self.epoch[row] += 1
        self._free.append(row)
        return pages

    def append_pages(self, row: int, pages: np.ndarray) -> None:
        """Add `pages` at the end of the row's page table."""
        first = int(self.num_pages[row])
        self.pages[row, first : first + len(pages)] = pages
        self.num_pages[row] = first + len(pages)
        self.capacity[row] = (first + len(pages)) * self.page_size

    def append_page_each(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """Add one page to each of `rows`: `pages[i]` to `rows[i]`."""
        counts = self.num_pages[rows]
        self.pages_flat[rows * self.pages_per_row + counts] = pages
        self.num_pages[rows] = counts + 1
        self.capacity[rows] = (counts + 1) * self.page_size

    def pages_of(self, row: int) -> list[int]:
        """The pages of `row` in order, as a new list."""
        pages: list[int] = self.pages[row, : self.num_pages[row]].tolist()
        return pages

    def output_of(self, row: int) -> list[int]:
        """The tokens of `row` that were sampled and read back, as a new list."""
        output: list[int] = self.tokens[row, self.prompt_len[row] : self.known[row]].tolist()
        return output

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=_NO_STOP)
        self.stop_ids[row] = _NO_STOP
        self.stop_ids[row, : len(stop_ids)] = stop_ids

    def _encode(self, row: int, params: SamplingParams, seed: int) -> None:
        numbers = encode_sampling(params, seed)
        numbers |= {"sample_rows": row, "position": 0, "scale": _float_bits(numbers["scale"])}
        self.sampling[:, row] = [numbers[name] for name in SAMPLING_FIELDS]
        numbers = encode_processors(params)
        numbers |= {name: _float_bits(numbers[name]) for name in ("repetition", "repetition_inverse")}
        self.processors[:, row] = [numbers[name] for name in PROCESSOR_FIELDS]

    def check_integrity(self, in_flight: int) -> None:
        """Raise InternalError, naming the fault, unless the rows are consistent. `in_flight`: steps not read back, of a
        loop all that it was to do.
        """
        free = set(self._free)
        if len(free) != len(self._free) or free != {row for row, held in enumerate(self.requests) if held is None}:
            raise InternalError("the free rows are not those without a request")
        for row, request in enumerate(self.requests):
            if request is not None and (fault := self._fault(row, request, in_flight)):
                raise InternalError(f"row {row}, request {request.request_id}: {fault}")
        if not set(self.biases) | set(self.masks) <= {row for row in range(self.max_rows) if row not in free}:
            raise InternalError("a free row has a logit bias or a mask")

    def _fault(self, row: int, request: Request, in_flight: int) -> str | None:
        known, total, computed = int(self.known[row]), int(self.total[row]), int(self.computed[row])
        num_pages, prompt = int(self.num_pages[row]), request.prompt
        checks = {
            f"its request has row {request.row}": request.row == row and request.source is self,
            f"known {known}, total {total}, max_total {request.max_total} are not in order": (
                len(prompt) <= known <= total <= request.max_total == self.max_total[row]
            ),
            f"{total - known} tokens are pending with {in_flight} steps in flight": total - known <= in_flight,
            f"computed {computed} is not below total {total}": 0 <= computed < total,
            f"computed {computed} is between known {known} and the last token {total - 1}": (
                computed == total - 1 or (computed < known == total)
            ),
            f"capacity {self.capacity[row]} is not that of {num_pages} pages": (
                self.capacity[row] == num_pages * self.page_size
            ),
            f"{num_pages} pages do not hold {computed} tokens": computed <= self.capacity[row],
            "its page table is not 0 behind its pages": not self.pages[row, num_pages:].any(),
            "its first tokens are not its prompt": np.array_equal(self.tokens[row, : len(prompt)], prompt),
            "a token is missing": bool((self.tokens[row, :known] >= 0).all()),
            "a token stands behind the known ones": bool((self.tokens[row, known:] == UNKNOWN).all()),
        }
        return next((fault for fault, holds in checks.items() if not holds), None)


def _columns(count: int, max_rows: int) -> np.ndarray:
    return np.zeros((count, max_rows), np.int64)


def _float_bits(number: float) -> int:
    """The int32 that has the bits of `number` as a float32."""
    return int(np.float32(number).view(np.int32))
