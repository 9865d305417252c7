"""What a request gives back, with the names that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..shared.engine import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One completion. `finish_reason` is stop, length, abort or error.

    `stop_reason` is the stop string or token id that ended it; of an error, what went wrong.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions. `error` is set, and there are none, if the request was refused."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None
