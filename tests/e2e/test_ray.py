"""Ranks that Ray places, on two nodes of a cluster: the tokens of one process, and what happens
when an actor, a rank or a node is killed.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from twinfer.shared.errors import ConfigError, RankLost
from twinfer.shared.executor.driver import Ranks
from twinfer.shared.models.locate import model_folder

from ..processes import children, every
from ..unit.test_executor import COMMAND, make_calls, worker_of
from .server_process import gone, served
from .test_rank_faults import FAULT, FLAGS, LATEST, STARTS, STREAMS, started, wait_for
from .test_ranks import FORM, KINDS, engine_of, requests_of, streamed, tokens_of

ray = pytest.importorskip("ray")
# Ray forks to start its own processes, which is said where another test has imported JAX.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning"),
]
TWO_EACH = "--xla_force_host_platform_device_count=2"


@pytest.fixture
def cluster():
    """A head that the driver is on, without room for a rank, and two nodes with room for one."""
    from ray.cluster_utils import Cluster

    # Any free port for the dashboard: where the usual one is taken, by a cluster of another test,
    # Ray leaves a socket open.
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "dashboard_port": None})
    made.nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.parametrize(("backend", "shards"), [("torch", 2), ("jax", 4)])
def test_the_tokens_of_one_process(cluster, backend, shards, monkeypatch):
    """Two gloo ranks of torch; two processes of JAX with two virtual devices each."""
    monkeypatch.setenv("XLA_FLAGS", TWO_EACH)
    ray.init(address=cluster.address, log_to_driver=False)
    folder = model_folder("demo")
    how = {"backend": backend, "distributed_executor_backend": "ray"}
    kinds = [*KINDS, FORM]
    together, metrics = tokens_of(folder, shards, kinds, **how)
    assert together == tokens_of(folder, 1, kinds)[0]
    assert metrics.preemptions > 0


CONNECT = """
import ray
from twinfer.shared.executor.ray_actors import connect
connect()
print("at", ray.get_runtime_context().gcs_address)
"""


def test_only_a_cluster_that_is_named_is_joined(cluster, monkeypatch):
    """Beside one that runs on this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    command = [sys.executable, "-c", CONNECT]
    found = {}
    for named in ("", "auto"):
        if named:
            monkeypatch.setenv("RAY_ADDRESS", named)
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        found[named] = run.stdout.split()[-1]
    assert found["auto"] == cluster.address
    assert found[""] != cluster.address


@pytest.mark.parametrize("what", ["rank", "actor"])
def test_requests_go_on_with_their_tokens_where_ranks_are_placed_anew(cluster, what):
    """Where a rank, or the actor that has started it, is killed."""
    ray.init(address=cluster.address, log_to_driver=False)
    folder, lost = model_folder("demo"), []

    def lose(engine):
        actors = engine.worker.processes
        ranks = [pid for actor in actors for pid in children(actor)]
        os.kill((ranks if what == "rank" else actors)[1], signal.SIGKILL)
        lost.extend([*ranks, *actors])

    how = {"restart_on_failure": True, "distributed_executor_backend": "ray"}
    assert requests_of(folder, 2, (lose, 5), **how) == requests_of(folder, 1)
    assert all(gone(pid) for pid in lost)


def test_ranks_do_not_stand_back_for_other_processes(cluster):
    """Ray starts its workers as nice as 15: on a busy machine they hardly run."""
    from twinfer.shared.executor.ray_actors import Actors

    ray.init(address=cluster.address, log_to_driver=False)
    ranks = Ranks("torch", "cpu", 2, Actors(2, [*COMMAND]))
    try:
        actors = ranks.processes
        found = [
            os.getpriority(os.PRIO_PROCESS, pid)
            for pid in [*actors, *(pid for actor in actors for pid in children(actor))]
        ]
    finally:
        ranks.close()
    assert found == [os.getpriority(os.PRIO_PROCESS, 0)] * 4


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("1,load,kill", "rank 1 on .* was ended by SIGKILL"),
        ("0,warm_up,stop", r"rank 0 on .* was stopped for 2 s"),
        ("1,load,raise", "rank 1 failed with ValueError: planted in two lines"),
        ("0,result,raise", "rank 0 failed with ValueError: planted in two lines"),
    ],
)
def test_what_fails_in_a_rank_ends_all_within_seconds(cluster, fault, words):
    """Ranks whose workers compute nothing."""
    from twinfer.shared.executor.ray_actors import Actors

    ray.init(address=cluster.address, log_to_driver=False)
    ranks = Ranks("torch", "cpu", 2, Actors(2, [*COMMAND, fault]))
    try:
        processes = [pid for actor in ranks.processes for pid in [actor, *children(actor)]]
        worker, began = worker_of(ranks), time.monotonic()
        with pytest.raises(RankLost, match=words) as raised:
            make_calls(worker)
        assert time.monotonic() - began < 10
        assert len(str(raised.value).splitlines()) == 1
        assert all(gone(pid) for pid in processes)
    finally:
        ranks.close()


DRIVER = """
import time, ray
from twinfer.shared.executor.driver import Ranks
from twinfer.shared.executor.ray_actors import Actors
ray.init(address={address!r}, log_to_driver=False)
ranks = Ranks("torch", "cpu", 2, Actors(2, {command!r}))
print(*ranks.processes, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_with_the_driver(cluster, number):
    """Its actors too, unless it is only stopped: then Ray has no reason to."""
    script = DRIVER.format(address=cluster.address, command=[*COMMAND])
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        actors = [int(word) for word in process.stdout.readline().split()]
        ranks = [pid for actor in actors for pid in children(actor)]
        assert len(actors) == len(ranks) == 2
        began = time.monotonic()
        os.kill(process.pid, number)
        assert all(gone(pid) for pid in ranks)
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert all(gone(pid) for pid in actors)


def step_for_ever(engine):
    while True:
        if not engine.has_work:
            engine.add(f"late{time.monotonic()}", np.arange(5, 15), KINDS[0])
        engine.step()


@pytest.mark.parametrize("what", ["actor", "rank", "stopped", "node"])
def test_what_is_killed_ends_all_within_seconds(cluster, what):
    ray.init(address=cluster.address, log_to_driver=False)
    engine = engine_of(model_folder("demo"), 2, distributed_executor_backend="ray")
    try:
        for number in range(4):
            engine.add(str(number), np.arange(5, 15), KINDS[0])
        engine.step()
        actors = engine.worker.processes
        ranks = [pid for actor in actors for pid in children(actor)]
        assert len(ranks) == 2
        began = time.monotonic()
        if what == "node":
            lost = raylets_of(cluster)[0]
        else:
            lost = actors[1] if what == "actor" else ranks[1]
        os.kill(lost, signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
        with pytest.raises(RankLost, match=r"rank [01] ") as raised:
            step_for_ever(engine)
        assert time.monotonic() - began < 10
        assert len(str(raised.value).splitlines()) == 1
    finally:
        engine.close()
    assert all(gone(pid) for pid in [*ranks, *actors])


def test_a_server_leaves_with_its_code(cluster):
    flags = ["--backend", "torch", "--device", "cpu", "--tp", "2"]
    flags += ["--distributed-executor-backend", "ray"]
    with served(*flags, env={"RAY_ADDRESS": cluster.address}) as server:
        with server.client() as client:
            body = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
            assert client.post("/v1/completions", json=body).status_code == 200
        ranks = ranks_in(cluster)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        began = time.monotonic()
        assert server.wait_exit() == 70
        assert time.monotonic() - began < 10
        lines = [line for line in server.log.splitlines() if "was ended by SIGKILL" in line]
        assert len(lines) == 1
        assert all(gone(pid) for pid in ranks)


@pytest.mark.parametrize("phase", [*STARTS, "prefill", "decode"])
@pytest.mark.parametrize("who", ["0", "1"])
def test_all_ends_where_a_node_is_lost(tmp_path, monkeypatch, request, who, phase):
    """The node of a rank, in each phase of a server's life, the last with 50 streams."""
    (tmp_path / "sitecustomize.py").write_text(FAULT.replace("STREAMS", str(STREAMS)))
    failed = tmp_path / "failed"
    # The processes of a node have the environment that it was started with.
    with monkeypatch.context() as of_nodes:
        of_nodes.setenv("FAULT", f"{who},{phase},node")
        of_nodes.setenv("FAILED", str(failed))
        of_nodes.setenv("PYTHONPATH", str(tmp_path), os.pathsep)
        cluster = request.getfixturevalue("cluster")
    flags = [*FLAGS, "--distributed-executor-backend", "ray"]
    with served(*flags, ready=phase not in STARTS, env={"RAY_ADDRESS": cluster.address}) as server:
        streams = []
        if phase not in STARTS:
            streams = started(server)
        pid, parent, when = wait_for(failed, server)
        ranks = ranks_in(cluster)
        code = server.wait_exit()
        assert time.monotonic() - when < LATEST, server.log
        for stream in streams:
            stream.join(LATEST)
            assert stream.error is not None or '"error"' in "".join(stream.lines[-2:])
        assert code == (1 if phase in STARTS else 70), server.log
        assert len(re.findall(r" ERROR .*rank [01] ", server.log)) == 1, server.log
        assert all(gone(one, LATEST) for one in (pid, parent, *ranks))
        assert time.monotonic() - when < LATEST


@pytest.mark.parametrize("what", ["rank", "node"])
def test_streams_go_on_where_a_rank_is_lost(cluster, what):
    """All of 50 end with the text of an undisturbed run; of a node, where there is another one."""
    flags = ["--tp", "2", "--distributed-executor-backend", "ray", "--restart-on-failure"]
    if what == "node":
        cluster.nodes.append(cluster.add_node(num_cpus=1))

    def lose(server):
        rank = ranks_in(cluster)[1]
        lost = rank if what == "rank" else parent(parent(rank))
        os.kill(lost, signal.SIGKILL)

    lost, log = streamed(*flags, lose=lose, env={"RAY_ADDRESS": cluster.address})
    assert lost == streamed()[0]
    assert what == "node" or "was ended by SIGKILL" in log
    assert log.count("starting again: rank ") == 1


def parent(pid):
    """The process that has started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def raylets_of(cluster):
    """Ray's process of each node that ranks may be placed on."""
    return [node.all_processes["raylet"][0].process.pid for node in cluster.nodes]


def ranks_in(cluster):
    """The ranks that the cluster's nodes run: what their actors have started."""
    actors = [pid for raylet in raylets_of(cluster) for pid in children(raylet)]
    started = {pid for actor in actors for pid in children(actor)}
    return [pid for pid in every("twinfer.shared.executor.rank") if pid in started]


def test_one_shard_has_nothing_to_place():
    with pytest.raises(ConfigError, match="distributed_executor_backend: got ray"):
        engine_of(model_folder("demo"), 1, distributed_executor_backend="ray")
