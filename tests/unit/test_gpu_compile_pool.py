"""Processes that compile kernels for a start: what they bring, and how they and it end."""

import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from twinfer.gpu import compile_pool, compile_process
from twinfer.gpu.compile_pool import CompilePool, make_pool
from twinfer.gpu.compile_process import Job, encode
from twinfer.gpu.kernel_keys import settle_own_keys
from twinfer.gpu.precompile import compile_together, kernels_noted
from twinfer.ops.cases.generators import generator
from twinfer.ops.cases.sampling import _penalty_arguments
from twinfer.ops.namespaces.torch_ import from_numpy

from ..processes import children, is_running

triton = pytest.importorskip("triton")

GUARD_S = 120.0
NAMES = ["clear_kernel", "count_kernel", "penalty_kernel", "bias_kernel"]
HANGS = """
import os, time
from twinfer.gpu import compile_process

def answer(job):
    if job.name == "count_kernel":
        print(os.getpid(), file=open({path!r}, "w"), flush=True)
        time.sleep(1000)
    return compile_process.Answer(job.name)

compile_process._answer, compile_process._prepare = answer, lambda: None
compile_process.main()
"""
"""Processes that answer but for one kernel, and tell the number of the one that has it."""


def wait_for(done):
    deadline = time.monotonic() + GUARD_S
    while not (found := done()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def read(path):
    return path.exists() and path.read_text().strip()


@pytest.fixture
def started():
    """The processes that a test has started, and their forks: none may be left of them."""
    before, seen = {*children(os.getpid())}, set()

    def running():
        new = {*children(os.getpid())} - before
        seen.update(new, *(children(pid) for pid in new))
        return {pid for pid in seen if is_running(pid)}

    yield running
    wait_for(lambda: not running())


@pytest.fixture
def noted(driver):
    """Four small kernels."""
    from twinfer.gpu.kernels import sampling

    arguments = _penalty_arguments(generator("pool"), 16, 5_000, 300, 7)
    with kernels_noted() as found:
        sampling.penalties(**{name: from_numpy(x) for name, x in arguments.items()})
    assert [kernel.fn.__name__ for kernel in found.values()] == NAMES
    return found


@pytest.fixture
def hanging(tmp_path, monkeypatch, noted, asked):
    """A pool of two processes, one of which hangs while all others have answered; its number."""
    path = tmp_path / "hangs"
    command = (sys.executable, "-P", "-c", HANGS.format(path=str(path)))
    monkeypatch.setattr(compile_pool, "COMMAND", command)
    pool = asked(noted)
    number = int(wait_for(lambda: read(path)))
    wait_for(lambda: len(pool._shared.answers) == 3)
    return pool, number


@pytest.fixture
def asked(started):
    """Makes pools of two processes that are told of kernels."""
    pools = []

    def make(noted):
        pools.append(CompilePool(2))
        for (_, data), kernel in noted.items():
            pools[-1].ask(kernel, data)
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def names(noted, compiled):
    return {noted[key].fn.__name__ for key in compiled}


def compile_all(noted, pool=None):
    """How many of the kernels are compiled here, and their code."""
    found = []
    settle_own_keys()  # as a worker does
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    try:
        compile_together(noted, lambda done: None, pool)
    finally:
        triton.knobs.compilation.listener = None
    code = {}
    for kernel in noted.values():
        for device, (made, *_) in kernel.device_caches.items():
            for key, each in made.items():
                code.setdefault(device, {})[kernel.fn.__name__, str(key)] = each.asm["cubin"]
    return found.count(False), code


def test_processes_compile_what_the_engine_would(
    driver, noted, asked, started, forget_keys, monkeypatch, tmp_path
):
    """The engine finds all of it, by the keys that it has itself, and compiles nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "processes"))
    forget_keys()
    pool, progress = asked(noted), []
    compiled = pool.wait(noted, progress.append)
    assert names(noted, compiled) == {*NAMES}
    assert progress[-1] == 4
    count, code = compile_all(noted, pool)
    assert count == 0
    wait_for(lambda: not started())
    first, driver.device = driver.device, "here"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "threads"))
    count, code = compile_all(noted)
    assert count == 4
    assert code[first] == code["here"]
    kept = [{path.name for path in (tmp_path / x).iterdir()} for x in ("processes", "threads")]
    assert kept[0] == kept[1]


def test_another_key_is_said(driver, noted, monkeypatch, tmp_path, caplog):
    """It would be compiled twice, unseen but for the time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pool = SimpleNamespace(wait=lambda noted, progress: dict.fromkeys(noted, "another"))
    with caplog.at_level("INFO", "twinfer.gpu"):
        compile_all(noted, pool)
    assert len([message for message in caplog.messages if "compiled twice" in message]) == 4


@pytest.mark.parametrize("command", [("/no/such/program",), (sys.executable, "-c", "")])
def test_the_engine_compiles_where_no_process_does(
    noted, asked, started, monkeypatch, tmp_path, command, caplog
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_pool, "COMMAND", command)
    pool = asked(noted)
    with caplog.at_level("INFO", "twinfer.gpu"):
        count, _ = compile_all(noted, pool)
    assert count == 4
    assert "processes compiled 0 of 4 kernels" in caplog.messages
    wait_for(lambda: not started())


def test_the_engine_compiles_where_no_socket_can_be_had(noted, asked, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = [socket.socketpair()]

    def limited():
        if not made:
            raise OSError(errno.EMFILE, "Too many open files")
        return made.pop()

    monkeypatch.setattr(compile_pool.socket, "socketpair", limited)
    first, second = made[0]
    count, _ = compile_all(noted, asked(noted))
    assert count == 4
    assert first.fileno() == second.fileno() == -1  # closed


def test_a_process_that_is_killed_costs_its_kernel_alone(noted, hanging, started):
    pool, number = hanging
    os.kill(number, signal.SIGKILL)
    compiled = pool.wait(noted, lambda done: None)
    assert names(noted, compiled) == {*NAMES} - {"count_kernel"}
    wait_for(lambda: not started())


def test_an_engine_that_no_signal_of_a_pipe_may_end():
    """As where a program has SIGPIPE do what it does to programs of the shell."""
    code = """
import signal, sys
from types import SimpleNamespace
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
from twinfer.gpu import compile_pool
compile_pool.COMMAND = (sys.executable, "-c", "")
pool = compile_pool.CompilePool(2)
pool._shared.process.wait()
pool._target = "cuda", 90, 32
name = f"{compile_pool.KERNELS}.some_kernel"
kernel = SimpleNamespace(fn=SimpleNamespace(__module__=name, __qualname__="kernel"), src="")
pool.ask(kernel, "{}")
print(pool.wait({(id(kernel), "{}")}, lambda done: None))
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["{}"]


def test_the_engine_compiles_what_no_thread_can_ask_for(noted, asked, monkeypatch, tmp_path):
    """As where the threads of a container are limited."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(compile_pool.threading.Thread, "start", fail)
        pool = asked(noted)
    count, _ = compile_all(noted, pool)
    assert count == 4


def test_a_process_that_hangs_is_given_up(noted, hanging, started, monkeypatch):
    pool, number = hanging
    monkeypatch.setattr(compile_pool, "PATIENCE_S", 0.1)
    os.kill(number, signal.SIGSTOP)
    compiled = pool.wait(noted, lambda done: None)
    assert names(noted, compiled) == {*NAMES} - {"count_kernel"}
    wait_for(lambda: not started())


def test_a_process_that_ends_late_and_is_waited_for_elsewhere(asked, started, monkeypatch):
    """By a program that waits for whatever it has started."""
    pool = asked({})
    process = pool._shared.process
    wait = process.wait

    def late(timeout=None):
        code = wait()
        if timeout is None:
            return code
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(process, "wait", late)
    pool.close()
    wait_for(lambda: not started())


def test_what_is_not_needed_is_not_waited_for(noted, hanging):
    """As arrays without data may ask for kernels that no program launches."""
    pool, _ = hanging
    needed = {key for key, kernel in noted.items() if kernel.fn.__name__ != "count_kernel"}
    assert names(noted, pool.wait(needed, lambda done: None)) == {*NAMES} - {"count_kernel"}


def test_a_pool_that_is_dropped_ends(started):
    pool = CompilePool(2)
    wait_for(lambda: len(started()) == 3)
    del pool
    gc.collect()
    wait_for(lambda: not started())


def test_a_fork_that_exits_leaves_the_engine_its_processes():
    """Of a user's program: what runs as it exits would end the pool's connections, and might wait
    for a lock that nobody there gives back.
    """
    code = """
import os, sys, time
from twinfer.gpu.compile_pool import CompilePool
pool = CompilePool(2)
print(pool._shared.process.pid, flush=True)
sys.stdin.readline()
with pool._shared.changed:
    fork = os.fork()
    if not fork:
        try:
            pool._end()
        finally:
            os._exit(0)
os.waitpid(fork, 0)
time.sleep(0.5)
print(pool._shared.serving, flush=True)
time.sleep(1000)
"""
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as engine:
        first = int(engine.stdout.readline())
        forks = wait_for(lambda: len(children(first)) == 2 and children(first))
        print(file=engine.stdin, flush=True)
        assert engine.stdout.readline() == "2\n"
        assert all(is_running(pid) for pid in (first, *forks))
        engine.kill()
    wait_for(lambda: not any(is_running(pid) for pid in (first, *forks)))


def test_processes_end_with_the_engine_that_is_killed():
    code = """
import time
from twinfer.gpu.compile_pool import CompilePool
pool = CompilePool(2)
print(pool._shared.process.pid, flush=True)
time.sleep(1000)
"""
    engine = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
    with engine:
        first = int(engine.stdout.readline())
        forks = wait_for(lambda: len(children(first)) == 2 and children(first))
        engine.kill()
    wait_for(lambda: not any(is_running(pid) for pid in (first, *forks)))


def test_processes_end_well_where_a_program_does_not_wait_for_its_own():
    """A signal that is ignored is ignored in what is started, too."""
    ours, theirs = socket.socketpair()
    code = f"""
import os, signal
from twinfer.gpu import compile_pool
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(compile_pool.COMMAND[0], (*compile_pool.COMMAND, "{theirs.fileno()}"))
"""
    command = [sys.executable, "-P", "-c", code]
    with ours, theirs:
        subprocess.run(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], check=True)


@pytest.mark.parametrize("ends", ["its input", "the process that forked it"])
def test_a_process_ends_amid_a_kernel(tmp_path, ends):
    """With what it has called, once nobody waits for it."""
    told = tmp_path / "told"
    (tmp_path / "hanging_kernel.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"print(child.pid, file=open({str(told)!r}, 'w'), flush=True)\n"
        "time.sleep(1000)\n"
    )
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        (*compile_pool.COMMAND, str(theirs.fileno())),
        stdin=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        start_new_session=True,
    )
    theirs.close()
    with process, ours:
        ours.sendall(encode(Job("hanging_kernel", "kernel", "", ("cuda", 90, 32))))
        called = int(wait_for(lambda: read(told)))
        if ends == "its input":
            process.stdin.close()
            assert process.wait(GUARD_S) == 0
        else:
            process.kill()
            ours.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: not is_running(called))


def test_a_kernel_that_does_not_compile_fails_as_it_does_alone(
    noted, asked, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (kernel, data) = next((kernel, data) for (_, data), kernel in noted.items())
    broken = json.loads(data)
    broken["options"]["num_warps"] = 3
    broken = {(id(kernel), json.dumps(broken)): kernel}
    pool = asked(broken)
    with caplog.at_level("INFO", "twinfer.gpu"):
        compile_together(broken, lambda done: None, pool)
    (answer,) = pool._shared.answers.values()
    assert "num_warps" in answer.error
    (message,) = [message for message in caplog.messages if "not compiled yet" in message]
    assert "num_warps" in message


def test_kernels_from_elsewhere_are_the_engine_s(asked):
    pool = asked({})
    kernel = SimpleNamespace(fn=SimpleNamespace(__module__="elsewhere.kernels"), src="")
    pool.ask(kernel, "{}")
    assert pool.wait({(id(kernel), "{}")}, lambda done: None) == {}


def test_kernels_are_told_when_they_are_noted(driver):
    told = []
    with kernels_noted(lambda kernel, data: told.append((id(kernel), data))) as noted:
        from twinfer.gpu.kernels import sampling

        arguments = _penalty_arguments(generator("pool"), 16, 5_000, 300, 7)
        sampling.penalties(**{name: from_numpy(x) for name, x in arguments.items()})
    assert told == [*noted]


@pytest.mark.parametrize(
    ("processors", "memory", "ranks", "size"),
    [(64, 1 << 40, 1, 16), (16, 1 << 40, 1, 15), (16, 1 << 40, 4, 3), (8, 1 << 31, 1, 4),
     (2, 1 << 40, 1, 0), (8, 1 << 40, 4, 0), (8, 1 << 29, 1, 0)],
)  # fmt: skip
def test_size_of_a_pool(monkeypatch, processors, memory, ranks, size):
    """By processors, of which the engine keeps one, and memory, which the ranks of a machine share;
    a single process gains nothing.
    """
    sizes = []
    monkeypatch.setattr(compile_pool, "MOST", 16)
    monkeypatch.setattr(compile_pool, "CompilePool", sizes.append)
    monkeypatch.setattr(compile_pool, "processors_of", lambda pid: processors)
    monkeypatch.setattr(compile_pool, "_available", lambda: memory)
    make_pool(ranks)
    assert sizes == ([size] if size else [])


@pytest.mark.parametrize(
    ("name", "value"), [("executable", None), ("executable", ""), ("frozen", True)]
)
def test_no_pool_where_python_is_part_of_a_program(monkeypatch, name, value):
    """Which would start itself again, or have nothing to start."""
    monkeypatch.setattr(compile_pool, "processors_of", lambda pid: 16)
    monkeypatch.setattr(compile_pool, "_available", lambda: 1 << 40)
    monkeypatch.setattr(compile_pool, "CompilePool", lambda count: count)
    assert make_pool(1) == 15
    monkeypatch.setattr(sys, name, value, raising=False)
    assert make_pool(1) is None


@pytest.mark.parametrize(
    ("told", "limit", "size"),
    [
        ("MemTotal: 9 kB\nMemAvailable:  8 kB\n", "max\n", 8 << 10),
        ("", "64\n", 16),
        ("?", None, None),
    ],
)
def test_memory_that_processes_may_take(told, limit, size, tmp_path):
    (tmp_path / "meminfo").write_text(told)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert compile_pool._available(tmp_path, tmp_path) == (size or sys.maxsize)


def test_a_start_compiles_what_its_programs_launch(
    driver, asked, forget_keys, monkeypatch, tmp_path
):
    """As a worker does; behind it each launch finds its kernel."""
    from twinfer.gpu.kernels import sampling
    from twinfer.gpu.worker import TorchWorker

    forget_keys()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    arguments = _penalty_arguments(generator("start"), 16, 5_000, 300, 7)
    tensors = {name: from_numpy(x) for name, x in arguments.items()}
    told, forgotten = [], []
    worker = SimpleNamespace(
        _pool=asked({}),
        _run_eagerly=lambda d: sampling.penalties(**tensors),
        _programs=SimpleNamespace(forget=lambda: forgotten.append(True)),
        _progress=lambda *progress: told.append(progress),
    )
    settle_own_keys()
    TorchWorker._compile_kernels(worker, ["a program", "another"])
    assert forgotten
    assert told == sorted(told)
    assert told[-1] == ("kernels", 4, 4)
    assert not driver.launches
    monkeypatch.setattr("triton.compiler.compile", None)
    sampling.penalties(**tensors)
    assert driver.launches == NAMES


def test_a_process_imports_no_torch():
    """Which takes it seconds, for each start and process."""
    code = """
import sys
from importlib import import_module
from pathlib import Path
from twinfer.gpu.compile_process import KERNELS, bypass_package
bypass_package(KERNELS)
for path in Path(sys.modules[KERNELS].__path__[0]).glob("*kernel*.py"):
    import_module(f"{KERNELS}.{path.stem}")
print("triton" in sys.modules, "torch" in sys.modules)
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_process_runs_no_code_that_an_isolated_engine_would_not(tmp_path):
    """With `python -I` the environment and the user's folder name none."""
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('run')")
    code = """
import subprocess, sys
from twinfer.gpu.compile_pool import COMMAND
sys.exit(subprocess.call(COMMAND, stdin=subprocess.DEVNULL))
"""
    command = [sys.executable, "-I", "-c", code]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True)


def test_a_launcher_that_does_not_compile_is_left_to_the_engine(monkeypatch, capsys):
    from triton.backends.nvidia import driver

    def fail(source, metadata):
        raise OSError("no compiler")

    monkeypatch.setattr(driver, "make_launcher", fail, raising=False)
    monkeypatch.setattr(driver, "CudaLauncher", fail)
    compile_process._compile_launcher(SimpleNamespace(src=None, metadata=None, name="a kernel"))
    assert "no compiler" in capsys.readouterr().err


@pytest.mark.parametrize("behind", ["the pool", "what the worker measures"])
def test_a_start_that_fails_ends_the_pool(monkeypatch, behind):
    from twinfer.gpu import worker
    from twinfer.serving.llm import LLM
    from twinfer.shared import engine

    def interrupted(*_):
        raise KeyboardInterrupt

    ended = []
    pool = SimpleNamespace(ask=None, close=lambda: ended.append(True))
    monkeypatch.setattr(worker, "make_pool", lambda ranks: pool)
    monkeypatch.setattr(worker, "call_kernels", lambda *_: None)
    monkeypatch.setattr(worker.TorchWorker, "_kernels_missing", lambda made: True)
    if behind == "the pool":
        monkeypatch.setattr(worker, "load_weights", interrupted)
    else:
        monkeypatch.setattr(engine, "Scheduler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM("demo", backend="torch", device="cpu", max_model_len=32, max_num_seqs=1, progress=False)
    assert ended == [True]


def test_a_worker_that_is_not_made_has_no_pool(monkeypatch):
    """An interrupt is kept by who shows where it came, and with it the worker."""
    from twinfer.gpu import worker

    def interrupted(*_):
        raise KeyboardInterrupt

    ended = []
    pool = SimpleNamespace(ask=None, close=lambda: ended.append(True))
    monkeypatch.setattr(worker, "make_pool", lambda ranks: pool)
    monkeypatch.setattr(worker, "call_kernels", interrupted)
    made = object.__new__(worker.TorchWorker)
    made._kept_in = made.config = made._plans = made._pool = None
    with pytest.raises(KeyboardInterrupt):
        made._begin_kernels(None, None)
    assert ended
