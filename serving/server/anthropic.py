"""/v1/messages, of Anthropic's API: its body as the chat that it is, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ...shared.errors import RequestError
from ...shared.models.fields import show
from ..message_events import Ending, MessageEvents
from .answers import error_of, message_error
from .as_chat import AsChat, begin_as_chat, used
from .events import told_events
from .fields import ChatRequest, read_fields
from .server import Server, json_response, read_body

IGNORED = (
    "billing_policy", "cache_control", "context_management", "diagnostics",
    "fallback_credit_token", "fallbacks", "inference_geo", "metadata", "service_tier", "speed",
    "user_profile_id", "workspace_id",
)  # fmt: skip
"""Known fields that change no token: prefixes are cached unasked, and nothing is left out of what
was said.
"""
BILLING = "x-anthropic-billing-header:"
"""How the line of a system prompt begins that is for Anthropic's books. Claude Code sends it first,
another one with each call: no prompt would share a prefix with the one before.
"""
THINKING = ("enabled", "adaptive", "disabled")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Of `tool_choice`, beside `tool`."""
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
    "messages": "messages",
}
"""Fields of a chat, and what they are called here."""
TOOL_NAMES = {"].function.parameters": "].input_schema", "].function": "]"}
"""The same of parts of a tool."""


class MessagesRequest(AsChat):
    """What a message is made from. All that was said comes with each call."""

    same = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")
    ignored = IGNORED
    names = NAMES
    tool_names = TOOL_NAMES
    asked_by_false = ("continue_final_message", "parallel_tool_calls")
    refused: ClassVar[Mapping[str, str]] = {
        "compaction": "is not supported",
        "container": "this server has none",
        "mcp_servers": "this server calls no tools by itself",
        "n": "an answer is one message",
        "max_completion_tokens": "is max_tokens here",
        "stop": "is stop_sequences here",
        "output_format": "is output_config.format here",
        "response_format": "is output_config.format here",
        "reasoning_effort": "is output_config.effort here",
        "parallel_tool_calls": "is tool_choice.disable_parallel_tool_use here",
        "thread": "nothing is stored here: send all that was said as messages",
    } | dict.fromkeys(
        (
            "continue_final_message", "echo", "logprobs", "prompt_logprobs", "return_token_ids",
            "return_tokens_as_token_ids", "stream_options", "top_logprobs",
        ),
        "is for chats",
    )  # fmt: skip

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The chat that it asks for. Raises RequestError."""
        body = self.shared_fields()
        messages = _messages(self.messages)
        if system := _system(self.system):
            messages.insert(0, {"role": "system", "content": system})
        body |= {"messages": messages, "stop": self.stop_sequences, "tools": self._tools()}
        if messages[-1]["role"] == "assistant":
            if "tool_calls" in messages[-1]:  # a template would end the prompt before them
                raise RequestError("messages", "end with a tool_use: its tool_result has to follow")
            body["continue_final_message"] = True
        body |= self._choice() | self._thought(body.get("chat_template_kwargs")) | self._output()
        return self.read_chat(body)

    def _tools(self) -> list[dict[str, Any]] | None:
        if self.tools is None:
            return None
        found = []
        for place, tool in enumerate(self.tools):
            kind = tool.get("type")
            if kind not in (None, "custom"):
                raise RequestError(
                    f"tools[{place}].type",
                    f"got {show(kind)}, allowed is custom: this server has no tools of its own",
                )
            name = tool.get("name")
            if not isinstance(name, str) or not name:
                raise RequestError(f"tools[{place}].name", f"got {show(name)}, must be text")
            names = ("name", "name"), ("description",) * 2, ("input_schema", "parameters")
            function = {
                ours: tool[theirs] for theirs, ours in names if tool.get(theirs) is not None
            }
            if tool.get("strict") is not None:
                function["strict"] = tool["strict"]
            found.append({"type": "function", "function": function})
        return found

    def _choice(self) -> dict[str, Any]:
        """What says which tools may be called."""
        choice = self.tool_choice
        if choice is None:
            return {}
        kind = choice.get("type")
        name = choice.get("name")
        if kind == "tool":
            if name is None or name not in [tool.get("name") for tool in self.tools or ()]:
                why = f"got {show(name)}, must name one of the tools"
                raise RequestError("tool_choice.name", why)
            named: Any = {"type": "function", "function": {"name": name}}
        elif isinstance(kind, str) and kind in CHOICES:
            named = CHOICES[kind]
            if named == "required" and not self.tools:
                raise RequestError("tool_choice.type", f"got {kind}, which needs tools")
        else:
            allowed = ", ".join((*CHOICES, "tool"))
            raise RequestError("tool_choice.type", f"got {show(kind)}, allowed are {allowed}")
        alone = choice.get("disable_parallel_tool_use")
        if alone is not None and not isinstance(alone, bool):
            field = "tool_choice.disable_parallel_tool_use"
            raise RequestError(field, f"got {show(alone)}, must be a boolean")
        return {"tool_choice": named, "parallel_tool_calls": False if alone else None}

    def _thought(self, variables: Any) -> dict[str, Any]:
        """Whether the model is asked to reason first, and that is told. How much it may is not
        bounded.
        """
        if self.thinking is None:
            return {}
        kind, display = self.thinking.get("type"), self.thinking.get("display")
        if kind not in THINKING:
            allowed = ", ".join(THINKING)
            raise RequestError("thinking.type", f"got {show(kind)}, allowed are {allowed}")
        if display not in (None, "summarized", "omitted"):
            allowed = "summarized and omitted"
            raise RequestError("thinking.display", f"got {show(display)}, allowed are {allowed}")
        told = {"include_reasoning": False} if display == "omitted" else {}
        if variables is not None and not isinstance(variables, dict):
            return told  # which is refused by its own name
        wanted = {"enable_thinking": kind != "disabled"}
        return told | {"chat_template_kwargs": wanted | (variables or {})}

    def _output(self) -> dict[str, Any]:
        """How hard the model shall try, and the form of its text."""
        config, found = self.output_config or {}, dict[str, Any]()
        if config.get("effort") is not None:
            found["reasoning_effort"] = config["effort"]
        form = config.get("format")
        if form is None:
            return found
        if not isinstance(form, dict):
            raise RequestError("output_config.format", f"got {show(form)}, must be an object")
        if form.get("type") != "json_schema":
            raise RequestError(
                "output_config.format.type", f"got {show(form.get('type'))}, allowed is json_schema"
            )
        return found | {"response_format": {"type": "json_schema", "json_schema": form}}


class CountRequest(MessagesRequest):
    """The body of /v1/messages/count_tokens."""

    max_tokens: int | None = None  # type: ignore[assignment]


def _system(given: str | list[dict[str, Any]] | None) -> str:
    """What stands before the conversation."""
    if isinstance(given, str):
        return _unbilled(given)
    texts = [_unbilled(_text("system", place, part)) for place, part in enumerate(given or ())]
    return "\n".join(text for text in texts if text)


def _unbilled(text: str) -> str:
    first, _, rest = text.partition("\n")
    return rest if first.startswith(BILLING) else text


def _text(where: str, place: int, part: Any) -> str:
    """The text of a part. Raises RequestError for a part that is no text."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        why = "must be a text block: this model reads only text"
        raise RequestError(f"{where}[{place}]", f"got {show(part)}, {why}")
    return text


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. Messages of one role that follow one another are one turn."""
    found: list[dict[str, Any]] = []
    for place, message in enumerate(given):
        where, role = f"messages[{place}]", message.get("role")
        read = READERS.get(role) if isinstance(role, str) else None
        if read is None:
            allowed = " and ".join(READERS)
            raise RequestError(f"{where}.role", f"got {show(role)}, allowed are {allowed}")
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            why = "must be text or a list of blocks"
            raise RequestError(f"{where}.content", f"got {show(content)}, {why}")
        for turn in read(f"{where}.content", content):
            _append(found, turn)
    if not found:
        raise RequestError("messages", "is empty: at least one message is needed")
    for turn in found:
        if "reasoning_content" in turn:
            turn["reasoning_content"] = "".join(turn["reasoning_content"])
    return found


def _append(found: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Put a turn behind others, or to the last one of them where both are one."""
    last: dict[str, Any] = found[-1] if found else {"role": None}
    role = turn["role"]
    if role != last["role"] or role in ("tool", "system"):
        found.append(turn)
        return
    last["content"] += turn["content"]
    for name in ("reasoning_content", "tool_calls"):
        if name in turn:
            last.setdefault(name, []).extend(turn[name])


def _said_by_user(where: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """What a user says, and results of calls, in their order."""
    found: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            found.append(_result(f"{where}[{place}]", block))
            continue
        part = {"type": "text", "text": _text(where, place, block)}
        _append(found, {"role": "user", "content": [part]})
    return found or [{"role": "user", "content": []}]


def _result(where: str, block: dict[str, Any]) -> dict[str, Any]:
    """The result of a call, as a message."""
    call, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call, str):
        raise RequestError(f"{where}.tool_use_id", f"got {show(call)}, must be text")
    if content is None:
        content = ""
    if not isinstance(content, (str, list)):
        why = "must be text or a list of text blocks"
        raise RequestError(f"{where}.content", f"got {show(content)}, {why}")
    if isinstance(content, list):
        for place, part in enumerate(content):
            _text(f"{where}.content", place, part)
    return {"role": "tool", "tool_call_id": call, "content": content}


def _said_by_assistant(where: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """What an assistant thought, said and called in one turn."""
    texts, thoughts, calls = list[dict[str, Any]](), list[str](), list[dict[str, Any]]()
    for place, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append(_call(f"{where}[{place}]", block))
        elif kind == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                name = f"{where}[{place}].thinking"
                raise RequestError(name, f"got {show(thought)}, must be text")
            thoughts.append(thought)
        elif kind != "redacted_thinking":  # which nobody here can read
            texts.append({"type": "text", "text": _text(where, place, block)})
    turn: dict[str, Any] = {"role": "assistant", "content": texts}
    if thoughts:
        turn["reasoning_content"] = thoughts  # texts, until no more can follow
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def _call(where: str, block: dict[str, Any]) -> dict[str, Any]:
    """A call, as a chat has it."""
    for name, kind, what in (
        ("id", str, "text"),
        ("name", str, "text"),
        ("input", dict, "an object"),
    ):
        if not isinstance(block.get(name), kind):
            raise RequestError(f"{where}.{name}", f"got {show(block.get(name))}, must be {what}")
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _said_by_system(where: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """What is told to the model in the middle of a conversation: it stays there."""
    for place, block in enumerate(blocks):
        _text(where, place, block)
    return [{"role": "system", "content": blocks}]


READERS: dict[str, Callable[[str, list[Any]], list[dict[str, Any]]]] = {
    "user": _said_by_user,
    "assistant": _said_by_assistant,
    "system": _said_by_system,
}
"""What makes messages of a chat of the blocks of a role."""


async def messages(server: Server, request: Request) -> Response:
    """/v1/messages, as Anthropic's API has it."""
    body: MessagesRequest = read_fields(MessagesRequest, await read_body(request))
    chat, live, reader = await begin_as_chat(server, request, body)
    name = chat.model or server.settings.names[0]
    events = MessageEvents(f"msg_{request.scope['twinfer.id']}", name)

    def take() -> list[dict[str, Any]]:
        return [out for news in live.news() for out in events.take(reader.read(news))]

    def ending() -> Ending:
        output, usage = live.outputs[0], used(live, reader)
        stop = output.stop_reason if isinstance(output.stop_reason, str) else None
        return Ending(usage, stop, is_full=usage.prompt + usage.completion == server.room)

    def whole() -> dict[str, Any]:
        take()
        return events.message(ending())

    told = told_events(
        live,
        start=lambda: events.start(used(live, reader)),
        take=take,
        end=lambda: events.end(ending()),
        fail=lambda error: [message_error(*error_of(error))],
    )
    return await server.answer(request, [live], told if body.stream else None, whole)


async def count_tokens(server: Server, request: Request) -> Response:
    """/v1/messages/count_tokens."""
    body: CountRequest = read_fields(CountRequest, await read_body(request))
    body.check()
    chat = body.chat()
    try:
        server.accept(chat)
        _, ids = await server.render_in_thread(request, chat, None)
    except RequestError as error:
        raise body.named(error) from None
    return json_response(200, {"input_tokens": len(ids)})
