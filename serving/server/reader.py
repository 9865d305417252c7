"""Reads what comes for one completion of a chat: events, and which tokens are reasoning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...shared.errors import InternalError
from ..formats.events import Event, ReasoningText
from ..formats.messages import MessageParser
from ..formats.parser import Parser
from .live import News


def finish_reason(reason: str | None) -> str | None:
    """The engine's reason in OpenAI's words. Raises InternalError for a completion that failed."""
    if reason == "error":
        raise InternalError("the model's logits were not finite")
    return reason


class Reader:
    """Reads the news of one completion: the parser's events, and how many tokens its reasoning has.
    `think_end`: the token that ends reasoning, where the answer is one message. `tells`: whether
    reasoning is told.
    """

    def __init__(self, parser: Parser, think_end: int | None, *, tells: bool = True) -> None:
        self._parser = parser
        self._tells = tells
        self._count: _Counted = (
            _Messages(parser) if isinstance(parser, MessageParser) else _OneMessage(think_end)
        )

    def read(self, news: News) -> list[Event]:
        """What the parser makes of what is new; without its reasoning, if that is not told."""
        if news.marks:
            return [event for events, _ in self.parts(news) for event in events]
        self._count.begin(news.token_ids)
        return self._ended(self._parser.push(news.text), news)

    def parts(self, news: News) -> list[tuple[list[Event], Sequence[int]]]:
        """The same up to each mark, with the places among the new tokens that are of content."""
        found: list[tuple[list[Event], Sequence[int]]] = []
        place = 0
        self._count.begin(news.token_ids)
        for mark in news.marks:
            events = self._parser.push(news.text[place : mark.place])
            answer = self._count.stand_before(mark.number)
            events += self._parser.push_mark(mark.token_id)
            self._count.stand_behind(mark.number)
            found.append((self._told(events), answer))
            place = mark.place
        events = self._parser.push(news.text[place:])
        answer = self._count.end(reasons=self._parser.reasons)
        return [*found, (self._ended(events, news), answer)]

    def _ended(self, events: list[Event], news: News) -> list[Event]:
        """What is told of the events behind the last mark, with those of an end."""
        if news.finish_reason is not None:
            events += self._parser.finish(finish_reason(news.finish_reason) or "stop")
        return self._told(events)

    def _told(self, events: list[Event]) -> list[Event]:
        if self._tells:
            return events
        return [one for one in events if not isinstance(one, ReasoningText)]

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning, with the mark that ends it."""
        return self._count.reasoning_tokens(reasons=self._parser.reasons)


class _Counted(ABC):
    """Which tokens are reasoning, and which the answer. It is told of new tokens, and of each mark
    among them before and behind it.
    """

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> None:
        """Tokens are new."""

    @abstractmethod
    def stand_before(self, number: int) -> Sequence[int]:
        """The parser has read what stands before the completion's token `number`, a mark: the
        places of those behind the last mark that are of content.
        """

    @abstractmethod
    def stand_behind(self, number: int) -> None:
        """It has read the mark too."""

    @abstractmethod
    def end(self, *, reasons: bool) -> Sequence[int]:
        """It has read all of them: the places of those behind the last mark that are of content."""

    @abstractmethod
    def reasoning_tokens(self, *, reasons: bool) -> int:
        """How many tokens of all are reasoning."""


class _OneMessage(_Counted):
    """Reasoning goes up to the token `think_end`, which is part of it; all that were read are
    reasoning where it has not ended, and none where no token ends it.
    """

    def __init__(self, think_end: int | None) -> None:
        self._think_end = think_end
        self._size = self._count = self._first = 0
        self._ended = False

    def begin(self, tokens: Sequence[int]) -> None:
        self._size, self._first = len(tokens), 0
        if self._ended:
            return
        self._ended = self._think_end in tokens
        self._first = tokens.index(self._think_end) + 1 if self._ended else 0
        self._count += self._first or len(tokens)

    def stand_before(self, number: int) -> Sequence[int]:
        return ()  # its marks are part of the text

    def stand_behind(self, number: int) -> None:
        pass

    def end(self, *, reasons: bool) -> Sequence[int]:
        return range(self._size if reasons else self._first, self._size)

    def reasoning_tokens(self, *, reasons: bool) -> int:
        return self._count if self._ended or reasons else 0


class _Messages(_Counted):
    """Marks begin and end each message: those of reasoning are part of it, those of the answer are
    not.
    """

    def __init__(self, parser: MessageParser) -> None:
        self._parser = parser
        self._count = self._read = self._start = 0
        self._behind = 0
        """The token behind the last mark."""
        self._reasons = False

    def begin(self, tokens: Sequence[int]) -> None:
        self._start, self._read = self._read, self._read + len(tokens)

    def stand_before(self, number: int) -> Sequence[int]:
        self._reasons = self._parser.reasons
        return self._answer(number)

    def stand_behind(self, number: int) -> None:
        if self._reasons or self._parser.reasons:
            self._count += number + 1 - self._behind
        self._behind = number + 1

    def end(self, *, reasons: bool) -> Sequence[int]:
        return self._answer(self._read)

    def _answer(self, end: int) -> Sequence[int]:
        if not self._parser.answers:
            return ()
        return range(max(self._behind, self._start) - self._start, end - self._start)

    def reasoning_tokens(self, *, reasons: bool) -> int:
        return self._count + (self._read - self._behind if reasons else 0)
