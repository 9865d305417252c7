"""Server-sent events, and the end of a call whose client has left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .doors import Receive, Scope, Send

WRITE_S = 60.0
"""How long a client may take to read what is there for it."""


class ClientGone(Exception):
    """The client has closed its connection."""


class EventStream(Response):
    """Sends what `events` yields, as it comes. Leaves when the client does, or does not read for
    `write_s` seconds. `on_end` is called in each case, also if `events` never began.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], None],
        write_s: float = WRITE_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_end = on_end
        self._write_s = write_s
        self._since: float | None = None
        self.init_headers({"content-type": "text/event-stream", "cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        sending = asyncio.create_task(self._send(send, scope.get("twinfer.send", send)))
        leaving = asyncio.create_task(_gone(receive))
        watch = Recurring(self._write_s / 4, lambda: self._watch(sending))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.stop()
            self._on_end()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        error = None if sending.cancelled() else sending.exception()
        if error is not None:
            raise error

    def _watch(self, sending: asyncio.Task[None]) -> None:
        """Give up on a client that has not read for too long."""
        if self._since is not None and time.monotonic() - self._since > self._write_s:
            sending.cancel()

    async def _send(self, send: Send, shortly: Send) -> None:
        async with aclosing(self._events) as events:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async for data in events:
                self._since = time.monotonic()
                await shortly({"type": "http.response.body", "body": data, "more_body": True})
                self._since = None
            await send({"type": "http.response.body", "body": b""})


class Recurring:
    """Calls `work` every `seconds` until `stop`. One timer for a whole stream, where a timeout for
    each piece would cost more than the piece.
    """

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds = seconds
        self._work = work
        self._arm()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._fire)

    def _fire(self) -> None:
        self._arm()
        self._work()

    def stop(self) -> None:
        """No more calls."""
        self._timer.cancel()


async def while_there(request: Request, work: Awaitable[Any]) -> Any:
    """What `work` gives. Raises ClientGone, and cancels it, when the client leaves before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
