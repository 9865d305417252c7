"""The flags of `twinfer serve` that are not the engine's. Imports nothing of the server's."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable

from ..shared.models.arguments import WORD
from ..shared.models.fields import show
from ..shared.option_text import json_value
from .flags import add_chat_template, add_generation_config
from .parser import json_object, not_empty, whole_number

PORT = 8000
KEY_VARIABLE = "TWINFER_API_KEY"
"""Where a server and its clients find its key if no flag says it."""
PARSERS = (
    "auto", "none", "think", "hermes", "qwen", "qwen3_coder", "glm45", "llama3_json", "mistral",
    "harmony",
)  # fmt: skip

_ORIGIN = (
    re.compile(
        r"null|(?!http://.*:80$|https://.*:443$)"
        r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?"
    ),
    "https://chat.example",
)
_METHOD = (re.compile("[A-Z]+"), "POST")
_HEADER = (re.compile("[A-Za-z0-9-]+"), "authorization")
"""What an item of a list is, as browsers write it, and an example."""


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Where it listens, who may enter, how much may wait, and when it gives up."""
    g = parser.add_argument_group("server")
    g.add_argument(
        "--host", type=not_empty, default="127.0.0.1", help="address (default: %(default)s)"
    )
    g.add_argument(
        "--port",
        type=port_number,
        default=PORT,
        help="0 to 65535; 0 takes any free one (default: %(default)s)",
    )
    g.add_argument(
        "--uds",
        type=not_empty,
        metavar="PATH",
        help="a Unix socket instead of host and port (default: none)",
    )
    g.add_argument(
        "--admin-uds",
        type=not_empty,
        metavar="PATH",
        help="a second Unix socket, for this user alone: requests, config, drain, "
        "reset_prefix_cache (default: none)",
    )
    g.add_argument(
        "--data-parallel-size",
        "--dp",
        "-dp",
        type=whole_number(1, 256),
        default=1,
        metavar="N",
        help="engines behind this server, each with devices of its own: 1 to 256 (default: "
        "%(default)s)",
    )
    g.add_argument(
        "--served-model-name",
        action="extend",
        nargs="+",
        type=not_empty,
        metavar="NAME",
        help="what clients call the model; several are allowed (default: MODEL)",
    )
    g.add_argument(
        "--api-key",
        action="extend",
        nargs="+",
        metavar="KEY",
        help=f"only who sends one of them may enter (default: ${KEY_VARIABLE}, else all)",
    )
    g.add_argument(
        "--ssl-certfile",
        type=not_empty,
        metavar="FILE",
        help="certificate for https (default: http)",
    )
    g.add_argument(
        "--ssl-keyfile", type=not_empty, metavar="FILE", help="its private key (default: http)"
    )
    g.add_argument(
        "--root-path",
        type=_prefix,
        default="",
        metavar="PATH",
        help="prefix under which a proxy shows this server, and cuts it off or leaves it (default: "
        "none)",
    )
    for flag, what, kind, usual in (
        ("--allowed-origins", "origins of web pages that may read the answers", _ORIGIN, "none"),
        ("--allowed-methods", "methods that they may use", _METHOD, "all"),
        ("--allowed-headers", "headers that they may send", _HEADER, "all"),
    ):
        g.add_argument(
            flag,
            type=_list_of(kind),
            metavar="LIST",
            help=f'{what}, a JSON list; "*" stands for all (default: {usual})',
        )
    g.add_argument(
        "--allow-credentials",
        action="store_true",
        help="they may send cookies and certificates too; needs origins by name (default: off)",
    )
    g.add_argument(
        "--page",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a page at / with throughput, cache and a prompt box",
    )
    g.add_argument(
        "--enable-server-load-tracking",
        action="store_true",
        help="GET /load tells how many calls are being answered (default: off)",
    )
    g.add_argument(
        "--stream-interval",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="new tokens that an event of a stream has at least, from 1, behind its first and "
        "before its last (default: %(default)s)",
    )
    g.add_argument("--access-log", action="store_true", help="a line for each call (default: off)")
    g.add_argument(
        "--log-requests",
        action="store_true",
        help="a line at the end of each: id, status, token counts, times; no texts (default: off)",
    )
    g.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json: an object a line (default: %(default)s)",
    )
    g.add_argument(
        "--otlp-traces-endpoint",
        type=not_empty,
        metavar="URL",
        help="where spans of calls go, as OpenTelemetry's OTLP over HTTP; needs the extra traces "
        "(default: nowhere)",
    )
    add_generation_config(g)
    g.add_argument(
        "--override-generation-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="fields that go before those of generation_config.json, such as "
        "'{\"temperature\": 0.6}' (default: none)",
    )
    add_chat_template(g)
    g.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="what a request's chat_template_kwargs go before, such as "
        "'{\"enable_thinking\": false}' (default: none)",
    )
    g.add_argument(
        "--tool-call-parser",
        choices=PARSERS,
        default="auto",
        help="how the model marks reasoning and tool calls; auto: by its tokens and template "
        "(default: %(default)s)",
    )
    g.add_argument(
        "--fixed-seed",
        action="store_true",
        help="requests without a seed get theirs from --engine-seed, in the order of their arrival "
        "(default: drawn)",
    )
    g.add_argument("-v", "--verbose", action="store_true", help="the start report, in full")
    g = parser.add_argument_group("limits")
    g.add_argument(
        "--max-num-queued-reqs",
        type=whole_number(1),
        default=512,
        metavar="N",
        help="completions that may wait for a place in the batch, from 1; more get 503, but a call "
        "that comes while none waits is taken, however many it has (default: %(default)s)",
    )
    g.add_argument(
        "--max-num-queued-tokens",
        type=whole_number(1),
        default=4 << 20,
        metavar="N",
        help="tokens of prompts that may wait, from 1; more get 503, but a call that comes while "
        "none waits is taken (default: 4M)",
    )
    g.add_argument(
        "--max-body-size",
        type=whole_number(1024),
        default=32 << 20,
        metavar="BYTES",
        help="of a request, from 1024; a larger one gets 413 (default: 32M)",
    )
    g.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="how long requests may go on after the first signal, more than 0 (default: 30)",
    )
    g.add_argument(
        "--hang-timeout",
        type=_seconds,
        metavar="S",
        help="an engine that is silent for so long, more than 0, is killed, and the server leaves "
        "with exit code 70 (default: 20 times its slowest step at the start, at least 10)",
    )


def model_behind_list(arguments: argparse.Namespace) -> list[str]:
    """The last value of a flag of `serve` that takes several, if MODEL stands behind them: nothing
    else tells it from one more value. Empty where the model is named, or none has two.
    """
    if arguments.command != "serve" or getattr(arguments, WORD) or arguments.model:
        return []
    for values in (arguments.served_model_name, arguments.api_key):
        if values and values[1:]:
            return [values.pop()]
    return []


def port_number(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"got {text}, allowed is 0 to 65535")
    return int(text)


def _prefix(text: str) -> str:
    if text and not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"got {text}, allowed is a path such as /llm")
    if f"{text}/".startswith("/v1/models/"):  # behind which anything is a model's name
        raise argparse.ArgumentTypeError(f"got {text}, allowed is none that begins with /v1/models")
    return text.rstrip("/")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"got {text}, allowed is more than 0 and less than 1e6")
    return number


def _list_of(kind: tuple[re.Pattern[str], str]) -> Callable[[str], list[str]]:
    """A reader of JSON lists of what a pattern describes, or of the star, for argparse."""
    pattern, example = kind

    def read(text: str) -> list[str]:
        try:
            items = json_value(text)
        except ValueError:
            items = None
        if not isinstance(items, list):
            raise argparse.ArgumentTypeError(
                f"got {show(text)}, allowed is a JSON list such as '[\"{example}\"]'"
            )
        for item in items:
            if item != "*" and not (isinstance(item, str) and pattern.fullmatch(item)):
                raise argparse.ArgumentTypeError(
                    f'has {json.dumps(item)}, allowed are "*" and such as {example}'
                )
        return items

    return read
