"""A number behind a kind of device: which of this machine's devices an engine runs on."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from twinfer.shared.config import DeviceInfo, EngineConfig, parse_device
from twinfer.shared.errors import BackendUnavailable, ConfigError

from .. import conftest

GB = 1 << 30


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("auto", ("auto", None)),
        ("cpu", ("cpu", None)),
        ("cuda:1", ("cuda", 1)),
        ("tpu:0", ("tpu", 0)),
    ],
)
def test_a_device_is_a_kind_and_a_number(text, parts):
    assert parse_device(text) == parts


@pytest.mark.parametrize(
    "text", ["auto:1", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:99999", "gpu", "", 1, None]
)
def test_other_devices_are_refused(text):
    with pytest.raises(ConfigError, match=r"^device: got "):
        EngineConfig(model="demo", device=text)


def test_a_number_is_one_device():
    EngineConfig(model="demo", device="tpu", tensor_parallel_size=2)
    with pytest.raises(
        ConfigError, match=r"^device: got tpu:1, which is one, and tensor_parallel_size 2"
    ):
        EngineConfig(model="demo", device="tpu:1", tensor_parallel_size=2)


class TwoGpus:
    """What of torch.cuda a worker's place depends on. `current` is the current device."""

    def __init__(self):
        self.current = 0

    def device(self, index):
        owner = self

        class Guard:
            def __enter__(self):
                self.before, owner.current = owner.current, index

            def __exit__(self, *error):
                owner.current = self.before

        return Guard()

    def get_device_properties(self, index):
        return SimpleNamespace(name=f"GPU {index}", total_memory=(index + 1) * GB)


@pytest.fixture
def two_gpus(monkeypatch):
    import torch

    gpus = TwoGpus()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.get_device_properties)
    monkeypatch.setattr(torch.cuda, "device", gpus.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.current)
    return gpus


def test_torch_finds_the_gpu_of_a_number(two_gpus):
    from twinfer.gpu.devices import find_device

    assert find_device("cuda:1") == DeviceInfo("cuda", "GPU 1", 2 * GB, 1)
    assert find_device("cuda:0") == DeviceInfo("cuda", "GPU 0", GB, 0)
    assert find_device("cuda") == find_device("auto") == DeviceInfo("cuda", "GPU 0", GB, 0)
    for device in ("cuda:2", "cpu:1"):
        with pytest.raises(
            BackendUnavailable, match=rf"got {device}, the numbers here go from 0 to"
        ):
            find_device(device)


def test_the_gpu_that_is_current_is_kept(two_gpus, monkeypatch):
    """Where there are several: whatever else runs in the process may choose another one later."""
    import torch

    from twinfer.gpu.devices import find_device
    from twinfer.gpu.one_device import on_device

    two_gpus.current = 1
    device = find_device("cuda")
    assert device == DeviceInfo("cuda", "GPU 1", 2 * GB, 1)
    two_gpus.current = 0
    worker = on_device(device, lambda: Recorder(two_gpus))
    worker.execute(5)
    assert worker.seen == {"made": 1, "execute": 1}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_device("cuda").index is None


class Recorder:
    """A worker that notes which GPU was current in each call."""

    config = "the config"

    def __init__(self, gpus):
        self._gpus = gpus
        self.seen = {"made": gpus.current}

    def __getattr__(self, name):
        def call(*arguments):
            self.seen[name] = self._gpus.current
            return arguments

        return call


def test_every_call_of_a_worker_finds_its_gpu_current(two_gpus):
    from twinfer.gpu.one_device import CALLS, on_device
    from twinfer.shared.worker import Worker

    worker = on_device(DeviceInfo("cuda", "GPU 1", GB, 1), lambda: Recorder(two_gpus))
    assert worker.config == "the config"
    for name in CALLS:
        assert getattr(worker, name)(5) == (5,)
        assert two_gpus.current == 0, f"{name} left another device current"
    assert worker.seen == dict.fromkeys(["made", *CALLS], 1)
    # What is not among them asks only for what is known.
    rest = {name for name in vars(Worker) if not name.startswith("_")} - set(CALLS)
    assert rest == {"page_bytes", "plans", "plan_hash", "compilations_after_ready"}


def test_without_a_number_the_worker_is_left_alone(two_gpus):
    from twinfer.gpu.one_device import on_device

    for device in (DeviceInfo("cuda", "GPU 0", GB), DeviceInfo("cpu", "cpu", GB, 0)):
        assert isinstance(on_device(device, lambda: Recorder(two_gpus)), Recorder)


JAX_PROGRAM = """
import jax
jax.config.update("jax_num_cpu_devices", 3)
from twinfer import LLM, SamplingParams
from twinfer.shared.errors import BackendUnavailable
from twinfer.tpu.platforms import find_device

options = dict(dtype="float32", max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16, page_size=8, num_pages=8,
               decode_sizes=(2,), mixed_sizes=(16,), progress=False)
tokens = []
for device, number in (("cpu", 0), ("cpu:2", 2)):
    with LLM("demo", backend="jax", device=device, **options) as llm:
        output = llm.generate([[305, 288, 8]], SamplingParams(temperature=0, max_tokens=6), progress=False)
        tokens.append(output[0].outputs[0].token_ids)
        worker = llm.engine.worker
        arrays = jax.tree.leaves([worker._weights, worker._kv, worker._state, worker._last_tokens, worker._angles])
        places = {place.id for array in arrays for place in array.devices()}
        assert places == {number}, places
        assert worker.compilations_after_ready() == 0
assert tokens[0] == tokens[1], tokens
try:
    find_device("cpu:3")
except BackendUnavailable as error:
    print(error)
"""


@pytest.mark.slow
def test_jax_runs_on_the_device_of_a_number():
    done = subprocess.run(
        [sys.executable, "-c", JAX_PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "device: got cpu:3, the numbers here go from 0 to 2\n"


def test_a_process_of_the_gpus_suite_has_its_gpu_before_cuda_is_asked(monkeypatch):
    """CUDA reads which GPUs it may use once: asked before, all processes would share the first."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    seen = []
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: not seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    )
    from twinfer.gpu import compile_pool

    for worker in ("gw0", "gw1", "gw2"):
        monkeypatch.setattr(compile_pool, "MOST", 16)
        os.environ["CUDA_VISIBLE_DEVICES"] = "4,7"
        told = {"workerid": worker, "workercount": 3}
        options = SimpleNamespace(getoption=lambda name: "cuda", workerinput=told)
        conftest.pytest_configure(options)
        assert compile_pool.MOST == 5  # they share the machine's processors
    assert seen == ["4", "7", "4"]
