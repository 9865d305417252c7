"""What the options of `twinfer serve` change for clients."""

import contextlib
import json
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

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
    "--stream-interval", "4", "--enable-server-load-tracking",
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
        "<&- >&- 2>&-",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("2>&-", ">&-", "<&- 2>&-", "")),
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
        httpx.Client(transport=transport, base_url="http://x", timeout=180) as client,
    ):

        def is_ready():
            with contextlib.suppress(httpx.ConnectError):  # it is bound, and does not listen yet
                return door.exists() and client.get("/ready").status_code == 200

        try:
            server.stderr.readline()
            server.stderr.close()
            end = time.monotonic() + 180
            while not is_ready():
                assert server.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            body = {"prompt": "x", "max_tokens": 2}
            for _ in range(3):
                assert client.post("/v1/completions", json=body).status_code == 200
        finally:
            server.terminate()
            assert server.wait(30) == 0


def test_keys_are_asked_of_everybody(server):
    with server.client() as client:
        assert client.get("/health").status_code == client.get("/").status_code == 200
        for path in ("/v1/models", "/metrics", "/nothing", "/v1//models", "/V1/models"):
            assert client.get(path).status_code == 401
        for value in ("k", "Bearer", "Bearer three", "Basic k", "Bearer k other"):
            headers = {"authorization": value}
            assert client.get("/v1/models", headers=headers).status_code == 401
        large = client.post("/v1/completions", content=b" " * (33 << 20))
        assert large.status_code == 401
    for key in ("k", "other"):
        with server.openai(api_key=key) as known:
            assert [model.id for model in known.models.list()] == ["one", "two"]
    with server.openai(api_key="three") as unknown, pytest.raises(openai.AuthenticationError):
        unknown.models.list()


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


CALLS = {
    "/v1/completions": {"prompt": ["x = ", "y"]},
    "/v1/chat/completions": {"messages": TURNS},
}


@pytest.mark.parametrize("path", CALLS)
def test_an_event_has_as_many_tokens_as_the_server_was_told(path, client):
    """But for each completion's first and last; together they are all. On a busy machine there may
    be more in one.
    """
    more = {"max_tokens": 30, "ignore_eos": True, "return_token_ids": True, "n": 2}
    body = CALLS[path] | more
    whole = client.post(path, json=body).json()
    found, prints = {}, {whole["system_fingerprint"]}
    tells = {"include_usage": True, "continuous_usage_stats": True}
    options = {"stream": True, "stream_options": tells}
    with client.stream("POST", path, json=body | options) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line[6:7] == "{"]
    counts = []
    for event in events:
        prints.add(event["system_fingerprint"])
        for one in event["choices"]:
            found.setdefault(one["index"], []).append(one.get("token_ids", []))
        said = sum(len(ids) for pieces in found.values() for ids in pieces)
        counts.append((event["usage"]["completion_tokens"], said))
    # The events that come together have what was told by the last of them.
    assert all(told >= said for told, said in counts)
    assert counts[-1] == (whole["usage"]["completion_tokens"],) * 2
    for one in whole["choices"]:
        pieces = [ids for ids in found[one["index"]] if ids]
        assert list(chain(*pieces)) == one["token_ids"]
        assert all(len(ids) >= 4 for ids in pieces[1:-1])
        assert len(pieces) <= 9
    assert prints == {whole["system_fingerprint"]}
    assert whole["system_fingerprint"].startswith("fp_")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [*CALLS, "/v1/responses", "/v1/messages"])
def test_the_load_is_how_many_calls_are_under_way(path, stream, client):
    """Until the last byte, and no longer than the client is there."""

    def load():
        return client.get("/llm/load").json()["server_load"]

    def comes_to(count):
        end = time.monotonic() + 10
        while load() != count:
            assert time.monotonic() < end, load()
            time.sleep(0.01)

    others = {"/v1/messages": {"messages": [{"role": "user", "content": "x"}]}}
    body = (CALLS | others).get(path, {"input": "x", "max_output_tokens": 100})
    body = {"max_tokens": 100, "ignore_eos": True, "stream": stream} | body
    if path == "/v1/responses":
        del body["max_tokens"]
    seen = threading.Event()

    def call_again_and_again():
        """Until two have been seen: one may end before anybody looks, or before the other begins."""
        while (status := client.post(path, json=body).status_code) == 200 and not seen.is_set():
            pass
        return status

    assert load() == 0
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(call_again_and_again) for _ in range(2)]
        try:
            comes_to(2)
        finally:
            seen.set()
        assert [call.result() for call in calls] == [200, 200]
    comes_to(0)
    with (
        contextlib.suppress(httpx.ReadTimeout),  # of a whole answer not even the head has come
        client.stream("POST", path, json=body, timeout=httpx.Timeout(10, read=0.05)) as answer,
    ):
        next(answer.iter_raw())
    comes_to(0)
    assert client.post(path, json=body | {"temperature": "hot"}).status_code == 400
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200
    assert load() == 0
