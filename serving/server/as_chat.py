"""Calls of other APIs that are chats under other names."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from ...shared.errors import RequestError
from ..responses import Usage
from .completions import begin_chat
from .fields import ChatRequest, read_fields, renamed
from .live import Live
from .reader import Reader
from .server import Server


class AsChat(BaseModel):
    """The body of such a call.

    `refused` are fields that cannot be had, and why; of `asked_by_false` not with false either,
    which asks for something too. `ignored` are known fields that change no token. `same` are those
    that a chat has under the same name, as it has all that are not named here; `names` the names of
    a chat's other fields here, and `tool_names` those of parts of a tool, longer ones first.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    refused: ClassVar[Mapping[str, str]]
    asked_by_false: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()
    same: ClassVar[tuple[str, ...]]
    names: ClassVar[Mapping[str, str]]
    tool_names: ClassVar[Mapping[str, str]]

    stream: bool | None = None

    @abstractmethod
    def chat(self) -> ChatRequest:
        """The chat that it asks for. Raises RequestError, by the names that fields have here."""

    def check(self) -> None:
        """Raise RequestError for a field that cannot be had."""
        for name, why in self.refused.items():
            value = (self.model_extra or {}).get(name)
            if value or (value is False and name in self.asked_by_false):
                raise RequestError(name, why)

    def shared_fields(self) -> dict[str, Any]:
        """The fields that a chat has under the same names."""
        left_out = {*self.refused, *self.ignored}
        extra = (self.model_extra or {}).items()
        alike = {name: getattr(self, name) for name in self.same}
        return {name: value for name, value in extra if name not in left_out} | alike

    def read_chat(self, body: dict[str, Any]) -> ChatRequest:
        """A chat with these fields. Raises RequestError as `chat` does."""
        try:
            chat: ChatRequest = read_fields(ChatRequest, body)
        except RequestError as error:
            raise self.named(error) from None
        return chat

    def named(self, error: RequestError) -> RequestError:
        """An error about a chat's fields by the names that they have here. Messages stand in other
        places there, so that the whole of them is named.
        """
        field = error.field
        first = re.split(r"[.\[]", field, maxsplit=1)[0]
        name = self.names.get(field)
        if name is None and first == "tools":
            part = next((part for part in self.tool_names if part in field), "")
            name = field.replace(part, self.tool_names[part]) if part else field
        elif name is None and first in self.names:
            own = self.names[first]
            name = own if first == "messages" else own + field[len(first) :]
        return renamed(error, self.names if name is None else {**self.names, field: name})


async def begin_as_chat(
    server: Server, request: Request, body: AsChat
) -> tuple[ChatRequest, Live, Reader]:
    """Sends the chat to the engine that a call of another API asks for. Errors have the names
    that fields have there.
    """
    body.check()
    chat = body.chat()
    try:
        live, new_parser = await begin_chat(server, request, chat)
    except RequestError as error:
        raise body.named(error) from None
    live.named = lambda error: body.named(chat.named(error))
    tells = chat.include_reasoning is not False
    return chat, live, Reader(new_parser(), server.think_end, tells=tells)


def used(live: Live, reader: Reader) -> Usage:
    """The tokens of a chat's one completion so far."""
    count, cached = len(live.outputs[0].token_ids), live.num_cached_tokens
    return Usage(len(live.prompt_ids), count, cached, reader.reasoning_tokens)
