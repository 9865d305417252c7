"""Which pages of other origins may read the answers, and which command lines may say so."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from twinfer.serving.cli import _parser
from twinfer.serving.formats.table import FORMATS
from twinfer.serving.server.app import build_app
from twinfer.serving.server.cors import cors_options
from twinfer.serving.server.metrics import Metrics
from twinfer.serving.server.server import Settings
from twinfer.shared.errors import ConfigError
from twinfer.shared.sampling_params import SamplingParams

HERE = "https://chat.example"
ONE = ["--allowed-origins", f'["{HERE}", "http://localhost:3000"]']
ALL = ["--allowed-origins", '["*"]']
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
}
ALLOWED = "access-control-allow-origin"


def ask(flags, method, path, **headers):
    """The answer of a server with a key, whose engine answers nothing, to a page."""
    cors = cors_options(_parser()[0].parse_args(["serve", *flags]))
    ready = SimpleNamespace(model={"longest_request": 64})
    engine = SimpleNamespace(ready=ready, alive=True, why="")
    settings = Settings(["m"], None, SamplingParams(), FORMATS["none"], keys=["k"], cors=cors)

    async def call():
        transport = httpx.ASGITransport(build_app(settings, engine, Metrics()))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(call())


def test_no_page_may_read_unless_someone_says_so():
    for path in ("/v1/models", "/metrics", "/health"):
        answer = ask([], "GET", path, origin=HERE, authorization="Bearer k")
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert ask([], "OPTIONS", "/v1/models", origin=HERE, **PREFLIGHT).status_code == 401


@pytest.mark.parametrize(("flags", "named"), [(ONE, HERE), (ALL, "*")], ids=["one", "all"])
def test_a_page_that_may_read(flags, named):
    """Its preflight needs no key, its calls do; and it may read why they are refused."""
    asked = ask(flags, "OPTIONS", "/v1/chat/completions", origin=HERE, **PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers[ALLOWED] == named
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in asked.headers
    answer = ask(flags, "GET", "/v1/models", origin=HERE, authorization="Bearer k")
    assert (answer.status_code, answer.headers[ALLOWED]) == (200, named)
    readable = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id"} <= {*readable}
    refused = ask(flags, "GET", "/v1/models", origin=HERE)
    assert (refused.status_code, refused.headers[ALLOWED]) == (401, named)


def test_other_pages_may_not():
    for origin in ("https://evil.example", f"{HERE}.evil.example", "http://chat.example", "null"):
        asked = ask(ONE, "OPTIONS", "/v1/models", origin=origin, **PREFLIGHT)
        assert asked.status_code == 400
        assert ALLOWED not in asked.headers
        answer = ask(ONE, "GET", "/v1/models", origin=origin, authorization="Bearer k")
        assert ALLOWED not in answer.headers
        assert answer.headers["vary"] == "Origin"


def test_methods_headers_and_credentials_are_those_that_are_named():
    flags = [
        *ONE,
        *("--allowed-methods", '["GET"]', "--allowed-headers", '["authorization"]'),
        "--allow-credentials",
    ]
    assert ask(flags, "OPTIONS", "/v1/models", origin=HERE, **PREFLIGHT).status_code == 400
    fits = {
        "access-control-request-method": "GET",
        "access-control-request-headers": "authorization",
    }
    asked = ask(flags, "OPTIONS", "/v1/models", origin=HERE, **fits)
    assert (asked.status_code, asked.headers[ALLOWED]) == (200, HERE)
    assert asked.headers["access-control-allow-credentials"] == "true"
    answer = ask(flags, "GET", "/health", origin=HERE)
    assert answer.headers["access-control-allow-credentials"] == "true"


def test_an_empty_list_allows_nothing():
    for more in (["--allowed-methods", "[]"], ["--allowed-headers", "[]"]):
        asked = ask([*ONE, *more], "OPTIONS", "/v1/models", origin=HERE, **PREFLIGHT)
        assert asked.status_code == 400
    assert ALLOWED not in ask(["--allowed-origins", "[]"], "GET", "/health", origin=HERE).headers


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([*ALL, "--allow-credentials"], "allow-credentials: needs origins by name"),
        (["--allowed-origins", '["null"]', "--allow-credentials"], 'origins by name, got "null"'),
        (["--allow-credentials"], "allow-credentials: needs --allowed-origins"),
        (["--allowed-methods", '["GET"]'], "allowed-methods: needs --allowed-origins"),
        (["--allowed-origins", "[]", "--allowed-headers", "[]"], "allowed-headers: needs"),
    ],
)
def test_what_does_not_go_together(flags, says):
    with pytest.raises(ConfigError) as error:
        cors_options(_parser()[0].parse_args(["serve", *flags]))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--allowed-origins", "*"),
        ("--allowed-origins", HERE),
        ("--allowed-origins", f'["{HERE}/"]'),
        ("--allowed-origins", '["chat.example"]'),
        ("--allowed-origins", '["https://*.example"]'),
        ("--allowed-origins", '["https://Chat.example"]'),
        ("--allowed-origins", '["https://a@chat.example"]'),
        ("--allowed-origins", '["https://chat.example:443"]'),
        ("--allowed-origins", '["http://chat.example:80"]'),
        ("--allowed-origins", '["https://m\u00fcnchen.example"]'),
        ("--allowed-origins", '["https://a:b:c"]'),
        ("--allowed-origins", "[7]"),
        ("--allowed-origins", '{"a": 1}'),
        ("--allowed-methods", '["get"]'),
        ("--allowed-headers", '["a b"]'),
        ("--allowed-headers", '["a\\r\\nb"]'),
    ],
)
def test_lists_that_no_browser_would_meet(flag, value, capsys):
    """Each of them would be passed over in silence: no browser writes an origin like that."""
    with pytest.raises(SystemExit):
        _parser()[0].parse_args(["serve", flag, value])
    said = capsys.readouterr().err
    assert f"argument {flag}: " in said
    assert "allowed" in said
    assert said.count("\n") == 1
