"""The prompts of one call on their way through an engine: added, stepped, and turned into
outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..shared.engine import Engine, derive_seed
from ..shared.errors import RequestError
from ..shared.models.fields import show
from ..shared.request import FinishReason
from ..shared.request_checks import token_array
from ..shared.sampling_params import SamplingParams
from ..shared.tokenizer import Tokenizer
from .bad_words import banning, sequences_of
from .completion import Completion
from .outputs import RequestOutput, StreamUpdate

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids` (and `cache_salt`,
`priority`).
"""

KEYS = ("prompt", "prompt_token_ids", "cache_salt", "priority")


@dataclass(eq=False, slots=True)
class Entry:
    """One completion under way. `ends_request`: it has ended, and all others of its prompt have
    too.
    """

    index: int
    output: RequestOutput
    completion: Completion
    ends_request: bool = False
    reported_characters: int = 0
    reported_tokens: int = 0

    def news(self) -> StreamUpdate:
        """What came since this was last asked."""
        now = self.completion.output
        text, token_ids = (
            now.text[self.reported_characters :],
            now.token_ids[self.reported_tokens :],
        )
        logprobs = None if now.logprobs is None else now.logprobs[self.reported_tokens :]
        self.reported_characters, self.reported_tokens = len(now.text), len(now.token_ids)
        update = StreamUpdate(self.index, now.index, self.output, text, token_ids, logprobs)
        if self.completion.done:
            update.finish_reason, update.stop_reason = now.finish_reason, now.stop_reason
        return update


class Batch:
    """`outputs` stand in the order in which prompts were added. `num_tokens` counts what was
    generated.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.outputs: list[RequestOutput] = []
        self.num_tokens = 0
        self._engine = engine
        self._tokenizer = tokenizer
        self._live: dict[str, Entry] = {}
        self._missing: dict[str, int] = {}
        self._banning: dict[SamplingParams, SamplingParams] = {}

    def __len__(self) -> int:
        """Completions that have not ended."""
        return len(self._live)

    def add(self, request_id: str, prompt: Prompt | RequestError, params: SamplingParams) -> None:
        """Queue the completions of a prompt. Raises RequestError, which is also kept in its output.

        A RequestError instead of a prompt is one that was refused before, such as messages without
        a role.
        """
        output = RequestOutput(request_id, prompt if isinstance(prompt, str) else None, [])
        self.outputs.append(output)
        try:
            if isinstance(prompt, RequestError):
                raise prompt
            self._add(output, prompt, params)
        except RequestError as error:
            output.error = error
            raise

    def _add(self, output: RequestOutput, prompt: Prompt, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                "sampling_params", f"got {type(params).__name__}, must be SamplingParams"
            )
        if params.stop and self._tokenizer is None:
            raise RequestError(
                "stop", "stop strings need a tokenizer, and the model folder has no tokenizer.json"
            )
        params = self._in_tokens(params)
        output.prompt, token_ids, options = _parts(prompt)
        if token_ids is None:
            token_ids = need_tokenizer(self._tokenizer).encode(output.prompt or "")
        tokens = token_array(token_ids)
        output.prompt_token_ids = tokens.tolist()
        entries: dict[str, Entry] = {}
        try:
            for number in range(params.n):
                settings = settings_of(params, number)
                request_id = f"{output.request_id}/{number}"
                self._engine.add(request_id, tokens, settings, **options)
                completion = Completion(number, output.prompt_token_ids, settings, self._tokenizer)
                output.outputs.append(completion.output)
                entries[request_id] = Entry(len(self.outputs) - 1, output, completion)
        except RequestError:
            output.outputs.clear()
            for request_id in entries:
                self._engine.abort(request_id)
            raise
        self._live.update(entries)
        self._missing[output.request_id] = params.n

    def _in_tokens(self, params: SamplingParams) -> SamplingParams:
        """Settings whose bad words are tokens: made once for all prompts that have the same."""
        if not params.bad_words:
            return params
        if params not in self._banning:
            tokenizer = need_tokenizer(self._tokenizer, "bad_words", "there are no words")
            self._banning[params] = banning(params, sequences_of(params.bad_words, tokenizer))
        return self._banning[params]

    def step(self) -> list[Entry]:
        """Run one step of the engine. Completions that got something or ended, each once."""
        # A step may bring a token and, apart from it, the end: of a text that has its form.
        entries: dict[str, Entry] = {}
        for update in self._engine.step():
            entry = self._live.get(update.request_id)
            if entry is None:
                continue
            entries[update.request_id] = entry
            self.num_tokens += len(update.tokens)
            if update.prompt_logprobs is not None:
                entry.output.prompt_logprobs = update.prompt_logprobs
            if entry.completion.take(update):
                self._engine.finish(update.request_id, FinishReason.STOP)
            if entry.completion.done:
                self._end(update.request_id)
        return list(entries.values())

    def _end(self, request_id: str) -> None:
        entry = self._live.pop(request_id)
        output = entry.output
        output.num_cached_tokens = max(output.num_cached_tokens, entry.completion.num_cached_tokens)
        self._missing[output.request_id] -= 1
        entry.ends_request = not self._missing[output.request_id]


def need_tokenizer(
    tokenizer: Tokenizer | None, field: str = "prompt", what: str = "text needs token ids"
) -> Tokenizer:
    """The tokenizer, or a RequestError of `field` that says what follows from there being none."""
    if tokenizer is None:
        raise RequestError(field, f"the model folder has no tokenizer.json, so {what}")
    return tokenizer


def _parts(prompt: Any) -> tuple[str | None, Any, dict[str, Any]]:
    """(text, token ids, options of the engine) of a prompt; at least one of the first two is not
    None.
    """
    if isinstance(prompt, str):
        return prompt, None, {}
    if prompt is None:
        raise RequestError(
            "prompt", "got None, must be text, token ids, or a mapping with one of them"
        )
    if not isinstance(prompt, Mapping):
        return None, prompt, {}
    unknown = [show(key) for key in prompt if key not in KEYS]
    if unknown:
        raise RequestError(
            "prompt", f"unknown keys {', '.join(sorted(unknown))}; allowed are {', '.join(KEYS)}"
        )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError("prompt", f"got {type(text).__name__}, must be text")
    if text is None and token_ids is None:
        raise RequestError("prompt", "needs the key 'prompt' or 'prompt_token_ids'")
    return text, token_ids, {key: prompt[key] for key in KEYS[2:] if prompt.get(key) is not None}


def settings_of(params: SamplingParams, number: int) -> SamplingParams:
    """The settings of completion `number`: of a seed, each makes its own."""
    if number == 0 or params.seed is None:
        return params
    return params.with_seed(derive_seed(params.seed, number))
