"""What a parser of model output reports, in the order in which a client's stream needs it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; its arguments are "" so far. `index` counts the message's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments: the model's own text. All of it joined is a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """Nothing more comes of a call. `complete` is false if its arguments are cut off or broken."""

    index: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """The message ends. `reason` is the engine's, but for a stop after a whole call: tool_calls."""

    reason: str


Event = ReasoningText | ContentText | ToolCallStart | ToolCallArguments | ToolCallEnd | Finish


@dataclass(slots=True)
class ToolCall:
    """One call of a message. `arguments` is the text of a JSON object if `complete`."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class ParsedMessage:
    """A whole message: its events put together."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = "stop"

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case ReasoningText(text):
                self.reasoning += text
            case ContentText(text):
                self.content += text
            case ToolCallStart(_, call_id, name):
                self.tool_calls.append(ToolCall(call_id, name))
            case ToolCallArguments(index, text):
                self.tool_calls[index].arguments += text
            case ToolCallEnd(index, complete):
                self.tool_calls[index].complete = complete
            case Finish(reason):
                self.finish_reason = reason
