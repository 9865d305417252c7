"""What holds for every test: CPU devices, strict arrays, no network, few threads, reproducible
examples.

Settings travel as environment variables so that a test that needs no framework loads none, and so
that processes started by a test inherit them. All are defaults: set the variable outside to
override one.
"""

import fcntl
import gc
import os
import shutil
import signal
import tempfile
import time
import warnings
import weakref
import zlib
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    # A promotion or broadcast that nobody wrote down is a bug that only shows as a slow program or
    # a wrong number.
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA: warnings of the C++ side that a CPU run always prints
    # Tensors are tiny: a second thread gains nothing, and waits for a core that another process may
    # hold.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    # A process that is aborted writes the stacks of its threads (processes.py).
    "PYTHONFAULTHANDLER": "1",
}.items():
    os.environ.setdefault(_name, _value)

STARTED = time.monotonic()

# How long examples take is the machine's affair, and no fault of theirs.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# pytest --hypothesis-profile=explore
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda", "tpu"),
        help="where the end-to-end tests run",
    )
    parser.addoption(
        "--share", metavar="WORD:MINUTES", type=share,
        help="begin somewhere, which WORD decides, and start no test after MINUTES: all tests in "
             "turn, word by word",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        os.environ.pop("JAX_PLATFORMS", None)
    if config.getoption("--device") == "tpu":
        check_tpu()
    if config.getoption("--device") == "cuda":
        # Before CUDA is asked for anything: it reads this once, and would keep to the first GPU.
        if (worker := getattr(config, "workerinput", None)) is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of(worker["workerid"], visible_gpus())
            from twinfer.gpu import compile_pool

            # Engines that start at once share the machine's processors and memory.
            compile_pool.MOST //= int(worker["workercount"])
        check_gpu()
        # Both frameworks are in this process: JAX would take three quarters of the memory for
        # itself.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not hasattr(config, "workerinput"):  # xdist's workers inherit what is set here
        # No test writes to the user's own cache folder, whatever an engine keeps there by default.
        os.environ["XDG_CACHE_HOME"] = _temporary_folder(config, "caches-")
        # Inductor knows an operator by its name: it would run code of another commit, whose
        # operator had other parameters. Engines have folders by commit (gpu/backend.py).
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = _temporary_folder(config, "inductor-")
    if not hasattr(config, "workerinput") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # XLA programs are shared by all tests of a run: the same small engines are built many
        # times. JAX reads this when it is imported, so it is set before any test. A folder of one's
        # own is shared by runs as well.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = _temporary_folder(config, "xla-cache-")
        # Only a folder with a largest size is locked: without, one worker reads what another has
        # half written.
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(64 << 30))
        # With a largest size, each new entry makes JAX read the times of all that are there: of
        # some thousands, longer than it takes to compile what is small.
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def share(text: str) -> tuple[str, float]:
    """A word, such as a commit, and minutes."""
    word, _, minutes = text.rpartition(":")
    return word, float(minutes)


def in_turn(tests: list[pytest.Item], word: str) -> list[pytest.Item]:
    """The tests, in an order that looks random and is always the same, from a place on that `word`
    decides.

    Neighbours are not of one file, so that a share is a sample of everything.
    """
    tests = sorted(tests, key=lambda test: zlib.crc32(test.nodeid.encode()))
    start = zlib.crc32(word.encode()) % max(1, len(tests))
    return tests[start:] + tests[:start]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start no test when the time of a share is over. What has no turn is counted as skipped,
    never as passed.
    """
    wanted = item.config.getoption("--share")
    if wanted is not None and time.monotonic() > STARTED + 60 * wanted[1]:
        pytest.skip("the time of this share is over")


def _temporary_folder(config: pytest.Config, prefix: str) -> str:
    """A folder that goes with the run."""
    folder = tempfile.mkdtemp(prefix=prefix)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    return folder


def visible_gpus() -> list[str]:
    """The names of the GPUs that this process may use."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def gpu_of(worker: str, gpus: list[str]) -> str:
    """The one GPU that one of xdist's workers sees: they are dealt out in turn."""
    return gpus[int(worker.removeprefix("gw")) % len(gpus)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test that is marked `alone` have its GPU alone, where processes share one."""
    if item.config.getoption("--device") != "cuda" or not hasattr(item.config, "workerinput"):
        return (yield)
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    shares = item.get_closest_marker("alone") is None
    with open(os.path.join(os.environ["XDG_CACHE_HOME"], f"gpu-{gpu}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shares else fcntl.LOCK_EX)
        return (yield)


def check_gpu() -> None:
    """Raise UsageError where torch has no GPU: a run of skipped tests would look like one that
    passed.
    """
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(
            "--device cuda: torch finds no CUDA device on this machine, so nothing would be tested"
        )


def check_tpu() -> None:
    """Raise UsageError where JAX has no TPU: it would take the CPU, and the run would look like one
    that a TPU has passed.
    """
    import jax

    try:
        jax.devices("tpu")
    except RuntimeError as error:
        raise pytest.UsageError(
            f"--device tpu: JAX finds no TPU on this machine, so nothing would be tested ({error})"
        ) from None


NEED_A_GPU = {"cuda", "kernels"}
"""Fixtures that only a GPU can fill, or fills with the real thing."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Every test that asks for a GPU is in the GPU's suite, so that none can be left out of it.

    When `-m` has selected, put the tests of a share in their order.
    """
    for item in items:
        if NEED_A_GPU & set(getattr(item, "fixturenames", ())):
            item.add_marker("gpu")
    yield
    if (wanted := config.getoption("--share")) is not None:
        items[:] = in_turn(items, wanted[0])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: a million objects, which live as long as the
    run. No later collection visits them either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device of the end-to-end tests."""
    return str(request.config.getoption("--device"))


@pytest.fixture
def cuda(device: str) -> str:
    """The device of a test that only a GPU can run."""
    if device != "cuda":
        pytest.skip("needs a GPU: --device cuda")
    return device


@pytest.fixture
def registries() -> Iterator[None]:
    """What plug-ins may change in a process, all put back afterwards. What engines bring along is
    there before: it registers once, when it is imported, and would be gone for all tests behind.
    """
    from twinfer.ops import REGISTRY, resolve
    from twinfer.ops.implement import IMPLEMENTATIONS
    from twinfer.ops.plan import _defaults
    from twinfer.shared.models.stages import _replaced
    from twinfer.shared.worker import backend_module

    for backend in ("torch", "jax"):
        backend_module(backend, "plans")
        resolve(backend)
    kept: list[tuple[dict, dict]] = [(known, dict(known)) for known in IMPLEMENTATIONS.values()]
    kept += [(each, dict(each)) for each in (IMPLEMENTATIONS, REGISTRY.ops, _defaults, _replaced)]
    yield
    for each, before in kept:
        each.clear()
        each.update(before)


@pytest.fixture(autouse=True, scope="session")
def _precision_of_a_worker(device: str) -> None:
    """On a GPU, round products as every worker does from its start: no test shall depend on
    which one ran before it.
    """
    if device == "cuda":
        from twinfer.gpu.precision import pin_precision

        pin_precision()


@pytest.fixture(autouse=True)
def _all_closed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let what a slow test has left open be its own error, and not that of a test after it:
    warnings are errors, also those of objects that are collected at some time.
    """
    yield
    if request.node.get_closest_marker("slow") is not None:
        gc.collect()


@pytest.fixture(autouse=True)
def _interrupts_raise():
    """As in a terminal, also where tests run in the background, with SIGINT ignored; their
    processes inherit it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _gpu_left_as_found(device: str, monkeypatch: pytest.MonkeyPatch):
    """After a test on a GPU: its engines are closed, their memory is free, and torch refuses no
    call.
    """
    if device != "cuda":
        yield
        return
    import torch

    from twinfer.shared.engine import Engine

    started, init = [], Engine.__init__

    def note(engine, *args, **options):
        started.append(weakref.ref(engine))  # a test may show that an engine goes by itself
        init(engine, *args, **options)

    monkeypatch.setattr(Engine, "__init__", note)
    yield
    for engine in (reference() for reference in started):
        if (
            engine is not None
            and not getattr(engine, "_closed", False)
            and hasattr(engine, "worker")
        ):
            engine.worker.close()
    if started:
        started.clear()
        gc.collect()
        torch.cuda.empty_cache()
    with warnings.catch_warnings(action="ignore"):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
    assert mode == 0, "the test left torch refusing calls that wait for the GPU"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print which case saw each mutant of an op (`test_ops_contracts.py`): a line an op, with -v a
    line a mutant.

    The rows travel as properties of the tests' reports, which xdist brings home from its workers.
    """
    reports = [
        report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)
    ]
    rows = [
        row
        for report in reports
        for name, value in report.user_properties
        if name == "mutants"
        for row in value
    ]
    if not rows or config.get_verbosity() < -1:
        return
    seen, everyone = (
        {(op, mutant) for op, mutant, _, by in rows if by or whole} for whole in (False, True)
    )
    terminalreporter.section(f"mutants: {len(seen)} of {len(everyone)} rejected")
    for op in sorted({op for op, *_ in rows}):
        mine = [row[1:] for row in rows if row[0] == op]
        if config.get_verbosity() < 1:
            terminalreporter.write_line(f"{op:26} {_by_dtype(mine)}")
            continue
        for mutant, dtype, by in mine:
            what = f"{by[0]:8}{by[1]:9.3g}  {by[2]}" if by else "-"
            terminalreporter.write_line(f"{op:24} {mutant:44.44} {dtype:9} {what}")


def _by_dtype(rows: list[tuple[str, str, tuple[str, float, str] | None]]) -> str:
    """How many mutants are rejected in each dtype, and the one that is seen least clearly."""
    parts = []
    for dtype in dict.fromkeys(dtype for _, dtype, _ in rows):
        mine = [(by[1], mutant) if by else None for mutant, other, by in rows if other == dtype]
        seen = [found for found in mine if found]
        least = f", least {min(seen)[0]:.3g} ({min(seen)[1]:.28})" if seen else ""
        parts.append(f"{dtype} {len(seen)}/{len(mine)}{least}")
    return "; ".join(parts)
