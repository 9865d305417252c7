"""scripts/deploy/ray_serve.py on a CPU: what is answered, streamed and refused is the server's own;
a server that is killed is replaced, and nothing is left behind.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from twinfer import LLM, SamplingParams

from ..ports import free_ports
from ..processes import every
from .server_process import gone

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
# Ray forks to start its own processes, which is said where another test has imported JAX.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning"),
]
FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "deploy"
WORDS = "demo --backend torch --device cpu --dtype float32 --max-model-len 256"


@pytest.fixture
def url(monkeypatch):
    """Where Ray Serve answers."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), *sys.path]))
    port = free_ports()
    # Its own cluster, also where another worker of xdist has one.
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        import ray_serve

        serve.run(ray_serve.app({"serve": WORDS}), route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def test_a_replica_is_the_server(url):
    # Long enough to arrive in several parts where Ray's proxy or the client is slow: what was
    # generated meanwhile comes as one.
    length = 200
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    options = {"backend": "torch", "device": "cpu", "dtype": "float32", "max_model_len": 256}
    with LLM("demo", progress=False, **options) as llm:
        (alone,) = llm.generate(["Once upon a time"], params, progress=False)
    text = alone.outputs[0].text
    body = {
        "model": "demo",
        "prompt": "Once upon a time",
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
    }
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == text
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as streamed:
            assert streamed.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in streamed.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line[6:]) for line in lines[:-1]]
        assert len(events) > 3
        assert "".join(event["choices"][0]["text"] for event in events) == text
        wrong = client.post("/v1/completions", json=body | {"max_tokens": 0})
        assert wrong.status_code == 400
        assert "max_tokens" in wrong.json()["error"]["message"]
        assert "twinfer:generation_tokens_total" in client.get("/metrics").text

        (server,) = servers()
        os.kill(server, signal.SIGKILL)
        assert gone(server)
        end = time.monotonic() + 90
        while time.monotonic() < end:
            answer = client.post("/v1/completions", json=body)
            if answer.status_code == 200:
                break
            time.sleep(0.5)
        assert answer.json()["choices"][0]["text"] == text
        (second,) = servers()
        assert second != server
    serve.shutdown()
    assert gone(second, 30)


def servers():
    """The servers of replicas."""
    found = []
    for pid in every("twinfer"):
        with contextlib.suppress(OSError):
            if b"/twinfer-serve-" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_arguments_are_checked(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import ray_serve

    for wrong in ({}, {"serve": ""}, {"serve": "demo", "model": "demo"}):
        with pytest.raises(ValueError, match="allowed is serve"):
            ray_serve.app(wrong)
