"""What every request passes before it is read: keys, and the size of its body. Plain ASGI, so that
disconnects reach the routes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from .answers import MESSAGE_PATHS, encode, error_body, error_on
from .logs import log_request
from .traces import Traces

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/ready", "/ping")
"""Paths that need no key: what watches a server has none."""
GENERATING = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations",
)  # fmt: skip
_NAME = re.compile(rb"[\x20-\x7e]{1,128}")
"""What a client may call its request."""


@dataclass(slots=True)
class Load:
    """How many calls of `GENERATING` are under way, up to the last byte of their answers."""

    calls: int = 0


class Doors:
    """Lets in who has a key (if there are keys), with a body of at most `max_body` bytes.

    Each request has a name, which goes back as x-request-id and stands in the log: the client's own
    (printable ASCII, at most 128 characters), else `scope["twinfer.id"]`, which is made here and
    which no other request has. `scope["twinfer.send"]` goes to the client by the shortest way, once
    the head is sent. `scope["twinfer.salt"]` tells tenants apart in the prefix cache.
    `scope["twinfer.path"]` is the path as routes have it, without a proxy's prefix.
    Routes put what they ask of the engine into `scope["twinfer.lives"]`. The end of each POST is
    logged: at level INFO with `log_requests`, else DEBUG; and told to `traces`, if there are any.
    `is_path`: whether the application has a path. Calls that generate are counted in `load`.
    """

    def __init__(
        self,
        app: App,
        *,
        keys: Sequence[str],
        max_body: int,
        open_paths: Sequence[str] = (),
        is_path: Callable[[str], bool] = lambda path: False,
        load: Load | None = None,
        log_requests: bool = False,
        traces: Traces | None = None,
    ) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._max_body = max_body
        self._open = (*OPEN, *open_paths)
        self._is_path = is_path
        self._load = load
        self._traces = traces
        self._level = logging.INFO if log_requests else logging.DEBUG

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            return
        scope["twinfer.id"] = secrets.token_hex(8)
        scope["twinfer.lives"] = []
        # uvicorn puts the prefix that a proxy has cut off before each path again: here it is there
        # twice if the proxy has left it, and if it begins one of our paths.
        root = scope.get("root_path", "")
        asked = scope["path"].removeprefix(root)
        if root and f"{asked}/".startswith(f"{root}/") and not self._is_path(asked):
            scope["path"] = asked
        path = scope["twinfer.path"] = scope["path"].removeprefix(root)
        name, status, start = _name(scope), 499, time.monotonic()
        scope["twinfer.name"] = name.decode()
        names = [(b"x-request-id", name)]
        if path in MESSAGE_PATHS:  # whose clients read it there
            names.append((b"request-id", name))

        async def named(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", []))
                message["headers"] = [*headers, *names]
            await send(message)

        # What stands between a route and its client costs a streamed token more than its text does.
        scope["twinfer.send"] = send
        try:
            await self._enter(scope, receive, named)
        finally:
            if scope.get("method") == "POST":
                lives = scope["twinfer.lives"]
                log_request(name.decode(), scope["path"], status, lives, start, level=self._level)
                if self._traces is not None:
                    self._traces.call(scope, status, lives, start)

    async def _enter(self, scope: Scope, receive: Receive, named: Send) -> None:
        salt, path = self._salt(scope), scope["twinfer.path"]
        if salt is None and path not in self._open:
            body = error_body(
                "no valid API key was given", "authentication_error", code="invalid_api_key"
            )
            header = (b"www-authenticate", b"Bearer")
            await _answer(named, 401, error_on(path, 401, body), header)
            return
        scope["twinfer.salt"] = salt or ""
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > self._max_body:
            await _answer(named, 413, error_on(path, 413, too_large(self._max_body)))
            return
        load = self._load if path in GENERATING and scope["method"] == "POST" else None
        if load is not None:
            load.calls += 1
        try:
            await self._app(scope, self._counted(receive), named)
        finally:
            if load is not None:
                load.calls -= 1

    def _salt(self, scope: Scope) -> str | None:
        """A name for the key that was given; None if it is wrong. Without keys all are one."""
        if not self._digests:
            return ""
        kind, _, key = _header(scope, b"authorization").partition(b" ")
        if kind.lower() != b"bearer":
            key = _header(scope, b"x-api-key")  # where clients of Anthropic's API have it
        given = _digest(key.strip().decode("latin-1")) if key else b""
        # All are compared, so that time does not tell how many there are before the right one.
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex()[:32] if any(found) else None

    def _counted(self, receive: Receive) -> Receive:
        taken = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                raise TooLarge
            return message

        return counted


class TooLarge(Exception):
    """A body without a length has passed the limit."""


def too_large(limit: int) -> dict[str, Any]:
    """The body of a 413."""
    return error_body(f"the body is larger than {limit} bytes", "invalid_request_error", "body")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _name(scope: Scope) -> bytes:
    given = _header(scope, b"x-request-id")
    return given if _NAME.fullmatch(given) else str(scope["twinfer.id"]).encode()


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


async def _answer(send: Send, status: int, body: Any, *headers: tuple[bytes, bytes]) -> None:
    data = encode(body)
    kind = (b"content-type", b"application/json")
    length = (b"content-length", str(len(data)).encode())
    await send(
        {"type": "http.response.start", "status": status, "headers": [kind, length, *headers]}
    )
    await send({"type": "http.response.body", "body": data})
