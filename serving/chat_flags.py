"""The flags of `twinfer chat`. Imports nothing that only the chat needs."""

from __future__ import annotations

import argparse
from typing import Any

from .flags import SAMPLING, add_flag, destination
from .serve_flags import KEY_VARIABLE

URL = "http://127.0.0.1:8000/v1"
SENT = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip
"""Options of sampling that a chat may be sent with."""


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Which server, what it is told, and how it samples."""
    g = parser.add_argument_group(
        "chat", "lines of standard input, each a turn; /reset begins anew"
    )
    g.add_argument("--url", default=URL, help="where its API begins (default: %(default)s)")
    g.add_argument("--model", metavar="NAME", help="what the server calls it (default: its first)")
    g.add_argument("--system", metavar="TEXT", help="what the model is told first (default: none)")
    g.add_argument(
        "--api-key", metavar="KEY", help=f"sent with each request (default: ${KEY_VARIABLE})"
    )
    g.add_argument("--quick", metavar="TEXT", help="one answer to it, then leave (default: none)")
    g = parser.add_argument_group("sampling", "what is not said is up to the server")
    for name in SENT:
        add_flag(g, SAMPLING[name], None, "the server's")


def sent_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of sampling that were given, as the body of a chat has them."""
    values = {name: getattr(arguments, destination(SAMPLING[name])) for name in SENT}
    return {name: value for name, value in values.items() if value is not None}
