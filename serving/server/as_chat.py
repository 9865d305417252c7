"""Calls of other APIs that are chats under other names."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from ...shared.errors import RequestError
from .fields import ChatRequest, read_fields, renamed


class AsChat(BaseModel):
    """The body of such a call.

    `refused` are fields that cannot be had, and why. `names` are those of a chat's fields here, and
    `tool_names` those of parts of a tool, longer ones first.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    refused: ClassVar[Mapping[str, str]]
    names: ClassVar[Mapping[str, str]]
    tool_names: ClassVar[Mapping[str, str]]

    stream: bool | None = None

    @abstractmethod
    def chat(self) -> ChatRequest:
        """The chat that it asks for. Raises RequestError, by the names that fields have here."""

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
