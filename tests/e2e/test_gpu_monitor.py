"""Kernels that Triton compiles after a start are counted. Its compiler needs no GPU, so on a CPU
it is the real one.
"""

import pytest
import torch

from twinfer.gpu import monitor
from twinfer.serving.llm import LLM
from twinfer.shared.sampling_params import SamplingParams

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu


@triton.jit
def _doubled(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, 2 * tl.load(x + i))


class Compiles:
    """A driver for Triton that has a compiler's target and no device."""

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compile_kernel(device, monkeypatch, tmp_path):
    """compile_kernel(n): let Triton compile a kernel that is another one for each n, here or for
    a GPU that is not.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    if device == "cuda":
        return lambda n: _doubled[(1,)](torch.zeros(n, device="cuda"), N=n)
    monkeypatch.setattr(triton.runtime.driver, "_active", Compiles())
    return lambda n: _doubled.warmup(torch.float32, N=n, grid=(1,))


def test_kernels_that_triton_compiles_in_a_step_are_counted(device, compile_kernel, monkeypatch):
    small = dict(
        backend="torch", device=device, dtype="float32", max_num_seqs=1, max_num_batched_tokens=16
    )
    with LLM(
        "demo", **small, max_model_len=32, num_pages=4, compilation_config={"level": 0}
    ) as llm:
        worker = llm.engine.worker
        before, fill, wanted = monitor.compilations()["triton"], worker._inputs.fill, []

        def fill_and_compile(*arguments, **options):
            for n in wanted:
                compile_kernel(n)
            return fill(*arguments, **options)

        monkeypatch.setattr(worker._inputs, "fill", fill_and_compile)
        for count, n in enumerate((32, 64, 128), 1):
            wanted[:] = [n]
            llm.generate([[1, 2]], SamplingParams(temperature=0.0, max_tokens=2), progress=False)
            assert monitor.compilations()["triton"] - before == count
            assert worker.compilations_after_ready() == count
        compile_kernel(256)  # by somebody else: no step waited for it
        assert monitor.compilations()["triton"] - before == 4
        assert worker.compilations_after_ready() == 3
