"""Two engines of the torch worker in one process: one starts or serves while a step of the other is
under way.

On a CPU the kernels run in Triton's interpreter, in a process of its own, and the second engine
runs in the middle of a kernel of the first.
"""

import os
import subprocess
import sys
import threading
from importlib.util import find_spec

import pytest

from twinfer.serving.llm import LLM
from twinfer.shared.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
PROMPT = [(7 * i) % 2000 for i in range(70)]
"""Long enough for its slots to be split among programs."""


def tokens(llm, prompts, count):
    asked = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, asked, progress=False)]


def in_a_thread(work):
    """A thread that does `work`, and a function that waits for it and returns what it returned."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()

    def result():
        thread.join()
        (value,) = results
        return value

    return thread, result


@pytest.mark.slow
def test_an_engine_beside_a_kernel_of_another_changes_no_token(device):
    if device != "cpu":
        pytest.skip("the interpreter stands in for a GPU")
    if os.environ.get("TRITON_INTERPRET") != "1":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert "1 passed" in done.stdout
        return
    from triton.runtime import interpreter

    kernels = {"paged_attention": ("triton",), "greedy_sample": ("triton",)}
    options = {
        "backend": "torch",
        "device": "cpu",
        "dtype": "float32",
        "compile_level": 0,
        "op_priority": kernels,
    }
    options |= {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 80,
        "max_model_len": 96,
        "num_pages": 6,
    }
    builder = interpreter.InterpreterBuilder
    count, calls, beside = builder.create_atomic_rmw, [], []

    def count_and_start_an_engine(self, *args):
        result = count(self, *args)
        calls.append(threading.get_ident())
        # The first is of the prompt's sampler. The second is of the first token's attention: one of
        # two parts is there.
        if len(calls) == 2:
            grid, index = self.grid_dim, self.grid_idx
            beside.append(
                in_a_thread(lambda: tokens(LLM("demo", progress=False, **options), [PROMPT], 2))[
                    1
                ]()
            )
            self.grid_dim, self.grid_idx = grid, index
        return result

    with LLM("demo", progress=False, **options) as llm:
        alone = tokens(llm, [PROMPT], 2)
        builder.create_atomic_rmw = count_and_start_an_engine
        try:
            assert tokens(llm, [PROMPT], 2) == alone
        finally:
            builder.create_atomic_rmw = count
        assert beside == [alone]
        assert calls.count(calls[0]) > 4, "the slots were not split"


@pytest.mark.gpu
def test_an_engine_that_starts_beside_another_changes_no_token_on_a_gpu(device, tmp_path):
    """One generates without a pause while others start in another thread, and then beside them.

    No prefix is kept: where the first steps of a run are shorter, others decode beside them, and
    in bfloat16 the parts that slots are divided into then tell in the last bit.
    """
    if device != "cuda":
        pytest.skip("needs --device cuda")
    options = {
        "backend": "torch",
        "device": "cuda",
        "max_num_seqs": 16,
        "num_pages": 512,
        "progress": False,
        "enable_prefix_caching": False,
    }
    options["compilation_config"] = {"cache_dir": str(tmp_path)}
    prompts = [PROMPT[i:] + PROMPT * 3 for i in range(12)]
    with LLM("demo", **options) as llm:
        alone = tokens(llm, prompts, 40)
        assert tokens(llm, prompts, 40) == alone, "without any other engine"
        rounds = 0
        for _ in range(3):
            thread, other = in_a_thread(lambda: LLM("demo", **options))
            while thread.is_alive() or not rounds:
                assert tokens(llm, prompts, 40) == alone
                rounds += 1
            with other() as second:
                thread, found = in_a_thread(
                    lambda second=second: [tokens(second, prompts, 40) for _ in range(5)]
                )
                while thread.is_alive():
                    assert tokens(llm, prompts, 40) == alone
                assert found() == [alone] * 5
        assert rounds > 3


@pytest.mark.gpu
def test_launches_on_two_streams_do_not_count_together_on_a_gpu(device):
    """Products whose columns are split among programs, side by side: the bits of those that run
    alone.
    """
    if device != "cuda":
        pytest.skip("needs --device cuda")
    import torch

    from twinfer.gpu.kernels.gemv import linear

    torch.manual_seed(0)
    x = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
    want = linear(x, weight, None)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for _ in range(500):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(linear(x, weight, None))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y in found)
