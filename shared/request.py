"""One request as the scheduler sees it: integers only. Text stays in `serving`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from .errors import InternalError, PromptTooLong, RequestError
from .grammars import Matcher
from .option_kinds import INT32_MAX
from .sampling_params import SamplingParams

NOT_FINITE = "the model's logits were not finite (NaN or infinity)"
NO_TOKEN = (
    "no token was left that the form and the other options allow, or finding it takes too much work"
)


class FinishReason(StrEnum):
    """Why a request ended. `STOP` covers end-of-sequence, stop token ids and stop strings.
    `ERROR`: see NOT_FINITE. `STUCK`: see NO_TOKEN.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    STUCK = "stuck"


class RequestState(StrEnum):
    """Where a request is. A preempted request is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenSource(Protocol):
    """Where a running request's tokens live: the request table."""

    def output_of(self, row: int) -> list[int]:
        """The tokens of `row` that were sampled and read back, as a new list."""


@dataclass(eq=False, slots=True)
class Request:
    """A request from admission to its last token. Mutated by the scheduler alone.

    `prompt` holds the prompt's token ids (int32 once it was added). `stop_ids` are the token ids
    that end it (end-of-sequence included unless it is ignored). `row` is its row in the request
    table while it runs, -1 otherwise. `max_total` is the largest number of tokens, prompt included,
    that it may reach. `arrival` counts the requests of a scheduler, `key` orders them: lower goes
    first (see `order`). `num_cached_tokens` are the tokens of its prompt that the prefix cache
    supplied when it first started. `page_hashes` are the chained digests of its leading full pages,
    as far as they were computed. `matcher` says which tokens may follow those that were read back,
    where the text must have a form.
    """

    request_id: str
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    max_total: int = 0
    arrival: int = 0
    key: int = 0
    state: RequestState = RequestState.WAITING
    row: int = -1
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    page_hashes: list[bytes] = field(default_factory=list, repr=False)
    saved_output: list[int] = field(default_factory=list, repr=False)
    source: TokenSource | None = field(default=None, repr=False)
    matcher: Matcher | None = field(default=None, repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def order(self) -> tuple[int, int]:
        """Its place among all requests: the lowest is scheduled first and preempted last. Never
        changes.
        """
        return self.key, self.arrival

    @property
    def output(self) -> list[int]:
        """The tokens that were sampled and read back so far. Not to be mutated; while it runs, a
        copy.

        They are kept in the request table while it runs, so that a step costs nothing per request
        here.
        """
        return self.saved_output if self.source is None else self.source.output_of(self.row)

    def known_tokens(self) -> np.ndarray:
        """Prompt and output `[n] int32`, the tokens that a start or a resumption has to prefill."""
        output = self.output
        return np.concatenate((self.prompt, np.array(output, np.int32))) if output else self.prompt

    def prepare(self, max_model_len: int, cache_tokens: int) -> None:
        """Check a new request, make its prompt int32 and set `max_total`. Raises RequestError if it
        can never run.

        `max_model_len` and a cache of `cache_tokens` cut off what does not fit: a request that
        fills the cache and still goes on would be preempted for ever.
        """
        if self.state is not RequestState.WAITING or self.source is not None or self.max_total:
            raise InternalError(f"request {self.request_id} was prepared before")
        prompt, params = np.asarray(self.prompt), self.params
        count = prompt.size
        if not count:
            raise RequestError("prompt", "got 0 tokens, allowed is at least 1")
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
            raise RequestError(
                "prompt",
                f"got {prompt.dtype} of shape {prompt.shape}, allowed is a list of token ids",
            )
        if prompt.min() < 0 or prompt.max() > INT32_MAX:
            raise RequestError(
                "prompt",
                f"got token ids {prompt.min()} to {prompt.max()}, allowed are 0 to {INT32_MAX}",
            )
        limit = min(max_model_len - 1, cache_tokens - 1)
        if count > limit:
            raise PromptTooLong(
                "prompt",
                f"got {count} tokens, allowed is at most {limit}: one more must fit into "
                "max_model_len and cache",
            )
        if not -INT32_MAX <= self.priority <= INT32_MAX:
            raise RequestError(
                "priority", f"got {self.priority}, allowed is {-INT32_MAX} to {INT32_MAX}"
            )
        allowed = params.allowed_token_ids
        # Until min_tokens are reached the stop ids are masked, and something must be left to
        # sample.
        if (
            params.min_tokens
            and allowed
            and set(allowed) <= {*params.banned_token_ids, *self.stop_ids}
        ):
            raise RequestError(
                "min_tokens",
                f"got {params.min_tokens}, but each allowed token id is banned or a stop",
            )
        self.prompt = np.ascontiguousarray(prompt, np.int32)
        self.max_total = min(count + params.max_tokens, max_model_len, cache_tokens)


class WaitingQueue:
    """Waiting requests by `Request.order`."""

    def __init__(self) -> None:
        self._items: list[tuple[tuple[int, int], Request]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._items)

    @property
    def head(self) -> Request:
        """The first in order. The queue must not be empty."""
        return self._items[0][1]

    def add(self, request: Request) -> None:
        """Put `request` at its place. Orders are unique, so that requests themselves are never
        compared.
        """
        insort(self._items, (request.order, request), key=_order_of)

    def remove(self, request: Request) -> None:
        """Take `request` out. Raises InternalError if it does not wait."""
        index = bisect_left(self._items, request.order, key=_order_of)
        if index == len(self._items) or self._items[index][1] is not request:
            raise InternalError(f"request {request.request_id} is not in the waiting queue")
        del self._items[index]


def _order_of(item: tuple[tuple[int, int], Request]) -> tuple[int, int]:
    return item[0]
