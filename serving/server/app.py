"""The ASGI application: which path is whose, and how errors are told."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from ... import __version__
from ...shared.models.fields import show
from . import about, anthropic, completions, responses, tokens
from .answers import error_body, error_of, error_on
from .cors import shared
from .doors import Doors, TooLarge, too_large
from .events import log_failure
from .metrics import Metrics
from .replicas import Engines
from .server import Server, Settings, json_response
from .streams import ClientGone

PAGE = "/"
RETRY_AFTER_S = 1


def build_app(settings: Settings, engine: Engines, metrics: Metrics) -> Any:
    """The ASGI application."""
    server = Server(settings, engine, metrics)
    app = FastAPI(
        title="Twinfer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # They would go to whatever host the client has named, with its body and without a word.
        redirect_slashes=False,
    )
    app.add_exception_handler(HTTPException, no_route)
    for path, methods, route in (
        *([(PAGE, "GET", about.page)] if settings.page else []),
        ("/health", "GET", about.health),
        ("/ping", "GET POST", about.health),
        *([("/load", "GET", about.load)] if settings.load is not None else []),
        ("/ready", "GET", about.ready),
        ("/metrics", "GET", about.metrics),
        ("/version", "GET", about.version),
        ("/v1/models", "GET", about.models),
        ("/v1/models/{name:path}", "GET", about.model),
        ("/tokenize", "POST", tokens.tokenize),
        ("/detokenize", "POST", tokens.detokenize),
        ("/v1/chat/completions", "POST", completions.chats),
        ("/v1/completions", "POST", completions.completions),
        ("/v1/responses", "POST", responses.responses),
        ("/v1/messages", "POST", anthropic.messages),
        ("/v1/messages/count_tokens", "POST", anthropic.count_tokens),
        ("/invocations", "POST", completions.invocations),
    ):
        app.add_route(path, _guarded(route, server), methods=methods.split())
    doors = Doors(
        app,
        keys=settings.keys,
        max_body=settings.max_body,
        open_paths=(PAGE,) if settings.page else (),
        is_path=partial(_is_path, app),
        load=settings.load,
        log_requests=settings.log_requests,
        traces=settings.traces,
    )
    return shared(doors, settings.cors)


def _is_path(app: FastAPI, path: str) -> bool:
    """Whether there is a route for a path, with whatever method."""
    scope = {"type": "http", "path": path, "method": ""}
    return any(route.matches(scope)[0] is not Match.NONE for route in app.routes)


async def no_route(request: Request, error: Exception) -> Response:
    """No such path, or no such method of it."""
    status, headers = 500, None
    if isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})  # of a 405, what is allowed
    words = f"{request.method} {show(request.url.path)}: there is no such call"
    body = error_on(
        request.scope.get("twinfer.path", ""), status, error_body(words, "invalid_request_error")
    )
    return json_response(status, body, headers)


def _guarded(route: Any, server: Server) -> Any:
    """A route whose errors are answers."""

    async def guarded(request: Request) -> Response:
        path = request.scope["twinfer.path"]
        try:
            response: Response = await route(server, request)
            return response
        except (ClientGone, ClientDisconnect):
            return Response(b"", 499)
        except TooLarge:
            return json_response(413, error_on(path, 413, too_large(server.settings.max_body)))
        except Exception as error:
            log_failure(error)
            status, body = error_of(error)
            retry = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None
            return json_response(status, error_on(path, status, body), retry)

    return guarded
