"""A rank, or the driver, that is killed, stopped or meets an error, in each phase of a server's life:
all is gone within seconds, with one line why, the right exit code, and nothing left behind.
"""

import contextlib
import os
import re
import socket
import time
from pathlib import Path

import pytest

from ..processes import children
from .server_process import gone, served
from .test_server_failures import Stream

pytestmark = pytest.mark.slow

STREAMS = 50
LATEST = 10.0
"""Seconds until nothing is left."""
FLAGS = ["--backend", "torch", "--device", "cpu", "--tp", "2", "--max-num-seqs", str(STREAMS)]
FLAGS += ["--max-num-batched-tokens", "64", "--max-model-len", "1024"]
FAULT = '''
import os, signal, sys, time
from pathlib import Path

who, phase, what = os.environ["FAULT"].split(",")

def here():
    """Whether this is the process that shall fail. A rank knows which one it is once it has
    joined the others.
    """
    from twinfer.gpu.ranks import shard_here
    return who == "driver" or shard_here().index == int(who)

def fail():
    Path(os.environ["FAILED"]).write_text(f"{os.getpid()} {os.getppid()} {time.monotonic()}")
    if what == "raise":
        raise ValueError("planted\\nin two lines")
    if what == "node":  # Ray's process that has started this one's parent
        words = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(words[1]), signal.SIGKILL)
        time.sleep(1000)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])

def faulty(method, is_now):
    def run(self, *given):
        if is_now(*given) and here():
            fail()
        return method(self, *given)
    return run

def is_prefill(step):
    seen["mixed"] += step.descriptor.kind == "mixed"
    return seen["mixed"] == 4

def is_decode(step):
    return step.descriptor.kind == "decode" and step.field("counts")[1] == STREAMS

seen = {"mixed": 0}
phases = {
    "load": ("load", lambda *given: True),
    "warm-up": ("warm_up", lambda *given: True),
    "prefill": ("execute", is_prefill),
    "decode": ("execute", is_decode),
}
words = sys.orig_argv
if who == "driver" and any("server.child" in word for word in words):
    from twinfer.shared.executor.worker import RanksWorker as Worker
elif who != "driver" and any("executor.rank" in word for word in words):
    from twinfer.gpu.worker import TorchWorker as Worker
else:
    Worker = None
if Worker is not None:
    name, is_now = phases[phase]
    setattr(Worker, name, faulty(getattr(Worker, name), is_now))
'''
STARTS = ("load", "warm-up")
WHY = {
    "kill": "rank {who} was ended by SIGKILL",
    "stop": r"rank {who} was stopped for \d s",
    "raise": "rank {who} failed with ValueError: planted in two lines",
}
WHY_OF_DRIVER = {
    "kill": "the engine ended by signal 9",
    "stop": r"the engine was stopped for \d s",
    "raise": "ValueError: planted in two lines",
}


def started(server):
    """All streams, which are not read yet."""
    return [
        Stream(server, prompt=f"{i}: once upon a time there was", max_tokens=900)
        for i in range(STREAMS)
    ]


def wait_for(path, server, seconds=120):
    """The process of the server that has failed, its parent, and when."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and (words := path.read_text().split()):
            return int(words[0]), int(words[1]), float(words[2])
        time.sleep(0.02)
    raise AssertionError(f"nothing has failed after {seconds} s: {server.aborted()}")


def left_behind(before):
    """The names that shared memory has besides those of `before` and that no process has mapped:
    others may run tests at the same time.
    """
    mapped = []
    names = set(os.listdir("/dev/shm")) - before
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            mapped.append(path.read_text())
    return {name for name in names if not any(f"/dev/shm/{name}" in text for text in mapped)}


@pytest.mark.parametrize("what", ["kill", "stop", "raise"])
@pytest.mark.parametrize("phase", [*STARTS, "prefill", "decode"])
@pytest.mark.parametrize("who", ["0", "1", "driver"])
def test_nothing_is_left(tmp_path, who, phase, what):
    (tmp_path / "sitecustomize.py").write_text(FAULT.replace("STREAMS", str(STREAMS)))
    folder, failed = tmp_path / "t", tmp_path / "failed"
    folder.mkdir()
    env = {
        "FAULT": f"{who},{phase},{what}",
        "FAILED": str(failed),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(folder),
    }
    shared_memory = set(os.listdir("/dev/shm"))
    with served(*FLAGS, ready=phase not in STARTS, env=env) as server:
        streams = []
        if phase not in STARTS:
            streams = started(server)
        pid, parent, when = wait_for(failed, server)
        engine = pid if who == "driver" else parent
        ranks = children(engine)
        code = server.wait_exit()
        assert time.monotonic() - when < LATEST, server.log
        for stream in streams:
            stream.join(LATEST)
            assert stream.error is not None or '"error"' in "".join(stream.lines[-2:])
        assert code == (1 if phase in STARTS else 70)
        why = (WHY_OF_DRIVER if who == "driver" else WHY)[what].format(who=who)
        assert len(re.findall(why, server.log)) == 1, server.log
        assert all(gone(one, LATEST) for one in (pid, engine, *ranks))
        assert time.monotonic() - when < LATEST
        if streams:
            port = int(server.url.rpartition(":")[2])
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 1)
    assert list(folder.iterdir()) == []
    assert left_behind(shared_memory) == set()
    assert str(folder) not in Path("/proc/net/unix").read_text()
