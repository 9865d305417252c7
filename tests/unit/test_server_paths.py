"""Which path a call means: behind a proxy, and those that others' tools ask for."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from twinfer.serving.formats.table import FORMATS
from twinfer.serving.server.app import Settings, build_app
from twinfer.serving.server.metrics import Metrics
from twinfer.shared.sampling_params import SamplingParams


def ask(path, *, root="", method="GET", engine=None, **settings):
    """The answer of a server whose engine answers nothing, at a path as uvicorn hands it on."""
    engine = engine or SimpleNamespace(ready=None, alive=True, why="")
    made = Settings(["m"], None, SamplingParams(), FORMATS["none"], **settings)

    async def call():
        app = build_app(made, engine, Metrics())
        transport = httpx.ASGITransport(app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, root + path)

    return asyncio.run(call())


@pytest.mark.parametrize("cuts", [True, False], ids=["cut", "left"])
@pytest.mark.parametrize(
    "root", ["", "/llm", "/v1", "/v1/chat", "/health", "/tokenize", "/v1/chat/completions"]
)
@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/models", 200), ("/v1/models/m", 200), ("/health", 200), ("/nothing", 404), ("/", 200)],
)
def test_a_proxy_may_cut_a_prefix_or_leave_it(root, path, status, cuts):
    """Also one that begins a path of ours."""
    answer = ask(path if cuts else root + path, root=root)
    assert answer.status_code == status


@pytest.mark.parametrize("root", ["/llm", "/v1"])
def test_a_prefix_lets_nobody_in(root):
    for path in ("/v1/models", f"{root}/v1/models", f"{root}{root}/health"):
        assert ask(path, root=root, keys=["k"]).status_code == 401
    for path in ("/health", f"{root}/health"):
        assert ask(path, root=root, keys=["k"]).status_code == 200
