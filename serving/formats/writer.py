"""What the parsers of all formats have: events that wait to be told, and the calls among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache

from ...shared.errors import InternalError
from .calls import CallReader
from .events import Event, Finish, ToolCallArguments, ToolCallEnd
from .tags import TagReader


class EventWriter:
    """Collects the events of one answer. `tools` are the names on offer, None allows any; `new_id`
    makes ids of calls.
    """

    def __init__(self, tools: Collection[str] | None, new_id: Callable[[], str]) -> None:
        self._tools = None if tools is None else frozenset(tools)
        self._new_id = new_id
        self._events: list[Event] = []
        self._num_calls = 0
        self._finished = False

    def push_mark(self, token_id: int) -> list[Event]:
        """Take a token that is none of the text. Raises InternalError where all marks are text."""
        raise InternalError(f"output parser: token {token_id} is no mark of this format")

    def _check_open(self) -> None:
        if self._finished:
            raise InternalError("output parser: used after finish()")

    def _is_tool(self, name: str) -> bool:
        return name.isprintable() and name != "" and (self._tools is None or name in self._tools)

    def _emit_arguments(self, call: CallReader | TagReader) -> None:
        text = "".join(call.pieces)
        call.pieces.clear()
        if text:
            self._events.append(ToolCallArguments(self._num_calls - 1, text))

    def _emit_finish(self, reason: str) -> None:
        """`reason` is the engine's: a stop after a call, which the end did not cut off, becomes
        tool_calls.
        """
        cut = any(isinstance(one, ToolCallEnd) and not one.complete for one in self._events)
        called = self._num_calls and reason == "stop" and not cut
        self._events.append(Finish("tool_calls" if called else reason))

    def _flush(self) -> list[Event]:
        events, self._events = self._events, []
        return events


@lru_cache(maxsize=256)
def marks_pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds each of some marks in a text."""
    return re.compile("|".join(re.escape(mark) for mark in marks))
