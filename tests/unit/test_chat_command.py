"""`twinfer chat` in a terminal, against a server that answers slowly."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from twinfer.serving.cli import main


class Slow(BaseHTTPRequestHandler):
    """Begins an answer with an escape sequence; goes on only where it is asked for `all`."""

    asked, go_on = [], threading.Event()

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.headers["authorization"], body))
        self.send_response(200)
        self.end_headers()
        self._tell("be\x1b[31mgun")
        if body["messages"][-1]["content"] == "all":
            self._tell(" ended")
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self.go_on.wait(600)

    def _tell(self, text):
        event = {"choices": [{"delta": {"content": text}}]}
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def log_message(self, *words):
        pass


@pytest.fixture
def slow():
    Slow.asked, Slow.go_on = [], threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        Slow.go_on.set()
        server.shutdown()


def test_an_interrupt_stops_an_answer_and_the_end_of_input_leaves(slow):
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "twinfer",
        "chat",
        "--url",
        slow,
        "--system",
        "s",
        "--seed",
        "3",
    ]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TWINFER_API_KEY": "k"},
    )
    os.close(theirs)
    seen = b""

    def wait_for(text):
        nonlocal seen
        end = time.monotonic() + 120
        while text not in seen and time.monotonic() < end:
            seen += os.read(ours, 4096)
        assert text in seen
        seen = seen.partition(text)[2]

    wait_for(b"> ")
    os.write(ours, b"one\n")
    wait_for(b"be[31mgun")
    process.send_signal(signal.SIGINT)
    wait_for(b"> ")
    os.write(ours, b"all\n")
    wait_for(b"be[31mgun ended")
    wait_for(b"> ")
    os.write(ours, b"\x04")
    assert process.wait(60) == 0
    os.close(ours)
    (key, first), (_, second) = Slow.asked
    assert (key, first["seed"], first["model"]) == ("Bearer k", 3, "m")
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    assert first["messages"] == said
    said += [{"role": "assistant", "content": "be\x1b[31mgun"}, {"role": "user", "content": "all"}]
    assert second["messages"] == said


def test_a_server_that_is_not_there_is_named(capsys):
    assert main(["chat", "--url", "http://127.0.0.1:1/v1", "--quick", "x"]) == 1
    assert "no server answers at http://127.0.0.1:1/v1" in capsys.readouterr().err
    assert main(["chat", "--url", "localhost"]) == 2
    assert "url: got localhost" in capsys.readouterr().err
