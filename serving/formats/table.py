"""The formats in which models mark reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from ...shared.errors import ConfigError
from ...shared.models.fields import show


@dataclass(frozen=True, slots=True)
class Tags:
    """How a call is written where it is no JSON: its name, each key and each value between two
    texts, and `end`; without one the call's mark ends it. `lines`: a line break behind the first
    and one before the second text of a value is not the value's.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    lines: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """How calls are marked. `open` goes before a call or a list of them, `close`, if there is
    one, after it.

    A call is an object with `name` and one of `argument_keys`. `separator` stands between several
    of one opening. `bare`: a message that begins with such an object is a call without a mark.
    `listed`: a JSON list of objects may follow. `named`: `name[CALL_ID]id[ARGS]{arguments}` may
    follow. `short_ids`: ids are 9 letters and digits, which such templates ask for. `tags`: a call
    is no object, but written so.
    """

    open: str
    close: str = ""
    argument_keys: tuple[str, ...] = ("arguments",)
    separator: str = ""
    bare: bool = False
    listed: bool = False
    named: bool = False
    short_ids: bool = False
    tags: Tags | None = None


@dataclass(frozen=True, slots=True)
class Messages:
    """The marks of an answer that is a row of messages, each with a header: `start`, the role,
    `channel` and its name, `message`, the text, `end`.

    A recipient, such as to=functions.f, stands behind the role or the channel's name; `constrain`
    goes before what the text is, such as json. `stops` end a message and the whole answer.
    """

    start: str
    channel: str
    constrain: str
    message: str
    end: str
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """What a parser looks for. `think` are the marks around reasoning. Where there are `messages`,
    these tell reasoning, calls and the answer apart, and nothing else does.
    """

    name: str
    think: tuple[str, str] | None = None
    calls: Calls | None = None
    messages: Messages | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that may be tokens of their own."""
        calls, rows = self.calls, self.messages
        found = [*(self.think or ()), *((calls.open, calls.close) if calls else ())]
        if calls and calls.named:
            found += ["[CALL_ID]", "[ARGS]"]
        if rows:
            found += [rows.start, rows.channel, rows.constrain, rows.message, rows.end, *rows.stops]
        return tuple(mark for mark in found if mark)

    @property
    def may_call(self) -> bool:
        """Whether calls are marked."""
        return self.calls is not None or self.messages is not None


_THINK = ("<think>", "</think>")
_PARAMETERS = Tags(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", lines=True
)
_ARGUMENTS = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))
_HERMES = Calls("<tool_call>", "</tool_call>", ("arguments", "parameters"))

FORMATS = {
    entry.name: entry
    for entry in (
        Format("none"),
        Format("think", _THINK),
        Format("hermes", _THINK, _HERMES),
        Format("qwen", _THINK, _HERMES),
        Format("qwen3_coder", _THINK, Calls("<tool_call>", "</tool_call>", tags=_PARAMETERS)),
        Format("glm45", _THINK, Calls("<tool_call>", "</tool_call>", tags=_ARGUMENTS)),
        Format(
            "llama3_json",
            calls=Calls(
                "<|python_tag|>",
                argument_keys=("parameters", "arguments"),
                separator=";",
                bare=True,
            ),
        ),
        Format(
            "mistral",
            ("[THINK]", "[/THINK]"),
            Calls("[TOOL_CALLS]", listed=True, named=True, short_ids=True),
        ),
        Format(
            "harmony",
            messages=Messages(
                "<|start|>",
                "<|channel|>",
                "<|constrain|>",
                "<|message|>",
                "<|end|>",
                ("<|return|>", "<|call|>"),
            ),
        ),
    )
}
"""By the names that a user may give."""


def find_format(name: str) -> Format:
    """The format of a name. Raises ConfigError if there is none."""
    if name not in FORMATS:
        raise ConfigError(f"output format: got {show(name)}, allowed are {', '.join(FORMATS)}")
    return FORMATS[name]
