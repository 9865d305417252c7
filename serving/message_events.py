"""Parser events as events of Anthropic's Messages API, and the message. No HTTP here: each event is
a dict of JSON data, ready to be sent under the name in its `type`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

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
from .responses import Usage

Json = dict[str, Any]
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Why a message ended: the parser's words, and Anthropic's."""
TEXT_OF = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
"""Where events of a block's kind have its text."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a message ended. `stop`: the stop string that did it; `is_full`: no token more fits into
    the context.
    """

    usage: Usage
    stop: str | None = None
    is_full: bool = False


class MessageEvents:
    """One message, streamed: `start(usage)`, `take(events)` as often as there are some, then
    `end(ending)`. Each returns the events to send.

    Reasoning, text and each call are blocks of their own, in the order in which they begin.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self._head: Json = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._blocks: list[Json] = []
        self._texts: list[str] = []
        self._is_open = False
        self._reason: str | None = None

    def start(self, usage: Usage) -> list[Json]:
        """The first event. What a prompt takes from the cache may not be known yet: the last event
        has the numbers that count.
        """
        message = self._message([], usage, None, None)
        return [{"type": "message_start", "message": message}]

    def take(self, events: Iterable[Event]) -> list[Json]:
        """What the parser reported. Its `Finish` closes the last block."""
        return [told for event in events for told in self._take(event)]

    def end(self, ending: Ending) -> list[Json]:
        """The last events. Raises InternalError, see `message`."""
        whole = self.message(ending)
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return [
            {"type": "message_delta", "delta": delta, "usage": whole["usage"]},
            {"type": "message_stop"},
        ]

    def message(self, ending: Ending) -> Json:
        """The message, which is also the answer to a request that does not stream. Raises
        InternalError for one that did not come to its end.
        """
        reason = REASONS.get(self._reason or "")
        if reason is None:
            raise InternalError(f"the generation ended with {self._reason}")
        stop = ending.stop if reason == "end_turn" else None
        if stop is not None:
            reason = "stop_sequence"
        elif reason == "max_tokens" and ending.is_full:
            reason = "model_context_window_exceeded"
        return self._message(self._blocks, ending.usage, reason, stop)

    def _take(self, event: Event) -> list[Json]:
        match event:
            case ReasoningText(text):
                return self._more(text, {"type": "thinking", "thinking": "", "signature": ""})
            case ContentText(text):
                return self._more(text, {"type": "text", "text": ""})
            case ToolCallStart(_, call_id, name):
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case ToolCallArguments(_, text):
                return [self._delta(text)]
            case ToolCallEnd():
                return self._close()
            case Finish(reason):
                self._reason = reason
                return self._close()

    def _more(self, text: str, empty: Json) -> list[Json]:
        """More text of a block of the kind of `empty`, which begins here if none such is open."""
        goes_on = self._is_open and self._blocks[-1]["type"] == empty["type"]
        begun = [] if goes_on else self._begin(empty)
        return [*begun, self._delta(text)]

    def _begin(self, block: Json) -> list[Json]:
        closing = self._close()
        self._is_open = True
        self._blocks.append(block)
        # A copy: the block itself grows.
        begun = {"type": "content_block_start", "index": self._index, "content_block": {**block}}
        return [*closing, begun]

    def _delta(self, text: str) -> Json:
        if not self._is_open:
            raise InternalError("messages: text outside of a block")
        kind = self._blocks[-1]["type"]
        name = "input_json_delta" if kind == "tool_use" else f"{kind}_delta"
        self._texts.append(text)
        delta = {"type": name, TEXT_OF[kind]: text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Json]:
        """End the open block, if there is one."""
        if not self._is_open:
            return []
        block, text = self._blocks[-1], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[TEXT_OF[block["type"]]] = text
        self._texts, self._is_open = [], False
        return [{"type": "content_block_stop", "index": self._index}]

    @property
    def _index(self) -> int:
        """The place of the last block."""
        return len(self._blocks) - 1

    def _message(
        self, blocks: list[Json], usage: Usage, reason: str | None, stop: str | None
    ) -> Json:
        return self._head | {
            "content": [*blocks],
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(usage),
        }


def _usage(usage: Usage) -> Json:
    """As Anthropic has it: what came from the cache is no part of `input_tokens`."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _input(text: str) -> Json:
    """The arguments of a call; of those that were cut off what there is, as Anthropic's client
    reads them too. What is no object as JSON stands in one, under a name that says so.
    """
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
