"""What the contracts of single ops (`test_ops_contracts.py`) do not say: how ops of one plan fit
together.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twinfer.ops import resolve
from twinfer.ops.implement import ROWS
from twinfer.ops.testing import run
from twinfer.tpu.compilation_cache import cpu_features


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_fused_add_rms_norm_is_add_and_rms_norm_bit_for_bit(framework, dtype):
    rng = np.random.default_rng(2)
    x, residual = (rng.normal(size=(9, 64)).astype(dtype) for _ in range(2))
    rest = {"weight": rng.normal(size=64).astype(dtype), "eps": 1e-6}
    normed, total = run(
        "fused_add_rms_norm", framework, None, {"x": x, "residual": residual, **rest}
    )
    (apart,) = run("add", framework, None, {"x": x, "residual": residual})
    (normed_apart,) = run("rms_norm", framework, None, {"x": apart, **rest})
    assert total.tobytes() == apart.tobytes()
    assert normed.tobytes() == normed_apart.tobytes()


@pytest.mark.parametrize(
    ("framework", "provider"), [("torch", None), ("torch", ROWS), ("jax", None), ("jax", ROWS)]
)
@pytest.mark.parametrize("biased", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nan_in_one_row_stays_in_it_whatever_a_row_holds(framework, provider, biased):
    """Units of some processors read 32 entries of a row at once, and on into the next one."""
    rng = np.random.default_rng(3)
    for k in (33, 63, 80, 96, 100, 176):
        weight = rng.normal(size=(24, k)).astype(ml_dtypes.bfloat16)
        bias = rng.normal(size=24).astype(ml_dtypes.bfloat16) if biased else None
        for row in (1, 31):
            x = rng.normal(size=(32, k)).astype(ml_dtypes.bfloat16)
            x[row] = np.nan
            (y,) = run("linear", framework, provider, {"x": x, "weight": weight, "bias": bias})
            assert np.isnan(y.astype(np.float32)).any(1).nonzero()[0].tolist() == [row], k
    if "amx_bf16" not in cpu_features():
        pytest.skip("no row reads on into the next one on this processor, whatever torch does")


def test_an_embedding_is_one_launch():
    """Each launch that is not one of ours costs a step two microseconds."""
    called = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    ids, table = torch.tensor([2, 0, 2], dtype=torch.int32), torch.randn(4, 8)
    embedding = resolve("torch")["embedding"].implementation.function
    with Seen():
        rows = embedding(ids, table)
    assert called == ["aten.index_select.default"]
    assert torch.equal(rows, table[[2, 0, 2]])
