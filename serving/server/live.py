"""A request of a client's while the engine works on it: one prompt, one completion or several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...shared.engine import TokenLogprobs, Update
from ...shared.errors import RequestError, TwinferError
from ...shared.grammars import FIELD
from ...shared.request import NO_TOKEN, FinishReason
from ...shared.sampling_params import SamplingParams
from ...shared.tokenizer import Tokenizer
from ..completion import Completion, Mark
from ..outputs import CompletionOutput


@dataclass(slots=True)
class News:
    """What came for one completion since it was last asked: text, tokens, and in the last one why
    it ended. `first`: nothing of this completion was told before. `marks` stand at places of
    `text`, but their numbers count all tokens of the completion.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None
    first: bool
    marks: list[Mark] = field(default_factory=list)


class Live:
    """Gathers what the engine sends. The reader is woken by `changed`, and takes all that has come
    since as one piece, so that a slow client costs no memory. Prompts of one call share the event.

    `numbers` are the engine's ids of the completions. `error` is set when the request was refused
    or the engine has ended; nothing comes after it.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        settings: Sequence[SamplingParams],
        tokenizer: Tokenizer | None,
        changed: asyncio.Event | None = None,
        priority: int = 0,
        salt: str = "",
    ) -> None:
        self.settings, self.priority, self.salt = tuple(settings), priority, salt
        self.prompt_ids = prompt_ids
        self.numbers: list[int] = []
        self.changed = changed or asyncio.Event()
        self.completions = [
            Completion(index, prompt_ids, params, tokenizer)
            for index, params in enumerate(settings)
        ]
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.error: TwinferError | None = None
        self.name = ""
        """What its client calls it, or this server."""
        self.named: Callable[[RequestError], RequestError] = lambda error: error
        """Gives an error of the engine's the names that its client has for fields."""
        self.interval = 1
        """How many new tokens of a completion are news at least, behind its first ones."""
        self.created = time.monotonic()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.begun: list[float | None] = [None] * len(settings)
        """When the engine has begun with each completion."""
        self._told = [(0, 0, False) for _ in settings]
        self._told_marks = [0] * len(settings)

    def look_for(
        self, mark_ids: Mapping[int, bool | None], shown_ids: Collection[int] = ()
    ) -> None:
        """Have `news` tell where tokens stand, which then have no text, and have other special
        tokens in the text; see `Completion`.
        """
        for part in self.completions:
            part.look_for(mark_ids, shown_ids)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or all(part.done for part in self.completions)

    @property
    def outputs(self) -> list[CompletionOutput]:
        """All completions as far as they are."""
        return [part.output for part in self.completions]

    @property
    def told(self) -> list[int]:
        """How many tokens of each completion `news` has given."""
        return [tokens for _, tokens, _ in self._told]

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that came from the prefix cache."""
        return max(part.num_cached_tokens for part in self.completions)

    def take(self, index: int, update: Update) -> bool:
        """Take what a step brought to a completion. True if its text has reached a stop string."""
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        stopped = self.completions[index].take(update)
        if update.finish_reason is FinishReason.STUCK:
            self.error = self.named(RequestError(FIELD, NO_TOKEN))
        if self._is_news(index):
            self.changed.set()
        return stopped

    def _is_news(self, index: int) -> bool:
        """Whether what came for a completion is to be told."""
        part, (_, told, ended) = self.completions[index], self._told[index]
        count = len(part.output.token_ids)
        if ended or (count == told and not part.done):
            return False
        return part.done or not told or count - told >= self.interval or self.error is not None

    def begin(self, index: int, now: float) -> None:
        """The engine has begun with a completion."""
        if self.begun[index] is None:
            self.begun[index] = now

    def fail(self, error: TwinferError) -> None:
        """End with an error."""
        if not self.done:
            self.error = error
        self.changed.set()

    def news(self) -> list[News]:
        """What came for each completion since this was last asked."""
        found = []
        for index, part in enumerate(self.completions):
            if not self._is_news(index):
                continue
            output, (characters, tokens, _) = part.output, self._told[index]
            count, reason = len(output.token_ids), output.finish_reason if part.done else None
            if self.error is not None and reason == "error":
                reason = None  # the error says it, better
            found.append(
                News(
                    index,
                    output.text[characters:],
                    output.token_ids[tokens:],
                    None if output.logprobs is None else output.logprobs[tokens:],
                    reason,
                    output.stop_reason if reason else None,
                    tokens == 0,
                    self._new_marks(index) if part.marks else [],
                )
            )
            self._told[index] = (len(output.text), count, part.done)
        return found

    def _new_marks(self, index: int) -> list[Mark]:
        marks, characters = self.completions[index].marks, self._told[index][0]
        first, self._told_marks[index] = self._told_marks[index], len(marks)
        return [replace(mark, place=mark.place - characters) for mark in marks[first:]]


async def wait_for_news(changed: asyncio.Event, seconds: float | None = None) -> bool:
    """Wait for something new; False if nothing came in time."""
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return False
    changed.clear()
    return True


async def wait_for_all(lives: Sequence[Live]) -> None:
    """Wait for the end of requests that share an event. Raises the first error of one."""
    while True:
        for live in lives:
            if live.error is not None:
                raise live.error
        if all(live.done for live in lives):
            return
        await wait_for_news(lives[0].changed)
