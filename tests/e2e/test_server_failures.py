"""What a server does when something breaks: its engine, its client, its start, itself."""

import asyncio
import contextlib
import http.server
import itertools
import json
import os
import re
import resource
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from random import Random

import httpx
import openai
import pytest

from ..ports import free_ports
from ..processes import crowded
from .kv_canary import FAULTS, watched
from .server_process import fault, gone, held, served

BODY = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
FLAGS = ["--backend", "torch", "--device", "cpu"]
FEW = [*FLAGS, "--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
"""Of an engine of few programs, which starts in half of the processor time."""


class Stream(threading.Thread):
    """A streamed completion in a thread: its lines, and how it ended."""

    def __init__(self, server, **more):
        super().__init__(daemon=True)
        self.lines, self.error, self.begun = [], None, threading.Event()
        self._server, self._body = server, BODY | {"stream": True} | more
        self.start()

    def run(self):
        try:
            with (
                self._server.client() as client,
                client.stream("POST", "/v1/completions", json=self._body) as answer,
            ):
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.begun.set()
        except httpx.HTTPError as error:
            self.error = error
        self.begun.set()


def test_a_failed_step_ends_all_streams_with_an_error_and_the_server_with_70(tmp_path):
    with served(*FEW, env=held(tmp_path, "raise ValueError('broken')")) as server:
        engine = server.engine_pid()
        streams = [Stream(server, prompt=f"x{i}", max_tokens=900) for i in range(3)]
        assert all(stream.begun.wait(30) for stream in streams)
        (tmp_path / "go").touch()
        for stream in streams:
            stream.join(30)
            assert '"error"' in stream.lines[-2]
            assert "broken" not in stream.lines[-2]
            assert stream.lines[-1] == "data: [DONE]"
        assert server.wait_exit() == 70
        assert "broken" in server.log
        assert gone(engine)


@pytest.mark.slow
def test_memory_that_runs_out_is_another_exit_code(tmp_path):
    with served(*FLAGS, env=fault(tmp_path, "raise MemoryError('no room')", 5)) as server:
        with server.client() as client:
            answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"
        assert server.wait_exit() == 71


@pytest.mark.slow
def test_memory_that_is_short_at_the_start(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('server.child' in word for word in sys.orig_argv):\n"
        "    from twinfer.gpu import worker\n"
        "    def warm_up(self, *arguments): raise MemoryError('no room')\n"
        "    worker.TorchWorker.warm_up = warm_up\n"
    )
    with served(*FLAGS, env={"PYTHONPATH": str(tmp_path)}, ready=False) as server:
        assert server.wait_exit(120) == 71
        assert "no room" in server.log


@pytest.mark.slow
def test_a_cache_that_is_too_small_makes_some_give_way_and_changes_nothing():
    """And a request that it can never hold is refused."""
    flags = ["--num-pages", "40", "--max-num-seqs", "16", "--dtype", "float32"]
    with served(*FLAGS, *flags) as server, server.client() as client:
        alone = client.post("/v1/completions", json=BODY | {"seed": 3}).json()
        streams = [Stream(server, prompt=f"x{i}", seed=i) for i in range(15)]
        crowd = client.post("/v1/completions", json=BODY | {"seed": 3}).json()
        assert crowd["choices"] == alone["choices"]
        for stream in streams:
            stream.join(120)
            assert stream.lines[-1] == "data: [DONE]"
            assert '"error"' not in stream.lines[-2]
        assert server.metric("num_preemptions_total") > 0
        refused = client.post("/v1/completions", json=BODY | {"prompt": [5] * 700})
        assert refused.status_code == 400
        assert server.idle()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)]
)
def test_an_engine_that_is_killed(tmp_path, number):
    """Streams end with an error, which OpenAI's client raises; a response with its own event."""
    with served(*FEW, env=held(tmp_path)) as server, server.openai() as client:
        stream = Stream(server, max_tokens=900)
        call = {"model": "demo", "stream": True, "extra_body": {"ignore_eos": True}}
        turns = [{"role": "user", "content": "x"}]
        chat = iter(client.chat.completions.create(messages=turns, max_tokens=900, **call))
        text = iter(client.completions.create(prompt="x", max_tokens=900, **call))
        response = iter(client.responses.create(input="x", max_output_tokens=900, **call))
        for events in (chat, text, response):
            assert next(events)
        assert stream.begun.wait(20)
        os.kill(server.engine_pid(), number)
        stream.join(10)
        assert '"error"' in stream.lines[-2]
        for events in (chat, text):
            with pytest.raises(openai.APIError) as error:
                list(events)
            assert error.value.code == "engine_unavailable"
        *_, last = response
        assert last.type == "response.failed"
        assert last.response.error.message
        assert server.wait_exit() == 70
        assert "by signal" in server.log


@pytest.mark.slow
def test_an_engine_that_is_stopped_is_given_up(tmp_path):
    with served(*FLAGS, "--hang-timeout", "2", env=held(tmp_path)) as server:
        engine = server.engine_pid()
        stream = Stream(server)
        assert stream.begun.wait(20)
        os.kill(engine, signal.SIGSTOP)
        start = time.monotonic()
        assert server.wait_exit() == 70
        assert 1 < time.monotonic() - start < 8
        stream.join(10)
        assert '"error"' in stream.lines[-2]
        assert re.search(r"the engine (was stopped|has hung) for \d s; killed", server.log)
        assert gone(engine)


def test_an_engine_that_hangs_says_where(tmp_path):
    env = fault(tmp_path, "time.sleep(1000)", 20)
    with served(*FEW, "--hang-timeout", "2", env=env) as server:
        stream = Stream(server)
        assert server.wait_exit() == 70
        stream.join(10)
        assert '"error"' in stream.lines[-2]
        assert "sitecustomize.py" in server.log
        assert "faulty" in server.log


@pytest.mark.slow
def test_an_engine_that_gets_no_processor_has_not_hung(tmp_path):
    """Two steps of 2 s of processor time each, of which it gets a thirteenth."""
    what = "end = time.thread_time() + 2.0\n            while time.thread_time() < end: pass"
    with (
        served(*FLAGS, "--hang-timeout", "6", env=fault(tmp_path, what, 1)) as server,
        server.client() as client,
    ):
        with crowded(server.engine_pid()):
            stream = Stream(server, max_tokens=2)
            end = time.monotonic() + 10
            while time.monotonic() < end:
                assert client.get("/health").status_code == 200
                time.sleep(0.2)
        stream.join(60)
        assert stream.lines[-1] == "data: [DONE]"
        assert '"error"' not in stream.lines[-2], server.log
        assert "others have the processors" in server.log


@pytest.mark.slow
def test_an_engine_that_hangs_is_given_up_on_a_busy_machine_too(tmp_path):
    env = fault(tmp_path, "time.sleep(1000)", 1)
    with served(*FLAGS, "--hang-timeout", "2", env=env) as server:
        stream = Stream(server)
        time.sleep(0.5)  # the step has begun
        with crowded(server.engine_pid()):
            stream.join(20)  # its end takes the killed engine a while beside so many
            assert not stream.is_alive()
        assert server.wait_exit() == 70
        assert "the engine has hung" in server.log


@pytest.mark.slow
def test_an_idle_engine_is_heard_of():
    """Longer than the limit without a request."""
    with served(*FLAGS, "--hang-timeout", "2") as server, server.client() as client:
        for _ in range(10):
            time.sleep(0.4)
            assert client.get("/health").status_code == 200


@pytest.mark.slow
def test_a_front_that_was_stopped_does_not_blame_its_engine():
    """Whatever it looks at first when it goes on."""
    with served(*FLAGS, "--hang-timeout", "2") as server, server.client() as client:
        for _ in range(3):
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(4)
            server.process.send_signal(signal.SIGCONT)
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=BODY).status_code == 200
        assert "hung" not in server.log


@pytest.mark.slow
def test_health_is_503_while_a_silent_engine_is_not_ended_yet():
    """From the limit on, and no sooner. It was heard of within the second before."""
    with served(*FLAGS, "--hang-timeout", "3") as server, server.client() as client:
        start = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGSTOP)
        seen = []
        with contextlib.suppress(httpx.HTTPError):  # until nobody listens any more
            while time.monotonic() - start < 30:
                status = client.get("/health").status_code
                seen.append((status, time.monotonic() - start))
        assert [status for status, _ in seen] == sorted(status for status, _ in seen)
        assert {status for status, _ in seen} == {200, 503}
        first = next(answered for status, answered in seen if status == 503)
        assert first > 1.8
        assert all(answered < 3.5 for status, answered in seen if status == 200)
        assert server.wait_exit() == 70


GENTLE = (signal.SIGTERM, signal.SIGINT)
DEADLY = (signal.SIGSEGV, signal.SIGABRT, signal.SIGHUP, signal.SIGQUIT)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (*GENTLE, *DEADLY)),
    ],
)
def test_no_engine_outlives_its_front(number, tmp_path):
    """Even where it hangs inside of a step."""
    with served(*FEW, env=fault(tmp_path, "time.sleep(1000)", 20)) as server:
        engine = server.engine_pid()
        Stream(server).begun.wait(20)
        server.process.send_signal(number)
        if number in GENTLE:
            server.wait_said("going down")
            server.process.send_signal(number)  # the first one waits for the request
        assert server.wait_exit() == (0 if number in GENTLE else -number)
        assert gone(engine)


def _starting_engine(server, seconds=30):
    """The process of the engine of a server that starts."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(ValueError):
            return server.engine_pid()
        time.sleep(0.02)
    raise AssertionError("no engine was started")


# A ping tells what health does: unit/test_server_paths.py.
@pytest.mark.parametrize("path", ["/health", pytest.param("/ping", marks=pytest.mark.slow)])
def test_what_waits_for_health_may_send_requests(path):
    """Scripts for vLLM and SGLang do so, and SageMaker."""
    port = free_ports()
    with served(*FEW, "--port", str(port), ready=False) as server:
        _starting_engine(server)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            first = client.get(path)
            assert first.status_code == 503
            assert "the engine is starting" in first.text
            end = time.monotonic() + 60
            while client.get(path).status_code != 200:
                assert time.monotonic() < end
                time.sleep(0.02)
            assert client.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("after", [0.0, 2.0, 4.0])
def test_no_engine_outlives_a_start_that_is_interrupted(number, after):
    with served(*FLAGS, ready=False) as server:
        engine = _starting_engine(server)
        time.sleep(after)
        server.process.send_signal(number)
        assert server.wait_exit() == (0 if number in GENTLE else -number)
        assert gone(engine)


@pytest.mark.slow
def test_no_engine_outlives_a_front_that_is_killed_in_its_drain(tmp_path):
    with served(*FLAGS, env=held(tmp_path)) as server:
        engine = server.engine_pid()
        assert Stream(server, n=8).begun.wait(20)
        server.process.send_signal(signal.SIGTERM)
        server.wait_said("going down")
        server.process.send_signal(signal.SIGKILL)
        assert server.wait_exit() == -signal.SIGKILL
        assert gone(engine)


def test_a_drain_lets_requests_end_and_takes_no_more(tmp_path):
    with served(*FEW, env=held(tmp_path)) as server:
        stream = Stream(server, max_tokens=60)
        assert stream.begun.wait(20)
        with server.client() as client:
            server.process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 10
            while (answer := client.get("/ready")).status_code == 200:
                assert time.monotonic() < end
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert client.post("/v1/completions", json=BODY).status_code == 503
            assert client.get("/health").status_code == 200
        with server.openai() as known, pytest.raises(openai.InternalServerError) as error:
            known.completions.create(model="demo", prompt="x")
        assert error.value.status_code == 503
        assert error.value.response.headers["retry-after"]
        (tmp_path / "go").touch()
        stream.join(30)
        assert stream.lines[-1] == "data: [DONE]"
        assert '"length"' in stream.lines[-2]
        assert server.wait_exit() == 0


@pytest.mark.slow
def test_a_second_signal_waits_for_nothing(tmp_path):
    with served(*FLAGS, env=held(tmp_path)) as server:
        stream = Stream(server, n=8, max_tokens=900)
        assert stream.begun.wait(20)
        server.process.send_signal(signal.SIGTERM)
        server.wait_said("going down")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(8) == 0
        stream.join(10)
        assert '"error"' in stream.lines[-2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--page-size", "7000000"], 2, "page"),
        (["--max-model-len", "99999999"], 2, "max_model_len"),
        (["--backend", "jax", "--compile-level", "3"], 2, "compile_level"),
        (["--api-key", ""], 2, "api-key"),
        (["--ssl-keyfile", "x"], 2, "ssl"),
        (["--ssl-keyfile", "/nowhere", "--ssl-certfile", "/nowhere"], 2, "ssl"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_start_that_cannot_succeed_says_so(flags, code, says):
    with served(*FLAGS, *flags, ready=False) as server:
        assert server.wait_exit(60) == code
        assert says in server.log
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_model_that_is_not_there():
    with served(ready=False, model="/nowhere") as server:
        assert server.wait_exit() == 2
        assert "no such folder" in server.log


@pytest.mark.slow
def test_a_port_that_is_taken_costs_no_start():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with served(*FLAGS, "--port", port, ready=False) as server:
            assert server.wait_exit(20) == 2
            assert "Address already in use" in server.log


@pytest.mark.slow
def test_it_takes_as_many_connections_as_the_system_allows(tmp_path):
    """A shell allows few open files, and each connection is one."""
    files = resource.RLIMIT_NOFILE
    hard = resource.getrlimit(files)[1]
    (tmp_path / "sitecustomize.py").write_text(
        f"import resource\nresource.setrlimit({files}, (256, {hard}))\n"
    )
    with served(*FLAGS, env={"PYTHONPATH": str(tmp_path)}) as server:
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        assert resource.prlimit(server.process.pid, files) == (most, hard)


@pytest.mark.slow
def test_a_unix_socket_is_taken_over_from_a_killed_server_and_removed(tmp_path):
    path = tmp_path / "twinfer.sock"
    for number in (signal.SIGKILL, signal.SIGTERM):
        with served(*FLAGS, "--uds", str(path), ready=False) as server:
            end = time.monotonic() + 60
            while "ready: " not in server.log and time.monotonic() < end:
                time.sleep(0.05)
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://x") as client:
                assert client.get("/ready").status_code == 200
            with served(*FLAGS, "--uds", str(path), ready=False) as second:
                assert second.wait_exit() == 2
            assert path.exists()
            server.process.send_signal(number)
            server.wait_exit()
            assert path.exists() == (number == signal.SIGKILL)


def test_a_file_in_the_place_of_a_socket_is_not_removed(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with served(*FEW, "--uds", str(path), ready=False) as server:
        assert server.wait_exit() == 2
    assert path.read_text() == "mine"


def test_the_end_of_a_request_is_logged_without_its_texts(tmp_path):
    flags = ["--log-requests", "--log-format", "json"]
    with served(*FEW, *flags, env=held(tmp_path)) as server:
        with server.client() as client:
            headers = {"x-request-id": "mine"}
            body = BODY | {"prompt": "a secret", "max_tokens": 5}
            told = client.post("/v1/completions", json=body, headers=headers)
            assert told.headers["x-request-id"] == "mine"
            text = told.json()["choices"][0]["text"]
        stream = Stream(server)
        assert stream.begun.wait(20)
        os.kill(server.engine_pid(), signal.SIGKILL)
        stream.join(10)
        assert server.wait_exit() == 70
    # The bar of the start is for people, and no record.
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    assert {line["logger"].partition(".")[0] for line in lines} == {"twinfer"}
    first, second = (line for line in lines if line["logger"] == "twinfer.requests")
    assert (first["request_id"], first["path"], first["status"]) == ("mine", "/v1/completions", 200)
    assert (first["prompt_tokens"], first["output_tokens"]) == (
        told.json()["usage"]["prompt_tokens"],
        5,
    )
    assert first["reason"] == "length"
    assert 0 < first["first_token_ms"] <= first["total_ms"]
    assert second["reason"] == "error"
    assert "a secret" not in server.log
    assert text not in server.log
    assert {"time", "level", "message"} <= set(first)


class Collector(threading.Thread):
    """Takes spans over HTTP, as OpenTelemetry's collector does."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bodies = bodies = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.start()

    def run(self):
        self.server.serve_forever()

    def spans(self):
        """All that has come."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        return [
            span
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def test_spans_of_a_call():
    """They belong to the client's trace, follow one another, and hold no texts."""
    collector, trace = Collector(), "4bf92f3577b34da6a3ce929d0e0e4736"
    parent = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "x-request-id": "mine"}
    flags = ["--otlp-traces-endpoint", collector.url, "--max-num-seqs", "1"]
    with served(*FEW, *flags) as server:
        with server.client() as client:
            body = BODY | {"prompt": "a secret", "max_tokens": 40, "n": 2}
            assert client.post("/v1/completions", json=body, headers=parent).status_code == 200
            bad = {"traceparent": "00-nonsense"}
            assert client.post("/v1/completions", json={}, headers=bad).status_code == 400
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    spans = collector.spans()
    (call,) = (span for span in spans if span.trace_id.hex() == trace and span.kind == 2)
    assert call.name == "POST /v1/completions"
    assert call.parent_span_id.hex() == "00f067aa0ba902b7"
    told = {attribute.key: attribute.value for attribute in call.attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == 80
    assert told["twinfer.request_id"].string_value == "mine"
    parts = [span for span in spans if span.parent_span_id == call.span_id]
    assert [span.name for span in parts] == ["queue", "prefill", "decode"] * 2
    for first, second in itertools.pairwise(parts[:3]):
        assert first.start_time_unix_nano <= first.end_time_unix_nano == second.start_time_unix_nano
    assert call.start_time_unix_nano <= parts[0].start_time_unix_nano
    assert parts[2].end_time_unix_nano <= call.end_time_unix_nano
    # Of two completions for one place the second waits while the first is written: for longer than
    # until its first token, with which both would have begun.
    assert parts[3].end_time_unix_nano > parts[2].start_time_unix_nano
    (refused,) = (span for span in spans if span.name == "POST")
    assert refused.trace_id.hex() != trace
    assert not any(b"secret" in body for body in collector.bodies)


@pytest.mark.slow
def test_a_collector_that_is_not_there_costs_nothing():
    with served(*FLAGS, "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces") as server:
        with server.client() as client:
            for _ in range(20):
                assert client.post("/v1/completions", json=BODY | {"max_tokens": 2}).is_success
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert time.monotonic() - began < 15


def test_who_runs_it_has_a_socket_of_their_own(tmp_path):
    path = tmp_path / "admin.sock"
    flags = ["--admin-uds", str(path), "--api-key", "one", "--max-num-seqs", "1"]
    key = {"authorization": "Bearer one"}
    with served(*FEW, *flags, env=held(tmp_path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with (
            httpx.Client(transport=transport, base_url="http://x") as admin,
            server.client(headers=key) as client,
        ):
            for _ in range(2):
                client.post("/v1/completions", json=BODY | {"prompt": "y" * 200, "max_tokens": 1})
            found = client.get("/metrics").text.partition("\ntwinfer:prefix_cache_hits_total ")[2]
            assert float(found.split()[0]) > 0
            options = admin.get("/config").json()["options"]
            assert (options["max_num_seqs"], options["backend"]) == (1, "torch")
            assert admin.post("/reset_prefix_cache").json() == {"reset": True}
            body = BODY | {"prompt": "y" * 200, "max_tokens": 1}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert client.get("/requests").status_code == 404
            assert admin.get("/nothing").json()["error"]["message"]
            body = BODY | {"max_tokens": 450, "stream": True, "n": 2}
            headers = {"x-request-id": "mine"}
            with client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
                lines = stream.iter_lines()  # closes the stream when nothing refers to it
                assert '"text"' in next(lines)
                listed = admin.get("/requests").json()["requests"]
                assert [entry["state"] for entry in listed] == ["running", "waiting"]
                assert {entry["id"] for entry in listed} == {"mine"}
                assert listed[0]["output_tokens"] > listed[1]["output_tokens"] == 0
                assert admin.post("/reset_prefix_cache").status_code == 409
                assert admin.post("/drain").json() == {"draining": True, "requests": 2}
                assert server.process.poll() is None
        assert server.wait_exit() == 0
    assert not path.exists()


@pytest.mark.slow
def test_keys_do_not_share_prefixes():
    """What one tenant has cached tells another one nothing."""
    with served(*FLAGS, "--api-key", "one", "--api-key", "two") as server:

        def cached(key, **more):
            with server.openai(api_key=key) as client:
                answer = client.completions.create(
                    model="demo", prompt=[5] * 200, max_tokens=1, extra_body=more
                )
            return answer.usage.prompt_tokens_details.cached_tokens

        assert cached("one") == 0
        assert cached("one") > 0
        assert cached("two") == 0
        assert cached("two", cache_salt="a") == 0


@pytest.mark.slow
def test_more_than_may_wait_is_refused_and_the_rest_is_served(tmp_path):
    flags = ["--max-num-seqs", "2", "--max-num-queued-reqs", "4", "--max-num-queued-tokens", "500"]
    with served(*FLAGS, *flags, env=held(tmp_path)) as server:
        streams = [Stream(server, max_tokens=600) for _ in range(24)]
        end = time.monotonic() + 60
        while sum(stream.is_alive() for stream in streams) > 6:  # the others are refused
            assert time.monotonic() < end
            time.sleep(0.02)
        (tmp_path / "go").touch()
        for stream in streams:
            stream.join(60)
        refused = [s for s in streams if s.status == 503]
        answered = [s for s in streams if s.status == 200]
        assert refused
        assert len(answered) >= 4
        assert all(s.lines[-1] == "data: [DONE]" and "error" not in s.lines[-2] for s in answered)
        with server.client() as client:
            answer = client.post("/v1/completions", json=BODY)
            assert answer.status_code == 200
            text = client.get("/metrics").text
        assert 'admission_rejections_total{reason="requests"}' in text
        assert server.idle()


def _resident(pid):
    """Kilobytes of memory of a process."""
    (line,) = (
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line
    )
    return int(line.split()[1])


def _anything(random):
    """The body of a call, and after how many seconds its client leaves; None if it stays."""
    shared = [7 + random.randrange(3)] * random.choice([0, 40, 200]) + [11, 12, 13, 14] * 30
    tokens = shared[: random.randrange(1, 320)] + [random.randrange(2000) for _ in range(5)]
    body = BODY | {
        "prompt": tokens,
        "max_tokens": random.choice([1, 2, 40, 150]),
        "n": random.choice([1, 1, 2]),
        "stream": random.random() < 0.7,
        "logprobs": random.choice([None, 3]),
        "priority": random.randrange(-3, 4),
        "cache_salt": random.choice(["", "", "a"]),
        "temperature": random.choice([0, 0.8]),
        "seed": random.randrange(100),
    }
    return body, None if random.random() < 0.1 else random.uniform(0, 1) ** 2


async def _ask_and_leave(client, body, patience):
    """Whether the answer came before its client left."""
    clock = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:

            async def trace(name, info):
                # A call that is cancelled while it connects may leave its connection open.
                if name == "http11.send_request_headers.started" and patience is not None:
                    limit.reschedule(clock.time() + patience)

            options = {"json": body, "extensions": {"trace": trace}}
            async with client.stream("POST", "/v1/completions", **options) as answer:
                async for line in answer.aiter_lines():
                    assert not line.startswith('data: {"error"')
                return answer.status_code == 200
    except TimeoutError:
        return False


async def _soak(url, random, rounds, at_once=50):
    """How many calls were served; the clients of all others have left."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        served = 0
        for _ in range(rounds):
            calls = [_ask_and_leave(client, *_anything(random)) for _ in range(at_once)]
            # Where a server dies, each call ends by itself: one that were cancelled while it
            # connects would leave its connection open.
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
                served += outcome
        return served


CROWDED = [
    *("--max-num-seqs", "16", "--max-model-len", "512", "--num-pages", "48"),
    *("--scheduling-policy", "priority", "--max-num-batched-tokens", "128"),
]


@pytest.mark.slow
def test_2000_clients_that_leave_cost_nothing(tmp_path):
    """In any phase, of any priority, in a cache that makes some give way: at every step each page
    holds what it should, at rest the books agree, pages and memory of both processes are back
    where they were, and an answer is the one of an idle server.
    """
    body = BODY | {"prompt": [7] * 40 + [11, 12, 13, 14] * 30, "max_tokens": 60}
    environment = watched(tmp_path)
    with served(*FLAGS, *CROWDED, env=environment) as server, server.client() as client:
        pids = [server.process.pid, server.engine_pid()]
        alone = client.post("/v1/completions", json=body).json()["choices"]
        answered = asyncio.run(_soak(server.url, Random(1), 12))
        assert server.idle(60)
        before = [_resident(pid) for pid in pids]
        answered += asyncio.run(_soak(server.url, Random(2), 56))
        assert 100 < answered < 68 * 50 - 2000
        assert server.idle(60)
        after = [_resident(pid) for pid in pids]
        assert all(b < 1.08 * a for a, b in zip(before, after, strict=True)), (before, after)
        # Some leave before their call has reached the engine.
        assert server.metric("requests_aborted_total") > 1000
        assert server.metric("num_preemptions_total") > 0
        assert server.metric("prefix_cache_hits_total") > 1000
        assert client.post("/v1/completions", json=body).json()["choices"] == alone
        assert client.get("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_page_that_holds_another_ones_is_seen(name, tmp_path):
    """Else the test above could not fail."""
    with served(*FLAGS, *CROWDED, env=watched(tmp_path, KV_FAULT=name)) as server:
        with contextlib.suppress(AssertionError, httpx.HTTPError):
            asyncio.run(_soak(server.url, Random(1), 20))
        assert server.wait_exit() == 70
        # Of a page that is taken twice the books may know first, when it is taken or given back.
        found = ("CanaryDied", "already holds it", "was released but nobody holds it")
        assert any(words in server.log for words in found), server.log


@pytest.mark.slow
def test_three_times_too_much_load():
    """What was admitted is served, whatever is refused beside it. How long it takes is measured by
    `bench serve` (docs/measurements/server-and-sampling.md).
    """

    async def ask(client, index):
        body = BODY | {"max_tokens": 50, "prompt": f"{index} = "}
        return (await client.post("/v1/completions", json=body)).json()

    async def load(url, interval, count):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            tasks = []
            for index in range(count):
                tasks.append(asyncio.create_task(ask(client, index)))
                await asyncio.sleep(interval)
            return await asyncio.gather(*tasks)

    with served(*FLAGS, "--max-num-seqs", "4", "--max-num-queued-reqs", "1") as server:
        began = time.monotonic()
        asyncio.run(load(server.url, 0, 4))
        interval = (time.monotonic() - began) / 4 / 3
        answers = asyncio.run(load(server.url, interval, 120))
        admitted = [answer for answer in answers if "choices" in answer]
        refused = [answer for answer in answers if "error" in answer]
        assert len(admitted) + len(refused) == 120
        assert len(admitted) >= 4
        assert len(refused) > 10
        assert {answer["error"]["code"] for answer in refused} == {"overloaded"}
        assert all(answer["usage"]["completion_tokens"] == 50 for answer in admitted)
        assert server.idle()
