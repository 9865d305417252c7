"""What several tests of kernels need."""

import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def kernels(device):
    """The room of the kernels, where they run in this process."""
    pytest.importorskip("triton")
    from twinfer.gpu.kernels import launch
    from twinfer.gpu.precision import pin_precision

    if not launch.supported() or (device == "cpu") != launch.INTERPRETED:
        pytest.skip("run by test_in_the_interpreter, in a process of its own")
    # As every worker does, for its process: where a kernel hands over to cuBLAS, that keeps to
    # float32 too.
    pin_precision()
    return launch


@pytest.fixture
def hopper(monkeypatch):
    """What the kernels' launches ask of the chip is answered as by one of compute capability 9.0."""
    import torch

    from twinfer.gpu.kernels import counters, launch

    if launch.INTERPRETED:
        pytest.skip("the interpreter has taken the compiler's place")
    monkeypatch.setattr(launch, "capability", lambda: (9, 0))
    for module in (
        "attention",
        "sampling",
        "moe",
        "moe_narrow",
        "narrow",
        "reduce",
        "gemv",
        "rows",
    ):
        monkeypatch.setattr(f"twinfer.gpu.kernels.{module}.processors", lambda: 132)
    for module in ("attention", "sampling", "narrow", "gemv"):
        monkeypatch.setattr(
            f"twinfer.gpu.kernels.{module}.counters",
            lambda device: torch.zeros(counters.COUNTERS, dtype=torch.int32),
        )
    for cached in (launch.overlap, launch.hopper):
        cached.cache_clear()
    yield
    for cached in (launch.overlap, launch.hopper):
        cached.cache_clear()


class Loaded:
    """A driver of Triton for a GPU that is not there: it takes compiled kernels and counts their
    launches.
    """

    def __init__(self, device):
        self.device, self.launches = device, []
        self.utils = SimpleNamespace(
            load_binary=lambda name, *_: (name, name, 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        )

    def launcher_cls(self, source, metadata):
        return lambda *_: self.launches.append(metadata.name)

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def driver(hopper, monkeypatch, request):
    from triton.runtime import driver

    # Kernels keep what they have compiled by device: each test has its own.
    loaded = Loaded(request.node.name)
    monkeypatch.setattr(driver, "_active", loaded)
    return loaded


@pytest.fixture
def forget_keys():
    """Lets all functions of Triton that the torch worker has be without digests, as in a process
    that begins; gives them by name.
    """
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from twinfer.gpu import kernels, step_kernels  # noqa: F401
    from twinfer.gpu.kernels import launch

    if launch.INTERPRETED:
        pytest.skip("the interpreter has taken the compiler's place")

    def forget():
        found = {}
        for name in [name for name in sys.modules if name.startswith("twinfer.gpu.")]:
            for each in vars(sys.modules[name]).values():
                if isinstance(each, JITFunction):
                    each.hash, each.used_global_vals = None, {}
                    found[each.fn.__module__, each.fn.__qualname__] = each
        return found

    return forget
