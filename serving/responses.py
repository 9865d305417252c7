"""Parser events as events of OpenAI's Responses API, and the final object. No HTTP here: each
event is a dict of JSON data, ready to be sent under the name in its `type`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..shared.errors import InternalError
from .formats.events import (
    ContentText,
    Event,
    Finish,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one response. `cached` are part of `prompt`, `reasoning` of `completion`."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0

    def as_json(self) -> Json:
        """As `ResponseUsage`."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(slots=True)
class _Item:
    """An output item that still grows. `shell` is the item without its text."""

    shell: Json
    index: int
    texts: list[str] = field(default_factory=list)
    scores: list[Json] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def as_json(self, status: str) -> Json:
        """The item as it is now."""
        item = {**self.shell, "status": status}
        if item["type"] == "function_call":
            return {**item, "arguments": self.text}
        part = _part(item["type"], self.text, self.scores)
        return {**item, "content": [part] if self.texts else []}


class ResponseEvents:
    """One response, streamed: `start()`, `take(events)` as often as there are some, then
    `end(usage)`, or `fail(message)` at any time. Each returns the events to send.

    `request` are the request's fields that the response repeats, such as instructions, tools,
    tool_choice, temperature and metadata. `created_at` is in seconds since 1970. `new_id` makes an
    item's id from its prefix (rs, msg, fc). A call's `call_id` is the parser's id.

    Reasoning, text and each call are items of their own, in the order in which they begin; a
    streamed item has the id that it has in the final object. An item that the length cut off is
    incomplete, as is a call whose arguments are.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        created_at: int,
        request: Mapping[str, Any] | None = None,
        new_id: Callable[[str], str] | None = None,
    ) -> None:
        self._base = {
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            **(request or {}),
            "id": response_id,
            "object": "response",
            "created_at": created_at,
            "model": model,
        }
        self._new_id = new_id or _random_id
        self._sequence = 0
        self._items: list[Json] = []
        self._open: _Item | None = None
        self._scores: list[Json] = []
        self._reason: str | None = None
        self._failure = ""

    def start(self) -> list[Json]:
        """The first events, before any output."""
        state = self._response("in_progress")
        return [
            self._event("response.created", response=state),
            self._event("response.in_progress", response=state),
        ]

    def take(self, events: Iterable[Event], scores: Sequence[Json] = ()) -> list[Json]:
        """What the parser reported. Its `Finish` closes the last item. `scores` are the
        log-probabilities of new tokens: those of text go with the next piece of it.
        """
        self._scores += scores
        return [out for event in events for out in self._take(event)]

    def end(self, usage: Usage) -> list[Json]:
        """The last event: completed, incomplete if the length ran out, or failed."""
        if self._reason is None:
            raise InternalError("responses: end() before the parser's Finish")
        response = self.response(usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def response(self, usage: Usage | None) -> Json:
        """The final object, which is also the answer to a request that does not stream."""
        reason = self._reason
        if reason == "length":
            return self._response("incomplete", usage) | {
                "incomplete_details": {"reason": "max_output_tokens"}
            }
        if reason in ("stop", "tool_calls"):
            return self._response("completed", usage)
        message = self._failure or f"the generation ended with {reason}"
        return self._response("failed", usage) | {
            "error": {"code": "server_error", "message": message}
        }

    def fail(self, message: str, usage: Usage | None = None) -> list[Json]:
        """The last events of a response that broke: what is open closes as incomplete."""
        self._reason, self._failure = "error", message
        closing = self._close("incomplete")
        return [*closing, self._event("response.failed", response=self.response(usage))]

    def error(self, message: str, code: str | None = None, param: str | None = None) -> Json:
        """An error of the stream itself, where no response can be told of."""
        return self._event("error", code=code, message=message, param=param)

    def _take(self, event: Event) -> list[Json]:
        match event:
            case ReasoningText(text):
                return self._text("reasoning", text)
            case ContentText(text):
                return self._text("message", text)
            case ToolCallStart(_, call_id, name):
                return self._begin({"type": "function_call", "call_id": call_id, "name": name})
            case ToolCallArguments(_, text):
                item = self._current()
                item.texts.append(text)
                kind = "response.function_call_arguments.delta"
                return [self._event(kind, **_place(item), delta=text)]
            case ToolCallEnd(_, complete):
                return self._close("completed" if complete else "incomplete")
            case Finish(reason):
                self._reason = reason
                whole = reason in ("stop", "tool_calls")
                return self._close("completed" if whole else "incomplete")

    def _text(self, kind: str, text: str) -> list[Json]:
        begun: list[Json] = []
        if self._open is None or self._open.shell["type"] != kind:
            extra: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            begun = self._begin({"type": kind, **extra})
        item = self._current()
        item.texts.append(text)
        scores: list[Json] = []
        if kind == "message":
            scores, self._scores = self._scores, []
            item.scores += scores
        name, more = f"response.{_part_type(kind)}.delta", _logprobs(kind, _short(scores))
        return [*begun, self._event(name, **_place(item), content_index=0, delta=text, **more)]

    def _begin(self, shell: Json) -> list[Json]:
        kind = shell["type"]
        if kind == "function_call":
            self._scores = []  # of its marks
        closing = self._close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = self._open = _Item({"id": self._new_id(prefix), **shell}, len(self._items))
        added = self._event(
            "response.output_item.added", output_index=item.index, item=item.as_json("in_progress")
        )
        if kind == "function_call":
            return [*closing, added]
        part = self._event(
            "response.content_part.added", **_place(item), content_index=0, part=_part(kind, "", [])
        )
        return [*closing, added, part]

    def _close(self, status: str) -> list[Json]:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        kind, place, text = item.shell["type"], _place(item), item.text
        if kind == "message":  # of what ends it, which is no text
            item.scores += self._scores
            self._scores = []
        done = item.as_json(status)
        self._items.append(done)
        if kind == "function_call":
            name = "response.function_call_arguments.done"
            events = [self._event(name, **place, arguments=text)]
        else:
            name = f"response.{_part_type(kind)}.done"
            events = [
                self._event(
                    name,
                    **place,
                    content_index=0,
                    text=text,
                    **_logprobs(kind, _short(item.scores)),
                ),
                self._event(
                    "response.content_part.done",
                    **place,
                    content_index=0,
                    part=_part(kind, text, item.scores),
                ),
            ]
        last = self._event("response.output_item.done", output_index=item.index, item=done)
        return [*events, last]

    def _current(self) -> _Item:
        if self._open is None:
            raise InternalError("responses: arguments outside of a call")
        return self._open

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _response(self, status: str, usage: Usage | None = None) -> Json:
        return {
            **self._base,
            "status": status,
            "output": list(self._items),
            "error": None,
            "incomplete_details": None,
            "usage": None if usage is None else usage.as_json(),
        }


def _place(item: _Item) -> Json:
    return {"item_id": item.shell["id"], "output_index": item.index}


def _part_type(kind: str) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _part(kind: str, text: str, scores: Sequence[Json]) -> Json:
    """The one content part of a message or of reasoning."""
    part: Json = {"type": _part_type(kind), "text": text}
    return part if kind == "reasoning" else {**part, "annotations": [], **_logprobs(kind, scores)}


def _logprobs(kind: str, scores: Sequence[Json]) -> Json:
    """Text of a message has the field, which must be there."""
    return {"logprobs": list(scores)} if kind == "message" else {}


def _short(scores: Sequence[Json]) -> list[Json]:
    """As events have them: without bytes."""
    return [
        {"token": one["token"], "logprob": one["logprob"]}
        | {
            "top_logprobs": [
                {"token": other["token"], "logprob": other["logprob"]}
                for other in one["top_logprobs"]
            ]
        }
        for one in scores
    ]


def _random_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
