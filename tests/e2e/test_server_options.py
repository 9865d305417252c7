"""What the options of `twinfer serve` change for clients."""

import shlex
import subprocess
import sys
import time

import httpx
import openai
import pytest

from .server_process import served

FLAGS = [
    "--backend", "torch", "--device", "cpu", "--dtype", "float32", "--max-model-len", "128",
    "--chat-template", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ who }}{{ enable_thinking }}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}",
    "--default-chat-template-kwargs", '{"who": "me", "enable_thinking": false}',
    "--override-generation-config", '{"max_new_tokens": 7, "temperature": 0}',
    "--api-key", "k", "other", "--allowed-origins", '["https://chat.example"]',
    "--served-model-name", "one", "two", "--root-path", "/llm/",
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


@pytest.mark.parametrize(
    ("more", "prompt"),
    [
        ({}, "<user>x = 1meFalse"),
        ({"chat_template_kwargs": {"who": "you"}}, "<user>x = 1youFalse"),
        ({"reasoning_effort": "high"}, "<user>x = 1meTrue"),
        ({"documents": [{"text": "a"}, {"text": "b"}]}, "<user>x = 1meFalse[a][b]"),
    ],
)
def test_chats_are_rendered_by_the_template_that_is_given(more, prompt, client):
    chat = client.post("/tokenize", json={"messages": TURNS} | more).json()["tokens"]
    text = {"prompt": prompt, "add_special_tokens": False}
    assert chat == client.post("/tokenize", json=text).json()["tokens"]
    body = {"messages": TURNS, "max_tokens": 1} | more
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == len(chat)


def test_what_no_request_says_is_as_the_server_was_told(client):
    body = {"ignore_eos": True}
    for path, said in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": TURNS}),
    ):
        answers = [client.post(path, json=body | said).json() for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"]["completion_tokens"] == 7
        more = client.post(path, json=body | said | {"max_tokens": 9}).json()
        assert more["usage"]["completion_tokens"] == 9


def test_all_names_and_keys_are_taken(server):
    for key, status in (("k", 200), ("other", 200), ("k other", 401)):
        with server.client(headers={"authorization": f"Bearer {key}"}) as client:
            assert client.get("/v1/models").status_code == status
    with server.openai(api_key="other") as client:
        assert [model.id for model in client.models.list()] == ["one", "two"]
        for name in ("one", "two"):
            assert client.models.retrieve(name).id == name
            assert client.completions.create(model=name, prompt="x").model == name
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="demo", prompt="x")


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


def test_a_proxy_may_leave_its_prefix(server):
    with server.client() as client:
        for path, status in (
            ("/health", 200),
            ("/llm/health", 200),
            ("/llm", 401),
            ("/llm/llm/health", 401),
            ("/v1/models", 401),
            ("/llm/v1/models", 401),
            ("/", 200),
            ("/llm/", 200),
        ):
            assert client.get(path).status_code == status, path
        headers = {"authorization": "Bearer k"}
        models = [client.get(f"{root}/v1/models", headers=headers).json() for root in ("", "/llm")]
        assert models[0] == models[1]
        assert models[0]["data"]
        assert client.get("/llm", headers=headers).status_code == 404
