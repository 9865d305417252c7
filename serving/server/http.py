"""The HTTP protocol with bounds that its parser lacks: how large a head may be, and how long it may
take to arrive.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10
"""Bytes of a request line and its headers."""
MAX_HEADERS = 128
HEAD_S = 30.0
"""From a connection, or from the first byte of a later request, to the end of its headers."""


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose head is too large or does not come to its end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._head = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        super().data_received(data)
        # The parser keeps a header until it is whole, and says nothing meanwhile.
        if self._in_head:
            self._head += len(data)
            if self._head > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """As httptools has it."""
        super().on_message_begin()
        self._in_head, self._head = True, 0
        self._await_head()

    def on_headers_complete(self) -> None:
        """As httptools has it. What it raises is answered with 400."""
        self._in_head = False
        self._stop_timer()
        size = sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD or len(self.headers) > MAX_HEADERS:
            raise ValueError("the head is too large")
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
