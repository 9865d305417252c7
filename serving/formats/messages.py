"""An answer that is a row of messages with headers, to events: the harmony format of gpt-oss.

What is held back is bounded: a header, and a call until its arguments have begun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from ...shared.errors import InternalError
from ...shared.tokenizer import Tokenizer
from .calls import MAX_HELD, CallReader, long_id
from .events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallEnd,
    ToolCallStart,
)
from .json_text import held_size
from .marks import hidden_marks
from .table import Format, Messages
from .writer import EventWriter, marks_pattern

MAX_HEADER = 512
"""Characters of a header. What is longer is none."""

FUNCTIONS = "functions."
"""Before the name of a function that a message is addressed to."""
REASONING, ANSWERS = "analysis", ("commentary", "final")
"""The names of channels."""

_NAMES = "|".join((REASONING, *ANSWERS))
_CHANNEL = re.compile(rf"^\s*[^\s=]*?({_NAMES})")
_RECIPIENT = re.compile(rf"(?:^|\s)(to=|(?={re.escape(FUNCTIONS)}))([^\s<]+)")
_RECIPIENT_ALONE = re.compile(r"\s*to=\S*\s*")
_CUT_RECIPIENT = re.compile(r"\s*(?:t|to|to=\S*)?\s*")


class MessageParser(EventWriter):
    """Parses one answer. Its parameters are those of `OutputParser`, as is what it tells. A text is
    without the marks that are special tokens of `tokenizer`: `push_mark` takes them.

    Text of the channel analysis is reasoning; text of commentary and final is content, as is that
    of a channel that nobody knows, and text without a header. A message to functions.NAME is a
    call, in whatever channel, and so is one to NAME alone if that is a tool on offer. A message
    that is addressed to nobody here is text of its channel. Messages of others than the assistant
    are left out. Texts are verbatim, but a second message of reasoning, or of content, begins in a
    new line.

    The answer ends with the first mark that ends it: what comes behind is left out.
    """

    def __init__(
        self,
        format: Format,
        tokenizer: Tokenizer | None = None,
        prompt_tail: str = "",
        tools: Collection[str] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._layout = layout_of(format)
        super().__init__(tools, new_id or long_id)
        self._hidden = hidden_marks(format, tokenizer)
        self._rest = ""
        self._ended = False
        self._said: set[type[Event]] = set()
        # What is read: a header, if it is one, behind a role if a mark has begun that; or a text.
        self._header: str | None = None
        self._role, self._has_role = "", False
        self._channels = ""  # of this header, which another one has replaced
        self._kind: type[ContentText] | type[ReasoningText] | None = ContentText
        self._first = True
        self._is_call = False
        self._call: CallReader | None = None
        self._started, self._held = False, ""
        self._spelled = format.marks
        self._read_prompt(prompt_tail)
        self._spelled = tuple(mark for mark in format.marks if mark not in self._hidden.values())

    def _read_prompt(self, tail: str) -> None:
        """Stand where the prompt ends: as a rule behind the role of a header. A prompt without any
        mark at its end stands within content that is to be continued.
        """
        self._take(tail[max(0, tail.rfind(self._layout.start)) :])
        self._read(self._rest)
        self._rest, self._ended = "", False
        if self._header is not None and not self._in_channel:
            self._role, self._header = self._header, ""
        self._events.clear()
        self._said.clear()
        self._first = True

    @property
    def reasons(self) -> bool:
        """Whether what was read last stands within reasoning, which has not ended."""
        return self._in_text and self._kind is ReasoningText

    @property
    def answers(self) -> bool:
        """Whether what was read last stands within content."""
        return self._in_text and self._kind is ContentText

    @property
    def _in_text(self) -> bool:
        return self._header is None and not self._ended and not self._is_call

    @property
    def _in_channel(self) -> bool:
        return self._header is not None and self._header.startswith(self._layout.channel)

    def push(self, text: str) -> list[Event]:
        """Take more text. What became certain."""
        self._check_open()
        self._take(text)
        return self._flush()

    def push_mark(self, token_id: int) -> list[Event]:
        """Take a token that is none of the text. What is no mark means nothing."""
        self._check_open()
        if token_id in self._hidden:
            self._read_mark(self._hidden[token_id])
        return self._flush()

    def finish(self, reason: str = "stop") -> list[Event]:
        """The text that was held back, and a `Finish`. `reason` is the engine's: a stop after a
        call becomes tool_calls, one inside of a call stays; length stays, as the last call may be
        cut off.
        """
        self._check_open()
        self._read(self._rest)
        if not self._ended:
            self._end_message(whole=reason == "stop", last=True)
        self._rest, self._finished = "", True
        self._emit_finish(reason)
        return self._flush()

    def _take(self, text: str) -> None:
        """Text in which marks may be spelled."""
        if not self._spelled:
            self._read(text)
            return
        text = self._rest + text
        place = 0
        for match in marks_pattern(self._spelled).finditer(text):
            self._read(text[place : match.start()])
            self._read_mark(match.group())
            place = match.end()
        settled = len(text) - held_size(text, place, self._spelled)
        self._read(text[place:settled])
        self._rest = text[settled:]

    def _read(self, text: str) -> None:
        if self._ended or not text:
            return
        if self._header is None:
            self._read_text(text)
        else:
            self._read_header(text)

    def _read_mark(self, mark: str) -> None:
        layout = self._layout
        if self._ended:
            return
        if mark in (layout.start, layout.end, *layout.stops):
            self._end_message(whole=True, last=mark in layout.stops)
            self._ended = mark in layout.stops
            self._begin_header(has_role=mark == layout.start)
        elif mark == layout.channel:
            self._open_channel()
        elif self._header is not None:  # within a text the others mean nothing
            if mark == layout.message:
                self._open_text(self._header)
            else:
                self._read_header(mark)

    def _end_message(self, *, whole: bool, last: bool) -> None:
        """`whole`: it was not cut off. `last`: none follows."""
        if self._header is not None:
            self._end_header(self._header, whole=whole, last=last)
        self._end_call(whole=whole)

    # Headers.

    def _open_channel(self) -> None:
        """What stands before its name is the role, or another channel, of which no more counts than
        whom it was for.
        """
        if self._header is None:
            self._end_call(whole=True)
            self._begin_header(has_role=False)
        elif self._in_channel:
            self._channels = f"{self._channels} {self._channel_of(self._header)}"[-MAX_HEADER:]
        else:
            self._role += self._header or ""
        self._header = self._layout.channel

    def _begin_header(self, *, has_role: bool) -> None:
        self._header, self._role, self._channels = "", "", ""
        self._has_role = has_role

    def _channel_of(self, header: str) -> str:
        """What a header says behind the mark of its channel."""
        if not self._in_channel:
            return ""
        return header.removeprefix(self._layout.channel).partition(self._layout.constrain)[0]

    def _read_header(self, text: str) -> None:
        self._header = (self._header or "") + text
        if len(self._header) > MAX_HEADER:
            self._open_late(self._header)

    def _end_header(self, header: str, *, whole: bool, last: bool) -> None:
        """No mark of a text stands behind it: the text has begun without one, or there is none. Of
        a header that was cut off nothing is said, nor of one whose channel nobody knows, unless it
        is the last.
        """
        if not whole and (self._in_channel or _CUT_RECIPIENT.fullmatch(header)):
            return
        if not self._in_channel and self._has_role and not self._role:
            return  # a role alone
        if not self._in_channel and _RECIPIENT_ALONE.fullmatch(header):
            return
        if not self._in_channel or last or _CHANNEL.match(self._channel_of(header)):
            self._open_late(header)

    def _open_late(self, header: str) -> None:
        """The text of a message has begun somewhere in what was taken for its header."""
        size = _header_size(self._layout, header) if self._in_channel else 0
        text = header[size:].replace(self._layout.constrain, "")
        self._open_text(header if size else "")
        self._read_text(text if text.strip() else "")

    def _open_text(self, header: str) -> None:
        """The text of a message follows `header`."""
        channel = self._channel_of(header)
        if not self._in_channel:
            self._role += header
        role = self._role.split()
        own = not self._has_role or not role or role[0] == "assistant"
        name = self._function(f"{self._role} {self._channels} {channel}") if own else ""
        match = _CHANNEL.match(channel)
        kind = ReasoningText if match and match[1] == REASONING else ContentText
        self._header, self._kind = None, kind if own else None
        self._first = True
        self._is_call = name != ""
        if self._is_call:
            self._call = CallReader(("arguments",), self._is_tool, name=name)

    def _function(self, header: str) -> str:
        """The first tool that a header is addressed to; "" if none."""
        for addressed, recipient in _RECIPIENT.findall(header):
            name = recipient.removeprefix(FUNCTIONS)
            # Where nobody says which tools there are, a bare name is none.
            named = name != recipient or (addressed and self._tools is not None)
            if named and self._is_tool(name):
                return str(name)
        return ""

    # Texts.

    def _read_text(self, text: str) -> None:
        if self._call is not None:
            text = self._read_call(self._call, text)
        self._say(text)

    def _say(self, text: str) -> None:
        if not text or self._kind is None:
            return
        if self._first and self._kind in self._said:
            text = "\n" + text
        self._first = False
        self._said.add(self._kind)
        self._events.append(self._kind(text))

    def _read_call(self, call: CallReader, text: str) -> str:
        """What is a text, as it turns out to be no call. Arguments that have begun go on to the
        message's end, if they break, and what stands behind whole ones is left out.
        """
        stop = len(text) if self._started else min(len(text), MAX_HELD - len(self._held))
        end = call.feed(text, 0, stop)
        if call.ready and not self._started:
            self._start_call(call)
        if self._started:
            if call.bad:
                call.pieces.append(text[end:])
            self._emit_arguments(call)
            return ""
        self._held += text[:end]
        if not call.bad and len(self._held) < MAX_HELD:
            return ""
        held = self._held
        self._clear_call()
        return held + text[end:]

    def _start_call(self, call: CallReader) -> None:
        self._started, self._held = True, ""
        self._events.append(ToolCallStart(self._num_calls, self._new_id(), call.name or ""))
        self._num_calls += 1

    def _end_call(self, *, whole: bool) -> None:
        """End the call that is open, if there is one. Without a text it has no arguments."""
        call, held = self._call, self._held
        if call is None:
            return
        if whole and not self._started:
            # The character behind a word says that it is complete.
            last = " " if held.strip() else "{}"
            call.feed(last, 0, len(last))
            if call.done:
                self._start_call(call)
                self._emit_arguments(call)
        if self._started:
            self._events.append(ToolCallEnd(self._num_calls - 1, call.whole))
        else:
            self._say(held)
        self._clear_call()

    def _clear_call(self) -> None:
        self._call, self._started, self._held = None, False, ""


def layout_of(format: Format) -> Messages:
    """The marks of a format's messages. Raises InternalError if it has none."""
    if format.messages is None:
        raise InternalError(f"output parser: the format {format.name} has no messages")
    return format.messages


def _header_size(layout: Messages, header: str) -> int:
    """Characters of a text that are a header, where no mark stands behind it."""
    pattern = rf"{re.escape(layout.channel)}\s*(?:{_NAMES})?(?:\s*to=[^\s<]*)?\s*"
    match = re.match(rf"{pattern}(?:(?:{re.escape(layout.constrain)})?\s*json\b)?\s*", header)
    return match.end() if match else 0
