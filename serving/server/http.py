"""The HTTP protocol with bounds that its parser lacks: how large a head may be, how long it may
take to arrive, how much may come that is no body, and how long a client may not read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD = 64 << 10
"""Bytes of a request line and its headers; and of what surrounds a body, such as trailers."""
MAX_HEADERS = 128
HEAD_S = 30.0
"""From a connection, or from the first byte of a later request, to the end of its headers."""
CHUNK = 8
"""Bytes around one byte of a body, at most: a chunk of one byte has five."""
READ_S = 60.0
"""How long a client may take nothing of what waits for it."""


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose head is too large or does not come to its end, and one whose client
    does not read. When a client leaves, all of its requests hear of it, not only the last one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._surplus = 0
        """Bytes of this message that are no body, about."""
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._unread = 0
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        self._stop_timer()
        self._stop_reading()
        # The one that is answered, if others were sent behind it.
        cycle = self._answered
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        self._surplus += len(data)
        super().data_received(data)
        # The parser keeps a header until it is whole, and says nothing meanwhile; it passes over
        # what a chunk may say beside its size.
        if self._surplus > MAX_HEAD and not self.transport.is_closing():
            what = "The head of the request" if self._in_head else "What surrounds the body"
            self.send_400_response(f"{what} is too large.")

    def on_message_begin(self) -> None:
        """As httptools has it."""
        super().on_message_begin()
        self._in_head, self._surplus = True, 0
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """As httptools has it. Those behind a body are passed over: nobody has asked for them."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """As httptools has it. What it raises is answered with 400."""
        self._in_head, self._surplus = False, 0
        self._stop_timer()
        size = sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD or len(self.headers) > MAX_HEADERS:
            raise ValueError("the head is too large")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As httptools has it."""
        self._surplus = max(0, self._surplus - CHUNK * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """As httptools has it."""
        self._surplus = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn has it."""
        super().on_response_complete()
        self._await_reader()

    def pause_writing(self) -> None:
        """As asyncio has it: much waits for the client."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """As asyncio has it: the client has read."""
        self._stop_reading()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _await_reader(self) -> None:
        """Look again after a while whether the client has read anything."""
        self._stop_reading()
        self._unread = self.transport.get_write_buffer_size()
        if self._unread:
            self._reading = self.loop.call_later(READ_S, self._look_at_reader)

    def _look_at_reader(self) -> None:
        # A closed connection waits for its client too, without an end.
        if self.transport.get_write_buffer_size() >= self._unread:
            self.transport.abort()
        else:
            self._await_reader()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
