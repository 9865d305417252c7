"""The driver and its ranks, with workers that compute nothing: order, agreement, and every way to
fail.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from twinfer.bucketing import Descriptor
from twinfer.shared import worker
from twinfer.shared.config import DeviceInfo, EngineConfig, resolve
from twinfer.shared.errors import BackendUnavailable, ConfigError, RankLost
from twinfer.shared.executor import driver
from twinfer.shared.executor.driver import Ranks, Subprocesses
from twinfer.shared.executor.messages import decode, encode
from twinfer.shared.executor.worker import RanksWorker
from twinfer.shared.models.config import ModelConfig
from twinfer.shared.models.config_json import load_config
from twinfer.shared.models.locate import model_folder
from twinfer.shared.packer import padding
from twinfer.shared.step import NewPages, StepInput, StepShape, batch_layout, sampling_layout

from ..processes import crowded

COMMAND = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))
SHAPE = StepShape(4, 8, 32, 100)
LATEST = 10.0
"""Seconds until all ranks are gone."""


def options(**more):
    model = load_config(model_folder("demo"))
    config = EngineConfig(
        model="demo",
        backend="torch",
        device="cpu",
        max_model_len=64,
        tensor_parallel_size=2,
        **more,
    )
    return model, resolve(config, model, DeviceInfo("cpu", "cpu", 1 << 40))[0]


def step(number, requests=1):
    made = padding(Descriptor("decode", 8, 8, 1), SHAPE)
    batch = made.batch.copy()
    layout = batch_layout(made.descriptor, SHAPE)
    layout.view(batch, "counts")[:] = requests
    layout.view(batch, "kv_lens")[:] = number
    return StepInput(number, made.descriptor, SHAPE, "greedy", batch, made.sampling)


def start(monkeypatch, fault="", count=2):
    monkeypatch.setenv("FAULT", fault)
    return Ranks("torch", "cpu", count, Subprocesses(COMMAND))


def gone(pids):
    """Whether none of these processes is there any more, within the time they have."""
    deadline = time.monotonic() + LATEST
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_the_first_of_two_errors_is_the_reason(monkeypatch):
    """A rank meets an error, and its peer meets the end of it and ends too, before anybody looks:
    that is no sudden end.
    """
    monkeypatch.setattr(driver, "LOOK_S", 2.0)
    ranks = start(monkeypatch, "*,load,raise")
    try:
        with pytest.raises(RankLost, match=r"rank [01] failed with ValueError"):
            worker_of(ranks).load(print)
    finally:
        ranks.close()


def worker_of(ranks):
    model, config = options()
    return RanksWorker(ranks, model, config, model_folder("demo"))


def make_calls(worker):
    worker.load(print)
    worker.warm_up(options()[1].table(), print)
    for number in range(1, 6):
        worker.execute(step(number)).result()


def test_what_is_sent_arrives_as_it_was():
    model, config = options(op_priority={"linear": ("native",)})
    assert decode(encode(model), ModelConfig) == model
    assert decode(encode(config), type(config)) == config
    sent = StepInput(
        7, Descriptor("mixed", 16, 8, 16), SHAPE, "processed",
        np.arange(5, dtype=np.int32), np.ones(3, np.int32), np.zeros((0,), np.int32), True,
        new_pages=NewPages(5, *np.arange(16, dtype=np.int32).reshape(4, 4)),
        waiting=np.array([3], np.int64),
    )  # fmt: skip
    came = decode(encode(sent), StepInput)
    for name in ("step_id", "descriptor", "shape", "sampler", "logprobs", "prompt_targets", "loop"):
        assert getattr(came, name) == getattr(sent, name)
    for name in ("batch", "sampling", "processors", "waiting"):
        np.testing.assert_array_equal(getattr(came, name), getattr(sent, name), strict=True)
    for name in ("rows", "columns", "pages", "tenants"):
        np.testing.assert_array_equal(
            getattr(came.new_pages, name), getattr(sent.new_pages, name), strict=True
        )


def test_a_decode_step_of_256_requests_at_128k_is_small():
    shape = StepShape(131072 // 16, 256, 131072, 128256)
    made = padding(Descriptor("decode", 256, 256, 1), shape)
    new = np.zeros(16, np.int32)
    sent = StepInput(
        1, made.descriptor, shape, "filtered", made.batch, sampling_layout(256).allocate(),
        new_pages=NewPages(0, new, new, new, new),
    )  # fmt: skip
    assert len(encode(sent)) < 1 << 16


def test_more_ranks_than_memory_are_refused_before_any_is_started(monkeypatch):
    """256 of them took all memory of a machine, and the system killed others."""
    monkeypatch.setattr(worker, "host_memory", lambda: 4 << 30)
    monkeypatch.setattr(driver, "Subprocesses", None)
    with pytest.raises(ConfigError, match="tensor_parallel_size: got 21, allowed is at most 20"):
        worker.start_ranks("torch", "cpu", 21, print)


def test_calls_reach_all_ranks_and_the_least_counts(monkeypatch):
    ranks = start(monkeypatch)
    try:
        assert ranks.device == DeviceInfo("cpu", "cpu", 99)
        worker, told = worker_of(ranks), []
        worker.load(lambda *x: told.append(x))
        assert set(told) - {("load", 0, 1)} == {("weights", 1, 2), ("weights", 2, 2)}
        assert worker.measure() == 999
        assert worker.page_bytes() == 10
        worker.allocate_kv(12)
        assert worker.warm_up(options()[1].table(), print) == []
        handles = [worker.execute(step(n)) for n in range(1, 9)]
        for n, handle in enumerate(handles, 1):
            output = handle.result()
            assert output.step_id == n
            assert output.tokens.tolist() == [n] * 8
        assert worker.logits(step(9)).tolist() == [[9.0] * 3] * 2
        assert worker.compilations_after_ready() == 5
        pids = ranks.processes
    finally:
        ranks.close()
    assert gone(pids)
    assert not ranks._launcher.folder.exists()


@pytest.mark.slow
def test_only_their_owner_may_enter_the_folder_of_the_sockets(monkeypatch):
    ranks = start(monkeypatch)
    try:
        assert ranks._launcher.folder.stat().st_mode & 0o777 == 0o700
        assert {p.name for p in ranks._launcher.folder.iterdir()} == {"in0", "in1", "out"}
    finally:
        ranks.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("place", "what", "kind", "words"),
    [
        ("result", "raise", RankLost, "failed with ValueError"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("device", "", BackendUnavailable, "planted: no such device"),
                ("load", "raise", RankLost, "failed with ValueError: planted in two lines"),
                ("load", "refuse", BackendUnavailable, "planted: no such device"),
                ("load", "kill", RankLost, "was ended by SIGKILL"),
                ("warm_up", "stop", RankLost, "was stopped for"),
                ("execute", "exit", RankLost, "ended with exit code 3"),
                ("result", "kill", RankLost, "was ended by SIGKILL"),
                ("result", "stop", RankLost, "was stopped for"),
            )
        ),
    ],
)
def test_a_rank_that_fails_ends_all(monkeypatch, rank, place, what, kind, words):
    ranks, began = None, time.monotonic()

    def run():
        nonlocal ranks, began
        ranks = start(monkeypatch, f"{rank},{place},{what}")
        worker = worker_of(ranks)
        began = time.monotonic()
        make_calls(worker)

    with pytest.raises(kind) as caught:
        run()
    if ranks is not None:
        assert gone(ranks.processes)
        ranks.close()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if kind is RankLost:
        assert f"rank {rank}" in str(caught.value)
    assert time.monotonic() - began < LATEST


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_does_not_wait_for_a_rank_that_has_just_ended(monkeypatch, rank):
    """Its end was not noticed yet, and nothing takes what is sent to it."""
    monkeypatch.setattr(driver, "LOOK_S", 2.0)
    ranks = start(monkeypatch)
    try:
        worker = worker_of(ranks)
        os.kill(ranks.processes[rank], signal.SIGKILL)
        time.sleep(0.5)
        caller = ThreadPoolExecutor(1).submit(lambda: worker.execute(step(1)).result())
        with pytest.raises(RankLost, match=f"rank {rank} was ended by SIGKILL"):
            caller.result(LATEST)
    finally:
        ranks.close()


def test_ranks_that_fail_to_close_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(driver, "LOOK_S", 2.0)
    ranks = start(monkeypatch, "*,close,raise")
    worker_of(ranks)
    began = time.monotonic()
    ranks.close()
    assert time.monotonic() - began < driver.PARTING_S - 1
    assert gone(ranks.processes)


def test_ranks_leave_in_peace_before_their_workers_are_made(monkeypatch):
    """As where an engine's start fails by its configuration."""
    ranks = start(monkeypatch)
    ranks.close()
    ranks.close()
    assert [process.returncode for process in ranks._launcher._started] == [0, 0]


def test_a_rank_that_samples_another_token_is_caught(monkeypatch):
    ranks = start(monkeypatch, "1,differ")
    try:
        worker = worker_of(ranks)
        handles = [worker.execute(step(n)) for n in (1, 2, 3)]
        handles[0].result()
        handles[1].result()
        with pytest.raises(RankLost, match="rank 1 has other tokens or another residual"):
            handles[2].result()
    finally:
        ranks.close()


@pytest.mark.slow
def test_tokens_of_padding_may_differ(monkeypatch):
    """The planted one changes the token of request 0: of a step without requests nobody reads
    it.
    """
    ranks = start(monkeypatch, "1,differ")
    try:
        worker = worker_of(ranks)
        for n in (1, 2, 3, 4):
            worker.execute(step(n, requests=0)).result()
    finally:
        ranks.close()


@pytest.mark.slow
def test_another_plan_is_named(monkeypatch):
    ranks = start(monkeypatch, "1,plan")
    try:
        with pytest.raises(ConfigError, match="plan: rank 1 has other, rank 0 has same"):
            worker_of(ranks)
    finally:
        ranks.close()


@pytest.mark.slow
def test_a_rank_that_hangs_is_noticed_where_it_gives_no_answer(monkeypatch):
    ranks = start(monkeypatch, "1,result,hang")
    try:
        worker = worker_of(ranks)
        monkeypatch.setattr(driver, "STEP_S", 1.0)
        handles = [worker.execute(step(n)) for n in (1, 2, 3)]
        handles[0].result()
        handles[1].result()
        with pytest.raises(RankLost, match="gave no answer for 1 s"):
            handles[2].result()
    finally:
        ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["work", "hang holding the lock"])
def test_a_rank_that_gets_no_processor_is_not_silent_and_one_that_hangs_is(what, monkeypatch):
    """Its work is 0.6 s of processor time, of which it gets a thirteenth. One that hangs is noticed
    beside so many too.
    """
    monkeypatch.setattr(driver, "SILENT_S", 3.0)
    monkeypatch.setattr(driver, "QUIET_S", 1.2)
    ranks = start(monkeypatch, f"1,result,{what}")
    try:
        worker = worker_of(ranks)
        ranks.steps_begin()
        with crowded(ranks.processes[1]):
            begin = time.monotonic()
            handle = worker.execute(step(3))
            if what == "work":
                handle.result()
                assert time.monotonic() - begin > 3.0  # else there was nothing to excuse
            else:
                with pytest.raises(RankLost, match=r"rank 1 gave no sign of life for 3 s"):
                    handle.result()
    finally:
        ranks.close()


DRIVER = """
import sys, time
from twinfer.shared.executor.driver import Ranks, Subprocesses
ranks = Ranks("torch", "cpu", 2, Subprocesses({command!r}))
print(*ranks.processes, flush=True)
time.sleep(1000)
"""


PATIENT = (
    DRIVER.replace("time.sleep(1000)", "ranks.steps_begin(); input()")
    + """
for _ in range(20):
    ranks.check()
    time.sleep(0.1)
ranks.close()
print("well", flush=True)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_a_pause_of_all_processes_is_nobodys_silence(order):
    """As of a container, or a terminal: whoever goes on first, and for longer than a rank may be
    silent.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PATIENT.format(command=COMMAND)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [process.pid, *(int(word) for word in process.stdout.readline().split())]
    time.sleep(0.5)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(driver.SILENT_S + 2)
    for pid in pids[::order]:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    out, _ = process.communicate("\n", timeout=60)
    assert out == "well\n"
    assert gone(pids)


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_die_with_the_driver(stopped):
    """Even one that is stopped, which reads nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(command=COMMAND)], stdout=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    if stopped:
        os.kill(pids[1], signal.SIGSTOP)
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(pids)
