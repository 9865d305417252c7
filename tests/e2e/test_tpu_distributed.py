"""Several hosts: the same command in two processes that `jax.distributed` joins, with two
virtual CPU devices each.
"""

import json
import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from twinfer.bucketing import Descriptor, Table
from twinfer.shared.errors import BackendUnavailable, ConfigError
from twinfer.shared.step import NewPages, StepInput, StepShape
from twinfer.tpu import hosts

STEP = StepInput(
    7, Descriptor("mixed", 16, 8, 16), StepShape(4, 8, 32, 100), "processed",
    np.arange(5, dtype=np.int32),
    np.ones(3, np.int32), np.zeros((0,), np.int32), True,
    new_pages=NewPages(5, *np.arange(16, dtype=np.int32).reshape(4, 4)),
)  # fmt: skip
GENERATE = (
    "generate --model demo --backend jax --device cpu --dtype float32 --max-model-len 32 "
    "--max-num-seqs 8 "
    "--page-size 8 --max-num-batched-tokens 16 --num-pages 16 --decode-sizes 8 --mixed-sizes 16 "
    "--max-tokens 6 "
    "--seed 3 --logprobs 2 "
    "--prompt-token-ids 5,6,7 --prompt-token-ids 9,8,7,6,5,4,3,2,1,9,8,7,6,5,4,3,2,1 "
    "--prompt-token-ids 1 --json"
).split()


def free_ports():
    """A port that is free now, like the one after it."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise OSError("no two free ports side by side")


class Recorder:
    """A worker that notes its calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return name

        return call


def test_what_starts_device_work_is_done_by_every_host_in_the_same_order():
    address = f"127.0.0.1:{free_ports()}"
    others = [Recorder(), Recorder()]
    threads = [threading.Thread(target=hosts.follow, args=(other, address)) for other in others]
    for thread in threads:
        thread.start()
    mine = Recorder()
    first = hosts.FirstHost(mine, address, len(others))
    assert first.measure() == "measure"
    first.load(print)
    first.allocate_kv(12)
    first.warm_up(Table((8,), (16,), 8), print)
    assert first.execute(STEP) == "execute"
    first.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [call[0] for call in mine.calls] == [
        "measure",
        "load",
        "allocate_kv",
        "warm_up",
        "execute",
        "close",
    ]
    for other in others:
        assert [call[0] for call in other.calls] == [
            "load",
            "allocate_kv",
            "warm_up",
            "execute",
            "close",
        ]
        assert other.calls[1] == ("allocate_kv", 12)
        assert other.calls[2][1] == Table((8,), (16,), 8)
        step = other.calls[3][1]
        for name in ("step_id", "descriptor", "shape", "sampler", "logprobs", "prompt_targets"):
            assert getattr(step, name) == getattr(STEP, name)
        for name in ("batch", "sampling", "processors"):
            np.testing.assert_array_equal(getattr(step, name), getattr(STEP, name), strict=True)
        assert step.new_pages.start == 5
        for name in ("rows", "columns", "pages"):
            np.testing.assert_array_equal(
                getattr(step.new_pages, name), getattr(STEP.new_pages, name), strict=True
            )


def test_hosts_that_do_not_come_are_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(hosts, "PATIENCE", 0.05)
    with pytest.raises(BackendUnavailable, match="0 of 1 others"):
        hosts.FirstHost(Recorder(), f"127.0.0.1:{free_ports()}", 1)


@pytest.mark.parametrize(
    ("coordinator", "count", "index", "what"),
    [
        ("somewhere", 2, 0, "coordinator"),
        (":8476", 2, 0, "coordinator"),
        ("first:65535", 2, 0, "coordinator"),
        ("first:8476", 1, 0, "hosts: got 1"),
        ("first:8476", 2, 2, "host_index: got 2"),
    ],
)
def test_the_hosts_are_checked(coordinator, count, index, what):
    with pytest.raises(ConfigError, match=what):
        hosts.join(coordinator, count, index)


def start(devices, *arguments):
    """A command on a machine of so many devices."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-m", "twinfer", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def finish(process):
    """What it printed on stdout as JSON, a line each."""
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0, error[-3000:]
    # gloo, which carries the collectives, also talks to stdout
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_two_hosts_give_the_tokens_of_one_device():
    together = ["--coordinator", f"127.0.0.1:{free_ports()}", "--hosts", "2"]
    pair = [start(2, *together, "--host-index", str(i), *GENERATE, "--tp", "4") for i in (0, 1)]
    first, second = map(finish, pair)
    alone = finish(start(1, *GENERATE, "--tp", "1"))
    assert second == []
    assert len(alone) == 3
    assert [row["token_ids"] for row in first] == [row["token_ids"] for row in alone]


@pytest.mark.slow
def test_every_device_must_take_part():
    together = ["--coordinator", f"127.0.0.1:{free_ports()}", "--hosts", "2"]
    pair = [start(2, *together, "--host-index", str(i), *GENERATE, "--tp", "2") for i in (0, 1)]
    for process in pair:
        _, error = process.communicate(timeout=200)
        assert process.returncode != 0
        assert "tensor_parallel_size: got 2; 2 hosts have 4 devices" in error
