"""Two engines behind one server: hits of shared beginnings, and the end of one of them."""

import os
import re
import signal
import time

import pytest

from .server_process import gone, held, served
from .test_ranks import children
from .test_server_failures import Stream

FLAGS = ["--backend", "torch", "--device", "cpu", "--max-model-len", "256", "--page-size", "8"]


def engines(server):
    """The engines' processes."""
    found = children(server.process.pid)
    assert len(found) == 2
    return found


@pytest.mark.slow
def test_one_engine_is_killed_and_the_others_streams_do_not_notice(tmp_path):
    with served(*FLAGS, "--data-parallel-size", "2", env=held(tmp_path)) as server:
        first, second = engines(server)
        streams = [Stream(server, prompt=f"x{i}" * 3, max_tokens=200) for i in range(12)]
        assert all(stream.begun.wait(60) for stream in streams[:4])
        os.kill(first, signal.SIGKILL)
        (tmp_path / "go").touch()
        for stream in streams:
            stream.join(120)
            assert stream.lines[-1] == "data: [DONE]"
        failed = [stream for stream in streams if '"error"' in stream.lines[-2]]
        # Those that had tokens there; the others moved, or were never there.
        assert 1 <= len(failed) <= 6
        with server.client() as client:
            assert client.get("/health").status_code == 200
            body = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert len(re.findall(r"replica \d: the engine ended by signal 9", server.log)) == 1
        os.kill(second, signal.SIGKILL)
        assert server.wait_exit() == 70
        assert gone(first)
        assert gone(second)


@pytest.mark.slow
def test_shared_beginnings_hit_as_with_one_engine():
    """Within 5 % of the rate of one engine, but for the first time that each sees a beginning."""

    def rate(*more):
        with served(*FLAGS, *more) as server, server.client() as client:
            for turn in range(6):
                for group in range(6):
                    prompt = f"{'abcdef'[group]} story " * 12 + str(turn)
                    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
                    assert client.post("/v1/completions", json=body).status_code == 200
            time.sleep(1.5)
            return server.metric("prefix_cache_hits_total") / server.metric(
                "prefix_cache_queries_total"
            )

    one, two = rate(), rate("--data-parallel-size", "2")
    assert one > 0.5
    assert two > 0.95 * one
