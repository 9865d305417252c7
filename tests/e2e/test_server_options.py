"""What the options of `twinfer serve` change for clients."""

import shlex
import subprocess
import sys
import time

import httpx
import pytest

from .server_process import served

FLAGS = [
    "--backend", "torch", "--device", "cpu", "--dtype", "float32", "--max-model-len", "128",
    "--chat-template", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "--api-key", "k", "--allowed-origins", '["https://chat.example"]',
]  # fmt: skip
TURNS = [{"role": "user", "content": "x = 1"}]


@pytest.fixture(scope="module")
def server():
    with served(*FLAGS) as running:
        yield running


@pytest.fixture
def client(server):
    with server.client(headers={"authorization": "Bearer k"}) as it:
        yield it


@pytest.mark.parametrize(
    "closed",
    [
        "2>&-",
        "<&- >&- 2>&-",
        *(pytest.param(one, marks=pytest.mark.slow) for one in (">&-", "<&- 2>&-", "")),
    ],
)
def test_a_server_whose_words_nobody_reads_serves_on(closed, tmp_path):
    """Its standard streams are closed, or who reads them leaves after the first line."""
    door = tmp_path / "s"
    words = [sys.executable, "-P", "-m", "twinfer", "serve", "demo", "--uds", str(door), *FLAGS[:6]]
    command = ["sh", "-c", f"exec {shlex.join(words)} {closed}"]
    transport = httpx.HTTPTransport(uds=str(door))
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE) as server,
        httpx.Client(transport=transport, base_url="http://x", timeout=30) as client,
    ):
        try:
            server.stderr.readline()
            server.stderr.close()
            end = time.monotonic() + 60
            while not door.exists() or client.get("/ready").status_code != 200:
                assert server.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            body = {"prompt": "x", "max_tokens": 2}
            for _ in range(3):
                assert client.post("/v1/completions", json=body).status_code == 200
        finally:
            server.terminate()
            assert server.wait(30) == 0


def test_chats_are_rendered_by_the_template_that_is_given(client):
    chat = client.post("/tokenize", json={"messages": TURNS}).json()["tokens"]
    text = {"prompt": "<user>x = 1", "add_special_tokens": False}
    assert chat == client.post("/tokenize", json=text).json()["tokens"]
    answer = client.post("/v1/chat/completions", json={"messages": TURNS, "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == len(chat)


def test_a_page_of_another_origin_reads_a_stream_as_it_comes(client):
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    headers = {"origin": "https://chat.example"}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert sum(1 for _ in answer.iter_raw()) > 5
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    del client.headers["authorization"]
    assert client.options("/v1/completions", headers=asked).status_code == 200
    assert client.post("/v1/completions", json=body, headers=headers).status_code == 401
