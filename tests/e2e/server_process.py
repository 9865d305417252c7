"""`twinfer serve` as a process of its own, for tests: started, asked, and ended."""

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from .. import processes
from ..processes import is_running

ROOT = Path(__file__).resolve().parents[2]
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of addresses without TLS: else each of them reads all certificates of the system."""
FAULTS = """
import os, sys
if any("server.child" in word for word in sys.orig_argv):
    import time
    from twinfer.shared import engine
    step, calls = engine.Engine.step, [0]
    def faulty(self):
        calls[0] += 1
        if calls[0] >= int(os.environ["FAULT_STEP"]):
            {what}
        return step(self)
    engine.Engine.step = faulty
"""


FEW = 8
"""Tokens that a held engine gives to each request."""
HELD = """
            def goes_on():
                requests = self.scheduler.requests.values()
                running = [request for request in requests if request.state == "running"]
                few = any(len(request.output) < FEW for request in running)
                return few or (len(running) < len(requests) and self.scheduler.table.num_free)
            if os.path.exists(GO):
                {then}
            elif not (self._updates or goes_on()):
                time.sleep(0.005)
                return []
"""


@contextlib.contextmanager
def _signals_heeded():
    """Who runs the tests may ignore some, as `nohup` does, and what is started would inherit that;
    a handler is not inherited. A function between fork and exec would do it too, but JAX warns of
    forks.
    """
    ignored = [
        number
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


class Server:
    """A running server. `log` is what it has said so far."""

    def __init__(self, *flags, model="demo", env=None):
        self.log = ""
        with _signals_heeded():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "twinfer", "serve", str(model), "--port", "0", *flags],
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.log += line

    def wait_ready(self, seconds=180):
        """Its address."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := re.search(r'ready: (https?://[^\s"]+)', self.log):
                self.url = found[1]
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"not ready: {self.aborted()}")

    def wait_said(self, words, seconds=60):
        """Wait until it has said that."""
        end = time.monotonic() + seconds
        while words not in self.log:
            assert time.monotonic() < end, f"has not said {words!r}: {self.aborted()}"
            time.sleep(0.02)

    def wait_exit(self, seconds=30):
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {seconds} s: {self.aborted()}") from None
        self._reader.join(5)
        return code

    def aborted(self):
        """End it and all of its processes: its log, with the stacks of their threads."""
        if self.process.poll() is None:
            processes.abort(self.process.pid)
            self.process.wait()
        self._reader.join(5)
        return self.log

    def client(self, **options):
        return httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS, **options)

    def openai(self, **options):
        import openai

        options = {"api_key": "none", "max_retries": 0, "timeout": 60} | options
        client = openai.DefaultHttpxClient(verify=NO_TLS)
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=client, **options)

    def metric(self, name):
        """The value of a metric without labels."""
        with self.client() as client:
            found = re.search(rf"^twinfer:{name} (\S+)$", client.get("/metrics").text, re.M)
        return float(found[1])

    def engine_pid(self):
        """The engine's process: the one child of the server's."""
        out = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        ).stdout.split()
        (pid,) = [int(word) for word in out]
        return pid

    def idle(self, seconds=10):
        """Wait until the engine holds nothing of any request."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.metric("num_requests_running") == self.metric("kv_cache_usage_perc") == 0:
                return True
            time.sleep(0.05)
        return False

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        self.process.stderr.close()
        self.process.stdout.close()


@contextlib.contextmanager
def served(*flags, ready=True, **options):
    server = Server(*flags, **options)
    try:
        yield server.wait_ready() if ready else server
    finally:
        server.stop()


def fault(folder, what, step):
    """The environment of a server whose engine does `what` at call number `step` of `step()`."""
    (folder / "sitecustomize.py").write_text(FAULTS.replace("{what}", what))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "FAULT_STEP": str(step)}


def held(folder, then="pass"):
    """The environment of a server whose engine gives each request its first tokens alone, so that
    none ends, until there is a file `go` in the folder: from then on it does `then` at each step.
    """
    what = HELD.replace("{then}", then).replace("GO", repr(str(folder / "go")))
    return fault(folder, what.replace("FEW", str(FEW)), 1)


def gone(pid, seconds=10):
    """Wait for a process to end."""
    end = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
