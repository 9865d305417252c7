"""`twinfer bench serve` before the load: which server it finds, and how long it waits for one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from twinfer.serving import bench_serve
from twinfer.serving.cli import main

ONE = ["--num-prompts", "1", "--num-warmups", "0", "--input-len", "2", "--output-len", "1"]


class Behind(BaseHTTPRequestHandler):
    """Has the API under `path`, for those with the key k; where `starts` is above 0, so many calls
    are answered by 503 before.
    """

    asked, path_of_api, starts, card = [], "", 0, {"data": [{"id": "m"}]}

    def do_GET(self):
        self.asked.append(self.path)
        if self.headers["authorization"] != "Bearer k":
            self._answer(401, {"error": {"message": "no valid API key was given"}})
        elif self.path != f"{self.path_of_api}/v1/models":
            self._answer(404, {})
        elif len(self.asked) <= self.starts:
            self._answer(503, {})
        else:
            self._answer(200, self.card)

    def do_POST(self):
        self.asked.append(self.path)
        self.rfile.read(int(self.headers["content-length"]))
        usage = {"completion_tokens": 1, "prompt_tokens": 2}
        self.send_response(200)
        self.end_headers()
        event = json.dumps({"choices": [{"text": "x"}], "usage": usage})
        self.wfile.write(f"data: {event}\n\ndata: [DONE]\n\n".encode())

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *words):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(Behind, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Behind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def bench(url, *flags, key="k"):
    return main(["bench", "serve", "--base-url", url, "--api-key", key, *ONE, *flags])


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("path", ["", "/llm"])
def test_the_address_may_have_a_path_and_that_of_the_api(server, path, end, monkeypatch):
    monkeypatch.setattr(Behind, "path_of_api", path)
    assert bench(server + path + end, "--ready-check-timeout-sec", "1") == 0
    assert Behind.asked == [f"{path}/v1/models", f"{path}/v1/completions"]


def test_a_wrong_key_is_not_waited_with(server, capsys):
    assert bench(server, key="wrong") == 1
    assert f"the server at {server} says 401: " in (said := capsys.readouterr().err)
    assert "no valid API key was given" in said
    assert len(Behind.asked) == 1


def test_who_waits_for_a_server_says_so(server, capsys, monkeypatch):
    monkeypatch.setattr(Behind, "starts", 2)
    monkeypatch.setattr(bench_serve, "QUIET_S", 0.1)
    assert bench(server) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"waits up to 600 s for a server at {server}: 503")


@pytest.mark.parametrize("card", [[], {"data": [3]}, {"data": []}, {"data": None}])
def test_what_is_no_list_of_models_is_no_server(server, card, capsys, monkeypatch):
    monkeypatch.setattr(Behind, "card", card)
    assert bench(server, "--ready-check-timeout-sec", "0.1") == 1
    assert "no server answers at" in capsys.readouterr().err
