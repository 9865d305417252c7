"""Routes for who runs the server, on a Unix socket of their own that only its user may connect to:
there are no keys. They tell counts and options, and no texts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from .answers import error_body, error_of
from .app import no_route
from .replicas import Engines
from .server import json_response


class Admin:
    """The routes over one engine. `drain()` has the server go down as a first signal does."""

    def __init__(self, engine: Engines, drain: Callable[[], None]) -> None:
        self._engine = engine
        self._drain = drain

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forgets all cached prefixes; 409, and nothing happens, while there are requests."""
        if await self._engine.reset_prefix_cache():
            return json_response(200, {"reset": True})
        words = "prefixes cannot be forgotten while requests run or wait"
        return json_response(409, error_body(words, "conflict_error"))

    async def drain(self, request: Request) -> Response:
        """Takes no more requests, lets those that are there end, and leaves."""
        self._drain()
        return json_response(200, {"draining": True, "requests": self._engine.num_live})

    async def requests(self, request: Request) -> Response:
        """What runs and waits, the oldest first."""
        return json_response(200, {"requests": self._engine.requests()})

    async def config(self, request: Request) -> Response:
        """The engine's options as they were resolved, and its sizes."""
        ready = self._engine.ready
        if ready is None:
            return json_response(503, error_body("the engine is starting", "server_error"))
        return json_response(
            200, {"version": __version__, "options": ready.options, "model": ready.model}
        )


def build_admin(engine: Engines, drain: Callable[[], None]) -> FastAPI:
    """The ASGI application."""
    admin = Admin(engine, drain)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, no_route)
    for path, method, route in (
        ("/reset_prefix_cache", "POST", admin.reset_prefix_cache),
        ("/drain", "POST", admin.drain),
        ("/requests", "GET", admin.requests),
        ("/config", "GET", admin.config),
    ):
        app.add_route(path, _guarded(route), methods=[method])
    return app


def _guarded(route: Callable[[Request], Awaitable[Response]]) -> Any:
    async def guarded(request: Request) -> Response:
        try:
            return await route(request)
        except Exception as error:
            return json_response(*error_of(error))

    return guarded
