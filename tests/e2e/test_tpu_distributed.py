"""Several hosts: the same command in two processes that `jax.distributed` joins, with two
virtual CPU devices each.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from twinfer.bucketing import Descriptor, Table
from twinfer.shared import starvation, waiting
from twinfer.shared.errors import BackendUnavailable, ConfigError
from twinfer.shared.executor.curve import CurveServer
from twinfer.shared.step import NewPages, StepInput, StepShape
from twinfer.tpu import host_link, hosts

from ..ports import free_ports
from ..processes import communicate, wait_until

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


class Recorder:
    """A worker that notes its calls."""

    def __init__(self, memory):
        self.calls, self.memory = [], memory

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return self.memory if name == "measure" else name

        return call


class Board:
    """What hosts put up, in one process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def put(self, name, value):
        with self.changed:
            self.values[name] = value
            self.changed.notify_all()

    def get(self, name, patience):
        with self.changed:
            if not self.changed.wait_for(lambda: name in self.values, min(60, patience)):
                raise TimeoutError(name)
            return self.values[name]


SAME = {"configuration": "a", "plan": "b", "checkpoint": "c"}


class Hosts:
    """The others, in threads; `lost` is what any host said when it lost one."""

    def __init__(self, *others, digests=SAME, board=None):
        self.address, self.board = f"127.0.0.1:{free_ports()}", board or Board()
        self.lost, self.errors = [], []
        self.threads = [
            threading.Thread(target=self._follow, args=(other, i + 1, digests), daemon=True)
            for i, other in enumerate(others)
        ]
        for thread in self.threads:
            thread.start()

    def _follow(self, worker, host, digests):
        try:
            host_link.follow(worker, self.address, host, self.board, digests, self.lost.append)
        except Exception as error:
            self.errors.append(error)

    def first(self, worker):
        return host_link.FirstHost(
            worker, self.address, len(self.threads), self.board, SAME, self.lost.append
        )

    def join(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def test_what_starts_device_work_is_done_by_every_host_in_the_same_order():
    others = [Recorder(5), Recorder(7)]
    hosts_ = Hosts(*others)
    mine = Recorder(6)
    first = hosts_.first(mine)
    assert first.page_bytes() == "page_bytes"
    first.load(print)
    assert first.measure() == 5
    first.allocate_kv(12)
    first.warm_up(Table((8,), (16,), 8), print)
    assert first.execute(STEP).own == "execute"
    first.close()
    hosts_.join()
    assert hosts_.lost == hosts_.errors == []
    made = ["load", "measure", "allocate_kv", "warm_up", "execute", "close"]
    assert [call[0] for call in mine.calls] == ["page_bytes", *made]
    for other in others:
        assert [call[0] for call in other.calls] == made
        assert other.calls[2] == ("allocate_kv", 12)
        assert other.calls[3][1] == Table((8,), (16,), 8)
        step = other.calls[4][1]
        for name in ("step_id", "descriptor", "shape", "sampler", "logprobs", "prompt_targets"):
            assert getattr(step, name) == getattr(STEP, name)
        for name in ("batch", "sampling", "processors"):
            np.testing.assert_array_equal(getattr(step, name), getattr(STEP, name), strict=True)
        assert step.new_pages.start == 5
        for name in ("rows", "columns", "pages"):
            np.testing.assert_array_equal(
                getattr(step.new_pages, name), getattr(STEP.new_pages, name), strict=True
            )


def test_a_first_host_may_close_before_anything_is_loaded():
    others = [Recorder(5), Recorder(7)]
    hosts_ = Hosts(*others)
    mine = Recorder(6)
    hosts_.first(mine).close()
    hosts_.join()
    assert hosts_.lost == []
    told = {str(error) for error in hosts_.errors}
    assert told == {"hosts: host 0 gave up: it was closed before it was ready"}
    assert all(host.calls == [("close",)] for host in (mine, *others))


@pytest.mark.parametrize("what", sorted(SAME))
def test_hosts_that_run_something_else_are_named(what):
    hosts_ = Hosts(Recorder(5), digests=SAME | {what: "other"})
    with pytest.raises(ConfigError, match=f"{what}: host 1 has other, host 0 has {SAME[what]}"):
        hosts_.first(Recorder(5))
    hosts_.join()
    (error,) = hosts_.errors
    assert isinstance(error, BackendUnavailable)
    assert str(error).startswith(f"hosts: host 0 gave up: ConfigError: {what}: host 1 has other")


def test_others_leave_with_an_error_where_the_first_host_has_met_one():
    """Who started them sees by their exit code that there was no run."""

    class Broken(Recorder):
        def warm_up(self, table, progress):
            raise MemoryError("planted\nin two lines")

    others = [Recorder(5), Recorder(7)]
    hosts_ = Hosts(*others)
    first = hosts_.first(Broken(6))
    with pytest.raises(MemoryError):
        first.warm_up(Table((8,), (16,), 8), print)
    first.close()
    hosts_.join()
    assert hosts_.lost == []
    assert [type(error) for error in hosts_.errors] == [BackendUnavailable] * 2
    told = {str(error) for error in hosts_.errors}
    assert told == {"hosts: host 0 gave up: MemoryError: planted in two lines"}
    assert all(other.calls[-1] == ("close",) for other in others)


def test_a_host_that_raises_is_told_of_at_once(monkeypatch):
    monkeypatch.setattr(host_link, "BEAT_S", 0.05)

    class Broken(Recorder):
        def execute(self, step):
            raise ValueError("planted\nin two lines")

    hosts_ = Hosts(Broken(5))
    first = hosts_.first(Recorder(5))
    began = time.monotonic()
    first.execute(STEP)
    while not hosts_.lost and time.monotonic() - began < 60:
        time.sleep(0.01)
    assert hosts_.lost[0] == "host 1 failed with ValueError: planted in two lines"
    first.close()
    hosts_.join()
    assert [str(error) for error in hosts_.errors] == ["planted\nin two lines"]


@pytest.mark.parametrize("silent", [True, False])
def test_an_error_of_the_first_host_waits_for_its_reason(monkeypatch, silent):
    """Where all others live it is its own. Where one does not, that is said before."""
    monkeypatch.setattr(host_link, "BEAT_S", 0.05)
    monkeypatch.setattr(host_link, "SILENT_S", 60.0)
    hosts_ = Hosts(Recorder(5))
    mine = Recorder(6)
    first = hosts_.first(mine)
    deadline = time.monotonic() + 60
    while not first._watch._silences:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setattr(mine, "execute", lambda step: Broken(), raising=False)
    if silent:
        monkeypatch.setattr(first._watch, "heard", lambda host: None)
        monkeypatch.setattr(host_link, "SILENT_S", 0.5)
    began = time.monotonic()
    with pytest.raises(ValueError, match="reset by peer"):
        first.execute(STEP).result()
    if silent:
        # The other host, which shares these limits, may lose the first one too.
        assert any(why.startswith("host 1 gave no sign of life") for why in hosts_.lost)
    else:
        assert hosts_.lost == []
        assert time.monotonic() - began < 60.0
    first.close()
    hosts_.join()


class Broken:
    def result(self):
        raise ValueError("reset by peer")


def test_a_host_that_is_silent_is_lost(monkeypatch):
    monkeypatch.setattr(host_link, "BEAT_S", 0.05)
    monkeypatch.setattr(host_link, "SILENT_S", 0.5)
    lost = []
    watch = host_link.Watch(lost.append, lambda: None)
    began = time.monotonic()
    watch.heard(3)
    while not lost and time.monotonic() - began < 60:
        time.sleep(0.01)
    watch.stop()
    assert lost[0].startswith("host 3 gave no sign of life for")
    assert time.monotonic() - began > 0.4


def test_who_stood_still_itself_blames_no_other(monkeypatch):
    """What the others said meanwhile is read when it goes on."""
    monkeypatch.setattr(host_link, "BEAT_S", 0.05)
    monkeypatch.setattr(host_link, "SILENT_S", 1.0)
    monkeypatch.setattr(starvation, "HELD_UP_S", 0.2)
    lost, beats, begun = [], [], threading.Event()

    def beat():
        begun.wait()
        if not beats:
            time.sleep(2.0)
        else:
            watch.heard(3)
        beats.append(1)

    watch = host_link.Watch(lost.append, beat)
    watch.heard(3)
    begun.set()
    deadline = time.monotonic() + 60
    while len(beats) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    watch.stop()
    assert lost == []


@pytest.mark.parametrize("taken", [0, 1])
def test_a_port_that_is_taken_is_named(taken):
    port = free_ports()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port + taken))
        other.listen()
        with pytest.raises(BackendUnavailable, match=f"ports {port} and {port + 1}.*in use"):
            host_link.FirstHost(Recorder(5), f"127.0.0.1:{port}", 1, Board(), SAME)


def test_who_has_no_key_of_a_host_hears_nothing(monkeypatch):
    import zmq

    monkeypatch.setattr(host_link, "PATIENCE_S", 1.0)
    board, address = Board(), f"127.0.0.1:{free_ports()}"
    public, _ = zmq.curve_keypair()
    board.put("hosts/key/1", public.decode())

    def eavesdrop():
        mine, secret = zmq.curve_keypair()
        with zmq.Context() as context, context.socket(zmq.SUB) as door:
            door.linger = 0
            door.curve_serverkey = board.get("hosts/key/0", 20).encode()
            door.curve_publickey, door.curve_secretkey = mine, secret
            door.setsockopt(zmq.SUBSCRIBE, b"")
            door.connect(f"tcp://{address}")
            assert not door.poll(1500)

    thread = threading.Thread(target=eavesdrop)
    thread.start()
    # Its subscriptions do not count as those of the other host either.
    with pytest.raises(BackendUnavailable, match="0 of 1 others"):
        host_link.FirstHost(Recorder(5), address, 1, board, SAME)
    thread.join()


class PutToSleep(Board):
    """What the first host reads on it comes late: a busy machine runs another process first."""

    def get(self, name, patience):
        value = super().get(name, patience)
        if name != "hosts/key/0":
            time.sleep(0.5)
        return value


def test_no_host_comes_before_it_is_let_in(monkeypatch):
    """It would be refused for ever (tests/unit/test_curve.py), and all wait."""
    monkeypatch.setattr(host_link, "PATIENCE_S", 60.0)
    others = [Recorder(5), Recorder(7)]
    hosts_ = Hosts(*others, board=PutToSleep())
    first = hosts_.first(Recorder(6))
    assert first.measure() == 5
    first.warm_up(Table((8,), (16,), 8), print)
    first.close()
    hosts_.join()
    assert hosts_.errors == []


def first_waits(address, board):
    host_link.FirstHost(Recorder(5), address, 1, board, SAME)


def other_waits(address, board):
    host_link.follow(Recorder(5), address, 1, board, SAME)


def key():
    import zmq

    return zmq.curve_keypair()[0].decode()


@pytest.mark.parametrize(
    ("who", "there", "waits", "reason"),
    [
        (first_waits, [], "the key of host 1", "host 1 gave no key"),
        (
            first_waits, ["hosts/key/1"],
            r"connections of the other hosts: 0 of 1 came; ports \d+ and \d+ of 127.0.0.1",
            "0 of 1 others came",
        ),
        (other_waits, [], "the key of host 0", "host 0 gave no key"),
        (other_waits, ["hosts/key/0"], "the first call of host 0", "host 0 made no call"),
    ],
)  # fmt: skip
def test_who_waits_says_for_what_and_ends_with_a_reason(
    monkeypatch, caplog, who, there, waits, reason
):
    monkeypatch.setattr(host_link, "PATIENCE_S", 1.0)
    monkeypatch.setattr(host_link, "BEAT_S", 0.1)
    monkeypatch.setattr(waiting, "NOTICE_S", 0.2)
    board, address = Board(), f"127.0.0.1:{free_ports()}"
    for name in there:
        board.put(name, key())

    def told():
        return [r.getMessage() for r in caplog.records if r.name == "twinfer.waiting"]

    while not told():  # the thread that tells it may get no processor for as long as that
        began = time.monotonic()
        with pytest.raises(BackendUnavailable, match=rf"{reason} within 1 s"):
            who(address, board)
        assert time.monotonic() - began < 60
    assert all(re.match(f"waits for {waits}", text) for text in told())
    assert re.search(r"\d of at most 1 s$", told()[0])


def test_a_host_that_was_refused_ends_with_a_reason_too(monkeypatch):
    """What it reports is taken by nobody, which it may not wait for."""
    import zmq

    monkeypatch.setattr(host_link, "PATIENCE_S", 1.0)
    monkeypatch.setattr(host_link, "BEAT_S", 0.1)
    board, port, errors = Board(), free_ports(), []

    def follow():
        try:
            other_waits(f"127.0.0.1:{port}", board)
        except BackendUnavailable as error:
            errors.append(str(error))

    with zmq.Context() as context:
        server = CurveServer(context)
        board.put("hosts/key/0", server.allow([]))
        doors = [server.bind(zmq.XPUB, "127.0.0.1", port)[0]]
        doors.append(server.bind(zmq.PULL, "127.0.0.1", port + 1)[0])
        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        thread.join(60)
        for door in doors:
            door.close(linger=0)
        server.close()
    assert errors == [
        f"hosts: host 0 made no call within 1 s; ports {port} and {port + 1} of 127.0.0.1 must be "
        "open to them"
    ]


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("DEADLINE_EXCEEDED: GetKeyValue() timed out", TimeoutError, "hosts/key/1"),
        (
            "UNAVAILABLE: Socket closed\nmore",
            BackendUnavailable,
            "coordinator: UNAVAILABLE: Socket",
        ),
    ],
)
def test_what_the_store_of_jax_says_is_told_in_our_words(said, kind, words):
    def get(name, milliseconds):
        assert (name, milliseconds) == ("hosts/key/1", 2000)
        raise jax.errors.JaxRuntimeError(said)

    store = hosts.KeyValueStore(SimpleNamespace(blocking_key_value_get=get))
    with pytest.raises(kind, match=words) as raised:
        store.get("hosts/key/1", 2.0)
    assert "more" not in str(raised.value)


def test_an_answer_that_does_not_come_is_told_of(monkeypatch):
    """A host that lives and says nothing of what it runs."""
    collect, raised = host_link.FirstHost._collect, threading.Event()

    def collect_soon(first, number, kind, deadline=None):
        monkeypatch.setattr(host_link, "PATIENCE_S", 1.0)  # they have met
        try:
            return collect(first, number, kind, time.monotonic() + host_link.PATIENCE_S)
        finally:
            raised.set()

    monkeypatch.setattr(host_link.FirstHost, "_collect", collect_soon)

    class Slow:
        def keys(self):
            raised.wait(60)
            return SAME.keys()

        def __getitem__(self, name):
            return SAME[name]

    hosts_ = Hosts(Recorder(5), digests=Slow())
    with pytest.raises(BackendUnavailable, match="host 1 gave no answer within 1 s"):
        hosts_.first(Recorder(5))
    hosts_.join()  # it was told to leave


@pytest.mark.parametrize(
    ("coordinator", "count", "index", "what"),
    [
        ("somewhere", 2, 0, "coordinator"),
        (":8476", 2, 0, "coordinator"),
        ("first:65534", 2, 0, "coordinator"),
        ("first:8476", 1, 0, "hosts: got 1"),
        ("first:8476", 2, 2, "host_index: got 2"),
    ],
)
def test_the_hosts_are_checked(coordinator, count, index, what):
    with pytest.raises(ConfigError, match=what):
        hosts.join(coordinator, count, index)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (
            {"LWS_LEADER_ADDRESS": "a-0.a", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3",
             "TPU_WORKER_HOSTNAMES": "x,y", "TPU_WORKER_ID": "0"},
            ("a-0.a:8476", 4, 3),
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3", "TPU_WORKER_ID": "1"},
            ("10.0.0.2:8476", 2, 1),
        ),
        (
            {"TPU_PROCESS_ADDRESSES": "a-0:8471,a-1:8471,a-2:8471", "TPU_WORKER_ID": "2",
             "TPU_WORKER_HOSTNAMES": "x"},
            ("a-0:8476", 3, 2),
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "a-0:8471,a-1:8471", "TPU_WORKER_ID": "1"},
            ("a-0:8476", 2, 1),
        ),
    ],
)  # fmt: skip
def test_variables_name_the_hosts(variables, found):
    assert hosts.of_variables(variables) == found


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"LWS_LEADER_ADDRESS": "a", "LWS_GROUP_SIZE": "2"}, "LWS_WORKER_INDEX: got '2' and ''"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "x"}, "got '2' and 'x'"),
    ],
)
def test_variables_that_are_missing_are_named(variables, what):
    with pytest.raises(ConfigError, match=what):
        hosts.of_variables(variables)


@pytest.fixture
def metadata(monkeypatch):
    """A server of metadata, by what it has."""
    values = {}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            known = name in values and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(values.get(name, "").encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
        yield values
        server.shutdown()


def test_a_tpu_vm_knows_its_hosts(metadata, monkeypatch):
    for name in hosts.HOSTNAMES:
        monkeypatch.delenv(name, raising=False)
    metadata |= {
        "worker-network-endpoints": "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3",
        "agent-worker-number": "1\n",
    }
    joined = []
    monkeypatch.setattr(hosts, "_initialize", lambda *asked: joined.append(asked))
    monkeypatch.setattr(hosts, "_joined", None)
    hosts.join("auto", 1, 0)
    assert joined == [("10.0.0.2:8476", 2, 1)]


JOINED = """
import os, signal, time
import jax
from twinfer.tpu import hosts
jax.config.update("jax_platforms", "cpu")
hosts._initialize("127.0.0.1:{port}", 1, 0)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5)
print("it went on")
"""


def test_a_host_that_has_joined_ends_when_it_is_told_to():
    """By SIGTERM, with which pods are ended."""
    command = [sys.executable, "-c", JOINED.format(port=free_ports())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == -signal.SIGTERM, (done.stdout, done.stderr[-2000:])


def test_jax_looks_for_nothing_itself(monkeypatch):
    """Where a TPU is seen it asks the metadata of a TPU VM, which a pod elsewhere has not, though
    all that it could learn is given.
    """
    from jax._src import clusters, distributed

    monkeypatch.setattr(
        clusters.ClusterEnv,
        "auto_detect_unset_distributed_params",
        lambda *_: pytest.fail("it looked"),
    )
    given = {}
    monkeypatch.setattr(
        distributed._jax,
        "get_distributed_runtime_client",
        lambda *asked, **options: given.update(asked=asked) or SimpleNamespace(connect=str),
    )
    monkeypatch.setattr(distributed, "global_state", distributed.State())
    monkeypatch.setattr(hosts.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(distributed.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(distributed.State, "initialize_preemption_sync_manager", lambda _: None)
    hosts._initialize("localhost:8476", 2, 1)
    assert given["asked"][:2] == ("localhost:8476", 1)


@pytest.mark.parametrize(
    ("known", "what"),
    [
        ({}, r"LWS_LEADER_ADDRESS, .*, TPU_WORKER_HOSTNAMES .*worker-network-endpoints .*404"),
        (
            {"worker-network-endpoints": "", "agent-worker-number": "1"},
            "worker-network-endpoints '' and agent-worker-number '1', which name no hosts",
        ),
        (
            {"worker-network-endpoints": "a:1:10.0.0.2", "agent-worker-number": "-1"},
            "agent-worker-number '-1', which name no hosts",
        ),
    ],
)
def test_metadata_that_names_no_hosts_is_told(metadata, known, what):
    metadata |= known
    with pytest.raises(ConfigError, match=what):
        hosts.of_metadata(os.environ)


def test_auto_finds_the_number_itself():
    with pytest.raises(ConfigError, match="hosts, host_index: got 4, 0"):
        hosts.join("auto", 4, 0)


def start(devices, *arguments, environment=os.environ):
    """A command on a machine of so many devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = environment | {"XLA_FLAGS": flags}
    command = [sys.executable, "-m", "twinfer", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


@contextlib.contextmanager
def two_hosts(port, *arguments, environments=(os.environ, os.environ)):
    """The same command on two hosts of two devices each, which meet at `port`."""
    together = ["--coordinator", f"127.0.0.1:{port}", "--hosts", "2"]
    pair = [
        start(2, *together, "--host-index", str(i), *arguments, environment=environments[i])
        for i in (0, 1)
    ]
    try:
        yield pair
    finally:
        for process in pair:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


def finish(process, *others):
    """What it printed on stdout as JSON, a line each."""
    out, error = communicate(process, 400, *others)
    assert process.returncode == 0, error[-3000:]
    # gloo, which carries the collectives, also talks to stdout
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_two_hosts_give_the_tokens_of_one_device():
    with two_hosts(free_ports(), *GENERATE, "--tp", "4") as pair:
        first = finish(*pair)
        second = finish(pair[1])
    alone = finish(start(1, *GENERATE, "--tp", "1"))
    assert second == []
    assert len(alone) == 3
    assert [row["token_ids"] for row in first] == [row["token_ids"] for row in alone]


@pytest.mark.slow
def test_each_host_keeps_what_it_has_compiled(tmp_path):
    """On a disk of its own, as the machines of a pod have. JAX notes beside an entry when it was
    read last.
    """
    given = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    folders = [tmp_path / host for host in ("first", "second")]
    disks = [given | {"XDG_CACHE_HOME": str(folder)} for folder in folders]

    def entries_of_a_start():
        with two_hosts(free_ports(), *GENERATE, "--tp", "4", environments=disks) as pair:
            finish(*pair)
            finish(pair[1])
        return [{path.name: path.read_bytes() for path in f.rglob("*-atime")} for f in folders]

    for made, then in zip(entries_of_a_start(), entries_of_a_start(), strict=True):
        assert len(made) > 3
        assert made.keys() == then.keys(), "nothing is compiled again"
        assert all(then[name] != made[name] for name in made), "each is read"


@pytest.mark.slow
def test_every_device_must_take_part():
    with two_hosts(free_ports(), *GENERATE, "--tp", "2") as pair:
        for index, process in enumerate(pair):
            _, error = communicate(process, 200, *pair[index + 1 :])
            assert process.returncode != 0
            assert "tensor_parallel_size: got 2; 2 hosts have 4 devices" in error


@pytest.mark.slow
def test_the_others_leave_where_the_first_ones_start_fails():
    too_many = [*GENERATE, "--num-pages", str(1 << 40)]
    with two_hosts(free_ports(), *too_many, "--tp", "4") as pair:
        _, error = communicate(pair[0], 200, pair[1])
        assert pair[0].returncode == 2
        assert f"error: num_pages: got {1 << 40}" in error
        _, error = communicate(pair[1], 200)
        assert pair[1].returncode == 4, error[-3000:]
        assert "error: hosts: host 0 gave up: it was closed before it was ready" in error


def connections(port):
    """Connections that are open to a port of this machine."""
    found = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        found += int(words[1].rpartition(":")[2], 16) == port and words[3] == "01"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "number"), [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)]
)
def test_a_lost_host_ends_the_others_within_seconds(killed, number):
    port = free_ports()
    long = [*GENERATE, "--max-model-len", "1024", "--max-tokens", "1000", "--ignore-eos"]
    long += ["--num-pages", "1024"]
    with two_hosts(port, *long, "--tp", "4") as pair:
        wait_until(lambda: connections(port + 1) >= 2, pair, 200)
        time.sleep(4)  # each has heard of the other
        pair[killed].send_signal(number)
        began = time.monotonic()
        left = pair[1 - killed]
        _, error = communicate(left, 60)
        assert time.monotonic() - began < 15
        if killed == 0 and left.returncode == -signal.SIGABRT:
            # JAX's agent notices the end of the coordinator sooner, and ends its process itself.
            assert "another task died" in error
            return
        assert left.returncode == 70, error[-2000:]
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert f"host {killed} gave no sign of life" in lines[0]
