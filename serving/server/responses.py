"""/v1/responses: its body as the chat that it is, and its answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ...shared.errors import RequestError
from ...shared.models.fields import show
from ..responses import ResponseEvents
from .answers import message_of
from .as_chat import AsChat, begin_as_chat, used
from .events import told_events
from .fields import ChatRequest, read_arguments, read_fields
from .live import News
from .server import Server, read_body

SCORES = "message.output_text.logprobs"
"""What `include` names to have log-probabilities."""
TEXT_PARTS = ("input_text", "output_text", "text")
INCLUDABLE = (
    SCORES, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
"""What it may name. Of the others no answer here has anything."""
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.allowed_tools.mode": "tool_choice.mode",
}
"""Fields of a chat, and what a response calls them."""
TOOL_NAMES = {"].function": "]"}
"""The same of parts of a tool."""


class ResponsesRequest(AsChat):
    """What a response is made from. All that was said comes with each call: nothing is stored."""

    same = ("model", "stream", "temperature", "top_p")
    names = NAMES
    tool_names = TOOL_NAMES
    refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": "nothing is stored here: send all that was said as input",
        "conversation": "nothing is stored here: send all that was said as input",
        "background": "is not supported",
        "background_options": "is not supported",
        "context_management": "nothing is stored here: send what shall be read as input",
        "moderation": "this server moderates nothing",
        "image": "this server gives text",
        "access_programs": "is not supported",
        "prompt": "templates are not stored here",
        "max_tool_calls": "this server calls no tools by itself",
        "n": "a response is one",
        "messages": "is input here",
        "max_tokens": "is max_output_tokens here",
        "max_completion_tokens": "is max_output_tokens here",
        "response_format": "is text.format here",
        "logprobs": "is top_logprobs here",
        "echo": "is for chats and completions",
        "prompt_logprobs": "is for chats and completions",
        "return_token_ids": "is for chats and completions",
        "return_tokens_as_token_ids": "is for chats and completions",
    }

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None

    def check(self) -> None:
        """Raise RequestError for a field that cannot be had."""
        super().check()
        form = (self.text or {}).get("format")
        if form is not None and not isinstance(form, dict):
            raise RequestError("text.format", f"got {show(form)}, must be an object")
        for place, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                raise RequestError(
                    f"include[{place}]", f"got {show(name)}, allowed are {', '.join(INCLUDABLE)}"
                )
        if self.truncation not in (None, "disabled"):
            raise RequestError("truncation", f"got {show(self.truncation)}, allowed is disabled")

    def chat(self) -> ChatRequest:
        """The chat that it asks for. Raises RequestError."""
        body = self.shared_fields()
        messages = _messages(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        choice: Any = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = _function(choice)
        elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            named = choice.get("tools")
            functions = [_function(tool) for tool in (named if isinstance(named, list) else [])]
            allowed = {"mode": choice.get("mode"), "tools": functions}
            choice = {"type": "allowed_tools", "allowed_tools": allowed}
        body |= {"messages": messages, "tools": self._tools(), "tool_choice": choice}
        body["parallel_tool_calls"] = self.parallel_tool_calls
        if self.top_logprobs is not None or SCORES in (self.include or ()):
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.max_output_tokens is not None:
            body["max_completion_tokens"] = self.max_output_tokens
        if form := (self.text or {}).get("format"):
            body["response_format"] = {"type": form.get("type"), "json_schema": form}
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.get("effort")
        return self.read_chat(body)

    def _tools(self) -> list[dict[str, Any]] | None:
        if self.tools is None:
            return None
        found = []
        for place, tool in enumerate(self.tools):
            if tool.get("type") != "function":
                raise RequestError(
                    f"tools[{place}].type", f"got {show(tool.get('type'))}, allowed is function"
                )
            function = {
                key: tool[key]
                for key in ("name", "description", "parameters", "strict")
                if tool.get(key) is not None
            }
            found.append({"type": "function", "function": function})
        return found

    def repeated(self) -> dict[str, Any]:
        """What the answer repeats of the request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (self.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": self.text or {"format": {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_p": self.top_p,
            "truncation": "disabled",
        }


def _function(tool: Any) -> dict[str, Any]:
    """A function as a chat names it."""
    name = tool.get("name") if isinstance(tool, dict) else None
    return {"type": "function", "function": {"name": name}}


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. What an assistant thought, said and called in one turn is one."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        where = f"input[{place}]"
        kind = item.get("type", "message")
        if kind == "message":
            said = {"role": item.get("role"), "content": _text(where, item.get("content"))}
            if said["role"] == "assistant" and _only_thinks(found):
                found[-1] |= said
            else:
                found.append(said)
            continue
        if kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _text(where, output)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            continue
        if kind not in ("function_call", "reasoning"):
            allowed = "message, function_call, function_call_output and reasoning"
            raise RequestError(f"{where}.type", f"got {show(kind)}, allowed are {allowed}")
        turn = _turn(found, starts=kind == "reasoning")
        if kind == "reasoning":
            turn["reasoning_content"] = _text(where, item.get("content") or [])
        else:
            arguments = item.get("arguments")
            if isinstance(arguments, str):
                arguments = read_arguments(f"{where}.arguments", arguments)
            function = {"name": item.get("name"), "arguments": arguments}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    return found


def _turn(found: list[dict[str, Any]], *, starts: bool) -> dict[str, Any]:
    """The assistant's message that an item belongs to."""
    if starts or not found or found[-1].get("role") != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _only_thinks(found: list[dict[str, Any]]) -> bool:
    """Whether the last turn is of reasoning alone."""
    last = found[-1] if found else {}
    return last.keys() == {"role", "content", "reasoning_content"} and not last["content"]


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content", f"got {show(content)}, must be text or text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in (*TEXT_PARTS, "reasoning_text", "summary_text") or not isinstance(text, str):
            raise RequestError(f"{where}.content", f"got {show(part)}, this model reads only text")
        texts.append(text)
    return "".join(texts)


async def responses(server: Server, request: Request) -> Response:
    """/v1/responses, without a store: each call brings all that was said."""
    body: ResponsesRequest = read_fields(ResponsesRequest, await read_body(request))
    chat, live, reader = await begin_as_chat(server, request, body)
    events = ResponseEvents(
        f"resp_{request.scope['twinfer.id']}",
        chat.model or server.settings.names[0],
        int(time.time()),
        body.repeated(),
    )

    def take() -> list[dict[str, Any]]:
        return [
            out
            for news in live.news()
            for part, places in reader.parts(news)
            for out in events.take(part, _scores(server, chat, news, places))
        ]

    def whole() -> dict[str, Any]:
        take()
        return events.response(used(live, reader))

    told = told_events(
        live,
        start=events.start,
        take=take,
        end=lambda: events.end(used(live, reader)),
        fail=lambda error: events.fail(message_of(error)),
    )
    return await server.answer(request, [live], told if body.stream else None, whole)


def _scores(
    server: Server, chat: ChatRequest, news: News, places: Sequence[int]
) -> list[dict[str, Any]]:
    """Log-probabilities of new tokens at some places, if they were asked for."""
    if not chat.logprobs or news.logprobs is None:
        return []
    tokens = [news.token_ids[place] for place in places]
    scores = [news.logprobs[place] for place in places]
    return list(server.words.chat(tokens, scores, chat.top_logprobs or 0)["content"])
