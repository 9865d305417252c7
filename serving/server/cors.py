"""Which pages of other origins may read the answers: cross-origin resource sharing, as the Fetch
standard has it.
"""

from __future__ import annotations

import argparse
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from ...shared.errors import ConfigError

ANY = "*"
READABLE = ("x-request-id", "request-id", "retry-after")
"""Headers of ours that a page may read; OpenAI's and Anthropic's clients do."""


def cors_options(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What `CORSMiddleware` is told; None where no page of another origin may read. Raises
    ConfigError.
    """
    origins, credentials = arguments.allowed_origins, arguments.allow_credentials
    given = {
        "allowed-methods": arguments.allowed_methods,
        "allowed-headers": arguments.allowed_headers,
        "allow-credentials": credentials or None,
    }
    if not origins:
        if names := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{names[0]}: needs --allowed-origins: none may read now")
        return None
    for nobody in (ANY, "null"):
        # Browsers refuse the star then. To name whoever asks instead would let every page act for
        # its user; and every page can ask from a frame whose origin is null.
        if credentials and nobody in origins:
            raise ConfigError(
                f'allow-credentials: needs origins by name, got "{nobody}" in --allowed-origins'
            )
    return {
        "allow_origins": origins,
        "allow_methods": _named(arguments.allowed_methods),
        "allow_headers": _named(arguments.allowed_headers),
        "allow_credentials": credentials,
        "expose_headers": READABLE,
    }


def _named(given: list[str] | None) -> list[str]:
    return [ANY] if given is None else given


def shared(app: Any, options: dict[str, Any] | None) -> Any:
    """The application, which answers preflights before it asks for a key, and whose answers say
    who may read them: refusals too.
    """
    return app if options is None else CORSMiddleware(app, **options)
