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
    """A prompt and its completions. `error` is set, and there are none, if the request was
    refused.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing is to come: all completions have ended, or the request was refused."""
        return all(completion.finish_reason is not None for completion in self.outputs)


@dataclass(slots=True)
class StreamUpdate:
    """What one step brought to one completion: new text, new tokens, and in the last one why it
    ended.

    `index` is the prompt's place in the list that was asked for, `completion` the completion's
    among the prompt's. `output` is all of the request so far. A refused prompt has one update, with
    `error` and nothing else.
    """

    index: int
    completion: int
    output: RequestOutput
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None

    @property
    def request_id(self) -> str:
        """The request's name in the engine's metrics and captures."""
        return self.output.request_id
