"""What a server says of itself: health, models, load, metrics, and a page for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from .answers import error_body
from .server import Server, json_response

PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)
"""The page loads nothing from anywhere, and asks nobody but this server."""
_PAGE = (Path(__file__).parent / "page.html").read_bytes()


async def health(server: Server, request: Request) -> Response:
    """Whether the engine has started and is heard of: scripts for other servers wait for this,
    and send requests then.
    """
    if server.engine.ready is not None and server.engine.alive:
        return Response(b"", 200)
    state = "the engine is starting" if server.engine.alive else "the engine is silent"
    return json_response(503, error_body(server.engine.why or state, "server_error"))


async def ready(server: Server, request: Request) -> Response:
    """Whether a request would be taken now."""
    server.engine.admit(0, 0)
    return Response(b"", 200)


async def models(server: Server, request: Request) -> Response:
    """The model, by all its names."""
    cards = [_card(server, name) for name in server.settings.names]
    return json_response(200, {"object": "list", "data": cards})


async def model(server: Server, request: Request) -> Response:
    """One name of the model."""
    name = request.path_params["name"]
    server.check_model(name)
    return json_response(200, _card(server, name))


async def page(server: Server, request: Request) -> Response:
    """A page for people: what `metrics` says, and a box for a prompt. It holds no secret."""
    headers = {"content-security-policy": PAGE_POLICY, "x-frame-options": "DENY"}
    return Response(_PAGE, media_type="text/html; charset=utf-8", headers=headers)


async def version(server: Server, request: Request) -> Response:
    """The version of the package."""
    return json_response(200, {"version": __version__})


async def metrics(server: Server, request: Request) -> Response:
    """For Prometheus."""
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def load(server: Server, request: Request) -> Response:
    """How many calls that generate are under way."""
    counted = server.settings.load
    return json_response(200, {"server_load": counted.calls if counted else 0})


def _card(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "twinfer",
        "root": server.settings.names[0],
        "parent": None,
        "max_model_len": server.room,
    }
