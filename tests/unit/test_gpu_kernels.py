"""The Triton kernels: the contracts of their ops, and what those cases are too small for.

On a CPU they run in Triton's interpreter, which has to be chosen before Triton is imported: in a process of its own.
On a GPU (`--device cuda`) this file runs as it is, and `pytest -p twinfer.gpu.kernels tests/unit/test_ops_contracts.py
-k triton --device cuda` judges the contracts.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from twinfer.ops.cases import load_all
from twinfer.ops.cases.attention import paged
from twinfer.ops.cases.dense import _product
from twinfer.ops.cases.generators import generator, normal
from twinfer.ops.testing import DTYPES, TESTING, Judge, ci_cases, oracle, run

load_all()
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
HERE = Path(__file__)


@pytest.fixture
def kernels(device):
    """The room of the kernels, where they run in this process."""
    from twinfer.gpu.kernels import launch

    if not launch.supported() or (device == "cpu") != launch.INTERPRETED:
        pytest.skip("run by test_everything_in_the_interpreter, in a process of its own")
    import torch

    # As the worker pins it: where a kernel hands over to cuBLAS, that keeps to float32 too.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return launch


def test_everything_in_the_interpreter(device):
    if device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("only where there is no GPU, and not inside itself")
    files = [str(HERE), str(HERE.with_name("test_ops_contracts.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "twinfer.gpu.kernels", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([*command, "-k", "triton"], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def judge(op, arguments, device):
    verdict = Judge(op, arguments)(run(op, "torch", "triton", arguments, device))
    assert verdict.passed, verdict


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("window", [0, 300])
def test_triton_decode_in_parts(kernels, device, dtype, window):
    """Long requests beside short ones: parts are added up, by whichever program is the last."""
    arguments = paged(generator("parts"), dtype, [700, 3, 1100], [1, 1, 1], (4, 2), 64, 16, requests=4, tokens=4)
    setting = kernels.config("decode", dtype)
    before = dict(setting)
    try:
        setting.update(programs=64, chunk=128, parts=8)
        judge("paged_attention", arguments | {"window": window}, device)
        first, second = (run("paged_attention", "torch", "triton", arguments, device)[0] for _ in range(2))
        assert first.tobytes() == second.tobytes()
    finally:
        setting.update(before)
    assert all(not zeros.any() for zeros in kernels._counters.values())


@pytest.mark.parametrize(("heads", "size", "page"), [((7, 1), 128, 32), ((8, 2), 80, 16), ((4, 4), 256, 64)])
def test_triton_mixed_steps(kernels, device, heads, size, page):
    """Groups and head sizes of real models: decodes, chunks with a past, and whole prompts in one step."""
    arguments = paged(
        generator("mixed"),
        "bfloat16",
        [90, 1, 150, 70, 33],
        [1, 1, 40, 70, 2],
        heads,
        size,
        page,
        requests=8,
        tokens=128,
    )
    judge("paged_attention", arguments, device)
    judge("paged_attention", arguments | {"window": 37, "soft_cap": 20.0}, device)


@pytest.mark.parametrize("cache", ["int8", "float8_e4m3fn"])
def test_triton_narrow_caches(kernels, device, cache):
    """What is written is what the reference writes, bit for bit, and what is read is judged like any cache."""
    scales = {"k_scale": 0.03, "v_scale": 0.02}
    arguments = paged(generator("narrow"), "bfloat16", [33, 20, 50], [1, 1, 9], (4, 2), 64, 16)
    rng, shape = generator("narrow cache"), arguments["kv"].shape
    kv = np.clip(rng.normal(size=shape) * 30, -120, 120).astype(DTYPES.get(cache, np.int8))
    judge("paged_attention", arguments | {"kv": kv} | scales, device)
    k, v = normal(rng, "bfloat16", 9, 2, 64), normal(rng, "bfloat16", 9, 2, 64)
    k[0, 0, :3] = np.nan, 1e4, -1e4
    slots = np.array([3, 9, -1, 17, 0, 5, 40, 41, 42], np.int32)
    given = {"kv": kv, "k": k, "v": v, "slots": slots} | scales
    (want,), (got,) = oracle("write_kv", given), run("write_kv", "torch", "triton", given, device)
    assert got[:-1].tobytes() == want.astype(kv.dtype)[:-1].tobytes()


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17])
@pytest.mark.parametrize(("k", "n"), [(1024, 96), (1030, 35)])
def test_triton_products_of_few_rows(kernels, device, rows, k, n):
    arguments = _product(generator("few rows"), "bfloat16", rows, k, n)
    judge("linear", arguments, device)
    judge("linear", arguments | {"bias": None}, device)
    judge("logits", {"x": arguments["x"], "weight": arguments["weight"]}, device)


def test_triton_greedy_in_parts(kernels, device):
    """Ties between parts go to the lower id, and a row of nothing but -inf to the first."""
    logits = generator("greedy parts").normal(size=(4, 40000)).astype(np.float32)
    logits[0, [39999, 5000, 21000]] = 9.0
    logits[1] = -np.inf
    logits[2, 39999] = 9.0
    (got,) = run("greedy_sample", "torch", "triton", {"logits": logits}, device)
    np.testing.assert_array_equal(got, logits.argmax(-1))
    assert got[0] == 5000


def test_triton_operators_pass_opcheck(kernels, device):
    """As operators of their own, with the mutations that they declare and no others."""
    import torch

    from twinfer.gpu.kernels import PREFERRED
    from twinfer.ops import REGISTRY
    from twinfer.ops.bindings.torch import opaque
    from twinfer.ops.implement import IMPLEMENTATIONS
    from twinfer.ops.namespaces.torch_ import from_numpy

    for name in PREFERRED:
        opaque(REGISTRY[name], IMPLEMENTATIONS[name, "torch"]["triton"])
        case = min(ci_cases(TESTING[name], "float32"), key=lambda c: sum(np.size(v) for v in c.arguments.values()))
        given = REGISTRY[name].signature.bind(**case.arguments)
        given.apply_defaults()
        # opcheck takes NaN for a difference.
        arguments = [
            from_numpy(np.nan_to_num(v) if v.dtype.kind == "f" else v).to(device) if isinstance(v, np.ndarray) else v
            for v in given.arguments.values()
        ]
        operator = getattr(torch.ops.twinfer_impl, f"{name}_triton").default
        torch.library.opcheck(operator, tuple(arguments), test_utils=("test_schema", "test_faketensor"))
