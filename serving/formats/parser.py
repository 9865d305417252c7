"""Model output to events, token by token: one lexer for all formats, in linear time.

What is held back is bounded: the beginning of a mark, white space before one, and a call until its
name is known. Arguments are never parsed and written again: the model's own text goes through.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping

from ...shared.errors import InternalError
from ...shared.tokenizer import Tokenizer
from .calls import MAX_HELD, CallReader, long_id
from .events import (
    ContentText,
    Event,
    ParsedMessage,
    ReasoningText,
    ToolCallEnd,
    ToolCallStart,
)
from .json_text import held_size
from .messages import MessageParser
from .table import Calls, Format, find_format
from .tags import TagReader
from .writer import EventWriter, marks_pattern

MAX_SPACE = 256
"""Characters of white space that wait for what follows them."""
MAX_HEAD = 512
"""Characters between a mark and a call's first brace."""

_SPACE = re.compile(r"\s*")
_NAMED = re.compile(r"\s*([\w.:/-]+)(?:\[CALL_ID\]([^\[\]]*))?(?:\[ARGS\])?\s*")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_LETTERS = string.ascii_letters + string.digits


class OutputParser(EventWriter):
    """Parses one message. Not safe to use from several threads.

    `format` is a `Format` or its name. `prompt_tail` is the end of the rendered prompt: where it
    has opened reasoning, the message starts in it. `tools` are the names of the tools on offer:
    a call of another is no call; with none on offer, marks of calls are content; None allows any
    name. A mapping gives their `parameters` too, which say what a value written between tags is.
    `new_id` makes ids of calls. Marks are found in the text, which has them also where they are
    special tokens (`shown_marks`).

    A call starts when its name is known and its arguments have begun. What turns out to be none
    before that (broken JSON, an unknown name, an end) is content, mark and all. What breaks later
    ends the call, since its beginning has been sent: what was read of its arguments stays, other
    keys behind them are dropped, the rest is content. Its `complete` is false unless the arguments
    were whole. Clients read arguments that are no JSON as an invalid call.

    Reasoning opens only before any content, and marks of calls within it are reasoning. White space
    around reasoning and after calls is left out, and before calls unless content follows them;
    otherwise texts are verbatim. Raises ConfigError for an unknown format.
    """

    def __init__(
        self,
        format: Format | str,
        prompt_tail: str = "",
        tools: Collection[str] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._format = find_format(format) if isinstance(format, str) else format
        self._schemas = tools if isinstance(tools, Mapping) else {}
        self._calls = self._format.calls if tools is None or tools else None
        short = self._calls is not None and self._calls.short_ids
        super().__init__(tools, new_id or (_short_id if short else long_id))
        self._rest = ""
        self._space = ""
        self._said = self._unclosed = False
        think = self._format.think
        self._reasoning = think is not None and prompt_tail.rstrip().endswith(think[0])
        self._trim = self._reasoning
        self._state: Callable[[str, int], int] = self._read_text
        self._strict = self._listed = False
        self._call: CallReader | TagReader | None = None
        self._clear_call()

    @property
    def reasons(self) -> bool:
        """Whether what was read last stands within reasoning, which has not ended."""
        return self._reasoning

    def push(self, text: str) -> list[Event]:
        """Take more text. What became certain."""
        self._check_open()
        self._take(text)
        return self._flush()

    def finish(self, reason: str = "stop") -> list[Event]:
        """The text that was held back, but for a part of the mark that closes a call, and a
        `Finish`. `reason` is the engine's: a stop after a call becomes tool_calls, one inside of a
        call stays; length stays, as the last call may be cut off.
        """
        self._check_open()
        self._finished = True
        if self._started:
            self._end_call()
        elif self._state == self._read_text:
            self._say("" if self._cuts_close else self._rest)
        elif self._state != self._read_between:
            self._refuse()
        if self._space and not self._reasoning and not self._trim:
            self._events.append(ContentText(self._space))
        self._rest = self._space = ""
        self._emit_finish(reason)
        return self._flush()

    @property
    def _cuts_close(self) -> bool:
        """Whether what is held back begins the mark that is due behind a call."""
        close = self._calls.close if self._calls else ""
        return self._unclosed and self._trim and close.startswith(self._rest)

    def _take(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        place = 0
        while place < len(text):
            place = self._state(text, place)

    # Text: content or reasoning, up to a mark.

    def _marks(self) -> tuple[str, ...]:
        """The marks that count here."""
        think, calls = self._format.think, self._calls
        if self._reasoning and think:
            return (think[1],)
        marks = [think[0]] if think and not self._said else []
        if calls:
            marks += [calls.open, *([calls.close] if self._unclosed and calls.close else [])]
        return tuple(marks)

    def _read_text(self, text: str, place: int) -> int:
        if self._calls and self._calls.bare and not (self._said or self._num_calls):
            first = _space_end(text, place)
            if text.startswith("{", first):
                self._say(text[place:first])
                return self._open_calls("", strict=True, place=first)
        marks = self._marks()
        match = marks_pattern(marks).search(text, place) if marks else None
        if match is None:
            end = len(text) - held_size(text, place, marks)
            self._rest = text[end:]
            self._say(text[place:end])
            return len(text)
        self._say(text[place : match.start()])
        mark = match.group()
        if mark not in self._marks():  # the text before it is what rules it out
            self._say(mark)
        elif self._calls and mark == self._calls.open:
            return self._open_calls(mark, strict=False, place=match.end())
        elif self._calls and mark == self._calls.close:
            self._unclosed, self._trim = False, True
        else:
            self._reasoning = not self._reasoning
            self._space, self._trim = "", True
        return match.end()

    def _say(self, text: str) -> None:
        """Text that is certain. White space at its end waits: a mark may follow."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        text = self._space + text
        body = len(text.rstrip())
        settled = max(body, len(text) - MAX_SPACE)
        self._space = text[settled:]
        if settled:
            kind = ReasoningText if self._reasoning else ContentText
            self._events.append(kind(text[:settled]))
        self._said = self._said or (body > 0 and not self._reasoning)

    # Calls: after a mark the head, then each call, and what stands between two.

    def _open_calls(self, mark: str, strict: bool, place: int) -> int:
        self._strict, self._listed = strict, False
        self._unclosed = bool(mark)
        self._start_head(mark)
        if self._layout.tags is not None:
            self._call = TagReader(
                self._layout.tags, self._layout.close, self._is_tool, self._schemas.get
            )
            self._state = self._read_call
        return place

    def _start_head(self, raw: str) -> None:
        self._clear_call()
        self._hold(raw)
        self._head = ""
        self._state = self._read_head

    def _read_head(self, text: str, place: int) -> int:
        """Up to the brace that begins an object or arguments, or the bracket of a list."""
        calls = self._layout
        named = calls.named and not self._listed
        while place < len(text):
            character = text[place]
            if character == "{":
                self._begin_call()
                return place
            if character == "[" and calls.listed and not (self._head.strip() or self._listed):
                self._listed, named = True, False
            elif (named or character.isspace()) and len(self._head) < MAX_HEAD:
                self._head += character
            else:
                return self._refuse(place)
            self._hold(character)
            place += 1
        return place

    def _begin_call(self) -> None:
        match = _NAMED.fullmatch(self._head)
        if match and match[2]:
            self._call_id = match[2].strip() if _SHORT_ID.fullmatch(match[2].strip()) else ""
        self._call = CallReader(
            self._layout.argument_keys, self._is_tool, self._strict, match[1] if match else None
        )
        self._call.bad = self._call.bad or bool(self._head.strip() and not match)
        self._state = self._read_call

    def _read_call(self, text: str, place: int) -> int:
        call = self._reader
        stop = len(text) if self._started else min(len(text), place + MAX_HELD - self._held_size)
        if stop <= place:
            return self._refuse(place)
        end = call.feed(text, place, stop)
        if call.ready and not self._started:
            self._start_call(call)
        if self._started:
            self._emit_arguments(call)
        elif call.bad:
            self._hold(text[place:end])
            return self._refuse(end)
        else:
            self._hold(text[place:end])
        if call.done or call.bad:
            self._unclosed = self._unclosed and not call.closed
            self._end_call()
            between = call.done and (self._listed or self._layout.separator)
            self._state = self._read_between if between else self._read_text
        return end

    def _start_call(self, call: CallReader | TagReader) -> None:
        self._started, self._said = True, True
        call_id = self._call_id or self._new_id()
        self._events.append(ToolCallStart(self._num_calls, call_id, call.name or ""))
        self._num_calls += 1

    def _end_call(self) -> None:
        self._events.append(ToolCallEnd(self._num_calls - 1, self._reader.whole))
        self._clear_call()
        self._state, self._trim = self._read_text, True

    def _read_between(self, text: str, place: int) -> int:
        """After a call: a separator and the next one, the end of a list, or content."""
        place = _space_end(text, place)
        if place == len(text):
            return place
        if text[place] == ("," if self._listed else self._layout.separator):
            self._start_head(text[place])
            return place + 1
        self._state = self._read_text
        return place + (self._listed and text[place] == "]")

    def _refuse(self, place: int = 0) -> int:
        """It is no call: what was held is content."""
        raw = "".join(self._held)
        self._clear_call()
        self._unclosed = False
        self._state = self._read_text
        self._say(raw)
        return place

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._held_size += len(text)

    def _clear_call(self) -> None:
        self._call = None
        self._call_id = ""
        self._started = False
        self._head = ""
        self._held: list[str] = []
        self._held_size = 0

    @property
    def _layout(self) -> Calls:
        if self._calls is None:
            raise InternalError("output parser: a call in a format that has none")
        return self._calls

    @property
    def _reader(self) -> CallReader | TagReader:
        if self._call is None:
            raise InternalError("output parser: no call is open")
        return self._call


Parser = OutputParser | MessageParser


def open_parser(
    format: Format,
    tokenizer: Tokenizer | None = None,
    prompt_tail: str = "",
    tools: Collection[str] | None = None,
    new_id: Callable[[], str] | None = None,
) -> Parser:
    """The parser of a format, with the parameters of `OutputParser` and `MessageParser`."""
    if format.messages is None:
        return OutputParser(format, prompt_tail, tools, new_id)
    return MessageParser(format, tokenizer, prompt_tail, tools, new_id)


def parse(
    text: str,
    format: Format | str,
    prompt_tail: str = "",
    tools: Collection[str] | None = None,
    reason: str = "stop",
) -> ParsedMessage:
    """A whole message, its marks spelled out: what a format's parser makes of it. Raises
    ConfigError.
    """
    form = find_format(format) if isinstance(format, str) else format
    parser = open_parser(form, None, prompt_tail, tools)
    message = ParsedMessage()
    for event in [*parser.push(text), *parser.finish(reason)]:
        message.add(event)
    return message


def _space_end(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _short_id() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
