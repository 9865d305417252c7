"""Memory that the torch worker takes and gives back: reserved addresses, what a start keeps, what
an end returns.

On a CPU a driver of the operating system's own plays the virtual memory calls of CUDA: addresses
without memory behind them are as deadly as on a GPU. Tests that may die of them run in a process of
their own.
"""

import ctypes
import dataclasses
import functools
import gc
import mmap
import os
import subprocess
import sys
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from twinfer.gpu import reserved, start_plan, worker
from twinfer.gpu.programs import Programs
from twinfer.gpu.reserved import ReservedCache
from twinfer.ops import resolve
from twinfer.serving.llm import LLM
from twinfer.shared import compilation_config, engine
from twinfer.shared.compilation_config import CUDAGraphMode
from twinfer.shared.config import DeviceInfo
from twinfer.shared.errors import ConfigError, InternalError
from twinfer.shared.sampling_params import SamplingParams

GUARDED = "TWINFER_TEST_GUARDED"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
MAP_FIXED, MAP_NORESERVE, NOTHING = 0x10, 0x4000, 0
ANYWHERE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE


class Driver:
    """The calls of `reserved.py` by mmap, with granules of one page of the host."""

    granule = mmap.PAGESIZE

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        )
        self.libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.ranges, self.memory, self.mappings = {}, {}, {}
        self.calls, self.failing = [], ()

    def call(self, name, *args):
        values = [getattr(x, "value", x) for x in args]
        self.calls.append(name)
        if name in self.failing:
            raise InternalError(f"{name} failed with CUDA driver error 999")
        getattr(self, name)(*values)

    def map_at(self, address, size, flags, file=-1):
        place = self.libc.mmap(address, size, NOTHING, flags, file, 0)
        assert place not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        return place

    def cuMemGetAllocationGranularity(self, out, properties, flags):
        out._obj.value = self.granule

    def cuMemAddressReserve(self, out, size, alignment, address, flags):
        out._obj.value = self.map_at(None, size, ANYWHERE)
        self.ranges[out._obj.value] = size

    def cuMemCreate(self, out, size, properties, flags):
        assert size > 0
        assert size % self.granule == 0
        out._obj.value = os.memfd_create("device")
        os.ftruncate(out._obj.value, size)
        self.memory[out._obj.value] = size

    def cuMemMap(self, address, size, offset, handle, flags):
        assert size == self.memory[handle]
        assert address % self.granule == 0
        taken = (
            place < address + size and address < place + length
            for place, length in self.mappings.items()
        )
        assert not any(taken), "something is mapped there already"
        self.map_at(address, size, mmap.MAP_SHARED | MAP_FIXED, handle)
        self.mappings[address] = size

    def cuMemSetAccess(self, address, size, access, count):
        assert self.libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def cuMemUnmap(self, address, size):
        assert self.mappings.pop(address) == size
        self.map_at(address, size, ANYWHERE | MAP_FIXED)

    def cuMemRelease(self, handle):
        del self.memory[handle]
        os.close(handle)

    def cuMemAddressFree(self, address, size):
        assert not self.mappings
        assert self.ranges.pop(address) == size
        self.libc.munmap(address, size)

    @property
    def empty(self):
        """Whether everything was given back."""
        return not (self.ranges or self.memory or self.mappings)


class Stream:
    """A stream of no device that notes when it was waited for."""

    def __init__(self, driver, name):
        self.driver, self.name = driver, name

    def synchronize(self):
        self.driver.calls.append(self.name)


def host_tensor(address, shape, dtype, device, owner=None):
    """What `graphs.alias_of` does, over memory of the host."""
    size = int(np.prod(shape)) * dtype.itemsize
    block = (ctypes.c_ubyte * size).from_address(address)
    block.owner = owner
    return torch.from_numpy(np.frombuffer(block, np.uint8)).view(dtype).view(shape)


@pytest.fixture
def driver(monkeypatch):
    """A GPU with 8 of 10 GiB free whose memory is the host's."""
    fake = Driver()
    monkeypatch.setattr(reserved, "_call", fake.call)
    monkeypatch.setattr(reserved, "alias_of", host_tensor)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (8 << 30, 10 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: Stream(fake, "default stream"))
    return fake


def in_a_process_of_its_own(wanted):
    """A test for `--device WANTED` whose process's death is its failure."""

    def decorate(test):
        @functools.wraps(test)
        def run(device, **fixtures):
            only_on(device, wanted)
            if os.environ.get(GUARDED) == "1":
                return test(device=device, **fixtures)
            node = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "--device",
                device,
                node,
            ]
            # Not a worker of xdist's, whatever this process is: a plug-in that minds would stop it.
            environment = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith("PYTEST_XDIST")
            }
            environment |= {GUARDED: "1"}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=500
            )
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
            assert "1 passed" in done.stdout

        return run

    return decorate


def only_on(device, wanted):
    if device != wanted:
        pytest.skip(f"needs --device {wanted}")


@pytest.fixture
def as_on_a_gpu(driver, monkeypatch, tmp_path):
    """The options of an engine on the CPU that measures its cache as on a GPU and reserves
    addresses for it.
    """
    measure = worker.TorchWorker.measure

    def on_a_gpu(self):
        here, self.device = self.device, DeviceInfo("cuda", "a GPU", 10 << 30)
        try:
            return measure(self)
        finally:
            self.device = here

    monkeypatch.setattr(worker.TorchWorker, "measure", on_a_gpu)
    # the measured size, as on a GPU
    monkeypatch.setattr(compilation_config, "keeps_code", lambda *_: True)
    small = {
        "backend": "torch",
        "device": "cpu",
        "dtype": "float32",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
    }
    return small | {
        "max_model_len": 128,
        "compilation_config": {"level": 0, "cache_dir": str(tmp_path)},
    }


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, progress=False)]


def check_padding(cache, page, dtype, device):
    """The native op writes rows of padding on a cache with memory for two pages of many, and
    nothing else changes.
    """
    write_kv = resolve("torch", enable=("none",)).bind().write_kv
    slots = torch.tensor([1, -1, 2 * page[0] - 1, -1], dtype=torch.int32, device=device)
    k, v = (
        torch.full((4, page[1] // 2, page[2]), value, dtype=dtype, device=device)
        for value in (1.0, 2.0)
    )
    cache.back(2)
    for layer in cache.layers:
        write_kv(layer, k, v, slots)
    for layer in cache.layers:
        pages = layer[:2].float().cpu()
        found = pages.flatten(0, 1)[:, 0, 0].nonzero().flatten().tolist()
        assert found == [1, 2 * page[0] - 1]
    cache.back(cache.max_pages)
    assert all(
        float(layer[: cache.max_pages].float().sum()) == float(pages.sum())
        for layer in cache.layers
    )


@in_a_process_of_its_own("cpu")
def test_padding_has_a_slot_with_memory(driver, device):
    """Pages smaller than a granule, of an odd size, and larger than one."""
    for page in ((16, 4, 32), (3, 2, 24), (64, 16, 128)):
        cache = ReservedCache(3, 50, page, torch.float32, 0)
        check_padding(cache, page, torch.float32, device)
        for number, layer in enumerate(cache.layers):
            layer[: cache.max_pages] = number
        cache.layers[0][-1, -1] = 9
        assert [float(layer[: cache.max_pages].amax()) for layer in cache.layers] == [0, 1, 2]
        assert [float(layer[: cache.max_pages].amin()) for layer in cache.layers] == [0, 1, 2]
        cache.free()
        assert driver.empty


@pytest.mark.gpu
@in_a_process_of_its_own("cuda")
def test_padding_has_a_slot_with_memory_on_a_gpu(device):
    """Layers of 12.5 MiB, so that no granule of 2 MiB reaches from the pages to the last slot."""
    page = 16, 16, 64
    cache = ReservedCache(2, 400, page, torch.bfloat16, 0)
    check_padding(cache, page, torch.bfloat16, device)
    torch.cuda.synchronize()
    cache.free()


@pytest.mark.slow
@in_a_process_of_its_own("cpu")
def test_native_writes_start_and_serve_on_a_reserved_cache(as_on_a_gpu, device):
    with LLM("demo", **as_on_a_gpu, num_pages=24) as llm:
        assert llm.engine.worker._reserved is None
        want = tokens(llm)
    with LLM("demo", **as_on_a_gpu) as llm:
        assert llm.engine.worker._reserved is not None
        assert tokens(llm) == want


@pytest.mark.gpu
@in_a_process_of_its_own("cuda")
def test_native_writes_start_and_serve_on_a_reserved_cache_on_a_gpu(device, tmp_path):
    """A cache of which a layer is larger than a granule, with every op native; without graphs
    and with them.
    """
    options = {
        "backend": "torch",
        "device": "cuda",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 64,
    }
    options |= {"compile_level": 0, "enable_ops": ("none",)}
    for graphs in (
        {"enforce_eager": True},
        {"enforce_eager": False, "cudagraph_mode": "PIECEWISE"},
    ):
        folder = {"compilation_config": {"cache_dir": str(tmp_path / str(len(graphs)))}}
        with LLM("demo", **options, **graphs, **folder, num_pages=64) as llm:
            want = tokens(llm)
        with LLM("demo", **options, **graphs, **folder) as llm:
            reserved_cache = llm.engine.worker._reserved
            assert llm.engine.worker._kv[0].nbytes > 2 * reserved_cache.granule
            assert tokens(llm) == want


def test_a_cache_goes_back_with_its_last_tensor(driver, device):
    only_on(device, "cpu")
    cache = ReservedCache(2, 20, (16, 4, 32), torch.float32, 0)
    cache.wait_for(Stream(driver, "capture stream"))
    cache.back(20)
    layer = cache.layers[1]
    del cache
    gc.collect()
    layer[:20].fill_(1)
    assert "cuMemUnmap" not in driver.calls
    driver.calls.clear()
    del layer
    gc.collect()
    assert driver.empty
    assert list(dict.fromkeys(driver.calls)) == [
        *("default stream", "capture stream", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree")
    ]


def test_an_engine_that_is_dropped_gives_its_pages_back(as_on_a_gpu, driver, device):
    """With a step in flight, and without `close`."""
    only_on(device, "cpu")
    llm = LLM("demo", **as_on_a_gpu)
    llm.engine.add("r", [1, 2, 3], GREEDY)
    llm.engine.step()
    assert llm.engine._in_flight
    kept = weakref.ref(llm.engine.worker)
    assert not driver.empty
    del llm
    gc.collect()
    assert kept() is None
    assert driver.empty


def test_a_start_that_fails_gives_its_pages_back(as_on_a_gpu, driver, device, monkeypatch):
    """At once: who shows the error holds all that the start has made."""
    only_on(device, "cpu")

    def refuse(*_):
        raise ConfigError(f"{len(driver.memory)} pieces of memory are there")

    monkeypatch.setattr(engine, "Scheduler", refuse)
    with pytest.raises(ConfigError, match=r"^[1-9]") as caught:
        LLM("demo", **as_on_a_gpu)
    assert driver.empty
    del caught


def test_an_engine_is_closed_once(as_on_a_gpu, driver, device):
    only_on(device, "cpu")
    llm = LLM("demo", **as_on_a_gpu)
    held = llm.engine.worker._kv, llm.engine.worker._reserved
    llm.close()
    assert driver.empty
    calls = len(driver.calls)
    llm.close()
    held[1].free()
    del llm, held
    gc.collect()
    assert len(driver.calls) == calls


def test_what_fails_when_a_cache_is_freed_is_raised_by_free_alone(driver, device):
    """A warning about an exception that nobody could catch fails a test here."""
    only_on(device, "cpu")
    cache = ReservedCache(2, 20, (16, 4, 32), torch.float32, 0)
    driver.failing = ("cuMemUnmap",)
    calls = len(driver.calls)
    del cache
    gc.collect()
    assert driver.calls[calls:].count("cuMemUnmap") == 4
    assert not driver.memory
    cache = ReservedCache(2, 20, (16, 4, 32), torch.float32, 0)
    with pytest.raises(InternalError, match="cuMemUnmap failed"):
        cache.free()
    cache.free()


AT_EXIT = """
import atexit
atexit.register(lambda: print(driver.calls[-1]))  # first, so that it runs last
import runpy, sys, torch
from twinfer.gpu import reserved
names = runpy.run_path(sys.argv[1])
driver = names["Driver"]()
reserved._call, reserved.alias_of = driver.call, names["host_tensor"]
torch.cuda.synchronize = lambda *_: None
torch.cuda.default_stream = lambda *_: names["Stream"](driver, "default stream")
cache = reserved.ReservedCache(1, 4, (16, 4, 32), torch.float32, 0)
"""


def test_the_end_of_a_process_leaves_its_memory_to_the_driver(device):
    """At exit the driver's library may be half gone."""
    only_on(device, "cpu")
    command = [sys.executable, "-c", AT_EXIT, __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cuMemSetAccess\n", "")


@pytest.mark.alone
@pytest.mark.gpu
def test_dropped_engines_give_their_memory_back_on_a_gpu(device, tmp_path):
    """With steps in flight, by the collector alone but for torch's own cache, from the second on:
    the first engine loads libraries and kernels.
    """
    only_on(device, "cuda")
    left = []
    for number in range(4):
        config = {"cache_dir": str(tmp_path / str(number))}
        llm = LLM(
            "demo", backend="torch", device="cuda", max_num_seqs=64, compilation_config=config
        )
        cache = llm.engine.worker._reserved
        assert cache.bytes > 20 * cache.granule
        granule = cache.granule
        llm.engine.add("r", [1, 2, 3], GREEDY)
        llm.engine.step()
        assert llm.engine._in_flight
        del llm, cache
        gc.collect()
        torch.cuda.empty_cache()
        left.append(torch.cuda.mem_get_info()[0])
    assert min(left[1:]) >= left[0] - granule, left
    assert float(torch.ones(1000, device="cuda").sum()) == 1000


INTERRUPTED = """
import sys, tempfile, torch
from twinfer.gpu.programs import Programs
from twinfer.gpu.worker import TorchWorker
from twinfer.serving.llm import LLM

workers, build, run, calls = [], TorchWorker.__init__, Programs.run_eagerly, 0

def note(worker, *args, **options):
    workers.append(worker)
    build(worker, *args, **options)

def interrupted(*args, **options):
    global calls
    calls += 1
    torch.cuda._sleep(1 << 30)  # half a second: what follows waits in the queue
    run(*args, **options)
    if calls == int(sys.argv[1]):
        raise KeyboardInterrupt

TorchWorker.__init__, Programs.run_eagerly = note, interrupted
with tempfile.TemporaryDirectory() as folder:
    try:
        LLM("demo", backend="torch", device="cuda", dtype="float32", max_num_seqs=4,
            compilation_config={"cache_dir": folder})
    except KeyboardInterrupt:
        torch.cuda.synchronize()
        print("closed" if workers[0]._module is None else "open", calls)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [1, 3])
def test_an_interrupted_start_is_closed_with_programs_in_flight_on_a_gpu(device, calls):
    """What they read and the code that they are stays until they are done. An access to memory
    that is gone would end the process's use of the GPU.
    """
    only_on(device, "cuda")
    command = [sys.executable, "-c", INTERRUPTED, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, f"closed {calls}\n"), done.stderr


class Recorder:
    """Captures nothing: a replay runs the program again."""

    def __init__(self, log):
        self.log = log

    def synchronize(self):
        self.log.append("waited for")

    @contextmanager
    def recording(self):
        yield
        self.log.append("recorded")

    def capture(self, descriptor, mode, run):
        return run, run()


@pytest.mark.parametrize("captured", [(1, 2, 3), (1,)])
def test_memory_is_measured_once_eager_steps_have_theirs(
    as_on_a_gpu, monkeypatch, device, captured
):
    """The largest steps that no graph holds, on the stream of the steps, when the captures'
    memory has gone back.
    """
    only_on(device, "cpu")
    log = []

    def mode_for_all(compilation, plans):
        graphs = {"cudagraph_mode": CUDAGraphMode.FULL, "cudagraph_mixed_limit": 16}
        return dataclasses.replace(compilation, **graphs, cudagraph_capture_sizes=captured), []

    def logged(owner, name, text):
        function = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args: (log.append(text(*args)), function(*args))[1]
        )

    monkeypatch.setattr(worker, "fit_mode", mode_for_all)
    monkeypatch.setattr(worker, "GraphRecorder", lambda: Recorder(log))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("emptied"))
    logged(torch.cuda, "mem_get_info", lambda *_: "measured")
    for name in ("hidden", "backbone"):
        logged(Programs, name, lambda programs, d, name=name: f"{name} {d.kind} {d.tokens}")
    logged(
        worker.TorchWorker,
        "_prompt_logprobs",
        lambda self, targets, hidden: f"logits {hidden.shape[0]}",
    )
    with LLM("demo", **as_on_a_gpu):
        start = log.index("recorded")
        end = log.index("measured", start)
        decode = [] if captured[-1] == 3 else ["backbone decode 3"]
        assert log[start + 1 : end] == ["emptied", "hidden mixed 16", "logits 16", *decode]
    assert log[-1] == "waited for"


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "NONE"])
def test_the_largest_eager_steps_take_no_memory_after_ready_on_a_gpu(
    device, tmp_path, mode, monkeypatch
):
    """A prompt that fills a step, with log-probabilities: no graph holds those. Measured, and
    from the start plan.
    """
    only_on(device, "cuda")
    # A process's first start leaves code and workspaces on the GPU: its second one may find a
    # class of memory less free.
    monkeypatch.setattr(start_plan, "CLASS", 1 << 40)
    options = {
        "backend": "torch",
        "device": "cuda",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
    }
    options |= {"cudagraph_mode": mode, "enable_prefix_caching": False}
    options |= {"compilation_config": {"cache_dir": str(tmp_path)}}
    prompt = (np.arange(1020) % 2000).tolist()
    ask = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for measured in (True, False):
        with LLM("demo", **options) as llm:
            assert (llm.engine.worker._reserved is not None) is measured
            torch.cuda.synchronize()
            held = torch.cuda.memory_reserved()
            llm.generate([prompt], ask, progress=False)
            assert torch.cuda.memory_reserved() <= held


def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize(
    ("owner", "name", "advice"),
    [
        (worker, "Decoder", "dtype: got float32.*smaller model"),
        (worker, "load_weights", "dtype: got float32.*smaller model"),
        (
            worker.TorchWorker,
            "_build",
            "max_num_batched_tokens: got 16, with max_num_seqs 3.*lower",
        ),
        (ReservedCache, "back", "memory_utilization: got 0.9.*lower memory_utilization"),
    ],
)
def test_a_start_without_memory_says_what_to_lower(
    as_on_a_gpu, monkeypatch, device, owner, name, advice
):
    only_on(device, "cpu")
    if name == "back":  # not for the first page
        first, back = [], owner.back
        monkeypatch.setattr(
            owner, name, lambda *args: no_memory() if first else first.append(back(*args))
        )
    else:
        monkeypatch.setattr(owner, name, no_memory)
    with pytest.raises(ConfigError, match=f"^{advice}.*8.6 of 10.7 GB are free") as raised:
        LLM("demo", **as_on_a_gpu)
    assert "\n" not in str(raised.value)


def test_a_driver_without_memory_is_out_of_memory(monkeypatch, device):
    only_on(device, "cpu")
    driver = SimpleNamespace(cuMemCreate=lambda *_: 2)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: driver)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate"):
        reserved._call("cuMemCreate")
