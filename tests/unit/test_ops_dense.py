"""What the contracts of single ops (`test_ops_contracts.py`) do not say: how ops of one plan fit
together.
"""

import ml_dtypes
import numpy as np
import pytest

from twinfer.ops.testing import run


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
